"""Total speed of several answers at once, beside the same answers one after the other.

python scripts/batch_speed.py --data questions.jsonl --limit 16 --sizes 2,4,8

Questions of one turn, greedy, `--rounds` times all rows in turn; medians. It checks that each row
writes the same texts. tok/s counts all tokens, prompts' time included.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import click

from fasteagle.answering.answer import Answer
from fasteagle.cli.command import Script
from fasteagle.errors import FasteagleError
from fasteagle.llm import load
from fasteagle.options import DEFAULT_MODEL
from fasteagle.prompts import read_questions
from fasteagle.tables import print_table


@click.command(cls=Script, help=__doc__)
@click.option("--model", default=DEFAULT_MODEL, show_default=True)
@click.option("--precision", default="int4", show_default=True)
@click.option("--data", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--limit", type=int, help="Only the first N questions.")
@click.option("--max-new-tokens", default=128, show_default=True)
@click.option("--sizes", default="2,4,8", show_default=True, help="Answers at once.")
@click.option("--rounds", default=3, show_default=True)
def main(
    model: str,
    precision: str,
    data: Path | None,
    limit: int | None,
    max_new_tokens: int,
    sizes: str,
    rounds: int,
) -> None:
    questions = [question.turns[0] for question in read_questions(data, limit)]
    llm = load(model, precision=precision, compile=True)

    def in_turn(speculate: bool) -> list[Answer]:
        return [
            llm.chat(text, max_new_tokens=max_new_tokens, speculate=speculate) for text in questions
        ]

    rows: dict[str, Callable[[], list[Answer]]] = {
        "one after the other, plain": lambda: in_turn(False),
        "one after the other, default": lambda: in_turn(True),
    }
    for size in map(int, sizes.split(",")):
        rows[f"{size} at once"] = lambda size=size: llm.chat_batch(
            questions, size=size, max_new_tokens=max_new_tokens
        )
    speeds: dict[str, list[float]] = {name: [] for name in rows}
    texts = [answer.tokens for answer in in_turn(False)]
    for _ in range(rounds):
        for name, write in rows.items():
            begin = time.perf_counter()
            written = [answer.tokens for answer in write()]
            speeds[name].append(sum(map(len, written)) / (time.perf_counter() - begin))
            if written != texts:
                raise FasteagleError(f"{name}: other texts than plain decoding writes")
    medians = {name: statistics.median(each) for name, each in speeds.items()}
    plain = medians["one after the other, plain"]
    lines = [(name, f"{speed:.1f}", f"{speed / plain:.2f}") for name, speed in medians.items()]
    print_table(("", "tok/s", "x plain"), lines)


if __name__ == "__main__":
    main()
