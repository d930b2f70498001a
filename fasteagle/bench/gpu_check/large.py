"""Stage `large`: 33B and 70B at int4, where they fit; if need be with a KV cache in 8 bits.

Captured passes of the target over few rows and many first, then rows of the report.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from fasteagle.bench.gpu_check import asked
from fasteagle.bench.gpu_check.models import (
    compile_pieces,
    fitting_kv,
    opened,
    replaying_engine,
    runtime,
)
from fasteagle.bench.gpu_check.speed import TAU, USUAL, measure_rows
from fasteagle.bench.gpu_check.stage import Context, require
from fasteagle.bench.measure import copy_bandwidth
from fasteagle.bench.roofline import Storage
from fasteagle.bench.row_spec import chain_shape
from fasteagle.compile.ahead import compile_ahead
from fasteagle.compile.cuda_blocks import is_fused
from fasteagle.compile.graphs import CapturedRunner
from fasteagle.compile.int8_cache import cache_bytes
from fasteagle.compile.measurement import CONTEXT, Measurement
from fasteagle.device import give_back
from fasteagle.generate import Engine
from fasteagle.loading.open import OpenedModel
from fasteagle.quant.scheme import int4_for
from fasteagle.sampling import DrawKind

MODELS = ("vicuna-33b", "llama2-70b")
ROWS = ("plain", USUAL, "eagle@6/5/31")
CONTEXT_TOKENS = 2048
PASSES = (1, 16, 32)  # rows
ROUNDS = 6  # the first one warms up
COLUMNS = ("rows", "ms", "of one row's", "GB/s", "share of the copy bandwidth")


def run(context: Context) -> None:
    copied = copy_bandwidth(context.device, 2**24 if context.dry_run else 2**30)
    give_back()
    context.save(copy_gb_s=round(copied, 1))
    context.say(f"a copy on the device: {copied:.0f} GB/s, read and written")
    for name in MODELS:
        model = opened(context, name)
        kv = fitting_kv(context, model, CONTEXT_TOKENS)
        if kv is None:
            continue
        title = f"{name} int4" + (", kv int8" if kv == "int8" else "")
        with context.part(f"{title}: captured passes"):
            show_passes(context, title, captured_passes(context, model, kv), model, kv, copied)
        give_back()
        measure_rows(context, model, "int4", ROWS, title, kv)
        if name == asked.MODEL and title in context.found:
            with context.part(f"{title}: what is asked"):
                judge_rows(context, title, context.found[title]["rows"], copied)


def captured_passes(context: Context, model: OpenedModel, kv: str) -> dict[int, float]:
    """Median milliseconds of a replayed pass of the target over each of `PASSES` rows, in turn."""
    options = dataclasses.replace(runtime(context, "int4", CONTEXT_TOKENS), kv=kv)
    engine = replaying_engine(context, model.prepared(options, lambda line: None))
    require(isinstance(engine.runner, CapturedRunner), "passes are not captured here")
    if not is_fused(engine.model):
        compile_pieces(context, engine)
    specs = [engine.spec(chain_shape(T - 1), DrawKind()) for T in PASSES if T > 1]
    compile_ahead(engine.model, None, specs, engine.state)
    return timed_passes(engine)


def timed_passes(engine: Engine) -> dict[int, float]:
    """Milliseconds by rows."""
    measurement = Measurement(engine, None)
    times: dict[int, list[float]] = {T: [] for T in PASSES}
    for _ in range(ROUNDS):
        for T, found in times.items():
            found.append(measurement.verify(T))
    return {T: round(statistics.median(found[1:]), 4) for T, found in times.items()}


def show_passes(
    context: Context,
    title: str,
    passes: dict[int, float],
    model: OpenedModel,
    kv: str,
    copied: float,
) -> None:
    """A table of the passes; at the shape that is asked about, the ratios beside it."""
    config = model.checkpoint.config
    n_bytes = Storage.of(int4_for(config)).pass_bytes(config) + cache_bytes(config, CONTEXT, 2, kv)
    gb_s = {T: n_bytes / ms / 1e6 for T, ms in passes.items()}
    ratios = {T: ms / passes[1] for T, ms in passes.items()}
    found = [{"rows": T, "ms": ms, "ratio": round(ratios[T], 4)} for T, ms in passes.items()]
    context.save(**{f"{title}, passes": found})
    cells = [
        [T, f"{ms:.3f}", f"{ratios[T]:.3f}", f"{gb_s[T]:.0f}", f"{gb_s[T] / copied:.1%}"]
        for T, ms in passes.items()
    ]
    context.table(f"Captured passes of {title}, {CONTEXT} positions in the cache", COLUMNS, cells)
    if model.name == asked.MODEL:
        asked.judge(context, title, {asked.VERIFY[T]: ratios[T] for T in asked.VERIFY})


def judge_rows(context: Context, title: str, rows: Sequence[dict[str, Any]], copied: float) -> None:
    """Plain decoding's share of the copy bandwidth, host included, and eagle's gain over it."""
    by_name = {row["name"]: row for row in rows}
    sheet = context.found[title]["meta"]["bandwidth"]["gb_s"]  # what MBU is a share of
    eagle = by_name[USUAL]
    require(eagle["simulated_tau"] == TAU, "eagle rows are simulated at that tau")
    figures = {
        asked.PLAIN: by_name["plain"]["mbu"] * sheet / copied,
        asked.EAGLE: eagle["speedup_vs_plain"],
    }
    asked.judge(context, title, figures)
