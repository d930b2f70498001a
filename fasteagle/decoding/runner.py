"""Runner of decode cycles, operation by operation or by compiled pieces.

`compile.graphs` has the runner that replays CUDA graphs.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fasteagle.decoding.cycle import EAGER, Pieces, decode_cycle, finish
from fasteagle.decoding.launch import Compiled, Done, End, Launch, may_be_shorter, variant_of
from fasteagle.drafting.base import Drafter
from fasteagle.logits import LogitsProcessor
from fasteagle.model import Output
from fasteagle.state import CycleSpec, DecodeState
from fasteagle.tree import Pool, Proposal

if TYPE_CHECKING:  # it makes runners
    from fasteagle.decoding.backend import Backend

Draft = Callable[[DecodeState, Drafter | None, CycleSpec], Proposal]


class Runner:
    """Runner that launches a cycle, and runs it at once; `read` returns the oldest result.

    `compiled` are pieces to use for a drafter and its siblings, and a spec, instead of the `usual`
    ones; runners of siblings share them. Where the runner `defers`, a launched cycle is `queued`
    until `batch.run_together` has run it.
    """

    end = End()  # of the answer
    waits = False  # whether the engine yields before it reads a cycle: others may run meanwhile
    accompanied = False  # whether there are other engines whose cycles run beside
    ahead = 0  # cycles that the device has still to run when one is read
    at_once = 1  # cycles that one call may run
    fixed_addresses = False  # whether caches must not move: they have their full size then
    captures = 0  # of graphs, tried so far
    few_rows = 0  # up to so many rows of a prompt are replayed passes of 64

    def __init__(self, backend: Backend, state: DecodeState) -> None:
        self.backend, self.state = backend, state
        self.compiled = Compiled()
        self._errors: list[str] = []  # of the runners of all siblings
        self._on_cpu = state.root.device.type == "cpu"
        self._laps: list[float] = []  # before, between and after draft and verify
        self.queued: list[Launch] = []  # launched and not run, in order
        self._failure: Exception | None = None  # of a pass that was run together
        self._proposal: Proposal
        self._plain: Proposal | None = None

    @property
    def error(self) -> str | None:
        """Reason why this engine or a sibling replays no cycles as CUDA graphs, or None."""
        return self._errors[-1] if self._errors else None

    @error.setter
    def error(self, line: str) -> None:
        self._errors[:] = [line]

    @property
    def ready(self) -> int:
        """Number of cycles that have been run already, to be read without waiting."""
        return 0

    @property
    def usual(self) -> Pieces:
        """Pieces of the backend, for any drafter and spec."""
        return self.backend.pieces

    def adopt(self, drafter: Drafter) -> None:
        """Let a drafter, whose cycles come next, draft by the backend's operations."""
        self.compiled.use(self, drafter)
        self.backend.adopt(drafter)

    def share_compiled(self, other: Runner) -> None:
        """Use what the runner `other` of a sibling engine has compiled and will compile."""
        self.compiled, self._errors = other.compiled, other._errors

    def use_compiled(self, compiled: Mapping[tuple[Drafter | None, CycleSpec], Pieces]) -> None:
        """Run these variants of the cycle by these pieces from now on."""
        self.forget()
        self.compiled.update(compiled)

    def needs(
        self, specs: Sequence[CycleSpec], drafter: Drafter | None, processed: bool = False
    ) -> bool:
        """Return whether `prepare` has something to do for these specs."""
        return False

    def compile_ahead(self, specs: Sequence[CycleSpec], drafter: Drafter | None) -> None:
        """Compile the device's kernels that prompts and cycles of these specs launch."""

    def compile_shared(self, specs: Sequence[CycleSpec], drafter: Drafter | None) -> None:
        """Compile the device's kernels that cycles of several engines share."""

    def prepare(
        self, specs: Sequence[CycleSpec], drafter: Drafter | None, processed: bool = False
    ) -> None:
        """Prepare the first cycle of each of these specs; may run cycles.

        Where `processed`, a processor will change their logits.
        """

    def forget(self) -> None:
        """Discard what was prepared, because the model runs other code from now on."""

    @property
    def defers(self) -> bool:
        """Return whether a launched cycle waits for `batch.run_together`."""
        return self.waits

    def launch(
        self, spec: CycleSpec, drafter: Drafter | None, processor: LogitsProcessor | None = None
    ) -> None:
        """Begin a cycle."""
        launch = Launch(spec, drafter, processor)
        if self.defers:
            self.queued.append(launch)
        else:
            self.run(launch)

    def take(self) -> Launch:
        """Return the first queued cycle, which runs now."""
        return self.queued.pop(0)

    def run(self, launch: Launch) -> None:
        """Run a cycle by itself."""
        spec, drafter, processor = launch
        self._laps = laps = list[float]()
        self._proposal = decode_cycle(
            self.state,
            self.backend.target,
            drafter,
            spec,
            self.pieces(spec, drafter),
            processor,
            lambda: laps.append(time.perf_counter()),
        )

    def draft(self, launch: Launch, pool: Pool | None = None) -> Proposal:
        """Return the proposal of a cycle whose pass others share, from candidates if given."""
        spec, drafter, _ = launch
        begin = time.perf_counter()
        proposal = self._draft(spec, drafter, pool)(self.state, drafter, spec)
        self.drafted(begin, time.perf_counter() - begin)
        return proposal

    def _draft(self, spec: CycleSpec, drafter: Drafter | None, pool: Pool | None) -> Draft:
        """Return the function that makes the proposal."""
        if pool is None:
            return self.pieces(spec, drafter).draft
        return functools.partial(self.backend.select, pool)

    def drafted(self, begin: float, seconds: float) -> None:
        """Note that a cycle whose pass others share began at `begin`, with its time to draft."""
        self._laps = [begin, begin + seconds]

    def finish(self, launch: Launch, proposal: Proposal, output: Output) -> None:
        """End a cycle whose pass others shared."""
        spec, drafter, processor = launch
        finish(self.state, spec, proposal, output, self.pieces(spec, drafter), processor)
        self._proposal = proposal

    def replay_prompt(
        self, ids: Sequence[int], begin: int, aux_layers: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None] | None:
        """Return what `Target.encode` does for `ids` after `begin` cached rows, by a replayed pass.

        None: there is none for so many rows.
        """
        return None

    def capture_pass(self, step: Callable[[], None], variant: Any) -> Callable[[], None] | None:
        """Return a function that replays a shared pass; None: it runs without a graph."""
        return None

    @property
    def began(self) -> float:
        """Time at which the last cycle that ran here began; 0 where it is not timed apart."""
        return self._laps[0] if self._laps else 0.0

    def fail(self, error: Exception) -> None:
        """Let `read` raise `error` instead of returning the result of a cycle."""
        self._failure = error

    def pieces(self, spec: CycleSpec, drafter: Drafter | None) -> Pieces:
        """Return compiled or usual pieces, which on CPUs draft no padding."""
        pieces = self.compiled.get(variant_of(drafter, spec), self.usual)
        if not self._on_cpu:
            return pieces
        if spec.shape is None:
            return pieces._replace(draft=self._plain_draft)
        is_shorter = drafter is not None and may_be_shorter(drafter, spec)
        if is_shorter and not self.backend.drafts(drafter, spec):
            return pieces._replace(draft=self._without_padding(pieces.draft))
        return pieces

    def _plain_draft(
        self, state: DecodeState, drafter: Drafter | None, spec: CycleSpec
    ) -> Proposal:
        """Return the proposal of plain decoding, which is made once."""
        if self._plain is None:
            self._plain = EAGER.draft(state, None, spec)
        return self._plain

    def _without_padding(self, draft: Draft) -> Draft:
        """Return `draft` without trailing padding rows, so that the pass is cheaper on a CPU."""

        def shorter(state: DecodeState, drafter: Drafter | None, spec: CycleSpec) -> Proposal:
            proposal = draft(state, drafter, spec)
            return proposal.first_rows(int(proposal.tree.valid.nonzero()[-1]) + 1)

        return shorter

    def read(self) -> Done:
        """Return the result of the oldest launched cycle; raise what made its pass fail."""
        if self._failure is not None:
            raise self._failure
        *tokens, by_lookup, drafted = self.state.result.tolist()
        begin, drafted_at, *verified_at = self._laps
        alone = bool(verified_at)  # else others shared the pass
        if not self._on_cpu:
            return Done(tokens, by_lookup, drafted, None, None, alone=alone)
        verify = verified_at[0] - drafted_at if alone else None  # a CPU needs no synchronization
        seconds, proposal = (drafted_at - begin, verify), self._proposal
        drafts = proposal.extended, proposal.promised
        return Done(tokens, by_lookup, drafted, *seconds, *drafts, alone)

    def drop(self, specs: Sequence[CycleSpec] = ()) -> bool:
        """Drop launched cycles, of these specs, which will not be read.

        Returns whether a draft head may have read the pending pairs in them.
        """
        self.queued.clear()
        self._failure = None
        return any(spec.extends for spec in specs)

    def timed(self, work: Callable[[], Any], restore: Callable[[], None]) -> float:
        """Return the milliseconds of `work` run by this runner; `restore` undoes its changes."""
        if not self._on_cpu:
            torch.cuda.synchronize(self.state.root.device)
        begin = time.perf_counter()
        work()
        if not self._on_cpu:
            torch.cuda.synchronize(self.state.root.device)
        return 1e3 * (time.perf_counter() - begin)
