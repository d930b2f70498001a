"""Every backend over the same cases: drafting changes no token, whatever runs the parts.

`cuda` runs its kernels as compiled, in our interpreter of PTX.
"""

from __future__ import annotations

import functools

import pytest
import torch

from fasteagle.compile.blocks import compile_now, missing_compiler
from fasteagle.compile.cpu_backend import CpuBackend
from fasteagle.config import MoEConfig
from fasteagle.decoding.runner import Backend
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.drafting.fused import FusedDrafter
from fasteagle.drafting.ngram import NgramDrafter
from fasteagle.drafting.static_tree import StaticTreeDrafter
from fasteagle.generate import Engine
from fasteagle.loading.source import quantize_head_
from fasteagle.model import Target, Transformer
from fasteagle.options import SamplingParams
from fasteagle.quant import cpu_build
from fasteagle.quant.scheme import Scheme
from fasteagle.shapes import FusedShape, TreeShape
from helpers import Even, eagle3_of, random_head, random_target, tiny_config
from interleaved_models import KernelBackend, packed_head, packed_target
from native_models import MIXTRAL, SHAPE, native_target

BACKENDS = [
    "eager",
    "cpu",
    "eager experts",
    "cpu int4 experts",
    "cpu int8 experts",
    pytest.param(
        "compiled",
        marks=[
            pytest.mark.slow,
            pytest.mark.skipif(missing_compiler() is not None, reason="no g++"),
        ],
    ),
    pytest.param("cuda", marks=pytest.mark.slow),
]
DRAWN = [SamplingParams(), SamplingParams(0.8, seed=3)]
# A token takes seconds in the interpreter, and compiling half a minute a case:
# test_interpreted_cycles.py and test_compiled_cycles.py, whose shapes these are, have more of them.
TREE, FUSED = TreeShape(2, 2, 4), FusedShape(2, 2, 8, 6)
FEW_CASES = {"cuda": [("eagle3 tree", DRAWN[1])], "compiled": [("eagle3 tree", DRAWN[1])]}
DRAFTERS = {
    "eagle1 tree": ("eagle1", lambda head: EagleDrafter(head, TREE, 512)),
    "eagle3 tree": ("eagle3", lambda head: EagleDrafter(head, TREE, 512)),
    "eagle1 chain": ("eagle1", lambda head: EagleDrafter(head, TreeShape(3, 1, 3), 512)),
    "static tree": ("eagle1", lambda head: StaticTreeDrafter(head, 512, ((0,), (1,), (0, 0)))),
    "fused": ("eagle3", lambda head: FusedDrafter(head, FUSED, 512)),
    "ngram": (None, lambda head: NgramDrafter(4)),
}


@functools.cache
def model_of(name: str) -> Transformer:
    """The tiny model that a backend runs; nothing writes into it."""
    if name.startswith("cpu"):
        cpu_build.load()
        config = tiny_config(**(MIXTRAL if name.endswith("experts") else SHAPE))
        return native_target(config, bits=8 if "int8" in name else 4)
    if name == "cuda":
        return packed_target("gqa", n_layer=1, vocab_size=64)[0]
    return random_target(tiny_config(moe=MoEConfig(6, 2, 24) if "experts" in name else None))


def made(name: str, algorithm: str | None):
    """A backend by name over a tiny model, and a draft head for it."""
    model = model_of(name)
    if name.startswith("cpu"):
        backend: Backend = CpuBackend(model)
    else:
        backend = KernelBackend(model) if name == "cuda" else Backend(Target(model))
    if algorithm is None:
        return backend, None
    head = random_head(model, eagle3=eagle3_of(algorithm, model.config), rope_base=10000.0)
    if name.startswith("cpu"):
        quantize_head_(head, Scheme(8, head_bits=8), native=True)
    if name == "cuda":
        head, _ = packed_head(head)
        head.borrow(model, 512)
    return backend, head


def engine_of(backend: Backend, name: str, params: SamplingParams, drafter=None) -> Engine:
    engine = Engine(backend.target.model, 512, drafter=drafter, backend=backend)
    assert name != "compiled" or compile_now(engine, params)
    return engine


def answer(engine, params, n, prompt=(5, 6, 7, 8), processor=None) -> list[int]:
    run = engine.generate(list(prompt), params, n, processor=processor)
    return [t for new in run for t in new]


@functools.cache
def plain(name: str, params: SamplingParams, n: int, n_limited: int) -> tuple[list[int], list[int]]:
    """What plain decoding answers, without a grammar and with one."""
    engine = engine_of(made(name, None)[0], name, params)
    return answer(engine, params, n), answer(engine, params, n_limited, processor=Even())


@pytest.fixture(params=BACKENDS)
def name(request):
    if request.param == "cuda":
        request.getfixturevalue("kernels_on_cpu")
    return request.param


@pytest.mark.parametrize("params", DRAWN, ids=str)
@pytest.mark.parametrize("drafting", DRAFTERS)
def test_drafting_changes_no_token(name, params, drafting):
    if (drafting, params) not in FEW_CASES.get(name, [(drafting, params)]):
        pytest.skip("takes long; test_interpreted_cycles.py and test_compiled_cycles.py have more")
    algorithm, make = DRAFTERS[drafting]
    backend, head = made(name, algorithm)
    n, n_limited = (5, 2) if name == "cuda" else (30, 6)
    expected, limited = plain(name, params, n, n_limited)
    engine = engine_of(backend, name, params, make(head))
    assert answer(engine, params, n) == expected
    assert name.startswith(backend.name) and backend.describe().startswith(
        f"backend {backend.name}"
    )
    assert engine.stats.drafted > 0 or drafting == "ngram"
    assert not any(token % 2 for token in limited)
    assert answer(engine, params, n_limited, processor=Even()) == limited


def test_a_long_prompt(name):
    """In parts, behind which drafting and the next answer go on."""
    backend, head = made(name, "eagle1")
    n, prompt = (2, [5, 6, 7, 8] * 17) if name == "cuda" else (20, [5, 6, 7, 8] * 90)
    plain = engine_of(backend, name, DRAWN[0])
    engine = engine_of(backend, name, DRAWN[0], EagleDrafter(head, TREE, 512))
    for _ in range(2):
        expected = answer(plain, DRAWN[0], n, prompt)
        assert answer(engine, DRAWN[0], n, prompt) == expected
        prompt = [*prompt, *expected, 9]


def test_all_of_the_core_is_eager():
    backend, _ = made("eager", None)
    assert backend.describe() == "backend eager" and torch.is_grad_enabled()
