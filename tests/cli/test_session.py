"""Conversations: cached turns, a full context, retries, answers cut short."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from fasteagle.answering.known_texts import Prompt
from fasteagle.cli.session import ChatSession, format_stats
from fasteagle.decoding.stats import Stats
from fasteagle.errors import FasteagleError
from fasteagle.generate import Engine
from fasteagle.llm import LLM
from fasteagle.loading.tokenizer import load_tokenizer
from fasteagle.options import AnswerOptions, Defaults, GrammarSpec, SamplingParams
from helpers import TINY_VOCAB, Letters, raising


@pytest.fixture
def session(model, tiny_dir):
    made = ChatSession(
        LLM("tiny", Engine(model, 512), load_tokenizer(tiny_dir)),
        Defaults(SamplingParams(1.0, top_p=0.95, seed=3), AnswerOptions(max_new_tokens=12)),
    )
    made.remarks = []
    made.notify = made.remarks.append
    return made


def answer(session, text):
    return "".join(piece.text for piece in session.ask(text))


def test_turns_are_kept_and_cached(session):
    first = answer(session, "hello")
    assert session.turns == [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": first},
    ]
    total = session.stats.prompt_tokens + session.stats.new_tokens
    answer(session, "and again")
    # Everything but the answer's last token was in the cache; nothing was encoded differently.
    assert session.stats.cached_tokens == total - 1
    assert len(session.turns) == 4


def test_a_retry_whose_oldest_turns_had_to_go_keeps_its_answer(session):
    for i in range(12):
        answer(session, f"question number {i}, which is long enough to fill the context soon")
    session.answer = AnswerOptions(max_new_tokens=300)
    n_turns, seed = len(session.turns), session.params.seed
    text = "".join(piece.text for piece in session.retry())
    assert len(session.turns) < n_turns and session.turns[-1]["content"] == text
    assert session.params.seed == seed + 1


def test_answer_equals_a_fresh_engine_on_the_rendered_conversation(session, model):
    """With a tokenizer that encodes an answer as it was drawn; random bytes would differ."""
    session.llm = LLM("letters", session.llm.engine, Letters(TINY_VOCAB))
    for text in ("hello", "second question", "third"):
        answer(session, text)
    assert session.stats.cached_tokens > 0
    fresh = LLM("letters", Engine(model, 512), session.llm.tokenizer)
    other = ChatSession(fresh, Defaults(session.params, session.answer))
    other.turns = session.turns[:-2]
    assert answer(other, "third") == session.turns[-1]["content"] != ""
    assert other.stats.cached_tokens == 0 and fresh.engine.cached == session.llm.engine.cached


def test_a_stop_string_ends_the_answer_and_the_next_turn_works(session, model):
    free = answer(session, "hello")
    stop = free[3:5]
    session.turns = []
    session.answer = AnswerOptions(max_new_tokens=12, stop=(stop,))
    assert answer(session, "hello") == free[: free.index(stop)]
    assert session.stats.finish == "stop"
    answer(session, "more")
    assert len(session.turns) == 4


def test_retry_takes_the_next_seed_and_replaces_the_answer(session):
    first = answer(session, "hello")
    second = "".join(piece.text for piece in session.retry())
    assert session.params.seed == 4 and second != first
    assert [t["content"] for t in session.turns] == ["hello", second]
    assert session.stats.cached_tokens > 0
    session.turns = []
    assert answer(session, "hello") == second
    session.params = dataclasses.replace(session.params, seed=2**63 - 1)  # the largest
    list(session.retry())
    assert session.params.seed == 0


def test_interrupted_answer_stays_as_far_as_it_came(session):
    pieces = session.ask("hello")
    part = next(pieces).text
    with pytest.raises(KeyboardInterrupt):
        pieces.throw(KeyboardInterrupt)
    assert session.turns[-1]["role"] == "assistant"
    assert session.turns[-1]["content"].startswith(part)
    assert session.stats.finish == ""
    answer(session, "go on")
    assert len(session.turns) == 4 and session.stats.cached_tokens > 5


def test_interruption_before_the_first_token_takes_the_question_back(session, monkeypatch):
    monkeypatch.setattr(session.llm.engine, "prefill_parts", raising(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        list(session.ask("hello"))
    assert session.turns == []


def test_a_full_context_drops_the_oldest_turns_and_says_so(model, session):
    session.llm = LLM("tiny", Engine(model, 128), session.llm.tokenizer)
    for i in range(8):
        answer(session, f"question number {i}")
    assert any("forgot the oldest turn" in remark for remark in session.remarks)
    assert session.turns[-2]["content"] == "question number 7"
    assert len(session.turns) < 16
    assert session.turns[0]["role"] == "user"


def test_each_prompt_of_a_full_context_is_made_for_the_form():
    forms = []

    def prompt(messages, think, form):
        forms.append(form)
        return Prompt("", [1] * 20 * len(messages))

    llm = SimpleNamespace(engine=SimpleNamespace(max_seq_len=64), prompt=prompt)
    settings = Defaults(answer=AnswerOptions(4), form=GrammarSpec("regex", "a"))
    session = ChatSession(llm, settings)
    session.turns = [{"role": "user", "content": ""}] * 5
    session._fit()
    assert forms == [session.form] * 2 and len(session.turns) == 3


def test_an_answer_that_fills_the_context_says_so(model, session):
    session.llm = LLM("tiny", Engine(model, 40), session.llm.tokenizer)
    session.answer = AnswerOptions(max_new_tokens=200)
    session.llm.tokenizer.eos_ids = frozenset()
    answer(session, "twenty characters ok")
    assert session.stats.finish == "context"
    assert "context full at 40 tokens" in session.remarks[-1]
    answer(session, "next")  # and it goes on
    assert session.turns[-2]["content"] == "next"


def test_a_question_longer_than_the_context_is_refused_and_nothing_is_lost(model, session):
    session.llm = LLM("tiny", Engine(model, 64), session.llm.tokenizer)
    answer(session, "hi")
    turns = list(session.turns)
    with pytest.raises(FasteagleError, match="leaves room for 63: shorten it"):
        answer(session, "x" * 100)
    assert session.turns == turns and session.remarks == []
    answer(session, "short")
    assert len(session.turns) >= 2 and session.turns[-2]["content"] == "short"


def test_a_retry_that_brings_nothing_keeps_the_old_answer(session, monkeypatch):
    answer(session, "hello")
    answer(session, "more")
    turns, seed = list(session.turns), session.params.seed

    with monkeypatch.context() as patch:
        patch.setattr(session.llm.engine, "prefill_parts", raising(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            list(session.retry())
    assert session.turns == turns and session.params.seed == seed
    "".join(piece.text for piece in session.retry())
    assert len(session.turns) == 4 and session.turns[:3] == turns[:3]


def test_parts_of_a_replayed_cycle_have_no_times():
    stats = Stats(passes=4, drafted=8, path_lengths=[1, 2], draft_seconds=0.008, verify_seconds=0.1)
    assert format_stats(stats).endswith(" | draft 2.0 ms verify 25.0 ms")
    stats.add_times(None, None)
    assert format_stats(stats).endswith(" | draft - verify -")
