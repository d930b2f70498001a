"""Backend of one model: which code runs the parts of its decode cycles."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from weakref import WeakKeyDictionary

from torch import Tensor

from fasteagle.config import HeadConfig
from fasteagle.decoding.cycle import EAGER, Pieces, select
from fasteagle.decoding.launch import Capture, Launch
from fasteagle.decoding.runner import Runner
from fasteagle.decoding.together import verify_together
from fasteagle.drafting.base import Drafter, DraftOps
from fasteagle.drafting.draft_head import HeadDrafter, under_mask
from fasteagle.model import CORE, EagleHead, Ops, Output, Target
from fasteagle.state import CycleSpec, DecodeState
from fasteagle.tree import Pool, Proposal

HeadBlocks = MutableMapping[EagleHead, Callable[..., Tensor]]
Advice = Callable[[HeadConfig | None], str | None]


class Backend:
    """Backend that runs the parts of decode cycles of one model; this one by the core, eagerly.

    It is chosen once, when the model has been loaded, and shared by all engines over the model.
    Subclasses translate the core: they read its modules, keep weights in a layout of their own, and
    override what they run; other parts stay the core's. `describe` names them.
    """

    name = "eager"  # or: compiled, cpu, cuda
    parts: frozenset[str] = frozenset()  # that kernels run: products, passes, drafting, commits
    most_rows: int | None = None  # of a pass that rounds as plain decoding does; None: no limit
    merges_lookup = False  # whether looked-up tokens join a tree for next to nothing
    few_rows = 0  # of a prompt, that passes of 64 compute sooner than one, with the same bits

    def __init__(self, target: Target, advice: Advice | None = None) -> None:
        self.target = target
        self.left: set[str] = set()  # parts whose kernels failed their check
        self._advice = advice
        self._blocks: HeadBlocks = WeakKeyDictionary()  # compiled blocks of draft heads

    @property
    def pieces(self) -> Pieces:
        """Return the draft, verify and finish parts of a cycle."""
        return EAGER

    def runner(self, state: DecodeState) -> Runner:
        """Return the runner of one engine's cycles."""
        return Runner(self, state)

    def adopt(self, drafter: Drafter) -> None:
        """Let a drafter draft by this backend's operations."""
        drafter.run_by(self.draft_ops(drafter))

    def drafts(self, drafter: Drafter | None, spec: CycleSpec) -> bool:
        """Return whether kernels run all drafting of a cycle, so that none of it is compiled."""
        return False

    def run_queued(self, runners: Sequence[Runner]) -> int:
        """Run as many waiting cycles of each by one call; return how many, 0 where no call can."""
        return 0

    def draft_together(
        self, runners: Sequence[Runner], launches: Sequence[Launch]
    ) -> list[Proposal]:
        """Return the proposal of each launched cycle, in order."""
        pairs = zip(runners, launches, strict=True)
        return [runner.draft(launch) for runner, launch in pairs]

    def drafts_together(self, drafter: Drafter) -> bool:
        """Return whether one run of its draft head serves the cycles of several engines."""
        return False

    def launch_shared(
        self, state: DecodeState, drafter: Drafter | None, specs: Sequence[CycleSpec]
    ) -> None:
        """Launch what cycles of several engines share, so that it is compiled."""

    def select(
        self, pool: Pool, state: DecodeState, drafter: Drafter | None, spec: CycleSpec
    ) -> Proposal:
        """Return the proposal of a cycle from candidates of its draft head."""
        return select(pool, state, drafter, spec)

    @property
    def shares_passes(self) -> bool:
        """Return whether cycles that are replayed share their passes; others always do."""
        return False

    def verify_together(
        self,
        states: Sequence[DecodeState],
        proposals: Sequence[Proposal],
        capture: Capture | None = None,
    ) -> list[Output]:
        """Run the target once over the rows of all proposals; return the output of each.

        A backend that replays its passes has them captured by `capture`.
        """
        return verify_together(states, self.target, proposals)

    def draft_ops(self, drafter: Drafter) -> DraftOps:
        """Return the operations that `drafter` has to draft by."""
        return DraftOps(head=self.step(drafter.head) if isinstance(drafter, HeadDrafter) else None)

    def step(self, head: EagleHead) -> Callable[..., tuple[Tensor, Tensor]] | None:
        """Return the function that runs a step of a draft head; None: the draft head itself."""
        block = self._blocks.get(head)
        if block is None:
            return None
        return functools.partial(head.forward, block=under_mask(block))

    @property
    def leaves_blocks(self) -> bool:
        """Return whether the target's blocks are the core's, to be compiled.

        Experts cannot be compiled: which of them run is known when their router has run.
        """
        return self.target.config.moe is None

    def leaves_head(self, head: EagleHead) -> bool:
        """Return whether the block of this draft head is the core's, to be compiled."""
        return True

    def head_ops(self, head: EagleHead) -> Ops:
        """Return the operations that the block of this draft head runs by."""
        return CORE

    def use_compiled_blocks(
        self,
        run_blocks: Callable[..., Tensor] | None,
        heads: Mapping[EagleHead, Callable[..., Tensor]],
    ) -> None:
        """Run the blocks of the target and of draft heads by compiled code from now on."""
        if run_blocks is not None:
            ops = self.target.ops._replace(run_blocks=run_blocks)
            self.target = dataclasses.replace(self.target, ops=ops)
            self.name = "compiled" if self.name == "eager" else self.name
        self._blocks.update(heads)

    def drop_compiled(self, heads: Iterable[EagleHead]) -> None:
        """Run the blocks of these draft heads uncompiled from the next `adopt` on."""
        for head in heads:
            self._blocks.pop(head, None)

    @property
    def core(self) -> Target:
        """Target as the core runs it, over caches of the same format."""
        return dataclasses.replace(self.target, ops=self.target.core_ops)

    def leave(self, part: str) -> None:
        """Leave a part to the core from now on, because its kernels fail here."""
        self.left.add(part)

    def describe(self) -> str:
        """Return one line: the backend's name, and the parts that are left to the core."""
        left = f" ({', '.join(sorted(self.left))} by torch, see the warning)" if self.left else ""
        experts = self.name == "eager" and self.target.config.moe is not None
        return f"backend {self.name}{left}{': experts by torch, one by one' if experts else ''}"

    def advised(self, head: HeadConfig | None) -> str | None:
        """Return advice for a lack of memory, for a model with this draft head.

        Returns None where there is no advice: an error in it must not hide the lack of memory.
        """
        with contextlib.suppress(Exception):
            return None if self._advice is None else self._advice(head)
        return None
