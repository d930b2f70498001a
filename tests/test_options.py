"""Options that decide for others."""

from __future__ import annotations

import pytest

from fasteagle.errors import FasteagleError
from fasteagle.options import DraftOptions, RuntimeOptions
from fasteagle.shapes import FusedShape, TreeShape


@pytest.mark.parametrize(
    ("options", "auto"),
    [
        (DraftOptions(), True),
        (DraftOptions("eagle"), True),
        (DraftOptions("ngram"), True),
        (DraftOptions(tree_depth=3), False),
        (DraftOptions(tree_nodes=5), False),
        (DraftOptions(lookup_depth=5), False),
        (DraftOptions("eagle-chain"), False),
        (DraftOptions(tree_file="tree.json"), False),
        (DraftOptions("none"), False),
    ],
)
def test_who_chooses_the_tree(options, auto):
    assert options.auto_tree == auto


def test_a_depth_of_looked_up_chains_asks_for_lookups():
    """It was taken by `auto`, and turned the lookup off; never more than 8 were copied."""
    longer = DraftOptions(lookup_depth=32)
    assert longer.fuses and longer.auto_chain
    assert longer.tree_shape(False) == FusedShape(3, 3, 32, 32)
    assert longer.tree_shape(False).depth == 32
    few = DraftOptions("fused", lookup_depth=32, tree_nodes=4)
    assert few.tree_shape(True) == FusedShape(2, 3, 4, 32)
    for drafter, tree in (("eagle", None), ("auto", "tree.json")):
        with pytest.raises(FasteagleError, match="lookup-depth 32 is for drafters that look up"):
            DraftOptions(drafter, lookup_depth=32, tree_file=tree)


def test_a_smaller_model_drafts_a_chain_unless_told_otherwise():
    """A row of its own costs more than one of a draft head."""
    shape = DraftOptions(draft_model="x").tree_shape(False)
    assert shape == TreeShape(shape.depth, 1, shape.depth)
    assert DraftOptions(draft_model="x", tree_topk=2).tree_shape(False).topk == 2


def test_a_dtype_is_one_of_our_own_weights():
    """The benchmark compares torchao's formats with dense weights."""
    quantized = RuntimeOptions(quant="int4", backend="torchao")
    assert quantized.at("bf16") == RuntimeOptions(dtype="bf16")
