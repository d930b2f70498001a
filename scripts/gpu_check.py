"""Checks that need a GPU, one command after the other; a failure does not stop the next.

python scripts/gpu_check.py --pack                       # what a machine without network is given
python scripts/gpu_check.py --out DIR --group 1          # then 2, 3, 4: nine minutes each
python scripts/gpu_check.py --out DIR --stages start,kernels,profile_7b --minutes 9
python scripts/gpu_check.py --out DIR --merge OTHER      # the results of another run, too
python scripts/gpu_check.py --out DIR --dry-run          # on the CPU, with small shapes

DIR/STAGE.log holds what a stage printed, DIR/STAGE.json its record where it has one, and
DIR/gpu_check.json command, seconds and exit code of every stage, those of an earlier run included
that are not run again. No stage takes more than nine minutes. Caches of compilers lie in the
folder of temporary files.
"""

from __future__ import annotations

import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the package of this checkout, installed or not

from fasteagle.cli.command import Names, Script, UserPath  # noqa: E402
from fasteagle.errors import FasteagleError, note, suggest  # noqa: E402
from fasteagle.loading.registry import local_path  # noqa: E402
from fasteagle.options import DEFAULT_MODEL  # noqa: E402
from fasteagle.paths import checkout_commit, require_writable, write_json  # noqa: E402
from fasteagle.prompts import write_questions  # noqa: E402
from fasteagle.tables import print_table  # noqa: E402
from gpu_stages import DRY_PROMPT, PACKAGES, PROMPTS, Stage, all_stages  # noqa: E402

RECORD = "gpu_check.json"
LEAST_SECONDS = 5.0  # with less time left a stage does not begin
GRACE_SECONDS = 5  # between asking a stage to end and ending it
TAIL = 10  # lines of a failed stage's output, in the record
DRY_SECONDS = 400.0  # of a stage on a dry run: the machine may be busy
CARRIED = ROOT / "carry"  # what `--pack` packs, ignored by git
CARRY_BYTES = 62 * 2**20  # of a call, this checkout included: a borrowed machine may take 64 MiB
LOG_BYTES = 15 * 2**20  # of a log: it may give back files of 16 MiB
GROUP_MINUTES = 9.0


def chosen_stages(stages: Sequence[Stage], names: Sequence[str] | None) -> list[Stage]:
    """Return the stages in `names`, all without them."""
    if names is None:
        return list(stages)
    known = {stage.name for stage in stages}
    for name in names:
        if name not in known:
            raise FasteagleError(
                f"unknown stage {name!r}{suggest(name, known)}: use {', '.join(sorted(known))}"
            )
    return [stage for stage in stages if stage.name in names]


def run_stages(
    stages: Sequence[Stage], out: Path, minutes: float, dry_run: bool
) -> list[dict[str, Any]]:
    """Run stages in turn and return their entries, which the record holds after each of them."""
    entries = earlier(out / RECORD, dry_run)
    deadline = time.monotonic() + 60 * minutes
    stopped: str | None = None
    for stage in stages:
        left = deadline - time.monotonic()
        if stopped is not None:
            entry = entry_of(stage, error=f"not run: {stopped} failed")
        elif left < LEAST_SECONDS:
            entry = entry_of(stage, error=f"not run: the {minutes:g} minutes were over")
        else:
            limit = min(left, DRY_SECONDS if dry_run else 60 * stage.minutes)
            note(f"{stage.name}: {stage.what}, at most {limit:.0f} s ...")
            entry = run_stage(stage, out, limit, dry_run)
        if stage.needed and entry["error"]:
            stopped = stage.name
        note(f"{stage.name}: {entry['error'] or 'done'} ({entry['seconds']:.0f} s)")
        entries = [each for each in entries if each["name"] != stage.name] + [entry]
        write_json(out / RECORD, record(entries, dry_run))
    return entries


def entry_of(stage: Stage, **values: Any) -> dict[str, Any]:
    """Return the entry of a stage in the record."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    unset = {"date": now, "seconds": 0.0, "exit_code": None, "error": None}
    return {"name": stage.name, "what": stage.what, **unset, **values}


def run_stage(stage: Stage, out: Path, limit: float, dry_run: bool) -> dict[str, Any]:
    """Run one command, its output in DIR/STAGE.log."""
    log = out / f"{stage.name}.log"
    result = log.with_suffix(".json")
    words = [*stage.words, *(stage.dry_words if dry_run else ())]
    placed = (word.replace("{out}", str(out)).replace("{json}", str(result)) for word in words)
    command = [sys.executable, *placed]
    begin = time.monotonic()
    caches = Path(tempfile.gettempdir()) / "fasteagle-gpu-check" / stage.caches
    code = run_limited(command, log, limit, environment(caches))
    seconds = time.monotonic() - begin
    if log.stat().st_size > LOG_BYTES:
        log.write_bytes(log.read_bytes()[-LOG_BYTES:])
    lines = log.read_text("utf-8", errors="replace").splitlines()
    last = next((line for line in reversed(lines) if line.strip()), "it said nothing")
    error = None
    if code != 0 and seconds >= limit:
        error = f"took longer than {limit:.0f} s and was ended"
    elif code != 0:
        error = f"exit code {code}: {last[:300]}"
    entry = entry_of(stage, seconds=round(seconds, 1), exit_code=code, error=error)
    entry["command"] = ["python", *command[1:]]
    return entry if error is None else {**entry, "output": lines[-TAIL:]}


def environment(caches: Path) -> dict[str, str]:
    """Return the environment of a stage: this checkout, caches in `caches`.

    A cycle of seven shapes took over 100 s to compile with four workers on 16 cores.
    """
    others = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *([others] if others else [])]),
        "OMP_WAIT_POLICY": "PASSIVE",  # a thread that waits must not spin: cores may be shared
        "TORCHINDUCTOR_COMPILE_THREADS": str(max(4, min(16, os.cpu_count() or 1))),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
    }


def run_limited(
    command: Sequence[str], log: Path, limit: float, environment: Mapping[str, str]
) -> int:
    """Return the exit code; at its limit the command is ended, with its children."""
    limited = ["timeout", f"--kill-after={GRACE_SECONDS}", str(limit), *command]
    with log.open("wb") as file:
        process = subprocess.Popen(
            limited,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        try:
            return process.wait()
        finally:  # where a person interrupts: it passes this on to the command
            process.terminate()
            process.wait()


def earlier(path: Path, dry_run: bool) -> list[dict[str, Any]]:
    """Return the stages of an earlier record; raise `FasteagleError` where it cannot go on."""
    if not path.exists():
        return []
    before = json.loads(path.read_text("utf-8"))
    if before["meta"]["dry_run"] != dry_run:
        raise FasteagleError(f"{path} is of another kind of run: give another --out")
    return list(before["stages"])


def record(entries: Sequence[dict[str, Any]], dry_run: bool) -> dict[str, Any]:
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    meta = {"date": now, "commit": checkout_commit(), "dry_run": dry_run}
    return {"meta": meta, "stages": list(entries)}


def prompt_of(n: int) -> str:
    """Return a text of n tokens of random weights: four letters each."""
    return "".join(f"{i % 10_000:04d}" for i in range(n))


def write_prompts(out: Path, dry_run: bool) -> None:
    """Write the `PROMPTS` of stages."""
    for name, counts in PROMPTS.items():
        texts = ([prompt_of(DRY_PROMPT if dry_run else n)] for n in counts)
        write_questions(out / f"{name}.jsonl", texts)


def merged(out: Path, other: Path) -> list[dict[str, Any]]:
    """Take over the stages of another run, with their files, where they are newer or missing."""
    before = json.loads((other / RECORD).read_text("utf-8"))
    entries = {entry["name"]: entry for entry in earlier(out / RECORD, before["meta"]["dry_run"])}
    for entry in before["stages"]:
        name = entry["name"]
        was_run = entry["exit_code"] is not None
        if name in entries and (entries[name]["date"] >= entry["date"] or not was_run):
            continue
        entries[name] = entry
        for ending in (".log", ".json"):
            if (file := other / f"{name}{ending}").exists():
                shutil.copyfile(file, out / f"{name}{ending}")
    stages = list(entries.values())
    write_json(out / RECORD, {**before, "stages": stages})
    return stages


def pack(carried: Path) -> None:
    """Pack what a machine without network lacks into folders for one call each; print them."""
    model = local_path(DEFAULT_MODEL)
    if model is None:
        raise FasteagleError(f"{DEFAULT_MODEL} is not in the cache: run fasteagle chat once")
    shutil.rmtree(carried, ignore_errors=True)
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    names = [ROOT / name for name in tracked.stdout.decode().split("\0") if name]
    checkout = sum(path.stat().st_size for path in names if path.is_file())
    wheels = carried / "1"
    download = ["-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels), *PACKAGES]
    subprocess.run([sys.executable, *download], check=True)
    free = CARRY_BYTES - checkout - sum(path.stat().st_size for path in wheels.iterdir())
    data, room, parts = model.read_bytes(), max(free, 2**20), list[bytes]()
    while data:
        parts.append(data[:room])
        data, room = data[room:], CARRY_BYTES - checkout
    for call, part in enumerate(parts, 1):
        (carried / str(call)).mkdir(exist_ok=True)
        (carried / str(call) / f"model.gguf.{call}of{len(parts)}").write_bytes(part)
    lines = [
        (f"carry/{path.parent.name}", path.name, f"{path.stat().st_size / 2**20:.1f}")
        for path in sorted(carried.rglob("*"))
        if path.is_file()
    ]
    print_table(("in a call", "file", "MiB"), lines, numeric=("MiB",))
    print(f"and this checkout with each: {checkout / 2**20:.1f} MiB")


@click.command(cls=Script)
@click.option("--out", type=UserPath(file_okay=False))
@click.option("--group", type=click.IntRange(1, 4), help="Run one group of stages.  [default: all]")
@click.option("--stages", "names", type=Names(), help="Comma list of names.  [default: all]")
@click.option("--minutes", type=float, help=f"Time limit.  [default: {GROUP_MINUTES:g} per group]")
@click.option("--dry-run", is_flag=True, help="Run on the CPU, with small shapes.")
@click.option("--pack", "packs", is_flag=True, help=f"Only pack its files into {CARRIED.name}/.")
@click.option(
    "--merge",
    "others",
    type=UserPath(file_okay=False, exists=True),
    multiple=True,
    help="Folder of another run: add its results to --out and run nothing.",
)
def main(
    out: Path | None,
    group: int | None,
    names: tuple[str, ...] | None,
    minutes: float | None,
    dry_run: bool,
    packs: bool,
    others: tuple[Path, ...],
) -> None:
    """Run the stages in turn; exit code 1 if one failed."""
    if packs:
        pack(CARRIED)
        return
    if out is None:
        raise FasteagleError("--out DIR is missing: where the results go")
    out = out.resolve()
    require_writable(out / RECORD)
    if others:
        entries = [merged(out, other) for other in others][-1]
    else:
        groups = all_stages(dry_run, CARRIED)
        chosen = groups if group is None else groups[group - 1 : group]
        stages = chosen_stages([stage for each in chosen for stage in each], names)
        write_prompts(out, dry_run)
        usual = GROUP_MINUTES * len(chosen)
        entries = run_stages(stages, out, usual if minutes is None else minutes, dry_run)
    lines = [(e["name"], f"{e['seconds']:.0f}", e["error"] or "ok") for e in entries]
    print_table(("stage", "seconds", "result"), lines, numeric=("seconds",))
    print(f"record: {out / RECORD}")
    sys.exit(int(any(entry["error"] for entry in entries)))


if __name__ == "__main__":
    main()
