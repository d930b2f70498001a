"""Progress of a benchmark: a bar with each row's tok/s on a terminal, else a line a question."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fasteagle.bench.rows import Row
from fasteagle.errors import note


class QuestionBar:
    """Progress bar of a group of rows, by the questions that they have answered."""

    def __init__(self, rows: Sequence[Row], n_questions: int) -> None:
        self._rows, self._total, self._done = rows, n_questions, 0
        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("question"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TimeRemainingColumn(),
            TextColumn("{task.fields[rates]}"),
            console=console,
            disable=not console.is_terminal,
            auto_refresh=False,  # its thread would run while tokens are timed
        )
        self._task = self._bar.add_task("", total=n_questions, rates="")

    def __enter__(self) -> QuestionBar:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def answered(self) -> None:
        """Count one more question that every row has answered."""
        self._done += 1
        rates = ", ".join(f"{row.name} {row.precision} {row.tok_s:.1f}" for row in self._rows)
        self._bar.update(self._task, completed=self._done, rates=f"{rates} tok/s", refresh=True)
        if self._bar.disable:
            note(f"question {self._done} of {self._total}: {rates} tok/s")
