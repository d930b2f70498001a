"""Tiny random models, heads, files and texts that tests of several modules use."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from families import TINY_SHAPE, TINY_VOCAB, hf_class
from fasteagle.batch import Batch
from fasteagle.cli import main as cli
from fasteagle.compile.cycles import CycleCompiler
from fasteagle.config import Eagle3Config, HeadConfig, ModelConfig
from fasteagle.decoding.backend import Backend
from fasteagle.drafting.base import Tuning
from fasteagle.drafting.costs import Costs
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.drafting.ladder import DEFAULT_RANKS
from fasteagle.drafting.lookup import Lookup
from fasteagle.generate import Engine
from fasteagle.loading.heads.find import named_head
from fasteagle.loading.make_drafter import Drafting
from fasteagle.model import EagleHead, KVCache, Output, Target, Transformer, causal_mask, make_head
from fasteagle.options import DraftOptions, SamplingParams
from fasteagle.sampling import SamplingMode, SamplingTensors
from fasteagle.shapes import AnyShape, TreeShape
from fasteagle.state import Committed, CycleSpec, DecodeState
from fasteagle.tree import DraftTree, Proposal
from replaying import ReplayingBackend

SCRIPTS = Path(__file__).parent.parent / "scripts"
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
THINKING_TEMPLATE = (  # thoughts of earlier answers are dropped, and the prompt opens the next one
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'].split('</think>')[-1] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '\n</think>\n\n' }}{% endif %}"
)
PROMPT, GREEDY = [5, 9, 20, 17, 33, 8, 12, 44], SamplingParams()
DRAWN = [GREEDY, SamplingParams(0.8, top_p=0.9, seed=7)]
DRAWN += [SamplingParams(0.9, repetition_penalty=1.2, seed=6)]
SPECIALS = ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]


# Hugging Face folders


def make_hf_model(family: str, **overrides):
    """A random transformers model; biases and norms random too, so that none can be forgotten."""
    config_class, model_class, extra = hf_class(family)
    torch.manual_seed(7)
    config = config_class(**{**TINY_SHAPE, **extra, **overrides})
    config._attn_implementation = "eager"
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or name.endswith("bias"):
                mean = 1.0 if "norm" in name else 0.0
                parameter.copy_(mean + 0.2 * torch.randn_like(parameter))
    return model


def save_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer with a chat template, in Hugging Face files."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def save_tiny(folder: Path, family: str = "llama3", **overrides) -> Path:
    """A complete Hugging Face folder of a tiny random model."""
    model = make_hf_model(family, **overrides)
    model.generation_config.eos_token_id = TINY_VOCAB - 1
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


class Dequantized:
    """A quantized checkpoint seen as an ordinary one."""

    def __init__(self, checkpoint):
        self.config, self.names = checkpoint.config, checkpoint.names
        self.shape, self.load, self.start = checkpoint.shape, checkpoint.load, checkpoint.start
        self.scheme = None


def edit_json(path: Path, **changes) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, **changes}))


def change_tensors(folder: Path, change) -> None:
    """Do something with the tensors of a folder's one file."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def raising(error):
    def fails(*args, **kwargs):
        raise error

    return fails


def write_questions(path: Path, *questions: list[str]) -> Path:
    path.write_text("".join(json.dumps({"turns": turns}) + "\n" for turns in questions))
    return path


# Our own classes


def drafting_of(options: DraftOptions, target: ModelConfig, **parts) -> Drafting:
    """Parts of a drafter, with the draft head that the options name."""
    if options.head is not None:
        parts["head"] = named_head(options.head).loaded(target, options.tap_layers)
    return Drafting(options, **parts)


def tiny_config(**changes) -> ModelConfig:
    shape = dict(dim=32, n_layer=2, n_head=4, n_kv_head=2, head_dim=8, ffn_dim=48)
    return ModelConfig(**{**shape, "vocab_size": 60, "max_seq_len": 256, **changes})


def random_target(config: ModelConfig, seed=0) -> Transformer:
    torch.manual_seed(seed)
    model = Transformer(config)
    for name, p in model.named_parameters():
        p.requires_grad_(False)
        if p.ndim == 2 or name.endswith("choice_bias"):
            p.normal_(0, 0.3)
    model.init_rope(512, "cpu")
    return model.eval()


def eagle3_of(algorithm: str, config: ModelConfig, **changes) -> Eagle3Config | None:
    """Return settings to read features before the first, the last and after all blocks."""
    L = config.n_layer
    if algorithm != "eagle3":
        return None
    aux_layers = tuple(sorted({0, L - 1, L}))
    return Eagle3Config(aux_layers=aux_layers, target_dim=config.dim, **changes)


def random_head(
    target: Transformer, draft_ids=None, seed=1, eagle3=None, fc_bias=True, mtp=False, **changes
) -> EagleHead:
    torch.manual_seed(seed)
    vocab_size = target.config.vocab_size
    size = vocab_size if draft_ids is None else len(draft_ids)
    dense = {"n_layer": 1, "moe": None, "dense_blocks": (), "qk_norm_whole": False}
    block = ModelConfig(**{**vars(target.config), **dense, **changes})
    head = make_head(HeadConfig(block, size, fc_bias, eagle3, mtp))
    with torch.no_grad():
        for p in head.parameters():
            if p.ndim == 2:
                p.normal_(0, 0.3)
        if draft_ids is not None:
            head.d2t.copy_(draft_ids - torch.arange(size))
    head.requires_grad_(False)
    head.borrow(target, 512)
    return head.eval()


@torch.no_grad()
def logits_of(model: Transformer | Target, tokens: torch.Tensor) -> torch.Tensor:
    """The logits [T, V] of a text, in one pass over an empty cache."""
    target = model if isinstance(model, Target) else Target(model)
    rows, cache = torch.arange(len(tokens)), target.new_cache(len(tokens))
    mask = causal_mask(0, len(tokens), cache.n_slots, model.config.sliding_window, "cpu")
    return model(tokens, rows, rows, mask, cache).logits


# The tuner

ROWS = {1: 10.0, 2: 10.5, 3: 11.0, 4: 12.0, 6: 16.0, 8: 22.0, 16: 37.0, 32: 70.0}


def costs(passes=None, first=1.0, level=0.8, rest=1.0):
    widths = (1, 2, 3, 4, 6, 8)
    return Costs(
        passes or ROWS, dict.fromkeys(widths, first), dict.fromkeys(widths, level), rest, rest / 2
    )


# Training


def write_random_text(path: Path, n: int, length: int) -> Path:
    """`n` conversations of `length` random token ids each, as training text."""
    g = torch.Generator().manual_seed(0)
    with path.open("w") as file:
        for _ in range(n):
            ids = torch.randint(0, 256, (length,), generator=g).tolist()
            file.write(json.dumps({"ids": ids, "prompt_len": 8, "T": 0.0}) + "\n")
    return path


# Conversations


class Letters:
    """A tokenizer whose tokens are letters of their own: every text it decodes encodes back."""

    eos_ids: frozenset[int] = frozenset()
    knows_thoughts = False

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        return [(ord(c) - 0x4E00 if ord(c) >= 0x4E00 else ord(c)) % self.vocab_size for c in text]

    def encode_rest(self, text: str, start: int) -> list[int]:
        return self.encode(text[start:])

    def decode(self, ids) -> str:
        return "".join(chr(0x4E00 + i) for i in ids)

    raw = decode

    def render(self, turns, think=None) -> str:
        return "".join(turn["content"] for turn in turns)


# Commands and processes


def invoke(*args, main=cli.main, **more):
    """The result of a command in this process."""
    return CliRunner().invoke(main, [str(a) for a in args], **more)


def rest_slow(cases: list, n: int = 1) -> list:
    """Cases of which all but the first n run with the slow tests."""
    tuples = [case if isinstance(case, tuple) else (case,) for case in cases]
    return cases[:n] + [pytest.param(*case, marks=pytest.mark.slow) for case in tuples[n:]]


def output_of(code: str, **options) -> str:
    """Return what indented `code` prints in a process of its own, which must succeed."""
    command = [sys.executable, "-c", textwrap.dedent(code)]
    run = subprocess.run(command, capture_output=True, text=True, **options)
    assert run.returncode == 0, run.stderr
    return run.stdout


# Drafters by themselves


def drawing(params: SamplingParams, vocab_size: int) -> tuple[SamplingMode, SamplingTensors]:
    """Return what functions that draw take in place of `params`."""
    return SamplingMode.of(params, vocab_size), SamplingTensors.of(params)


def empty_state(target: Transformer, max_seq_len: int = 512) -> DecodeState:
    cache = KVCache(target.config, max_seq_len, torch.float32, "cpu")
    return DecodeState(target, cache, max_seq_len)


def spec_of(shape: AnyShape, width: int = 1, kind: SamplingMode | None = None) -> CycleSpec:
    return CycleSpec(shape, width, kind or SamplingMode())


def pairs(tokens, features, count: int | None = None) -> Committed:
    """The first `count` rows are real, all of them if it is None."""
    n = len(tokens) if count is None else count
    return Committed(torch.as_tensor(tokens), features, torch.tensor([n]))


def fused_drafter(head, shape, lookup: Lookup | None = None) -> EagleDrafter:
    """A drafter of a draft head's tree and looked-up chains."""
    return EagleDrafter(head, shape, lookup=lookup or Lookup())


def propose(drafter, state: DecodeState, new: Committed, root: int) -> DraftTree:
    """The tree under `root` after the drafter has seen `new` after what `state` holds."""
    state.seq_len.add_(int(new.count))
    state.root.fill_(root)
    drafter.reserve(int(state.seq_len) + len(new.tokens))
    prediction = drafter.extend(new, state.seq_len)
    return drafter.propose(prediction, state, spec_of(drafter.shape))


@torch.no_grad()
def assert_true_pairs(engine: Engine, text: list[int], missing: int) -> None:
    """The draft head's cache is as if it had been shown the whole text, but `missing`, at once.

    What is still kept for it is shown to it before.
    """
    engine._show_kept(text)
    n, head = engine.shown, engine.drafter.head
    assert n > len(text) - missing
    fresh = EagleDrafter(head, TreeShape(3, 3, 8))
    fresh.reserve(n)
    features = Engine(engine.model, 512).features(text, fresh.aux_layers)
    fresh.extend(pairs(text[1 : n + 1], features[:n, : head.config.feature_dim]), torch.tensor(n))
    for a, b in zip(fresh.cache.layers[0], engine.drafter.cache.layers[0], strict=True):
        assert torch.allclose(a[:, :n], b[:, :n], atol=1e-4)


def verify_rows(engine: Engine, tokens, parents) -> Output:
    """One pass over a tree after what the engine holds; a parent of -1 is the root's own."""
    device, state = engine.device, engine.state
    rows = torch.tensor(list(tokens), device=device)
    above = torch.tensor(list(parents), device=device).clamp(min=0)
    tree = DraftTree(rows, above, torch.ones_like(rows).bool())
    engine.reserve(len(engine.cached) + len(rows))
    state.seq_len.fill_(len(engine.cached))
    return engine.runner.usual.verify(state, engine.target, Proposal.of(tree))


# Engines


def allowed(mask, vocab_size: int, tokens=(0,), parents=(0,)) -> torch.Tensor:
    """Return whether each token may follow each row of a tree [T, V], by a grammar."""
    rows = list(tokens), list(parents), [True] * len(tokens)
    return mask.apply(torch.zeros(len(tokens), vocab_size), *rows).isfinite()


class Even:
    """A grammar that allows tokens of even ids alone."""

    def __call__(self, logits, tree):
        return logits.masked_fill((torch.arange(logits.shape[1]) % 2).bool(), float("-inf"))

    def accept(self, tokens):
        pass


def captured_engine(
    target: Transformer | Target, max_seq_len: int, ahead: int = 1, advice=None
) -> Engine:
    """An engine of a device that replays."""
    target = target if isinstance(target, Target) else Target(target)
    engine = Engine(target.model, max_seq_len, backend=ReplayingBackend(target, advice))
    engine.runner.ahead = ahead
    return engine


def compile_cycles(engine: Engine, kind: SamplingMode | None = None) -> None:
    compiler = CycleCompiler(engine, kind)
    compiler.compile()
    compiler.apply()


def tuned_engine(target: Transformer, folder: Path, shape=TreeShape(3, 3, 8), made=Engine):  # noqa: B008
    """An engine with a draft head whose costs are kept in `folder`."""
    engine = made(target, 512)
    drafter = EagleDrafter(random_head(target), shape)
    drafter.tuning = Tuning(folder / "costs.json", DEFAULT_RANKS)
    engine.use(drafter)
    return engine


def generated(
    engine: Engine, n: int = 60, prompt=PROMPT, params: SamplingParams = GREEDY, **more
) -> list[int]:
    """A whole answer; `more` as `Engine.generate` takes it."""
    return [token for new in engine.generate(prompt, params, n, **more) for token in new]


def finished(several: Batch) -> dict[int, list[int]]:
    """The tokens that texts under way have until all have ended; an error of one is raised."""
    texts: dict[int, list[int]] = {key: [] for key in several.running}
    while several.running:
        for key, new in several.step():
            if isinstance(new, Exception):
                raise new
            texts[key] += new or []
    return texts


def eager_engine(target: Target, max_seq_len: int, drafter=None) -> Engine:
    """An engine that runs a target's own operations eagerly."""
    return Engine(target.model, max_seq_len, drafter=drafter, backend=Backend(target))
