"""Engines on our CPU kernels whose caches have rows in 8 bits; see `test_int8_cache.py`."""

from __future__ import annotations

import pytest
import torch

from fasteagle.batch import Batch
from fasteagle.compile.backend import choose_backend
from fasteagle.compile.cpu_backend import CpuBackend
from fasteagle.compile.cpu_cycles import MOST_CYCLES
from fasteagle.compile.int8_cache import core_target
from fasteagle.decoding.backend import Backend
from fasteagle.generate import Engine
from fasteagle.options import SamplingParams
from fasteagle.shapes import GatedChain
from helpers import GREEDY, finished, fused_drafter, generated, tiny_config
from native_models import SHAPE, native_head, native_target

pytestmark = pytest.mark.usefixtures("cpu_kernels", "any_time")


@pytest.fixture(scope="module")
def model():
    return native_target(tiny_config(**SHAPE), dtype=torch.bfloat16)


def engine_of(backend: Backend, drafter=None) -> Engine:
    return Engine(backend.target.model, 512, drafter=drafter, backend=backend)


def test_the_kernels_run_models_in_bf16(model):
    backend = choose_backend(model, "int8")
    assert backend.name == "cpu" and backend.target.cache_dtype == torch.int8
    backend = choose_backend(native_target(model.config, dtype=torch.float32), "int8")
    assert backend.name == "eager" and len(generated(engine_of(backend), 5)) == 5
    assert backend.core == backend.target, "over 8 bits, too"


def test_texts_that_share_passes_and_calls_are_those_alone(model, calls):
    texts = [([1, 2, 3], GREEDY), ([4, 5] * 40, SamplingParams(0.8, seed=3)), ([9, 8], GREEDY)]
    expected = [
        generated(engine_of(CpuBackend(model, "int8")), 60, prompt=prompt, params=params)
        for prompt, params in texts
    ]
    drafter = fused_drafter(native_head(model), GatedChain(4))
    several = Batch(engine_of(CpuBackend(model, "int8"), drafter), 3)
    calls.clear()
    for key, (prompt, params) in enumerate(texts):
        several.begin(key, prompt, 200, lambda own, p=prompt, s=params: own.generate(p, s, 60))
    assert [*finished(several).values()] == expected
    assert max(calls) == MOST_CYCLES


def test_what_fails_is_left_to_the_core(model):
    backend = CpuBackend(model, "int8")
    backend.leave("passes")
    expected = generated(engine_of(Backend(core_target(model, "int8"))), 20)
    assert generated(engine_of(backend), 20) == expected
