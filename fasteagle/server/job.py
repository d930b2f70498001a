"""Answers of a request, on their way from the queue's thread to the event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence

from fasteagle.answering.answer import Chunk
from fasteagle.answering.answer_logits import AnswerRequest
from fasteagle.decoding.stats import Stats
from fasteagle.errors import counted

# Chunks of one answer reach the event loop together, after so long at most. A pass of a small model
# takes less, and waking the loop for each would take the cores from the next passes.
GROUP_SECONDS = 0.025


class TimedOutError(Exception):
    """Error of a request whose time is over."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"no complete answer within {counted(seconds, 'second')}")


class CancelledError(Exception):
    """Error of a request whose client has left."""


class Job:
    """One answer of a request: it arrives as chunks, then `stats` are complete.

    `request` is known once it is planned; before that the job only holds a place in the queue.
    Answers of one request arrive in one inbox: `beside` is another job of it. `is_first` is the
    first of several answers to a prompt, which counts once.
    """

    def __init__(self, beside: Job | None = None, is_first: bool = True) -> None:
        self.is_first = is_first
        self.request: AnswerRequest | None = None
        self.text: str | None = None  # of a conversation, for the tokens of its continuations
        self.stats = Stats()
        self.outcome = ""  # eos, stop, length or context, else why the answer is not whole
        self.submitted: float = time.perf_counter() if beside is None else beside.submitted
        self.begun = self.submitted
        self.first_token: float | None = None  # seconds after `submitted`
        self.seconds = 0.0  # from `submitted` to the end
        self.cancelled = threading.Event()
        self.on_leave: Callable[[Job], None] = lambda job: None
        self._lock = threading.Lock()
        self._loop = asyncio.get_running_loop()
        self.group_seconds = GROUP_SECONDS  # longer where nobody reads before the end
        self._group: list[Chunk] = []  # the thread's, not sent yet
        self._sent = float("-inf")
        self.inbox: asyncio.Queue[tuple[Job, list[Chunk] | Exception | None]]
        self.inbox = asyncio.Queue() if beside is None else beside.inbox
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
            self.inbox.put_nowait((self, TimedOutError(seconds)))
            self.on_leave(self)

    def add(self, chunk: Chunk) -> None:
        """Add a chunk, from the queue's thread; the first chunk is passed on at once."""
        now = time.perf_counter()
        if self.first_token is None:
            self.first_token = now - self.submitted
        self._group.append(chunk)
        if now - self._sent >= self.group_seconds:
            self._tell_group()
            self._sent = now

    def tell(self, event: Exception | None) -> None:
        """Pass on how the answer ended, from the queue's thread: an error, or None."""
        if self._group:
            self._tell_group()
        self._put(event)

    def _tell_group(self) -> None:
        group, self._group = self._group, []
        self._put(group)

    def _put(self, event: list[Chunk] | Exception | None) -> None:
        try:
            self._loop.call_soon_threadsafe(self.inbox.put_nowait, (self, event))
        except RuntimeError:  # the loop is closed: nobody is there any more
            self.cancelled.set()

    def leave(self) -> None:
        """Cancel the answer: nobody waits for it any more."""
        self.cancelled.set()
        self.on_leave(self)
        if self._timer is not None:
            self._timer.cancel()


Group = tuple[Job, list[Chunk] | None]


async def groups(jobs: Sequence[Job]) -> AsyncIterator[Group]:
    """Yield the answers of one request as they come, None at the end of each.

    An error of one is raised and cancels the others, as leaving the loop early does.
    """
    n_running = len(jobs)
    try:
        while n_running:
            job, event = await jobs[0].inbox.get()
            if isinstance(event, Exception):
                raise event
            if event is None:
                n_running -= 1
            yield job, event
    finally:
        for job in jobs:
            job.leave()
