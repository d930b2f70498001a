"""The check of a GPU: its commands are ones that exist, and a stage that fails stops no other."""

from __future__ import annotations

import importlib
import json

import pytest

import gpu_check
from fasteagle.loading.registry import local_path
from fasteagle.options import DEFAULT_MODEL
from helpers import invoke


def run(out, *arguments):
    return invoke("--out", out, *arguments, main=gpu_check.main)


@pytest.mark.parametrize("dry", [True, False])
def test_every_stage_is_a_command_with_options_that_exist(monkeypatch, tmp_path, dry):
    started = []

    def parsed(command, *_):
        script, arguments = command[1], list(command[2:])
        started.append(script)
        assert not any("{out}" in word or "{json}" in word for word in command)
        if script == "-c":
            compile(arguments[0], "stage", "exec")
        if script.startswith("scripts/"):
            module = importlib.import_module(script.removeprefix("scripts/").removesuffix(".py"))
            module.main.make_context(script, arguments)  # raises for what it does not know
        return 0

    def logged(command, log, limit, environment):
        log.write_text("")
        assert 0 < limit <= (400 if dry else 540)
        return parsed(command)

    monkeypatch.setattr(gpu_check, "run_limited", logged)
    monkeypatch.setattr(gpu_check, "CARRIED", tmp_path / "carry")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for call, text in (("1", "first "), ("2", "second")):
        (tmp_path / "carry" / call).mkdir(parents=True)
        (tmp_path / "carry" / call / f"model.gguf.{call}of2").write_text(text)
        gpu_check.all_stages(dry, tmp_path / "carry")
        assert (local_path(DEFAULT_MODEL) is None) == (call == "1"), "of a part nothing is made"
    (tmp_path / "carry/1/torchao-1-any.whl").write_text("")
    groups = gpu_check.all_stages(dry, tmp_path / "carry")
    assert [group[0].name for group in groups] == ["start", "kernels", "two_turns", "contexts"]
    assert groups[0][-1].name == "leak", "last, with the device for itself"
    entries = []
    for group in range(1, 5):
        done = run(tmp_path, *(["--dry-run"] if dry else []), "--group", group)
        assert done.exit_code == 0, done.output
        entries = json.loads((tmp_path / gpu_check.RECORD).read_text())["stages"]
    expected = [stage.name for group in groups for stage in group]
    assert [entry["name"] for entry in entries] == expected and "packages" in expected
    assert len(started) == len(entries) and not any(entry["error"] for entry in entries)
    assert local_path(DEFAULT_MODEL).read_text() == "first second"


def test_a_stage_that_fails_or_hangs_does_not_stop_the_next(monkeypatch, tmp_path):
    lines = {
        "start": "print('a card')",
        "kernels": "print('first'); import sys; sys.exit('no memory left')",
        "profile": "import time; print('half of it', flush=True); time.sleep(60)",
        "speed": "print('all is well')",
    }
    stages = [
        gpu_check.Stage(name, name, ["-c", line], minutes=0.05) for name, line in lines.items()
    ]
    monkeypatch.setattr(gpu_check, "all_stages", lambda *_: [stages])

    def errors():
        entries = json.loads((tmp_path / gpu_check.RECORD).read_text())["stages"]
        return {entry["name"]: entry["error"] for entry in entries}

    assert run(tmp_path).exit_code == 1
    assert errors() == {
        "start": None,
        "kernels": "exit code 1: no memory left",
        "profile": "took longer than 3 s and was ended",
        "speed": None,
    }
    assert (tmp_path / "profile.log").read_text() == "half of it\n"
    # The others stay in the record when one is run again; without a device nothing else runs.
    stages[:2] = [
        gpu_check.Stage(name, name, ["-c", "1 / 0"], needed=True) for name in ("start", "x")
    ]
    assert run(tmp_path, "--stages", "start,x").exit_code == 1
    failures = errors()
    assert "ZeroDivisionError" in failures["start"] and failures["x"] == "not run: start failed"
    assert failures["kernels"] == "exit code 1: no memory left" and failures["speed"] is None
    assert list(failures) == ["kernels", "profile", "speed", "start", "x"], "each once"
    assert run(tmp_path, "--stages", "speed", "--minutes", 0.05).exit_code == 1
    assert errors()["speed"] == "not run: the 0.05 minutes were over"
    other_kind = run(tmp_path, "--dry-run")
    assert other_kind.exit_code == 2 and "of another kind of run" in other_kind.stderr


def test_the_newer_result_of_two_runs_is_taken(tmp_path):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    mine, other = {"a": 2, "b": 1, "c": 1}, {"a": 1, "b": 2, "c": 2, "d": 1}
    for folder, dates in ((ours, mine), (theirs, other)):
        folder.mkdir()
        entries = []
        for name, date in dates.items():
            code = None if name == "c" and folder is theirs else 0
            times = {"date": f"2026-01-0{date}", "seconds": date}
            entries.append({"name": name, **times, "exit_code": code, "error": None})
            (folder / f"{name}.log").write_text(folder.name)
        record = gpu_check.record(entries, dry_run=False)
        (folder / gpu_check.RECORD).write_text(json.dumps(record))
    assert run(ours, "--merge", theirs).exit_code == 0
    entries = json.loads((ours / gpu_check.RECORD).read_text())["stages"]
    assert {e["name"]: e["seconds"] for e in entries} == {"a": 2, "b": 2, "c": 1, "d": 1}
    logs = {name: (ours / f"{name}.log").read_text() for name in "abcd"}
    assert logs == {"a": "ours", "b": "theirs", "c": "ours", "d": "theirs"}
