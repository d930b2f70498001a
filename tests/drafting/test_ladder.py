"""Sizes that are worth having, and what trees of them are expected to bring."""

from __future__ import annotations

import dataclasses

import pytest

from fasteagle.drafting.costs import Costs
from fasteagle.drafting.ladder import (
    DEFAULT_RANKS,
    NGRAM_RANKS,
    chance,
    expected,
    expected_of_head,
    ladder,
    ranks_of,
)
from fasteagle.shapes import FusedShape, TreeShape
from helpers import ROWS, costs
from simulated_machine import CHAIN, SLOW


@pytest.mark.parametrize("fused", [False, True])
def test_a_ladder_has_few_sizes_that_fit_what_was_timed(fused):
    shape = FusedShape(3, 3, 8, 8) if fused else TreeShape(3, 3, 8)
    flat = dataclasses.replace(costs(dict.fromkeys(ROWS, 10.0), level=0.1), lookup=0.1)
    sizes = [ladder(table, DEFAULT_RANKS, shape, 8) for table in (costs(), flat)]
    for some in sizes:
        assert len(some) == len(set(some)) == 3 + 2 * fused  # of each kind of text, and looked up
        assert all(size.rows <= max(ROWS) and isinstance(size, type(shape)) for size in some)
        assert fused == any(isinstance(size, FusedShape) and not size.levels for size in some)
        assert all(size.reach <= 8 for size in some if fused and size.levels)
    assert max(s.rows for s in sizes[1]) > max(s.rows for s in sizes[0] if s.depth < 7)
    assert {size.topk for size in ladder(flat, DEFAULT_RANKS, shape, 2)} == (
        {1, 2} if fused else {2}
    )
    few = dataclasses.replace(flat, passes={1: 10.0, 8: 10.0})  # of more rows none is timed
    assert all(size.rows <= 8 for size in ladder(few, DEFAULT_RANKS, shape, 8))


def test_a_drafter_without_a_head_has_chains_of_looked_up_tokens():
    table = Costs({1: 3.0, 2: 3.1, 8: 4.0}, {}, {}, 0.1, 0.1, 0.1)
    sizes = ladder(table, NGRAM_RANKS, TreeShape(7, 1, 7), 0)
    assert sizes == [TreeShape(3, 1, 3), TreeShape(7, 1, 7)]
    short = dataclasses.replace(table, passes={1: 3.0, 7: 4.0})
    assert ladder(short, NGRAM_RANKS, TreeShape(7, 1, 7), 0) == sizes[:1]
    assert ladder(SLOW, DEFAULT_RANKS, CHAIN, 8) == [CHAIN]


def test_what_a_tree_is_expected_to_bring():
    """By hand: two levels of two nodes, every path's probability."""
    ranks = ((0.5, 0.2), (0.6, 0.1))
    paths = [0.5, 0.2, 0.5 * 0.6, 0.5 * 0.1, 0.2 * 0.6, 0.2 * 0.1]
    for nodes in range(2, 7):
        best = sum(sorted(paths, reverse=True)[:nodes])
        assert expected_of_head(TreeShape(2, 2, nodes), ranks, 1.0) == pytest.approx(best)
    usual = [0.8 * 0.5, 0.8 * 0.2, 0.8 * 0.5 * 0.8 * 0.6]
    assert expected(TreeShape(2, 2, 3), ranks) == pytest.approx(sum(usual))
    both = [expected(FusedShape(2, 2, 3, 3), ranks, copying) for copying in (False, True)]
    assert both == pytest.approx([sum(usual), 0.8 * (1 + 0.85 + 0.85**2)])
    assert expected(FusedShape(0, 1, 2, 9), ranks) == pytest.approx(0.2 * (1 + 0.85))
    assert expected(CHAIN, ranks) == pytest.approx(0.4 * (1 + 0.48 + 0.48**2))
    assert chance(ranks, 1, 0, 2.0) == pytest.approx(0.97 * 0.5 / 0.7)  # no more than there is
    assert chance(ranks, 9, 3, 1.0) == pytest.approx(0.1 * 0.7**2)  # ranks and levels beyond
    assert ranks_of({"ranks": [[0.5, 0.2]]}) == ((0.5, 0.2),) and ranks_of(None) == DEFAULT_RANKS
    assert ranks_of({"ranks": []}) == DEFAULT_RANKS
