"""Backends that prove themselves: kernels made wrong on purpose are left to the core, and told."""

from __future__ import annotations

import pytest
import torch

from fasteagle.compile import cpu_pass, proof
from fasteagle.compile.cpu_backend import CpuBackend
from fasteagle.decoding.runner import Backend
from fasteagle.errors import FasteagleError
from fasteagle.generate import Engine
from fasteagle.model import Target
from fasteagle.options import SamplingParams
from fasteagle.quant import cpu_build
from fasteagle.quant.cpu_linear import NativeLinear
from helpers import tiny_config
from native_models import SHAPE, native_target


@pytest.fixture(scope="module", autouse=True)
def kernels():
    cpu_build.load()


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def model():
    return native_target(tiny_config(**SHAPE))


def answer(backend) -> list[int]:
    engine = Engine(backend.target.model, 128, backend=backend)
    return [t for new in engine.generate([1, 2, 3], SamplingParams(), 20) for t in new]


def wrong_pass(self, state, target, proposal):
    output = cpu_pass.EAGER.verify(state, target, proposal)
    return output._replace(logits=output.logits.flip(-1))


def raising_finish(*given):
    raise RuntimeError("illegal instruction\nmore")


def test_kernels_that_are_right_are_used_and_proved_once(model, monkeypatch, capsys):
    backend = CpuBackend(model)
    proof.prove(backend, strict=True)
    assert backend.left == set() and "by torch" not in backend.describe()
    monkeypatch.setattr(proof, "checks", raising_finish)  # the second time nothing is computed
    proof.prove(CpuBackend(model))
    assert capsys.readouterr().err == ""


def test_a_wrong_pass_is_the_cores(model, monkeypatch, capsys):
    monkeypatch.setattr(cpu_pass.NativePass, "__call__", wrong_pass)
    for _ in range(2):  # computed, and kept
        backend = CpuBackend(model)
        proof.prove(backend)
        line = capsys.readouterr().err
        assert line.startswith("warning: passes of backend cpu failed on") and "off by" in line
        assert line.count("\n") == 1
        assert "passes by torch" in backend.describe()
        assert answer(backend) == answer(Backend(Target(model)))


def test_an_end_of_a_cycle_that_raises_is_the_cores(model, monkeypatch, capsys):
    monkeypatch.setattr(cpu_pass, "finish", raising_finish)
    backend = CpuBackend(model)
    proof.prove(backend)
    assert "commits of backend cpu" in (line := capsys.readouterr().err)
    assert "(illegal instruction)" in line and backend.left == {"commits"}
    assert len(answer(backend)) == 20


def test_wrong_products_are_computed_in_torch(model, monkeypatch, capsys):
    expected = answer(CpuBackend(model))
    exact = NativeLinear.exact

    def wrong(self, x):
        y = exact(self, x)
        return y if self._by_reference else torch.zeros_like(y)

    monkeypatch.setattr(NativeLinear, "exact", wrong)
    backend = CpuBackend(model)
    proof.prove(backend)
    assert "products of backend cpu" in capsys.readouterr().err
    assert backend.left >= {"products", "passes"}
    assert answer(backend)[:3] == expected[:3], "but for the rounding of activations"


def test_strict_refuses(model, monkeypatch):
    monkeypatch.setattr(cpu_pass, "finish", raising_finish)
    with pytest.raises(FasteagleError, match=r"commits of backend cpu .*leave out --strict"):
        proof.prove(CpuBackend(model), strict=True)


def test_the_core_has_nothing_to_prove(model, monkeypatch):
    monkeypatch.setattr(proof, "checks", raising_finish)
    proof.prove(Backend(Target(model)), strict=True)
