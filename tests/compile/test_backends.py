"""Every backend over the same cases: drafting changes no token, whatever runs the parts.

`cuda` runs its kernels as compiled, in our interpreter of PTX.
"""

from __future__ import annotations

import pytest
import torch

from fasteagle.compile.blocks import compile_now, missing_compiler
from fasteagle.compile.cpu_backend import CpuBackend
from fasteagle.decoding.runner import Backend
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.drafting.fused import FusedDrafter
from fasteagle.drafting.ngram import NgramDrafter
from fasteagle.drafting.static_tree import StaticTreeDrafter
from fasteagle.generate import Engine
from fasteagle.loading.source import quantize_head_
from fasteagle.model import Target
from fasteagle.options import SamplingParams
from fasteagle.quant import cpu_build
from fasteagle.quant.scheme import Scheme
from fasteagle.shapes import FusedShape, TreeShape
from helpers import eagle3_of, random_head, random_target, tiny_config
from interleaved_models import KernelBackend, packed_head, packed_target
from native_models import SHAPE, native_target

BACKENDS = [
    "eager",
    "cpu",
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
# A token takes seconds in the interpreter, and compiling half a minute a case: test_cuda_blocks.py
# and test_cycles.py have more of them.
FEW_CASES = [("eagle1 tree", DRAWN[0]), ("eagle3 tree", DRAWN[1]), ("fused", DRAWN[0])]
DRAFTERS = {
    "eagle1 tree": ("eagle1", lambda head: EagleDrafter(head, TreeShape(2, 3, 5), 512)),
    "eagle3 tree": ("eagle3", lambda head: EagleDrafter(head, TreeShape(2, 3, 5), 512)),
    "eagle1 chain": ("eagle1", lambda head: EagleDrafter(head, TreeShape(3, 1, 3), 512)),
    "static tree": ("eagle1", lambda head: StaticTreeDrafter(head, 512, ((0,), (1,), (0, 0)))),
    "fused": ("eagle3", lambda head: FusedDrafter(head, FusedShape(2, 2, 6, 4), 512)),
    "ngram": (None, lambda head: NgramDrafter(4)),
}


def made(name: str, algorithm: str | None):
    """A backend by name over a tiny model, and a draft head for it."""
    if name == "cpu":
        cpu_build.load()
        model = native_target(tiny_config(**SHAPE))
        backend: Backend = CpuBackend(model)
    elif name == "cuda":
        model, _ = packed_target("gqa", n_layer=1, vocab_size=64)
        backend = KernelBackend(model)
    else:
        model = random_target(tiny_config())
        backend = Backend(Target(model))
    if algorithm is None:
        return backend, None
    head = random_head(model, eagle3=eagle3_of(algorithm, model.config), rope_base=10000.0)
    if name == "cpu":
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


class Odd:
    """A grammar that allows odd tokens alone."""

    def __call__(self, logits, tree):
        logits = logits.clone()
        logits[:, ::2] = float("-inf")
        return logits

    def accept(self, tokens) -> None:
        pass


@pytest.fixture(params=BACKENDS)
def name(request):
    if request.param == "cuda":
        request.getfixturevalue("kernels_on_cpu")
    return request.param


@pytest.mark.parametrize("params", DRAWN, ids=str)
@pytest.mark.parametrize("drafting", DRAFTERS)
def test_drafting_changes_no_token(name, params, drafting):
    if name in ("cuda", "compiled") and (drafting, params) not in FEW_CASES:
        pytest.skip("takes long; test_cuda_blocks.py and test_cycles.py have more cases")
    algorithm, make = DRAFTERS[drafting]
    backend, head = made(name, algorithm)
    n = 5 if name == "cuda" else 30
    expected = answer(engine_of(backend, name, params), params, n)
    engine = engine_of(backend, name, params, make(head))
    assert answer(engine, params, n) == expected
    assert backend.name == name and backend.describe().startswith(f"backend {name}")
    assert engine.stats.drafted > 0 or drafting == "ngram"
    n = 2 if name == "cuda" else 6
    limited = answer(engine_of(backend, name, params), params, n, processor=Odd())
    assert all(token % 2 for token in limited)
    assert answer(engine, params, n, processor=Odd()) == limited


def test_a_long_prompt(name):
    """In parts, behind which drafting and the next answer go on."""
    backend, head = made(name, "eagle1")
    n, prompt = (2, [5, 6, 7, 8] * 17) if name == "cuda" else (20, [5, 6, 7, 8] * 90)
    plain = engine_of(backend, name, DRAWN[0])
    engine = engine_of(backend, name, DRAWN[0], EagleDrafter(head, TreeShape(2, 3, 5), 512))
    for _ in range(2):
        expected = answer(plain, DRAWN[0], n, prompt)
        assert answer(engine, DRAWN[0], n, prompt) == expected
        prompt = [*prompt, *expected, 9]


def test_all_of_the_core_is_eager():
    backend, _ = made("eager", None)
    assert backend.describe() == "backend eager" and torch.is_grad_enabled()
