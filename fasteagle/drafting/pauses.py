"""Pauses of drafting, and blocks of plain passes that time such passes."""

from __future__ import annotations

import dataclasses
from collections import deque
from statistics import median

ADVANTAGE = 1.02  # speed over plain decoding, below which drafting pauses
PROBE = 8  # cycles of drafting before it may pause again
FIRST_PAUSE, LONGEST_PAUSE = 24, 768  # passes
SETTLED = 256  # cycles of drafting after which the next pause is short again
FIRST_DISTANCE, LONGEST_DISTANCE = 8, 512  # drafted cycles between two blocks of plain passes
BLOCK, FEWEST = 8, 5  # plain passes of a part of a block, and of the shortest block
# Parts follow each other while each is so much faster than the one before it: two parts at least,
# unless drafting is clearly faster sooner.
FALLING, LONGEST_BLOCK = 0.99, 64
WARM = 2  # first passes of a block, which are not counted
OPTIMISM = 0.8  # a block ends early where plain passes would not pay at this share of their time


@dataclasses.dataclass
class Pauses:
    """Schedule of drafting pauses."""

    length: int = FIRST_PAUSE  # passes of the next pause
    left: int = 0  # passes left of this pause
    probing: int = PROBE  # least number of cycles before the next pause
    drafted: int = 0  # cycles since the last pause
    longest: int = LONGEST_PAUSE

    def begin(self) -> None:
        """Begin a pause, twice as long as the last one unless drafting had settled."""
        if self.drafted > SETTLED:
            self.length = FIRST_PAUSE
        self.left, self.drafted = self.length, 0
        self.length = min(2 * self.length, self.longest)

    def wait(self) -> bool:
        """Count a pass of the pause; return whether the pause has ended with it."""
        self.left -= 1
        if self.left <= 0:
            self.end()
        return not self.left

    def end(self) -> None:
        """End the pause: try to draft again."""
        self.left, self.probing = 0, PROBE

    def count(self) -> None:
        """Count a drafted cycle."""
        self.drafted += 1
        self.probing = max(0, self.probing - 1)


class PlainBlocks:
    """Blocks of plain passes between drafted ones, and the time of such passes.

    A single plain pass among others costs more than one of many: clocks rise with the load. Where
    other programs use the same cache, plain passes have more of their weights in it the longer
    nothing else is read in between: 3.3 ms after 50 passes, for instance, 5 ms before.

    A pass is one of `n` sequences. The first block begins after `until` drafted ones.
    """

    def __init__(self, n: int = 1, distance: int = FIRST_DISTANCE, until: int | None = None):
        self.n = n
        self.distance = distance  # between blocks, in drafted passes
        self.until = distance if until is None else until  # drafted passes to the next block
        self.left = 0  # passes left of a part of the block
        self.in_a_row = 0  # plain passes
        self._times: deque[float] = deque(maxlen=BLOCK)
        self._before: float | None = None  # time of the block's passes in the parts before

    @property
    def ms(self) -> float | None:
        """Milliseconds of a plain pass; None before one was timed."""
        return median(self._times) if self._times else None

    @property
    def speed(self) -> float:
        """Tokens per ms; 0 before a pass was timed."""
        return self.n / self.ms if self.ms else 0.0

    def add(self, ms: float | None) -> None:
        """Observe a plain pass; None is a time that is not comparable."""
        self.in_a_row += 1
        if ms is not None and self.in_a_row > WARM:
            self._times.append(ms)

    def is_due(self) -> bool:
        """Count a drafted pass; return whether a block should follow it."""
        self.until -= 1
        return self.until <= 0

    def begin(self) -> None:
        """Begin a block; the next one is four times as far away."""
        self.distance = min(4 * self.distance, LONGEST_DISTANCE)
        self.until, self.left, self._before = self.distance, BLOCK, None

    def forget(self) -> None:
        """Discard the times, which are of another pace."""
        self._times.clear()

    def wait(self, speed: float) -> bool:
        """Count a plain pass of the block; return whether the block has ended with it.

        It ends early where drafting, whose tokens per ms are `speed`, is clearly faster.
        """
        self.left -= 1
        if self.in_a_row >= FEWEST and OPTIMISM * speed > ADVANTAGE * self.speed > 0:
            self.left = 0
        elif not self.left and self._falls():
            self.left, self._before = BLOCK, self.ms
        return not self.left

    def _falls(self) -> bool:
        """Return whether passes may still become faster."""
        now, before = self.ms, self._before
        if self.in_a_row >= LONGEST_BLOCK or now is None:
            return False
        return before is None or now < FALLING * before
