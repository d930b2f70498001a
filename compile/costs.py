"""Measures what passes and drafting cost here, keeps the table, makes plans of it.

Measuring uses an engine of its own over the same weights: no conversation is touched. The table
belongs to one model, scheme, device and version; another one's is not used.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fasteagle import __version__
from fasteagle.device import device_name
from fasteagle.drafters import EagleDrafter, NgramDrafter
from fasteagle.drafting.plan import ROWS, WIDTHS, Costs, Plan, make_plan
from fasteagle.generate import Engine
from fasteagle.options import SamplingParams
from fasteagle.paths import write_atomic
from fasteagle.tree import TreeShape

CONTEXT = 256  # committed tokens while measuring
FEWEST_ROUNDS, MOST_ROUNDS = 3, 9
SECONDS = 5.0  # after which no further round begins
CYCLES = 12  # whole ones, to see what a cycle costs besides drafting and the pass
NGRAM_MS, TREE_MS = 0.3, 0.4  # a look into the context; the mask, the walk and the move of a tree

TunedDrafter = EagleDrafter | NgramDrafter


def conditions(engine: Engine) -> dict[str, Any]:
    """What the costs hold for."""
    return {
        "fasteagle": __version__,
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


def tunable(engine: Engine) -> TunedDrafter | None:
    """The engine's drafter if its tree may be tuned: not where sizes were asked for."""
    drafter = engine.drafter
    return drafter if isinstance(drafter, TunedDrafter) and drafter.tuning else None


def costs_of(
    engine: Engine,
    drafter: TunedDrafter,
    notify: Callable[[str], None],
    *,
    anew: bool = False,
    gate: Callable[[], None] = lambda: None,
) -> tuple[Costs, float]:
    """The kept costs, or new ones, which are kept; and the seconds that measuring took."""
    assert drafter.tuning is not None, "the caller asks only drafters that may be tuned"
    kept = None if anew else load_costs(drafter.tuning.path, engine, notify)
    if kept is not None:
        return kept, 0.0
    begin = time.perf_counter()
    costs = Measurement(engine, drafter, gate).run()
    seconds = time.perf_counter() - begin
    store_costs(drafter.tuning.path, engine, costs, seconds)
    return costs, seconds


def follow_costs(engine: Engine, drafter: TunedDrafter, costs: Costs) -> Plan:
    """Let the drafter and plain passes use what pays by these costs."""
    assert drafter.tuning is not None, "the caller asks only drafters that may be tuned"
    head_k = drafter.state.head.config.draft_vocab_size if isinstance(drafter, EagleDrafter) else 1
    plan = make_plan(costs, drafter.tuning.ranks, head_k)
    drafter.follow(plan)
    engine.plain_rows = costs.plain_rows
    return plan


def tune_now(
    engine: Engine, notify: Callable[[str], None], *, anew: bool = False
) -> tuple[Plan, float] | None:
    """Use the kept costs or measure them; the plan, and the seconds that measuring took.

    None where there is nothing to tune.
    """
    drafter = tunable(engine)
    if drafter is None:
        return None
    costs, seconds = costs_of(engine, drafter, notify, anew=anew)
    return follow_costs(engine, drafter, costs), seconds


class Measurement:
    """Times passes and drafting in rounds, so that a machine that slows down slows them all.

    `gate` is called between any two measurements and may wait, while an answer is being written.
    """

    def __init__(
        self, engine: Engine, drafter: TunedDrafter, gate: Callable[[], None] = lambda: None
    ) -> None:
        self._gate = gate
        self._engine = Engine(engine.model, engine.max_seq_len)
        self._drafter: EagleDrafter | None = None
        if isinstance(drafter, EagleDrafter):
            head = drafter.state.head
            self._drafter = EagleDrafter(head, TreeShape(1, 1, 1), engine.max_seq_len)
            self._widths = [k for k in WIDTHS if k <= head.config.draft_vocab_size]
            self._drafter.state.make_room(2 * max(self._widths))
        # Some room must be left for the rows behind the context.
        n = min(CONTEXT, engine.max_seq_len // 2)
        self._prompt = [i % engine.model.config.vocab_size for i in range(n)]
        self._rows = [T for T in ROWS if n + T <= engine.max_seq_len]

    @torch.no_grad()
    def run(self, seconds: float = SECONDS) -> Costs:
        """Medians over the rounds that fit into about `seconds`, three at least."""
        engine, drafter = self._engine, self._drafter
        engine.use(drafter)
        features, _ = engine.prefill(self._prompt)
        passes: dict[int, list[float]] = {T: [] for T in self._rows}
        first: dict[int, list[float]] = {}
        level: dict[int, list[float]] = {}
        begin, rounds = time.perf_counter(), 0
        while rounds < FEWEST_ROUNDS or (
            rounds < MOST_ROUNDS and time.perf_counter() - begin < seconds
        ):
            rounds += 1
            for T, times in passes.items():
                times.append(self._pass(T))
            if drafter is None:
                continue
            for k in self._widths:
                one, three = (self._draft(drafter, features, depth, k) for depth in (1, 3))
                first.setdefault(k, []).append(one)
                level.setdefault(k, []).append(max(three - one, 0.0) / 2)
        if drafter is None:
            first, level = {1: [NGRAM_MS]}, {1: [0.0]}
        costs = Costs(_medians(passes), _medians(first), _medians(level), 0.0, 0.0)
        engine.plain_rows = costs.plain_rows
        plain_rest = self._rest(None)
        rest = plain_rest + TREE_MS if drafter is None else self._rest(drafter)
        return dataclasses.replace(costs, rest=rest, plain_rest=plain_rest)

    def _timed(self, work: Callable[[], object]) -> float:
        """Milliseconds."""
        self._gate()
        begin = self._engine.now()
        work()
        return 1e3 * (self._engine.now() - begin)

    def _pass(self, T: int) -> float:
        tokens = torch.zeros(T, dtype=torch.long, device=self._engine.device)
        mask = torch.eye(T, dtype=torch.bool, device=self._engine.device)
        return self._timed(lambda: self._engine.verify(tokens, tokens, mask))

    def _draft(self, drafter: EagleDrafter, features: torch.Tensor, depth: int, k: int) -> float:
        """Two pairs through the head, then `depth` levels of `k` nodes."""
        drafter.shape = TreeShape(depth, k, max(depth, min(k + (depth - 1) * k * k, 8)))
        device = self._engine.device
        root = torch.zeros(1, dtype=torch.long, device=device)
        pairs = features.expand(2, -1)
        drafter.rewind(len(self._prompt) - 2)

        def work() -> None:
            drafter.extend(root.expand(2), pairs, 2)
            drafter.propose(root, [])

        # As in a real cycle: the target's weights have pushed the head's out of the caches.
        self._pass(1)
        return self._timed(work)

    def _rest(self, drafter: EagleDrafter | None) -> float:
        """Milliseconds of a whole cycle that are neither drafting nor the pass."""
        engine = self._engine
        engine.use(drafter)
        if drafter is not None:
            drafter.shape = TreeShape(2, 3, 5)
        found = []
        cycles = engine.generate(self._prompt, SamplingParams(), CYCLES)
        before = 0.0
        for i, _ in enumerate(cycles):
            stats = engine.stats
            rest = stats.decode_seconds - stats.draft_seconds - stats.verify_seconds
            if i:
                found.append(1e3 * (rest - before))
            before = rest
            self._gate()
        return statistics.median(found) if found else 0.0


def _medians(times: dict[int, list[float]]) -> dict[int, float]:
    """Of each list; the first round also warms up and is left out."""
    return {key: round(statistics.median(found[1:] or found), 4) for key, found in times.items()}
