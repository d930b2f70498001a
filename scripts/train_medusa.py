"""Train the heads of the benchmark's `medusa` row on conversations that the model wrote.

python scripts/train_medusa.py --data train.jsonl --out medusa.safetensors
python scripts/tokens_per_sec.py --rows plain,eagle,medusa --medusa medusa.safetensors

The conversations are those of `fasteagle generate-data`: token ids and where each answer begins.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from fasteagle.bench.rivals.medusa import save_medusa
from fasteagle.bench.rivals.train_medusa import train_medusa
from fasteagle.cli.command import Script
from fasteagle.cli.options import FILE, RESULT, model_options
from fasteagle.loading.open import open_model
from fasteagle.option_fields import require
from fasteagle.options import RuntimeOptions
from fasteagle.paths import replacing
from fasteagle.prompts import read_conversations


@click.command(cls=Script)
@model_options
@click.option("--data", type=FILE, required=True, help="JSONL of conversations as token ids.")
@click.option("--out", type=RESULT, required=True, help="File to write (.safetensors).")
@click.option(
    "--positions",
    type=click.IntRange(1),
    default=60_000,
    show_default=True,
    help="Answer tokens to use.",
)
@click.option("--epochs", type=click.IntRange(1), default=3, show_default=True)
@click.option("--lr", default=1e-3, show_default=True)
def main(
    model: str, runtime_options: RuntimeOptions, data: Path, out: Path, **settings: Any
) -> None:
    """Train Medusa's heads; prints how often each head's best token is right."""
    require(0 < settings["lr"] <= 1, f"lr {settings['lr']} is out of range: use > 0 and <= 1")
    engine = open_model(model, runtime_options).loaded(runtime_options).engine
    conversations = read_conversations(data, engine.model.config.vocab_size, engine.max_seq_len)
    heads, ranks = train_medusa(engine, conversations, **settings)
    with replacing(out) as temporary:
        save_medusa(temporary, heads, ranks)
    shares = ", ".join(f"{row[0]:.3f}" for row in ranks)
    print(f"right on held-out text, token by token: {shares}; written to {out}")


if __name__ == "__main__":
    main()
