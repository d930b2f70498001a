"""What `FOR_GRAPHS` asks of the code that Inductor generates for pieces of a captured cycle."""

from __future__ import annotations

import torch

from fasteagle.compile.cycles import FOR_GRAPHS
from ptx import inductor

SPOILS_CAPTURES = ("triton.autotune_pointwise", "assert_indirect_indexing")


def generated(monkeypatch, options) -> list[tuple[str, dict]]:
    """Source and settings of the kernels of a gather, which also run once."""
    kernels = []

    class Recorded(inductor._Kernel):
        def __init__(self, name: str, source: str) -> None:
            super().__init__(name, source)
            kernels.append((source, self._meta))

    torch._dynamo.reset()
    x, index = torch.arange(24.0).view(4, 6), torch.tensor([2, 0, 3])
    with monkeypatch.context() as patch:
        patch.setattr(inductor, "_Kernel", Recorded)
        patch.setattr(inductor, "OPTIONS", options)
        result = inductor.compiled(lambda x, index: x[index] * 2 + 1)(x, index)
    assert torch.equal(result, x[index] * 2 + 1)
    return kernels


def test_code_for_graphs_times_nothing_and_asserts_nothing(monkeypatch, card):
    """Choosing a launch by time waits for the device, which spoils captures in another thread."""
    for source, meta in (kernels := generated(monkeypatch, FOR_GRAPHS)):
        assert "device_assert" not in source
        assert meta["autotune_pointwise"] is False
    usual = {name: value for name, value in FOR_GRAPHS.items() if name not in SPOILS_CAPTURES}
    others = generated(monkeypatch, usual)
    assert len(kernels) == len(others) == 1
    assert "device_assert" in others[0][0] and others[0][1]["autotune_pointwise"]
