"""Measure the costs of passes and drafting, store them, and make a policy of them.

Everything is timed through the runner that will be used and on the engine's own cache, in the free
rows after the committed ones: no conversation is touched. A stored table is used only with the
model, scheme, drafter, device and version that it was measured with.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable
from typing import Any

import torch

from fasteagle import __version__
from fasteagle.compile.cycles import CycleCompiler
from fasteagle.compile.measurement import Gate, Measurement, timed_rows, widest
from fasteagle.device import device_name
from fasteagle.drafting.base import Drafter, Tuning
from fasteagle.drafting.costs import Costs
from fasteagle.drafting.ladder import ladder
from fasteagle.drafting.policy import Policy
from fasteagle.errors import note
from fasteagle.generate import Engine
from fasteagle.paths import keep
from fasteagle.sampling import SamplingMode
from fasteagle.shapes import AnyShape, GatedChain

TABLE = 5  # version of the stored table; other versions are ignored
# What gated chains cost on CPUs, about, in plain passes: to begin with where nothing is measured.
USUAL = Costs(
    {1: 1.0, 2: 1.15, 4: 1.5, 8: 2.2, 16: 3.6, 32: 6.5},
    {},
    {},
    other=0.03,
    plain_other=0.02,
    lookup=0.01,
    chain={1: 0.1, 8: 0.45},
)


def tuning_of(drafter: Drafter) -> Tuning:
    """Return the tuning of a drafter that has one; see `tunable`."""
    assert drafter.tuning is not None, "costs are measured and stored for such drafters only"
    return drafter.tuning


def conditions(engine: Engine, drafter: Drafter) -> dict[str, Any]:
    """Return the conditions of the costs: this engine, a drafter, its device and versions."""
    tuning = tuning_of(drafter)
    return {
        "fasteagle": __version__,
        "table": TABLE,
        "torch": torch.__version__,
        "device": device_name(engine.device),
        "threads": torch.get_num_threads() if engine.on_cpu else None,
        "dtype": str(engine.dtype).removeprefix("torch."),
        "kv": str(engine.cache.rows.dtype).removeprefix("torch."),
        "rows": timed_rows(engine.max_seq_len)[-1],
        "shape": type(drafter.shape).__name__,
        "head": tuning.head,
        "corpus": tuning.corpus,
    }


def load_costs(engine: Engine, drafter: Drafter, notify: Callable[[str], None]) -> Costs | None:
    """Return the costs stored for these conditions, or None; report a table that does not fit."""
    path = tuning_of(drafter).path
    try:
        raw = json.loads(path.read_text("utf-8"))
        stored, mine = raw["conditions"], conditions(engine, drafter)
        changed = [f"{k} {stored.get(k)}, now {mine[k]}" for k in mine if stored.get(k) != mine[k]]
        if changed:
            notify(f"tuner: costs kept for another setting ({'; '.join(changed)}) are ignored")
            return None
        costs = Costs.from_json(raw["costs"])
        is_chain = mine["shape"] == GatedChain.__name__
        if is_chain and not costs.chain:
            raise ValueError("no times of drafting")
        return costs
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        notify(f"tuner: {path} cannot be used ({error or type(error).__name__}) and is ignored")
        return None


def store_costs(
    engine: Engine,
    drafter: Drafter,
    costs: Costs,
    seconds: float,
    notify: Callable[[str], None] = note,
) -> None:
    """Store costs for these conditions; report where the disk takes none, for they serve now."""
    content = {
        "conditions": conditions(engine, drafter),
        "costs": dataclasses.asdict(costs),
        "seconds": round(seconds, 2),
    }
    keep(tuning_of(drafter).path, content, "costs serve this start only", notify)


def tunable(engine: Engine) -> Drafter | None:
    """Return the engine's drafter if its tree may be tuned, which fixed sizes forbid, else None."""
    drafter = engine.drafter
    return None if drafter is None or drafter.tuning is None else drafter


def costs_of(
    engine: Engine,
    drafter: Drafter,
    notify: Callable[[str], None],
    kind: SamplingMode | None = None,
    *,
    anew: bool = False,
    gate: Gate = contextlib.nullcontext,
    compiled: bool = False,
) -> tuple[Costs, float]:
    """Return the stored costs, else measure and store them; and the seconds of measuring.

    With `compiled`, drafting is compiled on a CPU for every tree that the policy may choose, for
    answers sampled as `kind` says. `gate` is entered for each measurement and may wait.
    """
    costs = None if anew else load_costs(engine, drafter, notify)
    begin, seconds = time.perf_counter(), 0.0
    if costs is None:
        costs = Measurement(engine, drafter, gate=gate).run()
        seconds = time.perf_counter() - begin
        store_costs(engine, drafter, costs, seconds, notify)
    if compiled:
        compiler = CycleCompiler(engine, kind or SamplingMode(), sizes_of(drafter, costs))
        compiler.compile()
        with gate():
            compiler.apply()
    return costs, seconds


def sizes_of(drafter: Drafter, costs: Costs) -> list[AnyShape]:
    """Return the shapes that the policy may choose for `drafter`."""
    ranks, has_head = tuning_of(drafter).ranks, drafter.reads_features
    return ladder(costs, ranks, drafter.shape, widest(drafter) if has_head else 0)


def follow_costs(drafter: Drafter, costs: Costs) -> Policy:
    """Give the drafter a policy by these costs."""
    policy = Policy(
        costs,
        tuning_of(drafter).ranks,
        sizes_of(drafter, costs),
        head=drafter.reads_features,
        lookup=drafter.lookup is not None,
    )
    drafter.policy = policy
    return policy


def tune_now(
    engine: Engine,
    notify: Callable[[str], None],
    kind: SamplingMode | None = None,
    *,
    compiled: bool = False,
) -> tuple[Policy, float] | None:
    """Tune by stored or new costs; return the policy and the seconds of measuring.

    Returns None if there is nothing to tune.
    """
    drafter = tunable(engine)
    if drafter is None:
        return None
    costs, seconds = costs_of(engine, drafter, notify, kind, compiled=compiled)
    return follow_costs(drafter, costs), seconds


def begin_policy(engine: Engine) -> None:
    """Let a policy decide on gated chains before anything is measured, by stored or usual costs.

    Such chains wait for no compiler. The times of the cycles soon correct what is not true here.
    """
    drafter = tunable(engine)
    if drafter is None or not isinstance(drafter.shape, GatedChain):
        return
    costs = load_costs(engine, drafter, lambda line: None)  # the tuner reports
    if costs is None:
        measurement = Measurement(engine, drafter)
        measurement.verify(1)  # which may read the weights from the disk
        costs = USUAL.scaled(measurement.verify(1))
    follow_costs(drafter, costs)
