"""What a benchmark run found: the JSON document with its conditions, and the table for people."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fasteagle import __version__
from fasteagle.bench import BenchOptions, Row
from fasteagle.options import RuntimeOptions
from fasteagle.runtime import pick_device

# Memory bandwidth in GB/s by device name, from the makers' data sheets.
BANDWIDTH = {"RTX 3090 Ti": 1008, "RTX 3090": 936, "RTX 4090": 1008, "H100": 3350, "H200": 4800}


def build_report(
    rows: Sequence[Row], options: BenchOptions, runtime: RuntimeOptions, save_outputs: bool
) -> dict[str, Any]:
    """The JSON document: `meta` and one object a row."""
    meta = metadata(options, runtime)
    plain = {row.precision: row.tok_s for row in rows if row.name == "plain"}
    bandwidth = next((v for k, v in BANDWIDTH.items() if k in meta["device"]), None)
    out = []
    for row in rows:
        base = plain.get(row.precision)
        rates = row.turn_rates
        record = {
            "name": row.name,
            "precision": row.precision,
            "turns": len(row.turns),
            "tokens": row.tokens,
            "seconds": round(row.seconds, 4),
            "tok_s": round(row.tok_s, 3),
            "tok_s_median": round(statistics.median(rates), 3) if rates else None,
            "tok_s_min": round(min(rates), 3) if rates else None,
            "tok_s_max": round(max(rates), 3) if rates else None,
            "ttft_s": round(statistics.median(turn.ttft for turn in row.turns), 4),
            "tau": round(row.tau, 3),
            "speedup_vs_plain": round(row.tok_s / base, 3) if base else None,
            "mbu": round(row.weight_bytes * row.tok_s / row.tau / bandwidth / 1e9, 3)
            if bandwidth
            else None,
            "peak_mem_gb": round(row.peak_bytes / 1e9, 3),
            "plain_rows": row.plain_rows,
            **_drafting(row),
        }
        if save_outputs:
            record["outputs"] = [turn.tokens for turn in row.turns]
        out.append(record)
    return {"meta": meta, "rows": out}


def _drafting(row: Row) -> dict[str, Any]:
    """Acceptance and the parts of a cycle, for rows that draft.

    `accepted_by_depth`: share of passes that accepted at least 1, 2, ... guesses; `n_alpha`, of
    chains: acceptance of guess n + 1 given that the first n were accepted.
    """
    paths = row.path_lengths
    if not paths:
        return {}
    reached = [sum(n >= d for n in paths) for d in range(max(paths) + 2)]
    parts = {
        "draft_ms": sum(s.draft_seconds for s in row.stats),
        "verify_ms": sum(s.verify_seconds for s in row.stats),
        "other_ms": sum(s.decode_seconds - s.draft_seconds - s.verify_seconds for s in row.stats),
    }
    return {
        "accepted_by_depth": [round(n / len(paths), 4) for n in reached[1:-1]],
        "n_alpha": [round(reached[d + 1] / reached[d], 4) for d in range(len(reached) - 2)]
        if row.name == "eagle-chain"
        else None,
        **{name: round(1e3 * total / len(paths), 3) for name, total in parts.items()},
    }


def metadata(options: BenchOptions, runtime: RuntimeOptions) -> dict[str, Any]:
    """The conditions of the numbers."""
    import transformers

    device = pick_device(runtime.device)
    return {
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": _device_name(device),
        "threads": torch.get_num_threads(),
        "fasteagle": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "model": options.model,
        "data": str(options.data) if options.data else "package prompts",
        "limit": options.limit,
        "max_new_tokens": options.max_new_tokens,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "seed": options.seed,
        "compile": options.compile,
        "draft": dataclasses.asdict(options.draft),
        "tree_value": options.tree_value,
        "rerank": options.rerank,
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def _commit() -> str | None:
    """Commit of the checkout this file lies in, marked if it was changed; None outside one."""
    command = ["git", "-C", str(Path(__file__).resolve().parent), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


COLUMNS = ("row", "precision", "tok/s", "median (min - max) per turn", "x plain", "tau",
           "draft + verify + other ms", "TTFT s", "MBU", "peak GB")  # fmt: skip


def table_rows(report: dict[str, Any]) -> list[tuple[str, ...]]:
    """Cells of the table, under `COLUMNS`."""
    return [
        (
            row["name"],
            row["precision"],
            f"{row['tok_s']:.1f}",
            f"{row['tok_s_median']:.1f} ({row['tok_s_min']:.1f} - {row['tok_s_max']:.1f})"
            if row["tok_s_median"]
            else "-",
            _cell(row["speedup_vs_plain"]),
            f"{row['tau']:.2f}",
            f"{row['draft_ms']:.1f} + {row['verify_ms']:.1f} + {row['other_ms']:.1f}"
            if "draft_ms" in row
            else "-",
            f"{row['ttft_s']:.3f}",
            _cell(row["mbu"]),
            f"{row['peak_mem_gb']:.2f}",
        )
        for row in report["rows"]
    ]


def conditions(report: dict[str, Any]) -> str:
    """One line: what was run, on what."""
    meta = report["meta"]
    first = report["rows"][0]
    return (
        f"{meta['model']}, {first['turns']} turns of {meta['data']}, at most "
        f"{meta['max_new_tokens']} new tokens, T={meta['temperature']:g}; {meta['device']}, "
        f"{meta['threads']} threads; torch {meta['torch']}, transformers {meta['transformers']}, "
        f"fasteagle {meta['commit'] or meta['fasteagle']}"
    )


def markdown(report: dict[str, Any]) -> str:
    """The table in Markdown, conditions below it."""
    lines = [COLUMNS, tuple("---" for _ in COLUMNS), *table_rows(report)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n\n" + conditions(report)


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
