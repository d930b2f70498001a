"""Which fused tree pays: costs of both sources, and what each yields on this text.

The lookup is modelled by one number, `hit`: how often its first token is right. Then the text is
being copied, and each further token is right with probability COPY. The draft head is modelled as
in `plan`. The choice is made for every pair of both, shapes without levels included: where copying
is nearly certain and the draft head costs more than it adds, they win.

Shapes: T rows of a target pass, k width, D levels, N nodes.
"""

from __future__ import annotations

import dataclasses

from fasteagle.drafting.plan import (
    ADVANTAGE,
    DEPTHS,
    FACTORS,
    ROWS,
    WIDTHS,
    Costs,
    Ranks,
    best_nodes,
)
from fasteagle.shapes import FusedShape

HITS = (0.0, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95)
USUAL_HIT = 0.2  # of text that is not known yet
COPY = 0.85
REACH_BESIDE_HEAD = 8  # tokens copied beside a draft head's levels, at most
MOST = 5  # shapes of a plan


def expected_of_head(shape: FusedShape, ranks: Ranks, factor: float, nodes: int) -> list[float]:
    """By depth: how often the draft head's best `nodes` nodes reach it."""
    reached = [0.0] * max(shape.levels, shape.reach)
    if shape.levels:
        for probability, level in best_nodes(shape.topk, shape.levels, ranks, factor)[:nodes]:
            reached[level - 1] += probability
    return reached


def expected_fused(shape: FusedShape, ranks: Ranks, factor: float, hit: float) -> float:
    """Tokens accepted per pass, both sources together."""
    copying = _while_copying(shape, ranks, factor)
    return hit * copying + (1 - hit) * sum(expected_of_head(shape, ranks, factor, shape.nodes))


def _while_copying(shape: FusedShape, ranks: Ranks, factor: float) -> float:
    """The same while the lookup is right in its first token."""
    head = []
    if shape.levels:
        head = [p for p, _ in best_nodes(shape.topk, shape.levels, ranks, factor)]
    # The nodes go to whatever is likelier next, as in the rerank.
    chain = taken = 0
    while chain + taken < shape.nodes:
        more_of_head = head[taken] if taken < len(head) else 0.0
        more_of_chain = COPY**chain if chain < shape.reach else 0.0
        if more_of_chain == more_of_head == 0:
            break
        if more_of_chain >= more_of_head:
            chain += 1
        else:
            taken += 1
    reached = expected_of_head(shape, ranks, factor, taken)
    copied = [COPY**depth if depth < chain else 0.0 for depth in range(len(reached))]
    return sum(1 - (1 - a) * (1 - b) for a, b in zip(reached, copied, strict=True))


def fused_shapes(max_rows: int, max_topk: int) -> list[FusedShape]:
    """What is tried: trees as large as each timed pass, with a draft head and without."""
    found = []
    for nodes in (rows - 1 for rows in ROWS if 1 < rows <= max_rows):
        found.append(FusedShape(0, 1, nodes, nodes))
        reach = min(nodes, REACH_BESIDE_HEAD)
        for k in (k for k in WIDTHS if k <= max_topk):
            for depth in (depth for depth in DEPTHS if depth <= nodes):
                if nodes <= k + (depth - 1) * k * k + reach:
                    found.append(FusedShape(depth, k, nodes, reach))
    return found


@dataclasses.dataclass(frozen=True)
class FusedPlan:
    """The choice for every factor and hit rate; None stands for plain decoding."""

    costs: Costs
    ranks: Ranks
    choices: tuple[tuple[FusedShape | None, ...], ...]  # [factor][hit]

    @property
    def shapes(self) -> list[FusedShape]:
        """Those that occur: what a device must have captured."""
        found = [shape for row in self.choices for shape in row if shape is not None]
        return list(dict.fromkeys(found))

    def at(self, factor: float, hit: float = USUAL_HIT) -> FusedShape | None:
        row = min(range(len(FACTORS)), key=lambda i: abs(FACTORS[i] - factor))
        return self.choices[row][min(range(len(HITS)), key=lambda i: abs(HITS[i] - hit))]

    def expected(self, shape: FusedShape, factor: float, hit: float = USUAL_HIT) -> float:
        """Accepted tokens per pass."""
        return expected_fused(shape, self.ranks, factor, hit)

    def rate(self, shape: FusedShape | None, factor: float, hit: float = USUAL_HIT) -> float:
        """Expected tokens per second; None is plain decoding."""
        if shape is None:
            return 1e3 / self.costs.plain
        return 1e3 * (1 + self.expected(shape, factor, hit)) / self.costs.cycle(shape)


def make_fused_plan(costs: Costs, ranks: Ranks, max_topk: int) -> FusedPlan:
    """Choose for every factor and hit rate, from at most `MOST` shapes."""
    measured = [shape for shape in costs.cycles if isinstance(shape, FusedShape)]
    found = measured or fused_shapes(max(costs.passes), max_topk)
    wanted = _choices(costs, ranks, found)
    gains: dict[FusedShape, float] = {}
    unlimited = FusedPlan(costs, ranks, wanted)
    for factor, row in zip(FACTORS, wanted, strict=True):
        for hit, shape in zip(HITS, row, strict=True):
            if shape is not None:
                rate = unlimited.rate(shape, factor, hit)
                gains[shape] = gains.get(shape, 0.0) + rate - unlimited.rate(None, factor)
    kept = sorted(gains, key=lambda shape: gains[shape], reverse=True)[:MOST]
    return FusedPlan(costs, ranks, _choices(costs, ranks, kept))


def _choices(
    costs: Costs, ranks: Ranks, shapes: list[FusedShape]
) -> tuple[tuple[FusedShape | None, ...], ...]:
    """The shape with the most tokens per second for each pair; None where plain has more."""
    rows = []
    for factor in FACTORS:
        # Linear in the hit rate: two values of a shape give all of them.
        without = [expected_fused(shape, ranks, factor, 0.0) for shape in shapes]
        copying = [expected_fused(shape, ranks, factor, 1.0) for shape in shapes]
        row: list[FusedShape | None] = []
        for hit in HITS:
            best: FusedShape | None = None
            best_rate = ADVANTAGE / costs.plain
            for shape, low, high in zip(shapes, without, copying, strict=True):
                rate = (1 + low + hit * (high - low)) / costs.cycle(shape)
                if rate > best_rate:
                    best, best_rate = shape, rate
            row.append(best)
        rows.append(tuple(row))
    return tuple(rows)
