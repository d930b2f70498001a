"""Kernels for the tests of what runs them: our C++ ones, and Triton's."""

from __future__ import annotations

import pytest

from helpers import tiny_config
from native_models import SHAPE, native_target

MOST_REACHABLE = 40  # tensors of the sequences in one pass


@pytest.fixture
def kernels_on_cpu(card, monkeypatch):
    """Backends of CUDA run on CPU tensors, by kernels that are interpreted."""
    from fasteagle.compile import cuda_draft
    from fasteagle.compile.cuda_pass import Member, cache_numbers
    from fasteagle.quant import interleaved
    from ptx.operators import product

    numbers = Member.numbers

    def reach(*tensors) -> None:
        card.reachable = [*card.reachable, *tensors][-MOST_REACHABLE:]

    def reached(member: Member) -> list[int]:
        reach(*member)
        return numbers(member)

    def reached_cache(rows) -> list[int]:
        reach(rows)
        return cache_numbers(rows)

    monkeypatch.setattr(interleaved, "interleaved_linear", product)
    monkeypatch.setattr(Member, "numbers", reached)
    monkeypatch.setattr(cuda_draft, "cache_numbers", reached_cache)
    return card


@pytest.fixture
def products_by_torch(kernels_on_cpu, monkeypatch):
    """Products have tests of their own; of a whole cycle they would take most of the time."""
    from fasteagle.quant import kernels
    from ptx.operators import launch_by_torch

    def launched(x, weight, accumulate, cut, out, out_scales, *rest, **kind) -> None:
        launch_by_torch(x, weight, accumulate, cut, out, out_scales, *rest, **kind)
        for written in (out, out_scales):
            kernels_on_cpu.fresh.pop(written, None)

    monkeypatch.setattr(kernels, "_launch", launched)


@pytest.fixture(scope="session")
def cpu_kernels() -> None:
    """Our C++ kernels, built and loaded."""
    from fasteagle.quant import cpu_build

    cpu_build.load()


@pytest.fixture(scope="module")
def native():
    """A target for our C++ kernels, that no test writes into."""
    return native_target(tiny_config(**SHAPE))


@pytest.fixture
def any_time(monkeypatch):
    """Calls have as many cycles as they may, on a loud machine too."""
    from fasteagle.compile import cpu_cycles

    monkeypatch.setattr(cpu_cycles, "CALL_MS", 1e9)


@pytest.fixture
def calls(monkeypatch):
    """Numbers of cycles that calls have run."""
    from fasteagle.compile.cpu_cycles import NativeCycles

    sizes, run = [], NativeCycles.run

    def counted(*how):
        done, alone = run(*how), len(how[2]) == 1
        sizes.append(len(done[0]))
        for one in (one for own in done for one in own):
            assert one.alone == alone == (one.verify_seconds is not None), "a time of its own"
        return done

    monkeypatch.setattr(NativeCycles, "run", counted)
    return sizes
