"""Input and output of a runner: a cycle to launch, and its result on the host."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from fasteagle.config import HeadConfig
from fasteagle.decoding.cycle import Pieces
from fasteagle.drafting.base import Drafter
from fasteagle.drafting.draft_head import HeadDrafter
from fasteagle.logits import LogitsProcessor
from fasteagle.shapes import GatedChain
from fasteagle.state import CycleSpec

# Captures a step, of a variant that the second argument names; None: it runs without a graph.
Capture = Callable[[Callable[[], None], Any], Callable[[], None] | None]


def may_be_shorter(drafter: Drafter, spec: CycleSpec) -> bool:
    """Return whether proposals may end with padding, which CPUs leave out of the pass."""
    return isinstance(spec.shape, GatedChain) or not (drafter.always_proposes and spec.extends)


def head_config(drafter: Drafter | None) -> HeadConfig | None:
    """Return the config of a drafter's draft head; None without one."""
    return drafter.head.config if isinstance(drafter, HeadDrafter) else None


def variant_of(drafter: Drafter | None, spec: CycleSpec) -> tuple[Drafter | None, CycleSpec]:
    """Return the key of compiled pieces, which are those of all siblings of a drafter."""
    return None if drafter is None else drafter.origin, spec


def drop_others(table: dict[Any, Any], drafters: Collection[Drafter]) -> None:
    """Drop what a table has of other drafters, whose draft heads its keys keep in memory."""
    for key in [key for key in table if key[0] is not None and key[0] not in drafters]:
        del table[key]


class Compiled(dict[tuple[Drafter | None, CycleSpec], Pieces]):
    """Compiled pieces of cycles, by variant; runners of siblings share them."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: set[Any] = set()  # heads, trees and modes whose kernels are compiled
        self._used: WeakKeyDictionary[object, Drafter] = WeakKeyDictionary()  # by runner

    def use(self, runner: object, drafter: Drafter) -> None:
        """Note what a runner drafts by from now on; drop the pieces of drafters that none uses."""
        self._used[runner] = drafter.origin
        drop_others(self, set(self._used.values()))


class Launch(NamedTuple):
    """Cycle to run."""

    spec: CycleSpec
    drafter: Drafter | None
    processor: LogitsProcessor | None


class End(NamedTuple):
    """End of an answer, after which no further cycle is needed."""

    tokens: Sequence[int] = ()  # after one of these
    most: int = 1 << 62  # after as many tokens


class Done(NamedTuple):
    """Result of a cycle on the host."""

    tokens: list[int]  # new tokens, then padding
    by_lookup: int  # accepted tokens that it proposed; not set by trees of a single source
    drafted: int  # tokens proposed
    draft_seconds: float | None  # None: not timed apart
    verify_seconds: float | None
    extended: bool | None = None  # whether the drafter has seen the pending pairs; None: its spec
    promised: tuple[float, ...] = ()  # see `Proposal`
    alone: bool = True  # False: its time was that of several sequences
    ms: float | None = None  # whole cycle; None: not timed by the runner
