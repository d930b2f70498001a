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
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fasteagle.bench.gpu_check.stage import Context
from fasteagle.errors import FasteagleError

WORKERS = 8
COUNTS = ("passed", "skipped", "failed")
_MARK = re.compile(r"pytest\.mark\.gpu\b")


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
    """pytest on one file, without the options of the project, which want more plug-ins."""
    options = ["-o", "addopts=", "-p", "no:cacheprovider", "-m", "gpu", "-q", "--tb=short"]
    return [sys.executable, "-m", "pytest", *options, f"--junitxml={report}", str(path)]


def run_file(root: Path, path: Path, seconds: float) -> dict[str, Any]:
    """How many tests of a file passed, were skipped and failed, and what failed."""
    with tempfile.TemporaryDirectory(prefix="gpu-tests-") as folder:
        report = Path(folder) / "report.xml"
        failures: list[str] = []
        try:
            done = subprocess.run(
                test_command(path, report),
                cwd=root,
                capture_output=True,
                text=True,
                timeout=max(1.0, seconds),
                env={**os.environ, "OMP_NUM_THREADS": "2"},
            )
            print(f"== {path.name}\n{done.stdout}{done.stderr}", flush=True)
        except subprocess.TimeoutExpired:
            failures.append(f"not done after {seconds:.0f} s")
        counts, more, took = read_junit(report)
    name = str(path.relative_to(root / "tests"))
    if not failures and not any(counts.values()):
        failures.append("pytest ran no test")
    return {"file": name, **counts, "failures": failures + more, "seconds": took}


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
