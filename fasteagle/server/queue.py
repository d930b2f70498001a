"""Queue of requests that one thread answers, several at once.

Answers begin and end between two passes of the model, which serve all of them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

from fasteagle.answering.answer import Chunk
from fasteagle.batch import NoRoomError
from fasteagle.compile.blocks import configure
from fasteagle.llm import LLM
from fasteagle.server.job import CancelledError, Job
from fasteagle.server.metrics import Metrics

PATIENCE = 10.0  # seconds that the thread may take to end


class QueueFullError(Exception):
    """Error where too many requests wait; `retry_after` guesses the seconds until there is room."""

    def __init__(self, n_waiting: int, retry_after: int) -> None:
        super().__init__(f"{n_waiting} requests are waiting already: try again later")
        self.retry_after = retry_after


class ShuttingDownError(Exception):
    """Error of a server that takes no new requests."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down")


OUTCOMES = {CancelledError: "cancelled", ShuttingDownError: "shutdown"}


class AnswerQueue:
    """Queue in which at most `limit` jobs wait or are planned; its thread ends with `stop`.

    The thread begins what waits, in the order in which it came, while there is a slot and memory;
    runs one pass for all answers that are under way; and passes on what came of it.
    """

    def __init__(self, llm: LLM, limit: int, metrics: Metrics) -> None:
        self._answers, self._metrics = llm.answers, metrics
        self._most = limit + llm.answers.size  # jobs that wait, are planned or run
        self._waiting: deque[Job] = deque()
        self._planning: set[Job] = set()
        self._changed = threading.Condition()
        self._running: dict[Job, None] = {}  # in the order in which they began
        self._lacks_memory = False  # for the next one, until an answer ends
        self._draining = self._stopped = False
        self._mean_seconds = 1.0  # of an answer, over the last ones
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    @property
    def n_waiting(self) -> int:
        return len(self._waiting) + len(self._planning)

    @property
    def n_running(self) -> int:
        return len(self._running)

    def admit(self, job: Job, answers: bool = True) -> None:
        """Give `job` a place while it is planned: `submit` or `release` must follow.

        Without `answers` the job wants only the planner. Raises `QueueFullError` or
        `ShuttingDownError`.
        """
        with self._changed:
            self._check_open()
            n = len(self._planning) + (len(self._waiting) if answers else 0)
            n_running = len(self._running) if answers else 0
            if n + n_running >= self._most:
                self._metrics.refused("queue_full")
                seconds = (n + n_running) * self._mean_seconds / self._answers.size
                raise QueueFullError(n, max(1, round(seconds)))
            self._planning.add(job)

    def release(self, job: Job) -> None:
        """Free the place of `job`, which is planned, or will not be, and wants no answer."""
        with self._changed:
            self._planning.discard(job)

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue the planned answers of a request, the first of which has a place.

        Raises `ShuttingDownError` if the server stops.
        """
        with self._changed:
            self._planning.discard(jobs[0])
            self._check_open()
            for job in jobs:
                job.on_leave = self._left
            self._waiting.extend(jobs)
            self._changed.notify()

    def _check_open(self) -> None:
        if self._draining:
            self._metrics.refused("shutdown")
            raise ShuttingDownError

    def _left(self, job: Job) -> None:
        """Take `job` out, if it still waits."""
        with self._changed:
            if job not in self._waiting:
                return
            self._waiting.remove(job)
            self._lacks_memory = False  # the next one may need less
        self._report(job, CancelledError())

    def _report(self, job: Job, error: Exception | None) -> None:
        """Note how `job` ended, unless that is known already."""
        job.end(job.stats.finish if error is None else OUTCOMES.get(type(error), "error"))
        self._metrics.finished(job)

    def drain(self) -> None:
        """Take nothing new and refuse the jobs that wait; the running answers go on."""
        with self._changed:
            self._draining = True
            while self._waiting:
                self._refuse(self._waiting.popleft())

    def _refuse(self, job: Job) -> None:
        error = ShuttingDownError()
        self._report(job, error)
        job.tell(error)

    def break_off(self) -> None:
        """End the running answers within one pass; take no lock: a signal handler may call this."""
        for job in list(self._running):
            job.cancelled.set()

    def stop(self) -> None:
        """Take nothing new, end the running answers and the thread."""
        self.drain()
        with self._changed:
            self._stopped = True
            self.break_off()
            self._changed.notify()
        self._thread.join(PATIENCE)

    def _work(self) -> None:
        configure()
        while self._wait():
            self._end_cancelled()
            self._begin_waiting()
            if self._running:
                self._step()

    def _wait(self) -> bool:
        """Wait for something to do; return False once there will be nothing any more."""
        with self._changed:
            while not (self._running or self._waiting or self._stopped):
                self._changed.wait()
            return bool(self._running or self._waiting)

    def _end_cancelled(self) -> None:
        for job in [job for job in self._running if job.cancelled.is_set()]:
            self._answers.end(job)
            self._finish(job, CancelledError())

    def _begin_waiting(self) -> None:
        """Begin what waits while there is room, in its order."""
        while self._answers.has_room and not self._lacks_memory:
            if (job := self._next()) is None:
                return
            assert job.request is not None, "only planned jobs are submitted"
            job.begun = time.perf_counter()
            try:
                self._answers.begin(job, job.request, job.text, job.stats)
            except NoRoomError as error:
                if not self._answers.running:
                    self._finish(job, error)
                    continue
                self._put_back(job)
                self._lacks_memory = True
            except Exception as error:
                self._finish(job, error)
            else:
                self._metrics.queued.observe(job.begun - job.submitted)

    def _next(self) -> Job | None:
        with self._changed:
            while self._waiting:
                job = self._waiting.popleft()
                if not job.cancelled.is_set():
                    self._running[job] = None
                    return job
                self._report(job, CancelledError())
            return None

    def _put_back(self, job: Job) -> None:
        """Let `job` wait again, as the next one."""
        with self._changed:
            del self._running[job]
            if self._draining:
                self._refuse(job)
            else:
                self._waiting.appendleft(job)

    def _step(self) -> None:
        """Run one pass for all answers, and pass on what it brought."""
        served: set[Job] = set()
        try:
            events = self._answers.step()
        except Exception as error:  # of no single answer: it has ended all of them
            for running in list(self._running):
                self._finish(running, error)
            return
        for job, event in events:
            assert isinstance(job, Job), "nothing else has begun"
            if isinstance(event, Chunk):
                served.add(job)
                job.add(event)
            else:
                self._finish(job, event)
        if served:
            self._metrics.at_once.observe(len(served))

    def _finish(self, job: Job, error: Exception | None) -> None:
        """End a running job, whose answer is whole if there is no error."""
        now = time.perf_counter()
        job.seconds = now - job.submitted
        self._mean_seconds += 0.2 * (now - job.begun - self._mean_seconds)
        del self._running[job]
        self._lacks_memory = False
        self._report(job, error)
        job.tell(error)
