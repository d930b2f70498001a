"""Quality of draft heads on text that the model wrote, by depth and by confidence.

python -m fasteagle generate-data --prompts questions.jsonl --out answers.jsonl
python scripts/head_quality.py --data answers.jsonl
python scripts/head_quality.py --data answers.jsonl --head old/ --head new/ --plot confidence.svg

Every position of the answers is the start of a chain of five tokens. n-alpha is how often token
n + 1 of a chain is accepted when the n before it were; on greedy text that is exact. TV is the
total variation of a chain's first token: 1 - TV is its acceptance rate at temperature 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click

from fasteagle.bench.plot import check_plot, confidence_figure, save_chart
from fasteagle.cli.command import Script
from fasteagle.cli.options import FILE, model_options
from fasteagle.loading.heads.find import named_head
from fasteagle.loading.open import open_model
from fasteagle.options import RuntimeOptions
from fasteagle.prompts import read_conversations
from fasteagle.tables import Rows, markdown_table
from fasteagle.training.calibrate_head import usual_head
from fasteagle.training.data import live_features
from fasteagle.training.held_out import TENTHS, HeldOut, evaluate


@click.command(cls=Script)
@model_options
@click.option("--data", type=FILE, required=True, help="JSONL of conversations as token ids.")
@click.option("--head", "heads", multiple=True, help="Draft heads.  [default: the model's]")
@click.option("--limit", type=click.IntRange(1), help="Only the first N conversations.")
@click.option(
    "--plot", "plot_path", type=FILE, help="Chart of acceptance by confidence: .svg, .png, .pdf."
)
def main(
    model: str,
    runtime_options: RuntimeOptions,
    data: Path,
    heads: tuple[str, ...],
    limit: int | None,
    plot_path: Path | None,
) -> None:
    """Measure draft heads on DATA; prints two tables in Markdown."""
    if plot_path:
        check_plot(plot_path)
    opened = open_model(model, runtime_options)
    config = opened.checkpoint.config
    max_len = runtime_options.seq_len_for(config.max_seq_len, opened.name)
    conversations = read_conversations(data, config.vocab_size, max_len, limit)
    loaded = [named_head(head).loaded(config) for head in heads]
    runtime = opened.loaded(runtime_options)
    loaded = loaded or [usual_head(opened, runtime.checkpoint.fingerprint)]
    engine = runtime.engine
    qualities: dict[str, HeldOut] = {}
    for head in loaded:
        text = live_features(engine, conversations, head.head.config.aux_layers)
        head.head.borrow(engine.model, engine.max_seq_len)
        held = evaluate(head.head.float(), engine.model, text, list(range(len(text))))
        qualities[head.origin] = held
    print(
        markdown_table(*by_depth(qualities)), markdown_table(*by_confidence(qualities)), sep="\n\n"
    )
    n_rows, n_greedy = held.rows, sum(c.greedy for c in conversations)
    print(f"\n{n_rows:,} positions of {len(conversations):,} answers, {n_greedy:,} of them greedy")
    if plot_path:
        tenths = {name: quality.by_confidence for name, quality in qualities.items()}
        save_chart(confidence_figure(tenths), plot_path)


def by_depth(qualities: Mapping[str, HeldOut]) -> tuple[list[str], Rows]:
    """Return headings and a row for each draft head: acceptance by depth."""
    depth = len(next(iter(qualities.values())).alphas)
    headings = ["head", *(f"{n}-alpha" for n in range(depth)), "tau of a chain", "TV"]
    return headings, [
        [name, *(f"{alpha:.3f}" for alpha in held.alphas), f"{held.tau:.2f}", f"{held.tv[0]:.3f}"]
        for name, held in qualities.items()
    ]


def by_confidence(qualities: Mapping[str, HeldOut]) -> tuple[list[str], Rows]:
    """Return headings and a row for each draft head: acceptance by tenth of the probability."""
    return ["accepted, by confidence", *(f"{n / TENTHS:.1f}" for n in range(TENTHS))], [
        [name, *(f"{hits / n:.2f}" if n else "-" for n, hits in held.by_confidence)]
        for name, held in qualities.items()
    ]


if __name__ == "__main__":
    main()
