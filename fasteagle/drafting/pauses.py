"""Pauses of drafting, which become longer while drafting does not pay."""

from __future__ import annotations

import dataclasses

PROBE = 8  # cycles of drafting before it may pause again
FIRST_PAUSE, LONGEST_PAUSE = 24, 768  # passes
SETTLED = 256  # cycles of drafting after which the next pause is short again


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
