"""Ladder: the few sizes of trees that the policy chooses from, and their expected tokens.

Where a tree's shape must be fixed before its cycle (compiled code, captured graphs), the policy
chooses among a few sizes. These are chosen here, once, by measured costs and by how often the
draft head's children are accepted on usual text. Observations correct both: see `policy`.

Shapes: k width, D levels, N nodes.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Sequence
from typing import Any

from fasteagle.drafting.costs import ROWS, WIDTHS, Costs
from fasteagle.shapes import AnyShape, FusedShape, GatedChain, TreeShape, head_pool

Ranks = tuple[tuple[float, ...], ...]  # [level][rank]: acceptance rate where the parent is accepted

# Acceptance of a draft head without a header: roughly that of published EAGLE heads on chat.
DEFAULT_RANKS = ((0.6, 0.13, 0.06, 0.04),) * 5
RANK_DECAY = 0.7  # factor on acceptance per rank past the measured ranks
# Of looked-up tokens, where the text has an earlier match; text that repeats has much more.
NGRAM_RANKS = ((0.35,), (0.6,), (0.7,))
SURE = 0.97  # largest acceptance rate of a token
LEAST = 0.05  # of the likeliest child
DEPTHS = (1, 2, 3, 4, 5, 6)
# A header records acceptance on text that the model wrote; questions of users have less: the
# default draft head's first token is accepted for 0.50 of MT-bench, 0.69 of its held-out text.
USUAL = 0.8
TEXTS = (0.4, USUAL, 1.2)  # factors on recorded acceptance; each has a best size
LOOKUP_NODES = (7, 15)  # nodes of sizes whose only source is the lookup
# Sizes of a drafter without a head. Compiling how the rows of a chain see each other takes seconds
# for 8 rows and minutes for 16: Inductor simplifies indices of indices.
CHAIN_NODES = (3, 7)
LOOKUP_REACH = 8  # looked-up tokens beside a draft head's levels
MAX_NODES = 64
CHAIN_LEVELS = 3  # average of a gated chain
# Acceptance of the first looked-up token: on usual text, and after tokens that were copied.
HIT, HIT_COPYING = 0.2, 0.8
COPY = 0.85  # acceptance of each further looked-up token


def ranks_of(header: dict[str, Any] | None) -> Ranks:
    """Return acceptance by level and rank, from a draft head's header or `DEFAULT_RANKS`."""
    ranks = (header or {}).get("ranks")
    if not ranks:
        return DEFAULT_RANKS
    # A head that was never right on a short text may be right on others.
    return tuple((max(LEAST, float(first)), *map(float, more)) for first, *more in ranks)


def ladder(costs: Costs, ranks: Ranks, shape: AnyShape, max_topk: int) -> list[AnyShape]:
    """Return the sizes that the policy chooses from, for a drafter whose usual one is `shape`.

    `max_topk` is the widest level of the draft head, 0 without one. A gated chain is one size.
    """
    if isinstance(shape, GatedChain):
        return [shape]
    most = max(costs.passes)
    if not max_topk:
        return [TreeShape(n, 1, n) for n in CHAIN_NODES if n < most]
    sizes: list[AnyShape] = []
    if isinstance(shape, FusedShape):
        sizes = [FusedShape(0, 1, n, n) for n in LOOKUP_NODES if n < most]
    candidates = _candidates(max_topk, isinstance(shape, FusedShape))
    for factor in TEXTS:
        best = max(
            candidates,
            key=lambda size: (1 + expected_of_head(size, ranks, factor)) / costs.cycle(size),
        )
        if best not in sizes:
            sizes.append(best)
    return sizes


def _candidates(max_topk: int, fused: bool) -> list[AnyShape]:
    """Return chains, and trees as large as each timed pass; those of no timed one cost infinity."""
    sizes: list[AnyShape] = []
    for k in (k for k in WIDTHS if k <= max_topk):
        for depth in DEPTHS:
            pool = head_pool(k, depth)
            for nodes in (rows - 1 for rows in ROWS):
                reach = min(nodes, LOOKUP_REACH) if fused else 0
                if not depth <= nodes <= pool + reach:
                    continue
                if fused:
                    sizes.append(FusedShape(depth, k, nodes, reach))
                else:
                    sizes.append(TreeShape(depth, k, nodes))
    return sizes


def expected(shape: AnyShape, ranks: Ranks, copying: bool = False) -> float:
    """Return accepted tokens per cycle on usual text, or where tokens have just been copied."""
    if isinstance(shape, GatedChain):
        shape = TreeShape(CHAIN_LEVELS, 1, CHAIN_LEVELS)
    by_head = expected_of_head(shape, ranks, USUAL)
    if not isinstance(shape, FusedShape):
        return by_head
    hit = HIT_COPYING if copying else HIT
    reach = min(shape.reach, shape.nodes)
    return max(by_head, sum(hit * COPY**depth for depth in range(reach)))


def expected_of_head(shape: AnyShape, ranks: Ranks, factor: float) -> float:
    """Return accepted tokens per pass of the likeliest nodes of the draft head's levels.

    A node counts if its whole path is accepted. The tree of a real cycle follows the draft head's
    own probabilities, which this average does not contain; observations correct it.
    """
    if not shape.levels or shape.topk is None:
        return 0.0
    return sum(best_nodes(shape.topk, shape.levels, ranks, factor)[: shape.nodes])


@functools.cache
def best_nodes(topk: int, depth: int, ranks: Ranks, factor: float) -> Sequence[float]:
    """Return path probabilities of the likeliest nodes, the best first."""
    nodes: list[float] = []
    pending = [(-chance(ranks, 1, rank, factor), 1) for rank in range(topk)]
    heapq.heapify(pending)
    while pending and len(nodes) < MAX_NODES:
        negative, level = heapq.heappop(pending)
        nodes.append(-negative)
        if level < depth:
            for rank in range(topk):
                child = negative * chance(ranks, level + 1, rank, factor)
                heapq.heappush(pending, (child, level + 1))
    return nodes


def chance(ranks: Ranks, level: int, rank: int, factor: float) -> float:
    """Return the probability that the child of this rank is accepted after its parent.

    The root's children are at level 1.
    """
    row = ranks[min(level, len(ranks)) - 1]
    last = len(row) - 1
    p = row[rank] if rank <= last else row[last] * RANK_DECAY ** (rank - last)
    # The more often the first child is accepted, the less is left for the others.
    scaled = p * factor
    total = sum(row) * factor
    return min(scaled, SURE * p / sum(row)) if total > SURE else scaled
