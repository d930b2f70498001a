"""Printer of all tables: columns for a terminal, or Markdown as in BENCHMARKS.md."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

WIDTH = 1000  # more than any row needs: cut or wrapped rows are hard to read

Rows = Sequence[Sequence[str]]


def markdown_table(headings: Sequence[str], rows: Rows) -> str:
    """Return a table in Markdown."""
    lines = (headings, ["---"] * len(headings), *rows)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def print_table(
    headings: Sequence[str],
    rows: Rows,
    *,
    md: bool = False,
    title: str | None = None,
    numeric: Collection[str] = (),
) -> None:
    """Print a table, in Markdown with `md`; columns named in `numeric` are right-aligned."""
    if md:
        print(markdown_table(headings, rows))
        return
    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    for heading in headings:
        is_number = heading in numeric
        table.add_column(escape(heading), justify="right" if is_number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(escape, row))  # a name may look like markup
    Console(width=WIDTH).print(table)
