"""Bar chart of a benchmark record: tok/s by row and precision, tau above each bar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def save_chart(chart: Any, path: Path) -> None:
    """Write a matplotlib figure in the format that the suffix names."""
    with replacing(path) as temporary:
        chart.savefig(temporary, format=path.suffix[1:], dpi=150)


def figure(report: dict[str, Any]) -> Any:
    """Return the chart as a matplotlib figure: rows side by side, a colour for each precision."""
    from matplotlib.figure import Figure  # an extra that may be missing

    rows, meta = report["rows"], report["meta"]
    names = list(dict.fromkeys(row["name"] for row in rows))
    precisions = list(dict.fromkeys(row["precision"] for row in rows))
    chart = Figure(figsize=(max(6.0, 1.1 * len(rows) + 2), 4.8), layout="constrained")
    axes = chart.add_subplot()
    width = 0.8 / len(precisions)
    for index, precision in enumerate(precisions):
        chosen = [row for row in rows if row["precision"] == precision]
        offset = (index - (len(precisions) - 1) / 2) * width
        places = [names.index(row["name"]) + offset for row in chosen]
        bars = axes.bar(places, [row["tok_s"] for row in chosen], width, label=precision)
        for bar, row in zip(bars, chosen, strict=True):
            bar.set_hatch("//" if row["simulated"] else None)
        axes.bar_label(bars, [_label(row) for row in chosen], padding=2, fontsize=8)
    axes.set_xticks(range(len(names)), names)
    axes.set_ylabel("tokens per second")
    axes.margins(y=0.2)
    axes.legend(title="precision")
    axes.set_title(f"{meta['model']}, T={meta['temperature']:g}; {meta['device']}", fontsize=10)
    return chart


def _label(row: dict[str, Any]) -> str:
    lines = [f"{row['tok_s']:.1f}", f"tau {row['tau']:.2f}"]
    return "\n".join([*lines, "simulated"] if row["simulated"] else lines)


def confidence_figure(tenths: Mapping[str, Sequence[tuple[int, int]]]) -> Any:
    """Return a matplotlib figure of acceptance against confidence, as EAGLE-2's figure 6.

    `tenths` has a line for each draft head by its name: drafted tokens, and the accepted ones, by
    the tenth that the draft head's probability lies in.
    """
    from matplotlib.figure import Figure  # an extra that may be missing

    chart = Figure(figsize=(5.0, 4.4), layout="constrained")
    axes = chart.add_subplot()
    axes.plot([0, 1], [0, 1], color="0.7", linestyle="--", label="accepted as often as expected")
    for name, counts in tenths.items():
        shares = [
            ((n + 0.5) / len(counts), hit / drafted)
            for n, (drafted, hit) in enumerate(counts)
            if drafted
        ]
        axes.plot(*zip(*shares, strict=True), marker="o", label=name)
    axes.set_xlabel("probability that the head gives a token")
    axes.set_ylabel("share of such tokens that is accepted")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.legend(fontsize=8)
    return chart
