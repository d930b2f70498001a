"""Places in the queue and times of single jobs, without a model or with one that says little."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from unittest import mock

import httpx
import pytest
from live_server import CHAT, SHORT, serving

from fasteagle.answering import several
from fasteagle.answering.answer import Chunk
from fasteagle.options import ServeOptions
from fasteagle.server import run
from fasteagle.server.job import Job, groups
from fasteagle.server.metrics import Metrics
from fasteagle.server.queue import AnswerQueue, QueueFullError, ShuttingDownError


def idle_queue(size=1):
    return AnswerQueue(SimpleNamespace(answers=SimpleNamespace(size=size)), 1, Metrics("tiny"))


@pytest.mark.parametrize(("seconds", "after"), [(10.0, 15), (0.01, 1)])
def test_when_to_come_back_is_guessed_by_how_many_are_answered_at_once(seconds, after):
    async def refused():
        queue = idle_queue(2)
        queue._mean_seconds = seconds
        queue._waiting.extend(Job() for _ in range(3))
        with pytest.raises(QueueFullError) as caught:
            queue.admit(Job())
        queue.stop()
        return caught.value.retry_after

    assert asyncio.run(refused()) == after


def test_who_wants_no_answer_does_not_wait_for_those_of_others():
    async def admitted():
        queue, two = idle_queue(), [Job(), Job()]
        for queue._running, waiting in ((dict.fromkeys(two), []), ({}, two)):
            queue._waiting.extend(waiting)
            queue.admit(job := Job(), answers=False)
            queue.release(job)
            with pytest.raises(QueueFullError):
                queue.admit(job)
        queue.stop()

    asyncio.run(admitted())


def test_the_pace_of_answers_is_without_the_time_that_they_waited():
    async def finished():
        queue = idle_queue()
        queue.stop()
        job = Job()
        job.submitted -= 100
        assert Job(beside=job).submitted == job.submitted, "a request came once"
        queue._running[job] = None
        queue._finish(job, None)
        return queue._mean_seconds

    assert asyncio.run(finished()) == pytest.approx(0.8, abs=0.1)


def test_answers_that_do_not_begin_are_counted_or_refused():
    async def refused():
        queue = idle_queue()
        job, other = Job(), Job()
        other.cancelled.set()  # a client that leaves while its answer is about to begin
        queue._waiting.append(other)
        assert queue._next() is None and other.outcome == "cancelled"
        queue.drain()
        queue._running[job] = None
        queue._put_back(job)
        with pytest.raises(ShuttingDownError):
            await asyncio.wait_for(anext(groups([job])), 0.9)
        queue.stop()
        assert not queue._thread.is_alive()

    asyncio.run(refused())


def test_the_time_ends_for_each_of_several_answers(loaded, monkeypatch):
    """The first one is over long before."""

    def answer(engine, decoder, request, stats):
        while request.params.seed == 8:
            yield Chunk("")
        stats.finish = "eos"
        yield Chunk("a", (1,))

    monkeypatch.setattr(several, "answer", answer)
    with serving(loaded, ServeOptions(port=0, timeout=0.4)) as hasty:
        body = {**SHORT, "n": 2, "seed": 7, "stream": False}
        assert httpx.post(hasty.url + CHAT, json=body, timeout=3.0).status_code == 504


def test_nothing_is_watched_once_a_connection_is_lost(monkeypatch):
    monkeypatch.setattr(run.H11Protocol, "connection_lost", lambda self, error: None)
    protocol = run.Protocol.__new__(run.Protocol)
    protocol._timer, protocol._stalled = timers = mock.Mock(), mock.Mock()
    protocol.connection_lost(None)
    assert all(timer.cancel.called for timer in timers)
