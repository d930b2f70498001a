"""Options of scripts that cannot be: one line, before anything is started or computed."""

from __future__ import annotations

import importlib
from pathlib import Path

import click
import pytest

from fasteagle.cli import main as cli
from fasteagle.cli.command import UserPath
from helpers import invoke

CARD = "--measure-on none --recipes none --out x"
REFUSED = [
    ("bench_kernels", "--repeats 0", "'--repeats': 0 is not in the range x>=1"),
    ("bench_kernels", "--linears out,x", "'--linears': 'x' is unknown: use qkv, out, gate_up"),
    ("bench_kernels", "--kernels ,", "'--kernels': ',' is empty: give one, or several as A,B"),
    ("long_prompts", "--out x --count 0", "'--count': 0 is not in the range x>=1"),
    ("long_prompts", "--out x --tokens 0", "'--tokens': 0 is not in the range x>=1"),
    ("long_prompts", "--out /proc/x --model none", "cannot write /proc/x"),
    ("pass_table", "--model none --rows 4,0", "'--rows': 0 is out of range: use 1 .. 64"),
    ("compare_passes", ". --rows 4,0", "'--rows': 0 is out of range: use 1 .. 64"),
    ("profile_cycle", "--cycles 0", "'--cycles': 0 is not in the range x>=1"),
    ("profile_cycle", "--passes 4,0", "'--passes': 0 is out of range: use 1 .. 64"),
    ("profile_cycle", "--passes 4,9999", "'--passes': 9999 is out of range: use 1 .. 64"),
    ("train_medusa", "--data none --out x --epochs 0", "'--epochs': 0 is not in the range x>=1"),
    ("train_medusa", "--data none --out x --lr nan", "lr nan is out of range: use > 0 and <= 1"),
    ("train_on_card", f"{CARD} --write-seconds nan", "write-seconds nan is out of range: use > 0 "),
    ("train_on_card", f"{CARD} --feature-gib nan", "feature-gib nan is out of range: use > 0 "),
    ("train_on_card", f"{CARD} --slots 0", "slots 0 is out of range: use >= 1"),
    ("head_prompts", "--out x --count 0", "'--count': 0 is not in the range x>=1"),
    ("head_prompts", "--out /proc/x --seeds none", "cannot write /proc/x"),
]


@pytest.mark.parametrize(("name", "words", "message"), REFUSED)
def test_refused_at_once(name, words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "none").touch()
    script = importlib.import_module(name)
    done = invoke(*words.split(), main=script.main)
    assert done.exit_code == 2 and message in done.stderr, (done.output, done.exception)
    assert done.stderr.count("\n") == 1


def test_parts_of_passes_are_those_of_our_kernels(tiny_dir):
    options = ["--model", tiny_dir, "--precision", "fp32", "--device", "cpu"]
    done = invoke(*options, main=importlib.import_module("pass_table").main)
    assert done.exit_code == 2 and "backend eager: its parts are not timed" in done.stderr


def test_home_in_every_path_that_no_shell_has_expanded():
    """Options of all commands and scripts."""
    scripts = (Path(__file__).parents[2] / "scripts").glob("*.py")
    modules = [importlib.import_module(path.stem) for path in scripts]
    commands = [module.main for module in modules if hasattr(module, "main")]
    params = [p for command in (*commands, *cli.main.commands.values()) for p in command.params]
    paths = [param for param in params if isinstance(param.type, click.Path)]
    assert len(paths) > 30
    assert [param.name for param in paths if not isinstance(param.type, UserPath)] == []
