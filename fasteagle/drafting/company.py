"""Drafting where several sequences share each pass, by the price of a sequence alone: see `policy`.

A row and a level take time from all sequences: they are worth it while the tokens that they bring
are above `speed` x their time, where `speed` is that of all sequences together. Looking up and
drafting take time beside that, so passes with drafts are compared with plain ones: where they are
not faster, all sequences decode plainly for some time.
"""

from __future__ import annotations

from collections import defaultdict

from fasteagle.drafting.policy import (
    BLOCK,
    FIRST_DISTANCE,
    FORGOTTEN,
    LONGEST_DISTANCE,
    USUAL_CHAIN,
    WARM,
    Average,
    Levels,
    Outcome,
    Pauses,
    Policy,
)
from fasteagle.drafting.thresholds import Thresholds, between
from fasteagle.shapes import AnyShape, GatedChain

ROWS_AHEAD = 4  # further rows over which the price of one is taken
LONGEST_REST = 96  # passes, in which a text that begins to copy would not be noticed


class Speed:
    """Tokens and milliseconds of passes of one kind."""

    def __init__(self) -> None:
        self.tokens, self.ms = Average(0.0, 0.0), Average(0.0, 0.0)

    def add(self, tokens: int, ms: float) -> None:
        """Observe a pass."""
        self.tokens.add(tokens)
        self.ms.add(ms)

    def mean(self) -> float:
        """Return tokens per millisecond; 0 while none is observed."""
        return self.tokens.mean() / self.ms.mean() if self.ms.n else 0.0


class Company:
    """Policy that the drafters of all sequences in a batch share; `end_pass` ends each pass.

    `policy` is that of a sequence alone, with its measured costs; None: they are not known yet, and
    only plain decoding is safe. Only gated chains are drafted. The draft head pauses while its
    chains have brought less than their time.
    """

    def __init__(self) -> None:
        self.policy: Policy | None = None
        self._levels: Levels  # a sequence's share of their time, while there is a policy
        self.thresholds, self.lookup_threshold = Thresholds(), Thresholds().verify[0]
        self.head_gain: float | None = None
        self._pauses = Pauses()  # of the draft head
        self._rests = Pauses(longest=LONGEST_REST)  # of all drafting
        self._block = 0  # plain passes left of a block that times them
        self._until_block = self._distance = FIRST_DISTANCE  # drafted passes
        self._gain: Average | None = None  # tokens of the draft head's chain over their worth
        self._speed = self._row_ms = 0.0
        self._n = self._tokens = self._shaped = 0  # of the pass that is under way
        self._in_a_row = 0  # plain passes
        # By number of sequences, and whether they drafted.
        self._speeds: dict[tuple[int, bool], Speed] = defaultdict(Speed)
        self._width = Average(1.0)  # rows of one sequence

    def follow(self, policy: Policy | None) -> None:
        """Decide by the costs of `policy` from now on."""
        if policy is not None and policy is not self.policy:
            self._levels = Levels(policy.costs)
        self.policy = policy

    @property
    def next_shape(self) -> AnyShape | None:
        """Shape of the next tree of a sequence; None for a plain row."""
        if self.policy is None or not isinstance(self.policy.shapes[0], GatedChain):
            return None
        if self._block or self._rests.left:
            return None
        drafts = self.policy.looks_up or self.head_gain is not None
        return self.policy.shapes[0] if drafts else None

    def learn(self, shape: AnyShape | None, outcome: Outcome) -> None:
        """Observe the part of one sequence in a pass."""
        self._n += 1
        self._shaped += shape is not None
        self._tokens += 1 + outcome.accepted
        self._width.add(1 + outcome.drafted)
        if self.policy is None or not outcome.extended or outcome.draft_ms is None:
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
        n, tokens, shaped = self._n, self._tokens, self._shaped
        self._n = self._tokens = self._shaped = 0
        if n < 2 or self.policy is None:
            return
        self._in_a_row = 0 if shaped else self._in_a_row + 1
        if shaped == n or self._in_a_row > WARM:
            self._speeds[n, shaped == n].add(tokens, ms)
        self._set_prices(self.policy, n)
        self._rest_or_draft(n, shaped > 0)

    def _rest_or_draft(self, n: int, drafted: bool) -> None:
        """Begin or end a rest from drafting, or a block of plain passes."""
        plain, drafting = self._speeds[n, False], self._speeds[n, True]
        if self._rests.left:
            if self._rests.wait():
                for speed in (drafting.tokens, drafting.ms):
                    speed.fade(FORGOTTEN)
        elif self._block:
            self._block -= 1
        elif drafted:
            self._rests.count()
            self._until_block -= 1
            if self._until_block <= 0:
                self._distance = min(4 * self._distance, LONGEST_DISTANCE)
                self._until_block, self._block = self._distance, BLOCK
            elif plain.ms.n and not self._rests.probing and drafting.mean() < plain.mean():
                self._rests.begin()

    def _set_prices(self, policy: Policy, n: int) -> None:
        self._speed = max(self._speeds[n, drafts].mean() for drafts in (False, True))
        if not self._speed:
            return
        self._row_ms = policy.row_ms(n * self._width.mean(), ROWS_AHEAD)
        row, level = self._row_ms * self._speed, self._levels.ms * self._speed
        self.thresholds = Thresholds.at(row, level, policy.honesty)
        self.lookup_threshold = between(row)
        if self._gain is None:
            self._gain = Average(policy.usual_tokens - USUAL_CHAIN * (row + level))
        if self._pauses.left:
            if self._pauses.wait():
                self._gain.fade(FORGOTTEN)
        elif not self._pauses.probing and self._gain.mean() <= 0:
            self._pauses.begin()
        self.head_gain = None if self._pauses.left else max(0.0, self._gain.mean())
