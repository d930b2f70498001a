"""Tables as BENCHMARKS.md has them."""

from __future__ import annotations

from collections.abc import Sequence


def markdown_table(lines: Sequence[tuple[str, ...]]) -> str:
    """Lines of cells in Markdown; the first ones are headings."""
    headings, *rows = lines
    shown = (headings, ("---",) * len(headings), *rows)
    return "\n".join(f"| {' | '.join(line)} |" for line in shown)
