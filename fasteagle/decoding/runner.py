"""Runs decode cycles operation by operation, or by compiled pieces where there are some.

`compile.graphs` has the runner that replays CUDA graphs.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fasteagle.config import HeadConfig
from fasteagle.decoding.cycle import EAGER, Pieces, Proposal, decode_cycle
from fasteagle.drafting.base import Drafter
from fasteagle.drafting.draft_head import HeadDrafter
from fasteagle.logits import LogitsProcessor
from fasteagle.model import Transformer
from fasteagle.shapes import SureChain
from fasteagle.state import CycleSpec, DecodeState

Draft = Callable[[DecodeState, Drafter | None, CycleSpec], Proposal]


def may_be_shorter(drafter: Drafter, spec: CycleSpec) -> bool:
    """Whether proposals may end with padding, which a CPU leaves out of the pass."""
    return isinstance(spec.shape, SureChain) or not (drafter.always_proposes and spec.extends)


def head_config(drafter: Drafter | None) -> HeadConfig | None:
    """Of the draft head of a drafter that has one."""
    return drafter.head.config if isinstance(drafter, HeadDrafter) else None


class Done(NamedTuple):
    """What the host learns of a cycle."""

    tokens: list[int]  # new ones, then padding
    by_head: int  # of the accepted ones; what trees of a single source do not say
    by_lookup: int
    drafted: int  # tokens proposed
    draft_seconds: float | None  # None: not timed apart
    verify_seconds: float | None
    extended: bool | None = None  # whether the drafter has seen the pending pairs; None: its spec
    promised: tuple[float, ...] = ()  # see `Proposal`


class Runner:
    """Launches one cycle at a time; `read` waits for it.

    `compiled` are pieces to use for a drafter and a spec instead of the `usual` ones.
    """

    ahead = 0  # cycles launched before the first one is read
    plain_rows = 1  # of a pass without a tree
    fixed_addresses = False  # whether caches must not move: they have their full size then

    def __init__(self, target: Transformer, state: DecodeState) -> None:
        self.target, self.state = target, state
        self.usual = EAGER
        self.compiled: dict[tuple[Drafter | None, CycleSpec], Pieces] = {}
        self.error: str | None = None  # why cycles are not replayed that should be
        # What to do where memory is short, in words, for a model with this draft head or none;
        # whoever loads a model knows what would fit.
        self.advice: Callable[[HeadConfig | None], str | None] = lambda head: None
        self._on_cpu = state.root.device.type == "cpu"
        self._times: dict[str, float] = {}
        self._extended = False
        self._promised: tuple[float, ...] = ()
        self._plain: dict[int, Proposal] = {}  # by rows

    def advised(self, head: HeadConfig | None) -> str | None:
        """`advice`, or None where it fails: it must not stand in for what it is asked about."""
        with contextlib.suppress(Exception):
            return self.advice(head)
        return None

    def adopt(self, drafter: Drafter) -> None:
        """A drafter comes whose cycles this will run: it may be given a device's kernels."""

    def needs(self, specs: Sequence[CycleSpec], drafter: Drafter | None) -> bool:
        """Whether `prepare` has something to do for these."""
        return False

    def compile_ahead(self, specs: Sequence[CycleSpec], drafter: Drafter | None) -> None:
        """Compile the device's kernels that cycles of these and prompts launch."""

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
        found = self.compiled.get((drafter, spec), self.usual)
        if not self._on_cpu:
            return found
        if spec.shape is None:
            found = found._replace(draft=self._plain_draft)
        elif drafter is not None and may_be_shorter(drafter, spec):
            found = found._replace(draft=self._without_padding(found.draft))
        found = found._replace(verify=self._timed("verify", found.verify))
        self._extended, self._promised = False, ()
        return found if spec.shape is None else found._replace(draft=self._noting(found.draft))

    def _plain_draft(
        self, state: DecodeState, drafter: Drafter | None, spec: CycleSpec
    ) -> Proposal:
        """Without a drafter the proposal is the same tensors every time: made once."""
        if spec.rows not in self._plain:
            self._plain[spec.rows] = EAGER.draft(state, None, spec)
        return self._plain[spec.rows]

    def _noting(self, draft: Draft) -> Draft:
        """Timed, and whether it has shown the drafter what was pending."""
        timed = self._timed("draft", draft)

        def noting(state: DecodeState, drafter: Drafter | None, spec: CycleSpec) -> Proposal:
            proposal: Proposal = timed(state, drafter, spec)
            self._extended, self._promised = proposal.extended, proposal.promised
            return proposal

        return noting

    def _timed(self, name: str, piece: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            begin = time.perf_counter()
            found = piece(*args)
            self._times[name] = time.perf_counter() - begin
            return found

        return timed

    def _without_padding(self, draft: Draft) -> Draft:
        """On a CPU a look at the proposal costs nothing, and fewer rows are a cheaper pass."""

        def shorter(state: DecodeState, drafter: Drafter | None, spec: CycleSpec) -> Proposal:
            proposal = draft(state, drafter, spec)
            n = int(proposal.tree.valid.nonzero()[-1]) + 1
            return proposal.first_rows(max(n, min(self.plain_rows, len(proposal.depths))))

        return shorter

    def read(self) -> Done:
        """What the oldest launched cycle found."""
        *tokens, by_head, by_lookup, drafted = self.state.result.tolist()
        found = (tokens, by_head, by_lookup, drafted)
        if not self._on_cpu:
            return Done(*found, None, None)
        times = self._times
        return Done(
            *found, times.get("draft", 0.0), times["verify"], self._extended, self._promised
        )

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
