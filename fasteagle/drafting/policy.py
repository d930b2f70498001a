"""Decides while decoding what is drafted, by one price: what a millisecond is worth.

`speed` is the number of tokens that a millisecond has brought lately, at least what plain decoding
brings. Then

- a row is worth verifying while its path probability is above speed x ms of that row, and a level
  is worth drafting while the tokens that it may bring are above speed x its cost (`thresholds`);
- where the shape is fixed before the cycle, that size of the ladder is taken which brings the most
  tokens per ms (`next_shape`);
- where nothing brings 2 % more than plain decoding, drafting pauses, and is tried again after
  pauses that become longer (`head_gain` of gated chains, whose lookup costs next to nothing, else
  `next_shape`).

All times are those of the cycles themselves. The measured table that the policy begins with only
says what to try first, and what a further row and level cost. Plain passes are timed in blocks,
first after a few cycles, for a single pass between others costs more than one of many: clocks rise
with the load.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from fasteagle.drafting.costs import ROWS, Costs, Times
from fasteagle.drafting.ladder import Ranks, expected
from fasteagle.shapes import AnyShape, GatedChain

ADVANTAGE = 1.02  # over plain decoding, or drafting pauses
DOUBT = 0.25  # over the square root of the cycles observed: relative error that is granted
MARGIN = 1.03  # another size must promise this over the one in use
EVERY = 4  # cycles between decisions
MEMORY = 0.99  # of a cycle in the averages, each cycle
FORGOTTEN = 0.25  # share that a pause leaves of the averages
INTERRUPTION = 4.0  # times the usual time: more is not the cycle's
PRIOR_CYCLES = 4.0  # that an expectation counts for
PROBE = 8  # cycles of drafting before it may pause again
FIRST_PAUSE, LONGEST_PAUSE = 24, 768  # passes
SETTLED = 64  # cycles of drafting after which the next pause is short again
FIRST_DISTANCE, LONGEST_DISTANCE = 8, 512  # drafted cycles between two blocks of plain passes
BLOCK, FEWEST = 12, 5  # plain passes of a block
WARM = 2  # passes of a block that are not counted
OPTIMISM = 0.8  # a block ends early where plain passes would not pay at this share of their time
COPIED = 4  # tokens accepted of the lookup: the text is being copied
NEXT_ACCEPTED = 0.65  # how often a further level's token would be accepted
LONGEST = 8  # tokens of a draft head's chain
USUAL_CHAIN = 2  # of them that are verified, on average
REACH = 16  # tokens of a looked-up chain, unless another number is set
HONEST_TOKENS = 8.0  # that the head's own probabilities count for
MAX_CHAIN = max(ROWS) - 1  # tokens of a chain whose pass is timed
LOOKED_UP = "looked up"  # among the sizes that were used


class Thresholds(NamedTuple):
    """Path probabilities, by depth, from which a gated chain goes on."""

    verify: tuple[float, ...] = (0.15,) * LONGEST  # a token is verified
    expand: tuple[float, ...] = (0.4,) * LONGEST  # a further level is drafted


class Outcome(NamedTuple):
    """What a cycle drafted and brought, and how long it took."""

    accepted: int = 0
    by_lookup: int = 0  # accepted tokens that the lookup had proposed
    drafted: int = 0  # tokens verified
    extended: bool = False  # whether the draft head was run
    promised: Sequence[float] = ()  # path probabilities of the head's chain, token by token
    ms: float | None = None  # whole cycle; None where it says nothing about others
    draft_ms: float | None = None
    verify_ms: float | None = None


class Average:
    """Mean of the last observations, an expectation counting for a few of them."""

    def __init__(self, prior: float, weight: float = PRIOR_CYCLES) -> None:
        self.prior, self._weight = prior, weight
        self._total = self.n = 0.0

    def add(self, value: float) -> None:
        """Observe `value`."""
        self.fade()
        self._total += value
        self.n += 1

    def fade(self, share: float = MEMORY) -> None:
        """Let what was observed count less."""
        self._total *= share
        self.n *= share

    def mean(self, scale: float = 1.0) -> float:
        """Mean, for an expectation of `scale` times the first one."""
        total = self._total + self._weight * scale * self.prior
        return total / (self.n + self._weight)


class Size:
    """A shape that may be drafted: the tokens that it brings and the time that it takes."""

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
        """Let the tokens that were observed count less: another size is in use."""
        for average in self.tokens.values():
            average.fade()

    def forget(self) -> None:
        """Let what was observed before a pause count less than what comes."""
        for average in (*self.tokens.values(), self.ms):
            average.fade(FORGOTTEN)

    def speed(self, copying: bool, factor: float, drift: float) -> float:
        """Expected tokens per ms."""
        return (1 + self.tokens[copying].mean(factor)) / self.ms.mean(drift)


class Honesty:
    """How often the head's chain is accepted, over what its own probabilities promise, by depth."""

    def __init__(self) -> None:
        self._promised = [HONEST_TOKENS * 0.5] * LONGEST
        self._accepted = list(self._promised)

    def learn(self, promised: Sequence[float], accepted: int) -> None:
        """Count a chain of which the first `accepted` tokens were right."""
        for depth, probability in enumerate(promised[:LONGEST]):
            self._promised[depth] = MEMORY * self._promised[depth] + probability
            self._accepted[depth] = MEMORY * self._accepted[depth] + (depth < accepted)

    def ratio(self, depth: int) -> float:
        """Accepted over promised tokens at `depth`, from 0 on."""
        return min(2.0, max(0.25, self._accepted[depth] / self._promised[depth]))


@dataclasses.dataclass
class Pauses:
    """When drafting pauses, and for how long."""

    length: int = FIRST_PAUSE  # of the next one
    left: int = 0  # passes left of this one
    probing: int = PROBE  # cycles before the next pause, at least
    drafted: int = 0  # cycles since the last one

    def begin(self) -> None:
        """Pause, twice as long as the last time unless drafting had settled."""
        if self.drafted > SETTLED:
            self.length = FIRST_PAUSE
        self.left, self.drafted = self.length, 0
        self.length = min(2 * self.length, LONGEST_PAUSE)

    def end(self) -> None:
        """Try to draft again."""
        self.left, self.probing = 0, PROBE


class Policy:
    """Chooses for one drafter; `learn` is told of every cycle, in order."""

    def __init__(
        self, costs: Costs, ranks: Ranks, shapes: Sequence[AnyShape], *, head: bool, lookup: bool
    ) -> None:
        self.costs, self.shapes = costs, list(shapes)
        self.used: Counter[AnyShape | str | None] = Counter()  # passes
        self._head, self._lookup = head, lookup
        self._sizes = {shape: Size(shape, costs, ranks) for shape in shapes}
        self._gated = any(isinstance(shape, GatedChain) for shape in shapes)
        self._passes = Times(costs.passes)
        self._levels = Times(costs.chain) if costs.chain else None
        self._plain: deque[float] = deque(maxlen=BLOCK)
        self._in_a_row = 0  # plain passes
        self._honesty = Honesty()
        self._factor, self._drift = Average(1.0), Average(1.0)  # observed over expected
        self._copying = False
        self._since = 0  # cycles since the last decision
        self._block = 0  # plain passes left of a block that times them
        self._distance = FIRST_DISTANCE  # to the next block, in drafted cycles
        self._until_block = FIRST_DISTANCE
        self._pauses = Pauses()
        self._shape: AnyShape | None = None
        # Of gated chains: path probabilities from which they go on, and the tokens that a chain of
        # the head brings over what its time is worth (None: it pauses).
        self.thresholds, self.lookup_threshold = Thresholds(), Thresholds().verify[0]
        self.head_gain: float | None = None
        self._set_prices()
        if head or not self._gated:  # chains of the lookup alone never pause
            self._draft()

    # Decisions for the next cycle

    @property
    def next_shape(self) -> AnyShape | None:
        """Shape of the next cycle's tree; None for a plain pass."""
        if self._block:
            return None
        if self._gated and self._lookup:
            return self.shapes[0]  # a pause is one of the draft head alone
        return self._shape

    def _set_prices(self) -> None:
        """Derive what gated chains need from what a millisecond is worth now."""
        speed, row = self.speed, self._passes.slope(5)
        level = 0.0 if self._levels is None else self._levels.slope(LONGEST)
        ratios = [self._honesty.ratio(depth) for depth in range(LONGEST)]
        verify = [_between(row * speed / ratio) for ratio in ratios]
        expand = [_between((row + level) * speed / NEXT_ACCEPTED / ratio) for ratio in ratios]
        self.thresholds = Thresholds(tuple(verify), tuple(map(max, verify, expand)))
        # Looked-up chains are long: there a row may cost more.
        self.lookup_threshold = _between(self._passes.slope(self.shapes[0].rows) * speed)
        self.head_gain = None
        if self._head and self._shape is not None:
            size = self._sizes[self._shape]
            worth = (self._ms(size) - self.plain_ms) * speed
            self.head_gain = max(0.0, size.tokens[False].mean(self.factor) - worth)

    # What was observed

    @property
    def plain_ms(self) -> float:
        """Milliseconds of a plain cycle."""
        return median(self._plain) if self._plain else self.costs.plain

    @property
    def factor(self) -> float:
        """Accepted tokens of late over the expected ones."""
        return self._factor.mean()

    @property
    def speed(self) -> float:
        """Tokens that a millisecond is worth: of late, at least what plain passes bring."""
        plain = 1 / self.plain_ms
        # Not of copied text: time is worth what it brings when that is over.
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
        """Whether drafting is faster than plain passes, in doubt yes."""
        size = self._sizes[shape]
        doubt = 1 + DOUBT / max(1.0, size.ms.n) ** 0.5
        return self._speed(shape, self._copying) * doubt > ADVANTAGE / self.plain_ms

    def learn(self, shape: AnyShape | None, outcome: Outcome) -> None:
        """Observe a cycle that was launched with `shape`; None was a plain pass."""
        counts = outcome.extended or not self._gated  # else a chain of the lookup, or none
        is_plain = shape is None or not (outcome.drafted or counts)
        looked_up = LOOKED_UP if outcome.drafted else None
        self.used[shape if shape is not None and counts else looked_up] += 1
        if outcome.verify_ms is not None:
            self._passes.observe(1 + outcome.drafted, outcome.verify_ms)
        self._in_a_row = self._in_a_row + 1 if is_plain else 0
        if is_plain:
            self._learn_plain(shape, outcome)
        elif counts and shape in self._sizes:  # not one that another policy had launched
            self._learn_size(self._sizes[shape], outcome)
            self._after_drafting()
        else:
            self._since += 1
            if self._since >= EVERY:
                self._since = 0
                self._set_prices()
        self._copying = outcome.by_lookup >= COPIED and not self._gated

    def _learn_plain(self, shape: AnyShape | None, outcome: Outcome) -> None:
        if outcome.ms is not None and self._in_a_row > WARM:
            self._plain.append(outcome.ms)
        if self._block and shape is None:
            self._block -= 1
            if self._block and not self._is_decided():
                return
            self._block = 0
            self._draft()
        elif self._shape is None:
            self._pauses.left -= 1
            if self._pauses.left <= 0 and (self._head or not self._gated):
                self._pauses.end()
                for size in self._sizes.values():
                    size.forget()
                self._shape = self._best()
                self._set_prices()
            elif self._pauses.left % BLOCK == 0:  # plain passes are timed all the while
                self._set_prices()

    def _is_decided(self) -> bool:
        """Whether further plain passes of a block would not change the decision."""
        if self._in_a_row < FEWEST or self._shape is None:
            return False
        plain = ADVANTAGE / (OPTIMISM * self.plain_ms)
        return plain < self._speed(self._shape, self._copying)

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
            self._honesty.learn(outcome.promised, outcome.accepted)
        if outcome.extended and self._levels is not None and outcome.draft_ms is not None:
            self._levels.observe(min(outcome.drafted + 1, LONGEST), outcome.draft_ms)

    def _after_drafting(self) -> None:
        """Decide now and then; time plain passes now and then."""
        self._since += 1
        self._pauses.drafted += 1
        self._pauses.probing = max(0, self._pauses.probing - 1)
        self._until_block -= 1
        if self._until_block <= 0:
            self._distance = min(4 * self._distance, LONGEST_DISTANCE)
            self._until_block, self._block = self._distance, BLOCK
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
        """Return one line: what is in use, what it costs, what it brings."""
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
        if self._gated:
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
        """Return how many of the passes each size had."""
        total = sum(self.used.values())
        return ", ".join(
            f"{name(shape)} {100 * n / total:.0f} %" for shape, n in self.used.most_common()
        )


def _between(probability: float) -> float:
    return min(0.95, max(0.02, probability))


def name(shape: AnyShape | str | None) -> str:
    """Return a size in a person's words."""
    if isinstance(shape, str):
        return shape
    if isinstance(shape, GatedChain):
        return f"chain of {shape}"
    return "plain" if shape is None else "/".join(map(str, dataclasses.astuple(shape)))
