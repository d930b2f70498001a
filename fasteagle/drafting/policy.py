"""Policy: decides while decoding how much to draft, by one price: tokens per millisecond.

`speed` is the number of tokens that a millisecond has brought lately, at least that of plain
decoding. Then

- a row is worth verifying while its path probability is above speed x ms of that row (1.3 times
  that for a looked-up row of a chain), and a level
  is worth drafting while the tokens that it may bring are above speed x its cost (`thresholds`);
- where the shape is fixed before the cycle, the size of the ladder with the most tokens per ms is
  used (`next_shape`);
- where no size brings 2 % more than plain decoding, drafting pauses, and is tried again after
  pauses that become longer (`head_gain` of gated chains, whose lookup costs almost nothing, else
  `next_shape`).

All times are those of the cycles themselves. The measured table that the policy begins with only
gives the size to try first, and the cost of a further row and level. Plain passes are timed in
blocks, first after a few cycles (`PlainBlocks`).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from fasteagle.drafting.costs import ROWS, Costs, Times
from fasteagle.drafting.ladder import Ranks, expected
from fasteagle.drafting.pauses import ADVANTAGE, BLOCK, Pauses, PlainBlocks
from fasteagle.drafting.thresholds import LONGEST, MEMORY, Honesty, Thresholds, between
from fasteagle.shapes import AnyShape, GatedChain

DOUBT = 0.4  # tolerated relative error, divided by the square root of the observed cycles
MARGIN = 1.03  # speed over the size in use that another size must promise
EVERY = 4  # cycles between decisions
FORGOTTEN = 0.25  # weight of earlier cycles in the averages after a pause
INTERRUPTION = 4.0  # times the usual time; more is an interruption of the process
PRIOR_CYCLES = 4.0  # weight of an expectation, in cycles
SHIFT, SETTLING = 1.2, 24  # change of drafted cycles' times that asks for a block, after so many
COPIED = 4  # accepted looked-up tokens in a cycle from which the text counts as copied
USUAL_CHAIN = 2  # verified tokens of a draft head's chain, on average
REACH = 16  # tokens of a looked-up chain by default
MAX_CHAIN = max(ROWS) - 1  # tokens of a chain whose pass is timed
LOOKED_UP_ROW = 1.3  # price of a looked-up row over its cost: at 1.0 it would neither gain nor lose
LOOKED_UP = "looked up"  # key in `Policy.used`


class Outcome(NamedTuple):
    """Result of a cycle: drafted and accepted tokens, and times."""

    accepted: int = 0
    by_lookup: int = 0  # accepted tokens that the lookup had proposed
    drafted: int = 0  # tokens verified
    extended: bool = False  # whether the draft head was run
    promised: Sequence[float] = ()  # path probabilities of the draft head's chain
    ms: float | None = None  # whole cycle; None where it is not comparable
    draft_ms: float | None = None
    verify_ms: float | None = None


class Average:
    """Mean of the last observations; a prior expectation counts as a few of them."""

    def __init__(self, prior: float, weight: float = PRIOR_CYCLES) -> None:
        self.prior, self._weight = prior, weight
        self._total = self.n = 0.0

    def add(self, value: float) -> None:
        """Observe `value`."""
        self.fade()
        self._total += value
        self.n += 1

    def fade(self, share: float = MEMORY) -> None:
        """Reduce the weight of what was observed."""
        self._total *= share
        self.n *= share

    def mean(self, scale: float = 1.0) -> float:
        """Return the mean, with an expectation of `scale` times the prior."""
        total = self._total + self._weight * scale * self.prior
        return total / (self.n + self._weight)


class Levels:
    """Milliseconds of the levels of a draft head's chain, corrected by those of the cycles."""

    def __init__(self, costs: Costs) -> None:
        self._times = Times(costs.chain) if costs.chain else None

    def learn(self, outcome: Outcome) -> None:
        """Observe a cycle that ran the draft head."""
        if self._times is not None and outcome.draft_ms is not None:
            self._times.observe(min(outcome.drafted + 1, LONGEST), outcome.draft_ms)

    @property
    def ms(self) -> float:
        """Milliseconds of a further level; 0 where chains have no costs."""
        return 0.0 if self._times is None else self._times.slope(LONGEST)


class Size:
    """Shape of the ladder, with averages of its accepted tokens and its time."""

    def __init__(self, shape: AnyShape, costs: Costs, ranks: Ranks) -> None:
        self.shape = shape
        self.tokens = {
            copying: Average(expected(shape, ranks, copying)) for copying in (False, True)
        }
        if isinstance(shape, GatedChain):
            n = min(USUAL_CHAIN, shape.depth)
            ms = costs.draft(GatedChain(n)) + costs.verify(1 + n) + costs.other
        else:
            ms = costs.cycle(shape)
        self.ms = Average(ms)

    def fade(self) -> None:
        """Reduce the weight of observed tokens, because another size is in use."""
        for average in self.tokens.values():
            average.fade()

    def forget(self) -> None:
        """Reduce the weight of what was observed before a pause."""
        for average in (*self.tokens.values(), self.ms):
            average.fade(FORGOTTEN)

    def speed(self, copying: bool, factor: float, drift: float) -> float:
        """Return expected tokens per ms."""
        return (1 + self.tokens[copying].mean(factor)) / self.ms.mean(drift)


class Policy:
    """Policy of one drafter; `learn` must be called with every cycle, in order."""

    def __init__(
        self, costs: Costs, ranks: Ranks, shapes: Sequence[AnyShape], *, head: bool, lookup: bool
    ) -> None:
        self.costs, self.shapes = costs, list(shapes)
        self.used: Counter[AnyShape | str | None] = Counter()  # passes
        self._head, self.looks_up = head, lookup
        self._sizes = {shape: Size(shape, costs, ranks) for shape in shapes}
        self.is_gated = any(isinstance(shape, GatedChain) for shape in shapes)
        self._passes = Times(costs.passes)
        self._levels = Levels(costs)
        self._blocks = PlainBlocks()
        self.honesty = Honesty()
        self._factor, self._drift = Average(1.0), Average(1.0)  # observed over expected
        self._copying = False
        self._since = 0  # cycles since the last decision
        self._drift_then = 1.0  # when plain passes were timed last
        self._pauses = Pauses()
        self._shape: AnyShape | None = None
        # Of gated chains: path probabilities from which they continue, and the tokens that a chain
        # of the draft head brings over the worth of its time (None: the draft head pauses).
        self.thresholds, self.lookup_threshold = Thresholds(), Thresholds().verify[0]
        self.head_gain: float | None = None
        self._set_prices()
        if head or not self.is_gated:  # chains of the lookup alone never pause
            self._draft()

    # Decisions for the next cycle

    @property
    def next_shape(self) -> AnyShape | None:
        """Shape of the next cycle's tree; None for a plain pass."""
        if self.is_gated and self.looks_up:
            return self.shapes[0]  # only the draft head pauses, also while plain passes are timed
        return None if self._blocks.left else self._shape

    def _set_prices(self) -> None:
        """Derive thresholds and head gain of gated chains from the current `speed`."""
        speed, row = self.speed, self._passes.slope(5)
        self.thresholds = Thresholds.at(row * speed, self._levels.ms * speed, self.honesty)
        # Looked-up chains are long. With many rows each may cost more; with experts, less.
        row = max(row, self._passes.slope(self.shapes[0].rows))
        self.lookup_threshold = between(LOOKED_UP_ROW * row * speed)
        self.head_gain = None
        if self._head and self._shape is not None and not self._blocks.left:
            size = self._sizes[self._shape]
            worth = (self._ms(size) - self.plain_ms) * speed
            self.head_gain = max(0.0, size.tokens[False].mean(self.factor) - worth)

    # What was observed

    @property
    def plain_ms(self) -> float:
        """Milliseconds of a plain cycle."""
        return self._blocks.ms or self.costs.plain

    def row_ms(self, rows: float, more: int) -> float:
        """Return milliseconds per row of `more` rows in a pass that has `rows` without them."""
        if rows + more > (most := max(self.costs.passes)):  # see `pass_ms`
            return self._passes.at(most) / most
        return max(0.0, self._passes.at(rows + more) - self._passes.at(rows)) / more

    def pass_ms(self, rows: int) -> float:
        """Return milliseconds of a pass of `rows` rows, or of several of the largest timed size."""
        whole, rest = divmod(rows, most := max(self.costs.passes))
        return whole * self._passes.at(most) + bool(rest) * self._passes.at(rest)

    def accepted(self, shape: AnyShape) -> float:
        """Return the tokens of a size that were accepted lately, in a cycle."""
        return self._sizes[shape].tokens[False].mean(self.factor)

    @property
    def factor(self) -> float:
        """Recently accepted tokens divided by the expected ones."""
        return self._factor.mean()

    @property
    def speed(self) -> float:
        """Recent tokens per millisecond, at least those of plain passes."""
        plain = 1 / self.plain_ms
        # Copied text does not count: time is worth what it brings after it.
        return plain if self._shape is None else max(plain, self._speed(self._shape, False))

    def _ms(self, size: Size) -> float:
        return size.ms.mean(self._drift.mean())

    def _speed(self, shape: AnyShape, copying: bool) -> float:
        return self._sizes[shape].speed(copying, self.factor, self._drift.mean())

    def _best(self) -> AnyShape:
        best = max(self.shapes, key=lambda shape: self._speed(shape, self._copying))
        used = self._shape
        if used is not None:
            is_better = self._speed(best, self._copying) > MARGIN * self._speed(used, self._copying)
            return best if is_better else used
        return best

    def _pays(self, shape: AnyShape) -> bool:
        """Return whether drafting is faster than plain passes; in doubt True."""
        size = self._sizes[shape]
        doubt = 1 + DOUBT / max(1.0, size.ms.n, self._pauses.drafted) ** 0.5
        return self._speed(shape, self._copying) * doubt > ADVANTAGE / self.plain_ms

    def learn(self, shape: AnyShape | None, outcome: Outcome) -> None:
        """Observe a cycle that was launched with `shape`; None was a plain pass."""
        counts = outcome.extended or not self.is_gated  # else only the lookup drafted, or nothing
        is_plain = shape is None or not (outcome.drafted or counts)
        looked_up = LOOKED_UP if outcome.drafted else None
        self.used[shape if shape is not None and counts else looked_up] += 1
        if outcome.verify_ms is not None:
            self._passes.observe(1 + outcome.drafted, outcome.verify_ms)
        if is_plain:
            self._blocks.add(outcome.ms)
            self._after_plain()
        else:
            self._blocks.in_a_row = 0
            self._since += 1
            if counts and shape in self._sizes:  # others were launched by another policy
                self._learn_size(self._sizes[shape], outcome)
                self._after_drafting()
            elif self._since >= EVERY:
                self._since = 0
                self._set_prices()
        self._copying = outcome.by_lookup >= COPIED and not self.is_gated

    def _after_plain(self) -> None:
        if self._blocks.left:
            used = self._shape
            if self._blocks.wait(0.0 if used is None else self._speed(used, self._copying)):
                self._drift_then = self._drift.mean()
                self._draft()
        elif self._shape is None:
            self._pauses.left -= 1
            if self._pauses.left <= 0 and (self._head or not self.is_gated):
                self._pauses.end()
                for size in self._sizes.values():
                    size.forget()
                self._shape = self._best()
                self._set_prices()
            elif self._pauses.left % BLOCK == 0:  # plain passes are timed during the whole pause
                self._set_prices()

    def _learn_size(self, size: Size, outcome: Outcome) -> None:
        for other in self._sizes.values():
            if other is not size:
                other.fade()
        tokens = size.tokens[self._copying]
        tokens.add(outcome.accepted)
        if outcome.extended or not self._head:
            self._factor.add(outcome.accepted / tokens.prior)
        if outcome.ms is not None:
            ms = min(outcome.ms, INTERRUPTION * self._ms(size))
            self._drift.add(ms / size.ms.prior)
            size.ms.add(ms)
        if outcome.promised:
            self.honesty.learn(outcome.promised, outcome.accepted)
        self._levels.learn(outcome)

    def _after_drafting(self) -> None:
        """Begin a block of plain passes, or decide again, where it is time for it."""
        self._pauses.count()
        drafted = self._blocks.distance - self._blocks.until + 1
        shift = self._drift.mean() / self._drift_then
        is_other = drafted > SETTLING and not 1 / SHIFT < shift < SHIFT
        if self._blocks.is_due() or is_other:
            self._blocks.begin()
            self._set_prices()
            if is_other:
                self._blocks.forget()
        elif self._since >= EVERY:
            self._draft()

    def _draft(self) -> None:
        """Take the best size, or pause where plain passes are faster."""
        self._since = 0
        self._shape = self._best()
        if not self._pauses.probing and not self._pays(self._shape):
            self._pauses.begin()
            self._shape = None
        self._set_prices()

    # Reports

    def explain(self) -> str:
        """Return one line: the size in use, its time, its tokens."""
        plain = f"plain {self.plain_ms:.1f} ms, {1e3 / self.plain_ms:.0f} tok/s"
        if self._shape is None:
            line = f"policy: the draft head pauses; {plain}" if self._head else f"policy: {plain}"
        else:
            size = self._sizes[self._shape]
            tokens = 1 + size.tokens[self._copying].mean(self.factor)
            rate = 1e3 * self._speed(self._shape, self._copying)
            line = (
                f"policy: {name(self._shape)}, {self._ms(size):.1f} ms for {tokens:.2f} tokens, "
                f"{rate:.0f} tok/s; {plain}"
            )
        if self.is_gated:
            row = self._passes.slope(5)
            line += f"; a row {row:.2f} ms, worth it from {row * self.speed:.2f} on"
        return f"{line} | used {self.shares()}" if self.used else line

    def expectations(self) -> list[tuple[AnyShape | None, float, float]]:
        """Return (shape, ms, tokens) of a cycle of each size, plain passes first."""
        sizes = [
            (size.shape, self._ms(size), 1 + size.tokens[False].mean(self.factor))
            for size in self._sizes.values()
        ]
        return [(None, self.plain_ms, 1.0), *sizes]

    def shares(self) -> str:
        """Return the share of passes of each size, as text."""
        total = sum(self.used.values())
        return ", ".join(
            f"{name(shape)} {100 * n / total:.0f} %" for shape, n in self.used.most_common()
        )


def name(shape: AnyShape | str | None) -> str:
    """Return a readable name of a size."""
    if isinstance(shape, str):
        return shape
    if isinstance(shape, GatedChain):
        return f"chain of {shape}"
    return "plain" if shape is None else "/".join(map(str, dataclasses.astuple(shape)))
