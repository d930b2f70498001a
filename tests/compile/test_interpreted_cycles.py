"""Whole cycles by the kernels as compiled, in our interpreter of PTX, against plain decoding."""

from __future__ import annotations

import pytest
import torch

from fasteagle.decoding.cycle import Pieces
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.generate import Engine
from fasteagle.options import SamplingParams
from fasteagle.shapes import FusedShape, TreeShape
from helpers import Even, eagle3_of, fused_drafter, generated, random_head, rest_slow
from interleaved_models import KernelBackend, pack_lm_head_, packed_head, packed_target

PROMPT = [5, 6, 7, 8] * 15  # rows of a tree go on in a second block of keys
GREEDY, DRAWN = SamplingParams(), SamplingParams(0.8, seed=3)
TREE, FUSED = TreeShape(2, 3, 5), FusedShape(2, 2, 6, 4)
PASS = ("norm", "prefix", "finish")
DRAFT = ("chunk", "merge", "rerank", "relations", "draw", "last", "commit")
EXPERTS = ("score", "route", "expert")
# algorithm, shape, sampling, KV cache, target
CYCLES = [
    ("eagle1", TREE, GREEDY, "auto", "gqa"),
    ("eagle3", FUSED, DRAWN, "int8", "gqa"),
    ("eagle3", TREE, GREEDY, "auto", "shared expert"),
    ("eagle1", FUSED, DRAWN, "int8", "shared expert"),
]


def made(algorithm: str, shape, kv: str = "auto", name: str = "gqa"):
    """A backend over a tiny model, and a function that makes drafters for it."""
    target, _ = packed_target(name, n_layer=1, vocab_size=64)
    pack_lm_head_(target)
    head, _ = packed_head(random_head(target, eagle3=eagle3_of(algorithm, target.config)))
    drafting = fused_drafter if shape is FUSED else EagleDrafter
    return KernelBackend(target, kv), lambda: drafting(head, shape)


def answer(backend, params, n: int, drafter=None, processor=None):
    """Text, keys and values, and the engine."""
    engine = Engine(backend.target.model, 128, drafter=drafter, backend=backend)
    text = generated(engine, n, PROMPT, params, processor=processor)
    return text, engine.cache.rows[:, :, : len(engine.cached)].clone(), engine


@pytest.mark.parametrize(("algorithm", "shape", "params", "kv", "name"), rest_slow(CYCLES), ids=str)
def test_text_and_cache_are_those_of_plain_decoding(
    kernels_on_cpu, request, algorithm, shape, params, kv, name
):
    """Keys and values are equal bit for bit, under a grammar too."""
    if shape is FUSED or name != "gqa":  # one runs the products' kernels, too
        request.getfixturevalue("products_by_torch")
    backend, drafter = made(algorithm, shape, kv, name)
    processor = Even() if algorithm == "eagle3" and params is DRAWN else None
    text, cache, _ = answer(backend, params, 6, processor=processor)
    result, other_cache, engine = answer(backend, params, 6, drafter(), processor)
    assert result == text and torch.equal(other_cache, cache)
    assert processor is None or not any(token % 2 for token in text)
    assert engine.stats.drafted >= 5 and engine.stats.path_lengths
    launched = PASS + DRAFT + (EXPERTS if backend.target.config.moe is not None else ())
    launched += ("match", "look_up", "fuse") if shape is FUSED else ()
    assert kernels_on_cpu.launches.keys() >= {f"{kernel}_kernel" for kernel in launched}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "params", "kv"), [("eagle1", GREEDY, "auto"), ("eagle3", DRAWN, "int8")], ids=str
)
@pytest.mark.usefixtures("products_by_torch")
def test_a_second_turn_is_that_of_plain_decoding(kernels_on_cpu, algorithm, params, kv):
    """Text and cache, bit for bit, with prompts cut as on CUDA: one without a mask, then a tree."""
    backend, drafter = made(algorithm, TREE, kv)

    def talk(drafter=None):
        engine = Engine(backend.target.model, 128, drafter=drafter, backend=backend)
        engine.on_cpu = False
        text = []
        for turn in (PROMPT + PROMPT[:10], [9, 8, 7]):
            text += turn
            text += generated(engine, 3, text, params)
        assert engine.stats.cached_tokens > 70
        return text, engine.cache.rows[:, :, : len(engine.cached)].clone()

    text, cache = talk()
    assert kernels_on_cpu.launches["rope_kernel"] == 1, "the first turn; the second is a tree"
    result, other_cache = talk(drafter())
    assert result == text and torch.equal(other_cache, cache)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "shape", "params"), [("eagle1", TREE, DRAWN), ("eagle3", FUSED, GREEDY)], ids=str
)
@pytest.mark.usefixtures("products_by_torch")
def test_compiled_pieces_do_what_eager_ones_do(
    kernels_on_cpu, monkeypatch, algorithm, shape, params
):
    """The same drafts are made and accepted, and keys and values are equal bit for bit."""
    from ptx import inductor

    backend, drafter = made(algorithm, shape)
    text, cache, eager = answer(backend, params, 4, drafter())
    compiled = [inductor.compiled(piece) for piece in backend.pieces]
    monkeypatch.setattr(KernelBackend, "pieces", Pieces(*compiled))
    result, other_cache, engine = answer(backend, params, 4, drafter())
    assert result == text and torch.equal(other_cache, cache)
    assert engine.stats.path_lengths == eager.stats.path_lengths
    assert engine.stats.drafted == eager.stats.drafted > 0
