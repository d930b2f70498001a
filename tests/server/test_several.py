"""Several answers at once: requests join and leave, and each text is the one that it is alone."""

from __future__ import annotations

import concurrent.futures
import functools
import json
import threading
import time

import httpx
import pytest
import torch
from live_server import CHAT, LETTER_ID, SHORT, busy, load, number, serving, slow_down, until

import fasteagle.batch
from fasteagle.answering.grammar import GrammarMask
from fasteagle.decoding.stats import Stats
from fasteagle.generate import Engine
from fasteagle.server import replies as server_replies
from helpers import raising

AT_ONCE = "fasteagle:answers_per_pass_{}"


def body(text="hello", n=40, **more):
    return {"messages": [{"role": "user", "content": text}], "max_tokens": n, **more}


def post(live, request, **options):
    return httpx.post(live.url + CHAT, json=request, timeout=60, **options)


def text_of(reply):
    return reply.json()["choices"][0]["message"]["content"]


def test_texts_are_those_that_they_are_alone(live, slow):
    """Greedy, drawn, with penalties and of a form; they join and leave one after the other."""
    requests = [
        body("one two one two"),
        body("one", temperature=1.0, seed=5, n=None, max_tokens=60),
        body("of a form", guided_regex="[a-d ]{30,50}", max_tokens=30),
        body("other", temperature=0.8, top_k=20, seed=1, repetition_penalty=1.2),
        body("letters", logit_bias={str(LETTER_ID): 4}, presence_penalty=1.0),
        body("one two one two", stop=["e"], max_tokens=70),
    ]
    alone = [text_of(post(live, request)) for request in requests]
    several = number(live, AT_ONCE.format("count{.*}")), number(live, AT_ONCE.format("sum{.*}"))
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        replies = list(pool.map(functools.partial(post, live), requests))
    assert [text_of(reply) for reply in replies] == alone
    count = number(live, AT_ONCE.format("count{.*}")) - several[0]
    assert number(live, AT_ONCE.format("sum{.*}")) - several[1] > 2 * count


def test_sixteen_clients_in_the_order_in_which_they_come(live, slow, monkeypatch):
    begun, original = [], live.llm.answers.begin

    def begin(job, *args):
        begun.append(job.request.params.seed)
        original(job, *args)

    monkeypatch.setattr(live.llm.answers, "begin", begin)
    queue = live.server.queue
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        replies = []
        for i in range(16):
            request = body(f"ask {i}", 30, temperature=0.5, seed=i)
            replies.append(pool.submit(post, live, request))
            until(lambda i=i: len(begun) + len(queue._waiting) > i)
            assert queue.n_running <= 4
        assert {reply.result().status_code for reply in replies} == {200}
    assert begun == list(range(16))


def test_an_answer_that_breaks_leaves_the_others(live, slow, monkeypatch, capfd):
    expected = text_of(post(live, body("beside it", 60)))
    monkeypatch.setattr(GrammarMask, "advance", raising(RuntimeError("planted")))
    with busy(live, 1) as ((_, lines),), concurrent.futures.ThreadPoolExecutor(1) as pool:
        beside = pool.submit(post, live, body("beside it", 60))
        assert post(live, body(guided_regex="[ab]{20}")).status_code == 500
        assert next(line for line in lines if line).startswith("data: {")
        assert text_of(beside.result()) == expected
    assert "planted" in capfd.readouterr().err


def test_a_step_that_breaks_ends_its_answers_alone(live, slow, monkeypatch, capfd):
    with busy(live, 2) as streams, monkeypatch.context() as patched:
        patched.setattr(fasteagle.batch, "run_together", raising(RuntimeError("planted")))
        assert all('"error"' in "".join(lines) for _, lines in streams)
    assert post(live, SHORT).status_code == 200
    assert "planted" in capfd.readouterr().err


@pytest.fixture
def fresh(serve_dir):
    """A server whose KV caches have not grown yet."""
    with serving(load(serve_dir, parallel=4)) as served:
        yield served


@pytest.fixture(params=["bytes", "cache"])
def shorten(request, monkeypatch):
    """Make memory for another text short, or for another cache at all, until an event is set."""
    is_short, sibling = threading.Event(), Engine.sibling

    def unless_short(engine):
        if is_short.is_set():
            return sibling(engine)
        raise torch.OutOfMemoryError

    def available(device):
        return 2**40 if is_short.is_set() else 0

    def shorten():
        if request.param == "cache":
            monkeypatch.setattr(Engine, "sibling", unless_short)
        else:
            monkeypatch.setattr(fasteagle.batch, "available_bytes", available)
        return is_short

    return shorten


def test_what_lacks_memory_waits_and_nobody_overtakes_it(fresh, shorten, monkeypatch):
    """Also where an answer ends that leaves too little."""
    slow_down(fresh, monkeypatch)
    begun, begin, queue = [], fresh.llm.answers.begin, fresh.server.queue

    def noted(job, *args):
        begin(job, *args)
        begun.append(job.request.answer.max_new_tokens)

    with busy(fresh, 2) as (one, other), concurrent.futures.ThreadPoolExecutor(2) as pool:
        monkeypatch.setattr(fresh.llm.answers, "begin", noted)
        free = shorten()
        replies = []
        for i, n in enumerate((1900, 4)):
            request = body(n=n, logit_bias={str(LETTER_ID): 100})
            replies.append(pool.submit(post, fresh, request))
            until(lambda i=i: queue.n_waiting == i + 1)
        time.sleep(0.2)
        assert queue.n_running == 2 and not begun
        one[0].close()
        time.sleep(0.2)
        free.set()
        other[0].close()
        until(lambda: len(begun) == 2)
        monkeypatch.undo()
        assert [reply.result().status_code for reply in replies] == [200, 200]
    assert begun == [1900, 4]


def test_where_what_lacks_memory_leaves_the_next_one_begins(fresh, shorten, monkeypatch):
    """Which may need less: it does not wait until an answer ends."""
    slow_down(fresh, monkeypatch)
    queue = fresh.server.queue
    with busy(fresh, 2), concurrent.futures.ThreadPoolExecutor(2) as pool:
        free = shorten()
        large = body(n=1900, logit_bias={str(LETTER_ID): 100})
        first = pool.submit(httpx.post, fresh.url + CHAT, json=large, timeout=4.0)
        until(lambda: queue.n_waiting == 1)
        second = pool.submit(post, fresh, body(n=4))
        until(lambda: queue.n_waiting == 2)
        free.set()
        with pytest.raises(httpx.ReadTimeout):
            first.result()
        until(lambda: queue.n_waiting == 0)
        assert second.result().status_code == 200
        until(lambda: queue.n_running == 2)


def test_where_nothing_runs_a_lack_of_memory_is_told(fresh, monkeypatch):
    monkeypatch.setattr(fasteagle.batch, "available_bytes", lambda device: 0)
    reply = post(fresh, body(n=1900))
    assert reply.status_code == 400 and "GiB" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("kind", "form"), [("chat", {}), ("text", {"guided_regex": "[a-z ]{40}"})], ids=["chat", "text"]
)
def test_several_answers_to_one_prompt(client, live, kind, form):
    """Each is the one with its seed, whole and in a stream, where a choice is told by its index."""
    options = {"model": live.server.name, "temperature": 1.0, "max_tokens": 12, "extra_body": form}

    def ask(**more):
        if kind == "text":
            return client.completions.create(prompt="once", **options, **more)
        messages = [{"role": "user", "content": "hello"}]
        return client.chat.completions.create(messages=messages, **options, **more)

    def text(choice):
        return choice.text if kind == "text" else choice.message.content

    singles = [ask(seed=seed) for seed in (7, 8, 9)]
    expected = [text(reply.choices[0]) for reply in singles]
    assert len(set(expected)) == 3
    counted = "prompt_tokens", "prefix_cache_queries", "prefix_cache_hits"
    before = [number(live, f"vllm:{name}_total{{.*}}") for name in counted]
    several = ask(seed=7, n=3)
    after = [number(live, f"vllm:{name}_total{{.*}}") for name in counted]
    assert [text(choice) for choice in several.choices] == expected
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    usage = several.usage
    assert usage.prompt_tokens == singles[0].usage.prompt_tokens
    assert usage.completion_tokens == sum(reply.usage.completion_tokens for reply in singles)
    assert usage.model_extra["seed"] == 7
    n_cached = usage.prompt_tokens_details.cached_tokens
    n_new = [n - m for n, m in zip(after, before, strict=True)]
    assert n_new == [usage.prompt_tokens, usage.prompt_tokens, n_cached]
    events = list(ask(seed=7, n=3, stream=True, stream_options={"include_usage": True}))
    texts, finishes = [""] * 3, []
    for choice in (choice for event in events for choice in event.choices):
        part = choice.text if kind == "text" else choice.delta.content
        texts[choice.index] += part or ""
        finishes += [(choice.index, choice.finish_reason)] if choice.finish_reason else []
    assert texts == expected and len({event.id for event in events}) == 1
    assert sorted(finishes) == [(i, c.finish_reason) for i, c in enumerate(several.choices)]
    assert events[-1].usage.completion_tokens == usage.completion_tokens


def test_several_prompts_of_a_request(client, live):
    """Each has the answers that it gets alone, also where there are more than slots."""
    options = {"temperature": 1.0, "seed": 3, "n": 2, "max_tokens": 24}
    ask = functools.partial(client.completions.create, model=live.server.name, **options)
    prompts = ["one two", "three", "one two three four", [5, 6, 7]]
    prompts[:3] = [live.llm.tokenizer.encode_document(prompt) for prompt in prompts[:3]]
    singles = [ask(prompt=prompt) for prompt in prompts]
    before = number(live, "vllm:prompt_tokens_total{.*}")
    several = ask(prompt=prompts)
    assert [choice.index for choice in several.choices] == list(range(8))
    expected = [choice.text for single in singles for choice in single.choices]
    assert [choice.text for choice in several.choices] == expected
    n_prompt = sum(single.usage.prompt_tokens for single in singles)
    assert several.usage.prompt_tokens == n_prompt == sum(map(len, prompts))
    assert number(live, "vllm:prompt_tokens_total{.*}") - before == n_prompt
    n_new = sum(single.usage.completion_tokens for single in singles)
    assert several.usage.completion_tokens == n_new
    texts = [""] * 8
    for event in ask(prompt=prompts, stream=True):
        for choice in event.choices:
            texts[choice.index] += choice.text
    assert texts == expected
    assert ask(prompt=["one two", "three"]).choices[3].text == expected[3]


def test_several_answers_leave_with_their_client(live, slow):
    request = {**body(n=1900, logit_bias={str(LETTER_ID): 100}), "n": 3, "stream": True}
    with httpx.stream("POST", live.url + CHAT, json=request) as reply:
        indices = set()
        for line in reply.iter_lines():
            if line:
                indices.add(json.loads(line.removeprefix("data: "))["choices"][0]["index"])
            if len(indices) == 3:
                break
        assert live.server.queue.n_running == 3
    until(lambda: live.server.queue.n_running == 0, 0.5)


def test_the_rate_of_several_answers_is_that_of_all_of_them():
    """They ran beside each other: their tokens add up, their seconds do not."""
    each = [
        Stats(new_tokens=21, decode_seconds=2.0, ttft=0.5),
        Stats(new_tokens=11, decode_seconds=1.0, ttft=0.4),
    ]
    both = server_replies.together(each)
    assert (both.tok_s, both.ttft, both.decode_seconds) == (15.0, 0.4, 2.0)
    empty = Stats(new_tokens=0, decode_seconds=0.0, ttft=0.6)  # it was a stop string at once
    assert server_replies.together([*each, empty]).tok_s == 15.0


def test_the_numbers_of_an_answers_speculation():
    stats = Stats(new_tokens=8, passes=3, drafted=12, ttft=0.25, decode_seconds=2.0)
    stats.path_lengths = [2, 0, 2]
    counts = dict(passes=3, drafted_tokens=12, accepted_tokens=4, tau=2.3333)
    times = dict(tokens_per_second=3.5, time_to_first_token=0.25)
    expected = {**counts, "accepted_per_position": [0.6667, 0.6667], **times}
    assert server_replies.speculation(stats) == expected
