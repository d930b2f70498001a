"""Run several decode cycles by one call of our CPU kernels, of one text or of several.

The weights of a small model have just passed through the CPU's caches: between two passes Python
code takes a tenth of a cycle, and the pass after it is slower. References: `Runner.run`, and
`batch.run_together` for texts that share passes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from fasteagle.compile.cpu_blocks import MAX_ROWS
from fasteagle.compile.cpu_draft import NativeDraft, Text
from fasteagle.compile.cpu_pass import NativeFinish, NativePass
from fasteagle.decoding.backend import Backend
from fasteagle.decoding.cycle import Pieces
from fasteagle.decoding.launch import Done, End, Launch, variant_of
from fasteagle.decoding.runner import Runner
from fasteagle.drafting.base import Drafter
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.drafting.lookup import LONGEST_MATCH, Corpus
from fasteagle.drafting.thresholds import Thresholds
from fasteagle.logits import LogitsProcessor
from fasteagle.model import EagleHead, Output
from fasteagle.quant.cpu_tensors import DraftTensors
from fasteagle.state import CycleSpec, DecodeState
from fasteagle.tree import Proposal

MOST_CYCLES = 8  # of a call: the policy decides between two calls
CALL_MS = 24.0  # longest call of several cycles, whose tokens come at once


class How(NamedTuple):
    """Settings that cycles of several texts must share to be run by one call."""

    head: EagleHead | None
    corpus: Corpus | None
    depth: int
    head_depth: int
    width: int
    keep: float
    needed: float | None
    thresholds: Thresholds
    aux_layers: tuple[int, ...]

    @classmethod
    def of(cls, text: Text) -> How:
        state, drafter, spec = text
        corpus, keep, needed = None, 0.0, None
        head, rule = None, (0, Thresholds())
        if spec.shape is not None and drafter is not None and drafter.lookup is not None:
            corpus, keep = drafter.lookup.corpus, drafter.lookup_threshold
            needed = drafter.head_gain
        if spec.shape is not None and isinstance(drafter, EagleDrafter):
            head, rule = drafter.head, text.rule
        sizes = spec.depth, rule[0], spec.width
        return cls(head, corpus, *sizes, keep, needed, rule[1], state.aux_layers)


def _drafting(text: Text, how: How) -> DraftTensors:
    """Return what drafts for a text."""
    tensors, drafter = DraftTensors(), text.drafter
    if how.depth and drafter is not None and drafter.lookup is not None:
        tensors = tensors._replace(table=drafter.lookup.table, recent=drafter.lookup.last)
    if how.head is not None and isinstance(drafter, EagleDrafter):
        keys, values = drafter.cache.layers[0]
        tensors = tensors._replace(keys=keys, values=values)
        if text.is_noisy:
            noise = text.state.sampling
            tensors = tensors._replace(temperature=noise.temperature, seed=noise.seed)
    return tensors


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
            return True
        if not self._draft.runs(drafter, spec):
            return False
        return not isinstance(drafter, EagleDrafter) or self._draft.reads(drafter.head)

    def run(self, how: How, texts: Sequence[Text], ends: Sequence[End], n: int) -> list[list[Done]]:
        """Return the results of `n` cycles of each text; `how` is that of all.

        They are fewer where a text is at its end, or has logits that are not finite.
        """
        begin = time.perf_counter()
        native = None if how.head is None else self._draft.of(how.head)
        samplings = [self._finish.sampling(text.state, text.spec.kind) for text in texts]
        cycles = self._verify.cycles(
            ends,
            n,
            None if native is None else native.weights,
            [tensor for text in texts for tensor in self._finish.tensors(text.state)],
            [tensor for sampling in samplings for tensor in sampling],
            [tensor for text in texts for tensor in _drafting(text, how)],
            None if how.head is None else texts[0].eagle.target_ids,
            [] if how.corpus is None else [*how.corpus.index],
            LONGEST_MATCH,
            how.depth,
            how.head_depth,
            how.width,
            how.keep,
            how.needed,
            *how.thresholds,
            how.aux_layers,
        )
        alone, passes = len(texts) == 1, len(cycles[0])
        own = sum(ms for _, (*_, ms), _, _ in cycles[0])
        shared = (1e3 * (time.perf_counter() - begin) - own) / passes
        return [
            [
                Done(
                    result[:-2],
                    result[-2],
                    result[-1],
                    draft_ms / 1e3,
                    verify_ms / 1e3 if alone else None,
                    extended,
                    tuple(promised),
                    alone,
                    ms + shared,
                )
                for result, (draft_ms, verify_ms, ms), extended, promised in of_text
            ]
            for of_text in cycles
        ]


class CpuRunner(Runner):
    """Runner that launches several cycles before it runs them, where one call may run them.

    They are run when the first of them is read, or before by `batch.run_together`; `ready` is how
    many have been run.
    """

    def __init__(self, backend: Backend, state: DecodeState) -> None:
        super().__init__(backend, state)
        self._done: deque[Done] = deque()
        self._last: tuple[object, ...] = ()  # variant of the cycle, and the pieces
        self._runs: NativeCycles | None = None  # what runs several cycles of this variant

    @property
    def defers(self) -> bool:
        return self.accompanied

    @property
    def ready(self) -> int:
        return len(self._done)

    def launch(
        self, spec: CycleSpec, drafter: Drafter | None, processor: LogitsProcessor | None = None
    ) -> None:
        launch = Launch(spec, drafter, processor)
        if self.defers or self.cycles(launch) is not None:
            self.queued.append(launch)
        else:
            self._run_queued()
            self.run(launch)

    def take(self) -> Launch:
        self.at_once = 1
        return super().take()

    def run(self, launch: Launch) -> None:
        begin = time.perf_counter()
        super().run(launch)
        done = super().read()
        self._done.append(done._replace(ms=1e3 * (time.perf_counter() - begin)))

    def finish(self, launch: Launch, proposal: Proposal, output: Output) -> None:
        super().finish(launch, proposal, output)
        self._done.append(super().read())

    def read(self) -> Done:
        if self._failure is None and not self._done:
            self._run_queued()
        return self._done.popleft() if self._failure is None else super().read()

    def drop(self, specs: Sequence[CycleSpec] = ()) -> bool:
        super().drop(specs)
        drafted = any(done.extended for done in self._done)
        self._done.clear()
        return drafted

    def forget(self) -> None:
        super().forget()
        self._last = ()

    def cycles(self, launch: Launch) -> NativeCycles | None:
        """Return what runs several cycles of this variant by one call; None: nothing does."""
        usual, (spec, drafter, processor) = self.usual, launch
        if processor is not None:
            return None
        variant = spec, drafter, usual
        if not self._last or any(a is not b for a, b in zip(variant, self._last, strict=True)):
            cycles = NativeCycles.of(self.compiled.get(variant_of(drafter, spec), usual))
            runs = cycles is not None and cycles.runs(drafter, spec)
            self._last, self._runs = variant, cycles if runs else None
        return self._runs

    def leading(self) -> int:
        """Return the number of first queued cycles that one call runs: those of one variant."""
        if not self.queued or self.cycles(first := self.queued[0]) is None:
            return 0
        others = (i for i, launch in enumerate(self.queued) if launch != first)
        return next(others, len(self.queued))

    def took(self, done: Sequence[Done]) -> None:
        """Take the results of the first queued cycles."""
        self._done += done
        del self.queued[: len(done)]
        mean = sum(one.ms or 0.0 for one in done) / len(done)
        self.at_once = max(1, min(MOST_CYCLES, int(CALL_MS / max(mean, 0.01))))

    def _run_queued(self) -> None:
        """Run the queued cycles, all of them unless the answer ends before."""
        while self.queued:
            n = self.leading()
            if not n:
                self.run(self.take())
            elif run_queued([self]) < n:
                return


def run_queued(runners: Sequence[CpuRunner]) -> int:
    """Run the first queued cycles of all runners by one call; return how many of each it has run.

    0: no call can, as they are not alike, or not run by kernels alone.
    """
    n = min(runner.leading() for runner in runners)
    if not n or len(runners) > MAX_ROWS:
        return 0
    launches = [runner.queued[0] for runner in runners]
    pairs = zip(runners, launches, strict=True)
    texts = [Text(runner.state, launch.drafter, launch.spec) for runner, launch in pairs]
    how, *others = {How.of(text) for text in texts}
    cycles = runners[0].cycles(launches[0])
    assert cycles is not None, "see leading"
    if others:
        return 0
    done = cycles.run(how, texts, [runner.end for runner in runners], n)
    for runner, own in zip(runners, done, strict=True):
        runner.took(own)
    return len(done[0])
