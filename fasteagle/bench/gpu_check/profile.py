"""Stage `profile`: what replayed cycles of 33B and 7B int4 consist of, on the device's own clock.

The profiler records every kernel with its begin and end: their number is that of the graph's nodes,
what lies between them is idle time. It stretches both, so that gaps are also computed from the time
of a cycle without it.
"""

from __future__ import annotations

import dataclasses
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from fasteagle.bench.gpu_check import asked
from fasteagle.bench.gpu_check.models import (
    compile_pieces,
    eager_engine,
    fitting_kv,
    opened,
    replaying_engine,
    runtime,
    use_tree,
)
from fasteagle.bench.gpu_check.stage import Context
from fasteagle.device import give_back
from fasteagle.generate import Engine
from fasteagle.loading.open import OpenedModel
from fasteagle.options import SamplingParams

MODELS = ("vicuna-33b", "llama2-7b")  # the largest first, where memory is whole
CONTEXT_TOKENS = 1024
CYCLES = 16  # profiled, and timed
FEW_CYCLES = 2  # on a dry run: the profiler of a CPU is slow
SHOWN = 25  # kernels, the longest first
PROMPT = 256  # tokens
GREEDY = SamplingParams()


@dataclasses.dataclass(frozen=True)
class Event:
    """One kernel, copy or fill on the device. Times in microseconds."""

    name: str
    begin: float
    end: float


def run(context: Context) -> None:
    for name in MODELS:
        model = opened(context, name)
        kv = fitting_kv(context, model, CONTEXT_TOKENS)
        if kv is not None:
            with context.part(name):
                profile_model(context, model, kv)
            give_back()


def profile_model(context: Context, model: OpenedModel, kv: str) -> None:
    """Plain cycles and drafting ones of one model."""
    options = dataclasses.replace(runtime(context, "int4", CONTEXT_TOKENS), kv=kv)
    prepared = model.prepared(options, lambda line: None)
    engine = replaying_engine(context, prepared)
    context.say(f"{prepared}" + (", kv int8" if kv == "int8" else ""))
    n = FEW_CYCLES if context.dry_run else CYCLES
    for way in ("plain", "eagle"):
        title = f"{model.name} int4, {way}"
        with context.part(title):
            if way == "eagle":
                use_tree(engine, prepared)
            found: dict[str, Any] = {}
            with context.part(f"{title}: compiled pieces"):
                found["compiled_pieces"] = compile_pieces(context, engine)
            eager = eager_engine(engine)
            eager.use(engine.drafter)
            found |= {"eager": cycle_ms(eager, n), "captured": cycle_ms(engine, n)}
            if engine.runner.error:
                context.found["problems"].append(f"{title}: not captured: {engine.runner.error}")
            found |= described(profiled(engine, n), n)
            found["gaps"] = gaps(found["busy_ms"], found["captured"])
            context.save(**{title: found})
            tell(context, title, found)
            if model.name == asked.MODEL and found["gaps"] is not None:
                figure = dataclasses.replace(asked.GAPS, what=f"gaps of a cycle, {way}")
                asked.judge(context, f"{model.name} int4", {figure: found["gaps"]})


def gaps(busy_ms: float, captured_ms: float) -> float | None:
    """The share of a replayed cycle in which the device does nothing; None: unknown.

    The cycle is timed without the profiler, under which the time between nodes is longer. Small
    nodes themselves are longer under it, too: it is rather a little more than this.
    """
    return round(max(0.0, 1 - busy_ms / captured_ms), 4) if busy_ms and captured_ms else None


def cycle_ms(engine: Engine, n: int) -> float:
    """Median milliseconds of a cycle, host included."""
    engine.restart()
    cycles = engine.generate(list(range(5, 5 + PROMPT)), GREEDY, 10_000)
    times = []
    for i in range(n + 4):
        begin = time.perf_counter()
        next(cycles)
        if i >= 4:  # the first token, and what warms up
            times.append(1e3 * (time.perf_counter() - begin))
    cycles.close()
    return round(statistics.median(times), 4)


def profiled(engine: Engine, n: int) -> list[Event]:
    """What the device did in `n` cycles; on a CPU the operations of torch."""
    from torch.profiler import ProfilerActivity, profile  # takes a second

    on_cpu = engine.on_cpu
    engine.restart()
    cycles = engine.generate(list(range(5, 5 + PROMPT)), GREEDY, 10_000)
    for _ in range(4):
        next(cycles)
    activity = ProfilerActivity.CPU if on_cpu else ProfilerActivity.CUDA
    with profile(activities=[activity]) as recorded:
        for _ in range(n):
            next(cycles)
        if not on_cpu:
            torch.cuda.synchronize(engine.device)
    cycles.close()
    return [
        Event(event.name, event.time_range.start, event.time_range.end)
        for event in recorded.events()
        if on_cpu or "CUDA" in str(event.device_type)
    ]


def described(events: Sequence[Event], cycles: int) -> dict[str, Any]:
    """Nodes of a cycle, its share of idle time, and its kernels by name, the longest first."""
    if not events:
        return {"nodes": 0.0, "busy_ms": 0.0, "idle": None, "kernels": []}
    by_name: dict[str, list[float]] = defaultdict(list)
    for event in events:
        by_name[short(event.name)].append(event.end - event.begin)
    span = max(event.end for event in events) - min(event.begin for event in events)
    busy = covered(events)
    kernels = [
        {
            "name": name,
            "calls": round(len(times) / cycles, 2),
            "us": round(sum(times) / cycles, 2),
            "us_each": round(statistics.mean(times), 2),
        }
        for name, times in by_name.items()
    ]
    return {
        "nodes": round(len(events) / cycles, 1),
        "busy_ms": round(busy / cycles / 1e3, 4),
        "idle": round(1 - busy / span, 4) if span else None,
        "kernels": sorted(kernels, key=lambda kernel: -float(kernel["us"])),
    }


def covered(events: Sequence[Event]) -> float:
    """Microseconds in which at least one of `events` was under way."""
    total, end = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event.begin):
        total += max(0.0, event.end - max(end, event.begin))
        end = max(end, event.end)
    return total


def short(name: str) -> str:
    """A kernel's name without its template arguments and return type."""
    name = re.sub(r"^(void|static)\s+", "", name)
    return re.split(r"[<(]", name, maxsplit=1)[0][:80] or name[:80]


def tell(context: Context, title: str, found: dict[str, Any]) -> None:
    def percent(share: float | None) -> str:
        return "unknown" if share is None else f"{share:.1%}"

    context.say(
        f"{title}: {found['captured']:.2f} ms a cycle captured, {found['eager']:.2f} eager; "
        f"{found['nodes']:.0f} nodes, {found['busy_ms']:.2f} ms busy, idle "
        f"{percent(found['gaps'])} of the captured time, {percent(found['idle'])} under the "
        f"profiler"
    )
    rows = [
        [k["name"], f"{k['calls']:g}", f"{k['us']:.1f}", f"{k['us_each']:.2f}"]
        for k in found["kernels"][:SHOWN]
    ]
    columns = ["kernel", "a cycle", "us a cycle", "us each"]
    context.table(f"Kernels of a cycle, {title}", columns, rows)
