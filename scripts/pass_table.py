"""Time of a target pass on a CPU, by part of the pass and number of rows.

    FASTEAGLE_KERNEL_FLAGS=-DFASTEAGLE_PHASES python scripts/pass_table.py --int4

The flag builds a library of our CPU kernels whose first thread times its parts; `waiting` is its
time at barriers. A pass is timed in blocks of passes of equal rows, as decoding runs them.
"""

from __future__ import annotations

import statistics

import click
import torch

from fasteagle.bench.measure import add_barrier, barrier_line
from fasteagle.cli.command import Numbers, Script
from fasteagle.cli.options import model_options
from fasteagle.compile.measurement import Measurement
from fasteagle.decoding.context import MAX_TREE_ROWS
from fasteagle.errors import FasteagleError
from fasteagle.loading.open import open_model
from fasteagle.options import RuntimeOptions
from fasteagle.tables import print_table

BLOCK, WARM = 40, 10  # passes of equal rows in a row, of which the first are not counted


@click.command(cls=Script, help=__doc__)
@model_options
@click.option(
    "--rows", default="1,2,3,4,5,6,8,12,16", show_default=True, type=Numbers(1, MAX_TREE_ROWS)
)
def main(model: str, runtime_options: RuntimeOptions, rows: tuple[int, ...]) -> None:
    engine = open_model(model, runtime_options).loaded(runtime_options).engine
    if engine.backend.name != "cpu":
        raise FasteagleError(
            f"{engine.backend.describe()}: its parts are not timed: use --int4 or --int8, on a CPU"
        )
    phases = torch.ops.fasteagle_cpu.phases
    measurement = Measurement(engine, None)
    table: dict[str, list[float]] = {"pass": []}
    barriers: list[float] = []
    for T in rows:
        for _ in range(WARM):
            measurement.verify(T)
        phases()
        times = [measurement.verify(T) for _ in range(BLOCK)]
        add_barrier(barriers, engine)
        for name, total in phases().items():
            table.setdefault(name, []).append(total / BLOCK)
        table["pass"].append(statistics.median(times))
    if not sum(table["waiting"]):
        raise FasteagleError(
            "the kernels do not time their parts: set FASTEAGLE_KERNEL_FLAGS=-DFASTEAGLE_PHASES"
        )
    print_table(
        ["ms of", *(f"{T} rows" for T in rows)],
        [[name, *(f"{ms:.3f}" for ms in times)] for name, times in table.items()],
    )
    print(barrier_line(barriers))


if __name__ == "__main__":
    main()
