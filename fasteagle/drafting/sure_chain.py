"""Chains that end where the draft head is not sure: when one pays, and where it ends.

On a CPU a row of a pass and a level of drafting cost a fixed part of a plain pass, whatever is in
them. A token whose path has probability p gives p tokens; it is worth its row where those tokens
would take longer otherwise. So a chain's length follows from the head's own probabilities, cycle
by cycle, and what is observed says only whether to draft at all.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import NamedTuple

import torch
from torch import Tensor

from fasteagle.drafting.controller import FIRST_PAUSE, PRIOR_CYCLES, Controller, Outcome
from fasteagle.drafting.plan import ROWS, Costs, Ranks, chance
from fasteagle.shapes import AnyShape, SureChain

LONGEST = 8  # tokens of a chain
# A further level is drafted where its token would pay if it were accepted this often.
NEXT_ACCEPTED = 0.65
# How often a looked-up token is right, by the tokens that matched so far, from one on: right tokens
# of a proposal count. A match of eight or more is longer than that on average: by depth.
RIGHT = (0.21, 0.54, 0.65, 0.71, 0.74, 0.81, 0.83, 0.85, 0.87, 0.87, 0.88, 0.89, 0.9, 0.9)
LONG_RIGHT = (0.95, 0.955, 0.96, 0.965, 0.97, 0.97, 0.975, 0.98)
PRIOR_TOKENS = 8.0  # that these count for
REACH = 16  # tokens of a looked-up chain, unless asked otherwise
MAX_CHAIN = max(ROWS) - 1  # whose pass is timed
START_GAIN = 1.1  # over plain decoding, expected before anything was observed
START_HEAD_GAIN = 0.4  # tokens that a chain of the draft head brings, its cost taken off
GAIN_CYCLES = 30  # that this counts for at first: one chain's tokens vary by more than one
GAIN_MEMORY = 0.99
MEMORY = 0.97  # of a cycle in the averages, each cycle
LOOKED_UP = "looked up"  # among the shapes that were used


class Stopping(NamedTuple):
    """Where a chain ends, by the probability of its whole path."""

    keep: float = 0.15  # a token is verified from here on
    deepen: float = 0.4  # another level is drafted from here on


@dataclasses.dataclass(frozen=True)
class ChainPlan:
    """One shape; the acceptance rate changes where its chains end, not their shape."""

    costs: Costs
    ranks: Ranks
    shape: SureChain

    @property
    def shapes(self) -> list[SureChain]:
        return [self.shape]

    def at(self, factor: float) -> SureChain | None:
        """None where even one level costs more than it gives."""
        return self.shape if self.rate(self.shape, factor) > self.rate(None, factor) else None

    def expected(self, shape: SureChain, factor: float) -> float:
        """Accepted tokens of a chain that ends where the average one should."""
        return self._average(shape, factor)[0]

    def rate(self, shape: SureChain | None, factor: float) -> float:
        """Expected tokens per second; None is plain decoding."""
        if shape is None:
            return 1e3 / self.costs.plain
        tokens, levels = self._average(shape, factor)
        return 1e3 * (1 + tokens) / self.cost(levels, levels)

    def cost(self, levels: int, drafted: int) -> float:
        """Milliseconds of a cycle of so many levels and tokens verified."""
        return self.costs.draft_chain(levels) + self.costs.verify(1 + drafted) + self.costs.other

    def stopping(self, rate: float) -> Stopping:
        """Where chains end if tokens come at `rate` (1/s)."""
        row = self._row(5)
        level = (self.costs.draft_chain(LONGEST) - self.costs.draft_chain(1)) / (LONGEST - 1)
        value = rate / 1e3  # tokens that a millisecond is worth
        keep = self._keep(row, rate)
        return Stopping(keep, min(0.95, max(keep, (row + level) * value / NEXT_ACCEPTED)))

    def lookup_keep(self, rate: float) -> float:
        """The same of looked-up chains, which are long: there a row may cost more."""
        return self._keep(self._row(self.shape.rows), rate)

    def _keep(self, row: float, rate: float) -> float:
        """How likely a token must be to pay for a row of so many milliseconds."""
        return min(0.9, max(0.02, row * rate / 1e3))

    def _row(self, rows: int) -> float:
        """Milliseconds of each further row, on average up to `rows`."""
        rows = min(rows, max(self.costs.passes))
        return (self.costs.verify(rows) - self.costs.verify(1)) / (rows - 1)

    def _average(self, shape: SureChain, factor: float) -> tuple[float, int]:
        """Accepted tokens and levels of the best chain of one length for all cycles."""
        best, path, tokens = (0.0, 1), 1.0, 0.0
        for level in range(1, min(shape.depth, LONGEST) + 1):
            path *= chance(self.ranks, level, 0, factor)
            tokens += path
            if (1 + tokens) / self.cost(level, level) > (1 + best[0]) / self.cost(best[1], best[1]):
                best = tokens, level
        return best


def lookup_prior() -> Tensor:
    """[2, sizes, depths]: tokens tried and right of a looked-up chain, before any was observed.

    By match size 1 .. 8 and depth 1 .. 8, the last of both for all above. Counted at every token of
    500 greedy answers that the default model wrote for the draft head's training.
    """
    D = len(LONG_RIGHT)
    right = torch.tensor([*(RIGHT[size : size + D] for size in range(D - 1)), LONG_RIGHT])
    return PRIOR_TOKENS * torch.stack((torch.ones_like(right), right))


class LookedUp:
    """What looked-up chains have taught: a table (`lookup_prior`), and the last chain itself."""

    def __init__(self) -> None:
        self.table = lookup_prior()
        self.last = torch.zeros(4 + MAX_CHAIN, dtype=torch.long)

    @property
    def tensors(self) -> list[Tensor]:
        """What a cycle changes."""
        return [self.table, self.last]


class ChainController(Controller):
    """Drafts while chains give tokens faster than plain passes; see `Controller` for pauses."""

    plan: ChainPlan

    def __init__(self, plan: ChainPlan) -> None:
        self.plan = plan
        self.used = Counter()
        self._next_pause = FIRST_PAUSE
        self._pausing = self._probing = self._since = self._drafted = 0
        self._chain = 0  # tokens of the last one
        self.shape = plan.shape
        self._ms = PRIOR_CYCLES * plan.cost(2, 2)
        self._tokens = self._ms * START_GAIN * plan.rate(None, 1.0) / 1e3

    @property
    def rate(self) -> float:
        """Tokens per second of the chains drafted lately, by what they cost in the plan."""
        return 1e3 * self._tokens / self._ms

    @property
    def factor(self) -> float:
        return self.rate / self.plan.rate(None, 1.0)

    @property
    def stopping(self) -> Stopping:
        """Where the next chain ends."""
        return self.plan.stopping(self._best_rate)

    @property
    def lookup_keep(self) -> float:
        """From which probability of its path on a looked-up token is verified."""
        return self.plan.lookup_keep(self._best_rate)

    @property
    def _best_rate(self) -> float:
        """What time is worth: plain passes would bring tokens at their rate at least."""
        return max(self.rate, self.plan.rate(None, 1.0))

    def learn_of(self, shape: AnyShape | None, outcome: Outcome | None) -> None:
        self._chain = 0 if outcome is None else outcome.drafted
        super().learn_of(shape, outcome)

    def _count(self, shape: AnyShape, accepted: float) -> None:
        levels = min(self._chain + 1, LONGEST)
        self._tokens = MEMORY * self._tokens + 1 + accepted
        self._ms = MEMORY * self._ms + self.plan.cost(levels, self._chain)

    def _wanted(self) -> SureChain | None:
        return self.plan.shape if self.factor > 1 else None

    def _decide(self) -> None:
        self._since = 0
        self._pause_or_take(self._wanted())

    def explain(self) -> str:
        """One line: what is in use, what it costs, what it yields."""
        costs, stopping = self.plan.costs, self.stopping
        line = (
            f"tree auto: a chain of {self.plan.shape} tokens while its path is likelier than "
            f"{stopping.keep:.2f}; draft {costs.draft_chain(1):.1f} to "
            f"{costs.draft_chain(LONGEST):.1f} + verify {costs.verify(1):.1f} to "
            f"{costs.verify(1 + LONGEST):.1f} + other {costs.other:.1f} ms: "
            f"{self.rate:.0f} tok/s of late, plain {self.plan.rate(None, 1.0):.0f}"
        )
        return f"{line} | used {self.shares()}" if self.used else line


class FusedChainController(ChainController):
    """Chains of the draft head or of the lookup, whichever promises more in a cycle.

    The lookup costs next to nothing and is always asked. `shape` None says that the draft head is
    paused: what its chains bring is not worth their time.
    """

    def __init__(self, plan: ChainPlan) -> None:
        super().__init__(plan)
        self._gain, self._weight = START_HEAD_GAIN * GAIN_CYCLES, float(GAIN_CYCLES)

    @property
    def next_shape(self) -> AnyShape | None:
        return self.plan.shape  # a pause is one of the draft head alone

    @property
    def head_gain(self) -> float | None:
        """Tokens that its chains bring, less those that their time is worth; None: paused."""
        return None if self.shape is None else max(0.0, self._gain / self._weight)

    def learn_of(self, shape: AnyShape | None, outcome: Outcome | None) -> None:
        """Of every cycle; `outcome` None: the lookup found nothing, and the head was left out."""
        found = outcome or Outcome(0)
        levels = min(found.drafted + 1, LONGEST) if found.extended else 0
        costs = self.plan.costs
        ms = costs.verify(1 + found.drafted) + costs.other
        ms += costs.draft_chain(levels) if levels else costs.lookup
        if found.extended or not found.drafted:
            # Not of repetitions: time is worth what it brings when they are over.
            self._tokens = MEMORY * self._tokens + 1 + found.accepted
            self._ms = MEMORY * self._ms + ms
        plain = LOOKED_UP if found.drafted else None
        self.used[self.plan.shape if found.extended else plain] += 1
        if self.shape is None:
            self._pausing -= 1
            if self._pausing <= 0:
                self._begin_probe()
        elif found.extended:
            worth = (ms - costs.plain) * self.rate / 1e3
            self._gain = GAIN_MEMORY * self._gain + found.accepted - worth
            self._weight = GAIN_MEMORY * self._weight + 1
            self._after_drafting()

    def _wanted(self) -> SureChain | None:
        return self.plan.shape if self._gain > 0 else None


class LookupChainController(FusedChainController):
    """Chains of the lookup alone, for models without a draft head."""

    def __init__(self, plan: ChainPlan) -> None:
        super().__init__(plan)
        self.shape = None

    def _begin_probe(self) -> None:
        """There is no head to try again."""

    def explain(self) -> str:
        costs = self.plan.costs
        line = (
            f"tree auto: chains of {self.plan.shape} looked-up tokens while likelier than "
            f"{self.lookup_keep:.2f}; verify {costs.verify(1):.1f} to "
            f"{costs.verify(self.plan.shape.rows):.1f} + other {costs.other:.1f} ms"
        )
        return f"{line} | used {self.shares()}" if self.used else line
