"""Kept sequences: the same tokens as without them, for every drafter, and within the limit."""

from __future__ import annotations

import contextlib

import pytest
import torch

from fasteagle.answering.prefix_cache import PrefixCache
from fasteagle.decoding.context import FEW_TOKENS
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.drafting.ngram import NgramDrafter
from fasteagle.generate import Engine
from fasteagle.options import SamplingParams
from fasteagle.shapes import TreeShape
from helpers import GREEDY, assert_true_pairs, captured_engine, eagle3_of, generated, random_head

BYTES_OF_TOKEN = 2 * 2 * 2 * 8 * 4


def text(seed, n=100):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, 60, (n,), generator=g).tolist()


def drafters(target):
    head = random_head(target)
    head3 = random_head(target, eagle3=eagle3_of("eagle3", target.config))
    return {
        "none": lambda: None,
        "ngram": NgramDrafter,
        "eagle": lambda: EagleDrafter(head, TreeShape(3, 4, 7)),
        "eagle3": lambda: EagleDrafter(head3, TreeShape(3, 4, 7)),
    }


def answer(engine, prompt, cache=None, n=20):
    if cache is not None:
        cache.turn_to(engine, prompt)
    return generated(engine, n, prompt, SamplingParams(1.0, seed=3))


@pytest.mark.parametrize(
    ("name", "make_engine"),
    [("none", captured_engine), ("ngram", Engine), ("eagle", captured_engine), ("eagle3", Engine)],
)
def test_alternating_conversations_compute_only_what_is_new(target, name, make_engine):
    engine, cache = make_engine(target, 512), PrefixCache(2**30)
    engine.use(drafters(target)[name]())
    talks = {seed: text(seed) for seed in (1, 2, 3)}
    for turn in range(3):
        for seed, so_far in talks.items():
            reply = answer(engine, so_far, cache)
            cached = engine.stats.cached_tokens
            if turn:
                assert cached >= len(so_far) - 24  # the question, and a few pairs of the drafter
            assert reply == answer(Engine(target, 512), so_far), (name, turn, seed)
            talks[seed] = so_far + reply + text(10 * turn + seed, 10)


def test_a_shared_beginning_is_found(target):
    engine, cache = Engine(target, 512), PrefixCache(2**30)
    system = text(1, 80)
    answer(engine, system + text(2), cache)
    answer(engine, text(3), cache)
    answer(engine, system + text(4), cache)
    assert engine.stats.cached_tokens == 80


def test_the_least_recently_used_goes_first(target):
    engine, cache = Engine(target, 512), PrefixCache(1)
    assert cache.n_bytes == 0
    answer(engine, text(1), cache)
    answer(engine, text(2), cache)
    assert cache.n_bytes == 0  # not one token fits
    short, many = Engine(target, 512), PrefixCache(2**30)
    answer(short, text(1, 8), many, n=4)
    answer(short, text(2), many)
    assert many.n_bytes == 0  # a short stay is not worth its place
    bytes_of_one = 119 * BYTES_OF_TOKEN
    cache = PrefixCache(2 * bytes_of_one)
    for seed in (1, 2, 1, 3, 1):
        answer(engine, text(seed), cache)
        assert cache.n_bytes <= cache.limit
    answer(engine, text(2), cache)
    assert engine.stats.cached_tokens < FEW_TOKENS
    answer(engine, text(1), cache)
    assert engine.stats.cached_tokens >= 99


def test_of_what_is_too_large_the_beginning_is_kept(target):
    engine, cache = Engine(target, 512), PrefixCache(60 * BYTES_OF_TOKEN)
    for _ in range(2):
        answer(engine, text(1), cache)
        answer(engine, text(2), cache)
        assert cache.n_bytes == cache.limit
    answer(engine, text(1), cache)
    assert engine.stats.cached_tokens == 60
    assert answer(engine, text(1)) == answer(Engine(target, 512), text(1))


def test_a_conversation_is_stored_once_and_not_for_a_few_tokens(target):
    engine, cache = Engine(target, 512), PrefixCache(2**30)
    talk = text(1)
    for seed in (2, 3):
        talk += answer(engine, talk, cache)
        answer(engine, text(seed), cache)
    for _ in range(2):  # a question once more, whose answer is computed again
        assert cache.n_bytes == (len(talk) - 1 + 119) * BYTES_OF_TOKEN
        answer(engine, text(3), cache)


def test_a_beginning_stays_where_its_longer_successor_does_not_fit(target):
    engine, cache = Engine(target, 512), PrefixCache(110 * BYTES_OF_TOKEN)
    answer(engine, text(1), cache, n=5)
    answer(engine, text(2, 40), cache, n=2)
    answer(engine, text(1) + text(3), cache, n=5)
    answer(engine, text(2), cache)
    answer(engine, text(1), cache)
    assert engine.stats.cached_tokens >= 99


def test_memory_stays_within_the_limit_while_a_sequence_is_copied(target, monkeypatch):
    engine, cache = Engine(target, 512), PrefixCache(119 * BYTES_OF_TOKEN)
    most, original = 0, torch.Tensor.to

    def to(tensor, *args, **keywords):
        nonlocal most
        copy = original(tensor, *args, **keywords)
        if keywords.get("copy"):
            most = max(most, cache.n_bytes + copy.nbytes)
        return copy

    monkeypatch.setattr(torch.Tensor, "to", to)
    for seed in (1, 2, 3, 1):
        answer(engine, text(seed), cache)
    assert 0 < most <= cache.limit


def test_another_drafter_does_not_take_what_it_has_not_seen(target):
    made = drafters(target)
    engine, cache = Engine(target, 512, drafter=made["eagle"]()), PrefixCache(2**30)
    answer(engine, text(1), cache)
    answer(engine, text(2), cache)
    engine.use(made["eagle3"]())
    assert answer(engine, text(1), cache) == answer(Engine(target, 512), text(1))
    assert engine.stats.cached_tokens < FEW_TOKENS
    answer(engine, text(2), cache)
    answer(engine, text(1), cache)  # stored once more, with the rows of this drafter
    assert engine.stats.cached_tokens > FEW_TOKENS


@pytest.mark.parametrize("beside", [False, True])
def test_another_drafter_has_no_rows_of_a_long_text_yet(target, beside):
    """Neither where the text is kept, nor where it is copied from another engine."""
    made = drafters(target)
    engine, cache = Engine(target, 512, drafter=made["eagle"]()), PrefixCache(2**30)
    answer(engine, text(1, 300))
    engine.use(made["eagle3"]())
    if beside:
        other = Engine(target, 512, drafter=engine.drafter.sibling())
        cache.turn_to(other, text(1, 300), [engine])
        engine = other
    else:
        answer(engine, text(2), cache)
    assert answer(engine, text(1, 300), cache) == answer(Engine(target, 512), text(1, 300))


def test_the_drafter_is_shown_what_it_has_not_seen_when_it_was_kept(target):
    """An answer's last tokens are not shown to the draft head; bringing back does not hide that."""
    engine, cache = Engine(target, 512, drafter=drafters(target)["eagle"]()), PrefixCache(2**30)
    answer(engine, text(1))
    shown, whole = engine.shown, list(engine.cached)
    assert shown < len(whole)
    answer(engine, text(2), cache)
    cache.turn_to(engine, [*whole, 9])
    assert (engine.shown, engine.cached) == (shown, whole)


@pytest.mark.parametrize("where", ["stored", "stored elsewhere", "beside", "no room"])
def test_features_that_the_draft_head_was_not_shown_come_along(target, where):
    """Nothing is drafted in the first answer; the second one drafts with all pairs before it."""
    made = drafters(target)["eagle"]()
    engine, cache, n = Engine(target, 512, drafter=made), PrefixCache(2**30), 119
    if where == "no room":  # for all features, beside as many tokens
        cache.limit, n = 119 * engine.slot_bytes, 119 * 3 // 4
    if where == "stored elsewhere":
        cache.device = "meta"
    generated(engine, 20, text(1), speculate=False)
    assert (engine.shown, engine.known, len(engine.cached)) == (0, 118, 119)
    whole = [*engine.cached, *text(7, 20)]
    if where == "beside":
        other = Engine(target, 512, drafter=made.sibling())
        cache.turn_to(other, whole, [engine])
        engine = other
    else:
        answer(engine, text(2), cache)
        kept = cache._stored[0].kept
        assert sum(map(len, kept)) == min(n, 118) and cache.n_bytes <= cache.limit
        assert all(features.device == torch.device(cache.device) for features in kept)
        held = sum(features.untyped_storage().nbytes() for features in kept)
        assert held == sum(features.nbytes for features in kept)
        if where == "stored elsewhere":
            return
        cache.turn_to(engine, whole)
    known = min(n, 118)
    assert (engine.shown, engine.known, len(engine.cached)) == (0, known, max(n, known))
    new = answer(engine, whole)
    assert new == answer(Engine(target, 512), whole)
    assert engine.stats.cached_tokens == min(n - 1, 118)
    assert_true_pairs(engine, whole + new, missing=10)


def test_what_the_drafter_knows_counts_more_than_what_is_cached(target):
    """A client leaves in the middle of an answer without drafts: its features are lost."""
    made = drafters(target)["eagle"]()
    engine, cache = Engine(target, 512, drafter=made), PrefixCache(2**30)
    whole = text(1, 60) + generated(engine, 150, text(1, 60))
    cache.turn_to(engine, text(2, 10))
    engine.restart()

    def breaks_off(own):
        half = own.generate(whole[:60], GREEDY, 150, speculate=False)
        with contextlib.closing(half):
            for _ in range(140):
                next(half)

    for own in (engine, Engine(target, 512, drafter=made.sibling())):
        breaks_off(own)
        assert own.known == own.reusable == 59 and len(own.cached) > 190
        for prompt in (text(2, 10), [*whole, 5]):  # it is stored, or stays
            if own is engine or prompt[0] == whole[0]:
                cache.turn_to(own, prompt)
        assert own.reusable > 200, "the one that was stored before"


def test_a_sequence_whose_beginning_is_used_counts_as_used(target):
    engine, cache = Engine(target, 512), PrefixCache(3 * 119 * BYTES_OF_TOKEN)
    system = text(1, 80)
    first, other = system + text(2, 20), system + text(3, 20)
    for prompt in (first, text(4), text(5), other, text(6), first):
        answer(engine, prompt, cache)
    assert engine.stats.cached_tokens >= 99


def test_a_sequence_that_is_stored_already_counts_as_used(target):
    """Two engines share the cache: the one that leaves its sequence last has used it last."""
    one, other = Engine(target, 512), Engine(target, 512)
    cache = PrefixCache(2 * 119 * BYTES_OF_TOKEN)
    for engine, seed in ((one, 1), (one, 2), (one, 1), (other, 3), (other, 4), (one, 5)):
        answer(engine, text(seed), cache)
    answer(other, text(6), cache)  # its present sequence takes a place
    answer(one, text(1), cache)
    assert one.stats.cached_tokens >= 99
