"""Checks that need a GPU, one command after the other; a failure does not stop the next.

python scripts/gpu_check.py --out DIR
python scripts/gpu_check.py --out DIR --stages start,kernels,profile_7b --minutes 9
python scripts/gpu_check.py --out DIR --wheels WHEELS --model part-a --model part-b
python scripts/gpu_check.py --out DIR --dry-run          # on the CPU, with small shapes

DIR/STAGE.log holds what a stage printed, DIR/STAGE.json its record where it has one, and
DIR/gpu_check.json command, seconds and exit code of every stage, those of an earlier run included
that are not run again. Caches of compilers lie in DIR too. No stage takes more than nine minutes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the package of this checkout, installed or not

from fasteagle.cli.command import Script  # noqa: E402
from fasteagle.errors import FasteagleError, note, suggest  # noqa: E402
from fasteagle.options import DEFAULT_MODEL  # noqa: E402
from fasteagle.paths import require_writable, write_atomic  # noqa: E402
from fasteagle.tables import print_table  # noqa: E402

RECORD = "gpu_check.json"
LEAST_SECONDS = 5.0  # with less time left a stage does not begin
GRACE_SECONDS = 5  # between asking a stage to end and ending it
TAIL = 10  # lines of a failed stage's output, in the record
DRY_SECONDS = 400.0  # of a stage on a dry run: the machine may be busy
TREES = ("3/1/3", "4/3/7", "5/4/15", "5/4/23", "6/5/31")
DRY = ("--model", "smollm2-135m", "--device", "cpu")
DRY_ROWS = (
    *(*DRY, "--cpu-kernels", "aten", "--no-compile", "--max-new-tokens", "4"),
    *("--load-format", "dummy", "--rows", "plain,eagle@2/2/3", "--simulate-tau", "2"),
)
DRY_KERNELS = (*DRY, "--linears", "out", "--kernels", "int4-g64,fp16", "--rows", "1,4")
DRY_PROFILE = (*DRY, "--no-compile", "--cycles", "1", "--passes", "1,2", "--tree", "2/2/3")
START = """
import shutil, subprocess, torch
from fasteagle.device import device_name, pick_device
device = pick_device({device!r})
print(device_name(device), "torch", torch.__version__, "CUDA", torch.version.cuda)
if device.type == "cuda":
    print(torch.cuda.get_device_properties(device))
if shutil.which("nvidia-smi"):
    subprocess.run(["nvidia-smi"], check=False)
"""


@dataclasses.dataclass(frozen=True)
class Stage:
    """Command of one stage: words after `python`, with {out} and {json} for its results' places."""

    name: str
    what: str
    words: Sequence[str]
    dry_words: Sequence[str] = ()  # after the others on a dry run: the last of an option counts
    minutes: float = 4.0  # at most
    needed: bool = False  # the others have no meaning where this one fails
    caches: str = "caches"  # folder of what compilers keep


def rows_of(name: str, model: str, precision: str, rows: str, *more: str, **settings: Any) -> Stage:
    """Return a stage of `tokens_per_sec.py` on random weights; tau 3.6 is EAGLE's on MT-bench."""
    words = ["scripts/tokens_per_sec.py", "--model", model, "--load-format", "dummy"]
    words += ["--precision", precision, "--rows", rows, "--limit", "1", "--md", "--save-outputs"]
    words += ["--json", "{json}", *(("--simulate-tau", "3.6") if "eagle" in rows else ()), *more]
    what = settings.pop("what", f"tokens per second of {model}, {precision}: {rows}")
    return Stage(name, what, words, DRY_ROWS, **settings)


def kernels_of(name: str, accumulate: str) -> Stage:
    words = ["scripts/bench_kernels.py", "--model", "llama2-7b,llama2-70b", "--md"]
    words += ["--accumulate", accumulate, "--json", "{json}"]
    return Stage(name, f"linears of 7B and 70B alone, sums in {accumulate}", words, DRY_KERNELS)


def profile_of(name: str, model: str) -> Stage:
    words = ["scripts/profile_cycle.py", "--model", model, "--json", "{json}"]
    return Stage(name, f"passes and kernels of {model} int4, idle time", words, DRY_PROFILE)


def test_stages() -> list[Stage]:
    """Return a stage for every file with tests marked gpu.

    Files are chosen by their text: others may need packages that a borrowed machine lacks. Each
    has a process of its own, which a broken device context does not outlive, and no other test
    beside it takes memory.
    """
    pytest = ["-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", "-m", "gpu", "-v"]
    return [
        Stage(
            f"gpu_tests/{path.stem}",
            f"tests marked gpu in {path.relative_to(ROOT)}",
            [*pytest, "--tb=short", str(path)],
            minutes=9,
        )
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if re.search(r"pytest\.mark\.gpu\b", path.read_text("utf-8"))
    ]


def all_stages(dry_run: bool, model: str, wheels: Path | None) -> list[Stage]:
    """Return the stages in order: the most informative come first, as time may run out."""
    start = START.format(device="cpu" if dry_run else "cuda")
    trees = ",".join(f"eagle@{tree}" for tree in TREES)
    cold = ("--no-compile", "--max-new-tokens", "16")
    install = ["-m", "pip", "install", "--no-index", "--no-deps", "--find-links", str(wheels)]
    packages = [Stage("packages", "torchao and gguf", [*install, "torchao", "gguf"], minutes=2)]
    ours = ["scripts/tokens_per_sec.py", "--model", model, "--device", "cuda", "--precision"]
    ours += ["auto", "--rows", "plain,eagle,ngram,fused", "--md", "--json", "{json}"]
    return [
        Stage("start", "the device", ["-c", start], minutes=1, needed=True),
        Stage("facts", "versions", ["-m", "torch.utils.collect_env"], minutes=2),
        *(packages if wheels else []),
        kernels_of("kernels", "fp16"),
        profile_of("profile_7b", "llama2-7b"),
        rows_of("speed_int4", "llama2-7b", "int4", f"plain,{trees},fused@5/4/15/8", minutes=8),
        *test_stages(),
        profile_of("profile_33b", "vicuna-33b"),
        rows_of("large_33b", "vicuna-33b", "int4", "plain,eagle@5/4/15,eagle@6/5/31"),
        rows_of("large_70b", "llama2-70b", "int4", "plain,eagle@5/4/15,eagle@6/5/31"),
        Stage("default_model", "real text and tau", ours, DRY_ROWS, minutes=6),
        rows_of("speed_int8", "llama2-7b", "int8", "plain,eagle@5/4/15"),
        rows_of("speed_bf16", "llama2-7b", "bf16", "hf,plain,eagle@5/4/15"),
        rows_of("speed_kv8", "llama2-7b", "int4", "plain,eagle@5/4/15", "--kv", "int8"),
        rows_of("gpt_fast", "llama2-7b", "int4", "plain,gpt-fast"),
        kernels_of("kernels_fp32", "fp32"),
        rows_of("cold_start", "llama2-7b", "int4", "plain", *cold, caches="cold", minutes=3),
        rows_of("warm_start", "llama2-7b", "int4", "plain", *cold, caches="cold", minutes=3),
    ]


def chosen_stages(stages: Sequence[Stage], names: str | None) -> list[Stage]:
    """Return the stages named in a comma list; a name before a slash stands for all after it."""
    if names is None:
        return list(stages)
    known = {part for stage in stages for part in (stage.name, stage.name.split("/")[0])}
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in known:
            raise FasteagleError(
                f"unknown stage {name!r}{suggest(name, known)}: use {', '.join(sorted(known))}"
            )
    return [s for s in stages if s.name in wanted or s.name.split("/")[0] in wanted]


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
        write_atomic(out / RECORD, json.dumps(record(entries, dry_run), indent=1).encode())
    return entries


def entry_of(stage: Stage, **values: Any) -> dict[str, Any]:
    """Return the entry of a stage in the record."""
    unset = {"seconds": 0.0, "exit_code": None, "error": None}
    return {"name": stage.name, "what": stage.what, **unset, **values}


def run_stage(stage: Stage, out: Path, limit: float, dry_run: bool) -> dict[str, Any]:
    """Run one command, its output in DIR/STAGE.log."""
    log = out / f"{stage.name}.log"
    places = {"{out}": str(out), "{json}": str(log.with_suffix(".json"))}
    words = [*stage.words, *(stage.dry_words if dry_run else ())]
    command = [sys.executable, *(places.get(word, word) for word in words)]
    log.parent.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    code = run_limited(command, log, limit, environment(out / stage.caches))
    seconds = time.monotonic() - begin
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
    """Return the environment of a stage: this checkout, few compile workers, caches in `caches`."""
    others = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *([others] if others else [])]),
        "OMP_WAIT_POLICY": "PASSIVE",  # a thread that waits must not spin: cores may be shared
        "TORCHINDUCTOR_COMPILE_THREADS": "4",
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
    try:
        before = json.loads(path.read_text("utf-8"))
        was_dry, entries = before["meta"]["dry_run"], list(before["stages"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FasteagleError(f"{path} is no record of this check ({error!r})") from error
    if was_dry != dry_run:
        raise FasteagleError(f"{path} is of another kind of run: give another --out")
    return entries


def record(entries: Sequence[dict[str, Any]], dry_run: bool) -> dict[str, Any]:
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    commit = None
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        commit = subprocess.run(git, capture_output=True, text=True, timeout=10).stdout.strip()
    now = datetime.datetime.now(datetime.UTC)
    meta = {"date": now.isoformat(timespec="seconds"), "commit": commit, "dry_run": dry_run}
    return {"meta": meta, "stages": list(entries)}


def joined(parts: Sequence[Path], out: Path) -> str:
    """Return the model's name or path; several parts are joined into one file."""
    if len(parts) < 2:
        return str(parts[0]) if parts else DEFAULT_MODEL
    whole = out / "model.gguf"
    with whole.open("wb") as file:
        for part in parts:
            with part.open("rb") as source:
                shutil.copyfileobj(source, file)
    return str(whole)


@click.command(cls=Script)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True)
@click.option("--stages", "names", help="Comma list.  [default: all]")
@click.option("--minutes", default=60.0, show_default=True, help="For all of it.")
@click.option("--dry-run", is_flag=True, help="On the CPU, with small shapes.")
@click.option(
    "--model",
    "parts",
    type=click.Path(path_type=Path),
    multiple=True,
    help="Of the stage default_model; parts of a file, each with the option, are joined.",
)
@click.option(
    "--wheels",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Folder of wheels of torchao and gguf, for a machine without network.",
)
def main(
    out: Path,
    names: str | None,
    minutes: float,
    dry_run: bool,
    parts: tuple[Path, ...],
    wheels: Path | None,
) -> None:
    """Run the stages in turn; exit code 1 if one failed."""
    out = out.resolve()
    require_writable(out / RECORD)
    stages = chosen_stages(all_stages(dry_run, joined(parts, out), wheels), names)
    entries = run_stages(stages, out, minutes, dry_run)
    lines = [(e["name"], f"{e['seconds']:.0f}", e["error"] or "ok") for e in entries]
    print_table(("stage", "seconds", "result"), lines, numeric=("seconds",))
    print(f"record: {out / RECORD}")
    sys.exit(int(any(entry["error"] for entry in entries)))


if __name__ == "__main__":
    main()
