"""Replay whole decode cycles as CUDA graphs, one graph for each variant of the cycle.

`CapturedRunner` manages the graphs without any CUDA call; `CudaGraphs` captures them. The host only
reads the result of a cycle, and by then the next cycle has been launched.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fasteagle.compile.precompile import compile_ahead
from fasteagle.decoding.cycle import Pieces, Proposal, decode_cycle
from fasteagle.decoding.runner import Backend, Done, Runner, head_config
from fasteagle.drafting.base import Drafter
from fasteagle.errors import first_line, is_out_of_memory
from fasteagle.logits import LogitsProcessor
from fasteagle.model import Output
from fasteagle.multi_round import accept_sampled
from fasteagle.state import CycleSpec, DecodeState

# Held during a capture, and during the first run of compiled code: compilation times code, and
# timing waits for the whole device, which spoils a capture in another thread.
COMPILING = threading.RLock()
WARM_UPS = 3  # runs before capture: kernels compile, libraries choose, workspaces are made
# Consecutive failures of a variant, with any code: each leaves a pool in torch's allocator of
# page-locked memory.
MOST_FAILURES = 4
MOST_KINDS = 2  # sampling modes whose graphs are stored; the oldest is dropped
TIMED_REPLAYS = 5


class CudaGraphs:
    """CUDA graphs that share one memory pool and are captured on one stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = torch.device("cuda", _index(device))
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


def _index(device: torch.device) -> int:
    """Return the index of the device, or of the current device if it has none."""
    return torch.cuda.current_device() if device.index is None else device.index


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


# Replays a cycle. One that was captured for a processor of logits has two graphs: the processor,
# which reads the tree on the host, runs between them.
Replay = Callable[[LogitsProcessor | None], None]


class CapturedRunner(Runner):
    """Runner that replays cycles; those that cannot be captured run without a graph (`error`)."""

    ahead = 1
    fixed_addresses = True

    def __init__(self, backend: Backend, state: DecodeState, graphs: CudaGraphs) -> None:
        super().__init__(backend, state)
        self._graphs = graphs
        self._replays: dict[Any, Replay | None] = {}  # None: not captured
        self._failures: Counter[Any] = Counter()  # consecutive ones, by drafter and spec
        self._kinds: list[Any] = []
        self._rows_ahead: set[int] = set()  # numbers of rows whose kernels are compiled
        # One place is filled while the other is read.
        self._free = deque(graphs.place(state.result) for _ in range(self.ahead + 1))
        self._launched: deque[PinnedPlace] = deque()

    def adopt(self, drafter: Drafter) -> None:
        # Keys hold their drafter: keys of a replaced drafter would keep its draft head in memory.
        failures = self._failures.items()
        self._failures = Counter({key: n for key, n in failures if key[0] in (None, drafter)})
        super().adopt(drafter)

    def _key(self, spec: CycleSpec, drafter: Drafter | None, processed: bool = False) -> Any:
        # A cache that has grown has another address, and its graphs are invalid.
        caches = [] if drafter is None else drafter.caches
        # A cache of another size may get the address of an old one.
        places = tuple((cache.rows.data_ptr(), cache.n_slots) for cache in caches)
        return drafter, spec, places, processed

    def needs(
        self, specs: Sequence[CycleSpec], drafter: Drafter | None, processed: bool = False
    ) -> bool:
        return any(self._key(spec, drafter, processed) not in self._replays for spec in specs)

    def prepare(
        self, specs: Sequence[CycleSpec], drafter: Drafter | None, processed: bool = False
    ) -> None:
        """Capture the variants not captured yet; cycles run on the state, which is restored."""
        self._make_room(specs[0].kind)
        self.compile_ahead(specs, drafter)
        for spec in specs:
            key = self._key(spec, drafter, processed)
            if key not in self._replays:
                self._replays[key] = self._captured(spec, drafter, processed)

    def compile_ahead(self, specs: Sequence[CycleSpec], drafter: Drafter | None) -> None:
        rows = {spec.rows for spec in specs}
        if not rows <= self._rows_ahead:
            with COMPILING:  # it waits for the device
                compile_ahead(self.backend, drafter, specs, self.state)
            self._rows_ahead |= rows

    def _make_room(self, kind: object) -> None:
        if kind in self._kinds:
            return
        self._kinds.append(kind)
        if len(self._kinds) > MOST_KINDS:
            oldest = self._kinds.pop(0)
            self._replays = {k: v for k, v in self._replays.items() if k[1].kind != oldest}

    def _captured(self, spec: CycleSpec, drafter: Drafter | None, processed: bool) -> Replay | None:
        variant = drafter, spec
        # Multi-round sampling reads values on the host.
        if spec.accept is accept_sampled or self._failures[variant] >= MOST_FAILURES:
            return None
        advanced = [*self.state.advanced, *([] if drafter is None else drafter.advanced)]
        before = [tensor.clone() for tensor in advanced]

        def restore() -> None:
            for tensor, old in zip(advanced, before, strict=True):
                tensor.copy_(old)

        try:
            with torch.no_grad():
                capture = self._capture_halves if processed else self._capture_whole
                return capture(spec, drafter, restore)
        except Exception as error:  # on any error the step itself still works
            self.error = first_line(error, 200)
            if is_out_of_memory(error) and (advice := self.backend.advised(head_config(drafter))):
                self.error += f": {advice}"
            if (n := self._failures[variant]) >= MOST_FAILURES:
                self.error += f" (failed {n} times, not tried again)"
            return None
        finally:
            restore()

    def _capture_whole(
        self, spec: CycleSpec, drafter: Drafter | None, restore: Callable[[], None]
    ) -> Replay:
        pieces = self.pieces(spec, drafter)

        def step() -> None:
            decode_cycle(self.state, self.backend.target, drafter, spec, pieces)

        replay = self._capture(step, restore, (drafter, spec))
        return lambda processor: replay()

    def _capture_halves(
        self, spec: CycleSpec, drafter: Drafter | None, restore: Callable[[], None]
    ) -> Replay:
        """Capture a cycle before its processor and after it.

        The second graph reads tensors of the first: they are kept, or a later capture would get
        their memory.
        """
        state, pieces = self.state, self.pieces(spec, drafter)
        kept: tuple[Proposal, Output]

        def verify() -> None:
            nonlocal kept
            proposal = pieces.draft(state, drafter, spec)
            kept = proposal, pieces.verify(state, self.backend.target, proposal)

        begin = self._capture(verify, restore, (drafter, spec))
        begin()  # values for the first runs of the second half
        logits = kept[1].logits.float().clone()

        def finish() -> None:
            proposal, output = kept
            pieces.finish(state, spec, proposal, output._replace(logits=logits))

        end = self._capture(finish, restore, (drafter, spec))

        def replay(processor: LogitsProcessor | None) -> None:
            assert processor is not None, "the key says so"
            begin()
            proposal, output = kept
            logits.copy_(processor(output.logits, proposal.tree))
            end()

        return replay

    def _capture(
        self, step: Callable[[], Any], restore: Callable[[], None], variant: Any = (None, None)
    ) -> Callable[[], None]:
        """Capture `step` in two attempts, as a wait for the device in another thread spoils one."""
        try:
            replay = self._try_capture(step, restore, variant)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            restore()
            replay = self._try_capture(step, restore, variant)
        self._failures.pop(variant, None)
        return replay

    def _try_capture(
        self, step: Callable[[], Any], restore: Callable[[], None], variant: Any
    ) -> Callable[[], None]:
        try:
            with COMPILING:
                return self._graphs.capture(step, restore)
        except Exception:
            self._failures[variant] += 1
            raise

    @property
    def captured(self) -> int:
        """Number of cycle variants that are replayed."""
        return sum(replay is not None for replay in self._replays.values())

    def forget(self) -> None:
        """Drop all graphs because the model will run other code; counts of failures stay."""
        self._replays.clear()
        self._kinds.clear()

    def use_compiled(self, compiled: Mapping[tuple[Drafter | None, CycleSpec], Pieces]) -> None:
        super().use_compiled(compiled)
        self._failures.clear()  # the capture of other code may succeed

    def pieces(self, spec: CycleSpec, drafter: Drafter | None) -> Pieces:
        return self.compiled.get((drafter, spec), self.usual)

    def launch(
        self, spec: CycleSpec, drafter: Drafter | None, processor: LogitsProcessor | None = None
    ) -> None:
        replay = self._replays.get(self._key(spec, drafter, processor is not None))
        if replay is None:
            pieces = self.pieces(spec, drafter)
            decode_cycle(self.state, self.backend.target, drafter, spec, pieces, processor)
        else:
            replay(processor)
        place = self._free.popleft()
        place.fill(self.state.result)
        self._launched.append(place)

    def read(self) -> Done:
        place = self._launched.popleft()
        self._free.append(place)
        *tokens, by_lookup, drafted = place.read()
        return Done(tokens, by_lookup, drafted, None, None)

    def drop(self) -> None:
        self._free.extend(self._launched)
        self._launched.clear()
        self._graphs.synchronize()

    def timed(self, work: Callable[[], Any], restore: Callable[[], None]) -> float:
        """Return the milliseconds of `work` in replay."""
        replay = self._capture(work, restore)
        times = []
        for _ in range(TIMED_REPLAYS):
            restore()
            times.append(self._graphs.milliseconds(replay))
        return statistics.median(times)
