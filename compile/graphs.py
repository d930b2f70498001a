"""Whole decode cycles replayed as CUDA graphs, one for every variant of the cycle.

`CapturedRunner` keeps the books and knows nothing of CUDA; `CudaGraphs` captures. The host only
reads what came out of a cycle, and by then the next one has been launched.
"""

from __future__ import annotations

import contextlib
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fasteagle.cycle import decode_cycle
from fasteagle.drafting.base import Drafter
from fasteagle.generate import Engine
from fasteagle.logits import LogitsProcessor
from fasteagle.model import Transformer
from fasteagle.runner import Done, Runner
from fasteagle.state import CycleSpec, DecodeState

WARM_UPS = 3  # runs before capture: kernels compile, libraries choose, workspaces are made
MOST_KINDS = 2  # ways to draw whose graphs are kept; the oldest goes
TIMED_REPLAYS = 5


class Place(Protocol):
    """A buffer on the host that a result is copied to."""

    def fill(self, result: Tensor) -> None:
        """Begin the copy, behind what was launched."""

    def read(self) -> list[int]:
        """Wait for it."""


class Graphs(Protocol):
    """A device that can record a step and run it again."""

    def capture(self, step: Callable[[], None], restore: Callable[[], None]) -> Callable[[], None]:
        """What runs `step` again. `restore` undoes what running it has changed."""

    def place(self, result: Tensor) -> Place: ...

    def synchronize(self) -> None: ...

    def milliseconds(self, replay: Callable[[], None]) -> float: ...


class CudaGraphs:
    """Steps as CUDA graphs that share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = torch.cuda.graph_pool_handle()

    def capture(self, step: Callable[[], None], restore: Callable[[], None]) -> Callable[[], None]:
        """Raises whatever forbids it; then the stream is the old one and the pool a new one."""
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS):
                    step()
                    restore()
                side.synchronize()
                # Other threads may use the device meanwhile: a chat prepares in the background.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    step()
                except BaseException:
                    self._abandon(graph)
                    raise
                self._end(graph)
        finally:
            torch.cuda.current_stream(self._device).wait_stream(side)
        return graph.replay

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        try:
            graph.capture_end()
        except BaseException:
            self._close_pool()
            raise

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        with contextlib.suppress(RuntimeError):  # the capture is invalid, as expected
            self._end(graph)

    def _close_pool(self) -> None:
        """`capture_end` raises before it ends the allocation to the pool, which would go on."""
        with contextlib.suppress(RuntimeError):  # or it has ended it
            torch._C._cuda_endAllocateToPool(self._device.index or 0, self._pool)
        self._pool = torch.cuda.graph_pool_handle()

    def place(self, result: Tensor) -> Place:
        return PinnedPlace(result)

    def synchronize(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()

    def milliseconds(self, replay: Callable[[], None]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)


class PinnedPlace:
    """Page-locked memory, with an event behind the copy into it."""

    def __init__(self, result: Tensor) -> None:
        self._host = torch.empty_like(result, device="cpu").pin_memory()
        self._event = torch.cuda.Event()

    def fill(self, result: Tensor) -> None:
        self._host.copy_(result, non_blocking=True)
        self._event.record()

    def read(self) -> list[int]:
        self._event.synchronize()
        return self._host.tolist()


class CapturedRunner(Runner):
    """Replays cycles; those that cannot be captured run as they are, and `error` says why."""

    ahead = 1
    fixed_addresses = True

    def __init__(self, target: Transformer, state: DecodeState, graphs: Graphs) -> None:
        super().__init__(target, state)
        self._graphs = graphs
        self._replays: dict[Any, Callable[[], None] | None] = {}  # None: runs as it is
        self._kinds: list[Any] = []
        # One place is filled while the other is read.
        self._free = deque(graphs.place(state.result) for _ in range(self.ahead + 1))
        self._launched: deque[Place] = deque()

    def _key(self, spec: CycleSpec, drafter: Drafter | None) -> Any:
        # A cache that has grown lies elsewhere, and its graphs are void.
        caches = [] if drafter is None else drafter.caches
        return drafter, spec, tuple(cache.rows.data_ptr() for cache in caches)

    def needs(self, specs: Sequence[CycleSpec], drafter: Drafter | None) -> bool:
        return any(self._key(spec, drafter) not in self._replays for spec in specs)

    def prepare(self, specs: Sequence[CycleSpec], drafter: Drafter | None) -> None:
        """Capture what is not yet; cycles run on the state, which is restored."""
        self._make_room(specs[0].kind)
        for spec in specs:
            key = self._key(spec, drafter)
            if key not in self._replays:
                self._replays[key] = self._captured(spec, drafter)

    def _make_room(self, kind: object) -> None:
        if kind in self._kinds:
            return
        self._kinds.append(kind)
        if len(self._kinds) > MOST_KINDS:
            oldest = self._kinds.pop(0)
            self._replays = {k: v for k, v in self._replays.items() if k[1].kind != oldest}

    def _captured(self, spec: CycleSpec, drafter: Drafter | None) -> Callable[[], None] | None:
        if spec.shape is not None and drafter is not None and not drafter.capturable:
            return None
        advanced = [*self.state.advanced, *([] if drafter is None else drafter.advanced)]
        before = [tensor.clone() for tensor in advanced]

        def restore() -> None:
            for tensor, old in zip(advanced, before, strict=True):
                tensor.copy_(old)

        @torch.no_grad()
        def step() -> None:
            decode_cycle(self.state, self.target, drafter, spec)

        try:
            return self._graphs.capture(step, restore)
        except Exception as error:  # whatever forbids it, the step itself still works
            self.error = (str(error) or type(error).__name__).strip().splitlines()[0][:200]
            return None
        finally:
            restore()

    def forget(self) -> None:
        """Capture anew: the model runs other code from now on."""
        self._replays.clear()
        self._kinds.clear()

    def launch(
        self, spec: CycleSpec, drafter: Drafter | None, processor: LogitsProcessor | None = None
    ) -> None:
        replay = None
        if processor is None:  # which reads the tree on the host: no graph can do that
            replay = self._replays.get(self._key(spec, drafter))
        if replay is None:
            decode_cycle(self.state, self.target, drafter, spec, processor=processor)
        else:
            replay()
        place = self._free.popleft()
        place.fill(self.state.result)
        self._launched.append(place)

    def read(self) -> Done:
        place = self._launched.popleft()
        self._free.append(place)
        *tokens, by_head, by_lookup, drafted = place.read()
        return Done(tokens, by_head, by_lookup, drafted, None, None)

    def drop(self) -> None:
        self._free.extend(self._launched)
        self._launched.clear()
        self._graphs.synchronize()

    def timed(self, work: Callable[[], Any], restore: Callable[[], None]) -> float:
        """Milliseconds of `work`, replayed."""
        replay = self._graphs.capture(work, restore)
        times = []
        for _ in range(TIMED_REPLAYS):
            restore()
            times.append(self._graphs.milliseconds(replay))
        return statistics.median(times)


def graphs_of(device: torch.device) -> Graphs | None:
    """What captures on a device; None where nothing does."""
    return CudaGraphs(device) if device.type == "cuda" else None


def make_engine(model: Transformer, max_seq_len: int) -> Engine:
    """An engine with the runner that its device can have."""
    engine = Engine(model, max_seq_len)
    graphs = graphs_of(engine.device)
    if graphs is not None:
        engine.runner = CapturedRunner(model, engine.state, graphs)
    return engine
