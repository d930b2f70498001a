"""CUDA graphs in one memory pool, and page-locked memory for what the host reads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

WARM_UPS = 1  # runs before capture: kernels compile, libraries choose, workspaces are made


class CudaGraphs:
    """CUDA graphs that share one memory pool and are captured on one stream."""

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)
        # One stream for all captures: the allocator stores blocks per stream, cuBLAS a workspace.
        self._side = torch.cuda.Stream(self._device)
        self._pool: Any = None
        self._anchor: Callable[[], None] | None = None

    def capture(self, step: Callable[[], None], restore: Callable[[], None]) -> Callable[[], None]:
        """Return a function that runs `step` again; `restore` undoes the changes of a run.

        After a failed capture the next one uses a new stream and a new pool.
        """
        side = self._side
        side.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS):
                    step()
                    restore()
                if self._pool is None:
                    self._open_pool()
                return self._record(step)
        finally:
            torch.cuda.current_stream(self._device).wait_stream(side)

    def _record(self, step: Callable[[], object]) -> Callable[[], None]:
        torch.cuda.current_stream(self._device).synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may use the device at the same time: a chat prepares in the background.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            step()
            graph.capture_end()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the capture is invalid, as expected
                graph.capture_end()
            self._close_pool()
            raise
        return graph.replay

    def _open_pool(self) -> None:
        """Begin a pool with a graph that is never replayed.

        A pool lives as long as a graph uses it, and captures into it fail afterwards. For some time
        no graph of a cycle may exist. `torch._inductor.cudagraph_trees` uses such a graph too.
        """
        self._pool = torch.cuda.graph_pool_handle()
        cell = torch.zeros(1, device=self._device)
        self._anchor = self._record(cell.zero_)

    def _close_pool(self) -> None:
        """End the allocation to the pool, which `capture_end` leaves on when it raises."""
        with contextlib.suppress(RuntimeError):  # it may have ended already
            torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
        self._pool = self._anchor = None
        self._side = torch.cuda.Stream(self._device)  # the old one may be left in capture mode

    def place(self, result: Tensor) -> PinnedPlace:
        return PinnedPlace(result)

    def synchronize(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()

    def milliseconds(self, replay: Callable[[], None]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.device(self._device):  # events and graph use its current stream
            begin.record()
            replay()
            end.record()
        end.synchronize()
        return begin.elapsed_time(end)


class PinnedPlace:
    """Page-locked memory that a result is copied to, with an event recorded after the copy."""

    def __init__(self, result: Tensor) -> None:
        self._host = torch.empty_like(result, device="cpu").pin_memory()
        self._event = torch.cuda.Event()

    def fill(self, result: Tensor) -> None:
        """Begin to copy `result`, after the work launched so far."""
        self._host.copy_(result, non_blocking=True)
        self._event.record(torch.cuda.current_stream(result.device))

    def read(self) -> list[int]:
        """Wait for the copy and return its values."""
        self._event.synchronize()
        return self._host.tolist()
