"""Every path of our CPU kernels that this CPU can run."""

from __future__ import annotations

import pytest
import torch

from fasteagle.quant import cpu_build

PATHS = [
    pytest.param(isa, marks=[] if i == 0 else pytest.mark.slow, id=isa.name)
    for i, isa in enumerate(cpu_build.runnable())
]


@pytest.fixture(params=PATHS)
def ops(request):
    """The ops of one path; other paths than the fastest are built for these tests."""
    isa = request.param
    namespace = cpu_build.NAMESPACE if isa == cpu_build.runnable()[0] else f"test_{isa.level}"
    cpu_build.load(isa, namespace)
    path = getattr(torch.ops, namespace)
    assert path.isa() == isa.level
    return path
