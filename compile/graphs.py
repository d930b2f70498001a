"""Capture and replay of one step over static buffers: a CUDA graph, or the step itself on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

WARM_UPS = 3  # runs before capture: kernels compile, libraries choose, workspaces are made


class GraphRunner:
    """Runs `step`, which reads and writes tensors of fixed addresses and nothing of the host.

    On CUDA the first `replay` warms up on a side stream, captures, and from then on replays; all
    runners share the memory of `pool`. If capture fails, `error` says why and `step` runs as it is.
    Warming up runs the step: `advanced` are the tensors that must be as before it then.
    """

    def __init__(
        self,
        step: Callable[[], None],
        device: torch.device,
        pool: Any = None,
        advanced: Sequence[Tensor] = (),
    ) -> None:
        self._step, self._device, self._pool = step, device, pool
        self._advanced = advanced
        self._graph: torch.cuda.CUDAGraph | None = None
        self.error: str | None = None

    @property
    def captured(self) -> bool:
        return self._graph is not None

    def replay(self) -> None:
        """One step; on CUDA asynchronous."""
        if self._device.type == "cuda" and self._graph is None and self.error is None:
            self._capture()
        if self._graph is not None:
            self._graph.replay()
        else:
            self._step()

    def _capture(self) -> None:
        graph = torch.cuda.CUDAGraph()
        before = [tensor.clone() for tensor in self._advanced]

        def restore() -> None:
            for tensor, old in zip(self._advanced, before, strict=True):
                tensor.copy_(old)

        try:
            side = torch.cuda.Stream(self._device)
            side.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS):
                    self._step()
                    restore()
            torch.cuda.current_stream(self._device).wait_stream(side)
            with torch.cuda.graph(graph, pool=self._pool):
                self._step()
        except Exception as error:  # whatever forbids it, the step itself still works
            self.error = (str(error) or type(error).__name__).strip().splitlines()[0][:200]
            torch.cuda.synchronize(self._device)
            restore()
            return
        self._graph = graph
