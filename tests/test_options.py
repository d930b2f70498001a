"""Options that decide for others."""

from __future__ import annotations

import pytest

from fasteagle.options import DraftOptions


@pytest.mark.parametrize(
    ("options", "auto"),
    [
        (DraftOptions(), True),
        (DraftOptions("eagle"), True),
        (DraftOptions("ngram"), True),
        (DraftOptions(tree_depth=3), False),
        (DraftOptions(tree_nodes=5), False),
        (DraftOptions("eagle-chain"), False),
        (DraftOptions(tree_file="tree.json"), False),
        (DraftOptions("none"), False),
    ],
)
def test_who_chooses_the_tree(options, auto):
    assert options.auto_tree == auto
