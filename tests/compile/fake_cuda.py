"""What `CudaGraphs` asks of `torch.cuda`, on a machine without it: pools, streams, captures.

Graphs are not recorded; what is counted is who uses a pool, as torch's allocator does it.
"""

from __future__ import annotations

import contextlib
import itertools

import torch

OWN_DEVICE = 1  # of two


class FakeCuda:
    """Pools with their users; `refusing` captures to come fail at their begin, for `reason`."""

    def __init__(self, monkeypatch) -> None:
        self.users: dict[int, int] = {}  # graphs of a pool; 0: it was used and is dead
        self.allocating: set[int] = set()
        self.streams = 0
        self.refusing = 0
        self.reason = "CUDA error: operation not permitted"
        self.refused = 0
        self.order: list[str] = []  # in which streams and events wait
        fake, handles = self, itertools.count(1)

        class Stream:
            def __init__(self, device=None) -> None:
                fake.streams += 1

            def wait_stream(self, other) -> None:
                fake.order.append("current waits" if self is current else "side waits")

            def synchronize(self) -> None:
                fake.order.append("host waits")

        class Event:
            is_over, ticks = False, itertools.count()

            def __init__(self, enable_timing=False) -> None:
                pass

            def record(self, stream=None) -> None:
                fake.order.append("event")
                self.at = next(self.ticks)

            def synchronize(self) -> None:
                fake.order.append("host waits for event")
                self.is_over = True

            def elapsed_time(self, end) -> float:
                assert end.is_over
                return end.at - self.at

        class Graph:
            pool = None

            def capture_begin(self, pool, capture_error_mode) -> None:
                if fake.users.get(pool) == 0:
                    raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
                assert not fake.allocating, "an earlier capture has not ended"
                assert capture_error_mode == "thread_local", "other threads use the device"
                fake.order.append("capture")
                fake.users[pool] = fake.users.get(pool, 0) + 1
                fake.allocating.add(pool)
                if fake.refusing:
                    fake.refusing -= 1
                    fake.refused += 1
                    raise RuntimeError(fake.reason)
                self.pool = pool

            def capture_end(self) -> None:
                if self.pool not in fake.allocating:
                    raise RuntimeError("CUDA error: the stream is not capturing")
                fake.allocating.remove(self.pool)

            def replay(self) -> None:
                pass

            def __del__(self) -> None:
                if self.pool is not None:
                    fake.users[self.pool] -= 1

        current, zeros = Stream(), torch.zeros
        self.streams = 0
        for name, value in {
            "Stream": Stream,
            "Event": Event,
            "CUDAGraph": Graph,
            "graph_pool_handle": lambda: next(handles),
            "current_stream": lambda device: current,
            "stream": lambda stream: contextlib.nullcontext(),
            "device": lambda device: contextlib.nullcontext(),
            "current_device": lambda: OWN_DEVICE,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        on_cpu = lambda *size, **options: zeros(*size, **options | {"device": "cpu"})  # noqa: E731
        monkeypatch.setattr(torch, "zeros", on_cpu)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self._end, raising=False)

    def _end(self, device, pool) -> None:
        assert device == OWN_DEVICE
        self.allocating.discard(pool)
