"""Queue of requests that one thread answers, one at a time.

The engine holds one sequence, so a second answer at the same time would only make both slower.
`Job` is the side of the event loop, `AnswerQueue` that of the thread.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable

import torch

from fasteagle.answering.answer import AnswerRequest, Chunk
from fasteagle.compile.blocks import configure
from fasteagle.decoding.stats import Stats
from fasteagle.errors import FasteagleError
from fasteagle.llm import LLM
from fasteagle.server.metrics import Metrics

# Chunks of one answer reach the event loop together, after so long at most. A pass of a small model
# takes less, and waking the loop for each would take the cores from the next passes.
GROUP_SECONDS = 0.025
# Passes whose text waits to be written, beyond what the buffers of the connection hold. Decoding
# stands still there until the client reads on, for this long in all if others wait for the model.
MOST_UNWRITTEN = 64
STALL_SECONDS = 0.25
POLL_SECONDS = 0.05


class QueueFullError(Exception):
    """Error where too many requests wait; `retry_after` guesses the seconds until there is room."""

    def __init__(self, n_waiting: int, retry_after: int) -> None:
        super().__init__(f"{n_waiting} requests are waiting already: try again later")
        self.retry_after = retry_after


class ShuttingDownError(Exception):
    """Error of a server that takes no new requests."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down")


class TimedOutError(Exception):
    """Error of a request whose time is over."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"no complete answer within {seconds:g} seconds")


class CancelledError(Exception):
    """Error of a request whose client has left."""


class StalledError(Exception):
    """Error of a request whose client does not read its answer while others wait."""

    def __init__(self) -> None:
        super().__init__("the answer was not read while others waited for the model")


class Job:
    """One request: its answer arrives as chunks, then `stats` are complete.

    `request` is known once it is planned; before that the job only holds a place in the queue.
    """

    def __init__(self) -> None:
        self.request: AnswerRequest | None = None
        self.text: str | None = None  # of a conversation, for the tokens of its continuations
        self.stats = Stats()
        self.outcome = ""  # eos, stop, length or context, else why the answer is not whole
        self.submitted = time.perf_counter()
        self.first_token: float | None = None  # seconds after `submitted`
        self.seconds = 0.0  # from `submitted` to the end
        self.cancelled = threading.Event()
        self.on_leave: Callable[[Job], None] = lambda job: None
        self._lock = threading.Lock()
        self._loop = asyncio.get_running_loop()
        self.group_seconds = GROUP_SECONDS  # longer where nobody reads before the end
        self._group: list[Chunk] = []  # the thread's, not told yet
        self._told = float("-inf")
        self._n_told = self._n_taken = 0  # passes; each is counted by one thread only
        self.stalled = 0.0  # seconds in which the model stood still for the client
        self._events: asyncio.Queue[list[Chunk] | Exception | None] = asyncio.Queue()
        self._timer: asyncio.TimerHandle | None = None

    def limit(self, seconds: float) -> None:
        """End the job with `TimedOutError` when `seconds` have passed since it came."""
        left = self.submitted + seconds - time.perf_counter()
        self._timer = self._loop.call_later(max(0.0, left), self._expire, seconds)

    def end(self, outcome: str) -> bool:
        """Set how the job ended, unless that is known already; return whether it was set."""
        with self._lock:
            if self.outcome:
                return False
            self.outcome = outcome
            return True

    def _expire(self, seconds: float) -> None:
        if self.end("timeout"):  # else the answer is complete, only not read yet
            self.cancelled.set()
            self._events.put_nowait(TimedOutError(seconds))
            self.on_leave(self)

    def add(self, chunk: Chunk) -> None:
        """Add a chunk, from the queue's thread; the first chunk is passed on at once."""
        now = time.perf_counter()
        if self.first_token is None:
            self.first_token = now - self.submitted
        self._group.append(chunk)
        if now - self._told >= self.group_seconds:
            self._tell_group()
            self._told = now

    def tell(self, event: Exception | None) -> None:
        """Pass on how the answer ended, from the queue's thread: an error, or None."""
        if self._group:
            self._tell_group()
        self._put(event)

    def _tell_group(self) -> None:
        group, self._group = self._group, []
        self._n_told += len(group)
        self._put(group)

    @property
    def is_unread(self) -> bool:
        """Return whether the client is too far behind for another pass."""
        return self._n_told - self._n_taken > MOST_UNWRITTEN and not self.cancelled.is_set()

    def _put(self, event: list[Chunk] | Exception | None) -> None:
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:  # the loop is closed: nobody is there any more
            self.cancelled.set()

    async def groups(self) -> AsyncIterator[list[Chunk]]:
        """Yield the answer as it comes; leaving the loop early cancels the rest."""
        try:
            while (event := await self._events.get()) is not None:
                if isinstance(event, Exception):
                    raise event
                self._n_taken += len(event)
                yield event
        finally:
            self.leave()

    def leave(self) -> None:
        """Cancel the answer: nobody waits for it any more."""
        self.cancelled.set()
        self.on_leave(self)
        if self._timer is not None:
            self._timer.cancel()

    def check(self) -> None:
        """Raise `CancelledError` if the job is cancelled; called before every pass of the model."""
        if self.cancelled.is_set():
            raise CancelledError


class AnswerQueue:
    """Queue in which at most `limit` jobs wait or are planned; its thread ends with `stop`."""

    def __init__(self, llm: LLM, limit: int, metrics: Metrics) -> None:
        self._llm, self._limit, self._metrics = llm, limit, metrics
        self._waiting: deque[Job] = deque()
        self._planning: set[Job] = set()
        self._changed = threading.Condition()
        self._running: Job | None = None
        self._draining = self._stopped = False
        self._mean_seconds = 1.0  # of an answer, over the last ones
        n_threads = torch.get_num_threads()  # a new thread would begin with its own
        self._thread = threading.Thread(target=self._work, args=(n_threads,), daemon=True)
        self._thread.start()

    @property
    def n_waiting(self) -> int:
        return len(self._waiting) + len(self._planning)

    @property
    def n_running(self) -> int:
        return int(self._running is not None)

    def admit(self, job: Job, answers: bool = True) -> None:
        """Give `job` a place while it is planned: `submit` or `release` must follow.

        Without `answers` the job wants only the planner. Raises `QueueFullError` or
        `ShuttingDownError`.
        """
        with self._changed:
            self._check_open()
            n = len(self._planning) + (len(self._waiting) if answers else 0)
            busy = answers and self._running is not None
            if n + busy > self._limit:
                self._metrics.refused("queue_full")
                raise QueueFullError(n, max(1, round((n + busy) * self._mean_seconds)))
            self._planning.add(job)

    def release(self, job: Job) -> None:
        """Free the place of `job`, which is planned, or will not be, and wants no answer."""
        with self._changed:
            self._planning.discard(job)

    def submit(self, job: Job) -> None:
        """Queue the planned `job` for its answer; raise `ShuttingDownError` if the server stops."""
        with self._changed:
            self._planning.discard(job)
            self._check_open()
            job.on_leave = self._left
            self._waiting.append(job)
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
        self._report_unanswered(job, "cancelled")

    def _report_unanswered(self, job: Job, outcome: str) -> None:
        job.end(outcome)
        self._metrics.finished(job)

    def drain(self) -> None:
        """Take nothing new and refuse the jobs that wait; the running answer goes on."""
        with self._changed:
            self._draining = True
            for job in self._waiting:
                self._report_unanswered(job, "shutdown")
                job.tell(ShuttingDownError())
            self._waiting.clear()
            self._changed.notify()

    def break_off(self) -> None:
        """End the running answer within one cycle; take no lock: a signal handler may call this."""
        running = self._running
        if running is not None:
            running.cancelled.set()

    def stop(self, patience: float = 10.0) -> None:
        """Take nothing new, end the running answer and the thread."""
        self.drain()
        with self._changed:
            self._stopped = True
            self.break_off()
            self._changed.notify()
        self._thread.join(patience)

    def _next(self) -> Job | None:
        with self._changed:
            self._running = None
            while not self._stopped:
                while self._waiting:
                    job = self._waiting.popleft()
                    if not job.cancelled.is_set():
                        self._running = job
                        return job
                    self._report_unanswered(job, "cancelled")
                self._changed.wait()
            return None

    def _work(self, n_threads: int) -> None:
        torch.set_num_threads(n_threads)
        configure()
        while (job := self._next()) is not None:
            begin = time.perf_counter()
            self._metrics.started(begin - job.submitted)
            event = self._answer(job)
            now = time.perf_counter()
            job.seconds = now - job.submitted
            self._mean_seconds += 0.2 * (now - begin - self._mean_seconds)
            self._metrics.finished(job)
            job.tell(event)

    def _answer(self, job: Job) -> Exception | None:
        """Answer the job; return the event that ends its chunks: an error, or None."""
        assert job.request is not None, "only planned jobs are submitted"
        try:
            for chunk in self._llm.answers.stream(job.request, job.text, job.stats):
                job.check()
                job.add(chunk)
                self._wait_for_reader(job)
            job.end(job.stats.finish)
            return None
        except StalledError as error:
            job.end("stalled")
            return error
        except CancelledError as error:
            job.end("cancelled")
            return error
        except FasteagleError as error:
            job.end("error")
            return error
        except Exception as error:  # one answer failed: the next one is tried all the same
            job.end("error")
            self._llm.engine.restart()
            return error

    def _wait_for_reader(self, job: Job) -> None:
        """Stand still while the client does not read; raise `StalledError` once others wait."""
        begin, before = time.perf_counter(), job.stalled
        while job.is_unread:
            with self._changed:
                if job.stalled > STALL_SECONDS and (self._waiting or self._draining):
                    raise StalledError
                self._changed.wait(POLL_SECONDS)
            job.stalled = before + time.perf_counter() - begin
