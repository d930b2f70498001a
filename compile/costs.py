"""Measures what passes, drafting and cycles cost here, keeps the table, makes plans of it.

Everything is timed through the runner that will be used and on the engine's own cache, in rows
behind the committed ones, which are free: no conversation is touched. The table belongs to one
model, scheme, device and version; another one's is not used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from fasteagle import __version__
from fasteagle.compile.cycles import CycleCompiler
from fasteagle.cycle import EAGER, Proposal, decode_cycle
from fasteagle.device import device_name
from fasteagle.drafting.base import Drafter
from fasteagle.drafting.draft_head import HeadDrafter
from fasteagle.drafting.fused import FusedDrafter
from fasteagle.drafting.fused_plan import make_fused_plan
from fasteagle.drafting.plan import ROWS, WIDTHS, AnyPlan, Costs, Drafted, make_plan
from fasteagle.generate import Engine
from fasteagle.paths import write_atomic
from fasteagle.sampling import DrawKind
from fasteagle.shapes import AnyShape, FusedShape, TreeShape
from fasteagle.tree import chain

TABLE = 2  # of what a kept table holds; another number's is not used
CONTEXT = 256  # committed tokens while measuring
FEWEST_ROUNDS, MOST_ROUNDS = 3, 9
SECONDS = 5.0  # after which no further round begins
CYCLES = 8  # whole ones of each shape

Gate = Callable[[], AbstractContextManager[Any]]


def conditions(engine: Engine) -> dict[str, Any]:
    """What the costs hold for."""
    return {
        "fasteagle": __version__,
        "table": TABLE,
        "torch": torch.__version__,
        "device": device_name(engine.device),
        "threads": torch.get_num_threads() if engine.on_cpu else None,
        "dtype": str(engine.dtype).removeprefix("torch."),
    }


def load_costs(path: Path, engine: Engine, notify: Callable[[str], None]) -> Costs | None:
    """The table kept for these conditions; None, with a line where there is another one."""
    try:
        raw = json.loads(path.read_text("utf-8"))
        found, mine = raw["conditions"], conditions(engine)
        changed = [f"{k} {found.get(k)}, now {mine[k]}" for k in mine if found.get(k) != mine[k]]
        if changed:
            notify(f"tuner: costs kept for another setting ({'; '.join(changed)}) are ignored")
            return None
        return Costs.from_json(raw["costs"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        notify(f"tuner: {path} cannot be used ({error or type(error).__name__}) and is ignored")
        return None


def store_costs(path: Path, engine: Engine, costs: Costs, seconds: float) -> None:
    content = {
        "conditions": conditions(engine),
        "costs": costs.as_json(),
        "seconds": round(seconds, 2),
    }
    write_atomic(path, (json.dumps(content, indent=1) + "\n").encode())


def tunable(engine: Engine) -> Drafter | None:
    """The engine's drafter if its tree may be tuned: not where sizes were asked for."""
    drafter = engine.drafter
    return None if drafter is None or drafter.tuning is None else drafter


def costs_of(
    engine: Engine,
    drafter: Drafter,
    notify: Callable[[str], None],
    kind: DrawKind | None = None,
    *,
    anew: bool = False,
    gate: Gate = contextlib.nullcontext,
    compiled: bool = False,
) -> tuple[Costs, float]:
    """The kept costs, or new ones, which are kept; and the seconds that measuring took.

    With `compiled` the drafting of every tree that may be used is compiled on a CPU, for answers
    drawn as `kind` says. `gate` is entered for each measurement and may wait.
    """
    assert drafter.tuning is not None, "the caller asks only drafters that may be tuned"
    kept = None if anew else load_costs(drafter.tuning.path, engine, notify)
    begin = time.perf_counter()
    measurement = Measurement(engine, drafter, kind or DrawKind(), gate)
    costs = measurement.run() if kept is None else kept
    plan = plan_of(drafter, costs)
    if compiled and plan.shapes:
        compiler = CycleCompiler(engine, kind, plan.shapes)
        compiler.compile()
        with gate():
            compiler.apply()
    if kept is not None:
        return kept, 0.0
    if plan.shapes:
        # An estimate chose these; from here on only what was measured counts.
        costs = dataclasses.replace(costs, cycles=measurement.cycles(plan.shapes))
    seconds = time.perf_counter() - begin
    store_costs(drafter.tuning.path, engine, costs, seconds)
    return costs, seconds


def plan_of(drafter: Drafter, costs: Costs) -> AnyPlan:
    """What pays by these costs."""
    assert drafter.tuning is not None, "the caller asks only drafters that may be tuned"
    if isinstance(drafter, FusedDrafter):
        return make_fused_plan(costs, drafter.tuning.ranks, widest(drafter))
    return make_plan(costs, drafter.tuning.ranks, widest(drafter))


def widest(drafter: Drafter) -> int:
    """The largest top-k that a drafter can have."""
    return drafter.head.config.draft_vocab_size if isinstance(drafter, HeadDrafter) else 1


def follow_costs(engine: Engine, drafter: Drafter, costs: Costs) -> AnyPlan:
    """Let the drafter and plain passes use what pays by these costs."""
    plan = plan_of(drafter, costs)
    drafter.follow(plan)
    engine.plain_rows = costs.plain_rows
    return plan


def tune_now(
    engine: Engine,
    notify: Callable[[str], None],
    kind: DrawKind | None = None,
    *,
    anew: bool = False,
    compiled: bool = False,
) -> tuple[AnyPlan, float] | None:
    """Use the kept costs or measure them; the plan, and the seconds that measuring took.

    None where there is nothing to tune.
    """
    drafter = tunable(engine)
    if drafter is None:
        return None
    costs, seconds = costs_of(engine, drafter, notify, kind, anew=anew, compiled=compiled)
    return follow_costs(engine, drafter, costs), seconds


def choose_plain_rows(
    engine: Engine,
    budget: float = 0.5,
    gate: Gate = contextlib.nullcontext,
    clock: Callable[[], float] = time.perf_counter,
) -> int:
    """1 or 2, whichever makes a target pass faster here (some bf16 CPU kernels prefer two rows).

    Times both in turn for about `budget` seconds.
    """
    if not engine.on_cpu or engine.runner.fixed_addresses:
        return 1
    measurement = Measurement(engine, None, gate=gate)
    times: dict[int, list[float]] = {1: [], 2: []}
    begin = clock()
    while len(times[2]) < 4 or clock() - begin < budget:
        for T in (1, 2):
            times[T].append(measurement.verify(T))
    return min(times, key=lambda T: statistics.median(times[T][1:]))  # the first one warms up


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
        plain_other = self._other(None)
        other = plain_other if drafter is None else self._other(drafter.shape)
        return dataclasses.replace(costs, other=other, plain_other=plain_other)

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
        return self._timed(lambda: EAGER.verify(state, target, proposal), None)

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
        total = self._timed(lambda: decode_cycle(engine.state, engine.model, drafter, spec), shape)
        parts = self.verify(spec.rows) + (0.0 if shape is None else self.draft(shape))
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
        state.knobs.temperature.fill_(1.0)


def _medians(times: dict[int, list[float]], scale: float = 1.0) -> dict[int, float]:
    """Of each list; the first round also warms up and is left out."""
    return {
        key: round(scale * statistics.median(found[1:] or found), 4) for key, found in times.items()
    }
