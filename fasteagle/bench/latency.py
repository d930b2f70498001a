"""Time per token as a reader sees it: the gap between two chunks, divided by its tokens.

A cycle's tokens arrive together. Each of them counts as the time since the chunk before, divided
by the tokens in the chunk, so that the latencies of an answer add up to its decoding time. The
first chunk is left out: its wait is the TTFT.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

Chunk = tuple[int, float]  # tokens in it, seconds since the chunk before


def token_latencies(chunks: Iterable[Chunk]) -> list[float]:
    """Return the seconds of every token."""
    return [seconds / n for n, seconds in chunks for _ in range(n)]


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the smallest value that at least `share` (0 .. 1) of all do not exceed, or None."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
