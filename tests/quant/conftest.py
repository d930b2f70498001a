"""The paths of our CPU kernels that this CPU can run."""

from __future__ import annotations

import pytest
import torch

from fasteagle.quant import cpu_build

FASTEST, *OTHERS = cpu_build.runnable()
# .ci/run limits the instructions of whole runs: a path that is the fastest there is tested there.
LIMITED = [next(isa for isa in (FASTEST, *OTHERS) if isa.level <= most) for most in (2, 0)]
PATHS = [
    pytest.param(FASTEST, id=FASTEST.name),
    *(
        pytest.param(isa, marks=pytest.mark.slow, id=isa.name)
        for isa in OTHERS
        if isa not in LIMITED
    ),
]


@pytest.fixture(params=PATHS)
def ops(request):
    """The ops of one path; other paths than the fastest are built for these tests."""
    isa = request.param
    namespace = cpu_build.NAMESPACE if isa == FASTEST else f"test_{isa.level}"
    cpu_build.load(isa, namespace)
    path = getattr(torch.ops, namespace)
    assert path.isa() == isa.level
    return path
