"""Tokens per second of several ways to decode, on real prompts, in one run.

    python scripts/tokens_per_sec.py
    python scripts/tokens_per_sec.py --data questions.jsonl --limit 16 --rows hf,plain --md
    python scripts/tokens_per_sec.py --precision bf16,int8,int4 --json record.json --plot chart.png
    python scripts/tokens_per_sec.py --model llama2-7b --load-format dummy --rows plain,eagle \
        --simulate-tau 3.6
    python scripts/tokens_per_sec.py --int4 --batch 1,2,4,8

P50 / P99 are of the tokens after each answer's first ones: a token's time is that of its chunk
(since the chunk before) divided by the tokens in the chunk. MBU: weights of the target, and keys
and values of the mean context, times target passes a second, as a share of memory bandwidth, which
is measured on a CPU and the data sheet's on a GPU we know; what a draft head reads is not counted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from fasteagle.bench.measure import barrier_line
from fasteagle.bench.options import PRECISIONS, BenchOptions
from fasteagle.bench.plot import check_plot, figure, save_chart
from fasteagle.bench.report import build_report, metadata, print_report
from fasteagle.bench.run import run
from fasteagle.bench.several import HEADINGS, largest_batch, measure_sizes
from fasteagle.bench.simulate import check_simulated
from fasteagle.cli.command import Names, Numbers, Script, refuse_options
from fasteagle.cli.options import BENCH_MODEL, DRAFT, FILE, RESULT, Group, groups, options_of
from fasteagle.errors import FasteagleError, note
from fasteagle.llm import MOST_AT_ONCE, open_llm
from fasteagle.loading.open import open_dummy, open_model
from fasteagle.options import RuntimeOptions
from fasteagle.paths import write_json
from fasteagle.prompts import Question, read_questions
from fasteagle.tables import print_table

# Those that the command line has as they are.
ROWS = Group(options_of(BenchOptions, ("model", "precisions", "draft")), lambda values: {})
# Options of the rows, which --batch does not measure.
OF_ROWS = ("rows", "medusa", "tree_value", "rerank", "load_format", "simulate_tau")
OF_ROWS += ("save_outputs", "plot_path")


@click.command(cls=Script, help=__doc__)
@groups(BENCH_MODEL, DRAFT, ROWS)
@click.option(
    "--precision",
    type=Names(),
    help=f"Comma list of {', '.join(PRECISIONS)}.  [default: that of --int4 or --int8, else auto]",
)
@click.option(
    "--load-format",
    type=click.Choice(["auto", "dummy"]),
    default="auto",
    help="dummy: random weights in a registry model's shape, nothing downloaded.",
)
@click.option(
    "--batch",
    type=Numbers(1, MOST_AT_ONCE),
    help="Comma list of answers at once: their total speed, plain and with the default drafter, "
    "instead of --rows.",
)
@click.option("--json", "json_path", type=RESULT, help="Write the full record here.")
@click.option("--save-outputs", is_flag=True, help="Put the answers' token ids into the record.")
@click.option("--plot", "plot_path", type=FILE, help="Draw a chart here: .png, .svg or .pdf.")
@click.option("--md", is_flag=True, help="Print the table in Markdown.")
def main(
    model: str,
    runtime_options: RuntimeOptions,
    precision: tuple[str, ...] | None,
    load_format: str,
    batch: tuple[int, ...] | None,
    json_path: Path | None,
    save_outputs: bool,
    plot_path: Path | None,
    md: bool,
    **settings: Any,
) -> None:
    precisions = _precisions(precision, runtime_options)
    if batch is not None:
        refuse_options(OF_ROWS, "has no meaning with --batch: drop one")
    options = BenchOptions(model, precisions=precisions, **settings)
    if plot_path:
        check_plot(plot_path)
    dummy = open_dummy(model) if load_format == "dummy" else None
    check_simulated(options, runtime_options, dummy)
    questions = read_questions(options.data)[: options.limit]
    if batch is not None:
        report = several(batch, options, runtime_options, questions, md)
        if json_path:
            write_json(json_path, report)
        return
    opened = dummy or open_model(model, runtime_options)
    measured = run(options, runtime_options, opened, questions)
    if not measured:  # transformers runs dense weights only, gpt-fast int4
        raise FasteagleError(
            f"no row of {', '.join(options.rows)} runs at {', '.join(precisions)}: give others"
        )
    report = build_report(measured, options, runtime_options, save_outputs)
    print_report(report, md)
    if json_path:
        write_json(json_path, report)
    if plot_path:
        save_chart(figure(report), plot_path)


def several(
    sizes: Sequence[int],
    options: BenchOptions,
    runtime_options: RuntimeOptions,
    questions: Sequence[Question],
    md: bool,
) -> dict[str, Any]:
    """Print the total speed of several answers at once; return the record."""
    records: list[dict[str, Any]] = []
    for precision in options.precisions:
        llm = open_llm(options.model, runtime_options.at(precision), options.draft, note)
        with llm:
            rows = measure_sizes(llm, questions, sizes, options)
            cells = [row.cells() for row in rows]
            print_table(HEADINGS, cells, md=md, title=None if md else precision)
            print(largest_batch(llm))
            if barriers := [ns for row in rows for ns in row.barriers]:
                print(barrier_line(barriers))
        records += [{"precision": precision, **dataclasses.asdict(row)} for row in rows]
    return {"meta": metadata(options, runtime_options), "rows": records}


def _precisions(names: tuple[str, ...] | None, runtime: RuntimeOptions) -> tuple[str, ...]:
    """Return the precisions in `names`, else the one that the model's options name."""
    if names is None:
        return (runtime.quant or runtime.dtype,)
    if runtime.quant is not None:
        raise FasteagleError(
            f"precision {','.join(names)} stands beside {runtime.quant}: name all of them in "
            "--precision, without --int4, --int8 and --quant"
        )
    return names


if __name__ == "__main__":
    main()
