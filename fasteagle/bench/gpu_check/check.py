"""Runs the stages of the check one after the other, each in a process with a limit in time.

Whatever a stage does (fails, hangs, writes nonsense), the next one runs, and the record on disk
holds all that is known so far. Needs no torch.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fasteagle import __version__
from fasteagle.bench.gpu_check.plan import STAGE_NAMES, CheckOptions, Stage, stage_command
from fasteagle.bench.gpu_check.report import lines_of, markdown
from fasteagle.errors import FasteagleError, note
from fasteagle.paths import require_writable, write_atomic

RECORD, REPORT, LOG = "gpu_check.json", "gpu_check.md", "gpu_check.log"
LEAST_SECONDS = 5.0  # with less time left a stage does not begin
GRACE_SECONDS = 5.0  # between asking a stage to end and ending it
SHOWN_LINES = 20  # of a failed stage's output, in the record
VERSIONS = ("torch", "triton", "transformers", "numpy", "safetensors", "gguf", "torchao")

Command = Callable[[Stage, CheckOptions, Path, float], Sequence[str]]


def run_check(
    options: CheckOptions, command: Command = stage_command, notify: Callable[[str], None] = note
) -> dict[str, Any]:
    """Run the chosen stages and return the record, which `options.out` holds too.

    Stages of an earlier run in the same folder stay in the record until they are run again.
    """
    require_writable(options.out / RECORD)
    record = _begun(options)
    deadline = time.monotonic() + 60 * options.minutes
    (options.out / LOG).write_bytes(b"")
    stopped: str | None = None
    for stage in options.chosen:
        left = deadline - time.monotonic()
        if stopped is not None:
            entry = _not_run(stage, f"not run: {stopped} failed")
        elif left < LEAST_SECONDS:
            entry = _not_run(stage, f"not run: the {options.minutes:g} minutes were over")
        else:
            limit = stage.limit(left, options.dry_run)
            notify(f"{stage.name}: {stage.what}, at most {limit:.0f} s ...")
            entry = _run_stage(stage, options, command, limit)
        if stage.needed and entry["error"]:
            stopped = stage.name
        _enter(record, entry)
        _write(options.out, record)
        for line in lines_of(entry):
            notify(line)
    return record


def _begun(options: CheckOptions) -> dict[str, Any]:
    """The record before the first stage, with the stages of an earlier run."""
    kept = _earlier(options.out / RECORD, options.dry_run)
    stages = [entry for entry in kept if entry["name"] not in options.stages]
    now = datetime.datetime.now(datetime.timezone.utc)
    meta = {
        "date": now.isoformat(timespec="seconds"),
        "commit": _commit(),
        "fasteagle": __version__,
        "python": platform.python_version(),
        **{name: _version(name) for name in VERSIONS},
        "dry_run": options.dry_run,
        "minutes": options.minutes,
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }
    return {"meta": meta, "stages": stages}


def _earlier(path: Path, dry_run: bool) -> list[dict[str, Any]]:
    """The stages of an earlier record. Raises `FasteagleError` if it is not one, or of a dry run
    where this is none: the two must not be mixed.
    """
    if not path.exists():
        return []
    try:
        record = json.loads(path.read_text("utf-8"))
        stages, was_dry = list(record["stages"]), record["meta"]["dry_run"]
        known = all(entry["name"] in STAGE_NAMES for entry in stages)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FasteagleError(f"{path} is not a record of this check ({error!r})") from error
    if not known or was_dry != dry_run:
        raise FasteagleError(f"{path} is of another kind of run: give another --out")
    return stages


def _commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).resolve().parent), "describe", "--always", "--dirty"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
        return done.stdout.strip() or None
    return None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _not_run(stage: Stage, reason: str) -> dict[str, Any]:
    return {"name": stage.name, "what": stage.what, "seconds": 0.0, "error": reason, "results": {}}


def _run_stage(
    stage: Stage, options: CheckOptions, command: Command, limit: float
) -> dict[str, Any]:
    """What a stage found, and its error if it had one."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        results, output = Path(folder) / "results.json", Path(folder) / "output"
        code = _run_limited(command(stage, options, results, limit), output, limit)
        text = output.read_text("utf-8", errors="replace")
        found, problem = _read_results(results)
    lines = [line for line in text.splitlines() if line.strip()]
    error = problem
    if code is None:
        error = f"took longer than {limit:.0f} s and was ended"
    elif code != 0:
        error = f"exit code {code}: {lines[-1][:300] if lines else 'it said nothing'}"
    with (options.out / LOG).open("a", encoding="utf-8") as log:
        log.write(f"== {stage.name}\n{text}\n")
    entry = {
        "name": stage.name,
        "what": stage.what,
        "seconds": round(time.monotonic() - begin, 1),
        "error": error,
        "results": found,
    }
    return entry if error is None else {**entry, "output": lines[-SHOWN_LINES:]}


def _run_limited(command: Sequence[str], output: Path, limit: float) -> int | None:
    """Exit code of a process, None if it was ended at its limit, with all that it had begun."""
    with output.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:  # also where a person interrupts, and for what a stage has left running
            _end_group(process)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and its children: politely, then not."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read_results(path: Path) -> tuple[dict[str, Any], str | None]:
    """What a stage has written, and what is wrong with it."""
    try:
        # NaN and infinity are no JSON, and our record is read by others.
        found = json.loads(path.read_text("utf-8"), parse_constant=lambda name: None)
    except FileNotFoundError:
        return {}, "it wrote no results"
    except (OSError, ValueError) as error:
        return {}, f"its results cannot be read: {error}"
    if not isinstance(found, dict):
        return {}, f"its results are a {type(found).__name__}, not an object"
    return found, None


def _enter(record: dict[str, Any], entry: dict[str, Any]) -> None:
    """Put a stage's entry into the record, in the plan's order."""
    others = [e for e in record["stages"] if e["name"] != entry["name"]]
    order = {name: i for i, name in enumerate(STAGE_NAMES)}
    record["stages"] = sorted([*others, entry], key=lambda e: order[e["name"]])


def _write(out: Path, record: dict[str, Any]) -> None:
    text = json.dumps(record, indent=1, allow_nan=False)
    write_atomic(out / RECORD, (text + "\n").encode())
    write_atomic(out / REPORT, markdown(record).encode())
