"""Answers of one model that are under way, from token ids to text."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing

from fasteagle.answering.answer import Answer, Chunk, answer
from fasteagle.answering.answer_logits import AnswerRequest
from fasteagle.answering.known_texts import KnownTexts
from fasteagle.answering.prefix_cache import PrefixCache
from fasteagle.answering.stream import Decoder
from fasteagle.batch import Batch, NoRoomError
from fasteagle.decoding.stats import Stats
from fasteagle.errors import FasteagleError
from fasteagle.generate import Engine
from fasteagle.options import SamplingParams

Event = Chunk | Exception | None  # None: the answer is whole; an error ended it


class SlotsTakenError(FasteagleError):
    """Error where as many answers are under way as may be at once."""


class Answers:
    """Answers under way, up to `size` at once: `Batch`, with what a model keeps between answers.

    One thread may `begin` and `step`, or any threads read `stream`s, but not both. `hold` is
    entered while any answer is under way.
    """

    def __init__(
        self,
        engine: Engine,
        decoder: Decoder,
        size: int,
        prefix_cache: PrefixCache,
        texts: KnownTexts,
        hold: Callable[[SamplingParams], AbstractContextManager[None]],
    ) -> None:
        self._batch: Batch[Hashable, Chunk] = Batch(engine, size)
        self._decoder, self._prefix_cache, self._texts = decoder, prefix_cache, texts
        self._hold, self._held = hold, ExitStack()
        self._lock, self._next = threading.Lock(), threading.Lock()
        self._unread: dict[Hashable, deque[Event]] = {}  # of streams
        self._shut: deque[Hashable] = deque()  # streams that are not read any more

    @property
    def size(self) -> int:
        """Number of answers that may be under way at once."""
        return self._batch.size

    @property
    def has_room(self) -> bool:
        """Return whether another answer may begin."""
        return self._batch.has_room

    @property
    def running(self) -> list[Hashable]:
        """Names of the answers that are under way, in the order in which they began."""
        return self._batch.running

    def begin(
        self,
        key: Hashable,
        request: AnswerRequest,
        text: str | None = None,
        stats: Stats | None = None,
        *,
        awaited: bool = True,
    ) -> None:
        """Begin to answer `request`; `step` names the answer `key`, and fills `stats`.

        With the `text` of its prompt, a later text that begins with both reuses their tokens.
        `awaited`: see `Batch.begin`. Raises `NoRoomError` where memory for its text is short.
        """
        batch, begun = self._batch, time.perf_counter()

        def chunks(engine: Engine) -> Generator[Chunk]:
            tokens: list[int] = []
            try:
                self._prefix_cache.turn_to(engine, request.prompt, batch.engines)
                with closing(answer(engine, self._decoder, request, stats)) as own:
                    for chunk in own:
                        if chunk and not tokens:  # prompts of others came first
                            engine.stats.ttft = time.perf_counter() - begun
                        tokens.extend(chunk.tokens)
                        yield chunk
            finally:
                if text is not None and tokens:
                    self._texts.add(text, request.prompt, tokens)

        n_tokens = len(request.prompt) + request.answer.max_new_tokens
        n_tokens = min(n_tokens, batch.engines[0].max_seq_len)
        try:
            if not batch.running:
                self._held.enter_context(self._hold(request.params))
            batch.begin(key, request.prompt, n_tokens, chunks, awaited=awaited)
        finally:
            self._let_go()

    def step(self) -> list[tuple[Hashable, Event]]:
        """Run one pass for all answers; return what is new, in order."""
        try:
            return self._batch.step()
        finally:
            self._let_go()

    def end(self, key: Hashable) -> None:
        """End an answer early; do nothing if it has ended."""
        try:
            if key in self._batch.running:
                self._batch.end(key)
        finally:
            self._let_go()

    def end_all(self) -> None:
        """End all answers early, streams of other threads included."""
        with self._turn():
            for key in self.running:
                self.end(key)

    def forget(self) -> None:
        """Forget the texts of earlier answers, so that no prompt begins with a known one.

        No answer may be under way.
        """
        for engine in self._batch.engines:
            engine.restart()
        self._prefix_cache.clear()

    def _let_go(self) -> None:
        """Leave `hold` where no answer is under way."""
        if not self._batch.running:
            self._held.close()

    def stream(
        self, request: AnswerRequest, text: str | None = None, stats: Stats | None = None
    ) -> Generator[Chunk]:
        """Yield the chunks of an answer; other streams go on meanwhile.

        Raises `SlotsTakenError` where too many answers are under way.
        """
        key = object()
        try:
            self._open(key, request, text, stats)
            yield from self._read(key)
        finally:
            self._close(key)

    def all(self, requests: Sequence[AnswerRequest], size: int) -> list[Answer]:
        """Answer all requests, up to `size` of them at once, or as many as memory has room for."""
        stats = [Stats() for _ in requests]
        chunks: list[list[Chunk]] = [[] for _ in requests]
        waiting = deque(range(len(requests)))
        reading: dict[int, Generator[Chunk]] = {}
        keys = [object() for _ in requests]
        try:
            while waiting or reading:
                while waiting and len(reading) < size and (self.has_room or not reading):
                    i = waiting[0]
                    try:
                        self._open(keys[i], requests[i], None, stats[i], awaited=False)
                    except NoRoomError:
                        if not reading:
                            raise
                        size = len(reading)
                        break
                    except SlotsTakenError:  # by another thread, after `has_room`
                        if not reading:
                            raise
                        break
                    reading[waiting.popleft()] = self._read(keys[i])
                for i, reader in list(reading.items()):
                    chunk = next(reader, None)
                    if chunk is None:
                        del reading[i]
                        self._close(keys[i])
                    else:
                        chunks[i].append(chunk)
        finally:
            self._close(*keys)
        each = zip(chunks, stats, requests, strict=True)
        return [Answer.of(own, stats, request.params.seed) for own, stats, request in each]

    def _open(
        self,
        key: Hashable,
        request: AnswerRequest,
        text: str | None,
        stats: Stats | None,
        *,
        awaited: bool = True,
    ) -> None:
        with self._turn():
            if not self.has_room:
                raise SlotsTakenError(
                    f"{self.size} answers are under way, and no more run at once: read a stream to "
                    "its end or close it first, or let `fasteagle serve` queue requests"
                )
            self.begin(key, request, text, stats, awaited=awaited)
            self._unread[key] = deque()

    def _read(self, key: Hashable) -> Generator[Chunk]:
        unread = self._unread[key]
        while True:
            while not unread:
                with self._turn():
                    if not unread:  # the turn before may have been another reader's
                        self._step_streams(key)
            event = unread.popleft()
            if event is None:
                return
            if isinstance(event, Exception):
                raise event
            yield event

    def _step_streams(self, reader: Hashable) -> None:
        """Run one pass for all streams, for `reader` too."""
        if reader not in self.running:
            raise FasteagleError("the answer was interrupted: ask again")
        for key, event in self.step():
            self._unread[key].append(event)

    @contextlib.contextmanager
    def _turn(self) -> Generator[None]:
        """Let one thread at a time change what is under way, without streams that were closed.

        Who is next holds `_next`: else one thread could take turn after turn.
        """
        try:
            with self._next:
                self._lock.acquire()
            try:
                self._end_shut()
                yield
            finally:
                self._lock.release()
        finally:
            self._close()

    def _close(self, *keys: Hashable) -> None:
        """End streams now, or where the lock is taken, when it is given back.

        The garbage collector closes streams, in any thread and in the middle of a pass: waiting for
        the lock there could be for ever.
        """
        self._shut.extend(keys)
        while self._shut and self._lock.acquire(blocking=False):
            try:
                self._end_shut()
            finally:
                self._lock.release()

    def _end_shut(self) -> None:
        while self._shut:
            key = self._shut.popleft()
            self.end(key)
            self._unread.pop(key, None)
