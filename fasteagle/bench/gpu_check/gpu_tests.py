"""Stage `gpu_tests`: the tests marked `gpu`, each file in a process of its own, several at once.

Files are found by their text: the marked ones need nothing that a borrowed machine lacks, others
may, and collecting them would fail.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fasteagle.bench.gpu_check.stage import Context
from fasteagle.errors import FasteagleError

WORKERS = 8
COUNTS = ("passed", "skipped", "failed")
TAIL = 5  # lines of a file that was not done in time, in the report
_MARK = re.compile(r"pytest\.mark\.gpu\b")
# A test in the log of `pytest -v`: written when it begins, its outcome behind it when it has ended.
_TEST = re.compile(r"^\S*\.py::(?P<name>.*?)(?: (?P<outcome>PASSED|SKIPPED|FAILED|ERROR)\b.*)?$")
_COUNTED_AS = {"PASSED": "passed", "SKIPPED": "skipped", "FAILED": "failed", "ERROR": "failed"}


def run(context: Context) -> None:
    root = checkout()
    files = marked_files(root / "tests")
    context.say(f"{len(files)} files with tests marked gpu, {WORKERS} at once")
    workers = 2 if context.dry_run else WORKERS
    found: list[dict[str, Any]] = []

    def one(path: Path) -> None:
        found.append(run_file(root, path, context.seconds_left - 5))
        context.save(files=found)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(one, files))
    found.sort(key=lambda result: str(result["file"]))
    rows = [[r["file"], *(r[key] for key in COUNTS), f"{r['seconds']:.0f}"] for r in found]
    context.table("Tests marked gpu", ["file", *COUNTS, "s"], rows)
    for result in found:
        context.found["problems"] += [f"{result['file']}: {text}" for text in result["failures"]]
        for line in result["tail"]:
            context.say(f"{result['file']} said last: {line}")
    total = {key: sum(result[key] for result in found) for key in COUNTS}
    context.say(", ".join(f"{count} {key}" for key, count in total.items()))
    if not context.dry_run and not total["passed"]:
        raise FasteagleError("no test marked gpu has run")


def checkout() -> Path:
    """The folder of the checkout. Raises `FasteagleError` for an installed wheel."""
    root = Path(__file__).resolve().parents[3]
    if not (root / "tests").is_dir() or not (root / "scripts").is_dir():
        raise FasteagleError(f"{root} holds no tests and scripts: run this from a checkout")
    return root


def marked_files(folder: Path) -> list[Path]:
    """The test files that use the mark."""
    return sorted(p for p in folder.rglob("test_*.py") if _MARK.search(p.read_text("utf-8")))


def test_command(path: Path, report: Path) -> Sequence[str]:
    """pytest on one file, without the options of the project, which want more plug-ins.

    It names each test when it begins: its report is written at the end only.
    """
    options = ["-o", "addopts=", "-p", "no:cacheprovider", "-m", "gpu", "-v", "--tb=short"]
    return [sys.executable, "-m", "pytest", *options, f"--junitxml={report}", str(path)]


def run_file(root: Path, path: Path, seconds: float) -> dict[str, Any]:
    """How many tests of a file passed, were skipped and failed, and what failed.

    Of a file that is not done in time, or whose process dies: the tests that were done, the one
    that ran, and what was said last.
    """
    failures: list[str] = []
    tail: list[str] = []
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-tests-") as folder:
        report, log = Path(folder) / "report.xml", Path(folder) / "log"
        code = run_limited(test_command(path, report), root, log, max(1.0, seconds))
        text = log.read_text("utf-8", errors="replace")
        print(f"== {path.name}\n{text}", flush=True)
        if report.exists():
            counts, more, took = read_junit(report)
        else:
            counts, more, running = read_log(text)
            took = time.monotonic() - begin
            ended = f"not done after {seconds:.0f} s" if code is None else f"exit code {code}"
            failures.append(ended + (running and f", in {running}"))
            tail = [line for line in text.splitlines() if line.strip()][-TAIL:]
    if not failures and not any(counts.values()):
        failures.append("pytest ran no test")
    return {
        "file": str(path.relative_to(root / "tests")),
        **counts,
        "failures": failures + more,
        "seconds": took,
        "tail": tail,
    }


def run_limited(command: Sequence[str], folder: Path, log: Path, seconds: float) -> int | None:
    """Exit code of `command`, whose output goes to `log`; None where the time was over."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    with log.open("wb") as file:
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=seconds,
                env=environment,
            )
        except subprocess.TimeoutExpired:
            return None
    return done.returncode


def read_log(text: str) -> tuple[dict[str, int], list[str], str]:
    """Counts, a line for every failure, and the test that had begun, of the log of `pytest -v`."""
    counts = dict.fromkeys(COUNTS, 0)
    failures: list[str] = []
    running = ""
    for test in filter(None, map(_TEST.match, text.splitlines())):
        outcome = test["outcome"]
        running = "" if outcome else test["name"].strip()
        if outcome:
            counts[_COUNTED_AS[outcome]] += 1
        if outcome and _COUNTED_AS[outcome] == "failed":
            failures.append(f"{test['name']}: failed")
    return counts, failures, running


def read_junit(report: Path) -> tuple[dict[str, int], list[str], float]:
    """Counts, a line for every failure, and seconds, of a JUnit file; of none, nothing."""
    counts = dict.fromkeys(COUNTS, 0)
    failures: list[str] = []
    seconds = 0.0
    cases = ElementTree.parse(report).iter("testcase") if report.exists() else iter(())
    for case in cases:
        seconds += float(case.get("time", 0))
        wrongs = [part for part in case if part.tag in ("failure", "error")]
        if wrongs:
            counts["failed"] += 1
            reason = (wrongs[0].get("message") or "").splitlines()
            failures.append(f"{case.get('name')}: {reason[0][:200] if reason else 'failed'}")
        else:
            counts["skipped" if case.find("skipped") is not None else "passed"] += 1
    return counts, failures, seconds
