"""A benchmark record as a bar chart: tok/s by row and precision, tau above each bar."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fasteagle.errors import FasteagleError
from fasteagle.paths import replacing, require_writable

SUFFIXES = (".png", ".svg", ".pdf")


def check_plot(path: Path) -> None:
    """Raise `FasteagleError` if `path` cannot become a chart; call it before a long run."""
    if path.suffix.lower() not in SUFFIXES:
        raise FasteagleError(f"--plot {path}: suffix {path.suffix!r}: use {', '.join(SUFFIXES)}")
    try:
        import matplotlib  # noqa: F401  (an extra that may be missing)
    except ImportError as error:
        raise FasteagleError(
            f'--plot needs matplotlib ({error}): pip install "fasteagle[plot]"'
        ) from error
    require_writable(path)


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw the rows of `report` into `path`."""
    with replacing(path) as temporary:
        figure(report).savefig(temporary, format=path.suffix[1:].lower(), dpi=150)


def figure(report: dict[str, Any]) -> Any:
    """The chart as a matplotlib figure: rows side by side, a colour for each precision."""
    from matplotlib.figure import Figure  # an extra that may be missing

    rows, meta = report["rows"], report["meta"]
    names = list(dict.fromkeys(row["name"] for row in rows))
    precisions = list(dict.fromkeys(row["precision"] for row in rows))
    chart = Figure(figsize=(max(6.0, 1.1 * len(rows) + 2), 4.8), layout="constrained")
    axes = chart.add_subplot()
    width = 0.8 / len(precisions)
    for index, precision in enumerate(precisions):
        found = [row for row in rows if row["precision"] == precision]
        offset = (index - (len(precisions) - 1) / 2) * width
        places = [names.index(row["name"]) + offset for row in found]
        bars = axes.bar(places, [row["tok_s"] for row in found], width, label=precision)
        for bar, row in zip(bars, found, strict=True):
            bar.set_hatch("//" if row["simulated"] else None)
        axes.bar_label(bars, [_label(row) for row in found], padding=2, fontsize=8)
    axes.set_xticks(range(len(names)), names)
    axes.set_ylabel("tokens per second")
    axes.margins(y=0.2)
    axes.legend(title="precision")
    axes.set_title(f"{meta['model']}, T={meta['temperature']:g}; {meta['device']}", fontsize=10)
    return chart


def _label(row: dict[str, Any]) -> str:
    lines = [f"{row['tok_s']:.1f}", f"tau {row['tau']:.2f}"]
    return "\n".join([*lines, "simulated"] if row["simulated"] else lines)
