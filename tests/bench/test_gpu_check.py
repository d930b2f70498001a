"""The GPU check: what becomes of stages that fail, hang or write nonsense; its reports; its stages.

The stages themselves run on the CPU in `test_gpu_stages.py` and in CI's dry run.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from fasteagle.bench.gpu_check import check, plan, report
from fasteagle.errors import FasteagleError
from helpers import SCRIPTS

GOOD = "json.dump({'lines': ['all is well'], 'device': {'name': 'a card'}}, open(results, 'w'))"
PARTLY = "json.dump({'lines': ['half of it']}, open(results, 'w'))"
HANGS = f"{PARTLY}; time.sleep(60)"
CHILD = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"


def commands(**codes):
    """Stages by name as lines of Python that write `results`; the others are good."""

    def command(stage, options, results, seconds):
        code = codes.get(stage.name, GOOD)
        return [sys.executable, "-c", f"import json, time, sys; results = {str(results)!r}; {code}"]

    return command


def run(tmp_path, stages=("start", "kernels", "profile"), minutes=1.0, **codes):
    options = plan.CheckOptions(out=tmp_path / "out", stages=stages, minutes=minutes)
    return check.run_check(options, commands(**codes), lambda line: None)


def errors(record):
    return {entry["name"]: entry["error"] for entry in record["stages"]}


def test_a_failure_does_not_stop_the_next_stage(tmp_path):
    code = f"{PARTLY}; print('first'); sys.exit('no memory left')"
    record = run(tmp_path, kernels=code)
    assert errors(record) == {
        "start": None,
        "kernels": "exit code 1: no memory left",
        "profile": None,
    }
    failed = record["stages"][1]
    assert failed["results"] == {"lines": ["half of it"]}, "what it knew before it failed"
    assert failed["output"] == ["first", "no memory left"]
    assert json.loads((tmp_path / "out/gpu_check.json").read_text()) == record
    assert "no memory left" in (tmp_path / "out/gpu_check.log").read_text()


def test_a_stage_that_hangs_is_ended_at_its_limit_with_its_children(tmp_path, monkeypatch):
    short = [s if s.name != "kernels" else plan.Stage("kernels", "x", 1.5) for s in plan.STAGES]
    monkeypatch.setattr(plan, "STAGES", short)
    child = f"import subprocess; p = subprocess.Popen([sys.executable, '-c', {CHILD!r}])"
    begin = time.monotonic()
    record = run(tmp_path, kernels=f"{child}; {HANGS}")
    assert time.monotonic() - begin < 20
    assert errors(record)["kernels"] == "took longer than 2 s and was ended"
    assert record["stages"][1]["results"] == {"lines": ["half of it"]}
    assert errors(record)["profile"] is None
    pid = int(record["stages"][1]["output"][0])
    assert is_ended(pid)


def is_ended(pid):
    """Whether a process is gone, or only waits to be collected by its parent."""
    for _ in range(50):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("open(results, 'w').write('{half')", "cannot be read"),
        ("open(results, 'wb').write(b'\\xff\\xfe')", "cannot be read"),
        ("json.dump([1, 2], open(results, 'w'))", "are a list, not an object"),
        ("pass", "wrote no results"),
        ("import os; os.kill(os.getpid(), 9)", "exit code -9: it said nothing"),
    ],
)
def test_nonsense_is_an_error_of_that_stage(tmp_path, code, problem):
    record = run(tmp_path, kernels=code)
    assert problem in errors(record)["kernels"]
    assert errors(record)["start"] is errors(record)["profile"] is None


@pytest.mark.parametrize(
    "content",
    [
        {"lines": 7, "tables": "x", "problems": None},
        {"tables": [3, {"columns": ["a"], "rows": [1]}, {"rows": []}]},
        {"device": "a text", "lines": [None, {"a": 1}]},
    ],
)
def test_results_of_any_form_can_be_reported(tmp_path, content):
    record = run(tmp_path, start=f"json.dump({content!r}, open(results, 'w'))")
    assert errors(record)["start"] is None
    assert "### kernels" in (tmp_path / "out/gpu_check.md").read_text()


def test_values_that_are_not_json_become_null(tmp_path):
    record = run(tmp_path, start="json.dump({'a': float('nan')}, open(results, 'w'))")
    assert record["stages"][0]["results"] == {"a": None}


def test_without_the_first_stage_the_others_are_not_run(tmp_path):
    record = run(tmp_path, start="sys.exit('no device')")
    assert errors(record) == {
        "start": "exit code 1: no device",
        "kernels": "not run: start failed",
        "profile": "not run: start failed",
    }


def test_the_minutes_are_for_all_stages(tmp_path):
    begin = time.monotonic()
    record = run(tmp_path, minutes=7 / 60, kernels=HANGS)
    assert time.monotonic() - begin < 25
    assert errors(record)["kernels"].endswith("was ended")
    assert errors(record)["profile"] == "not run: the 0.116667 minutes were over"


def test_the_last_stage_may_take_what_is_left():
    rest = [stage.name for stage in plan.STAGES if stage.takes_rest]
    assert rest == [plan.STAGE_NAMES[-1]]
    minutes = sum(stage.seconds for stage in plan.STAGES) / 60
    assert 20 <= minutes <= 28 < plan.CheckOptions.minutes


def test_stages_that_compile_much_have_time_for_cold_compilers():
    limits = {stage.name: stage.seconds for stage in plan.STAGES}
    assert limits["gpu_tests"] > 240 and limits["kernels"] >= 200 and limits["cold_start"] >= 90
    assert limits["profile"] >= 200 and limits["large"] >= 200, "33B, and another one"
    text = (SCRIPTS.parent / "docs" / "measuring.md").read_text("utf-8")
    for name, seconds in limits.items():
        told = re.search(rf"^\| `{name}` \|.*\(([\d.]+|the rest)\) \|$", text, re.MULTILINE)
        assert told is not None, name
        assert told[1] == ("the rest" if name == "head" else f"{seconds / 60:g}"), name


def test_a_dry_run_has_more_time_for_a_stage_but_no_more_in_all():
    stage = plan.Stage("kernels", "x", 60)
    assert (stage.limit(1000, False), stage.limit(1000, True)) == (60, 400)
    assert stage.limit(30, False) == stage.limit(30, True) == 30


def test_another_run_keeps_the_stages_of_the_first(tmp_path):
    run(tmp_path, kernels="sys.exit('broken')")
    record = run(tmp_path, stages=("kernels",))
    assert errors(record) == {"start": None, "kernels": None, "profile": None}
    assert [entry["name"] for entry in record["stages"]] == ["start", "kernels", "profile"]


@pytest.mark.parametrize(
    "text",
    [
        "nonsense",
        "[]",
        '{"stages": [], "meta": {"dry_run": true}}',
        '{"stages": [{"name": "x"}], "meta": {"dry_run": false}}',
    ],
)
def test_what_is_no_record_of_this_kind_is_not_overwritten(tmp_path, text):
    (tmp_path / "out").mkdir()
    path = tmp_path / "out/gpu_check.json"
    path.write_text(text)
    with pytest.raises(FasteagleError, match=r"gpu_check\.json is"):
        run(tmp_path)
    assert path.read_text() == text


def test_the_record_on_disk_is_whole_after_every_stage(tmp_path):
    path = tmp_path / "out/gpu_check.json"
    look = f"print(open({str(path)!r}).read().count('what')); {GOOD}; sys.exit(3)"
    record = run(tmp_path, kernels=look)
    assert record["stages"][1]["output"] == ["1"], "the first stage was on disk by then"


def test_the_markdown_of_a_record(tmp_path):
    table = {"title": "Some numbers", "columns": ["a", "b|c"], "rows": [[1, None], ["x", 2.5]]}
    code = f"json.dump({{'tables': [{table!r}], 'problems': ['p1']}}, open(results, 'w'))"
    run(tmp_path, kernels=code, profile="sys.exit('line one')")
    text = (tmp_path / "out/gpu_check.md").read_text()
    assert "GPU check on a card" in text
    assert "| a | b\\|c |\n| --- | --- |\n| 1 | - |\n| x | 2.5 |" in text
    assert "- problem: p1" in text and "**Failed:** exit code 1: line one" in text


def test_the_summary_counts(tmp_path):
    lines = report.summary(run(tmp_path, profile="sys.exit(1)"))
    assert len(lines) == 4 and lines[-1].startswith("2 of 3 stages without an error")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--stages", "kernel"], "unknown stage 'kernel'; did you mean 'kernels'"),
        (["--stages", ","], "no stage was named"),
        (["--minutes", "0"], "minutes 0 is out of range"),
        (["--minutes", "nan"], "minutes nan is out of range"),
    ],
)
def test_wrong_arguments_are_one_line(tmp_path, arguments, problem):
    done = subprocess.run(
        [sys.executable, SCRIPTS / "gpu_check.py", "--out", tmp_path, *arguments],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and problem in done.stderr and done.stderr.count("\n") == 1


def test_it_runs_where_the_package_is_not_installed(tmp_path):
    """From another folder, with the dependencies alone: as on a machine that is lent."""
    site = tmp_path / "site"
    site.mkdir()
    for path in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if "fasteagle" not in path.name and path.suffix != ".pth":
            (site / path.name).symlink_to(path)
    command = [sys.executable, "-S", SCRIPTS / "gpu_check.py", "--dry-run", "--stages", "start"]
    done = subprocess.run(
        [*command, "--out", tmp_path / "out"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(site)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "out" / "gpu_check.json").read_text())
    assert [(stage["name"], stage["error"]) for stage in record["stages"]] == [("start", None)]


def test_every_stage_has_a_module_that_runs():
    import importlib

    for name in plan.STAGE_NAMES:
        module = importlib.import_module(f"fasteagle.bench.gpu_check.{name}")
        assert callable(module.run), name
