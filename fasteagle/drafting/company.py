"""Drafting where several sequences share each pass, by the price of a sequence alone: see `policy`.

A row and a level take time from all sequences: they are worth it while the tokens that they bring
are above `speed` x their time, where `speed` is that of all sequences together. Where shapes are
fixed before a cycle, all sequences have the size with the most tokens per ms. Looking up and
drafting take time beside that, so passes with drafts are compared with plain ones: where they are
not faster, all sequences decode plainly for some time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from fasteagle.drafting.pauses import BLOCK, FIRST_DISTANCE, LONGEST_PAUSE, Pauses, PlainBlocks
from fasteagle.drafting.policy import (
    EVERY,
    FORGOTTEN,
    INTERRUPTION,
    LOOKED_UP_ROW,
    MARGIN,
    PRIOR_CYCLES,
    USUAL_CHAIN,
    Average,
    Levels,
    Outcome,
    Policy,
)
from fasteagle.drafting.thresholds import Thresholds, between
from fasteagle.shapes import AnyShape

ROWS_AHEAD = 4  # further rows over which the price of one is taken
LONGEST_REST = 96  # passes, where texts are looked up in


class Speed:
    """Accepted tokens and milliseconds of passes of `n` sequences, with those that are expected."""

    def __init__(self, n: int, accepted: float = 0.0, ms: float = 0.0) -> None:
        weight = PRIOR_CYCLES if ms else 0.0
        self._n, self._accepted, self._ms = n, Average(accepted, weight), Average(ms, weight)

    def add(self, accepted: float, ms: float) -> None:
        """Observe a pass."""
        if self.is_known:
            ms = min(ms, INTERRUPTION * self._ms.mean())
        self._accepted.add(accepted)
        self._ms.add(ms)

    def forget(self) -> None:
        """Reduce the weight of what was observed before a rest."""
        self._accepted.fade(FORGOTTEN)
        self._ms.fade(FORGOTTEN)

    @property
    def is_known(self) -> bool:
        """Return whether a pass was observed, or is expected to be like something."""
        return bool(self._ms.n or self._ms.prior)

    def mean(self, factor: float = 1.0) -> float:
        """Return tokens per millisecond, if `factor` times the expected tokens are accepted.

        0 while nothing is known.
        """
        return (self._n + self._accepted.mean(factor)) / self._ms.mean() if self.is_known else 0.0


class Sharing:
    """Passes of `n` sequences: their speeds, and what follows from them for the next ones.

    `distance` is the one between blocks of plain passes where the last number was in use.
    """

    def __init__(self, n: int, policy: Policy, distance: int = FIRST_DISTANCE) -> None:
        self.n, self.policy = n, policy
        self.speeds: dict[AnyShape, Speed] = {}  # of passes with trees
        self.gain: Average | None = None  # tokens of the draft head's chain over their worth
        self.pauses = Pauses()  # of the draft head
        # A text that begins to copy would not be noticed in a rest from all drafting.
        self.rests = Pauses(longest=LONGEST_REST if policy.looks_up else LONGEST_PAUSE)
        self.blocks = PlainBlocks(n, distance, FIRST_DISTANCE if policy.is_gated else distance)
        # Where sizes are compared, a block comes first.
        self.blocks.left = 0 if policy.is_gated else BLOCK
        self.size: AnyShape | None = None  # in use; None before the first decision
        self.since = 0  # drafted passes since the last decision


class Company:
    """Policy that the drafters of all sequences in a batch share; `end_passes` ends them.

    `policy` is that of a sequence alone, with its measured costs; None: they are not known yet, and
    only plain decoding is safe. The draft head of gated chains pauses while they have brought less
    than their time. What other numbers of sequences have shown does not count, but for what the
    head is worth at first.
    """

    def __init__(self) -> None:
        self.policy: Policy | None = None
        self.drafts_together = False  # whether a run of the draft head serves all sequences
        # While there is a policy: a sequence's share of their time, passes of each number of
        # sequences, and those of the last pass (of 0 before the first one).
        self._levels: Levels
        self._all: dict[int, Sharing] = {}
        self._now: Sharing
        self.thresholds, self.lookup_threshold = Thresholds(), Thresholds().verify[0]
        self.head_gain: float | None = None
        self._speed = self._row_ms = 0.0
        self._accepted = 0  # tokens of the pass that is under way
        self._shapes: Counter[AnyShape | None] = Counter()  # of its sequences
        self._width = Average(1.0)  # rows of one sequence
        self._factor = Average(1.0)  # accepted tokens over the expected ones

    def follow(self, policy: Policy | None) -> None:
        """Decide by the costs of `policy` from now on."""
        if policy is not None and policy is not self.policy:
            self._levels = Levels(policy.costs)
            self._all.clear()
            self._now = Sharing(0, policy)
            self.head_gain = None
        self.policy = policy

    def expect(self, n: int) -> None:
        """Decide for `n` sequences, until a pass shows how many take part."""
        if self.policy is None:
            return
        self._now = self._sharing(n)
        if self.policy.is_gated:
            self._set_prices(self._now)

    @property
    def next_shape(self) -> AnyShape | None:
        """Shape of the next tree of a sequence; None for a plain row."""
        if self.policy is None or self._now.blocks.left or self._now.rests.left:
            return None
        if not self.policy.is_gated:
            return self._now.size
        drafts = self.policy.looks_up or self.head_gain is not None
        return self.policy.shapes[0] if drafts else None

    def learn(self, shape: AnyShape | None, outcome: Outcome) -> None:
        """Observe the part of one sequence in a pass."""
        self._shapes[shape] += 1
        self._accepted += outcome.accepted
        self._width.add(1 + outcome.drafted)
        if self.policy is None:
            return
        if shape in self.policy.shapes:
            self._factor.add(outcome.accepted / self.policy.accepted(shape))
        if not outcome.extended or outcome.draft_ms is None:
            return
        if outcome.promised:
            self.policy.honesty.learn(outcome.promised, outcome.accepted)
        self._levels.learn(outcome)
        if self._now.gain is not None:
            ms = outcome.draft_ms + outcome.drafted * self._row_ms
            self._now.gain.add(outcome.accepted - ms * self._speed)
        self._now.pauses.count()

    def end_passes(self, passes: int, ms: float) -> None:
        """Observe that `passes`, with all around them, took `ms`; set the prices of the next one.

        They are alike, but for texts that ended in one of them.
        """
        shapes, accepted = self._shapes, self._accepted
        self._shapes, self._accepted = Counter(), 0
        if not shapes or not passes or self.policy is None:
            return
        n = -(-shapes.total() // passes)
        self._now = own = self._sharing(n)
        for _ in range(passes):
            self._end_pass(own, shapes, accepted / passes, ms / passes)
        if self.policy.is_gated:
            self._set_prices(own)

    def _sharing(self, n: int) -> Sharing:
        """Return what is known of passes of `n` sequences."""
        if n not in self._all:
            self._all[n] = Sharing(n, self._now.policy, self._now.blocks.distance)
            if self._now.gain is not None:  # till it is known better, the head is worth as much
                self._all[n].gain = Average(self._now.gain.mean())
        return self._all[n]

    def _end_pass(
        self, own: Sharing, shapes: Collection[AnyShape | None], accepted: float, ms: float
    ) -> None:
        # Where some sequences may not draft, a pass is one of those that do.
        kinds = [shape for shape in shapes if shape is not None]
        if kinds:
            own.blocks.in_a_row = 0
        else:
            own.blocks.add(ms)
        if len(kinds) == 1:
            self._kind(own, kinds[0]).add(accepted, ms)
        if own.gain is not None and own.pauses.left and own.pauses.wait():
            own.gain.fade(FORGOTTEN)
        self._rest_or_draft(own, bool(kinds))

    def _kind(self, own: Sharing, shape: AnyShape) -> Speed:
        """Return the passes with trees of `shape`."""
        if shape not in own.speeds:
            n, policy, speed = own.n, own.policy, Speed(own.n)
            if not policy.is_gated:
                ms = self._draft_ms(policy, n, shape) + n * policy.costs.other
                ms += policy.pass_ms(n * shape.rows)
                speed = Speed(n, n * policy.accepted(shape), ms)
            own.speeds[shape] = speed
        return own.speeds[shape]

    def _draft_ms(self, policy: Policy, n: int, shape: AnyShape) -> float:
        """Return the time that drafting is expected to take, before it was observed."""
        ms = policy.costs.draft(shape)
        if not self.drafts_together or shape.topk is None:
            return n * ms
        # A run over the rows of all costs more than one of a sequence as passes of the target do.
        return ms * policy.pass_ms(n * shape.topk) / policy.pass_ms(shape.topk)

    def _speed_of(self, own: Sharing, shape: AnyShape) -> float:
        return self._kind(own, shape).mean(self._factor.mean())

    def _rest_or_draft(self, own: Sharing, drafted: bool) -> None:
        """Begin or end a rest from drafting, or a block of plain passes."""
        if own.rests.left:
            if own.rests.wait():
                for speed in own.speeds.values():
                    speed.forget()
        elif own.blocks.left:
            if not drafted:  # else it was begun among other sequences
                own.blocks.wait(0.0 if own.size is None else self._speed_of(own, own.size))
        elif drafted:
            own.rests.count()
            if own.blocks.is_due():
                own.blocks.begin()
        size = self._choose_size(own, drafted)
        if not drafted or own.blocks.left or own.rests.probing:
            return
        if 0 < self._speed_of(own, size) < own.blocks.speed:
            own.rests.begin()

    def _choose_size(self, own: Sharing, drafted: bool) -> AnyShape:
        """Take the size with the most tokens per ms, now and then; gated chains are one size."""
        own.since += drafted
        if own.size is not None and own.since < EVERY:
            return own.size
        own.since = 0
        speeds = {shape: self._speed_of(own, shape) for shape in own.policy.shapes}
        best = max(speeds, key=speeds.__getitem__)
        if own.size is None or speeds[best] > MARGIN * speeds[own.size]:
            own.size = best
        return own.size

    def _set_prices(self, own: Sharing) -> None:
        policy, self.head_gain = own.policy, None
        self._speed = max(own.blocks.speed, self._speed_of(own, policy.shapes[0]))
        if not self._speed:
            return
        self._row_ms = policy.row_ms(own.n * self._width.mean(), ROWS_AHEAD)
        row, level = self._row_ms * self._speed, self._levels.ms * self._speed
        self.thresholds = Thresholds.at(row, level, policy.honesty)
        self.lookup_threshold = between(LOOKED_UP_ROW * row)
        if own.gain is None:
            usual = policy.accepted(policy.shapes[0])
            own.gain = Average(usual - USUAL_CHAIN * (row + level))
        if not own.pauses.left and not own.pauses.probing and own.gain.mean() <= 0:
            own.pauses.begin()
        self.head_gain = None if own.pauses.left else max(0.0, own.gain.mean())
