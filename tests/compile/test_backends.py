"""Every backend over the same cases: drafting changes no token, whatever runs the parts.

Those that take long have more in `test_compiled_cycles.py` and `test_interpreted_cycles.py`.
"""

from __future__ import annotations

import functools

import pytest
import torch

from fasteagle.compile.cpu_backend import CpuBackend
from fasteagle.config import MoEConfig
from fasteagle.decoding.backend import Backend
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.drafting.ngram import NgramDrafter
from fasteagle.drafting.static_tree import StaticTreeDrafter
from fasteagle.generate import Engine
from fasteagle.model import Target, Transformer
from fasteagle.options import SamplingParams
from fasteagle.quant import cpu_build
from fasteagle.shapes import FusedShape, TreeShape
from helpers import (
    Even,
    eagle3_of,
    fused_drafter,
    generated,
    random_head,
    random_target,
    tiny_config,
)
from native_models import MIXTRAL, SHAPE, native_head, native_target

BACKENDS = [
    "eager",
    "cpu",
    "eager experts",
    "cpu int4 experts",
    "cpu int8 experts",
    "cpu 8-bit cache",
]
DRAWN = [SamplingParams(), SamplingParams(0.8, seed=3)]
TREE, FUSED = TreeShape(2, 2, 4), FusedShape(2, 2, 8, 6)
DRAFTERS = {
    "eagle1 tree": ("eagle1", lambda head: EagleDrafter(head, TREE)),
    "eagle3 tree": ("eagle3", lambda head: EagleDrafter(head, TREE)),
    "eagle1 chain": ("eagle1", lambda head: EagleDrafter(head, TreeShape(3, 1, 3))),
    "static tree": ("eagle1", lambda head: StaticTreeDrafter(head, ((0,), (1,), (0, 0)))),
    "fused": ("eagle3", lambda head: fused_drafter(head, FUSED)),
    "ngram": (None, lambda head: NgramDrafter(4)),
}


@functools.cache
def model_of(name: str) -> Transformer:
    """The tiny model that a backend runs; nothing writes into it."""
    if name.startswith("cpu"):
        cpu_build.load()
        config = tiny_config(**(MIXTRAL if name.endswith("experts") else SHAPE))
        dtype = torch.bfloat16 if "cache" in name else torch.float32
        return native_target(config, bits=8 if "int8" in name else 4, dtype=dtype)
    return random_target(tiny_config(moe=MoEConfig(6, 2, 24) if "experts" in name else None))


def made(name: str, algorithm: str | None):
    """A backend by name over a tiny model, and a draft head for it."""
    model = model_of(name)
    kv = "int8" if "cache" in name else "auto"
    backend = CpuBackend(model, kv) if name.startswith("cpu") else Backend(Target(model))
    if algorithm is None:
        return backend, None
    if name.startswith("cpu"):
        return backend, native_head(model, algorithm)
    return backend, random_head(model, eagle3=eagle3_of(algorithm, model.config))


def answer(backend, drafter, params, n, processor=None):
    """The text, and the engine that wrote it."""
    engine = Engine(backend.target.model, 512, drafter=drafter, backend=backend)
    return generated(engine, n, params=params, processor=processor), engine


@functools.cache
def plain(name: str, params: SamplingParams) -> tuple[list[int], list[int]]:
    """Return the answers of plain decoding, without a grammar and with one."""
    backend, _ = made(name, None)
    limited, _ = answer(backend, None, params, 6, processor=Even())
    return answer(backend, None, params, 30)[0], limited


CASES = [  # greedy and drawn in turn
    (name, DRAWN[(i + j) % 2], drafting)
    for i, name in enumerate(BACKENDS)
    for j, drafting in enumerate(DRAFTERS)
]


@pytest.mark.parametrize(("name", "params", "drafting"), CASES, ids=str)
def test_drafting_changes_no_token(name, params, drafting):
    algorithm, make = DRAFTERS[drafting]
    backend, head = made(name, algorithm)
    drafter, (expected, limited) = make(head), plain(name, params)
    text, engine = answer(backend, drafter, params, 30)
    assert text == expected
    assert name.startswith(backend.name) and backend.describe().startswith(
        f"backend {backend.name}"
    )
    assert engine.stats.drafted > 0 or drafting == "ngram"
    assert not any(token % 2 for token in limited)
    assert answer(backend, drafter, params, 6, processor=Even())[0] == limited


@pytest.mark.parametrize("name", BACKENDS)
def test_a_long_prompt(name):
    """In parts, after which drafting and the next answer go on."""
    backend, head = made(name, "eagle1")
    prompt = [5, 6, 7, 8] * 90
    engines = [
        Engine(backend.target.model, 512, drafter=drafter, backend=backend)
        for drafter in (None, EagleDrafter(head, TREE))
    ]
    for _ in range(2):
        expected, text = (generated(engine, 20, prompt, DRAWN[0]) for engine in engines)
        assert text == expected
        prompt = [*prompt, *expected, 9]


def test_all_of_the_core_is_eager():
    backend, _ = made("eager", None)
    assert backend.describe() == "backend eager" and torch.is_grad_enabled()
