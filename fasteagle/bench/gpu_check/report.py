"""What a person reads of the check: lines of a stage, and a Markdown block for BENCHMARKS.md.

A stage's results hold `lines`, `tables` (title, columns, rows) and `problems`; everything else in
them is for programs. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def lines_of(entry: dict[str, Any]) -> list[str]:
    """A stage in a few lines: how it ended, what it says, what failed in it."""
    ended = "failed" if entry["error"] else "done"
    lines = [f"{entry['name']}: {ended} after {entry['seconds']:.0f} s"]
    lines += [f"  {line}" for line in _texts(entry, "lines")]
    lines += [f"  problem: {line}" for line in _texts(entry, "problems")]
    return lines + ([f"  error: {entry['error']}"] if entry["error"] else [])


def summary(record: dict[str, Any]) -> list[str]:
    """A line for every stage, and one for all of them."""
    lines = [
        f"{entry['name']:<11} {entry['seconds']:6.0f} s  {entry['error'] or 'ok'}"
        for entry in record["stages"]
    ]
    failed = sum(entry["error"] is not None for entry in record["stages"])
    seconds = sum(entry["seconds"] for entry in record["stages"])
    n = len(record["stages"])
    return [*lines, f"{n - failed} of {n} stages without an error, {seconds / 60:.1f} minutes"]


def markdown(record: dict[str, Any]) -> str:
    """The whole record as a section of BENCHMARKS.md."""
    meta = record["meta"]
    device = next((e["results"].get("device") for e in record["stages"] if e["results"]), None)
    name = device.get("name", "unknown device") if isinstance(device, dict) else "unknown device"
    kind = "dry run of the GPU check on" if meta["dry_run"] else "GPU check on"
    parts = [f"## {str(meta['date'])[:10]}: {kind} {name}", _conditions(meta, device)]
    for entry in record["stages"]:
        parts.append(f"### {entry['name']}: {entry['what']} ({entry['seconds']:.0f} s)")
        if entry["error"]:
            parts.append(f"**Failed:** {_cell(entry['error'])}")
        said = [*_texts(entry, "lines"), *(f"problem: {p}" for p in _texts(entry, "problems"))]
        if said:
            parts.append("\n".join(f"- {_cell(line)}" for line in said))
        parts += [text for text in map(_table, _list(entry["results"].get("tables"))) if text]
    return "\n\n".join(parts) + "\n"


def _conditions(meta: dict[str, Any], device: Any) -> str:
    found = dict(device) if isinstance(device, dict) else {}
    pairs = [f"{key} {value}" for key, value in found.items() if key != "name"]
    names = ("commit", "fasteagle", "python", "torch", "triton", "transformers", "torchao")
    pairs += [f"{name} {meta[name]}" for name in names if meta.get(name)]
    return f"{', '.join(pairs)}. `{meta['command']}`"


def _texts(entry: dict[str, Any], key: str) -> list[str]:
    return [str(line) for line in _list(entry["results"].get(key))]


def _list(value: Any) -> list[Any]:
    """A stage may have written anything."""
    return value if isinstance(value, list) else []


def _table(table: Any) -> str | None:
    """One table in Markdown; None where it is none."""
    if not isinstance(table, dict):
        return None
    columns, rows = _list(table.get("columns")), _list(table.get("rows"))
    if not columns or not all(isinstance(row, list) for row in rows):
        return None
    lines = [_row(columns), _row(["---"] * len(columns)), *map(_row, rows)]
    return f"{_cell(table.get('title', ''))}:\n\n" + "\n".join(lines)


def _row(cells: Sequence[Any]) -> str:
    return f"| {' | '.join(map(_cell, cells))} |"


def _cell(value: Any) -> str:
    return "-" if value is None else str(value).replace("|", "\\|").replace("\n", " ")
