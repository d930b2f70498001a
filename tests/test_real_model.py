"""The embedded default model itself: values, tokens and answers. Downloads it once."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fasteagle
from fasteagle.bench.hf import hf_model
from fasteagle.generate import Engine
from fasteagle.loading.checkpoint import load_model, open_checkpoint
from fasteagle.loading.entries import REGISTRY
from fasteagle.loading.make_drafter import Drafting
from fasteagle.loading.open import open_model
from fasteagle.loading.tokenizer import load_tokenizer
from fasteagle.options import DEFAULT_MODEL, DraftOptions, RuntimeOptions, SamplingParams
from fasteagle.prompts import read_questions
from helpers import fused_drafter, generated, logits_of, rest_slow

pytestmark = pytest.mark.real_model

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
FRANCE_TOKENS = """
1 9690 198 2683 359 253 5356 5646 11173 3365 3511 308 34519 28 7018 411 407 19712 8182 2
198 1 4093 198 1780 314 260 3575 282 4649 47 2 198 1 520 9531 198
"""
FRANCE_IDS = [int(token) for token in FRANCE_TOKENS.split()]


@pytest.fixture(scope="module")
def checkpoint(default_model_path):
    return open_checkpoint(default_model_path)


@pytest.fixture(scope="module")
def model(checkpoint):
    return load_model(checkpoint, dtype=torch.float32, device="cpu", max_seq_len=1024)


@pytest.fixture(scope="module")
def tokenizer(default_model_path):
    return load_tokenizer(default_model_path)


def test_the_file_is_the_pinned_one(default_model_path):
    digest = hashlib.sha256(default_model_path.read_bytes()).hexdigest()
    assert digest == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def test_registry_shape_is_the_files(checkpoint):
    import dataclasses

    known = REGISTRY[DEFAULT_MODEL].config
    assert dataclasses.replace(checkpoint.config, norm_eps=known.norm_eps) == known
    assert checkpoint.config.norm_eps == pytest.approx(known.norm_eps)


def test_prompt_tokens(tokenizer):
    text = tokenizer.render(FRANCE)
    assert tokenizer.encode(text) == FRANCE_IDS
    assert tokenizer.eos_ids == {2}
    # Digits are split one by one, blanks before them stay together.
    assert [tokenizer.decode([i]) for i in tokenizer.encode("  382")] == ["  ", "3", "8", "2"]


@torch.no_grad()
def test_logits_equal_transformers(checkpoint, model):
    ids = torch.tensor(FRANCE_IDS)
    expected = hf_model(checkpoint, torch.float32, "cpu")(ids[None]).logits[0]
    logits = logits_of(model, ids)
    assert (logits - expected).abs().max() < 2e-3  # logits reach 25
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


def test_answer_in_fp32(model, tokenizer):
    engine = Engine(model, 1024)
    cycles = engine.generate(FRANCE_IDS, SamplingParams(), 32, tokenizer.eos_ids)
    ids = [t for step in cycles for t in step]
    assert tokenizer.decode(ids) == "The capital of France is Paris."
    assert engine.stats.finish == "eos"


def test_the_readmes_question_from_the_command_line():
    done = subprocess.run(
        [sys.executable, "-m", "fasteagle", "chat", "-p", "What is the capital of Japan?"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "Tokyo" in done.stdout
    assert "draft head shipped with fasteagle" in done.stderr and "accepted" in done.stderr


PROMPTS = (
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Count from 1 to 20, one number a line.",
)


REQUESTS = [
    (SamplingParams(), PROMPTS[0]),
    (SamplingParams(), PROMPTS[2]),
    (SamplingParams(0.7, top_p=0.9, seed=1), PROMPTS[1]),
    (SamplingParams(1.0, min_p=0.05), PROMPTS[2]),
]


@pytest.mark.parametrize(("params", "text"), rest_slow(REQUESTS), ids=str)
def test_speculation_changes_no_token(checkpoint, model, tokenizer, params, text):
    """fp32 on the CPU: every drafter against plain."""
    from fasteagle.drafting.eagle import EagleDrafter
    from fasteagle.drafting.ngram import NgramDrafter
    from fasteagle.drafting.static_tree import StaticTreeDrafter
    from fasteagle.shapes import FusedShape, TreeShape

    engine = Engine(model, 1024)
    said: list[str] = []
    first = Drafting(DraftOptions()).drafter(DEFAULT_MODEL, engine, checkpoint, said.append)
    assert said[0].startswith("draft head shipped with fasteagle"), said
    head = first.head
    drafters = [first, EagleDrafter(head, TreeShape(6, 4, 20)), NgramDrafter()]
    drafters += [StaticTreeDrafter(head), fused_drafter(head, FusedShape(3, 3, 8, 8))]
    prompt = tokenizer.encode(tokenizer.render([{"role": "user", "content": text}]))

    def answer(drafter):
        engine.use(drafter)
        engine.restart()
        return generated(engine, 48, prompt, params, eos_ids=tokenizer.eos_ids)

    expected = answer(None)
    for drafter in drafters:
        assert answer(drafter) == expected, (drafter.name, drafter.shape)
        assert drafter in drafters[-2:] or engine.stats.tau > 1.1


def test_the_shipped_head_belongs_to_the_model(checkpoint):
    from importlib import resources

    from head_files import load_head

    folder = Path(str(resources.files("fasteagle") / "data" / "heads" / DEFAULT_MODEL))
    head, header = load_head(folder, checkpoint.config)
    assert header["target_fingerprint"] == checkpoint.fingerprint
    assert len(head.target_ids()) == header["draft_vocab_size"]
    assert (folder / "model.safetensors").stat().st_size < 16e6
    assert header["alphas"][0] > 0.5


# Its own 4 bits


def test_its_linears_repack_with_zero_error(checkpoint):
    from fasteagle.loading.names import is_block_linear

    linears = [name for name in checkpoint.names() if is_block_linear(name)]
    kinds = {checkpoint.inner.tensors[name].kind for name in linears}
    assert len(linears) == 7 * 30 and kinds == {"Q4_1"}
    for name in [*linears, "model.embed_tokens.weight"]:
        weight = checkpoint.packed(name)
        assert weight.bits == (4 if name in linears else 8) and weight.group_size == 32
        assert torch.equal(weight.dequantize(), checkpoint.load(name)), name


def test_int4_is_the_same_model_to_its_heads(checkpoint):
    from fasteagle.loading.quantize import with_scheme

    own = with_scheme(checkpoint, "int4")
    assert own.scheme.name == "int4-g32-own"
    assert own.fingerprint == checkpoint.fingerprint
    config = checkpoint.config
    linear = config.linear_params * 0.625
    table = config.vocab_size * config.dim
    assert own.scheme.model_bytes(config) == pytest.approx(linear + 3 * table)


def test_int4_says_what_fp32_says(checkpoint, model, tokenizer):
    """The bf16 kernels on the file's 4 bits against the dequantized weights in fp32."""
    from fasteagle.loading.quantize import with_scheme
    from fasteagle.loading.source import Linears
    from fasteagle.quant.linear import Int4Linear

    own = with_scheme(checkpoint, "int4")
    linears = Linears(own, "cpu", torch.bfloat16)
    quick = load_model(own, dtype=torch.bfloat16, device="cpu", max_seq_len=512, quantized=linears)
    linears = [module for module in quick.modules() if isinstance(module, Int4Linear)]
    n_bytes = sum(t.nbytes for linear in linears for t in linear.buffers())
    assert n_bytes / checkpoint.config.linear_params <= 0.63
    ids = tokenizer.encode(
        "The sky is blue because of Rayleigh scattering, and at sunset it is red."
    )
    with torch.no_grad():
        ours, exact = Engine(quick, 512).features(ids), Engine(model, 512).features(ids)
        said, meant = quick.lm_head(ours).argmax(-1), model.lm_head(exact).argmax(-1)
    assert (ours.float() - exact).norm() < 0.05 * exact.norm()
    assert (said == meant).float().mean() >= 0.8


def test_a_file_runs_in_its_own_bits_unless_asked():
    opened = open_model(DEFAULT_MODEL)
    for options, scheme in (
        (RuntimeOptions(), "int4-g32-own"),
        (RuntimeOptions(dtype="bf16"), None),
        (RuntimeOptions(quant="int8"), "int8"),
    ):
        prepared = opened.prepared(options)
        assert (prepared.scheme.name if prepared.scheme else None) == scheme


@pytest.mark.parametrize(
    "quant", [None, pytest.param("int8", marks=pytest.mark.slow)], ids=["int4", "int8"]
)
def test_quantized_speculation_changes_no_bit(quant):
    """Our CPU kernels: rows do not depend on the other rows of a pass."""
    opened = open_model(DEFAULT_MODEL)
    options = RuntimeOptions(max_seq_len=512, cpu_kernels="native", quant=quant)
    engine = opened.prepared(options).engine()
    turns = [{"role": "user", "content": read_questions()[0][0]}]
    prompt = opened.tokenizer.encode(opened.tokenizer.render(turns))
    answers = {}
    for name in ("none", "eagle", "eagle-static", "eagle-chain", "ngram", "fused"):
        drafting = Drafting(DraftOptions(drafter=name))
        engine.use(drafting.drafter(opened.name, engine, opened.checkpoint, lambda line: None))
        engine.restart()
        answers[name] = generated(engine, 20, prompt)
        assert answers[name] == answers["none"], name


def test_a_schema_at_int4_says_the_same_with_and_without_speculation():
    """Through the Python API, with the shipped head: tokens are equal, and the JSON fits."""
    pytest.importorskip("llguidance")
    name = {"type": "string", "maxLength": 20}
    schema = {"properties": {"name": name, "age": {"type": "integer", "minimum": 1, "maximum": 99}}}
    schema |= {"type": "object", "required": ["name", "age"], "additionalProperties": False}
    with fasteagle.load() as llm:
        question = "Give me a person as JSON."
        fast = llm.chat(question, json_schema=schema, max_new_tokens=80)
        plain = llm.chat(question, json_schema=schema, max_new_tokens=80, speculate=False)
    assert fast.tokens == plain.tokens and fast.finish == "eos"
    assert fast.stats.accepted > 0 and plain.stats.drafted == 0
    assert set(json.loads(fast.text)) == {"name", "age"}


@torch.no_grad()
def test_a_kv_cache_in_8_bits_hardly_moves_the_distributions():
    """Measured: a mean KL of 0.0007 on 2,048 tokens of our documentation."""
    opened = open_model(DEFAULT_MODEL, notify=lambda line: None)
    texts = " ".join(turn for question in read_questions() for turn in question)
    ids = opened.tokenizer.encode(texts)[:256]

    def log_probs(kv):
        options = RuntimeOptions(dtype="fp32", max_seq_len=256, kv=kv)
        engine = opened.prepared(options, lambda line: None).engine()
        return engine.model.lm_head(engine.features(ids)).float().log_softmax(-1)

    whole, small = log_probs("auto"), log_probs("int8")
    kl = (whole.exp() * (whole - small)).sum(-1)
    assert 1e-6 < float(kl.mean()) < 2e-3, kl.mean()
