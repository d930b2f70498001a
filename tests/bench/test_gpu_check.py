"""The check of a GPU: its commands are ones that exist, and a stage that fails stops no other."""

from __future__ import annotations

import importlib
import json

import pytest
from click.testing import CliRunner

from fasteagle.bench.predicted import predicted_speeds
from fasteagle.bench.roofline import DEVICES, OUTLOOKS, CapturedCycle, Workload, storage_named
from fasteagle.loading.heads.find import head_shape
from fasteagle.loading.registry import preset
from fasteagle.shapes import TreeShape
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

    monkeypatch.setattr(check, "run_limited", logged)
    monkeypatch.setattr(check, "CARRIED", tmp_path / "carry")
    for call, text in (("1", "first "), ("2", "second")):
        (tmp_path / "carry" / call).mkdir(parents=True)
        (tmp_path / "carry" / call / f"model.gguf.{call}").write_text(text)
    (tmp_path / "carry/1/torchao-1-any.whl").write_text("")
    groups = check.all_stages(dry, tmp_path / "carry")
    assert [group[0].name for group in groups] == ["start", "kernels", "two_turns", "contexts"]
    assert groups[0][-1].name == "leak", "last, with the device for itself"
    entries = []
    for group in range(1, 5):
        done = run(check, tmp_path, *(["--dry-run"] if dry else []), "--group", group)
        assert done.exit_code == 0, done.output
        entries = json.loads((tmp_path / check.RECORD).read_text())["stages"]
    expected = [stage.name for group in groups for stage in group]
    assert [entry["name"] for entry in entries] == expected and "packages" in expected
    assert len(started) == len(entries) and not any(entry["error"] for entry in entries)
    assert (tmp_path / "carry/model.gguf").read_text() == "first second"


def test_what_has_to_be_carried_is_packed_by_calls(check, monkeypatch, tmp_path):
    model, carried = tmp_path / "model", tmp_path / "carry"
    model.write_bytes(bytes(range(256)) * 2**13)  # 2 MiB
    git = check.subprocess.run

    def run_or_download(command, **options):
        if command[0] == "git":
            return git(command, **options)
        folder = check.Path(command[command.index("--dest") + 1])
        folder.mkdir(parents=True)
        (folder / "gguf-1-any.whl").write_bytes(bytes(2**19))

    monkeypatch.setattr(check.subprocess, "run", run_or_download)
    monkeypatch.setattr(check, "local_path", lambda name: model)
    monkeypatch.setattr(check, "CARRIED", carried)
    checkout = git(["git", "ls-files", "-z"], cwd=check.ROOT, capture_output=True).stdout
    paths = [check.ROOT / name for name in checkout.decode().split("\0") if name]
    n_bytes = sum(path.stat().st_size for path in paths if path.is_file())
    monkeypatch.setattr(check, "CARRY_BYTES", n_bytes + 3 * 2**19)
    done = CliRunner().invoke(check.main, ["--pack"])
    assert done.exit_code == 0, done.output
    sizes = {call.name: sum(f.stat().st_size for f in call.iterdir()) for call in carried.iterdir()}
    assert sizes == {"1": 3 * 2**19, "2": 2**20}
    assert "model.gguf.2" in done.output and "gguf-1-any.whl" in done.output
    stages = importlib.import_module("gpu_stages")
    whole = stages.joined(list(carried.rglob("model.gguf.*")), tmp_path / "whole")
    assert check.Path(whole).read_bytes() == model.read_bytes()


def test_records_of_several_calls_are_merged(check, monkeypatch, tmp_path):
    def outcome(folder, **names):
        stages = [
            check.Stage(name, name, ["-c", f"print({text!r})"]) for name, text in names.items()
        ]
        monkeypatch.setattr(check, "all_stages", lambda *_: [stages])
        run(check, tmp_path / folder)

    for folder in ("all", "second"):
        (tmp_path / folder).mkdir()
    outcome("all", start="old", kernels="kernels")
    record = tmp_path / "all" / check.RECORD
    before = json.loads(record.read_text())
    for entry in before["stages"]:
        entry["date"] = "2026-01-01T00:00:00+00:00"
    record.write_text(json.dumps(before))
    outcome("second", start="new", profile="profile")
    done = run(check, tmp_path / "all", "--merge", tmp_path / "second")
    assert done.exit_code == 0, done.output
    entries = json.loads(record.read_text())["stages"]
    assert [entry["name"] for entry in entries] == ["start", "kernels", "profile"]
    logs = [(tmp_path / "all" / f"{entry['name']}.log").read_text() for entry in entries]
    assert logs == ["new\n", "kernels\n", "profile\n"]


def test_a_stage_that_fails_or_hangs_does_not_stop_the_next(check, monkeypatch, tmp_path):
    lines = {
        "start": "print('a card')",
        "kernels": "print('first'); import sys; sys.exit('no memory left')",
        "profile": "import time; print('half of it', flush=True); time.sleep(60)",
        "speed": "print('all is well')",
    }
    stages = [check.Stage(name, name, ["-c", line], minutes=0.05) for name, line in lines.items()]
    monkeypatch.setattr(check, "all_stages", lambda *_: [stages])

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
    names = ("interleaved_kernel", "prefix_kernel", "finish_kernel", "copy")
    kernels = [{"name": name, "us": 1000.0 * 2**i} for i, name in enumerate(names)]
    measured = {"products": 1.0, "attention": 6.0, "small nodes": 8.0}
    assert profile_cycle.terms(kernels) == measured
    config = preset("llama2-7b")
    work = Workload(config, storage_named("int4", config), 256)
    shape = TreeShape(5, 4, 15)
    card, head = DEVICES["3090"].card, head_shape("llama2-7b", config)
    plain, drafting = (profile_cycle.predicted(card, work, head, s) for s in (None, shape))
    assert plain.keys() == measured.keys()
    for outlook, *times in zip(OUTLOOKS, *drafting.values(), strict=True):
        cycle = CapturedCycle(card, work, outlook=outlook)
        expected = predicted_speeds(cycle, head, shape, tau=1).cycle_ms
        assert sum(times) == pytest.approx(expected)
    assert all(plain[name][1] < drafting[name][1] for name in measured)
    for option, value in (("--passes", "1,x"), ("--tree", "5/4")):
        done = CliRunner().invoke(profile_cycle.main, [option, value])
        assert done.exit_code == 2 and value in done.stderr
