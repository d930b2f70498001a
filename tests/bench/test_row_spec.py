"""Rows of the benchmark by name."""

from __future__ import annotations

import pytest

from fasteagle.bench.run import BenchOptions
from fasteagle.errors import FasteagleError
from fasteagle.options import DraftOptions
from fasteagle.shapes import TreeShape


def test_a_row_may_name_its_tree():
    options = BenchOptions(rows=("plain", "eagle@4/2/10"))
    row = options.specs[1]
    draft = row.draft_options(options.draft)
    assert (draft.drafter, draft.tree_shape(False)) == ("eagle", TreeShape(4, 2, 10))
    assert not draft.auto_tree and row.planned_tree(DraftOptions(), True).nodes == 10
    assert row.label == options.rows[1]


@pytest.mark.parametrize("row", ["eagle@", "eagle@3/3", "eagle@3/3/x", "eagle@3/3/-8"])
def test_a_row_with_half_a_tree_is_refused(row):
    with pytest.raises(FasteagleError, match="DEPTH/TOPK/NODES"):
        BenchOptions(rows=(row,))
