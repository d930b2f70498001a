"""The progress of a benchmark, on a terminal and elsewhere."""

from __future__ import annotations

import io
import threading

import pytest
from rich.console import Console

from fasteagle.bench import progress
from fasteagle.bench.progress import QuestionBar
from fasteagle.bench.rows import Row, Turn


@pytest.fixture
def rows():
    found = [Row(name, "int4", decoder=None, weight_bytes=1) for name in ("plain", "eagle")]
    for row, seconds in zip(found, (1.0, 0.5), strict=True):
        row.turns = [Turn([1] * 51, 0.1, seconds, 50)]
    return found


def test_a_line_a_question_without_a_terminal(rows, capsys):
    with QuestionBar(rows, 2) as bar:
        bar.answered()
        rows[1].turns.append(Turn([1] * 51, 0.1, 1.5, 50))
        bar.answered()
    assert capsys.readouterr().err.splitlines() == [
        "question 1 of 2: plain int4 50.0, eagle int4 100.0 tok/s",
        "question 2 of 2: plain int4 50.0, eagle int4 50.0 tok/s",
    ]


def test_a_bar_on_a_terminal(rows, monkeypatch):
    """Drawn after each question, and by no thread, which would run while tokens are timed."""
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=120)
    monkeypatch.setattr(progress, "Console", lambda stderr: terminal)
    before = threading.active_count()
    with QuestionBar(rows, 2) as bar:
        bar.answered()
        assert threading.active_count() == before
        assert "1/2" in screen.getvalue() and "eagle int4 100.0 tok/s" in screen.getvalue()
