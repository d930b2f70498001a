"""Profile decode cycles on the device's own clock: kernels, idle time, captured passes.

    python scripts/profile_cycle.py --model llama2-7b
    python scripts/profile_cycle.py --model vicuna-33b --passes 1,16,32 --json profile.json

Weights are random, in the shape of a registry model. torch's profiler records every kernel with its
begin and end, which stretches both: the share of idle time is computed from the time of a cycle
without it. `--passes` times target passes over so many rows, captured where cycles are captured.
"""

from __future__ import annotations

import re
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import torch

from fasteagle.bench.measure import copy_bandwidth
from fasteagle.bench.roofline import Storage
from fasteagle.bench.row_spec import RowSpec
from fasteagle.bench.simulate import dummy_drafter
from fasteagle.cli.command import Numbers, Script
from fasteagle.cli.options import RESULT
from fasteagle.compile.blocks import compile_now
from fasteagle.compile.int8_cache import cache_bytes
from fasteagle.compile.measurement import CONTEXT, Measurement
from fasteagle.decoding.context import MAX_TREE_ROWS
from fasteagle.generate import Engine
from fasteagle.loading.open import PreparedModel, open_dummy
from fasteagle.options import DraftOptions, RuntimeOptions, SamplingParams
from fasteagle.paths import write_json
from fasteagle.tables import print_table

PROMPT = list(range(5, 261))
WARM_UP = 4  # cycles
ROUNDS = 6  # of passes; the first one warms up
SHOWN = 25  # kernels, the longest first

Event = tuple[str, float, float]  # a kernel, copy or fill: name, begin and end in microseconds


@click.command(cls=Script, help=__doc__)
@click.option("--model", default="llama2-7b", show_default=True, help="Registry name.")
@click.option("--precision", default="int4", show_default=True)
@click.option("--kv", default="auto", show_default=True, help="KV cache: auto or int8.")
@click.option("--device", default="cuda", show_default=True)
@click.option("--tree", default="5/4/15", show_default=True, help="DEPTH/TOPK/NODES.")
@click.option(
    "--passes",
    default="1,16,32",
    show_default=True,
    type=Numbers(1, MAX_TREE_ROWS),
    help="Rows per pass.",
)
@click.option(
    "--cycles", default=16, show_default=True, type=click.IntRange(1), help="Cycles to profile."
)
@click.option("--compile/--no-compile", "compile_", default=True, show_default=True)
@click.option("--json", "json_path", type=RESULT)
def main(
    model: str,
    precision: str,
    kv: str,
    device: str,
    tree: str,
    passes: tuple[int, ...],
    cycles: int,
    compile_: bool,
    json_path: Path | None,
) -> None:
    draft = RowSpec.parse(f"eagle@{tree}").draft_options(DraftOptions())
    where = RuntimeOptions(device=device, max_seq_len=1024, kv=kv, cpu_kernels="aten")
    prepared = open_dummy(model).prepared(where.at(precision))
    engine = prepared.engine()
    record: dict[str, Any] = {"model": model, "precision": precision, "kv": kv}
    record["passes"] = timed_passes(engine, prepared, sorted({1, *passes}))
    for way in ("plain", "eagle"):
        if way == "eagle":
            engine.use(dummy_drafter(model, engine, prepared.checkpoint, draft))
        if compile_:
            compile_now(engine)
        record[way] = described(profiled(engine, cycles), cycles, cycle_ms(engine, cycles))
        show(f"{model} {precision}, {way}", record[way], engine.runner.error)
    if json_path:
        write_json(json_path, record)


def timed_passes(
    engine: Engine, prepared: PreparedModel, counts: Sequence[int]
) -> list[dict[str, float]]:
    """Print and return median milliseconds of a target pass over each number of rows, in turn."""
    config, kv = prepared.checkpoint.config, prepared.options.kv
    size = engine.dtype.itemsize
    weights = Storage(prepared.scheme, size).pass_bytes(config)
    n_bytes = weights + cache_bytes(config, CONTEXT, size, kv)
    copied = copy_bandwidth(engine.device, 2**24 if engine.on_cpu else 2**30)
    measurement = Measurement(engine, None)
    rounds = [[measurement.verify(T) for T in counts] for _ in range(ROUNDS)][1:]
    times = [statistics.median(column) for column in zip(*rounds, strict=True)]
    passes = [
        {"rows": T, "ms": ms, "ratio": ms / times[0], "copy_share": n_bytes / ms / 1e6 / copied}
        for T, ms in zip(counts, times, strict=True)
    ]
    cells = [
        (f"{p['rows']}", f"{p['ms']:.3f}", f"{p['ratio']:.3f}", f"{p['copy_share']:.1%}")
        for p in passes
    ]
    print_table(("rows", "ms", "of one row's", "share of the copy bandwidth"), cells, md=True)
    where = f"{CONTEXT} positions in the cache"
    print(f"target passes, {where}, a copy reads and writes {copied:.0f} GB/s\n")
    return passes


def started(engine: Engine) -> Any:
    """Return the cycles of an answer, the first ones run."""
    engine.restart()
    cycles = engine.generate(PROMPT, SamplingParams(), 10_000)
    for _ in range(WARM_UP):
        next(cycles)
    return cycles


def cycle_ms(engine: Engine, n: int) -> float:
    """Return the median milliseconds of a cycle, host included."""
    cycles, times = started(engine), []
    for _ in range(n):
        begin = time.perf_counter()
        next(cycles)
        times.append(1e3 * (time.perf_counter() - begin))
    cycles.close()
    return statistics.median(times)


def profiled(engine: Engine, n: int) -> list[Event]:
    """Return the kernels of `n` cycles; on a CPU the operations of torch."""
    from torch.profiler import ProfilerActivity, profile  # takes a second

    cycles = started(engine)
    activity = ProfilerActivity.CPU if engine.on_cpu else ProfilerActivity.CUDA
    with profile(activities=[activity]) as recorded:
        for _ in range(n):
            next(cycles)
        if not engine.on_cpu:
            torch.cuda.synchronize(engine.device)
    cycles.close()
    return [
        (event.name, event.time_range.start, event.time_range.end)
        for event in recorded.events()
        if engine.on_cpu or "CUDA" in str(event.device_type)
    ]


def described(events: Sequence[Event], cycles: int, ms: float) -> dict[str, Any]:
    """Return nodes, busy ms, idle share and kernels of a cycle that takes `ms` unprofiled."""
    by_name: dict[str, list[float]] = defaultdict(list)
    busy, last = 0.0, float("-inf")
    for name, begin, end in sorted(events, key=lambda event: event[1]):
        by_name[short(name)].append(end - begin)
        busy += max(0.0, end - max(last, begin))
        last = max(last, end)
    busy_ms = busy / cycles / 1e3
    kernels = [
        {"name": name, "calls": len(times) / cycles, "us": sum(times) / cycles}
        for name, times in by_name.items()
    ]
    return {
        "ms": ms,
        "nodes": len(events) / cycles,
        "busy_ms": busy_ms,
        "idle": max(0.0, 1 - busy_ms / ms) if events else None,
        "kernels": sorted(kernels, key=lambda kernel: -float(kernel["us"])),
    }


def short(name: str) -> str:
    """Return a kernel's name without its return type and template arguments."""
    name = re.sub(r"^(void|static)\s+", "", name)
    return re.split(r"[<(]", name, maxsplit=1)[0][:80] or name[:80]


def show(title: str, cycle: dict[str, Any], error: str | None) -> None:
    cells = [
        (k["name"], f"{k['calls']:g}", f"{k['us']:.1f}", f"{k['us'] / k['calls']:.2f}")
        for k in cycle["kernels"][:SHOWN]
    ]
    print_table(("kernel", "a cycle", "us a cycle", "us each"), cells, md=True)
    idle = "unknown" if cycle["idle"] is None else f"{cycle['idle']:.1%}"
    print(
        f"{title}: {cycle['ms']:.2f} ms a cycle, {cycle['nodes']:.0f} nodes, "
        f"{cycle['busy_ms']:.2f} ms busy, idle {idle}"
        + (f"; not captured: {error}" if error else "")
        + "\n"
    )


if __name__ == "__main__":
    main()
