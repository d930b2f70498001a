"""Passes of this checkout and of another one, in turn: how many times as fast they are here.

    git worktree add ../before HEAD~1
    python scripts/compare_passes.py ../before --int4 --rows 1,4,8

On a machine that others use too, two runs after each other differ by more than most changes do.
Here two processes take turns after every few passes, so that a slow moment affects both: the median
of the ratios is steady to one or two percent.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import click

from fasteagle.cli.command import Numbers, Script, UserPath
from fasteagle.cli.options import model_options
from fasteagle.compile.measurement import Measurement
from fasteagle.decoding.context import MAX_TREE_ROWS
from fasteagle.errors import FasteagleError
from fasteagle.loading.open import open_model
from fasteagle.options import RuntimeOptions
from fasteagle.tables import print_table

WARM, PASSES = 3, 12  # passes in a row: not counted, and counted
SPIN = 0.02  # seconds after which a pass's threads, which wait for the next one, leave their cores
READY = "ready"


@click.command(cls=Script, help=__doc__)
@click.argument("other", type=UserPath(exists=True, file_okay=False))
@model_options
@click.option("--rows", default="1,2,4,8,16,32", show_default=True, type=Numbers(1, MAX_TREE_ROWS))
@click.option("--rounds", default=40, show_default=True, type=click.IntRange(1))
@click.option("--serve", is_flag=True, hidden=True)
def main(
    other: Path,
    model: str,
    runtime_options: RuntimeOptions,
    rows: tuple[int, ...],
    rounds: int,
    serve: bool,
) -> None:
    if serve:
        answer_requests(model, runtime_options)
        return
    if not (other / "fasteagle" / "__init__.py").exists():
        raise FasteagleError(
            f"{other} is no checkout of fasteagle: it has no fasteagle/__init__.py"
        )
    here = Path(__file__).resolve().parents[1]
    with Checkout(other.resolve()) as before, Checkout(here) as after:
        table = [compared((before, after), T, rounds) for T in rows]
    print_table(["rows", "other ms", "here ms", "times as fast", "best other", "best here"], table)


class Checkout:
    """Process that loads the model with the code of one checkout, and times passes on request."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process = subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], "--serve"],
            env={**os.environ, "PYTHONPATH": str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        while self._line() != READY:
            pass

    def ms(self, rows: int) -> float:
        """Return the median time of some passes of `rows` rows."""
        assert self._process.stdin is not None
        print(rows, file=self._process.stdin, flush=True)
        return float(self._line())

    def __enter__(self) -> Checkout:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.wait()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise FasteagleError(f"the process of {self._folder} ended: see its message above")
        return line.strip()


def compared(checkouts: tuple[Checkout, Checkout], rows: int, rounds: int) -> list[str]:
    """Return the table's line of passes of `rows` rows; the two begin a round by turns."""
    times: list[list[float]] = [[], []]
    for i in range(rounds):
        for which in (0, 1) if i % 2 == 0 else (1, 0):
            times[which].append(checkouts[which].ms(rows))
    ratio = statistics.median(a / b for a, b in zip(*times, strict=True))
    medians = [f"{statistics.median(own):.3f}" for own in times]
    return [str(rows), *medians, f"{ratio:.3f}", *(f"{min(own):.3f}" for own in times)]


def answer_requests(model: str, options: RuntimeOptions) -> None:
    """Load the model; for each line of stdin, a number of rows, print a median time in ms."""
    measurement = Measurement(open_model(model, options).loaded(options).engine, None)
    print(READY, flush=True)
    for line in sys.stdin:
        for _ in range(WARM):
            measurement.verify(int(line))
        times = [measurement.verify(int(line)) for _ in range(PASSES)]
        time.sleep(SPIN)
        print(statistics.median(times), flush=True)


if __name__ == "__main__":
    main()
