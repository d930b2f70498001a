"""Rows of the benchmark by name."""

from __future__ import annotations

import pytest

from fasteagle.bench.run import BenchOptions
from fasteagle.errors import FasteagleError
from fasteagle.options import DraftOptions
from fasteagle.shapes import FusedShape, TreeShape


def test_a_row_may_name_its_tree():
    options = BenchOptions(rows=("plain", "eagle@4/2/10"))
    row = options.specs[1]
    draft = row.draft_options(options.draft)
    assert (draft.drafter, draft.tree_shape(False)) == ("eagle", TreeShape(4, 2, 10))
    assert not draft.auto_tree and row.planned_tree(DraftOptions(), True).nodes == 10
    assert row.label == options.rows[1]


def test_a_fused_row_may_name_its_tree():
    options = BenchOptions(rows=("fused", "fused@4/2/10/12"))
    usual, row = options.specs
    draft = row.draft_options(options.draft)
    assert (draft.drafter, draft.tree_shape(False)) == ("fused", FusedShape(4, 2, 10, 12))
    assert not draft.auto_tree and row.label == options.rows[1] and row.has_head
    asked = DraftOptions(lookup_depth=5)
    assert usual.planned_tree(asked, False) == FusedShape(3, 3, 8, 5)
    assert usual.planned_tree(DraftOptions(), True) == FusedShape(2, 3, 3, 8)
    eagle = BenchOptions(rows=("eagle",), draft=asked).specs[0]
    assert eagle.planned_tree(asked, False) == TreeShape(3, 3, 8)


@pytest.mark.parametrize("row", ["fused@", "fused@3/3/8", "fused@3/3/8/x", "fused@1/2/3/4/5"])
def test_a_fused_row_with_half_a_tree_is_refused(row):
    with pytest.raises(FasteagleError, match="DEPTH/TOPK/NODES/LOOKUP-DEPTH"):
        BenchOptions(rows=(row,))


@pytest.mark.parametrize("row", ["ngram@3/3/8", "fusedx", "fuse@3/3/8/8"])
def test_an_unknown_row_is_refused(row):
    with pytest.raises(FasteagleError, match="unknown row"):
        BenchOptions(rows=(row,))


@pytest.mark.parametrize(
    "row", ["eagle@3/3/8/8", "eagle@", "eagle@3/3", "eagle@3/3/x", "eagle@3/3/-8"]
)
def test_a_row_with_half_a_tree_is_refused(row):
    with pytest.raises(FasteagleError, match="DEPTH/TOPK/NODES"):
        BenchOptions(rows=(row,))


def test_a_row_may_name_its_head():
    options = BenchOptions(rows=("eagle", "eagle@4/2/10=some/head"), draft=DraftOptions(head="own"))
    usual, row = options.specs
    assert usual.draft_options(options.draft).head == "own"
    draft = row.draft_options(options.draft)
    assert (draft.head, draft.tree_shape(False)) == ("some/head", TreeShape(4, 2, 10))
    assert row.label == options.rows[1]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("ngram=x", "ngram has no draft head: drop =x"),
        ("eagle=", "name the draft head behind"),
        ("eagel=x", "unknown row 'eagel'"),
    ],
)
def test_a_head_where_there_is_none(row, said):
    with pytest.raises(FasteagleError, match=said):
        BenchOptions(rows=(row,))
