"""Stage `speed`: rows of the report at 7B and three precisions, and gpt-fast's way beside them.

Weights are random: cycle times are measured, tau is given (`simulate_tau`), and what follows from
it is marked.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from fasteagle.bench.gpu_check.models import opened, runtime
from fasteagle.bench.gpu_check.stage import Context
from fasteagle.bench.report import COLUMNS, build_report, conditions, table_rows
from fasteagle.bench.run import BenchOptions
from fasteagle.bench.run import run as measure
from fasteagle.loading.open import OpenedModel
from fasteagle.prompts import Question
from fasteagle.shapes import TreeShape

TAU = 3.6  # of EAGLE on MT-bench, about
TREES = tuple(
    TreeShape(*sizes) for sizes in ((3, 1, 3), (4, 3, 7), (5, 4, 15), (5, 4, 23), (6, 5, 31))
)
QUESTION = Question(("Explain how a tree of guesses is checked in one pass. " * 8,))
NEW_TOKENS = 128
EAGLE = tuple(f"eagle@{t.depth}/{t.topk}/{t.nodes}" for t in TREES)
USUAL = "eagle@5/4/15"
FUSED = "fused@5/4/15/8"  # the same tree with looked-up tokens in it: what the lookup costs
PRECISIONS = ("int4", "int8", "bf16")


def run(context: Context) -> None:
    opened_7b = opened(context, "llama2-7b")
    others = tuple(row for row in EAGLE if row != USUAL)
    # What is compared with comes first: trees are compiled one by one, and time may run out.
    for precision, rows, kv in (
        ("bf16", ("hf",), "auto"),
        ("int4", ("plain", "gpt-fast"), "auto"),
        *((precision, ("plain", USUAL), "auto") for precision in PRECISIONS),
        ("int4", ("plain", FUSED), "auto"),
        ("int4", ("plain", USUAL), "int8"),
        *((precision, ("plain", *others), "auto") for precision in PRECISIONS),
    ):
        title = f"7B {precision}: {rows[-1]}" + (", kv int8" if kv == "int8" else "")
        measure_rows(context, opened_7b, precision, rows, title, kv)


def measure_rows(
    context: Context,
    model: OpenedModel,
    precision: str,
    rows: tuple[str, ...],
    title: str,
    kv: str = "auto",
) -> None:
    """One table; a dry run takes its first two rows."""
    options = BenchOptions(
        model=model.name,
        rows=rows[:2] if context.dry_run else rows,
        precisions=(precision,),
        max_new_tokens=8 if context.dry_run else NEW_TOKENS,
        compile=not context.dry_run,
        simulate_tau=TAU if any(row.startswith(("eagle", "fused")) for row in rows) else None,
    )
    where = dataclasses.replace(runtime(context, "auto"), kv=kv)
    with context.part(title):
        measured = measure(options, where, model, [QUESTION])
        report = build_report(measured, options, where, save_outputs=False)
        context.save(**{title: report})
        context.table(title, COLUMNS, table_rows(report))
        context.say(f"{title}: {told(report)}")


def told(report: dict[str, Any]) -> str:
    """tok/s of every row, and what was measured."""
    speeds = ", ".join(f"{row['name']} {row['tok_s']:.1f}" for row in report["rows"])
    return f"{speeds} tok/s ({conditions(report)})"
