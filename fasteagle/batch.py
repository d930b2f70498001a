"""Several answers of one model at once, with one pass of the target over the rows of all of them.

Each answer has an engine of its own, so that its text is the one that it gets alone: bit for bit
where the kernels compute a row alike in any pass (our CPU kernels), else but for rounding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Hashable
from typing import Generic, TypeVar

from fasteagle.decoding.runner import run_together
from fasteagle.device import available_bytes
from fasteagle.errors import FasteagleError
from fasteagle.generate import Engine

Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")


class Batch(Generic[Key, Item]):
    """Up to `size` answers at once; they begin and end independently of each other.

    The engines decode plainly: they have no drafter. An answer is a generator over its engine,
    whose items are false where its cycle waits for a pass: see `Engine.generate`.
    """

    def __init__(self, engine: Engine, size: int) -> None:
        self._engine, self._size = engine, size
        self._idle: list[Engine] = []  # made when they are first needed
        self._running: dict[Key, tuple[Engine, Generator[Item]]] = {}
        self._errors: deque[Exception] = deque()

    @property
    def has_room(self) -> bool:
        """Return whether another answer may begin."""
        return len(self._running) < self._size

    @property
    def is_empty(self) -> bool:
        """Return whether no answer is under way, and no error left to raise."""
        return not self._running and not self._errors

    @property
    def running(self) -> list[Key]:
        """Names of the answers that are under way, in the order in which they began."""
        return list(self._running)

    def begin(self, key: Key, n_tokens: int, start: Callable[[Engine], Generator[Item]]) -> None:
        """Begin the answer that `start` returns; `step` names it `key`.

        Its text has at most `n_tokens`. Raises `FasteagleError` where memory for them is short.
        """
        engine = self._engine
        # Where caches must not move, an engine that is idle has its whole cache already.
        n_slots = n_tokens if engine.on_cpu else 0 if self._idle else engine.cache.n_slots
        needed = engine.cache.rows[:, :, :1].nbytes * n_slots
        free = available_bytes(engine.device)
        if free is not None and needed > free:
            raise FasteagleError(
                f"a text of {n_tokens:,} tokens needs {needed / 2**30:.1f} GiB of KV cache, "
                f"{free / 2**30:.1f} GiB free: lower --batch or --max-new-tokens"
            )
        own = self._idle.pop() if self._idle else engine.sibling()
        own.runner.waits = True
        self._running[key] = own, start(own)

    def step(self) -> list[tuple[Key, Item | None]]:
        """Run one pass; return what the answers yield until all wait again, None at their ends.

        An error of one answer ends it, and is raised by the next call: the others go on.
        """
        if self._errors:
            raise self._errors.popleft()
        waiting = [engine.runner for engine, _ in self._running.values() if engine.runner.waiting]
        if waiting:
            run_together(waiting)
        items: list[tuple[Key, Item | None]] = []
        for key in self.running:
            _, answer = self._running[key]
            try:
                while item := next(answer, None):
                    items.append((key, item))
            except Exception as error:
                self.end(key)
                self._errors.append(error)
                continue
            if item is None:
                self.end(key)
                items.append((key, None))
        return items

    def close(self) -> None:
        """End all answers."""
        for key in self.running:
            self.end(key)

    def end(self, key: Key) -> None:
        """End an answer; another one may begin in its place."""
        engine, answer = self._running.pop(key)
        answer.close()
        self._idle.append(engine)
