"""The stage `cold_start`: what counts as the first token's time, and a process that is not done."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from fasteagle.bench.gpu_check import cold_start, first_token
from fasteagle.bench.gpu_check.stage import Context
from fasteagle.errors import FasteagleError
from fasteagle.generate import Engine

TIMES = {"import_s": 5.0, "load_s": 4.0, "compile_s": 2.0, "later_ms_a_token": 1.0}


def test_the_first_token_process_prints_its_times():
    command = [sys.executable, "-m", "fasteagle.bench.gpu_check.first_token", "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    times = json.loads(done.stdout.splitlines()[-1])
    assert set(times) == {"first_token_s", *TIMES}


def test_kernels_compiled_ahead_are_part_of_the_first_token(monkeypatch, capsys):
    """They were part of loading: no limit on the first token could fail."""
    monkeypatch.setattr(Engine, "compile_ahead", lambda engine: time.sleep(1.5))
    monkeypatch.setattr(sys, "argv", ["first_token", "--dry-run"])
    first_token.main()
    times = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 1.5 <= times["compile_s"] <= times["first_token_s"]


@pytest.fixture
def process(monkeypatch):
    """Lets the stage start some Python instead of the process that loads a model."""
    run = subprocess.run

    def stand_in(code):
        command = [sys.executable, "-c", code]
        monkeypatch.setattr(cold_start.subprocess, "run", lambda _, **k: run(command, **k))

    return stand_in


def test_both_starts_are_told_beside_what_is_asked(dry, process, tmp_path):
    process(f"print({json.dumps(TIMES | {'first_token_s': 16.25})!r})")
    code, found = dry("cold_start")
    assert code == 0 and found["empty"]["first_token_s"] == found["warm"]["first_token_s"] == 16.25
    assert found["lines"][-1] == "first token 16.2 s after load with empty caches, asked <= 15"
    with pytest.raises(FasteagleError, match=r"first token 16.2 s after load, 15 wanted"):
        cold_start.run(Context(tmp_path / "other.json", tmp_path, 60))


def test_a_cold_start_that_takes_too_long_is_one_line(dry, process, monkeypatch, capsys):
    process("import sys, time; print('compiling', file=sys.stderr, flush=True); time.sleep(60)")
    left = property(lambda context: 7.0)
    monkeypatch.setattr(cold_start.Context, "seconds_left", left)
    assert dry("cold_start")[0] == 2
    said = capsys.readouterr().out
    assert said.splitlines()[-1] == "error: caches empty: not done after 2 s: compiling"
    assert "Traceback" not in said
