"""Kernels for the tests of what runs them: our C++ ones, and Triton's with one cache a run."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def triton_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of what Triton compiles in this run, apart from the user's cache."""
    return tmp_path_factory.mktemp("triton")


@pytest.fixture
def kernels_on_cpu(card, monkeypatch):
    """Backends of CUDA run on CPU tensors, by kernels that are interpreted."""
    from fasteagle.quant import interleaved
    from ptx.operators import product

    monkeypatch.setattr(interleaved, "interleaved_linear", product)
    return card


@pytest.fixture(scope="session")
def cpu_kernels() -> None:
    """Our C++ kernels, built and loaded."""
    from fasteagle.quant import cpu_build

    cpu_build.load()
