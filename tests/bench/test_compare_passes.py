"""Passes of two checkouts in turn: here of one and the same."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from compare_passes import compared
from helpers import SCRIPTS

slow = pytest.mark.slow  # four processes that load a model


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / "compare_passes.py"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


@slow
def test_a_checkout_is_as_fast_as_itself(tiny_dir):
    done = run(SCRIPTS.parent, "--model", tiny_dir, "--rows", "1,3", "--rounds", 6)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if re.match(r"[13] ", line)]
    assert [line[0] for line in lines] == ["1", "3"]
    for _, other, here, ratio, *best in map(lambda line: map(float, line), lines):
        assert 0.3 < ratio < 3 and min(best) > 0
        assert best[0] <= other and best[1] <= here


@slow
def test_what_is_no_checkout_or_does_not_start_is_one_line(tmp_path, tiny_dir):
    done = run(tmp_path)
    assert done.returncode == 2 and "is no checkout of fasteagle" in done.stderr
    (tmp_path / "fasteagle").mkdir()
    (tmp_path / "fasteagle" / "__init__.py").write_text("raise RuntimeError('another one')")
    done = run(tmp_path, "--model", tiny_dir)
    assert done.returncode == 2 and f"the process of {tmp_path} ended" in done.stderr


def test_the_ratio_is_that_of_each_round_and_nobody_is_always_first():
    order, times = [], {"other": iter((4.0, 6.0, 10.0)), "here": iter((2.0, 2.0, 2.0))}

    class Fake:
        def __init__(self, name):
            self.name = name

        def ms(self, rows):
            order.append(self.name)
            return next(times[self.name])

    line = compared((Fake("other"), Fake("here")), 5, 3)
    assert line == ["5", "6.000", "2.000", "3.000", "4.000", "2.000"]
    assert order == ["other", "here", "here", "other", "other", "here"]
