"""Requests that are read: bounded, beside the others, and left by clients at any time."""

from __future__ import annotations

import concurrent.futures
import functools
import gc
import json
import threading
import time

import httpx
import pytest
from live_server import CHAT, QWEN, SHORT, WEATHER, failures, serving, until

from fasteagle.answering import grammar
from fasteagle.errors import FasteagleError
from fasteagle.options import Defaults, ServeOptions
from fasteagle.server import app, bodies
from fasteagle.server.prepare import Planner
from fasteagle.server.protocol import ChatRequest
from helpers import raising


@pytest.fixture
def hold(monkeypatch):
    """Let calls take until an event is set; a list has the arguments of those that have begun."""
    events = []

    def let(owner, name, when=lambda *args: True):
        begun, go_on, original = [], threading.Event(), getattr(owner, name)

        def held(*args):
            if when(*args):
                begun.append(args)
                assert go_on.wait(20)
            return original(*args)

        monkeypatch.setattr(owner, name, held)
        events.append(go_on)
        return begun, go_on

    yield let
    for event in events:
        event.set()


@pytest.fixture
def planning(hold):
    return hold(Planner, "chat")


def test_planning_is_bounded_and_blocks_nothing_else(loaded, planning):
    begun, go_on = planning
    with (
        serving(loaded, ServeOptions(port=0, queue=2)) as small,
        concurrent.futures.ThreadPoolExecutor(44) as pool,
    ):
        ask = functools.partial(httpx.post, small.url + CHAT, json=SHORT, timeout=30)
        jobs = [pool.submit(ask) for _ in range(44)]
        until(lambda: sum(job.done() for job in jobs) == 38)
        assert {job.result().status_code for job in jobs if job.done()} == {429}
        start = time.monotonic()
        assert httpx.get(f"{small.url}/health").status_code == 200
        assert failures(small, "queue_full") == 38
        print(f"health and metrics after {1e3 * (time.monotonic() - start):.0f} ms")
        assert len(begun) == 1 and small.server.queue.n_waiting == 6  # queue and slots
        go_on.set()
        assert sorted(job.result().status_code for job in jobs) == [200] * 6 + [429] * 38


def test_who_leaves_while_planning_keeps_the_place_until_it_is_over(loaded, planning):
    begun, go_on = planning
    with serving(loaded, ServeOptions(port=0, queue=2)) as small:
        for _ in range(2):
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(small.url + CHAT, json=SHORT, timeout=0.2)
        until(lambda: failures(small, "cancelled") == 2, 2.0)
        assert len(begun) == 1 and small.server.queue.n_waiting == 1  # the second never begins
        go_on.set()
        until(lambda: small.server.queue.n_waiting == 0)
        assert httpx.post(small.url + CHAT, json=SHORT).status_code == 200
        assert len(begun) == 2


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "a"}] * 20_000,
        [{"role": "user", "content": [{"type": "text", "text": ""}] * 1000}] * 20,
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}] * 20_000}],
    ],
    ids=["messages", "parts", "calls"],
)
def test_a_body_of_many_small_parts_is_refused_by_their_number(live, messages):
    """To check 300,000 of them, 8 MiB, took the event loop 3 to 6 seconds."""
    reply = httpx.post(live.url + CHAT, json={"messages": messages})
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["param"] == "messages"
    assert error["message"].endswith("with their parts and calls: use at most 16,384")


def test_a_long_reply_is_written_beside_others(live, hold):
    """Log-probabilities of 2,000 tokens with 20 others each took the event loop seconds."""
    begun, go_on = hold(app, "whole_reply")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        request = pool.submit(httpx.post, live.url + CHAT, json=SHORT, timeout=30)
        until(lambda: begun)
        assert httpx.get(f"{live.url}/health", timeout=5).status_code == 200
        go_on.set()
        assert request.result().status_code == 200


def test_log_probabilities_decode_a_token_once(live, monkeypatch):
    tokenizer, texts = live.llm.tokenizer, []
    raw = type(tokenizer).raw

    def counted(ids):
        if len(ids) == 2:  # a token within a text
            texts.append(tuple(ids))
        return raw(tokenizer, ids)

    monkeypatch.setattr(tokenizer, "_pieces", {})  # other answers may have said these tokens
    monkeypatch.setattr(tokenizer, "raw", counted)
    for more in ({}, {"stream": True}):
        body = {**SHORT, "logprobs": True, "top_logprobs": 20, "max_tokens": 30, **more}
        assert httpx.post(live.url + CHAT, json=body).status_code == 200
    assert len(texts) == len(set(texts)) > 20


@pytest.mark.parametrize("more", [{}, {"tools": [WEATHER], "tool_choice": "none"}], ids=len)
def test_earlier_calls_are_rendered_by_the_template_for_tools(live, monkeypatch, more):
    """They were left out without a word where the request has no tools, or shall not call any."""
    tokenizer, planner = live.llm.tokenizer, live.server.planner
    monkeypatch.setattr(tokenizer, "_with_tools", "{% for t in tools %}{{ t }}{% endfor %}" + QWEN)
    question = {"role": "user", "content": "hello"}
    call = {"function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    messages = [question, answer, {"role": "tool", "content": "rain"}]
    text = planner.chat(ChatRequest(messages=messages, **more)).text
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}' in text
    assert "<tool_response>\nrain" in text
    plain = planner.chat(ChatRequest(messages=[question], **more)).text
    assert plain == "<|user|>hello<|end|><|assistant|>"
    thought = {"role": "assistant", "content": "x", "reasoning_content": "hm"}
    with pytest.raises(FasteagleError, match="reasoning_content: this model's chat template"):
        planner.chat(ChatRequest(messages=[question, thought], **more))


@pytest.fixture
def compiling(hold):
    return hold(grammar, "try_grammar")


def test_a_grammar_that_is_compiled_holds_up_nobody_else(live, compiling):
    begun, go_on = compiling
    slow = {**SHORT, "guided_regex": "[ab]+"}
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        jobs = [pool.submit(httpx.post, live.url + CHAT, json=slow, timeout=30) for _ in range(12)]
        until(lambda: begun)
        for path, body in ((CHAT, SHORT), ("/tokenize", {"prompt": "a"})):
            assert httpx.post(live.url + path, json=body, timeout=5).status_code == 200
        assert len(begun) == 1  # one of a client's
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(live.url + CHAT, json=slow, timeout=0.2)
        go_on.set()
        assert {job.result().status_code for job in jobs} == {200}
    assert len(begun) == 12  # who left while waiting has none
    until(lambda: live.server.queue.n_waiting == 0)


def test_a_long_text_is_read_beside_the_others(live, hold):
    """One of a client's at a time; who leaves has no second one read beside the first."""
    begun, go_on = hold(live.llm.tokenizer, "encode_document", lambda text: len(text) > 10_000)
    ask = functools.partial(httpx.post, f"{live.url}/tokenize", timeout=30)
    long = {"prompt": "é" * 20_000}
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(ask, json=long) for _ in range(3)]
        until(lambda: begun)
        for path, body in ((CHAT, SHORT), ("/tokenize", {"prompt": "a"})):
            assert httpx.post(live.url + path, json=body, timeout=5).status_code == 200
        slow = httpx.post(live.url + CHAT, json={**SHORT, "guided_regex": "[ab]+"}, timeout=20)
        assert slow.status_code == 200  # grammars do not wait for texts
        with pytest.raises(httpx.ReadTimeout):
            ask(json=long, timeout=0.2)
        assert len(begun) == 1
        go_on.set()
        assert {len(job.result().json()["tokens"]) for job in jobs} == {40_000}
    assert len(begun) == 3
    until(lambda: live.server.queue.n_waiting == 0)


def test_the_time_for_a_request_begins_before_it_is_planned(loaded, planning):
    with serving(loaded, ServeOptions(port=0, timeout=0.3)) as hasty:
        reply = httpx.post(hasty.url + CHAT, json=SHORT, timeout=10)
        assert reply.status_code == 504 and "0.3 seconds" in reply.text
        assert failures(hasty, "timeout") == 1
        planning[1].set()


def test_a_prompt_that_cannot_fit_is_not_encoded(live, monkeypatch):
    for way in ("encode", "encode_document"):
        monkeypatch.setattr(live.llm.tokenizer, way, raising(AssertionError("encoded")))
    text = "x" * 300_000
    messages = [{"role": "user", "content": text}]
    for path, body, part in (
        ("v1/chat/completions", {"messages": messages}, "characters, max-seq-len 2,048"),
        ("v1/chat/completions", SHORT | {"messages": SHORT["messages"] * 3000}, "3,000 are more"),
        ("v1/completions", {"prompt": text}, "characters, max-seq-len 2,048"),
        ("tokenize", {"prompt": text}, "characters, max-seq-len 2,048"),
        ("tokenize", {"messages": messages}, "characters, max-seq-len 2,048"),
    ):
        reply = httpx.post(f"{live.url}/{path}", json=body)
        assert reply.status_code == 400 and part in reply.text
    monkeypatch.undo()
    assert httpx.post(live.url + CHAT, json=SHORT).status_code == 200


@pytest.mark.parametrize("think", [None, True, False])
def test_a_conversation_has_as_many_tokens_as_its_chat(loaded, monkeypatch, think):
    """By the server's own choice of thinking, too."""
    monkeypatch.setattr(loaded.tokenizer, "_template", QWEN)
    with serving(loaded, defaults=Defaults(think=think)) as own:
        count = httpx.post(f"{own.url}/tokenize", json={"messages": SHORT["messages"]}).json()
        usage = httpx.post(own.url + CHAT, json=SHORT, timeout=30).json()["usage"]
    assert count["count"] == usage["prompt_tokens"]


def test_a_body_of_many_values_is_read_beside_others(live, hold):
    """In 8 MiB there can be millions: their reading stopped every stream for seconds."""
    begun, go_on = hold(bodies, "read_body", lambda raw, *rest: len(raw) > bodies.SHORT_BYTES)
    long = {**SHORT, "metadata": {"list": [{"a": []}] * 10_000}}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        request = pool.submit(httpx.post, live.url + CHAT, json=long, timeout=30)
        until(lambda: begun)
        assert httpx.post(live.url + CHAT, json=SHORT, timeout=5).status_code == 200
        go_on.set()
        assert request.result().status_code == 200
    long["metadata"]["list"] *= 10
    reply = httpx.post(live.url + CHAT, json=long, timeout=30)
    assert reply.status_code == 400
    assert "the body has more than 262,144 values" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("text", "n_values"),
    [
        ('{"a": "' + ",[{" * 50 + '"}', 1),
        ('{"a": "' + r"\",[" * 50 + '"}', 1),
        ('{"a": "' + ",[" * 50 + r'\\", "b": "' + "[" * 50 + '"}', 2),
        ("[" + "[]," * 50 + "[]]", 102),
        ("[" + '"",' * 500 + '""]', 501),
        ("[" * 90 + "]" * 90, 90),
    ],
    ids=lambda value: str(value)[:20],
)
def test_values_are_counted_outside_of_strings(text, n_values):
    json.loads(text)
    assert not bodies.more_values_than(n_values, text.encode())
    assert bodies.more_values_than(n_values - 1, text.encode())


def test_no_time_at_all_is_a_504_and_leaves_no_work_behind(loaded, recwarn):
    with serving(loaded, ServeOptions(port=0, timeout=1e-9)) as hasty:
        assert httpx.post(hasty.url + CHAT, json=SHORT, timeout=10).status_code == 504
    gc.collect()
    assert not [each for each in recwarn if "never awaited" in str(each.message)]


def test_who_leaves_has_no_second_grammar_compiled_beside_the_first(live, compiling):
    begun, go_on = compiling
    for _ in range(2):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(live.url + CHAT, json={**SHORT, "guided_regex": "[ab]+"}, timeout=0.3)
    assert len(begun) == 1
    go_on.set()
    until(lambda: live.server.queue.n_waiting == 0)


def test_texts_that_are_read_at_the_same_time_are_read_right(live):
    """One tokenizer serves all threads."""
    texts = [letter * n for letter in "aé" for n in (100, 9_000, 20_000)] * 4

    def n_tokens(text):
        reply = httpx.post(f"{live.url}/tokenize", json={"prompt": text}, timeout=30)
        return reply.json()["count"]

    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        assert list(pool.map(n_tokens, texts)) == [len(text.encode()) for text in texts]


def test_an_answer_may_begin_with_a_thought_where_the_model_knows_them(live, monkeypatch):
    planner, tokenizer = live.server.planner, live.llm.tokenizer
    question = [{"role": "user", "content": "hello"}]
    assert not planner.chat(ChatRequest(messages=question)).may_think
    monkeypatch.setattr(tokenizer, "_template", f"{tokenizer._template}{{# </think> #}}")
    assert planner.chat(ChatRequest(messages=question)).may_think
    formed = ChatRequest(messages=question, response_format={"type": "json_object"})
    assert not planner.chat(formed).may_think
