"""Runs decode cycles operation by operation, or by compiled pieces where there are some.

`compile.graphs` has the runner that replays CUDA graphs.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fasteagle.cycle import EAGER, Pieces, Proposal, decode_cycle
from fasteagle.drafting.base import Drafter
from fasteagle.logits import LogitsProcessor
from fasteagle.model import Output, Transformer
from fasteagle.state import CycleSpec, DecodeState


class Done(NamedTuple):
    """What the host learns of a cycle."""

    tokens: list[int]  # new ones, then padding
    by_head: int  # of the accepted ones; what trees of a single source do not say
    by_lookup: int
    drafted: int  # tokens proposed
    draft_seconds: float | None  # None: not timed apart
    verify_seconds: float | None


class Runner:
    """Launches one cycle at a time; `read` waits for it.

    `compiled` are pieces to use for a drafter and a spec instead of the eager ones.
    """

    ahead = 0  # cycles launched before the first one is read
    plain_rows = 1  # of a pass without a tree
    fixed_addresses = False  # whether caches must not move: they have their full size then

    def __init__(self, target: Transformer, state: DecodeState) -> None:
        self.target, self.state = target, state
        self.compiled: dict[tuple[Drafter | None, CycleSpec], Pieces] = {}
        self.error: str | None = None  # why cycles are not replayed that should be
        self._on_cpu = state.root.device.type == "cpu"
        self._times: dict[str, float] = {}
        self._plain: dict[int, Proposal] = {}  # by rows

    def needs(self, specs: Sequence[CycleSpec], drafter: Drafter | None) -> bool:
        """Whether `prepare` has something to do for these."""
        return False

    def prepare(self, specs: Sequence[CycleSpec], drafter: Drafter | None) -> None:
        """Make ready what is needed before the first cycle of these; may run cycles."""

    def forget(self) -> None:
        """What was prepared is void: the model runs other code from now on."""

    def launch(
        self, spec: CycleSpec, drafter: Drafter | None, processor: LogitsProcessor | None = None
    ) -> None:
        """Begin a cycle."""
        self._times.clear()
        pieces = self.pieces(spec, drafter)
        decode_cycle(self.state, self.target, drafter, spec, pieces, processor)

    def pieces(self, spec: CycleSpec, drafter: Drafter | None) -> Pieces:
        """Compiled pieces if there are some, timed where a clock costs no synchronization."""
        found = self.compiled.get((drafter, spec), EAGER)
        if not self._on_cpu:
            return found
        if spec.shape is None:
            found = found._replace(draft=self._plain_draft)
        elif drafter is not None and not (drafter.always_proposes and spec.extends):
            found = self._plain_if_empty(found, spec, drafter)
        found = found._replace(verify=self._timed("verify", found.verify))
        return (
            found if spec.shape is None else found._replace(draft=self._timed("draft", found.draft))
        )

    def _plain_draft(
        self, state: DecodeState, drafter: Drafter | None, spec: CycleSpec
    ) -> Proposal:
        """Without a drafter the proposal is the same tensors every time: made once."""
        if spec.rows not in self._plain:
            self._plain[spec.rows] = EAGER.draft(state, None, spec)
        return self._plain[spec.rows]

    def _timed(self, name: str, piece: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            begin = time.perf_counter()
            found = piece(*args)
            self._times[name] = time.perf_counter() - begin
            return found

        return timed

    def _plain_if_empty(self, pieces: Pieces, spec: CycleSpec, drafter: Drafter) -> Pieces:
        """On a CPU a look at the proposal costs nothing, and one row is cheaper than many."""
        plain = dataclasses.replace(spec, shape=None, rows=self.plain_rows)
        plain_pieces = self.compiled.get((drafter, plain), EAGER)

        def draft(state: DecodeState, drafter: Drafter | None, spec: CycleSpec) -> Proposal:
            proposal = pieces.draft(state, drafter, spec)
            if proposal.tree.valid[1:].any():
                return proposal
            return self._plain_draft(state, drafter, plain)

        def finish(state: DecodeState, spec: CycleSpec, proposal: Proposal, output: Output) -> None:
            if len(proposal.depths) == spec.rows:
                pieces.finish(state, spec, proposal, output)
            else:
                plain_pieces.finish(state, plain, proposal, output)

        return Pieces(draft, pieces.verify, finish)

    def read(self) -> Done:
        """What the oldest launched cycle found."""
        *tokens, by_head, by_lookup, drafted = self.state.result.tolist()
        found = (tokens, by_head, by_lookup, drafted)
        if not self._on_cpu:
            return Done(*found, None, None)
        return Done(*found, self._times.get("draft", 0.0), self._times["verify"])

    def drop(self) -> None:
        """Forget cycles that were launched and will not be read."""

    def timed(self, work: Callable[[], Any], restore: Callable[[], None]) -> float:
        """Milliseconds of `work`, as this runner would run it; `restore` undoes what it changed."""
        if not self._on_cpu:
            torch.cuda.synchronize(self.state.root.device)
        begin = time.perf_counter()
        work()
        if not self._on_cpu:
            torch.cuda.synchronize(self.state.root.device)
        return 1e3 * (time.perf_counter() - begin)
