"""Result of a benchmark run: the JSON document with its conditions, and the table."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import platform
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fasteagle import __version__
from fasteagle.bench.measure import barrier_line, memory_bandwidth
from fasteagle.bench.options import BenchOptions
from fasteagle.bench.rows import Row, percentile
from fasteagle.device import accumulate_on, device_name, pick_device
from fasteagle.errors import counted
from fasteagle.options import RuntimeOptions
from fasteagle.paths import checkout_commit
from fasteagle.shapes import shape_of
from fasteagle.tables import print_table


def build_report(
    rows: Sequence[Row], options: BenchOptions, runtime: RuntimeOptions, save_outputs: bool
) -> dict[str, Any]:
    """Return the JSON document: `meta` and one object per row."""
    meta = metadata(options, runtime)
    plain = {row.precision: row.tok_s for row in rows if row.name == "plain"}
    out = []
    for row in rows:
        base = plain.get(row.precision)
        rates = [rate for turns in row.turn_rates for rate in turns if rate is not None]
        latencies = row.latencies
        read_gb_s = row.pass_bytes * row.passes_s / 1e9
        record = {
            "name": row.name,
            "precision": row.precision,
            "turns": len(row.turns),
            "tokens": row.tokens,
            "seconds": round(row.seconds, 4),
            "tok_s": _rounded(row.tok_s),
            "tok_s_median": _rounded(statistics.median(rates) if rates else None),
            "tok_s_min": _rounded(min(rates, default=None)),
            "tok_s_max": _rounded(max(rates, default=None)),
            "turn_tok_s": [[_rounded(rate) for rate in turns] for turns in row.turn_rates],
            "ttft_s": round(statistics.median(turn.ttft for turn in row.turns), 4),
            "turn_ttft_s": [[round(turn.ttft, 4) for turn in turns] for turns in row.questions],
            "tau": _rounded(row.tau),
            "p50_ms": _rounded(percentile(latencies, 0.5), 1e3),
            "p99_ms": _rounded(percentile(latencies, 0.99), 1e3),
            "simulated": row.simulated,
            "simulated_tau": row.simulated_tau,
            **({"measured_tau": round(row.measured_tau, 3)} if row.simulated else {}),
            "speedup_vs_plain": _rounded(row.tok_s / base if base else None),
            "mbu": round(read_gb_s / meta["bandwidth"]["gb_s"], 6),
            "context": round(row.context, 1),
            "peak_mem_gb": _rounded(row.peak_bytes / 1e9),
            "barrier_ns": _rounded(statistics.median(row.barriers) if row.barriers else None),
            "scheme": row.scheme.name if row.scheme else None,
            "lm_head_bits": row.scheme.head_bits if row.scheme else None,
            "dtype": row.dtype,
            "tree": dataclasses.asdict(tree) if (tree := row.decoder.tree) else None,
            "auto": row.decoder.auto,
            "auto_shares": row.decoder.auto_shares,
            **_parts(row),
            **_acceptance(row),
        }
        if save_outputs:
            record["outputs"] = [turn.tokens for turn in row.turns]
        out.append(record)
    return {"meta": meta, "rows": out}


def _rounded(value: float | None, scale: float = 1.0) -> float | None:
    return None if value is None else round(scale * value, 3)


def _parts(row: Row) -> dict[str, Any]:
    """Return the milliseconds of the parts of a cycle, for rows of our own engine."""
    passes = sum(stats.passes for stats in row.stats)
    if not passes or not all(stats.parts_timed for stats in row.stats):
        return {}
    parts = {
        "draft_ms": sum(s.draft_seconds for s in row.stats),
        "verify_ms": sum(s.verify_seconds for s in row.stats),
        "other_ms": sum(s.decode_seconds - s.draft_seconds - s.verify_seconds for s in row.stats),
    }
    return {name: round(1e3 * total / passes, 3) for name, total in parts.items()}


def _acceptance(row: Row) -> dict[str, Any]:
    """Return the acceptance of rows that draft and whose tau is measured.

    `accepted_by_depth`: share of passes that accepted at least 1, 2, ... tokens; `n_alpha`, of
    chains: acceptance rate of drafted token n + 1 when the first n were accepted.
    """
    paths = row.path_lengths
    if not paths or row.simulated:
        return {}
    reached = [sum(n >= d for n in paths) for d in range(max(paths) + 2)]
    return {
        "accepted_by_depth": [round(n / len(paths), 4) for n in reached[1:-1]],
        "n_alpha": [round(reached[d + 1] / reached[d], 4) for d in range(len(reached) - 2)]
        if row.name.startswith("eagle-chain")  # of a head of its own, too
        else None,
    }


def metadata(options: BenchOptions, runtime: RuntimeOptions) -> dict[str, Any]:
    """Return the conditions of the measured numbers."""
    device = pick_device(runtime.device)
    name = device_name(device)
    return {
        "commit": checkout_commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": name,
        "accumulate": accumulate_on(device) if runtime.backend == "fasteagle" else None,
        "bandwidth": dataclasses.asdict(memory_bandwidth(device, name)),  # what MBU is a share of
        "threads": torch.get_num_threads(),
        "fasteagle": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        **dataclasses.asdict(options),
        "data": str(options.data or "package prompts"),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


COLUMNS = (
    *("row", "precision", "tok/s", "median (min - max) per turn", "x plain", "tau"),
    *("accepted by depth", "tree", "draft + verify + other ms", "P50 / P99 ms per token"),
    *("TTFT s", "MBU", "peak GB"),
)


def print_report(report: dict[str, Any], md: bool = False) -> None:
    """Print the table, in Markdown with `md`, and the conditions below it."""
    print_table(COLUMNS, [_cells(row) for row in report["rows"]], md=md)
    print(("\n" if md else "") + conditions(report))


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells under `COLUMNS`; values derived from a supplied tau are marked."""

    def derived(text: str) -> str:
        return f"{text} *simulated*" if row["simulated"] and text != "-" else text

    spread = latency = parts = "-"
    if row["tok_s_median"]:
        spread = f"{row['tok_s_median']:.1f} ({row['tok_s_min']:.1f} - {row['tok_s_max']:.1f})"
    if row["p50_ms"] is not None:
        latency = f"{row['p50_ms']:.1f} / {row['p99_ms']:.1f}"
    if "draft_ms" in row:
        parts = f"{row['draft_ms']:.1f} + {row['verify_ms']:.1f} + {row['other_ms']:.1f}"
    return (
        row["name"],
        row["precision"],
        derived(f"{row['tok_s']:.1f}"),
        derived(spread),
        derived(_cell(row["speedup_vs_plain"])),
        derived(f"{row['tau']:.2f}"),
        " ".join(f"{share:.2f}" for share in row.get("accepted_by_depth", [])[:3]) or "-",
        _tree_cell(row),
        parts,
        derived(latency),
        f"{row['ttft_s']:.3f}",
        _cell(row["mbu"]),
        f"{row['peak_mem_gb']:.2f}",
    )


def _tree_cell(row: dict[str, Any]) -> str:
    """Return depth, top-k and nodes; for a tuned row the shares of its passes."""
    if row["auto_shares"] is not None:
        return "auto: " + row["auto_shares"]
    return str(shape_of(**row["tree"])) if row["tree"] else "-"


def conditions(report: dict[str, Any]) -> str:
    """Return model, prompts, machine and versions, and how to read the columns."""
    meta = report["meta"]
    first = report["rows"][0]
    text = (
        f"{meta['model']}, {counted(first['turns'], 'turn')} of {meta['data']}, at most "
        f"{counted(meta['max_new_tokens'], 'new token')}, T={meta['temperature']:g}; "
        f"{meta['device']}, {counted(meta['threads'], 'thread')}; torch {meta['torch']}, "
        f"transformers {meta['transformers']}, fasteagle {meta['commit'] or meta['fasteagle']}; "
        f"MBU of {meta['bandwidth']['gb_s']:.1f} GB/s ({meta['bandwidth']['source']}); "
        "accepted by depth: share of passes that accepted at least 1, 2, 3 drafted tokens; "
        "tree: depth, top-k, nodes"
    )
    barriers = [row["barrier_ns"] for row in report["rows"] if row["barrier_ns"] is not None]
    if barriers:
        text += f"; {barrier_line(barriers)}"
    simulated = [row for row in report["rows"] if row["simulated"]]
    if not simulated:
        return text
    return (
        f"{text}. *simulated*: random weights; cycles are measured, tokens per cycle are not "
        f"(tau {simulated[0]['simulated_tau']:g} was given), and tok/s is tau / cycle"
    )


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
