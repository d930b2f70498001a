"""Waiting, leaving, limits of time and number; with one slot too where the number matters."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import json
import re
import socket
import time
from types import SimpleNamespace

import httpx
import pytest
import torch
from live_server import CHAT, LONG, SHORT, busy, deaf, failures, n_generated, number, serving, until

from fasteagle.answering.answer import Chunk
from fasteagle.answering.several import Answers
from fasteagle.decoding.stats import Stats
from fasteagle.generate import Engine
from fasteagle.options import ServeOptions
from fasteagle.server import app, run
from fasteagle.server.job import Job, TimedOutError, groups
from fasteagle.server.log import Record
from fasteagle.server.queue import QueueFullError

both = pytest.mark.parametrize("loaded", [1, 4], ids="parallel={}".format, indirect=True)


@both
def test_many_clients_get_their_own_answers(live):
    def ask(i):
        messages = [{"role": "user", "content": f"client {i}"}]
        reply = httpx.post(
            live.url + CHAT, json={"messages": messages, "max_tokens": 6}, timeout=60
        )
        return reply.json()["choices"][0]["message"]["content"]

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(16)))
    until(lambda: live.server.queue.n_running == 0)
    expected = [live.llm.chat(f"client {i}", max_new_tokens=6).text for i in range(16)]
    assert answers == expected and len(set(answers)) > 8


@both
def test_requests_that_are_planned_have_places(live, monkeypatch):
    """One too many is told how long all of these take, at the pace of the last answers."""
    queue = live.server.queue
    monkeypatch.setattr(queue, "_mean_seconds", 8.0)

    async def fill():
        jobs = [Job() for _ in range(queue._most)]
        for job in jobs:
            queue.admit(job)
        with pytest.raises(QueueFullError) as full:
            queue.admit(Job())
        assert full.value.retry_after == 8 * queue._most / live.llm.answers.size
        for job in jobs:
            queue.release(job)

    asyncio.run(fill())
    assert queue.n_waiting == 0 and httpx.post(live.url + CHAT, json=SHORT).status_code == 200


def test_the_thread_that_answers_may_run_many_variants_of_compiled_code(live, monkeypatch):
    """torch keeps this limit for each thread."""
    step, limits = Answers.step, []

    def noting(answers):
        limits.append(torch._dynamo.config.recompile_limit)
        return step(answers)

    monkeypatch.setattr(Answers, "step", noting)
    assert httpx.post(live.url + CHAT, json=SHORT).status_code == 200
    assert min(limits) >= 256


@pytest.mark.parametrize("n_read", [0, 5])
def test_a_client_that_leaves_ends_its_answer(live, slow, n_read):
    before = n_generated(live)
    with httpx.stream("POST", live.url + CHAT, json=LONG) as reply:
        lines = reply.iter_lines()
        for _ in range(n_read):
            next(lines)
        until(lambda: live.server.queue.n_running == 1)
    left = time.monotonic()
    until(lambda: live.server.queue.n_running == 0)
    seconds = time.monotonic() - left
    print(f"gone after {1e3 * seconds:.0f} ms")
    assert seconds < 0.5  # a pass takes 10 ms here, and the machine may be busy
    assert n_generated(live) - before < 1000
    assert httpx.post(live.url + CHAT, json=SHORT).status_code == 200


def test_a_client_that_leaves_before_the_first_event_is_read():
    """The response's own code is cancelled then before it looks at the answer."""
    from starlette.requests import ClientDisconnect

    from fasteagle.server.app import EventStream

    class FakeJob:
        left = 0

        def leave(self):
            self.left += 1

    async def events():
        yield "never read"

    async def broken(message):
        raise OSError

    async def receive():
        return {"type": "http.disconnect"}

    job = FakeJob()
    scope = {"type": "http", "asgi": {"spec_version": "2.3"}}
    with contextlib.suppress(OSError, ClientDisconnect):
        asyncio.run(EventStream(events(), [job, job])(scope, receive, broken))
    assert job.left == 2


@both
def test_a_client_that_leaves_while_it_waits(live, slow):
    gone = 'fasteagle:requests_refused_total{.*status="499"}'
    before, n_gone = failures(live, "cancelled"), number(live, gone)
    with busy(live):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(live.url + CHAT, json=SHORT, timeout=0.2)
        until(lambda: live.server.queue.n_waiting == 0, 0.5)
        assert live.server.queue.n_running == live.llm.answers.size
        assert failures(live, "cancelled") == before + 1  # while it still waits, not later
        until(lambda: number(live, gone) == n_gone + 1)
    until(lambda: live.server.queue.n_running == 0)


def test_a_long_prompt_can_be_left_too(live, monkeypatch):
    """Between the parts of a prefill; the next answer begins with what was computed."""
    original, n_parts = Engine._run, []

    def run(engine, ids, begin, aux_layers):
        n_parts.append(len(ids))
        time.sleep(0.2)
        return original(engine, ids, begin, aux_layers)

    monkeypatch.setattr(Engine, "_run", run)
    body = {"prompt": "left " * 400, "max_tokens": 2}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{live.url}/v1/completions", json=body, timeout=0.3)
    until(lambda: live.server.queue.n_running == 0, 2.0)
    assert len(n_parts) < 6
    monkeypatch.undo()
    reply = httpx.post(f"{live.url}/v1/completions", json=body).json()
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] >= 256


@both
def test_too_many_are_told_when_to_come_back(loaded, slow):
    with (
        serving(loaded, ServeOptions(port=0, queue=2)) as small,
        busy(small) as running,
        concurrent.futures.ThreadPoolExecutor(2) as pool,
    ):
        ask = functools.partial(httpx.post, small.url + CHAT, json=SHORT, timeout=30)
        waiting = [pool.submit(ask) for _ in range(2)]
        until(lambda: small.server.queue.n_waiting == 2)
        queued = "vllm:request_queue_time_seconds_sum{.*}"
        before = number(small, queued)
        assert number(small, "vllm:num_requests_running{.*}") == len(running)
        assert number(small, "vllm:num_requests_waiting{.*}") == 2
        reply = ask()
        assert reply.status_code == 429
        assert int(reply.headers["retry-after"]) >= 1
        assert reply.json()["error"]["type"] == "rate_limit_error"
        assert failures(small, "queue_full") == 1
        # What wants no answer does not wait for one.
        tokens = httpx.post(f"{small.url}/tokenize", json={"prompt": "a"})
        assert tokens.status_code == 200
        running[-1][0].close()  # one slot is enough for both
        assert [job.result().status_code for job in waiting] == [200, 200]
        whole = number(small, "vllm:e2e_request_latency_seconds_sum{.*}")
        assert whole > number(small, queued) - before > 0


def test_lines_and_numbers_of_requests(loaded, capfd):
    """A line for each, under the client's own id where that is one, and refusals by status."""
    with serving(loaded, ServeOptions(port=0, access_log=True)) as served:
        first = httpx.post(served.url + CHAT, json=SHORT, headers={"x-request-id": "mine-1"})
        assert first.headers["x-request-id"] == "mine-1"
        forged = httpx.get(f"{served.url}/a%0Ab", headers={"x-request-id": "a b"})
        assert re.fullmatch("[0-9a-f]{32}", forged.headers["x-request-id"])
        httpx.post(served.url + CHAT, json={})
        with httpx.stream("POST", served.url + CHAT, json=LONG) as stream:
            next(stream.iter_lines())
        until(lambda: served.server.queue.n_running == 0)
        text = httpx.get(f"{served.url}/metrics").text
    lines = [line for line in capfd.readouterr().err.splitlines() if " 127.0.0.1 " in line]
    shown = [re.sub(r"^\S+T\S+\+00:00 127.0.0.1 (\S+) | \d+\.\d+ s", " ", line) for line in lines]
    usage = first.json()["usage"]
    tokens = f"{usage['prompt_tokens']}+{usage['completion_tokens']}"
    assert "mine-1" in lines[0] and shown[0].split() == ["POST", CHAT, "200", tokens, "tokens"]
    assert shown[1].split() == ["GET", "/a%0Ab", "404", "-", "tokens"]
    assert shown[2].split()[:3] == ["POST", CHAT, "400"]
    for status in (400, 404):
        count = rf'^fasteagle:requests_refused_total{{.*status="{status}"}} 1.0$'
        assert re.search(count, text, re.M)
    assert "\nprocess_resident_memory_bytes " in text
    assert re.search(r"^fasteagle:request_planning_time_seconds_count{.*} 2.0$", text, re.M)


def test_chunks_of_a_whole_reply_are_passed_on_at_its_end(live, slow, monkeypatch):
    """Each group wakes the event loop, which takes the cores from the next passes."""
    tell, told = Job._tell_group, []
    monkeypatch.setattr(Job, "_tell_group", lambda job: told.append(job) or tell(job))
    body = {**LONG, "max_tokens": 40, "stream": False, "speculate": False}
    assert httpx.post(live.url + CHAT, json=body).status_code == 200
    assert len(told) <= 3, "the first one at once, another before it is known who reads"


def test_no_line_is_written_unless_wanted(live, capfd):
    for _ in range(2):
        assert httpx.get(f"{live.url}/health").is_success
    assert "/health" not in capfd.readouterr().err


def test_a_line_counts_each_prompt_once_and_all_answers():
    jobs = [
        SimpleNamespace(stats=Stats(prompt_tokens=n, new_tokens=new), is_first=first)
        for n, new, first in [(5, 2, True), (5, 4, False), (3, 1, True), (3, 2, False)]
    ]
    assert Record("127.0.0.1", "a", "POST /", jobs=jobs).tokens == "8+9"


def test_a_client_that_does_not_read_is_dropped(loaded, monkeypatch):
    monkeypatch.setattr(run, "WRITE_SECONDS", 0.3)
    with serving(loaded) as served, contextlib.closing(deaf(served.port)) as client:
        connections = served.running.server_state.connections
        until(lambda: len(connections) == 0, 20)
        until(lambda: served.server.queue.n_running == 0, 0.5)
        client.settimeout(10)
        with contextlib.suppress(ConnectionResetError):
            while client.recv(2**20):  # what the kernel holds, then the end
                pass
        assert httpx.post(served.url + CHAT, json=SHORT).status_code == 200


def test_a_client_that_reads_slowly_gets_all(loaded, monkeypatch):
    """It was dropped after the time for one that takes nothing, in the middle of a body."""
    monkeypatch.setattr(run, "WRITE_SECONDS", 0.3)
    monkeypatch.setattr(app, "whole_reply", lambda *arguments: {"text": "x" * 2**22})
    with serving(loaded) as served, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
        client.connect(("127.0.0.1", served.port))
        raw = json.dumps(SHORT).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        client.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
        client.settimeout(10)
        begin, n_bytes = time.monotonic(), 0
        while n_bytes < 2**22 and (data := client.recv(2**16)):
            n_bytes += len(data)
            time.sleep(0.015)
        assert n_bytes >= 2**22 and time.monotonic() - begin > 3 * run.WRITE_SECONDS


@pytest.mark.parametrize(("seconds", "expected"), [(0.0, 6), (60.0, 2)])
def test_chunks_come_in_groups_the_first_at_once(seconds, expected):
    """A loop that is woken for each pass of a small model takes the cores from the next ones."""
    chunks = [Chunk(str(i), (i,)) for i in range(6)]

    async def all_groups():
        job = Job()
        job.group_seconds = seconds
        job.add(chunks[0])
        first = await asyncio.wait_for(anext(groups_of_job := groups([job])), 1.0)
        assert first == (job, chunks[:1]) and job.first_token is not None
        for chunk in chunks[1:]:
            job.add(chunk)
        job.tell(None)
        return [first, *[group async for group in groups_of_job]]

    *chunk_groups, end = [event for _, event in asyncio.run(all_groups())]
    assert [chunk for group in chunk_groups for chunk in group] == chunks and end is None
    assert len(chunk_groups) == expected


def test_chunks_come_before_what_went_wrong():
    async def all_chunks():
        job, seen = Job(), []
        job.add(Chunk("a", (1,)))
        job.add(Chunk("b", (2,)))
        job.tell(TimedOutError(1.0))
        with pytest.raises(TimedOutError):
            async for _, group in groups([job]):
                seen += group
        return seen

    assert [chunk.text for chunk in asyncio.run(all_chunks())] == ["a", "b"]


def test_a_finished_answer_that_is_not_read_has_not_timed_out():
    async def outcome():
        job = Job()
        job.limit(0.01)
        job.end("length")
        job.tell(None)
        await asyncio.sleep(0.05)
        assert [group async for group in groups([job])] == [(job, None)]
        return job.outcome

    assert asyncio.run(outcome()) == "length"


def test_an_answer_whose_time_is_over_leaves_the_queue_though_nobody_reads():
    async def left():
        job, has_left = Job(), asyncio.Event()
        job.on_leave = lambda job: has_left.set()
        job.limit(0.0)
        await asyncio.wait_for(has_left.wait(), 0.9)
        assert job.cancelled.is_set() and job.outcome == "timeout"

    asyncio.run(left())


def test_the_time_for_an_answer_begins_when_its_request_comes():
    async def fail():
        job = Job()
        job.submitted -= 60.0
        job.limit(60.05)
        with pytest.raises(TimedOutError, match=r"within 60\.05 seconds"):
            await asyncio.wait_for(anext(groups([job])), 0.9)
        return job.outcome

    assert asyncio.run(fail()) == "timeout"


def test_the_time_for_a_request_ends(loaded, slow):
    with serving(loaded, ServeOptions(port=0, timeout=0.4)) as hasty:
        reply = httpx.post(hasty.url + CHAT, json={**LONG, "stream": False}, timeout=10)
        assert reply.status_code == 504 and "0.4 seconds" in reply.json()["error"]["message"]
        until(lambda: hasty.server.queue.n_running == 0, 2.0)
        lines = []
        with httpx.stream("POST", hasty.url + CHAT, json=LONG, timeout=10) as stream:
            lines = [line for line in stream.iter_lines() if line]
        assert "0.4 seconds" in lines[-1] and '"error"' in lines[-1] and len(lines) > 3
        assert httpx.post(hasty.url + CHAT, json=SHORT).status_code == 200
        text = httpx.get(f"{hasty.url}/metrics").text
        assert 'vllm:request_failed_total{model_name="tiny-model",reason="timeout"} 2.0' in text


def test_a_client_that_does_not_stream_and_leaves(live, slow):
    before, body = n_generated(live), {**LONG, "stream": False}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(live.url + CHAT, json=body, timeout=0.3)
    until(lambda: live.server.queue.n_running == 0, 0.5)
    assert n_generated(live) - before < 1000


def test_a_client_that_reads_late_gets_its_whole_answer(live):
    """Its answer does not wait for it: the slot is free, and the text waits in the inbox."""
    with contextlib.closing(deaf(live.port, speculate=False, max_tokens=300)) as client:
        until(lambda: live.server.queue.n_running == 0)
        assert httpx.post(live.url + CHAT, json=SHORT).status_code == 200
        client.settimeout(10)
        text = b""
        while b"[DONE]" not in text[-30:]:
            text += client.recv(2**20)
    assert text.count(b'"logprobs":{') == 300 and b'"finish_reason":"length"' in text
