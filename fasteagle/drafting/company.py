"""Drafting where several sequences share each pass, by the price of a sequence alone: see `policy`.

A row and a level take time from all sequences: they are worth it while the tokens that they bring
are above `speed` x their time, where `speed` is that of all sequences together. Where shapes are
fixed before a cycle, all sequences have the size with the most tokens per ms. Looking up and
drafting take time beside that, so passes with drafts are compared with plain ones: where they are
not faster, all sequences decode plainly for some time.
"""

from __future__ import annotations

from collections import Counter

from fasteagle.drafting.pauses import LONGEST_PAUSE, Pauses
from fasteagle.drafting.policy import (
    BLOCK,
    EVERY,
    FIRST_DISTANCE,
    FORGOTTEN,
    INTERRUPTION,
    LONGEST_DISTANCE,
    MARGIN,
    PRIOR_CYCLES,
    USUAL_CHAIN,
    WARM,
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

    def add(self, accepted: int, ms: float) -> None:
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


class Company:
    """Policy that the drafters of all sequences in a batch share; `end_pass` ends each pass.

    `policy` is that of a sequence alone, with its measured costs; None: they are not known yet, and
    only plain decoding is safe. The draft head of gated chains pauses while they have brought less
    than their time.
    """

    def __init__(self) -> None:
        self.policy: Policy | None = None
        self.drafts_together = False  # whether a run of the draft head serves all sequences
        self._levels: Levels  # a sequence's share of their time, while there is a policy
        self.thresholds, self.lookup_threshold = Thresholds(), Thresholds().verify[0]
        self.head_gain: float | None = None
        self._pauses = Pauses()  # of the draft head
        self._rests = Pauses()  # of all drafting
        self._block = 0  # plain passes left of a block that times them
        self._until_block = self._distance = FIRST_DISTANCE  # drafted passes
        self._gain: Average | None = None  # tokens of the draft head's chain over their worth
        self._speed = self._row_ms = 0.0
        self._accepted = 0  # tokens of the pass that is under way
        self._shapes: Counter[AnyShape | None] = Counter()  # of its sequences
        self._in_a_row = 0  # plain passes
        self._speeds: dict[tuple[int, AnyShape | None], Speed] = {}  # by number of sequences
        self._width = Average(1.0)  # rows of one sequence
        self._size: AnyShape | None = None  # in use; None before the first decision
        self._factor = Average(1.0)  # accepted tokens over the expected ones
        self._since = 0  # drafted passes since the last decision

    def follow(self, policy: Policy | None) -> None:
        """Decide by the costs of `policy` from now on."""
        if policy is not None and policy is not self.policy:
            self._levels = Levels(policy.costs)
            self._speeds.clear()
            # A text that begins to copy would not be noticed in a rest.
            self._rests = Pauses(longest=LONGEST_REST if policy.looks_up else LONGEST_PAUSE)
            # Sizes are compared with plain passes, which are timed first.
            self._size, self._block = None, 0 if policy.is_gated else BLOCK
        self.policy = policy

    @property
    def next_shape(self) -> AnyShape | None:
        """Shape of the next tree of a sequence; None for a plain row."""
        if self.policy is None or self._block or self._rests.left:
            return None
        if not self.policy.is_gated:
            return self._size
        drafts = self.policy.looks_up or self.head_gain is not None
        return self.policy.shapes[0] if drafts else None

    def learn(self, shape: AnyShape | None, outcome: Outcome) -> None:
        """Observe the part of one sequence in a pass."""
        self._shapes[shape] += 1
        self._accepted += outcome.accepted
        self._width.add(1 + outcome.drafted)
        if self.policy is None:
            return
        if not self.policy.is_gated and shape in self.policy.shapes:
            self._factor.add(outcome.accepted / self.policy.accepted(shape))
        if not outcome.extended or outcome.draft_ms is None:
            return
        if outcome.promised:
            self.policy.honesty.learn(outcome.promised, outcome.accepted)
        self._levels.learn(outcome)
        if self._gain is not None:
            ms = outcome.draft_ms + outcome.drafted * self._row_ms
            self._gain.add(outcome.accepted - ms * self._speed)
        self._pauses.count()

    def end_pass(self, ms: float) -> None:
        """Observe that a pass, with all around it, took `ms`; set the prices of the next one."""
        shapes, accepted = self._shapes, self._accepted
        self._shapes, self._accepted = Counter(), 0
        n = shapes.total()
        if n < 2 or self.policy is None:
            return
        drafted = shapes[None] < n
        self._in_a_row = 0 if drafted else self._in_a_row + 1
        if len(shapes) == 1 and (drafted or self._in_a_row > WARM):
            self._kind(n, next(iter(shapes))).add(accepted, ms)
        if self.policy.is_gated:
            self._set_prices(self.policy, n)
        self._rest_or_draft(self.policy, n, drafted)

    def _kind(self, n: int, shape: AnyShape | None) -> Speed:
        """Return the passes of `n` sequences, all with trees of `shape` or all without."""
        if (n, shape) not in self._speeds:
            policy, speed = self.policy, Speed(n)
            if shape is not None and policy is not None and not policy.is_gated:
                ms = self._draft_ms(policy, n, shape) + n * policy.costs.other
                ms += policy.pass_ms(n * shape.rows)
                speed = Speed(n, n * policy.accepted(shape), ms)
            self._speeds[n, shape] = speed
        return self._speeds[n, shape]

    def _draft_ms(self, policy: Policy, n: int, shape: AnyShape) -> float:
        """Return the time that drafting is expected to take, before it was observed."""
        ms = policy.costs.draft(shape)
        if not self.drafts_together or shape.topk is None:
            return n * ms
        # A run over the rows of all costs more than one of a sequence as passes of the target do.
        return ms * policy.pass_ms(n * shape.topk) / policy.pass_ms(shape.topk)

    def _speed_of(self, n: int, shape: AnyShape | None) -> float:
        return self._kind(n, shape).mean(self._factor.mean())

    def _rest_or_draft(self, policy: Policy, n: int, drafted: bool) -> None:
        """Begin or end a rest from drafting, or a block of plain passes."""
        if self._rests.left:
            if self._rests.wait():
                for (_, shape), speed in self._speeds.items():
                    if shape is not None:
                        speed.forget()
        elif self._block:
            self._block -= 1
        elif drafted:
            self._rests.count()
            self._until_block -= 1
            if self._until_block <= 0:
                self._distance = min(4 * self._distance, LONGEST_DISTANCE)
                self._until_block, self._block = self._distance, BLOCK
                return
        self._choose_size(policy, n, drafted)
        plain = self._speed_of(n, None)
        tries = not drafted or self._rests.probing
        if not tries and plain and self._speed_of(n, self._size) < plain:
            self._rests.begin()

    def _choose_size(self, policy: Policy, n: int, drafted: bool) -> None:
        """Take the size with the most tokens per ms, now and then; gated chains are one size."""
        self._since += drafted
        if self._size is not None and self._since < EVERY:
            return
        self._since = 0
        speeds = {shape: self._speed_of(n, shape) for shape in policy.shapes}
        best = max(speeds, key=speeds.__getitem__)
        if self._size is None or speeds[best] > MARGIN * speeds[self._size]:
            self._size = best

    def _set_prices(self, policy: Policy, n: int) -> None:
        self._speed = max(self._speed_of(n, shape) for shape in (None, policy.shapes[0]))
        if not self._speed:
            return
        self._row_ms = policy.row_ms(n * self._width.mean(), ROWS_AHEAD)
        row, level = self._row_ms * self._speed, self._levels.ms * self._speed
        self.thresholds = Thresholds.at(row, level, policy.honesty)
        self.lookup_threshold = between(row)
        if self._gain is None:
            usual = policy.accepted(policy.shapes[0])
            self._gain = Average(usual - USUAL_CHAIN * (row + level))
        if self._pauses.left:
            if self._pauses.wait():
                self._gain.fade(FORGOTTEN)
        elif not self._pauses.probing and self._gain.mean() <= 0:
            self._pauses.begin()
        self.head_gain = None if self._pauses.left else max(0.0, self._gain.mean())
