"""Thresholds of gated chains: path probabilities from which a further token pays.

They follow from prices in tokens: what the time of a row, or of a level, brings elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

LONGEST = 8  # tokens of a draft head's chain
NEXT_ACCEPTED = 0.65  # assumed acceptance rate of a further level's token
HONEST_TOKENS = 8.0  # weight of the draft head's own probabilities, in tokens
MEMORY = 0.99  # factor on the weight of past cycles in the averages, each cycle


class Thresholds(NamedTuple):
    """Path probabilities, by depth, from which a gated chain continues."""

    verify: tuple[float, ...] = (0.15,) * LONGEST  # from which a token is verified
    expand: tuple[float, ...] = (0.4,) * LONGEST  # from which a further level is drafted

    @classmethod
    def at(cls, row: float, level: float, honesty: Honesty) -> Thresholds:
        """Return the thresholds where a row and a level cost so many tokens."""
        ratios = [honesty.ratio(depth) for depth in range(LONGEST)]
        verify = [between(row / ratio) for ratio in ratios]
        expand = [between((row + level) / NEXT_ACCEPTED / ratio) for ratio in ratios]
        return cls(tuple(verify), tuple(expand))


class Honesty:
    """Calibration of the draft head's chain: accepted over promised tokens, by depth."""

    def __init__(self) -> None:
        self._promised = [HONEST_TOKENS * 0.5] * LONGEST
        self._accepted = list(self._promised)

    def learn(self, promised: Sequence[float], accepted: int) -> None:
        """Count a chain of at most `LONGEST` tokens, whose first `accepted` were accepted."""
        for depth, probability in enumerate(promised):
            self._promised[depth] = MEMORY * self._promised[depth] + probability
            self._accepted[depth] = MEMORY * self._accepted[depth] + (depth < accepted)

    def ratio(self, depth: int) -> float:
        """Return accepted over promised tokens at `depth`, which counts from 0."""
        return min(2.0, max(0.25, self._accepted[depth] / self._promised[depth]))


def between(probability: float) -> float:
    """Return `probability` within the limits of a threshold."""
    return min(0.95, max(0.02, probability))
