"""Time passes, drafting and whole cycles on the engine's own cache, in rows after the text.

The timed work runs through the runner that will be used; no conversation is touched.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from fasteagle.compile.cpu_draft import NativeChain, Text, look_up
from fasteagle.decoding.cycle import EAGER, decode_cycle
from fasteagle.decoding.launch import variant_of
from fasteagle.drafting.base import Drafter
from fasteagle.drafting.costs import ROWS, WIDTHS, Costs
from fasteagle.drafting.draft_head import HeadDrafter
from fasteagle.drafting.eagle import UNGATED, EagleDrafter
from fasteagle.drafting.thresholds import LONGEST
from fasteagle.generate import Engine
from fasteagle.sampling import SamplingMode
from fasteagle.shapes import AnyShape, FusedShape, GatedChain, TreeShape, head_pool
from fasteagle.tree import Proposal, chain

CONTEXT = 256  # committed tokens while measuring
FEWEST_ROUNDS, MOST_ROUNDS = 1, 3
BLOCK, WARM = 8, 3  # consecutive runs, of which the first are not counted
SECONDS = 5.0  # after which no further round begins
CYCLES = 8  # whole cycles to time

Gate = Callable[[], AbstractContextManager[Any]]


def context_of(max_seq_len: int) -> int:
    """Return the number of committed tokens while measuring: some room is for the rows after."""
    return min(CONTEXT, max_seq_len // 2)


def timed_rows(max_seq_len: int) -> list[int]:
    """Return the numbers of rows that are timed: not all of `ROWS` if fewer than 64 tokens fit."""
    return [T for T in ROWS if context_of(max_seq_len) + T <= max_seq_len]


def widest(drafter: Drafter) -> int:
    """Return the largest top-k that a drafter can have."""
    return drafter.head.config.draft_vocab_size if isinstance(drafter, HeadDrafter) else 1


class Measurement:
    """Measurement of passes and drafting in rounds: a slower machine affects all of them alike.

    The policy later corrects all costs by the times of real cycles.
    """

    def __init__(
        self, engine: Engine, drafter: Drafter | None, gate: Gate = contextlib.nullcontext
    ) -> None:
        self._engine, self._drafter, self._gate = engine, drafter, gate
        self._kind = SamplingMode()
        self._context = context_of(engine.max_seq_len)
        self._rows = timed_rows(engine.max_seq_len)

    def run(self, seconds: float = SECONDS) -> Costs:
        """Return medians over the rounds that fit into about `seconds`, at least one round.

        Each work is timed several times in a row: a pass of few rows costs more after a pass of
        many rows than after a pass of few rows, because the clocks follow the load.
        """
        works = self._works()
        times: dict[str, dict[int, list[float]]] = {
            name: {size: [] for size in sizes} for name, sizes in works.items()
        }
        # A replayed graph is timed several times by itself.
        block, warm = (1, 0) if self._engine.runner.fixed_addresses else (BLOCK, WARM)
        begin, rounds = time.perf_counter(), 0
        while rounds < FEWEST_ROUNDS or (
            rounds < MOST_ROUNDS and time.perf_counter() - begin < seconds
        ):
            rounds += 1
            for name, sizes in works.items():
                for size, work in sizes.items():
                    times[name][size] += [work() for _ in range(block)][warm:]
        share = self._compiled_share()
        passes, chain = _medians(times["passes"]), _medians(times["chain"])
        one, three = _medians(times["one"], share), _medians(times["three"], share)
        level = {k: max(three[k] - one[k], 0.0) / 2 for k in one}
        lookup = _medians(times["lookup"]).get(0, 0.0)
        shape = None if self._drafter is None else self._drafter.shape
        other, plain_other = (round(self._other(each), 4) for each in (shape, None))
        return Costs(passes, one, level, other, plain_other, lookup, chain)

    def _works(self) -> dict[str, dict[int, Callable[[], float]]]:
        """Return the work to time, by table and size: trees of 1 and 3 levels, or gated chains."""
        drafter, work = self._drafter, functools.partial
        works: dict[str, dict[int, Callable[[], float]]] = {
            "passes": {T: work(self.verify, T) for T in self._rows},
            "one": {},
            "three": {},
            "chain": {},
            "lookup": {},
        }
        if drafter is None:
            return works
        has_head = isinstance(drafter, HeadDrafter)
        if isinstance(drafter.shape, GatedChain):
            works["chain"] = {levels: work(self._chain, levels) for levels in (1, LONGEST)}
            if drafter.lookup is not None:
                works["lookup"] = {0: self._look_up}
            return works
        if drafter.lookup is not None:
            alone = FusedShape(0, 1, 8, 8) if has_head else drafter.shape
            works["lookup"] = {0: work(self.draft, alone)}
        if has_head:
            widths = [k for k in WIDTHS if k <= widest(drafter)]
            for name, depth in (("one", 1), ("three", 3)):
                works[name] = {k: work(self.draft, self._small_tree(depth, k)) for k in widths}
        return works

    def _chain(self, levels: int) -> float:
        """Return the milliseconds of a chain of `levels` tokens by the draft head, 0 without."""
        engine, drafter = self._engine, self._drafter
        if not isinstance(drafter, EagleDrafter):
            return 0.0
        shape = GatedChain(levels)
        spec = engine.spec(shape, self._kind)
        if not engine.backend.drafts(drafter, spec):
            return self.draft(shape)
        native = NativeChain(drafter.head)
        self.verify(1)  # see `draft`
        text = Text(engine.state, drafter, spec)
        work = functools.partial(native.draft, [text], levels, UNGATED)
        return self._timed(work, drafter.shape)

    def _look_up(self) -> float:
        """Return the milliseconds of a lookup by our kernels."""
        drafter = self._drafter
        assert drafter is not None, "it looks up"
        work = functools.partial(look_up, self._engine.state, drafter, drafter.shape.depth)
        return self._timed(work, drafter.shape)

    def _small_tree(self, depth: int, k: int) -> AnyShape:
        nodes = max(depth, min(head_pool(k, depth), 8))
        if self._drafter is not None and self._drafter.lookup is not None:
            return FusedShape(depth, k, nodes, 8)
        return TreeShape(depth, k, nodes)

    def _compiled_share(self) -> float:
        """Return compiled over eager drafting time for the drafter's own tree, at most 1."""
        drafter = self._drafter
        if drafter is None or isinstance(drafter.shape, GatedChain):  # chains run by the kernels
            return 1.0
        spec = self._engine.spec(drafter.shape, self._kind)
        if variant_of(drafter, spec) not in self._engine.runner.compiled:
            return 1.0
        eager, compiled = (
            statistics.median(self.draft(drafter.shape, eager) for _ in range(CYCLES))
            for eager in (True, False)
        )
        return min(1.0, compiled / eager)

    @torch.no_grad()
    def verify(self, T: int) -> float:
        """Return the milliseconds of a pass over T rows."""
        state, target = self._engine.state, self._engine.target
        tokens = torch.tensor(self._tokens(T), device=self._engine.device)
        tree = chain(tokens, torch.ones_like(tokens).bool())
        proposal = Proposal.of(tree)
        return self._timed(lambda: self._engine.runner.usual.verify(state, target, proposal), None)

    def _tokens(self, T: int) -> list[int]:
        """Return T different tokens: those of the committed text, then from all the vocabulary.

        Equal rows would share their experts, and be less work for some other models too.
        """
        vocab_size = self._engine.target.config.vocab_size
        spread = range(1, vocab_size, max(1, vocab_size // (2 * ROWS[-1])))
        tokens = list(dict.fromkeys((*self._engine.cached, *spread)))
        return [tokens[i % len(tokens)] for i in range(T)]

    @torch.no_grad()
    def draft(self, shape: AnyShape, eager: bool = True) -> float:
        """Return the milliseconds of drafting a tree."""
        engine, drafter = self._engine, self._drafter
        spec = engine.spec(shape, self._kind)
        pieces = EAGER if eager else engine.runner.compiled[variant_of(drafter, spec)]
        if not engine.runner.fixed_addresses:
            # As in a real cycle, the target's weights push the draft head's out of the CPU cache.
            self.verify(1)
        return self._timed(lambda: pieces.draft(engine.state, drafter, spec), shape)

    def _other(self, shape: AnyShape | None) -> float:
        """Return the median milliseconds of a cycle that are neither drafting nor the pass."""
        return statistics.median(self._cycle(shape)[1] for _ in range(CYCLES))

    @torch.no_grad()
    def _cycle(self, shape: AnyShape | None) -> tuple[float, float]:
        """Return the milliseconds of one cycle, and of all but drafting and the pass."""
        engine, drafter = self._engine, self._drafter
        spec = engine.spec(shape, self._kind)
        if not engine.runner.fixed_addresses:  # such runners time the parts
            with self._gate(), self._unlearned():
                self._begin(shape)
                begin = time.perf_counter()
                engine.runner.launch(spec, drafter)
                done = engine.runner.read()
                total = 1e3 * (time.perf_counter() - begin)
            parts = 1e3 * ((done.draft_seconds or 0.0) + (done.verify_seconds or 0.0))
            return total, total - parts
        pieces = engine.runner.pieces(spec, drafter)
        work = functools.partial(decode_cycle, engine.state, engine.target, drafter, spec, pieces)
        total = self._timed(work, shape)
        eager = variant_of(drafter, spec) not in engine.runner.compiled
        parts = self.verify(spec.rows) + (0.0 if shape is None else self.draft(shape, eager))
        return total, max(0.0, total - parts)

    def _timed(self, work: Callable[[], object], shape: AnyShape | None) -> float:
        with self._gate(), self._unlearned():
            self._begin(shape)
            return self._engine.runner.timed(work, lambda: self._begin(shape))

    @contextlib.contextmanager
    def _unlearned(self) -> Iterator[None]:
        """Restore the drafter's learned state on exit, since no real text is drafted inside."""
        learned = [] if self._drafter is None else self._drafter.advanced
        before = [tensor.clone() for tensor in learned]
        try:
            yield
        finally:
            for tensor, old in zip(learned, before, strict=True):
                tensor.copy_(old)

    def _begin(self, shape: AnyShape | None) -> None:
        """Set the state to follow the committed tokens, with two pending pairs, in a repetition."""
        engine, state = self._engine, self._engine.state
        if len(engine.cached) + 1 + max(self._rows) > engine.max_seq_len:
            engine.restart()
        seq_len = max(len(engine.cached) + 1, self._context)
        depth, topk = (1, 1) if shape is None else (shape.depth, shape.topk or 8)
        engine.reserve(seq_len, max(self._rows), 2 + depth * topk)
        state.seq_len.fill_(seq_len)
        state.count.fill_(min(2, 1 + (0 if shape is None else shape.depth)))
        state.root.zero_()
        state.tokens.zero_()
        state.text[max(0, seq_len - 32) : seq_len + 1] = 0


def _medians(times: dict[int, list[float]], scale: float = 1.0) -> dict[int, float]:
    return {size: round(scale * statistics.median(each), 4) for size, each in times.items()}
