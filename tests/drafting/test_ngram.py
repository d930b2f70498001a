"""N-gram lookup: what a search over Python lists finds, in the text and in a corpus."""

from __future__ import annotations

import pytest
import torch

from fasteagle.drafting.lookup import (
    KEY_BITS,
    MEMORY,
    NOTHING,
    RAREST,
    WINDOW,
    Corpus,
    Lookup,
    Match,
    find_in_text,
    prior,
)
from fasteagle.drafting.ngram import NgramDrafter
from fasteagle.sampling import SamplingMode
from fasteagle.shapes import MAX_DEPTH
from fasteagle.state import CycleSpec
from helpers import empty_state, pairs, propose, random_target, tiny_config

BUFFER = 64


def match_size(text, end, suffix_of):
    """Count the tokens up to `end` of `text`, at most 8, that equal the last of `suffix_of`."""
    size = 0
    while size < min(8, end + 1, len(suffix_of)) and text[end - size] == suffix_of[-1 - size]:
        size += 1
    return size


def by_search(text, reach):
    """The size and the tokens of the best earlier place, the text repeated at its end."""
    places = [(match_size(text, end, text), end) for end in range(len(text) - 1)]
    size, end = max(places, default=(0, 0))
    cycle = text[end + 1 :]
    return (size, [cycle[i % len(cycle)] for i in range(reach)]) if size else (0, [])


def as_list(match: Match):
    """The size and the tokens, without what stands for nothing."""
    tokens = match.tokens.tolist()
    n = tokens.index(NOTHING) if NOTHING in tokens else len(tokens)
    assert set(tokens[n:]) <= {NOTHING}
    return int(match.size), tokens[:n]


def in_buffer(text, size=BUFFER):
    """The text in a buffer whose rest is left over from another one, and where it ends."""
    buffer = torch.randint(0, 4, (size,))
    buffer[: len(text)] = torch.tensor(text)
    return buffer, torch.tensor(len(text) - 1)


def test_the_text_against_a_search_over_lists():
    """The latest of the longest matches, whose text goes on in circles; or there is none."""
    torch.manual_seed(0)
    for n in [BUFFER, *torch.randint(1, BUFFER, (150,)).tolist()]:
        text = torch.randint(0, 4, (n,)).tolist()
        assert as_list(find_in_text(*in_buffer(text), 7)) == by_search(text, 7)


# A corpus


def by_search_in(documents, text, reach):
    """The same in documents: nothing is repeated, and a document ends where it ends."""
    places = [
        (match_size(document, end, text), number, end)
        for number, document in enumerate(documents)
        for end in range(len(document))
    ]
    size, number, end = max(places, default=(0, 0, 0))
    return (size, documents[number][end + 1 : end + 1 + reach]) if size else (0, [])


def test_a_corpus_against_a_search_over_lists():
    torch.manual_seed(1)
    for _ in range(60):
        documents = [torch.randint(0, 6, (n,)).tolist() for n in (1, 14, 40)]
        text = torch.randint(0, 6, (int(torch.randint(1, 30, ())),)).tolist()
        match = Corpus(documents, "cpu").find(*in_buffer(text), 4)
        assert as_list(match) == by_search_in(documents, text, 4), (documents, text)


def test_a_corpus_ends_where_its_document_ends():
    corpus = Corpus([[1, 2, 3], [4, 5]], "cpu")
    assert as_list(corpus.find(*in_buffer([0, 2]), 4)) == (1, [3])
    assert as_list(corpus.find(*in_buffer([3]), 4)) == (1, [])
    # No match goes on from one document into the one before it.
    assert as_list(corpus.find(*in_buffer([3, 4]), 4)) == (1, [5])
    assert as_list(corpus.find(*in_buffer([9]), 4)) == (0, [])
    assert as_list(corpus.find(*in_buffer([1]), MAX_DEPTH)) == (1, [2, 3])
    # Nothing matches, and a token follows the last of the places that are compared.
    assert as_list(Corpus([[5] * WINDOW + [1]], "cpu").find(*in_buffer([9]), 4)) == (0, [])


def test_a_corpus_of_more_places_than_are_compared():
    documents = [[1, 2, 3, i] for i in range(4, 4 + 2 * WINDOW)]
    match = Corpus(documents, "cpu").find(*in_buffer([1, 2, 3]), 3)
    assert as_list(match) == (3, [3 + 2 * WINDOW])


def test_the_largest_token_ids_fit_into_a_key():
    top = 2**KEY_BITS - 2
    corpus = Corpus([[top, top, top, 5], [top, top - 1, 6]], "cpu")
    assert as_list(corpus.find(*in_buffer([top, top, top]), 1)) == (3, [5])
    assert as_list(corpus.find(*in_buffer([top, top - 1]), 1)) == (2, [6])


def test_tokens_that_the_target_does_not_have_end_a_document():
    """As a special token that was added to the tokenizer alone, and stands in a file."""
    corpus = Corpus([[1, 2, 3, 10, 4, 5]], "cpu", vocab_size=10)
    assert as_list(corpus.find(*in_buffer([1, 2]), 4)) == (2, [3])
    assert as_list(corpus.find(*in_buffer([3, 4]), 4)) == (1, [5])
    assert len(corpus) == 5


def test_a_corpus_counts_its_tokens_and_bytes():
    corpus = Corpus([list(range(1000))] * 3, "cpu")
    assert len(corpus) == 3000 and corpus.n_bytes == pytest.approx(24 * 3000, rel=0.03)


def test_the_corpus_wins_where_its_match_is_longer():
    text = in_buffer([3, 6, 1, 2, 3])
    longer = Lookup(corpus=Corpus([[5, 1, 2, 3, 8], [9, 3, 7]], "cpu"))
    equal = Lookup(corpus=Corpus([[9, 3, 7]], "cpu"))
    assert as_list(longer.find(*text, 2)) == (3, [8])
    assert as_list(equal.find(*text, 2)) == (1, [6, 1])


def test_a_lookup_apart_learns_for_itself():
    one = Lookup()
    other = one.apart()
    for n in (5, 6):
        other.propose(*in_buffer([1, 2, 3, 1, 2, 9][:n]), 4)
    assert torch.equal(one.table, prior()) and not torch.equal(other.table, prior())
    assert not one.last.any() and other.last.any()


def test_another_text_teaches_nothing_of_the_last_proposal():
    """Its slots are as many as a cycle commits, but the root's slot has another token."""
    lookup = Lookup()
    lookup.propose(*in_buffer([1, 2, 3, 1, 2]), 4)
    lookup.propose(*in_buffer([1, 2, 3, 1, 3, 3, 1]), 4)
    assert torch.equal(lookup.table, prior())


@pytest.mark.parametrize(("more", "tried"), [([3], 1), ([3, 1, 9], 1), ([3, 1, 9, 9], 0)])
def test_a_cycle_adds_one_token_more_than_were_proposed(more, tried):
    """More tokens than those are a new turn, of which the last proposal says nothing."""
    lookup, text = Lookup(), [1, 2, 3, 1, 2]
    lookup.propose(*in_buffer(text), 2)
    lookup.propose(*in_buffer(text + more), 2)
    assert (lookup.table - prior())[:, 1, 0].tolist() == [tried, tried]


def test_what_was_counted_long_ago_counts_little():
    lookup = Lookup()
    lookup.table[:] = 10 * MEMORY
    for text in ([1, 2, 3, 1, 2], [1, 2, 3, 1, 2, 9]):
        lookup.propose(*in_buffer(text), 4)
    tried, right = lookup.table[:, 1, 0].tolist()
    assert tried == pytest.approx(MEMORY) and right < tried


def test_a_token_that_was_never_right_is_tried_again():
    lookup = Lookup()
    lookup.table[1] = 0
    _, logp = lookup.propose(*in_buffer([1, 2, 3, 1, 2]), 3)
    assert logp.exp().tolist() == pytest.approx([RAREST] * 3)


# The drafter


def test_the_tree_is_a_chain_of_what_was_found():
    state, drafter = empty_state(random_target(tiny_config())), NgramDrafter(depth=3)
    state.text[:3] = torch.tensor([4, 5, 4])
    tree = propose(drafter, state, pairs([5, 4], torch.zeros(2, 32)), 4)
    assert tree.tokens.tolist() == [4, 5, 4, 5]
    assert tree.parents.tolist() == [0, 0, 1, 2] and tree.valid.all()


def test_a_chain_ends_with_the_document_it_quotes():
    drafter = NgramDrafter(3, Lookup(corpus=Corpus([[4, 5]], "cpu")))
    state = empty_state(random_target(tiny_config()))
    state.text[:2] = torch.tensor([9, 4])
    state.seq_len.fill_(1)
    state.root.fill_(4)
    tree = drafter.propose(None, state, CycleSpec(drafter.shape, 0, SamplingMode()))
    assert tree.tokens.tolist() == [4, 5, 0, 0]
    assert tree.valid.tolist() == [True, True, False, False]
