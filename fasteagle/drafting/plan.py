"""Which tree pays on this device: measured costs, expected acceptance, and the choice between them.

A cycle costs drafting, a target pass of T rows, and what is left; it yields 1 + the expected number
of accepted tokens. The plan takes the tree with the most tokens per second, or none where plain
decoding has more. Knows nothing of models: `compile.costs` measures, `controller` chooses while
decoding.

Shapes: T rows of a target pass, k width, D levels, N nodes (`tree.TreeShape`).
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, Protocol

from fasteagle.shapes import FusedShape, SureChain, TreeShape

Drafted = TreeShape | SureChain | FusedShape  # shapes that a plan may choose
ROWS = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 24, 32)  # of the target passes that are timed
WIDTHS = (1, 2, 3, 4, 6, 8)
DEPTHS = (1, 2, 3, 4, 5, 6)
# Acceptance is the header's times a factor, which the text decides; the choice is made for each.
FACTORS = tuple(round(0.2 + 0.1 * i, 1) for i in range(13))
SURE = 0.97  # no token is surer to be accepted
RANK_DECAY = 0.7  # of acceptance from rank to rank beyond those measured
# Of a head without a header: what published EAGLE heads reach on chat, roughly.
DEFAULT_RANKS = ((0.6, 0.13, 0.06, 0.04),) * 5
MAX_NODES = 64
# Of what followed the last occurrence, where there is one; text that repeats has much more.
NGRAM_RANKS = ((0.35,), (0.6,), (0.7,))
ADVANTAGE = 1.02  # speculation must promise this over plain decoding, or it is left out


@dataclasses.dataclass(frozen=True)
class Costs:
    """Measured milliseconds of one model, scheme and device."""

    passes: dict[int, float]  # T: target pass of T rows
    first_level: dict[int, float]  # k: extend and the first level
    level: dict[int, float]  # k: every level after it
    other: float  # of a cycle: accept, commit, reading the result
    plain_other: float  # of a plain pass: choosing and reading one token
    cycles: dict[Drafted, float] = dataclasses.field(default_factory=dict)  # whole, measured
    lookup: float = 0.0  # of a fused drafter, without its draft head
    chain: dict[int, float] = dataclasses.field(default_factory=dict)  # levels: a `SureChain`

    @property
    def plain(self) -> float:
        """A token of plain decoding: a pass of one row, or of two where that is faster."""
        return min(self.passes[1], self.passes[2]) + self.plain_other

    @property
    def plain_rows(self) -> int:
        return 1 if self.passes[1] <= self.passes[2] else 2

    def verify(self, rows: int) -> float:
        """A pass of `rows` rows, by interpolation; infinite beyond what was timed."""
        return _interpolated(self.passes, rows)

    def draft(self, shape: Drafted) -> float:
        """Drafting; a fused drafter's levels were timed with its lookup."""
        if isinstance(shape, SureChain):
            return self.draft_chain(shape.depth)
        levels = shape.levels if isinstance(shape, FusedShape) else shape.depth
        if not levels:
            return self.lookup
        more = (levels - 1) * _interpolated(self.level, shape.topk)
        return _interpolated(self.first_level, shape.topk) + more

    def draft_chain(self, levels: int) -> float:
        """Drafting a `SureChain` that ends after so many levels."""
        return _interpolated(self.chain, levels)

    def cycle(self, shape: Drafted) -> float:
        """What was measured; else the sum of its parts."""
        estimate = self.draft(shape) + self.verify(shape.rows) + self.other
        return self.cycles.get(shape, estimate)

    def as_json(self) -> dict[str, Any]:
        names = {"/".join(map(str, dataclasses.astuple(s))): ms for s, ms in self.cycles.items()}
        return dataclasses.asdict(dataclasses.replace(self, cycles={})) | {"cycles": names}

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Costs:
        """Raises KeyError, TypeError, ValueError or AttributeError for anything else."""
        passes, first_level, level, chain = (
            {int(key): float(value) for key, value in raw[name].items()}
            for name in ("passes", "first_level", "level", "chain")
        )
        cycles = {_shape_named(name): float(ms) for name, ms in raw["cycles"].items()}
        other, plain_other = float(raw["other"]), float(raw["plain_other"])
        lookup = float(raw.get("lookup", 0.0))
        costs = cls(passes, first_level, level, other, plain_other, cycles, lookup, chain)
        numbers = [other, plain_other, lookup, *cycles.values()]
        for table in (passes, first_level, level, chain):
            numbers += table.values()
        if not {1, 2} <= set(passes) or not all(0 <= n < math.inf for n in numbers):
            raise ValueError("not a table of times")
        return costs


def _shape_named(text: str) -> Drafted:
    """A shape by its sizes."""
    sizes = [int(size) for size in text.split("/")]
    if len(sizes) == 1:
        return SureChain(*sizes)
    return TreeShape(*sizes) if len(sizes) == 3 else FusedShape(*sizes)


def _interpolated(table: dict[int, float], at: int) -> float:
    """Straight lines between what was measured; infinity behind it."""
    if at in table:
        return table[at]
    keys = sorted(table)
    place = bisect_left(keys, at)
    if place == len(keys):
        return math.inf
    if place == 0:
        return table[keys[0]]
    low, high = keys[place - 1], keys[place]
    share = (at - low) / (high - low)
    return table[low] + share * (table[high] - table[low])


Ranks = tuple[tuple[float, ...], ...]  # [level][rank]: how often the target agrees, parent accepted


def ranks_of(header: dict[str, Any] | None) -> Ranks:
    """Acceptance by level and rank: from a head's header, or the usual of published heads."""
    found = (header or {}).get("ranks")
    if not found:
        return DEFAULT_RANKS
    return tuple(tuple(float(p) for p in level) for level in found)


def chance(ranks: Ranks, level: int, rank: int, factor: float) -> float:
    """That the target agrees with the child of this rank, its parent (level 1: the root) given."""
    row = ranks[min(level, len(ranks)) - 1]
    last = len(row) - 1
    p = row[rank] if rank <= last else row[last] * RANK_DECAY ** (rank - last)
    # The more often the first child is right, the less is left for the others.
    scaled = p * factor
    total = sum(row) * factor
    return min(scaled, SURE * p / sum(row)) if total > SURE else scaled


def expected_accepted(shape: TreeShape, ranks: Ranks, factor: float) -> float:
    """Tokens accepted per pass by the `nodes` likeliest nodes of `depth` levels of `topk` each.

    A node counts if its whole path is right. The tree of a real cycle follows the head's own
    probabilities, which this average does not see; what is observed corrects it.
    """
    return _expected_by_nodes(shape.topk, shape.depth, ranks, factor)[shape.nodes - 1]


@functools.cache
def _expected_by_nodes(topk: int, depth: int, ranks: Ranks, factor: float) -> list[float]:
    """The same for 1, 2, ... nodes, as far as the pool reaches or a pass has rows."""
    return list(itertools.accumulate(p for p, _ in best_nodes(topk, depth, ranks, factor)))


@functools.cache
def best_nodes(topk: int, depth: int, ranks: Ranks, factor: float) -> list[tuple[float, int]]:
    """(probability, level) of the likeliest nodes, the best first."""
    found: list[tuple[float, int]] = []
    pending = [(-chance(ranks, 1, rank, factor), 1) for rank in range(topk)]
    heapq.heapify(pending)
    while pending and len(found) < MAX_NODES:
        negative, level = heapq.heappop(pending)
        found.append((-negative, level))
        if level < depth:
            for rank in range(topk):
                heapq.heappush(
                    pending, (negative * chance(ranks, level + 1, rank, factor), level + 1)
                )
    return found


def shapes(max_rows: int, max_topk: int) -> list[TreeShape]:
    """What is tried: chains, and trees as large as each timed pass."""
    found = []
    for k in WIDTHS:
        if k > max_topk:
            continue
        for depth in DEPTHS:
            if k == 1:
                found += [TreeShape(depth, 1, depth)] if depth < max_rows else []
                continue
            pool = k + (depth - 1) * k * k
            nodes = {rows - 1 for rows in ROWS if rows <= max_rows}
            found += [TreeShape(depth, k, n) for n in sorted(nodes) if depth <= n <= pool]
    return found


def tokens_per_second(costs: Costs, ranks: Ranks, shape: TreeShape | None, factor: float) -> float:
    """Expected; None is plain decoding."""
    if shape is None:
        return 1e3 / costs.plain
    return 1e3 * (1 + expected_accepted(shape, ranks, factor)) / costs.cycle(shape)


def best_shape(
    costs: Costs, ranks: Ranks, factor: float, candidates: list[TreeShape]
) -> TreeShape | None:
    """The shape with the most tokens per second; None where plain decoding has more."""
    best, best_rate = None, ADVANTAGE * tokens_per_second(costs, ranks, None, factor)
    for shape in candidates:
        rate = tokens_per_second(costs, ranks, shape, factor)
        if rate > best_rate:
            best, best_rate = shape, rate
    return best


class AnyPlan(Protocol):
    """A choice of shapes, all of one kind: `shape` stands for those."""

    @property
    def costs(self) -> Costs: ...

    @property
    def ranks(self) -> Ranks: ...

    @property
    def shapes(self) -> Sequence[Drafted]: ...

    def at(self, factor: float) -> Drafted | None: ...

    def expected(self, shape: Any, factor: float) -> float: ...

    def rate(self, shape: Any, factor: float) -> float: ...


@dataclasses.dataclass(frozen=True)
class Plan:
    """The choice for every factor; None stands for plain decoding."""

    costs: Costs
    ranks: Ranks
    choices: tuple[TreeShape | None, ...]  # one for each of FACTORS

    @property
    def shapes(self) -> list[TreeShape]:
        """Those that occur: what a device must have captured."""
        return list(dict.fromkeys(shape for shape in self.choices if shape is not None))

    def at(self, factor: float) -> TreeShape | None:
        nearest = min(range(len(FACTORS)), key=lambda i: abs(FACTORS[i] - factor))
        return self.choices[nearest]

    def expected(self, shape: TreeShape, factor: float) -> float:
        """Accepted tokens per pass."""
        return expected_accepted(shape, self.ranks, factor)

    def rate(self, shape: TreeShape | None, factor: float) -> float:
        return tokens_per_second(self.costs, self.ranks, shape, factor)


def make_plan(costs: Costs, ranks: Ranks, max_topk: int, most: int = 4) -> Plan:
    """Choose for every factor, from at most `most` shapes."""
    measured = [shape for shape in costs.cycles if isinstance(shape, TreeShape)]
    candidates = measured or shapes(max(costs.passes), max_topk)
    wanted = [best_shape(costs, ranks, factor, candidates) for factor in FACTORS]
    distinct = list(dict.fromkeys(shape for shape in wanted if shape is not None))
    if len(distinct) > most:  # keep those at even distances, the first and the last among them
        step = (len(distinct) - 1) / (most - 1)
        distinct = [distinct[round(i * step)] for i in range(most)]
    choices = [best_shape(costs, ranks, factor, distinct) for factor in FACTORS]
    return Plan(costs, ranks, tuple(choices))
