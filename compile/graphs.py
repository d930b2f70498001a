"""Replay whole decode cycles as CUDA graphs, one graph for each variant of the cycle.

`CapturedRunner` manages the graphs without any CUDA call; `CudaGraphs` captures them. The host only
reads the result of a cycle, and by then the next cycle has been launched, unless its pass is that
of several sequences.
"""

from __future__ import annotations

import functools
import statistics
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from fasteagle.compile.cuda_graphs import CudaGraphs, PinnedPlace
from fasteagle.compile.precompile import compile_ahead, compile_launches
from fasteagle.compile.short_prompts import ROWS, Encoded, ShortPasses
from fasteagle.compile.split_cycles import SplitCycle, capture_split, lasting
from fasteagle.decoding.backend import Backend
from fasteagle.decoding.cycle import Pieces, decode_cycle
from fasteagle.decoding.launch import Done, Launch, drop_others, head_config, variant_of
from fasteagle.decoding.runner import Runner
from fasteagle.drafting.base import Drafter
from fasteagle.errors import first_line, is_out_of_memory
from fasteagle.logits import LogitsProcessor
from fasteagle.model import Output
from fasteagle.multi_round import accept_sampled
from fasteagle.state import CycleSpec, DecodeState
from fasteagle.tree import Pool, Proposal

# Held during a capture, and during the first run of compiled code: compilation times code, and
# timing waits for the whole device, which spoils a capture in another thread.
COMPILING = threading.RLock()
Captured = TypeVar("Captured")
# Consecutive failures of a variant, with any code: each leaves a pool in torch's allocator of
# page-locked memory.
MOST_FAILURES = 4
MOST_KINDS = 2  # sampling modes whose graphs are stored; the oldest is dropped
TIMED_REPLAYS = 5


# Replays a cycle. One that was captured for a processor of logits has three graphs: the processor,
# which reads the tree on the host, runs before the last one.
Replay = Callable[[LogitsProcessor | None], None]


class CapturedRunner(Runner):
    """Runner that replays cycles; those that cannot be captured run without a graph (`error`).

    A cycle is one graph. Where it `defers`, it is two: its draft and its end, around a pass that it
    shares with the cycles of other engines, which is a graph too.
    """

    ahead = 1
    fixed_addresses = True

    def __init__(self, backend: Backend, state: DecodeState, graphs: CudaGraphs) -> None:
        super().__init__(backend, state)
        self._graphs = graphs
        self._replays: dict[Any, Replay | None] = {}  # None: not captured
        self._split: dict[Any, SplitCycle | None] = {}
        self._short: ShortPasses | None = None
        self._drafted: SplitCycle | None = None  # has drafted for the cycle that is under way
        self._failures: Counter[Any] = Counter()  # consecutive ones, by drafter and spec
        self._kinds: list[Any] = []
        self._n_compiled = 0  # compiled variants when graphs were captured
        # One place is filled while the other is read.
        self._free = deque(graphs.place(state.result) for _ in range(self.ahead + 1))
        # Each with whether its launch took the time of its own replay alone.
        self._launched: deque[tuple[PinnedPlace, bool]] = deque()

    def adopt(self, drafter: Drafter) -> None:
        super().adopt(drafter)
        tables: list[dict[Any, Any]] = [self._failures, self._replays, self._split]
        for table in tables:
            drop_others(table, [drafter])

    def _key(self, spec: CycleSpec, drafter: Drafter | None, processed: bool = False) -> Any:
        # A cache that has grown has another address, and its graphs are invalid.
        caches = [] if drafter is None else drafter.caches
        # A cache of another size may get the address of an old one.
        places = tuple((cache.rows.data_ptr(), cache.n_slots) for cache in caches)
        return drafter, spec, places, processed

    def needs(
        self, specs: Sequence[CycleSpec], drafter: Drafter | None, processed: bool = False
    ) -> bool:
        if len(self.compiled) != self._n_compiled:  # a sibling has compiled since
            self._n_compiled = len(self.compiled)
            self.forget()
        if self.defers:  # whole cycles are captured once it is alone
            return specs[0].kind not in self._kinds
        return any(self._key(spec, drafter, processed) not in self._replays for spec in specs)

    def prepare(
        self, specs: Sequence[CycleSpec], drafter: Drafter | None, processed: bool = False
    ) -> None:
        """Capture the variants not captured yet; cycles run on the state, which is restored.

        A compilation in another thread goes on after all of them.
        """
        with COMPILING:
            self._make_room(specs[0].kind)
            self.compile_ahead(specs, drafter)
            if self.defers:
                return
            self._prepare_prompts()
            for spec in specs:
                self._replay_of(spec, drafter, processed)

    def _replay_of(
        self, spec: CycleSpec, drafter: Drafter | None, processed: bool
    ) -> Replay | None:
        """Return the replay of a whole cycle, which may be captured now."""
        key = self._key(spec, drafter, processed)
        if key not in self._replays:
            capture = self._capture_halves if processed else self._capture_whole
            own = functools.partial(capture, spec, drafter)
            self._replays[key] = self._attempt(spec, drafter, own)
        return self._replays[key]

    def _prepare_prompts(self) -> None:
        """Capture passes over parts of a prompt, after the text, where rows are free."""
        free, aux_layers = int(self.state.seq_len), self.state.aux_layers
        try:
            for rows in ROWS:
                self.replay_prompt([0] * rows, free, aux_layers)
        except Exception as error:  # a prompt of fewer rows may still run
            self._explain(error, None, (None, None))

    def compile_ahead(self, specs: Sequence[CycleSpec], drafter: Drafter | None) -> None:
        wanted = {(head_config(drafter), spec.shape, spec.kind) for spec in specs}
        if not wanted <= self.compiled.kernels:
            with COMPILING:  # it waits for the device
                compile_ahead(self.backend, drafter, specs, self.state)
            self.compiled.kernels |= wanted

    def compile_shared(self, specs: Sequence[CycleSpec], drafter: Drafter | None) -> None:
        backend, device = self.backend, self.state.root.device
        with COMPILING:
            compile_launches(lambda: backend.launch_shared(self.state, drafter, specs), device)

    def _make_room(self, kind: object) -> None:
        if kind in self._kinds:
            return
        self._kinds.append(kind)
        if len(self._kinds) > MOST_KINDS:
            oldest = self._kinds.pop(0)
            self._replays = {k: v for k, v in self._replays.items() if k[1].kind != oldest}
            self._split = {k: v for k, v in self._split.items() if k[1].kind != oldest}

    def _attempt(
        self,
        spec: CycleSpec,
        drafter: Drafter | None,
        capture: Callable[[Callable[[], None]], Captured],
    ) -> Captured | None:
        """Return what `capture` returns, which gets a function that restores the state, or None."""
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
                return capture(restore)
        except Exception as error:  # on any error the step itself still works
            self._explain(error, drafter, variant)
            return None
        finally:
            restore()

    def _explain(self, error: Exception, drafter: Drafter | None, variant: Any) -> None:
        line = first_line(error, 200)
        if is_out_of_memory(error) and (advice := self.backend.advised(head_config(drafter))):
            line += f": {advice}"
        if (n := self._failures[variant]) >= MOST_FAILURES:
            line += f" (failed {n} times, not tried again)"
        self.error = line

    @property
    def few_rows(self) -> int:  # type: ignore[override]
        return self.backend.few_rows

    def replay_prompt(
        self, ids: Sequence[int], begin: int, aux_layers: tuple[int, ...]
    ) -> Encoded | None:
        if not self.few_rows or len(ids) > ROWS[-1]:
            return None
        if self._short is None:
            self._short = ShortPasses(self.backend, self.state, self.capture_pass)
        return self._short(ids, begin, aux_layers)

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
        """Capture a cycle before its processor and after it."""
        target, pieces = self.backend.target, self.pieces(spec, drafter)
        own = functools.partial(self._capture, restore=restore, variant=(drafter, spec))
        split = capture_split(self.state, target, drafter, spec, pieces, own)
        proposal = split.draft()
        step, output = lasting(lambda: pieces.verify(self.state, target, proposal))
        verify = own(step)

        def replay(processor: LogitsProcessor | None) -> None:
            assert processor is not None, "the key says so"
            split.draft()
            verify()
            split.read(output._replace(logits=processor(output.logits, proposal.tree)))
            split.end()

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
        self.captures += 1
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
        self._split.clear()
        self._short = None
        self._kinds.clear()

    def use_compiled(self, compiled: Mapping[tuple[Drafter | None, CycleSpec], Pieces]) -> None:
        super().use_compiled(compiled)
        self._failures.clear()  # the capture of other code may succeed

    def pieces(self, spec: CycleSpec, drafter: Drafter | None) -> Pieces:
        return self.compiled.get(variant_of(drafter, spec), self.usual)

    @property
    def defers(self) -> bool:
        # A sequence alone is replayed as a whole, and launched ahead.
        return self.accompanied and self.backend.shares_passes

    def run(self, launch: Launch) -> None:
        spec, drafter, processor = launch
        n_captured = len(self._replays)
        replay = self._replay_of(spec, drafter, processor is not None)
        if replay is None:
            pieces = self.pieces(spec, drafter)
            decode_cycle(self.state, self.backend.target, drafter, spec, pieces, processor)
        else:
            replay(processor)
        self._begin_to_read(alone=len(self._replays) == n_captured)  # a capture takes time

    def draft(self, launch: Launch, pool: Pool | None = None) -> Proposal:
        self._drafted = split = self._split_of(launch, pool)
        if split is None:
            return super().draft(launch, pool)
        if pool is not None:
            split.read_pool(pool)
        return split.draft()

    def finish(self, launch: Launch, proposal: Proposal, output: Output) -> None:
        if (split := self._drafted) is None:
            super().finish(launch, proposal, output)
        else:
            if launch.processor is not None:
                logits = launch.processor(output.logits, proposal.tree)
                output = output._replace(logits=logits)
            split.read(output)
            split.end()
        self._begin_to_read(alone=False)

    def _split_of(self, launch: Launch, pool: Pool | None = None) -> SplitCycle | None:
        """Return the captured parts of a cycle whose pass is shared, which may be captured now.

        They begin with the candidates of the draft head where `pool` has them.
        """
        spec, drafter, _ = launch
        key = *self._key(spec, drafter), pool is None
        if key not in self._split:
            state, target, pieces = self.state, self.backend.target, self.pieces(spec, drafter)
            own_pool = None if pool is None else Pool(*(each.clone() for each in pool[:3]))
            pieces = pieces._replace(draft=self._draft(spec, drafter, own_pool))

            def capture(restore: Callable[[], None]) -> SplitCycle:
                own = functools.partial(self._capture, restore=restore, variant=(drafter, spec))
                return capture_split(state, target, drafter, spec, pieces, own, own_pool)

            self._split[key] = self._attempt(spec, drafter, capture)
        return self._split[key]

    def capture_pass(self, step: Callable[[], None], variant: Any) -> Callable[[], None] | None:
        if self._failures[variant] >= MOST_FAILURES:
            return None
        try:
            return self._capture(step, lambda: None, variant)  # it may run as often as it likes
        except Exception as error:
            self._explain(error, None, variant)
            return None

    def _begin_to_read(self, alone: bool) -> None:
        place = self._free.popleft()
        place.fill(self.state.result)
        self._launched.append((place, alone))

    def read(self) -> Done:
        if self._failure is not None:
            return super().read()
        # Launches after it come before it is read.
        alone = all(is_alone for _, is_alone in self._launched)
        place, _ = self._launched.popleft()
        self._free.append(place)
        *tokens, by_lookup, drafted = place.read()
        return Done(tokens, by_lookup, drafted, None, None, alone=alone)

    def drop(self, specs: Sequence[CycleSpec] = ()) -> bool:
        has_drafted = super().drop(specs)
        self._free.extend(place for place, _ in self._launched)
        self._launched.clear()
        self._graphs.synchronize()
        return has_drafted

    def timed(self, work: Callable[[], Any], restore: Callable[[], None]) -> float:
        """Return the milliseconds of `work` in replay."""
        replay = self._capture(work, restore)
        times = []
        for _ in range(TIMED_REPLAYS):
            restore()
            times.append(self._graphs.milliseconds(replay))
        return statistics.median(times)
