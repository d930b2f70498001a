"""N-gram lookup: what a search over Python lists finds, in the text and in a corpus."""

from __future__ import annotations

import pytest
import torch

from fasteagle.drafting.lookup import (
    KEY_BITS,
    NOTHING,
    WINDOW,
    Corpus,
    Lookup,
    Matches,
    find_in_text,
    joined,
)
from fasteagle.drafting.ngram import NgramDrafter
from fasteagle.sampling import DrawKind
from fasteagle.shapes import MAX_REACH
from fasteagle.state import CycleSpec
from helpers import empty_state, pairs, propose, random_target, tiny_config

BUFFER = 64


def match_size(text, end, suffix_of, longest):
    """How many tokens before and at `end` of `text` equal the last ones of `suffix_of`."""
    size = 0
    while size < min(longest, end + 1, len(suffix_of)) and text[end - size] == suffix_of[-1 - size]:
        size += 1
    return size


def by_search(text, places, reach, longest, shortest=1):
    """Matches as lists: (size, tokens) of the best earlier places, the text repeated at its end."""
    ranked = []
    for end in range(len(text) - 1):
        size = match_size(text, end, text, longest)
        if size >= shortest:
            cycle = text[end + 1 :]
            tokens = [cycle[i % len(cycle)] for i in range(reach)]
            ranked.append((size, end, tokens))
    ranked.sort(key=lambda place: place[:2], reverse=True)
    return [(size, tokens) for size, _, tokens in ranked[:places]]


def as_lists(matches: Matches):
    """The places that were found, without what stands for nothing."""
    found = []
    for tokens, size in zip(matches.tokens.tolist(), matches.sizes.tolist(), strict=True):
        if size:
            n = tokens.index(NOTHING) if NOTHING in tokens else len(tokens)
            assert set(tokens[n:]) <= {NOTHING}
            found.append((size, tokens[:n]))
        else:
            assert set(tokens) == {NOTHING}
    return found


def in_buffer(text, size=BUFFER):
    """The text in a buffer whose rest is left over from another one, and where it ends."""
    buffer = torch.randint(0, 4, (size,))
    buffer[: len(text)] = torch.tensor(text)
    return buffer, torch.tensor(len(text) - 1)


def test_the_longest_match_comes_first_then_the_latest():
    text = [1, 2, 3, 9, 2, 3, 8, 7, 3, 5, 2, 3]
    found = as_lists(find_in_text(*in_buffer(text), places=4, reach=3, longest=3))
    assert found == [(2, [8, 7, 3]), (2, [9, 2, 3]), (1, [5, 2, 3])]


def test_a_text_that_goes_in_circles_is_repeated():
    assert as_lists(find_in_text(*in_buffer([4, 5, 4]), 1, 5, 3)) == [(1, [5, 4, 5, 4, 5])]
    assert as_lists(find_in_text(*in_buffer([7, 7]), 2, 4, 3)) == [(1, [7, 7, 7, 7])]


@pytest.mark.parametrize("text", [[1], [1, 2, 3], [3, 2, 1, 0]])
def test_no_earlier_place(text):
    assert as_lists(find_in_text(*in_buffer(text), 3, 4, 3)) == []


def test_a_match_does_not_reach_before_the_beginning():
    # The buffer in front of slot 0 is its own end, if one is not careful.
    buffer = torch.tensor([2, 9, 2, 0, 0, 9])
    assert as_lists(find_in_text(buffer, torch.tensor(2), 1, 2, 3)) == [(1, [9, 2])]


def test_a_full_buffer():
    text = torch.randint(0, 3, (BUFFER,)).tolist()
    found = as_lists(find_in_text(*in_buffer(text), 3, 8, 5))
    assert found == by_search(text, 3, 8, 5) and found


@pytest.mark.parametrize(("longest", "shortest"), [(3, 1), (4, 2), (1, 1), (8, 1)])
@pytest.mark.parametrize("places", [1, 5])
def test_the_text_against_a_search_over_lists(places, longest, shortest):
    torch.manual_seed(0)
    for _ in range(150):
        text = torch.randint(0, 4, (int(torch.randint(1, BUFFER, ())),)).tolist()
        found = as_lists(find_in_text(*in_buffer(text), places, 7, longest, shortest))
        assert found == by_search(text, places, 7, longest, shortest), text


# A corpus


def by_search_in(documents, text, places, reach, longest, shortest=1):
    """The same in documents: nothing is repeated, and a document ends where it ends."""
    ranked = []
    for number, document in enumerate(documents):
        for end in range(len(document)):
            size = match_size(document, end, text, longest)
            if size >= shortest:
                ranked.append((size, number, end, document[end + 1 : end + 1 + reach]))
    ranked.sort(key=lambda place: place[:3], reverse=True)
    return [(size, tokens) for size, _, _, tokens in ranked[:places]]


@pytest.mark.parametrize(("longest", "shortest"), [(5, 1), (2, 1), (6, 3), (1, 1)])
def test_a_corpus_against_a_search_over_lists(longest, shortest):
    torch.manual_seed(1)
    for _ in range(60):
        documents = [torch.randint(0, 6, (n,)).tolist() for n in (1, 14, 40)]
        corpus = Corpus(documents, "cpu")
        text = torch.randint(0, 6, (int(torch.randint(1, 30, ())),)).tolist()
        found = as_lists(corpus.find(*in_buffer(text), 3, 4, longest, shortest))
        expected = by_search_in(documents, text, 3, 4, longest, shortest)
        deepest = max((size for size, _ in expected), default=0)
        # Those that agree in as many of three tokens as any place does; others are not compared.
        near = [place for place in expected if place[0] >= min(deepest, 3)]
        assert found[: len(near)] == near, (documents, text)
        assert all(size >= min(deepest, 3) for size, _ in found)


def test_a_corpus_ends_where_its_document_ends():
    corpus = Corpus([[1, 2, 3], [4, 5]], "cpu")
    assert as_lists(corpus.find(*in_buffer([0, 2]), 2, 4, 3)) == [(1, [3])]
    assert as_lists(corpus.find(*in_buffer([3]), 2, 4, 3)) == [(1, [])]
    # No match goes on from one document into the one before it.
    assert as_lists(corpus.find(*in_buffer([3, 4]), 2, 4, 3)) == [(1, [5])]
    assert as_lists(corpus.find(*in_buffer([9]), 2, 4, 3)) == []
    assert as_lists(corpus.find(*in_buffer([1]), 1, MAX_REACH, 3)) == [(1, [2, 3])]


def test_a_corpus_of_more_places_than_are_compared():
    documents = [[1, 2, 3, i] for i in range(4, 4 + 2 * WINDOW)]
    found = as_lists(Corpus(documents, "cpu").find(*in_buffer([1, 2, 3]), 2, 3, 8))
    assert found == [(3, [3 + 2 * WINDOW]), (3, [2 + 2 * WINDOW])]
    assert len(as_lists(Corpus(documents, "cpu").find(*in_buffer([2]), WINDOW + 9, 1, 1))) == WINDOW


def test_the_largest_token_ids_fit_into_a_key():
    top = 2**KEY_BITS - 2
    corpus = Corpus([[top, top, top, 5], [top, top - 1, 6]], "cpu")
    assert as_lists(corpus.find(*in_buffer([top, top, top]), 1, 1, 8)) == [(3, [5])]
    assert as_lists(corpus.find(*in_buffer([top, top - 1]), 1, 1, 8)) == [(2, [6])]


def test_a_corpus_counts_its_tokens_and_bytes():
    corpus = Corpus([list(range(1000))] * 3, "cpu")
    assert len(corpus) == 3000 and corpus.n_bytes == pytest.approx(24 * 3000, rel=0.03)


def test_the_text_and_the_corpus_are_ranked_together():
    corpus = Corpus([[5, 1, 2, 3, 8], [9, 3, 7]], "cpu")
    lookup = Lookup(places=2, longest=4, corpus=corpus)
    found = as_lists(lookup.find(*in_buffer([3, 6, 1, 2, 3]), 2))
    assert found == [(3, [8]), (1, [6, 1])] and lookup.places == 4
    first, second = (Matches(torch.tensor([[n]]), torch.tensor([2])) for n in (1, 2))
    assert joined(first, second).tokens.tolist() == [[1], [2]]


# The drafter


def test_the_tree_is_a_chain_of_what_was_found():
    state, drafter = empty_state(random_target(tiny_config())), NgramDrafter(depth=3)
    state.text[:3] = torch.tensor([4, 5, 4])
    tree = propose(drafter, state, pairs([5, 4], torch.zeros(2, 32)), 4)
    assert tree.tokens.tolist() == [4, 5, 4, 5]
    assert tree.parents.tolist() == [0, 0, 1, 2] and tree.valid.all()


def test_a_chain_ends_with_the_document_it_quotes():
    drafter = NgramDrafter(depth=3, corpus=Corpus([[4, 5]], "cpu"))
    state = empty_state(random_target(tiny_config()))
    state.text[:2] = torch.tensor([9, 4])
    state.seq_len.fill_(1)
    state.root.fill_(4)
    tree = drafter.propose(None, state, CycleSpec(drafter.shape, 4, 0, DrawKind()))
    assert tree.tokens.tolist() == [4, 5, 0, 0]
    assert tree.valid.tolist() == [True, True, False, False]
