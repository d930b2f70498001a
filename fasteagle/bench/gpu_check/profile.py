"""Stage `profile`: what one replayed cycle of 7B int4 consists of, on the device's own clock.

The profiler records every kernel with its begin and end: their number is that of the graph's nodes,
what lies between them is idle time.
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

from fasteagle.bench.gpu_check.models import (
    compile_pieces,
    eager_engine,
    opened,
    replaying_engine,
    runtime,
    use_tree,
)
from fasteagle.bench.gpu_check.stage import Context
from fasteagle.generate import Engine
from fasteagle.options import SamplingParams

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
    prepared = opened(context, "llama2-7b").prepared(runtime(context, "int4"), lambda line: None)
    engine = replaying_engine(context, prepared)
    context.say(f"{prepared}")
    n = FEW_CYCLES if context.dry_run else CYCLES
    for way in ("plain", "eagle"):
        with context.part(way):
            if way == "eagle":
                use_tree(engine, prepared)
            with context.part(f"{way}: compiled pieces"):
                context.save(**{f"{way}_compiled_pieces": compile_pieces(context, engine)})
            eager = eager_engine(engine)
            eager.use(engine.drafter)
            times = {"eager": cycle_ms(eager, n), "captured": cycle_ms(engine, n)}
            if engine.runner.error:
                context.found["problems"].append(f"{way}: not captured: {engine.runner.error}")
            found = {**times, **described(profiled(engine, n), n)}
            context.save(**{way: found})
            tell(context, way, found)


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


def tell(context: Context, way: str, found: dict[str, Any]) -> None:
    idle = "unknown" if found["idle"] is None else f"{found['idle']:.1%}"
    context.say(
        f"{way}: {found['captured']:.2f} ms a cycle captured, {found['eager']:.2f} eager; "
        f"{found['nodes']:.0f} nodes, {found['busy_ms']:.2f} ms busy, idle {idle}"
    )
    rows = [
        [k["name"], f"{k['calls']:g}", f"{k['us']:.1f}", f"{k['us_each']:.2f}"]
        for k in found["kernels"][:SHOWN]
    ]
    columns = ["kernel", "a cycle", "us a cycle", "us each"]
    context.table(f"Kernels of a cycle, {way}, 7B int4", columns, rows)
