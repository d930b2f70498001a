"""Quality of draft heads on text that the model wrote, by depth and by confidence.

python -m fasteagle generate-data --prompts questions.jsonl --out answers.jsonl
python scripts/head_quality.py --data answers.jsonl
python scripts/head_quality.py --data answers.jsonl --head old/ --head new/ --plot confidence.svg

Every position of the answers is the start of a chain of five tokens. n-alpha is how often token
n + 1 of a chain is accepted when the n before it were. On greedy text both are exact.
"""

from __future__ import annotations

from pathlib import Path

import click

from fasteagle.bench.plot import check_plot, plot_confidence
from fasteagle.cli.command import Script
from fasteagle.cli.options import model_options
from fasteagle.errors import FasteagleError
from fasteagle.loading.heads.find import find_head, named_head
from fasteagle.loading.open import open_for
from fasteagle.loading.tensors import fingerprint
from fasteagle.options import RuntimeOptions
from fasteagle.prompts import read_conversations
from fasteagle.tables import markdown_table
from fasteagle.training.head_quality import measure, tables

FILE = click.Path(path_type=Path, dir_okay=False)


@click.command(cls=Script)
@model_options
@click.option("--data", type=FILE, required=True, help="JSONL of conversations as token ids.")
@click.option("--head", "heads", multiple=True, help="May be repeated.  [default: the model's]")
@click.option("--limit", type=click.IntRange(1), help="Only the first N conversations.")
@click.option(
    "--plot", "plot_path", type=FILE, help="Acceptance against confidence (.svg, .png, .pdf)."
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
    opened = open_for(model, runtime_options)
    config = opened.checkpoint.config
    max_len = runtime_options.seq_len_for(config.max_seq_len, opened.name)
    conversations = read_conversations(data, config.vocab_size, max_len, limit)
    loaded = [named_head(head).loaded(config) for head in heads]
    runtime = opened.loaded(runtime_options)
    if not loaded:
        usual = find_head(None, runtime.name, fingerprint(runtime.checkpoint))
        if usual is None:
            raise FasteagleError(f"no draft head is known for {runtime.name}: give --head")
        loaded = [usual.loaded(config)]
    qualities = measure(runtime.engine, loaded, conversations)
    print("\n\n".join(markdown_table(first, rest) for first, *rest in tables(qualities)))
    n_rows, n_greedy = qualities[0].held.rows, sum(c.greedy for c in conversations)
    print(f"\n{n_rows:,} positions of {len(conversations):,} answers, {n_greedy:,} of them greedy")
    if plot_path:
        plot_confidence({q.name: q.held.by_confidence for q in qualities}, plot_path)


if __name__ == "__main__":
    main()
