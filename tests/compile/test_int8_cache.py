"""The KV cache in 8 bits: its rows, engines that use it, and what it costs."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fasteagle.answering.prefix_cache import PrefixCache
from fasteagle.batch import Batch
from fasteagle.compile import int8_cache, tree_attention
from fasteagle.compile.blocks import compile_now, missing_compiler
from fasteagle.compile.int8_cache import SPARE, cache_bytes, core_target, dense_rows, quantized_rows
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.errors import FasteagleError
from fasteagle.generate import Engine
from fasteagle.loading.checkpoint import required_bytes
from fasteagle.loading.open import open_model
from fasteagle.loading.registry import preset
from fasteagle.options import RuntimeOptions, SamplingParams
from fasteagle.shapes import TreeShape
from helpers import (
    GREEDY,
    PROMPT,
    captured_engine,
    eager_engine,
    finished,
    generated,
    random_head,
    random_target,
    tiny_config,
)


@pytest.fixture(params=["mask", "view"])
def target(request):
    """Reads its cache through masks, as on a CPU, or as the kernels do."""
    model = random_target(tiny_config())
    ops = int8_cache.OPS
    if request.param == "view":
        ops = tree_attention.OPS._replace(write=ops.write)
    return dataclasses.replace(core_target(model, "int8"), ops=ops)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_come_back_within_half_a_step(dtype):
    rows = torch.randn(3, 40, 24, dtype=dtype) * torch.logspace(-4, 3, 40, dtype=dtype)[:, None]
    rows[1, 7] = 0
    result = quantized_rows(rows)
    assert result.shape == (3, 40, 24 + SPARE) and result.dtype == torch.int8
    error = (dense_rows(result, torch.float32) - rows.float()).abs()
    assert (error <= rows.float().abs().amax(-1, keepdim=True) / 254 * 1.001).all()
    assert (dense_rows(result, torch.float32)[1, 7] == 0).all()
    assert quantized_rows(torch.full((2, 8), float("nan")))[0, 8:12].view(torch.float32).isnan()


def test_the_largest_value_of_a_row_is_exact_to_its_scale():
    rows = torch.tensor([[3.0, -12.7, 0.05, 0.0]])
    assert dense_rows(rows, torch.bfloat16) is rows, "of a cache that is not int8"
    result = dense_rows(quantized_rows(rows), torch.float32)
    torch.testing.assert_close(result, torch.tensor([[3.0, -12.7, 0.0, 0.0]]))  # steps of 0.1


def test_features_are_close_to_those_of_a_whole_cache(target):
    exact = Engine(random_target(tiny_config()), 256).features(list(range(40)))
    result = eager_engine(target, 256).features(list(range(40)))
    error = (result - exact).norm() / exact.norm()
    assert 1e-5 < error < 0.03, error


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(0.8, seed=3)], ids=str)
def test_drafting_changes_no_token(target, params):
    how = 30, PROMPT * 5, params  # into a second block of keys
    expected = generated(eager_engine(target, 256), *how)
    drafter = EagleDrafter(random_head(target.model), TreeShape(3, 3, 8))
    assert generated(eager_engine(target, 256, drafter=drafter), *how) == expected
    engine = captured_engine(target, 256)
    engine.use(drafter)
    assert generated(engine, *how) == expected


def test_engine_and_draft_head_have_caches_of_their_own_kind(target):
    engine = eager_engine(target, 256, drafter=EagleDrafter(random_head(target.model), TreeShape()))
    assert engine.cache.rows.dtype == torch.int8
    assert engine.cache.rows.shape[-1] == target.config.head_dim + SPARE
    assert engine.drafter.cache.rows.dtype == torch.float32


def test_a_stored_conversation_comes_back(target):
    engine, conversations = eager_engine(target, 512), PrefixCache(2**20)
    long = PROMPT * 20
    expected = generated(engine, prompt=long)
    conversations.turn_to(engine, [1, 2, 3])
    generated(engine, prompt=[1, 2, 3])
    conversations.turn_to(engine, long)
    assert engine.cached[: len(long)] == long
    assert generated(engine, prompt=long) == expected


def test_several_texts_at_once(target):
    engine = eager_engine(target, 256)
    several = Batch(engine, 2)
    for key, prompt in enumerate([PROMPT, PROMPT[1:]]):
        several.begin(
            key, prompt, 64, lambda engine, prompt=prompt: engine.generate(prompt, GREEDY, 12)
        )
    answers = finished(several)
    assert answers[0] == generated(eager_engine(target, 256), 12)
    assert answers[1] == generated(eager_engine(target, 256), 12, prompt=PROMPT[1:])


@pytest.mark.slow
@pytest.mark.skipif(missing_compiler() is not None, reason="no C++ compiler")
def test_compiled_code_reads_and_writes_it():
    """Greedily, with a head of EAGLE-1; `test_compiled_cycles.py` draws, with one of EAGLE-3."""
    model = random_target(tiny_config())
    target, head = core_target(model, "int8"), random_head(model)
    engine, eager = (
        eager_engine(target, 512, drafter=EagleDrafter(head, TreeShape(2, 2, 4))) for _ in range(2)
    )
    assert compile_now(engine)
    with torch.compiler.set_stance("fail_on_recompile"):
        for prompt in (PROMPT * 45, PROMPT):
            assert generated(engine, prompt=prompt) == generated(eager, prompt=prompt)
            assert engine.stats.path_lengths == eager.stats.path_lengths


def test_the_option(tiny_dir):
    options = RuntimeOptions(dtype="fp32", max_seq_len=128, kv="int8")
    engine = open_model(str(tiny_dir)).loaded(options).engine
    assert engine.cache.rows.dtype == torch.int8 and len(generated(engine, 20)) == 20
    quantized = dataclasses.replace(options, dtype="auto", quant="int8")
    engine = open_model(str(tiny_dir)).loaded(quantized).engine
    assert engine.cache.rows.dtype == torch.int8 and len(generated(engine, 20)) == 20
    with pytest.raises(FasteagleError, match="kv 'int4' is unknown: use auto or int8"):
        RuntimeOptions(kv="int4")


def test_bytes_are_those_of_the_cache(target):
    """What is promised before loading is what is allocated."""
    config = target.config
    rows = target.new_cache(1024).rows
    assert cache_bytes(config, 1024, 4, "int8") == rows.nbytes
    assert cache_bytes(config, 1024, 4, "auto") == config.kv_bytes(1024, 4)
    llama = preset("llama2-7b")
    whole, small = (required_bytes(llama, torch.bfloat16, 4096, kv)[1] for kv in ("auto", "int8"))
    assert small / whole == pytest.approx(144 / 256)
