"""Measures what passes, drafting and cycles cost here, keeps the table, makes plans of it.

Everything is timed through the runner that will be used and on the engine's own cache, in rows
behind the committed ones, which are free: no conversation is touched. The table belongs to one
model, scheme, drafter, device and version; another one's is not used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fasteagle import __version__
from fasteagle.compile.cycles import CycleCompiler
from fasteagle.compile.measurement import Gate, Measurement, widest
from fasteagle.device import device_name
from fasteagle.drafting.base import Drafter
from fasteagle.drafting.fused import FusedDrafter
from fasteagle.drafting.fused_plan import make_fused_plan
from fasteagle.drafting.plan import AnyPlan, Costs, make_plan
from fasteagle.drafting.sure_chain import ChainPlan
from fasteagle.generate import Engine
from fasteagle.paths import write_atomic
from fasteagle.sampling import DrawKind
from fasteagle.shapes import SureChain

TABLE = 4  # of what a kept table holds; another number's is not used


def conditions(engine: Engine) -> dict[str, Any]:
    """What the costs hold for: the engine with its drafter, here."""
    drafter = tunable(engine)
    assert drafter is not None and drafter.tuning is not None, "costs are kept for such drafters"
    return {
        "fasteagle": __version__,
        "table": TABLE,
        "torch": torch.__version__,
        "device": device_name(engine.device),
        "threads": torch.get_num_threads() if engine.on_cpu else None,
        "dtype": str(engine.dtype).removeprefix("torch."),
        "kv": str(engine.cache.rows.dtype).removeprefix("torch."),
        "shape": type(drafter.shape).__name__,
        "head": drafter.tuning.head,
        "corpus": drafter.tuning.corpus,
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
        costs = Costs.from_json(raw["costs"])
        is_chain = mine["shape"] == SureChain.__name__
        if not (costs.chain if is_chain else costs.first_level and costs.level):
            raise ValueError("no times of drafting")
        return costs
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
    kind = kind or DrawKind()
    measurement = Measurement(engine, drafter, kind, gate)
    costs = measurement.run() if kept is None else kept
    plan = plan_of(drafter, costs)
    if compiled and plan.shapes:
        compiler = CycleCompiler(engine, kind, plan.shapes)
        compiler.compile()
        with gate():
            compiler.apply()

    def as_drawn(costs: Costs) -> Costs:
        """What is kept is of greedy answers."""
        if not isinstance(plan, ChainPlan) or kind == DrawKind():
            return costs
        return measurement.with_others(costs, plan.shape)

    if kept is not None:
        return as_drawn(kept), 0.0
    if isinstance(plan, ChainPlan):
        costs = Measurement(engine, drafter, DrawKind(), gate).with_others(costs, plan.shape)
    elif plan.shapes:
        # An estimate chose these; from here on only what was measured counts.
        costs = dataclasses.replace(costs, cycles=measurement.cycles(plan.shapes))
    seconds = time.perf_counter() - begin
    store_costs(drafter.tuning.path, engine, costs, seconds)
    return as_drawn(costs), seconds


def plan_of(drafter: Drafter, costs: Costs) -> AnyPlan:
    """What pays by these costs."""
    assert drafter.tuning is not None, "the caller asks only drafters that may be tuned"
    if isinstance(drafter.shape, SureChain):
        return ChainPlan(costs, drafter.tuning.ranks, drafter.shape)
    if isinstance(drafter, FusedDrafter):
        return make_fused_plan(costs, drafter.tuning.ranks, widest(drafter))
    return make_plan(costs, drafter.tuning.ranks, widest(drafter))


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
