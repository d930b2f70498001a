"""Times of one quantized linear at a time on a CUDA device, as shares of its copy bandwidth.

    python scripts/bench_kernels.py
    python scripts/bench_kernels.py --model llama2-7b --linears down --kernels int4-g128,fp16 --md

Weights come from memory, not from the cache: a measurement cycles through copies that together are
larger than the cache. One CUDA graph holds many calls, so that launches cost what they cost when
decoding. Our kernels leave the sums of their splits along K to the next kernel, as in a decoder
block. Bytes counted are those of the weight, x and y; the bandwidth is that of a copy on the device
in the same run, read and written bytes together. Beside our kernels stands what `quant.tiling`
predicts for this card. `--device cpu` shows that all of this runs, and says nothing about speed.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from fasteagle.bench.linear_cases import DENSE, OURS, TORCHAO, make_case
from fasteagle.bench.measure import copy_bandwidth
from fasteagle.cli.command import Names, Numbers, Script
from fasteagle.cli.options import RESULT
from fasteagle.errors import FasteagleError, first_line
from fasteagle.loading.registry import preset
from fasteagle.paths import write_json
from fasteagle.quant.interleaved import layout_for
from fasteagle.quant.kernels import card_of
from fasteagle.quant.tiling import Card, microseconds, tiling
from fasteagle.tables import print_table

LINEARS = ("qkv", "out", "gate_up", "down", "lm_head")
KERNELS = (*OURS, DENSE, TORCHAO)
CALLS = 40  # in a graph, at least


@click.command(cls=Script, help=__doc__)
@click.option(
    "--model",
    "models",
    default="llama2-7b,llama2-13b,llama2-70b",
    show_default=True,
    type=Names(),
    help="Comma list of registry names; only their shapes are used.",
)
@click.option("--linears", default=",".join(LINEARS), show_default=True, type=Names(LINEARS))
@click.option(
    "--kernels",
    default=",".join(KERNELS),
    show_default=True,
    type=Names(KERNELS),
    help="fp16 is cuBLAS, torchao is left out where it is missing.",
)
@click.option(
    "--rows",
    "counts",
    default="1,2,4,8,16,32,64",
    show_default=True,
    type=Numbers(least=1),
    help="Comma list of numbers of rows of the input.",
)
@click.option(
    "--accumulate",
    type=click.Choice(["fp32", "fp16"]),
    default="fp32",
    show_default=True,
    help="Precision of sums within a group, in our kernels.",
)
@click.option(
    "--repeats", default=20, show_default=True, type=click.IntRange(1), help="Timed runs of each."
)
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--json", "json_path", type=RESULT, help="Write the full record here.")
@click.option("--md", is_flag=True, help="Print the table in Markdown.")
def main(
    models: tuple[str, ...],
    linears: tuple[str, ...],
    kernels: tuple[str, ...],
    counts: tuple[int, ...],
    accumulate: str,
    repeats: int,
    device: str,
    json_path: Path | None,
    md: bool,
) -> None:
    meta = conditions(accumulate, device)
    card = card_of(torch.device(device))
    bandwidth = meta["copy_gb_s"] = copy_bandwidth(torch.device(device))
    timings: list[dict[str, Any]] = []
    failures = []
    shapes = [(m, *shape) for m in models for shape in fused_linears(m)]
    chosen = [shape for shape in shapes if shape[1] in linears]
    for (name, linear, N, K), kernel in itertools.product(chosen, kernels):
        try:
            measured = measure(kernel, N, K, counts, accumulate, repeats, device)
        except (FasteagleError, RuntimeError) as error:  # the others are measured all the same
            failures.append(f"{name} {linear} {kernel}: {first_line(error)}")
            continue
        of = {"model": name, "linear": linear, "N": N, "K": K, "kernel": kernel}
        for count, us, gb_s in measured:
            speed = {"microseconds": us, "gb_s": gb_s, "share": gb_s / bandwidth}
            predicted = predicted_us(kernel, N, K, count, accumulate, card)
            timings.append({**of, "rows": count, **speed, "predicted_us": predicted})
        if json_path:
            record = {"meta": meta, "timings": timings}
            write_json(json_path, record)
    print("per number of rows M: microseconds (predicted), GB/s, share of the copy bandwidth\n")
    print_table(*table(timings), md=md)
    print(", ".join(f"{key} {value}" for key, value in meta.items()))
    if failures:
        raise FasteagleError("; ".join(failures))


def fused_linears(name: str) -> list[tuple[str, int, int]]:
    """Return (linear, outputs, inputs) of a block and the LM head, q/k/v and gate/up in one."""
    c = preset(name)
    return [
        ("qkv", c.qkv_dim, c.dim),
        ("out", c.dim, c.n_head * c.head_dim),
        ("gate_up", 2 * c.ffn_dim, c.dim),
        ("down", c.dim, c.ffn_dim),
        ("lm_head", c.vocab_size, c.dim),
    ]


def measure(
    kernel: str, N: int, K: int, counts: Sequence[int], accumulate: str, repeats: int, device: str
) -> list[tuple[int, float, float]]:
    """Return (rows, microseconds, GB/s) of one kernel; nothing where its library is missing.

    Raises `FasteagleError` where our kernel's result is wrong. On the CPU, where the op has its
    reference, this only shows that all of it runs.
    """
    with torch.device(device):
        case = make_case(kernel, N, K, accumulate)
    if case is None:
        return []
    inputs = [case.rows(count, device) for count in counts]
    on_cpu = device == "cpu"
    if not on_cpu:
        case.compile_for(inputs)
    timings = []
    for count, x in zip(counts, inputs, strict=True):
        n_bytes = case.n_bytes + x.nbytes + count * N * case.check(x).element_size()
        us = _time_on_cpu(case.calls[0], x) if on_cpu else _time_cold(case.calls, x, repeats)
        timings.append((count, us, n_bytes / us / 1e3))
    return timings


def _time_cold(calls: Sequence[Callable[[Tensor], Tensor]], x: Tensor, repeats: int) -> float:
    """Return the median microseconds of a call, when no weight is in the cache."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call(x)  # compiles, and lets libraries select kernels before the capture
    torch.cuda.current_stream().wait_stream(side)
    rounds = -(-CALLS // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call(x)
    return statistics.median(_elapsed(graph.replay, repeats)) * 1e3 / (rounds * len(calls))


def _time_on_cpu(call: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """Return the microseconds of one call, whose weight may be in the cache."""
    begin = time.perf_counter()
    call(x)
    return 1e6 * (time.perf_counter() - begin)


def _elapsed(run: Callable[[], object], repeats: int) -> list[float]:
    """Return the milliseconds of every repeat, after three warm-up runs."""
    times = []
    for repeat in range(3 + repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        if repeat >= 3:
            times.append(start.elapsed_time(end))
    return times


def predicted_us(
    kernel: str, N: int, K: int, rows: int, accumulate: str, card: Card
) -> float | None:
    """Return the microseconds that `quant.tiling` predicts; None where the kernel is not ours."""
    if kernel not in OURS:
        return None
    bits, group = (8, K) if kernel == "int8" else (4, int(kernel.split("-")[1][1:]))
    layout = layout_for(bits, group, K)
    cut = tiling(layout, N, K, rows, card)
    return microseconds(cut, layout, N, K, rows, card, fp16=accumulate == "fp16")


def table(timings: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return headings, and a line for every linear and kernel, with a column for every M."""
    counts = sorted({timing["rows"] for timing in timings})
    lines: dict[tuple[str, ...], dict[int, str]] = {}
    for t in timings:
        key = (t["model"], t["linear"], f"{t['N']}x{t['K']}", t["kernel"])
        predicted = "" if t["predicted_us"] is None else f" ({t['predicted_us']:.1f})"
        cell = f"{t['microseconds']:.1f}{predicted} {t['gb_s']:.0f} {t['share']:.0%}"
        lines.setdefault(key, {})[t["rows"]] = cell
    headings = ["model", "linear", "NxK", "kernel", *(f"M={count}" for count in counts)]
    return headings, [[*key, *(row.get(M, "") for M in counts)] for key, row in lines.items()]


def conditions(accumulate: str, device: str) -> dict[str, Any]:
    """Return the conditions of the measurement; raise `FasteagleError` without a CUDA device."""
    command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    if device == "cpu":
        return {"device": "CPU", "torch": torch.__version__, "command": command}
    if not torch.cuda.is_available():
        raise FasteagleError("this times CUDA kernels and there is no CUDA device: run it on one")
    import triton  # exists where CUDA does

    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "l2_mb": properties.L2_cache_size / 1e6,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "accumulate": accumulate,
        "command": command,
    }


if __name__ == "__main__":
    main()
