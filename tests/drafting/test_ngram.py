"""N-gram drafting: the latest longest match, as a search over lists finds it."""

from __future__ import annotations

import pytest
import torch

from fasteagle.drafting.ngram import NgramDrafter
from helpers import empty_state, pairs, propose, random_target, tiny_config


def by_search(text, depth, longest=3, shortest=1):
    """What followed the latest earlier place of the longest matching end, by looking for it."""
    for size in range(longest, shortest - 1, -1):
        end = text[-size:]
        if len(end) < size:
            continue
        for at in range(len(text) - size - 1, -1, -1):
            if text[at : at + size] == end:
                return text[at + size : at + size + depth]
    return []


def by_lookup(drafter, text, depth):
    """The same from a buffer whose rest is left over from another text."""
    buffer = torch.randint(0, 5, (64,))
    buffer[: len(text)] = torch.tensor(text)
    found, valid = drafter.lookup(buffer, torch.tensor(len(text) - 1), depth)
    n = int(valid.sum())
    assert valid.tolist() == [True] * n + [False] * (depth - n)
    return found[:n].tolist()


def test_lookup_finds_the_latest_longest_match():
    drafter = NgramDrafter(depth=3)
    assert by_lookup(drafter, [1, 2, 3, 9, 2, 3, 8, 7, 2, 3], 3) == [8, 7, 2]
    assert by_lookup(drafter, [1, 2, 3, 9, 5, 3, 8, 7, 2, 3], 3) == [9, 5, 3]
    assert by_lookup(drafter, [4, 5, 4], 3) == [5, 4]
    assert by_lookup(drafter, [1, 2, 3], 3) == [] and by_lookup(drafter, [1], 3) == []


@pytest.mark.parametrize(("longest", "shortest"), [(3, 1), (4, 2), (1, 1)])
def test_lookup_equals_a_search_over_lists(longest, shortest):
    torch.manual_seed(0)
    drafter = NgramDrafter(longest=longest, shortest=shortest)
    for _ in range(300):
        text = torch.randint(0, 4, (int(torch.randint(1, 60, ())),)).tolist()
        assert by_lookup(drafter, text, 7) == by_search(text, 7, longest, shortest), text


def test_the_tree_is_a_chain_of_what_was_found():
    state, drafter = empty_state(random_target(tiny_config())), NgramDrafter(depth=3)
    state.text[:3] = torch.tensor([4, 5, 4])
    tree = propose(drafter, state, pairs([5, 4], torch.zeros(2, 32)), 4)
    assert tree.tokens.tolist() == [4, 5, 4, 0]
    assert tree.valid.tolist() == [True, True, True, False]
    assert tree.parents.tolist() == [0, 0, 1, 2]
