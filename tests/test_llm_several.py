"""The Python API: several streams and answers at once, and interruptions of them."""

from __future__ import annotations

import contextlib
import random
import threading
import time

import pytest

from fasteagle import FasteagleError
from fasteagle.batch import Batch, NoRoomError
from fasteagle.decoding import context
from fasteagle.decoding.backend import Backend
from fasteagle.decoding.runner import Runner
from fasteagle.decoding.stats import Stats
from fasteagle.generate import Engine
from fasteagle.options import AnswerOptions, SamplingParams
from helpers import raising


def test_streams_in_any_order(llm):
    questions = ["hello", "a b a b", "Why?", "one two one two"]
    alone = [llm.chat(question, max_new_tokens=90).tokens for question in questions]
    streams = [llm.chat(question, stream=True, max_new_tokens=90) for question in questions]
    tokens = [[] for _ in questions]
    choose = random.Random(1)
    left = list(range(len(streams)))
    tokens[2] += next(streams[2]).tokens
    tokens[3] = [token for chunk in streams[3] for token in chunk.tokens]
    left.remove(3)
    while left:
        i = choose.choice(left)
        chunk = next(streams[i], None)
        if chunk is None:
            left.remove(i)
        else:
            tokens[i] += chunk.tokens
    assert tokens == alone
    assert not llm.answers.running and not llm.answers._unread


def test_text_that_was_held_back_comes_with_the_end(llm):
    """It might have been the beginning of a stop string."""
    whole = llm.chat("hello", max_new_tokens=9).text
    assert llm.chat("hello", max_new_tokens=9, stop=[f"{whole[-1]}<end>"]).text == whole


def test_an_idle_engine_with_little_text_goes_before_one_with_a_conversation(llm):
    """Both share the template's first tokens with the next question; there is no prefix cache."""
    llm.answers.forget()
    llm.chat_batch(["a", "b"], size=2, max_new_tokens=2)
    question = {"role": "user", "content": "one two three " * 9}
    first = llm.chat([question], max_new_tokens=20)
    llm.chat("Why?", max_new_tokens=2)
    messages = [question, {"role": "assistant", "content": first.text}, {**question}]
    again = llm.chat(messages, max_new_tokens=2)
    assert again.stats.cached_tokens >= first.stats.prompt_tokens


def test_an_answer_does_not_wait_for_the_reader_of_its_stream(llm):
    expected = llm.chat("hello", max_new_tokens=90, speculate=False).tokens
    stream = llm.chat("hello", stream=True, max_new_tokens=90, speculate=False)
    first = next(stream)
    llm.chat("a b", max_new_tokens=99, speculate=False, logit_bias={100: 1000.0})
    assert not llm.answers.running
    assert [*first.tokens, *(t for chunk in stream for t in chunk.tokens)] == expected


def test_an_answer_beside_an_open_stream(llm):
    expected = llm.chat("hello", max_new_tokens=30).tokens
    stream = llm.chat("a b", stream=True, max_new_tokens=50)
    next(stream)
    tokens = []
    thread = threading.Thread(
        target=lambda: tokens.extend(llm.chat("hello", max_new_tokens=30).tokens)
    )
    thread.start()
    thread.join()
    assert tokens == expected
    more = [llm.chat("a b", stream=True, max_new_tokens=50) for _ in range(8)]
    for one in more[1:]:
        next(one)
    with pytest.raises(FasteagleError, match="8 answers are under way, .* close it first"):
        next(more[0])
    for one in (stream, *more):
        one.close()
    assert llm.chat("hello", max_new_tokens=30).tokens == expected


def test_an_answer_that_ends_while_its_reader_waits_for_a_turn(llm, monkeypatch):
    """By passes of another reader."""
    prompts = [5, 6, 7], [8, 9]
    expected = [llm.generate(prompt, max_new_tokens=6).tokens for prompt in prompts]
    streams = [llm.generate(prompt, stream=True, max_new_tokens=6) for prompt in prompts]
    tokens = [list(next(stream).tokens) for stream in streams]

    class Crowd:
        def __enter__(self):
            monkeypatch.setattr(llm.answers, "_next", contextlib.nullcontext())
            tokens[1] += (token for chunk in streams[1] for token in chunk.tokens)

        def __exit__(self, *error):
            pass

    monkeypatch.setattr(llm.answers, "_next", Crowd())
    tokens[0] += (token for chunk in streams[0] for token in chunk.tokens)
    assert tokens == expected


def test_another_stream_is_read_while_a_long_prompt_is_computed(llm, monkeypatch):
    """Chunks that are there need no turn, and a turn is one pass."""
    monkeypatch.setattr(context, "PREFILL_CHUNK", 8)
    step, read, stepping, then = Batch.step, [], threading.Event(), []
    other = llm.generate([5, 6, 7], stream=True, max_new_tokens=60)
    long = llm.generate(list(range(8, 50)) * 4, stream=True, max_new_tokens=1)
    next(other)

    def slow(own):
        stepping.set()
        time.sleep(0.02)
        return step(own)

    def answer_long():
        next(long)
        then.append(len(read))

    monkeypatch.setattr(Batch, "step", slow)
    readers = answer_long, lambda: [read.append(chunk) for chunk in other]
    threads = [threading.Thread(target=reader) for reader in readers]
    threads[0].start()
    assert stepping.wait(20)
    threads[1].start()
    for thread in threads:
        thread.join(60)
    long.close()
    assert then[0] > 5


def test_the_garbage_collector_closes_a_stream_within_a_pass(llm, monkeypatch):
    expected = llm.chat("hello", max_new_tokens=30).tokens
    abandoned = [llm.chat("a b", stream=True, max_new_tokens=90)]
    next(abandoned[0])
    verify = Backend.verify_together

    def collecting(*arguments):
        abandoned.clear()  # nothing else refers to it
        return verify(*arguments)

    monkeypatch.setattr(Backend, "verify_together", collecting)
    tokens, running = [], []

    def read():
        for chunk in llm.chat("hello", stream=True, max_new_tokens=30):
            tokens.extend(chunk.tokens)
            if not abandoned:
                running.append(len(llm.answers.running))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(20)
    assert tokens == expected and not thread.is_alive() and not llm.answers.running
    assert max(running) == 1  # it ends with that pass, not with the next one


@pytest.mark.parametrize(
    ("owner", "name"), [(Backend, "verify_together"), (Runner, "finish"), (Engine, "_record")]
)
def test_an_interruption_ends_the_answers_under_way(llm, monkeypatch, owner, name):
    """None goes on without what it had in the interrupted pass."""
    expected = llm.chat("hello", max_new_tokens=30).tokens
    streams = [llm.chat("hello", stream=True, max_new_tokens=30) for _ in range(2)]
    tokens = list(next(streams[1]).tokens)
    next(streams[0])
    usual, calls = getattr(owner, name), []

    def interrupt(*arguments):
        calls.append(arguments)
        if len(calls) == 2 or owner is Backend:
            raise KeyboardInterrupt
        return usual(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, interrupt)
        with pytest.raises(KeyboardInterrupt):
            list(streams[0])
    with pytest.raises(FasteagleError, match="interrupted"):
        for chunk in streams[1]:
            tokens += chunk.tokens
    assert tokens == expected[: len(tokens)]
    assert not llm.answers.running
    assert llm.chat("hello", max_new_tokens=30).tokens == expected


def test_a_common_beginning_is_computed_once(llm):
    text = "a b c d e f g h " * 8
    alone = [llm.generate(text + end, max_new_tokens=12).tokens for end in ("x", "y", "z")]
    for engine in llm.answers._batch.engines:
        engine.restart()
    several = llm.generate_batch([text + end for end in ("x", "y", "z")], max_new_tokens=12)
    assert [one.tokens for one in several] == alone
    cached = [one.stats.cached_tokens for one in several]
    assert cached[0] == 0 and min(cached[1:]) > 100


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 3}, {"stop": ["e"]}], ids=str)
def test_several_answers_are_those_of_one_after_the_other(llm, options):
    questions = ["hello", "a b a b", "Why?", "a b a b"]
    options = options | {"max_new_tokens": 20}
    single = [llm.chat(question, **options) for question in questions]
    several = llm.chat_batch(questions, size=3, **options)
    assert [(a.text, a.tokens, a.finish) for a in several] == [
        (a.text, a.tokens, a.finish) for a in single
    ]
    assert several[1].stats.new_tokens == len(several[1].tokens)
    ids = llm.generate_batch(["a b", [5, 6, 7]], top_logprobs=0, **options)
    assert ids[1].tokens == llm.generate([5, 6, 7], **options).tokens
    assert len(ids[1].logprobs) == len(ids[1].tokens)
    assert llm.chat_batch([]) == []


def test_the_first_token_is_timed_from_the_beginning(llm, monkeypatch):
    monkeypatch.setattr(context, "PREFILL_CHUNK", 8)  # the prompts take three passes each
    params, options = SamplingParams(), AnswerOptions(3)
    stats = [Stats() for _ in range(2)]
    for key in range(2):
        prompt = [5 + key, *range(100, 120)]
        llm.answers.begin(key, llm.made_request(prompt, params, options), stats=stats[key])
    time.sleep(0.2)
    ttfts = set()
    while llm.answers.running:
        llm.answers.step()
        ttfts.add(stats[0].ttft)
    assert 0.2 < stats[0].ttft < stats[1].ttft
    assert ttfts <= {0.0, stats[0].ttft}  # later tokens leave it as it is


def test_a_prompt_without_an_answer_is_no_known_text(llm, monkeypatch):
    """Its tokens may be others where the text goes on."""
    monkeypatch.setattr(context, "PREFILL_CHUNK", 8)
    request = llm.made_request([7, *range(100, 130)], SamplingParams(), AnswerOptions(3))
    llm.answers.begin(0, request, "some text")
    llm.answers.step()
    llm.answers.end(0)
    assert llm.answers._texts.encode("some text") != request.prompt


def test_what_is_held_while_answers_are_under_way(llm, monkeypatch):
    held, params = [], SamplingParams()
    request = llm.made_request([5], params, AnswerOptions(3))

    @contextlib.contextmanager
    def hold(own):
        held.append(own)
        yield
        held.pop()

    monkeypatch.setattr(llm.answers, "_hold", hold)
    for key in range(2):
        llm.answers.begin(key, request)
    while llm.answers.running:
        assert held == [params]
        llm.answers.step()
    assert not held
    llm.answers.begin(2, request)
    llm.answers.end(2)
    assert not held
    monkeypatch.setattr(Batch, "begin", raising(NoRoomError("too many")))
    with pytest.raises(NoRoomError):
        llm.answers.begin(3, request)
    assert not held


def test_forgotten_texts_are_computed_again(llm, monkeypatch):
    monkeypatch.setattr(llm.prefix_cache, "limit", 2**30)
    prompts = [[first, *range(100, 150)] for first in (5, 6)]
    for prompt in prompts:
        llm.generate(prompt, max_new_tokens=1)
    llm.answers.forget()
    for prompt in prompts:
        assert not llm.generate(prompt, max_new_tokens=1).stats.cached_tokens


def test_a_batch_takes_the_room_that_there_is(llm, monkeypatch):
    """Two of the answers fit, whatever `size` is."""
    begin, most, lengths, refused = Batch.begin, [], [], []

    def short(batch, *arguments, awaited):
        if len(batch.running) == 2:
            refused.append(awaited)
            raise NoRoomError("too many")
        begin(batch, *arguments, awaited=awaited)
        most.append(len(batch.running))
        lengths.append((len(arguments[1]), arguments[2]))

    questions = ["hello", "a b a b", "Why?", "one two"]
    alone = [llm.chat(question, max_new_tokens=20).tokens for question in questions]
    monkeypatch.setattr(Batch, "begin", short)
    assert [one.tokens for one in llm.chat_batch(questions, max_new_tokens=20)] == alone
    assert len(most) == 4 and max(most) == 2
    assert refused == [False]  # once, and nobody reads tokens of a batch as they come
    assert all(whole == prompt + 20 for prompt, whole in lengths)
    stream = llm.chat("hello", stream=True)
    with contextlib.closing(stream), contextlib.closing(llm.chat("Why?", stream=True)) as other:
        assert next(stream) and next(other)
        assert lengths[-1][1] == llm.engine.max_seq_len
        with pytest.raises(NoRoomError):
            llm.chat_batch(["hello"])


def test_a_batch_waits_with_the_rest_where_others_take_the_last_slot(llm, monkeypatch):
    """It lost all its answers if that was between its look and its turn."""
    questions = ["hello", "a b a b", "Why?"]
    alone = [llm.chat(question, max_new_tokens=20).tokens for question in questions]
    others, opening = [], llm.answers._open

    def taken(*arguments, **more):
        if len(llm.answers.running) == 1 and not others:
            others.extend(llm.chat("x", stream=True) for _ in range(llm.answers.size - 1))
            for other in others:
                next(other)
        opening(*arguments, **more)

    monkeypatch.setattr(llm.answers, "_open", taken)
    try:
        answers = llm.chat_batch(questions, size=3, max_new_tokens=20)
    finally:
        for other in others:
            other.close()
    assert [one.tokens for one in answers] == alone and len(others) == llm.answers.size - 1


def test_what_a_batch_refuses(llm):
    for size in (0, 9, 2.5, "x"):
        with pytest.raises(FasteagleError, match=f"size {size!r} is out of range: use 1 .. 8"):
            llm.chat_batch(["hello"], size=size)
    with pytest.raises(FasteagleError, match="conversations 'hello' is no list"):
        llm.chat_batch("hello")
    with pytest.raises(FasteagleError, match="messages is empty"):
        llm.chat_batch(["hello", []])
    before = list(llm.engine.cached)
    with pytest.raises(FasteagleError, match="the prompt is empty"):
        llm.generate_batch([[5], []])
    assert llm.engine.cached == before, "nothing was computed"
