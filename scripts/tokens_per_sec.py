"""Tokens per second of several ways to decode, on real prompts, in one run.

python scripts/tokens_per_sec.py
python scripts/tokens_per_sec.py --data questions.jsonl --limit 16 --rows hf,plain --md
python scripts/tokens_per_sec.py --precision bf16,int8,int4 --json record.json --plot chart.png
python scripts/tokens_per_sec.py --model llama2-7b --load-format dummy --rows plain,eagle \
    --simulate-tau 3.6

P50 / P99 are of the tokens after each answer's first ones: a token's time is that of its chunk
(since the chunk before) divided by the tokens in the chunk. MBU: weights of the target, and keys
and values of the mean context, times target passes a second, as a share of memory bandwidth, which
is measured on a CPU and the data sheet's on a GPU we know; what a draft head reads is not counted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from fasteagle.bench.plot import check_plot, plot
from fasteagle.bench.report import COLUMNS, build_report, conditions, markdown, table_rows
from fasteagle.bench.row_spec import ROW_NAMES
from fasteagle.bench.run import DEFAULT_ROWS, PRECISIONS, BenchOptions, check_simulated, run
from fasteagle.cli.command import Script
from fasteagle.cli.options import BENCH_MODEL, DRAFT, comma_list, groups
from fasteagle.errors import FasteagleError
from fasteagle.loading.open import open_dummy, open_model
from fasteagle.options import DraftOptions, RuntimeOptions
from fasteagle.paths import require_writable, write_atomic
from fasteagle.prompts import read_questions
from fasteagle.tables import print_table

DEFAULTS = BenchOptions()


@click.command(cls=Script)
@groups(BENCH_MODEL, DRAFT)
@click.option(
    "--rows",
    default=",".join(DEFAULT_ROWS),
    show_default=True,
    help=f"Comma list of {', '.join(ROW_NAMES)}, or eagle@DEPTH/TOPK/NODES; ROW=HEAD drafts with "
    "a head of its own.",
)
@click.option(
    "--precision",
    help=f"Comma list of {', '.join(PRECISIONS)}.  [default: of --int4 and the like, or auto]",
)
@click.option(
    "--data",
    type=click.Path(path_type=Path, dir_okay=False),
    help='JSONL with {"turns": ["text", ...]} lines.  [default: ten prompts of ours]',
)
@click.option(
    "--medusa",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Heads of the medusa row, from scripts/train_medusa.py.",
)
@click.option("--limit", type=int, help="Only the first N questions.")
@click.option("--max-new-tokens", default=DEFAULTS.max_new_tokens, show_default=True)
@click.option("--temperature", default=DEFAULTS.temperature, show_default=True)
@click.option("--top-p", default=DEFAULTS.top_p, show_default=True)
@click.option("--seed", default=DEFAULTS.seed, show_default=True)
@click.option("--compile/--no-compile", "compile_", default=DEFAULTS.compile, show_default=True)
@click.option(
    "--tree-value",
    default=DEFAULTS.tree_value,
    show_default=True,
    help="cumulative, or confidence (EAGLE-2's ablation): what ranks a node.",
)
@click.option("--rerank/--no-rerank", default=True, show_default=True, help="EAGLE-2's ablation.")
@click.option(
    "--load-format",
    type=click.Choice(["auto", "dummy"]),
    default="auto",
    help="dummy: random weights in a registry model's shape, nothing downloaded.",
)
@click.option(
    "--simulate-tau",
    type=float,
    help="With dummy weights: tokens per cycle of the eagle rows; their tok/s is simulated.",
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the full record here.",
)
@click.option("--save-outputs", is_flag=True, help="Put the answers' token ids into the record.")
@click.option(
    "--plot",
    "plot_path",
    type=click.Path(path_type=Path),
    help='A bar chart here (.png, .svg, .pdf); needs matplotlib: pip install "fasteagle[plot]".',
)
@click.option("--md", is_flag=True, help="Print the table in Markdown.")
def main(
    model: str,
    runtime_options: RuntimeOptions,
    draft: DraftOptions,
    rows: str,
    precision: str | None,
    compile_: bool,
    load_format: str,
    json_path: Path | None,
    save_outputs: bool,
    plot_path: Path | None,
    md: bool,
    **rest: Any,
) -> None:
    """Measure tokens per second; see the module's docstring for examples."""
    options = BenchOptions(
        model=model,
        rows=comma_list(rows),
        precisions=_precisions(precision, runtime_options),
        compile=compile_,
        draft=draft,
        **rest,
    )

    if plot_path:
        check_plot(plot_path)
    if json_path:
        require_writable(json_path)
    check_simulated(options, runtime_options, load_format == "dummy")
    questions = read_questions(options.data, options.limit)
    measured = run(options, runtime_options, _load(model, load_format), questions)
    report = build_report(measured, options, runtime_options, save_outputs)
    if json_path:
        write_atomic(json_path, json.dumps(report, indent=1).encode())
    if plot_path:
        plot(report, plot_path)
    _print(report, md)


def _precisions(asked: str | None, runtime: RuntimeOptions) -> tuple[str, ...]:
    """Return the precisions in `asked`, else the one that the model's options name."""
    if asked is None:
        return (runtime.quant or runtime.dtype,)
    if runtime.quant is not None:
        raise FasteagleError(
            f"precision {asked} stands beside {runtime.quant}: name all of them in --precision, "
            "without --int4, --int8 and --quant"
        )
    return comma_list(asked)


def _load(model: str, load_format: str) -> Any:
    return open_dummy(model) if load_format == "dummy" else open_model(model)


def _print(report: dict[str, Any], md: bool) -> None:
    if md:
        print(markdown(report))
        return
    print_table(COLUMNS, table_rows(report))
    print(conditions(report))


if __name__ == "__main__":
    main()
