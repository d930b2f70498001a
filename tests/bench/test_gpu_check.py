"""The check of a GPU: its commands are ones that exist, and a stage that fails stops no other."""

from __future__ import annotations

import importlib
import json

import pytest
from click.testing import CliRunner

from helpers import SCRIPTS


@pytest.fixture
def check(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import gpu_check

    return gpu_check


def run(check, out, *arguments):
    return CliRunner().invoke(check.main, ["--out", str(out), *map(str, arguments)])


@pytest.mark.parametrize("dry", [True, False])
def test_every_stage_is_a_command_with_options_that_exist(check, monkeypatch, tmp_path, dry):
    started = []

    def parsed(command, *_):
        script, arguments = command[1], list(command[2:])
        started.append(script)
        if script.startswith("scripts/"):
            module = importlib.import_module(script.removeprefix("scripts/").removesuffix(".py"))
            module.main.make_context(script, arguments)  # raises for what it does not know
        return 0

    def logged(command, log, limit, environment):
        log.write_text("")
        assert 0 < limit <= (400 if dry else 540)
        return parsed(command)

    monkeypatch.setattr(check, "run_limited", logged)
    done = run(check, tmp_path, *(["--dry-run"] if dry else []), "--wheels", tmp_path)
    assert done.exit_code == 0, done.output
    entries = json.loads((tmp_path / check.RECORD).read_text())["stages"]
    expected = check.all_stages(dry, "any", tmp_path)
    assert [entry["name"] for entry in entries] == [stage.name for stage in expected]
    assert len(started) == len(entries) and not any(entry["error"] for entry in entries)


def test_a_stage_that_fails_or_hangs_does_not_stop_the_next(check, monkeypatch, tmp_path):
    lines = {
        "start": "print('a card')",
        "kernels": "print('first'); import sys; sys.exit('no memory left')",
        "profile": "import time; print('half of it', flush=True); time.sleep(60)",
        "speed": "print('all is well')",
    }
    stages = [check.Stage(name, name, ["-c", line], minutes=0.05) for name, line in lines.items()]
    monkeypatch.setattr(check, "all_stages", lambda *_: stages)

    def errors():
        entries = json.loads((tmp_path / check.RECORD).read_text())["stages"]
        return {entry["name"]: entry["error"] for entry in entries}

    assert run(check, tmp_path).exit_code == 1
    assert errors() == {
        "start": None,
        "kernels": "exit code 1: no memory left",
        "profile": "took longer than 3 s and was ended",
        "speed": None,
    }
    assert (tmp_path / "profile.log").read_text() == "half of it\n"
    # The others stay in the record when one is run again; without a device nothing else runs.
    stages[:2] = [check.Stage(name, name, ["-c", "1 / 0"], needed=True) for name in ("start", "x")]
    assert run(check, tmp_path, "--stages", "start,x").exit_code == 1
    failures = errors()
    assert "ZeroDivisionError" in failures["start"] and failures["x"] == "not run: start failed"
    assert failures["kernels"] == "exit code 1: no memory left" and failures["speed"] is None


def test_cycles_are_described_by_their_kernels(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import profile_cycle

    events = [
        ("void gemm<int, 4>(float*)", 0, 10),
        ("void gemm<int, 8>(float*)", 5, 20),  # beside the first one
        ("norm", 30, 40),
    ]
    cycle = profile_cycle.described(events, 2, ms=0.020)
    assert (cycle["nodes"], cycle["busy_ms"]) == (1.5, pytest.approx(0.015))
    assert cycle["idle"] == pytest.approx(0.25)
    assert cycle["kernels"] == [
        {"name": "gemm", "calls": 1.0, "us": 12.5},
        {"name": "norm", "calls": 0.5, "us": 5.0},
    ]
    assert profile_cycle.described([], 2, 1.0)["idle"] is None
    for option, value in (("--passes", "1,x"), ("--tree", "5/4")):
        done = CliRunner().invoke(profile_cycle.main, [option, value])
        assert done.exit_code == 2 and value in done.stderr
