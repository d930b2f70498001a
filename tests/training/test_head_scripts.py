"""Scripts for draft heads: their quality on a text, and prompts to write text from."""

from __future__ import annotations

import json
import random
import re
import sys

import pytest
import torch

import head_prompts
import head_quality
from fasteagle.loading.heads.write import save_head
from fasteagle.loading.open import open_model
from fasteagle.options import RuntimeOptions
from fasteagle.training.held_out import HeldOut
from helpers import invoke, random_head, write_random_text


@pytest.fixture
def heads(tiny_dir, tmp_path):
    """Folders of two random heads for the tiny model."""
    target = open_model(str(tiny_dir)).loaded(RuntimeOptions()).engine.model
    folders = [tmp_path / f"head{seed}" for seed in (1, 2)]
    for seed, folder in enumerate(folders, 1):
        save_head(folder, random_head(target, seed=seed), {}, torch.float32)
    return folders


def test_a_line_for_each_head(tiny_dir, heads, tmp_path):
    text = write_random_text(tmp_path / "t.jsonl", 5, 30)
    named = [word for head in heads for word in ("--head", head)]
    options = ("--model", tiny_dir, "--data", text, "--limit", 4)
    done = invoke(*options, *named, main=head_quality.main)
    assert done.exit_code == 0, done.stderr
    lines = done.stdout.splitlines()
    for table in (0, 5):
        names = [line.split(" | ")[0] for line in lines[table + 2 : table + 4]]
        assert names == [f"| {head}" for head in heads]
    assert re.fullmatch(r"[1-9]\d* positions of 4 answers, [0-4] of them greedy", lines[-1])


def test_the_tables_have_the_shares():
    tenths = ((4, 1), *[(0, 0)] * 8, (10, 9))
    held = HeldOut((0.75, 0.5), 2.125, 9, tv=(0.25, 0.5), by_confidence=tenths)
    headings, (row,) = head_quality.by_depth({"a": held})
    assert headings == ["head", "0-alpha", "1-alpha", "tau of a chain", "TV"]
    assert row == ["a", "0.750", "0.500", "2.12", "0.250"]
    assert head_quality.by_confidence({"a": held})[1] == [["a", "0.25", *["-"] * 8, "0.90"]]


def test_what_is_refused(tiny_dir, heads, tmp_path, monkeypatch):
    text = write_random_text(tmp_path / "t.jsonl", 3, 30)

    def refusal(*words) -> str:
        done = invoke("--model", tiny_dir, *words, main=head_quality.main)
        assert done.exit_code == 2
        return done.stderr.splitlines()[-1]

    assert "no draft head is known" in refusal("--data", text)
    assert "no such folder" in refusal("--data", text, "--head", tmp_path / "none")
    assert "cannot read" in refusal("--data", tmp_path / "none.jsonl", "--head", heads[0])
    assert "suffix" in refusal("--data", text, "--plot", tmp_path / "chart.doc")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "fasteagle[plot]" in refusal("--data", text, "--plot", tmp_path / "chart.svg")


def test_prompts_of_every_kind(tmp_path, monkeypatch):
    monkeypatch.setattr(head_prompts, "library_functions", lambda: [FUNCTION])
    seeds = tmp_path / "seeds.jsonl"
    seeds.write_text('{"instruction": "Sing.", "input": "{it}", "output": "la"}\n')
    files = []
    for name, more in (("a", ["--seed", "1"]), ("b", ["--seed", "1"]), ("c", [])):
        files.append(tmp_path / name)
        command = ["--count", 300, "--seeds", seeds, "--out", files[-1], *more]
        assert invoke(*command, main=head_prompts.main).exit_code == 0
    seeds.write_text('{"instruction": "Sing.", "input": "", "output": 3}\n')
    refused = invoke(*command, main=head_prompts.main)
    assert refused.exit_code == 2 and "seeds.jsonl, line 1: expected" in refused.stderr
    first, same, other = (path.read_text().splitlines() for path in files)
    assert first == same != other
    assert len({tuple(json.loads(line)["turns"][:1]) for line in first}) == len(first) == 300
    assert 75 < sum(len(json.loads(line)["turns"]) == 2 for line in first) < 135
    maker = head_prompts.Maker([{"instruction": "Sing.", "input": "", "output": "la"}], 0)
    templates = [t for kind in maker.kinds for t in kind["templates"].strip().splitlines()]
    assert len(head_prompts.Maker([], 0).kinds) == 22, "no seed task is read without any"
    assert len(maker.kinds) == 23 and len(templates) > 150
    for template in templates:
        assert not set("{}") & set(maker.filled(template)), template
    maker.random = random.Random(0)
    assert maker.filled("{c} {c} {name2}, {name}") == "8 8 Ben, Jamal"


FUNCTION = {"signature": "def f(x):", "docstring": "Return x.", "source": "def f(x): return x"}
