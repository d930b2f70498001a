"""Several answers of one model at once, with one pass of the target over the rows of all of them.

Each answer has an engine of its own, so that its text is the one that it gets alone: bit for bit
where the kernels compute a row alike in any pass (our own), else but for rounding.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Generic, TypeVar

import torch

from fasteagle.decoding.context import FEW_TOKENS, common_prefix
from fasteagle.decoding.runner import Runner
from fasteagle.device import available_bytes, unless_short
from fasteagle.drafting.company import Company
from fasteagle.errors import FasteagleError
from fasteagle.generate import Engine

Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")


class NoRoomError(FasteagleError):
    """Error where memory for another text is short while the others are written."""


@dataclasses.dataclass
class _Running(Generic[Item]):
    """Answer under way: its engine, the generator of its items, the length that it may reach."""

    engine: Engine
    items: Generator[Item]
    n_tokens: int
    awaited: bool  # whether somebody reads its tokens as they come
    begun: bool = False  # whether its prompt is computed


@torch.no_grad()
def run_together(runners: Sequence[Runner]) -> int:
    """Run the cycles that wait in `runners`, with one pass over the rows of all of them.

    Returns the number of such passes. Where one fails, each runner's `read` raises the reason;
    where the end of one cycle fails, only the `read` of its own. An interruption is raised here,
    and no runner has a result then.
    """
    backend = runners[0].backend
    try:
        if n := backend.run_queued(runners):
            return n
        launches = [runner.take() for runner in runners]
        if len(runners) == 1:
            runners[0].run(launches[0])
            return 1
        proposals = backend.draft_together(runners, launches)
        states, capture = [runner.state for runner in runners], runners[0].capture_pass
        outputs = backend.verify_together(states, proposals, capture)
    except Exception as error:
        for runner in runners:
            runner.fail(error)
        return 1
    for i, runner in enumerate(runners):
        try:
            runner.finish(launches[i], proposals[i], outputs[i])
        except Exception as error:
            runner.fail(error)
    return 1


class Batch(Generic[Key, Item]):
    """Up to `size` answers at once; they begin and end independently of each other.

    The first engine is the given one, others are made like it when they are first needed. An answer
    is a generator over its engine, whose items are false where its cycle waits for a pass: see
    `Engine.generate`.
    """

    def __init__(self, engine: Engine, size: int) -> None:
        self.size = size
        self.engines = [engine]
        self._running: dict[Key, _Running[Item]] = {}
        # Seconds that decoding took more than prompts did meanwhile: prompts may take as long, so
        # that answers under way keep half of their speed.
        self._credit = 0.0
        self._company = Company()
        self._shared = False  # whether several answers have been under way
        self._others = 0  # see `_count_others`

    @property
    def has_room(self) -> bool:
        """Return whether another answer may begin."""
        return len(self._running) < self.size

    @property
    def running(self) -> list[Key]:
        """Names of the answers that are under way, in the order in which they began."""
        return list(self._running)

    def begin(
        self,
        key: Key,
        prompt: Sequence[int],
        n_tokens: int,
        start: Callable[[Engine], Generator[Item]],
        *,
        awaited: bool = True,
    ) -> None:
        """Begin the answer that `start` returns; `step` names it `key`.

        Its text, `prompt` included, has at most `n_tokens`. Prompts go before answers under way of
        which none is `awaited`: passes that more of them share cost little more. Raises
        `NoRoomError` where memory for them is short.
        """
        engine = self._engine_for(prompt)
        first = self.engines[0]
        if engine.origin is not first.origin:
            engine.use(None if first.drafter is None else first.drafter.sibling())
        self._make_room(engine, n_tokens)
        if self._running and not self._shared:
            self._shared = True
            self.engines[0].compile_shared()
        engine.runner.waits = True
        self._running[key] = _Running(engine, start(engine), n_tokens, awaited)
        self._regroup()
        self._company.expect(len(self._running))

    def _engine_for(self, prompt: Sequence[int]) -> Engine:
        """Return the idle engine that has computed most of `prompt`, or a new one.

        One whose text `prompt` goes on, or that has next to none, goes before those whose text
        would be lost: what they share with `prompt` can be copied.
        """
        if not (idle := self._idle()):
            self.engines.append(unless_short(self.engines[0].sibling, _no_room))
            return self.engines[-1]

        def worth(engine: Engine) -> tuple[bool, int]:
            shared = common_prefix(engine.cached, prompt)
            return len(engine.cached) - shared <= FEW_TOKENS, shared

        return max(idle, key=worth)

    def _idle(self) -> list[Engine]:
        busy = [run.engine for run in self._running.values()]
        return [engine for engine in self.engines if engine not in busy]

    def _make_room(self, engine: Engine, n_tokens: int) -> None:
        """Raise `NoRoomError` unless all texts may reach their lengths.

        Where memory is short, idle engines give their caches back before, the largest first.
        """
        needed = _missing_bytes(engine, n_tokens)
        needed += sum(_missing_bytes(run.engine, run.n_tokens) for run in self._running.values())
        idle = [other for other in self._idle() if other is not engine]
        idle.sort(key=lambda other: other.cache.n_slots)
        while (free := available_bytes(engine.device)) is not None and needed > free:
            if not idle:
                raise NoRoomError(
                    f"a text of {n_tokens:,} tokens and those under way need "
                    f"{needed / 2**30:.1f} GiB more of KV cache, {free / 2**30:.1f} GiB are free: "
                    "ask for fewer tokens, or fewer at once"
                )
            idle.pop().give_back()

    def step(self) -> list[tuple[Key, Item | Exception | None]]:
        """Run one pass for all answers, and at most one part of a prompt.

        Returns what the answers yield until all wait again: None at an end, and where an answer
        ended by an error, the error. An interruption ends all answers: what they have yielded in
        this pass is lost.
        """
        try:
            return self._step()
        except BaseException:
            self.close()
            raise

    def _step(self) -> list[tuple[Key, Item | Exception | None]]:
        decoding = {key: run for key, run in self._running.items() if run.begun}
        prompts = [key for key in self._running if key not in decoding]
        if prompts and not any(run.awaited for run in decoding.values()):
            return self._advance(prompts[0])
        begin = time.perf_counter()
        runners = [run.engine.runner for run in decoding.values()]
        others = self._count_others()
        # A device may do in this pass what was launched in the step before.
        before = others if self.engines[0].on_cpu else self._others
        self._others = others
        waiting = [runner for runner in runners if runner.queued]
        shares = bool(waiting) and waiting[0].defers
        passes = run_together(waiting) if waiting else 0
        if shares and not waiting[0].defers:  # they take turns from now on
            self._regroup()
        items = [item for key in decoding for item in self._advance(key)]
        if self._count_others() > before:
            passes = 0  # to be timed: one capture takes as long as many, a showing as some
        self._company.end_passes(passes, 1e3 * (time.perf_counter() - begin))
        if not prompts:
            self._credit = 0.0
        else:
            now = time.perf_counter()
            self._credit += now - begin
            if self._credit > 0:
                items += self._advance(prompts[0])
                self._credit -= time.perf_counter() - now
        return items

    def _count_others(self) -> int:
        """Return how often there was something that takes time beside the passes."""
        return sum(engine.runner.captures + engine.shows for engine in self.engines)

    def _advance(self, key: Key) -> list[tuple[Key, Item | Exception | None]]:
        """Return the items that an answer yields until it waits."""
        items: list[tuple[Key, Item | Exception | None]] = []
        run = self._running[key]
        item: Item | None = None
        try:
            while item := next(run.items, None):
                items.append((key, item))
                run.begun = True
        except Exception as error:
            self.end(key)
            return [*items, (key, error)]
        if item is None:
            self.end(key)
            items.append((key, None))
        return items

    def end(self, key: Key) -> None:
        """End an answer; another one may begin in its place."""
        run = self._running.pop(key)
        run.engine.runner.waits = run.engine.runner.accompanied = False
        if run.engine.drafter is not None:
            run.engine.drafter.company = None
        run.items.close()
        self._regroup()

    def _regroup(self) -> None:
        """Let the drafters of several answers decide together, and that of one by itself."""
        for run in self._running.values():
            run.engine.runner.accompanied = len(self._running) > 1
        first = self.engines[0].drafter
        if first is None:
            return
        self._company.follow(first.policy)
        self._company.drafts_together = self.engines[0].backend.drafts_together(first)
        shares = len(self._running) > 1 and first.tuning is not None
        for run in self._running.values():
            drafter = run.engine.drafter
            if drafter is not None:
                drafter.policy = first.policy
                drafter.company = self._company if shares and run.engine.runner.defers else None

    def close(self) -> None:
        """End all answers."""
        for key in self.running:
            self.end(key)


def _no_room() -> NoRoomError:
    return NoRoomError("out of memory for the KV cache of another text: ask for fewer at once")


def _missing_bytes(engine: Engine, n_tokens: int) -> int:
    """Return the bytes by which an engine's caches still grow for a text of `n_tokens`."""
    # Where caches must not move, they have their full size from the beginning.
    slots = max(0, n_tokens - engine.cache.n_slots) if engine.on_cpu else 0
    return slots * engine.slot_bytes
