"""Stage `kernels`: every linear of 7B and 70B alone, by kernel, accumulator and number of rows.

Measured by `scripts/bench_kernels.py`; beside it what `quant.tiling` predicts for a card of this
bandwidth, number of multiprocessors and rate of products.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
import time
from types import ModuleType
from typing import Any

import torch

from fasteagle.bench.gpu_check.gpu_tests import checkout
from fasteagle.bench.gpu_check.stage import Context
from fasteagle.bench.linear_cases import compile_ahead, variants
from fasteagle.bench.measure import copy_bandwidth, matmul_rate
from fasteagle.device import accumulate_on
from fasteagle.quant.planes import layout_for
from fasteagle.quant.tiling import Card, microseconds, tiling

MODELS = ("llama2-7b", "llama2-70b")
ROWS = (1, 2, 4, 8, 16, 32, 64)
OURS = ("int4-g128", "int4-g128-offsets", "int8")
ACCUMULATED = (*((kernel, "fp32") for kernel in OURS), *((kernel, "fp16") for kernel in OURS))
OTHERS = (("torchao-g128", "-"), ("fp16", "-"))
REPEATS = 10
TINY = 256  # outputs and inputs of a linear on a dry run


def run(context: Context) -> None:
    bench = bench_kernels()
    device = context.device
    bandwidth = copy_bandwidth(device, 2**24 if context.dry_run else 2**30)
    tflops = None if context.dry_run else matmul_rate(torch.float16, device)
    card = card_of(device, bandwidth, tflops)
    cards = card, launched_card(device)
    context.save(copy_gb_s=bandwidth, fp16_tflops=tflops, card=dataclasses.asdict(card))
    if not context.dry_run:
        with context.part("compiling ahead"):
            compile_kernels(context, bench)
    timings: list[dict[str, Any]] = []
    # tinygemm has no kernel for a CPU.
    kernels = (*ACCUMULATED, *(OTHERS[1:] if context.dry_run else OTHERS))
    for model in MODELS:
        for linear, N, K in bench.fused_linears(model):
            N, K = (TINY, TINY) if context.dry_run else (N, K)
            for kernel, accumulate in kernels:
                about = {"model": model, "linear": linear, "N": N, "K": K, "kernel": kernel}
                with context.part(f"{model} {linear} {kernel} {accumulate}"):
                    asked = "fp32" if accumulate == "-" else accumulate
                    for rows, us, gb_s in bench.measure(
                        kernel, N, K, list(ROWS), asked, REPEATS, device.type
                    ):
                        found = {
                            "us": us,
                            "gb_s": gb_s,
                            "share": gb_s / bandwidth,
                            "limit_us": limit_us(N, K, rows, us * gb_s, bandwidth, tflops),
                            "predicted_us": predicted_us(kernel, N, K, rows, asked, *cards),
                        }
                        rounded = {k: None if v is None else round(v, 3) for k, v in found.items()}
                        timings.append(about | {"accumulate": accumulate, "rows": rows} | rounded)
            context.save(timings=timings)
            show(context, timings)


def compile_kernels(context: Context, bench: ModuleType) -> None:
    """Compile what will be measured, several at a time: one after the other takes a minute."""
    begin = time.perf_counter()
    shapes = [(N, K) for model in MODELS for _, N, K in bench.fused_linears(model)]
    sums = sorted({accumulate for _, accumulate in ACCUMULATED})
    with context.device:
        found = variants(shapes, OURS, sums, ROWS)
    workers = compile_ahead(found, context.device)
    seconds = time.perf_counter() - begin
    context.save(compiled_variants=len(found), compile_s=round(seconds, 1))
    context.say(f"{len(found)} kernels compiled in {seconds:.0f} s, {workers} at a time")


def card_of(device: torch.device, bandwidth: float, tflops: float | None) -> Card:
    """This card as the kernels' own model takes it, by what was measured; a 3090 on a dry run."""
    if device.type == "cpu" or tflops is None:
        return Card.like_3090(82)
    properties = torch.cuda.get_device_properties(device)
    # Not every torch that we run on has it.
    ghz = properties.clock_rate / 1e6 if hasattr(properties, "clock_rate") else Card.ghz
    macs = int(1e12 * tflops / (2e9 * ghz * properties.multi_processor_count))
    twice = 2 if accumulate_on(device) == "fp16" else 1
    return Card(
        properties.multi_processor_count,
        bandwidth,
        ghz,
        reach=1.0,  # it was measured
        macs_fp32=macs,
        macs_fp16=twice * macs,
    )


def launched_card(device: torch.device) -> Card | None:
    """This card as the kernels take it when they choose a tiling; None on a dry run."""
    if device.type == "cpu":
        return None
    found = torch.cuda.get_device_properties(device)
    return Card.of(found.multi_processor_count, (found.major, found.minor))


def predicted_us(
    kernel: str,
    N: int,
    K: int,
    rows: int,
    accumulate: str,
    card: Card,
    launched: Card | None = None,
) -> float | None:
    """What `quant.tiling` predicts of one of our kernels; None for the others.

    `launched`: what the kernels choose their tiling by, if it is not `card`.
    """
    if kernel not in OURS:
        return None
    layout = layout_for(8, K, K) if kernel == "int8" else layout_for(4, 128, K)
    cut = tiling(layout, N, K, rows, launched or card)
    return microseconds(cut, layout, N, K, rows, card, fp16=accumulate == "fp16")


def bench_kernels() -> ModuleType:
    """The script as a module."""
    folder = str(checkout() / "scripts")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module("bench_kernels")


def limit_us(
    N: int, K: int, rows: int, kilobytes: float, gb_s: float, tflops: float | None
) -> float:
    """Microseconds that a product takes at least: the longer of reading and of multiplying."""
    reading = kilobytes / gb_s
    # 16 rows at a time is what the tensor cores' instructions take.
    multiplying = 0.0 if tflops is None else 2 * N * K * max(rows, 16) / tflops / 1e6
    return max(reading, multiplying)


def show(context: Context, timings: list[dict[str, Any]]) -> None:
    """A line for every linear and kernel, a column for every number of rows."""
    lines: dict[tuple[str, ...], dict[int, str]] = {}
    for t in timings:
        key = (t["model"], t["linear"], f"{t['N']}x{t['K']}", t["kernel"], t["accumulate"])
        expected = t["limit_us"] if t["predicted_us"] is None else t["predicted_us"]
        cell = f"{t['us']:.1f} / {expected:.1f} ({t['share']:.0%})"
        lines.setdefault(key, {})[t["rows"]] = cell
    head = ["model", "linear", "NxK", "kernel", "sums", *(f"T={rows}" for rows in ROWS)]
    rows = [[*key, *(cells.get(count) for count in ROWS)] for key, cells in lines.items()]
    title = "Microseconds measured / predicted (of others: at least), share of the copy bandwidth"
    context.table(title, head, rows)
