"""Result of a benchmark run: the JSON document with its conditions, and the table."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fasteagle import __version__
from fasteagle.bench.latency import percentile
from fasteagle.bench.measure import memory_bandwidth
from fasteagle.bench.rows import Row
from fasteagle.bench.run import BenchOptions
from fasteagle.device import accumulate_on, device_name, pick_device
from fasteagle.options import RuntimeOptions
from fasteagle.shapes import shape_of
from fasteagle.tables import markdown_table


def build_report(
    rows: Sequence[Row], options: BenchOptions, runtime: RuntimeOptions, save_outputs: bool
) -> dict[str, Any]:
    """Return the JSON document: `meta` and one object per row."""
    meta = metadata(options, runtime)
    plain = {row.precision: row.tok_s for row in rows if row.name == "plain"}
    out = []
    for row in rows:
        base = plain.get(row.precision)
        rates = row.turn_rates
        read_gb_s = row.pass_bytes * row.passes_s / 1e9
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
            **_latency(row),
            **_simulation(row),
            "speedup_vs_plain": round(row.tok_s / base, 3) if base else None,
            "mbu": round(read_gb_s / meta["bandwidth"]["gb_s"], 6),
            "context": round(row.context, 1),
            "peak_mem_gb": round(row.peak_bytes / 1e9, 3),
            "scheme": row.scheme.name if row.scheme else None,
            "lm_head_bits": row.scheme.head_bits if row.scheme else None,
            "dtype": row.dtype,
            "tree": dataclasses.asdict(row.tree) if row.tree else None,
            "auto": row.auto,
            "auto_shares": row.auto_shares,
            "plain_rows": row.plain_rows,
            **_parts(row),
            **_acceptance(row),
        }
        if save_outputs:
            record["outputs"] = [turn.tokens for turn in row.turns]
        out.append(record)
    return {"meta": meta, "rows": out}


def _latency(row: Row) -> dict[str, Any]:
    """Return median and 99th percentile of the time per token, in ms; see `latency`."""
    latencies = row.latencies
    shares = {"p50_ms": percentile(latencies, 0.5), "p99_ms": percentile(latencies, 0.99)}
    return {name: None if s is None else round(1e3 * s, 3) for name, s in shares.items()}


def _simulation(row: Row) -> dict[str, Any]:
    """Return whether tau was supplied; if so, also the tau that was measured."""
    record = {"simulated": row.simulated, "simulated_tau": row.simulated_tau}
    return {**record, "measured_tau": round(row.measured_tau, 3)} if row.simulated else record


def _parts(row: Row) -> dict[str, Any]:
    """Return the milliseconds of the parts of a cycle, for rows of our own engine."""
    passes = sum(stats.passes for stats in row.stats)
    if not passes:
        return {}
    if not all(stats.parts_timed for stats in row.stats):
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
        if row.name == "eagle-chain"
        else None,
    }


def metadata(options: BenchOptions, runtime: RuntimeOptions) -> dict[str, Any]:
    """Return the conditions of the measured numbers."""
    device = pick_device(runtime.device)
    name = device_name(device)
    return {
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": name,
        "accumulate": accumulate_on(device) if runtime.backend == "fasteagle" else None,
        "bandwidth": dataclasses.asdict(memory_bandwidth(device, name)),  # what MBU is a share of
        "threads": torch.get_num_threads(),
        "fasteagle": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
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
    """Return the commit of this file's checkout, marked if it was changed; None outside one."""
    command = ["git", "-C", str(Path(__file__).resolve().parent), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


COLUMNS = (
    "row",
    "precision",
    "tok/s",
    "median (min - max) per turn",
    "x plain",
    "tau",
    "accepted by depth",
    "tree",
    "draft + verify + other ms",
    "P50 / P99 ms per token",
    "TTFT s",
    "MBU",
    "peak GB",
)


def table_rows(report: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the table's cells, under `COLUMNS`; values derived from a supplied tau are marked."""
    return [_cells(row) for row in report["rows"]]


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
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
        f"{meta['model']}, {first['turns']} turns of {meta['data']}, at most "
        f"{meta['max_new_tokens']} new tokens, T={meta['temperature']:g}; {meta['device']}, "
        f"{meta['threads']} threads; torch {meta['torch']}, transformers {meta['transformers']}, "
        f"fasteagle {meta['commit'] or meta['fasteagle']}; MBU of {meta['bandwidth']['gb_s']:.1f} "
        f"GB/s ({meta['bandwidth']['source']}); accepted by depth: share of passes that accepted "
        f"at least 1, 2, 3 drafted tokens; tree: depth, top-k, nodes"
    )
    simulated = [row for row in report["rows"] if row["simulated"]]
    if not simulated:
        return text
    return (
        f"{text}. *simulated*: random weights; cycles are measured, tokens per cycle are not "
        f"(tau {simulated[0]['simulated_tau']:g} was given), and tok/s is tau / cycle"
    )


def markdown(report: dict[str, Any]) -> str:
    """Return the table in Markdown, with the conditions below it."""
    return markdown_table(COLUMNS, table_rows(report)) + "\n\n" + conditions(report)


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
