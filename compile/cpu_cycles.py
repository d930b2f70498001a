"""Run several decode cycles of one sequence by one call of our CPU kernels.

The weights of a small model have just passed through the CPU's caches: between two passes Python
code takes a tenth of a cycle, and the pass after it is slower. The reference is `Runner.run`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from torch import Tensor

from fasteagle.compile.cpu_draft import LOOKING_UP, NativeDraft, Text
from fasteagle.compile.cpu_pass import MAX_ROWS, NativeFinish, NativePass
from fasteagle.decoding.cycle import Pieces
from fasteagle.decoding.launch import Done, Launch, variant_of
from fasteagle.decoding.runner import Backend, Runner
from fasteagle.drafting.base import Drafter
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.drafting.lookup import LONGEST_MATCH
from fasteagle.drafting.thresholds import Thresholds
from fasteagle.logits import LogitsProcessor
from fasteagle.quant.cpu_tensors import DraftTensors
from fasteagle.state import CycleSpec, DecodeState

MOST_CYCLES = 8  # of a call: the policy decides between two calls
CALL_MS = 24.0  # longest call of several cycles, whose tokens come at once


class NativeCycles:
    """Cycles by `run_cycles` in `quant/cpu/cycles.h`, which joins these pieces."""

    def __init__(self, draft: NativeDraft, verify: NativePass, finish: NativeFinish) -> None:
        self._draft, self._verify, self._finish = draft, verify, finish

    @staticmethod
    def of(pieces: Pieces) -> NativeCycles | None:
        """Return the cycles that these pieces make; None unless kernels run them all."""
        draft, verify, finish = pieces
        if isinstance(draft, NativeDraft) and isinstance(verify, NativePass):
            return NativeCycles(draft, verify, finish) if isinstance(finish, NativeFinish) else None
        return None

    def runs(self, drafter: Drafter | None, spec: CycleSpec) -> bool:
        """Return whether one call runs cycles of this variant."""
        if spec.accept is not None or spec.rows > MAX_ROWS:
            return False
        if spec.shape is None:
            return spec.rows == 1
        if not self._draft.runs(drafter, spec):
            return False
        return not isinstance(drafter, EagleDrafter) or self._draft.reads(drafter.head)

    def run(
        self,
        state: DecodeState,
        drafter: Drafter | None,
        spec: CycleSpec,
        ends: Sequence[int],
        n: int,
    ) -> list[Done]:
        """Run `n` cycles, fewer where one has a token of `ends`, or logits that are not finite."""
        begin = time.perf_counter()
        tensors, corpus, keep, needed = DraftTensors(), list[Tensor](), 0.0, None
        head, rule, is_noisy = None, (0, Thresholds()), False
        if spec.shape is not None and isinstance(drafter, LOOKING_UP):
            lookup = drafter.lookup
            tensors = tensors._replace(table=lookup.table, kept=lookup.last)
            corpus = [] if lookup.corpus is None else [*lookup.corpus.index]
            keep, needed = drafter.lookup_threshold, drafter.head_gain
        if spec.shape is not None and isinstance(drafter, EagleDrafter):
            text = Text(state, drafter, spec)
            head, rule, is_noisy = self._draft.of(drafter.head), text.rule, text.is_noisy
            keys, values = drafter.cache.layers[0]
            tensors = tensors._replace(target_ids=drafter.target_ids, keys=keys, values=values)
        cycles = self._verify.cycles(
            ends,
            n,
            None if head is None else head.weights,
            self._finish.tensors(state),
            self._finish.sampling(state, spec.kind),
            tensors,
            corpus,
            LONGEST_MATCH,
            spec.depth,
            rule[0],
            spec.width,
            is_noisy,
            keep,
            needed,
            *rule[1],
            state.aux_layers,
        )
        own = sum(ms for _, (*_, ms), _, _ in cycles)
        shared = (1e3 * (time.perf_counter() - begin) - own) / len(cycles)
        return [
            Done(
                result[:-2],
                result[-2],
                result[-1],
                draft_ms / 1e3,
                verify_ms / 1e3,
                extended,
                tuple(promised),
                ms=ms + shared,
            )
            for result, (draft_ms, verify_ms, ms), extended, promised in cycles
        ]


class CpuRunner(Runner):
    """Runner that launches several cycles before it runs them, where one call may run them.

    They are run when the first of them is read; `ready` is how many others have been run.
    """

    def __init__(self, backend: Backend, state: DecodeState) -> None:
        super().__init__(backend, state)
        self._queued: list[Launch] = []
        self._done: deque[Done] = deque()
        self._last: tuple[object, ...] = ()  # variant of the cycle, and the pieces
        self._runs: NativeCycles | None = None  # what runs several cycles of this variant

    @property
    def defers(self) -> bool:
        return self.waits and self.accompanied

    @property
    def ready(self) -> int:
        return len(self._done)

    def launch(
        self, spec: CycleSpec, drafter: Drafter | None, processor: LogitsProcessor | None = None
    ) -> None:
        if self.defers:
            super().launch(spec, drafter, processor)
        elif processor is None and self._cycles(spec, drafter) is not None:
            self._queued.append(Launch(spec, drafter, processor))
        else:
            self._run_queued()
            self.at_once = 1
            begin = time.perf_counter()
            self.run(Launch(spec, drafter, processor))
            done = super().read()
            self._done.append(done._replace(ms=1e3 * (time.perf_counter() - begin)))

    def read(self) -> Done:
        if not self._done:
            self._run_queued()
        return self._done.popleft() if self._done else super().read()

    def drop(self, specs: Sequence[CycleSpec] = ()) -> bool:
        super().drop(specs)
        drafted = any(done.extended for done in self._done)
        self._queued.clear()
        self._done.clear()
        return drafted

    def forget(self) -> None:
        super().forget()
        self._last = ()

    def _cycles(self, spec: CycleSpec, drafter: Drafter | None) -> NativeCycles | None:
        """Return what runs several cycles of this variant by one call; None: nothing does."""
        pieces = self.usual
        variant = spec, drafter, pieces
        if not self._last or any(a is not b for a, b in zip(variant, self._last, strict=True)):
            cycles = NativeCycles.of(pieces)
            is_compiled = variant_of(drafter, spec) in self.compiled
            runs = cycles is not None and not is_compiled and cycles.runs(drafter, spec)
            self._last, self._runs = variant, cycles if runs else None
        return self._runs

    def _run_queued(self) -> None:
        """Run the queued cycles, all of them unless the answer ends before."""
        while queued := self._queued:
            variant = spec, drafter = queued[0][:2]
            others = (i for i, launch in enumerate(queued) if launch[:2] != variant)
            n = next(others, len(queued))
            cycles = self._cycles(spec, drafter)
            assert cycles is not None, "see launch"
            done = cycles.run(self.state, drafter, spec, self.ends, n)
            self._done += done
            del queued[: len(done)]
            mean = sum(one.ms or 0.0 for one in done) / len(done)
            self.at_once = max(1, min(MOST_CYCLES, int(CALL_MS / max(mean, 0.01))))
            if len(done) < n:
                return
