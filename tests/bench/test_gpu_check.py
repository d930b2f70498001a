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


STAGES = {
    "start": "print('a card')",
    "kernels": "print('first'); import sys; sys.exit('no memory left')",
    "profile": "import time; print('half of it', flush=True); time.sleep(60)",
    "speed": "print('all is well')",
}


@pytest.fixture
def stand_ins(check, monkeypatch):
    """The stages are lines of Python, which a test may replace."""
    lines = dict(STAGES)
    monkeypatch.setattr(
        check,
        "all_stages",
        lambda *_: [
            check.Stage(name, name, ["-c", line], minutes=0.05, needed=name == "start")
            for name, line in lines.items()
        ],
    )
    return lines


def errors(check, out):
    entries = json.loads((out / check.RECORD).read_text())["stages"]
    return {entry["name"]: entry["error"] for entry in entries}


def test_a_stage_that_fails_or_hangs_does_not_stop_the_next(check, stand_ins, tmp_path):
    assert run(check, tmp_path).exit_code == 1
    assert errors(check, tmp_path) == {
        "start": None,
        "kernels": "exit code 1: no memory left",
        "profile": "took longer than 3 s and was ended",
        "speed": None,
    }
    assert (tmp_path / "profile.log").read_text() == "half of it\n"
    # The others stay in the record when one is run again.
    stand_ins["kernels"] = "print('now it fits')"
    assert run(check, tmp_path, "--stages", "kernels").exit_code == 1
    assert errors(check, tmp_path)["kernels"] is None and len(errors(check, tmp_path)) == 4


def test_without_a_device_nothing_else_runs(check, stand_ins, tmp_path):
    stand_ins["start"] = "raise SystemExit('no device')"
    assert run(check, tmp_path).exit_code == 1
    others = dict.fromkeys(("kernels", "profile", "speed"), "not run: start failed")
    assert errors(check, tmp_path) == {"start": "exit code 1: no device", **others}


def test_what_cannot_be_run_is_told_in_one_line(check, stand_ins, tmp_path):
    for arguments, message in (
        (["--stages", "kernel"], "did you mean 'kernels'"),
        (["--wheels", tmp_path / "none"], "does not exist"),
    ):
        done = run(check, tmp_path, *arguments)
        assert done.exit_code == 2 and message in done.stderr
    assert run(check, tmp_path, "--stages", "start", "--dry-run").exit_code == 0
    done = run(check, tmp_path, "--stages", "start")
    assert done.exit_code == 2 and "another kind of run" in done.stderr


def test_parts_of_a_model_are_joined(check, tmp_path):
    for name, data in (("a", b"GG"), ("b", b"UF")):
        (tmp_path / name).write_bytes(data)
    whole = check.joined([tmp_path / "a", tmp_path / "b"], tmp_path)
    assert (tmp_path / "model.gguf").read_bytes() == b"GGUF" and whole.endswith("model.gguf")
    assert check.joined(["one"], tmp_path) == "one"


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
