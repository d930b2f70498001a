"""scripts/head_quality.py: what it prints of heads on a text, and what it refuses."""

from __future__ import annotations

import sys

import pytest
import torch
from click.testing import CliRunner

from fasteagle.loading.heads.write import save_head
from fasteagle.loading.open import open_model
from fasteagle.options import RuntimeOptions
from fasteagle.tables import markdown_table
from fasteagle.training.head_quality import HeadQuality, tables
from fasteagle.training.held_out import HeldOut
from helpers import SCRIPTS, random_head, write_random_text


@pytest.fixture
def run(monkeypatch):
    """Runs the script in this process."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import head_quality

    return lambda *args: CliRunner().invoke(head_quality.main, [str(a) for a in args])


@pytest.fixture
def heads(tiny_dir, tmp_path):
    """Folders of two random heads for the tiny model."""
    target = open_model(str(tiny_dir)).loaded(RuntimeOptions()).engine.model
    found = []
    for seed in (1, 2):
        found.append(tmp_path / f"head{seed}")
        save_head(found[-1], random_head(target, seed=seed), {}, torch.float32)
    return found


def test_a_line_for_each_head(run, tiny_dir, heads, tmp_path):
    text = write_random_text(tmp_path / "t.jsonl", 5, 30)
    done = run(
        *("--model", tiny_dir, "--data", text, "--limit", 4),
        *(word for head in heads for word in ("--head", head)),
    )
    assert done.exit_code == 0, done.stderr
    lines = done.stdout.splitlines()
    for table in (0, 5):
        assert [line.split(" | ")[0] for line in lines[table + 2 : table + 4]] == [
            f"| {head}" for head in heads
        ]
    assert "of 4 answers" in lines[-1]


def test_figures_of_the_tables():
    tenths = ((4, 1), *[(0, 0)] * 8, (10, 9))
    held = HeldOut((0.5, 0.25), 1.625, 20, by_confidence=tenths)
    made = tables([HeadQuality("mine", "EAGLE-3", held)])
    by_depth, by_confidence = (markdown_table(first, rest) for first, *rest in made)
    assert by_depth.splitlines()[2] == "| mine | EAGLE-3 | 0.500 | 0.250 | 1.62 |"
    assert by_confidence.splitlines()[2] == f"| mine | 0.25 |{' - |' * 8} 0.90 |"


def test_what_is_refused(run, tiny_dir, heads, tmp_path, monkeypatch):
    text = write_random_text(tmp_path / "t.jsonl", 3, 30)

    def refusal(*arguments) -> str:
        done = run("--model", tiny_dir, *arguments)
        assert done.exit_code == 2
        return done.stderr.splitlines()[-1]

    assert "no draft head is known" in refusal("--data", text)
    assert "no such folder" in refusal("--data", text, "--head", tmp_path / "none")
    assert "cannot read" in refusal("--data", tmp_path / "none.jsonl", "--head", heads[0])
    assert "suffix" in refusal("--data", text, "--plot", tmp_path / "chart.doc")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "fasteagle[plot]" in refusal("--data", text, "--plot", tmp_path / "chart.svg")
