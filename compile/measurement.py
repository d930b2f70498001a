"""Times passes, drafting and whole cycles on the engine's own cache, in rows behind the text.

What is timed runs through the runner that will be used; no conversation is touched.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from fasteagle.compile.cpu_draft import NativeChain, look_up
from fasteagle.decoding.cycle import EAGER, Proposal, decode_cycle
from fasteagle.drafting.base import Drafter
from fasteagle.drafting.draft_head import HeadDrafter
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.drafting.fused import FusedDrafter
from fasteagle.drafting.ngram import NgramDrafter
from fasteagle.drafting.plan import ROWS, WIDTHS, Costs, Drafted
from fasteagle.drafting.sure_chain import LONGEST, Stopping
from fasteagle.generate import Engine
from fasteagle.options import SamplingParams
from fasteagle.sampling import DrawKind
from fasteagle.shapes import AnyShape, FusedShape, SureChain, TreeShape
from fasteagle.tree import chain

CONTEXT = 256  # committed tokens while measuring
FEWEST_ROUNDS, MOST_ROUNDS = 3, 9
SECONDS = 5.0  # after which no further round begins
CYCLES = 8  # whole ones of each shape
# Of cycles that draw; each counts where the measurement's kind has it.
USUAL = SamplingParams(1.0, top_k=20, top_p=0.9, min_p=0.05, repetition_penalty=1.1)

Gate = Callable[[], AbstractContextManager[Any]]


def widest(drafter: Drafter) -> int:
    """The largest top-k that a drafter can have."""
    return drafter.head.config.draft_vocab_size if isinstance(drafter, HeadDrafter) else 1


class Measurement:
    """Times passes and drafting in rounds, so that a machine that slows down slows them all."""

    def __init__(
        self,
        engine: Engine,
        drafter: Drafter | None,
        kind: DrawKind | None = None,
        gate: Gate = contextlib.nullcontext,
    ) -> None:
        self._engine, self._drafter, self._gate = engine, drafter, gate
        self._kind = kind or DrawKind()
        # Some room must be left for the rows behind the context.
        self._context = min(CONTEXT, engine.max_seq_len // 2)
        self._rows = [T for T in ROWS if self._context + T <= engine.max_seq_len]

    def run(self, seconds: float = SECONDS) -> Costs:
        """Medians over the rounds that fit into about `seconds`, three at least."""
        drafter = self._drafter
        if drafter is not None and isinstance(drafter.shape, SureChain):
            return self._run_chains(drafter, seconds)
        passes: dict[int, list[float]] = {T: [] for T in self._rows}
        looked_up: list[float] = []
        first: dict[int, list[float]] = {}
        level: dict[int, list[float]] = {}
        widths = [k for k in WIDTHS if drafter is not None and k <= widest(drafter)]
        begin = time.perf_counter()
        rounds = 0
        while rounds < FEWEST_ROUNDS or (
            rounds < MOST_ROUNDS and time.perf_counter() - begin < seconds
        ):
            rounds += 1
            if isinstance(drafter, FusedDrafter):
                looked_up.append(self.draft(FusedShape(0, 1, 8, 8)))
            for T, times in passes.items():
                times.append(self.verify(T))
            if drafter is None:
                continue
            for k in widths:
                one, three = (self.draft(self._small_tree(depth, k)) for depth in (1, 3))
                first.setdefault(k, []).append(one)
                level.setdefault(k, []).append(max(three - one, 0.0) / 2)
        share = self._compiled_share()
        lookup = _medians({0: looked_up}, share)[0] if looked_up else 0.0
        costs = Costs(
            _medians(passes), _medians(first, share), _medians(level, share), 0.0, 0.0, {}, lookup
        )
        self._engine.plain_rows = costs.plain_rows
        return self.with_others(costs, None if drafter is None else drafter.shape)

    def _run_chains(self, drafter: Drafter, seconds: float) -> Costs:
        """The same where chains are drafted by our kernels and no trees."""
        state, whole = self._engine.state, drafter.shape
        passes: dict[int, list[float]] = {T: [] for T in self._rows if whole.rows + 8 > T}
        chains: dict[int, list[float]] = {1: [], LONGEST: []}
        looked_up: list[float] = []
        begin = time.perf_counter()
        while len(passes[1]) <= MOST_ROUNDS or (
            len(passes[1]) < 5 * MOST_ROUNDS and time.perf_counter() - begin < seconds
        ):
            for T, times in passes.items():
                times.append(self.verify(T))
            for levels, times in chains.items():
                times.append(self._chain(drafter, levels))
            if isinstance(drafter, FusedDrafter | NgramDrafter):
                work = functools.partial(look_up, state, drafter, drafter.lookup_keep, whole.depth)
                looked_up.append(self._timed(work, whole))
        lookup = _medians({0: looked_up})[0] if looked_up else 0.0
        costs = Costs(_medians(passes), {}, {}, 0.0, 0.0, lookup=lookup, chain=_medians(chains))
        self._engine.plain_rows = costs.plain_rows
        return costs

    def _chain(self, drafter: Drafter, levels: int) -> float:
        """Milliseconds of the draft head's chain."""
        if not isinstance(drafter, EagleDrafter):
            return 0.0
        state, endless = self._engine.state, Stopping(0.0, 0.0)
        native = NativeChain(drafter.head)
        self.verify(1)  # see `draft`
        work = functools.partial(native.draft, state, drafter, 2, levels, endless)
        return self._timed(work, drafter.shape)

    def _small_tree(self, depth: int, k: int) -> Drafted:
        nodes = max(depth, min(k + (depth - 1) * k * k, 8))
        if isinstance(self._drafter, FusedDrafter):
            return FusedShape(depth, k, nodes, 8)
        return TreeShape(depth, k, nodes)

    def _compiled_share(self) -> float:
        """How long the compiled draft of the drafter's own tree takes, of the eager one's time."""
        drafter = self._drafter
        if drafter is None:
            return 1.0
        spec = self._engine.spec(drafter.shape, self._kind)
        if (drafter, spec) not in self._engine.runner.compiled:
            return 1.0
        eager, compiled = (
            statistics.median(self.draft(drafter.shape, eager) for _ in range(CYCLES))
            for eager in (True, False)
        )
        return min(1.0, compiled / eager)

    @torch.no_grad()
    def verify(self, T: int) -> float:
        """Milliseconds of a pass over T rows."""
        state, target = self._engine.state, self._engine.model
        tokens = torch.zeros(T, dtype=torch.long, device=self._engine.device)
        tree = chain(tokens, torch.ones_like(tokens).bool())
        proposal = Proposal.of(tree)
        return self._timed(lambda: self._engine.runner.usual.verify(state, target, proposal), None)

    @torch.no_grad()
    def draft(self, shape: AnyShape, eager: bool = True) -> float:
        """Milliseconds of drafting a tree."""
        engine, drafter = self._engine, self._drafter
        spec = engine.spec(shape, self._kind)
        pieces = EAGER if eager else engine.runner.compiled[drafter, spec]
        if not engine.runner.fixed_addresses:
            # As in a real cycle: the target's weights have pushed the head's out of the caches.
            self.verify(1)
        return self._timed(lambda: pieces.draft(engine.state, drafter, spec), shape)

    def with_others(self, costs: Costs, shape: AnyShape | None) -> Costs:
        """`costs` with what cycles take besides drafting and the pass."""
        return dataclasses.replace(costs, other=self._other(shape), plain_other=self._other(None))

    def cycles(self, shapes: Sequence[Drafted]) -> dict[Drafted, float]:
        """Median milliseconds of whole cycles, shapes in turn."""
        times: dict[Drafted, list[float]] = {shape: [] for shape in shapes}
        for _ in range(CYCLES + 1):
            for shape, found in times.items():
                found.append(self._cycle(shape)[0])
        return {shape: round(statistics.median(found[1:]), 4) for shape, found in times.items()}

    def _other(self, shape: AnyShape | None) -> float:
        """Milliseconds of a cycle that are neither drafting nor the pass."""
        return statistics.median(self._cycle(shape)[1] for _ in range(CYCLES))

    @torch.no_grad()
    def _cycle(self, shape: AnyShape | None) -> tuple[float, float]:
        """Milliseconds of one cycle, and of what is neither drafting nor the pass."""
        engine, drafter = self._engine, self._drafter
        spec = engine.spec(shape, self._kind)
        if not engine.runner.fixed_addresses:  # and so its parts are timed
            with self._gate(), self._unlearned():
                self._begin(shape)
                begin = time.perf_counter()
                engine.runner.launch(spec, drafter)
                done = engine.runner.read()
                total = 1e3 * (time.perf_counter() - begin)
            parts = 1e3 * ((done.draft_seconds or 0.0) + (done.verify_seconds or 0.0))
            return total, total - parts
        pieces = engine.runner.pieces(spec, drafter)
        work = functools.partial(decode_cycle, engine.state, engine.model, drafter, spec, pieces)
        total = self._timed(work, shape)
        eager = (drafter, spec) not in engine.runner.compiled
        parts = self.verify(spec.rows) + (0.0 if shape is None else self.draft(shape, eager))
        return total, max(0.0, total - parts)

    def _timed(self, work: Callable[[], object], shape: AnyShape | None) -> float:
        with self._gate(), self._unlearned():
            self._begin(shape)
            return self._engine.runner.timed(work, lambda: self._begin(shape))

    @contextlib.contextmanager
    def _unlearned(self) -> Iterator[None]:
        """What the drafter learns inside is forgotten: no text of anybody's is drafted."""
        learned = [] if self._drafter is None else self._drafter.advanced
        before = [tensor.clone() for tensor in learned]
        try:
            yield
        finally:
            for tensor, old in zip(learned, before, strict=True):
                tensor.copy_(old)

    def _begin(self, shape: AnyShape | None) -> None:
        """Stand behind the committed tokens, two pairs pending, the text a repetition."""
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
        state.knobs.load(USUAL)


def _medians(times: dict[int, list[float]], scale: float = 1.0) -> dict[int, float]:
    """Of each list; the first round also warms up and is left out."""
    return {
        key: round(scale * statistics.median(found[1:] or found), 4) for key, found in times.items()
    }
