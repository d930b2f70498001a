"""Whole decode cycles replayed as CUDA graphs, one for every variant of the cycle.

`CapturedRunner` keeps the books and knows nothing of CUDA; `CudaGraphs` captures. The host only
reads what came out of a cycle, and by then the next one has been launched.
"""

from __future__ import annotations

import contextlib
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fasteagle.compile.ahead import compile_ahead
from fasteagle.compile.locked import COMPILING
from fasteagle.decoding.cycle import Pieces, decode_cycle
from fasteagle.decoding.runner import Backend, Done, Runner, head_config
from fasteagle.drafting.base import Drafter
from fasteagle.errors import first_line, is_out_of_memory
from fasteagle.logits import LogitsProcessor
from fasteagle.multi_round import accept_sampled
from fasteagle.state import CycleSpec, DecodeState

WARM_UPS = 3  # runs before capture: kernels compile, libraries choose, workspaces are made
TRIES = 2  # of a capture
# Of a variant, in a row and whatever code it ran: each leaves a pool in torch's allocator of
# page-locked memory.
MOST_FAILURES = 4
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
    """Steps as CUDA graphs that share one memory pool and are captured on one stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = torch.device("cuda", _index(device))
        # One for all captures: the allocator keeps blocks by stream, cuBLAS a workspace.
        self._side = torch.cuda.Stream(self._device)
        self._pool: Any = None
        self._anchor: Callable[[], None] | None = None

    def capture(self, step: Callable[[], None], restore: Callable[[], None]) -> Callable[[], None]:
        """Raises whatever forbids it; then the stream is the old one and the pool a new one."""
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
            # Other threads may use the device meanwhile: a chat prepares in the background.
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

        A pool lives as long as a graph uses it, and whoever captures into it later is refused: all
        graphs of cycles may be gone for a while. `torch._inductor.cudagraph_trees` does the same.
        """
        self._pool = torch.cuda.graph_pool_handle()
        cell = torch.zeros(1, device=self._device)
        self._anchor = self._record(cell.zero_)

    def _close_pool(self) -> None:
        """`capture_end` raises before it ends the allocation to the pool, which would go on."""
        with contextlib.suppress(RuntimeError):  # or it has ended it
            torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
        self._pool = self._anchor = None
        self._side = torch.cuda.Stream(self._device)  # the old one may be left in capture mode

    def place(self, result: Tensor) -> Place:
        return PinnedPlace(result)

    def synchronize(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()

    def milliseconds(self, replay: Callable[[], None]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.device(self._device):  # whose stream the events and the graph take
            begin.record()
            replay()
            end.record()
        end.synchronize()
        return begin.elapsed_time(end)


def _index(device: torch.device) -> int:
    """Of the device, the current one where it is not said."""
    return torch.cuda.current_device() if device.index is None else device.index


class PinnedPlace:
    """Page-locked memory, with an event behind the copy into it."""

    def __init__(self, result: Tensor) -> None:
        self._host = torch.empty_like(result, device="cpu").pin_memory()
        self._event = torch.cuda.Event()

    def fill(self, result: Tensor) -> None:
        self._host.copy_(result, non_blocking=True)
        self._event.record(torch.cuda.current_stream(result.device))

    def read(self) -> list[int]:
        self._event.synchronize()
        return self._host.tolist()


class CapturedRunner(Runner):
    """Replays cycles; those that cannot be captured run as they are, and `error` says why."""

    ahead = 1
    fixed_addresses = True

    def __init__(self, backend: Backend, state: DecodeState, graphs: Graphs) -> None:
        super().__init__(backend, state)
        self._graphs = graphs
        self._replays: dict[Any, Callable[[], None] | None] = {}  # None: runs as it is
        self._failures: dict[Any, list[str]] = {}  # in a row, by drafter and spec
        self._kinds: list[Any] = []
        self._rows_ahead: set[int] = set()  # whose kernels are compiled
        # One place is filled while the other is read.
        self._free = deque(graphs.place(state.result) for _ in range(self.ahead + 1))
        self._launched: deque[Place] = deque()

    def adopt(self, drafter: Drafter) -> None:
        # Keys hold their drafter: those of one that was replaced would keep its head in memory.
        kept = {key: said for key, said in self._failures.items() if key[0] in (None, drafter)}
        self._failures = kept
        super().adopt(drafter)

    def _key(self, spec: CycleSpec, drafter: Drafter | None) -> Any:
        # A cache that has grown lies elsewhere, and its graphs are void.
        caches = [] if drafter is None else drafter.caches
        # One of another size may come to lie where an old one was.
        return drafter, spec, tuple((c.rows.data_ptr(), c.n_slots) for c in caches)

    def needs(self, specs: Sequence[CycleSpec], drafter: Drafter | None) -> bool:
        return any(self._key(spec, drafter) not in self._replays for spec in specs)

    def prepare(self, specs: Sequence[CycleSpec], drafter: Drafter | None) -> None:
        """Capture what is not yet; cycles run on the state, which is restored."""
        self._make_room(specs[0].kind)
        self.compile_ahead(specs, drafter)
        for spec in specs:
            key = self._key(spec, drafter)
            if key not in self._replays:
                self._replays[key] = self._captured(spec, drafter)

    def compile_ahead(self, specs: Sequence[CycleSpec], drafter: Drafter | None) -> None:
        rows = {spec.rows for spec in specs}
        if not rows <= self._rows_ahead:
            compile_ahead(self.backend, drafter, specs, self.state)
            self._rows_ahead |= rows

    def _make_room(self, kind: object) -> None:
        if kind in self._kinds:
            return
        self._kinds.append(kind)
        if len(self._kinds) > MOST_KINDS:
            oldest = self._kinds.pop(0)
            self._replays = {k: v for k, v in self._replays.items() if k[1].kind != oldest}

    def _captured(self, spec: CycleSpec, drafter: Drafter | None) -> Callable[[], None] | None:
        if spec.accept is accept_sampled:  # it reads values on the host
            return None
        failures = self._failures.get((drafter, spec), [])
        if len(failures) >= MOST_FAILURES:
            return None
        advanced = [*self.state.advanced, *([] if drafter is None else drafter.advanced)]
        before = [tensor.clone() for tensor in advanced]

        def restore() -> None:
            for tensor, old in zip(advanced, before, strict=True):
                tensor.copy_(old)

        pieces = self.pieces(spec, drafter)

        @torch.no_grad()
        def step() -> None:
            decode_cycle(self.state, self.backend.target, drafter, spec, pieces)

        try:
            replay = self._capture(step, restore, failures)
            self._failures.pop((drafter, spec), None)
            return replay
        except Exception as error:  # whatever forbids it, the step itself still works
            self._failures[drafter, spec] = failures
            self.error = failures[-1]
            if is_out_of_memory(error) and (advice := self.backend.advised(head_config(drafter))):
                self.error += f": {advice}"
            if len(failures) >= MOST_FAILURES:
                self.error += f" (failed {len(failures)} times, not tried again)"
            return None
        finally:
            restore()

    def _capture(
        self, step: Callable[[], Any], restore: Callable[[], None], failures: list[str]
    ) -> Callable[[], None]:
        """Twice if need be: another thread that waits for the device meanwhile spoils a capture.

        Why one has failed goes into `failures`.
        """
        for tries_left in reversed(range(TRIES)):
            try:
                with COMPILING:
                    return self._graphs.capture(step, restore)
            except Exception as error:
                reason = first_line(error, 200)
                failures.append(reason)
                if not tries_left or is_out_of_memory(error):
                    raise
                restore()
        raise AssertionError("the last try returns or raises")

    @property
    def captured(self) -> int:
        """Variants of the cycle that are replayed."""
        return sum(replay is not None for replay in self._replays.values())

    def forget(self) -> None:
        """Capture anew, but for what never could be: the model runs other code from now on."""
        self._replays.clear()
        self._kinds.clear()

    def use_compiled(self, compiled: Mapping[tuple[Drafter | None, CycleSpec], Pieces]) -> None:
        super().use_compiled(compiled)
        self._failures.clear()  # other code may be captured where this could not, or was spoiled

    def pieces(self, spec: CycleSpec, drafter: Drafter | None) -> Pieces:
        return self.compiled.get((drafter, spec), self.usual)

    def launch(
        self, spec: CycleSpec, drafter: Drafter | None, processor: LogitsProcessor | None = None
    ) -> None:
        replay = None
        if processor is None:  # which reads the tree on the host: no graph can do that
            replay = self._replays.get(self._key(spec, drafter))
        if replay is None:
            pieces = self.pieces(spec, drafter)
            decode_cycle(self.state, self.backend.target, drafter, spec, pieces, processor)
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
        replay = self._capture(work, restore, [])
        times = []
        for _ in range(TIMED_REPLAYS):
            restore()
            times.append(self._graphs.milliseconds(replay))
        return statistics.median(times)
