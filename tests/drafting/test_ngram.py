"""N-gram drafting: the latest longest match."""

from __future__ import annotations

import torch

from fasteagle.drafting.ngram import NgramDrafter


def test_lookup_finds_the_latest_longest_match():
    drafter = NgramDrafter(depth=3)
    assert list(drafter.lookup([1, 2, 3, 9, 2, 3, 8, 7, 2, 3])) == [8, 7, 2]
    assert list(drafter.lookup([1, 2, 3, 9, 5, 3, 8, 7, 2, 3])) == [9, 5, 3]
    assert list(drafter.lookup([4, 5, 4])) == [5, 4]
    assert list(drafter.lookup([1, 2, 3])) == [] and list(drafter.lookup([1])) == []
    tree = drafter.propose(torch.tensor([4]), [4, 5, 4])
    assert tree.tokens.tolist() == [4, 5, 4, 0]
    assert tree.valid.tolist() == [True, True, True, False]
    assert tree.parents.tolist() == [0, 0, 1, 2]
