"""Costs of the parts of a decode cycle on this device, in milliseconds.

`Costs` is the result of a measurement, stored in a file. `Times` is a table that is corrected by
the times of the cycles themselves, since load and clocks of a machine change. This module knows
nothing of models: `compile.costs` measures.

Shapes: T rows of a target pass, k width of a tree's level.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left
from collections import Counter
from typing import Any

from fasteagle.shapes import AnyShape, GatedChain

ROWS = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 24, 32)  # rows of the target passes that are timed
WIDTHS = (1, 2, 3, 4, 6, 8)  # widths of the levels that are timed
LEAST_STEP = 0.1  # least weight of a new time in the table
LARGEST_CHANGE = 4.0  # largest factor on a time at once: more is an interruption


@dataclasses.dataclass(frozen=True)
class Costs:
    """Measured milliseconds of one model, scheme and device."""

    passes: dict[int, float]  # T: target pass of T rows
    first_level: dict[int, float]  # k: extend and the first level
    level: dict[int, float]  # k: every level after it
    other: float  # rest of a cycle: accept, commit, reading the result
    plain_other: float  # rest of a plain cycle: choosing and reading one token
    lookup: float = 0.0  # drafting by lookup, without the draft head
    chain: dict[int, float] = dataclasses.field(default_factory=dict)  # levels of a gated chain

    @property
    def plain(self) -> float:
        """Time of a plain cycle, whose pass has one row."""
        return self.passes[1] + self.plain_other

    def verify(self, rows: int) -> float:
        """Return the time of a pass of `rows` rows, interpolated; infinite past the timed sizes."""
        return interpolated(self.passes, rows)

    def draft(self, shape: AnyShape) -> float:
        """Return the time of drafting; levels of a fused drafter were timed with its lookup."""
        if isinstance(shape, GatedChain):
            return interpolated(self.chain, shape.depth)
        if not shape.levels or not self.level:
            return self.lookup
        assert shape.topk is not None, "static trees are not tuned"
        more = (shape.levels - 1) * interpolated(self.level, shape.topk)
        return interpolated(self.first_level, shape.topk) + more

    def cycle(self, shape: AnyShape) -> float:
        """Return the time of a whole cycle with a tree of `shape`."""
        return self.draft(shape) + self.verify(shape.rows) + self.other

    def scaled(self, factor: float) -> Costs:
        """Return all times multiplied by `factor`."""
        tables = self.passes, self.first_level, self.level, self.chain
        passes, first_level, level, chain = (
            {size: factor * ms for size, ms in table.items()} for table in tables
        )
        other, plain_other = factor * self.other, factor * self.plain_other
        lookup = factor * self.lookup
        return Costs(passes, first_level, level, other, plain_other, lookup, chain)

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Costs:
        """Read their dictionary from JSON.

        Raises KeyError, TypeError, ValueError or AttributeError for anything else.
        """
        passes, first_level, level, chain = (
            {int(key): float(value) for key, value in raw[name].items()}
            for name in ("passes", "first_level", "level", "chain")
        )
        other, plain_other, lookup = (float(raw[n]) for n in ("other", "plain_other", "lookup"))
        numbers = [other, plain_other, lookup]
        for table in (passes, first_level, level, chain):
            numbers += table.values()
        if 1 not in passes or not all(0 <= n < math.inf for n in numbers):
            raise ValueError("not a table of times")
        return cls(passes, first_level, level, other, plain_other, lookup, chain)


def interpolated(table: dict[int, float], at: float) -> float:
    """Interpolate linearly between the entries; return infinity past the last one."""
    if at in table:
        return table[int(at)]
    keys = sorted(table)
    place = bisect_left(keys, at)
    if place == len(keys):
        return math.inf
    if place == 0:
        return table[keys[0]]
    low, high = keys[place - 1], keys[place]
    share = (at - low) / (high - low)
    return table[low] + share * (table[high] - table[low])


class Times:
    """Table of milliseconds by size, corrected by observed times.

    An observed time changes its own entry and, less with distance, the others: the whole machine
    becomes slower or faster more often than one kernel. The first observations count
    most, so that an outdated table is corrected within a few cycles.
    """

    def __init__(self, table: dict[int, float]) -> None:
        self._table = dict(table)
        self._observed: Counter[int] = Counter()  # number of observations, by size
        self._weights: dict[int, list[float]] = {}  # of the table's entries, by observed size

    def at(self, size: float) -> float:
        """Return interpolated milliseconds at `size`; past the last entry, those of that entry."""
        return interpolated(self._table, min(size, max(self._table)))

    def observe(self, size: int, ms: float) -> None:
        """Correct the table by a time that was measured at `size`."""
        expected = self.at(size)
        if expected <= 0 or ms <= 0:
            return
        self._observed[size] += 1
        step = max(LEAST_STEP, 1 / (1 + self._observed[size]))
        change = min(max(ms / expected, 1 / LARGEST_CHANGE), LARGEST_CHANGE)
        if size not in self._weights:
            self._weights[size] = [min(size / key, key / size) for key in self._table]
        log = step * math.log(change)
        for key, weight in zip(self._table, self._weights[size], strict=True):
            self._table[key] *= math.exp(log * weight)

    def slope(self, size: int) -> float:
        """Return the milliseconds per further row, on average from 1 to `size`; at least 0."""
        size = max(2, min(size, max(self._table)))
        return max(0.0, (self.at(size) - self.at(1)) / (size - 1))
