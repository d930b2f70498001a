"""`fasteagle tune`: tables of costs and choices, kept where the chat finds them."""

from __future__ import annotations

import json

import pytest

from fasteagle.cli.tune import print_costs, print_sizes
from fasteagle.compile.blocks import missing_compiler
from fasteagle.drafting.costs import Costs
from fasteagle.drafting.ladder import DEFAULT_RANKS
from fasteagle.drafting.policy import Policy
from fasteagle.drafting.thresholds import LONGEST
from fasteagle.paths import cache_dir
from fasteagle.shapes import FusedShape, GatedChain
from helpers import costs, invoke, save_tiny


@pytest.mark.skipif(missing_compiler() is not None, reason="no C++ compiler")
def test_costs_and_plan_are_printed_and_kept(tiny_dir, compiled):
    done = invoke("tune", "--model", tiny_dir, "--max-seq-len", 256)
    assert done.exit_code == 0, done.output
    assert "target pass, rows" in done.stdout and "x plain" in done.stdout
    (path,) = (cache_dir() / "tuner").glob("*-ngram-tree.json")
    costs = json.loads(path.read_text())["costs"]
    assert set(costs["passes"]) >= {"1", "2", "8"}
    assert str(path) in done.stderr.replace("\n", "")


def test_tuning_again_measures_again(tiny_dir, no_compiler):
    arguments = ("--model", tiny_dir, "--max-seq-len", 256)
    assert invoke("tune", *arguments).exit_code == 0
    (path,) = (cache_dir() / "tuner").glob("*.json")
    stored = json.loads(path.read_text())
    stored["costs"]["other"] = 1e6
    path.write_text(json.dumps(stored))
    assert invoke("tune", *arguments).exit_code == 0
    assert json.loads(path.read_text())["costs"]["other"] < 1e6


def test_experts_of_a_mixture_are_counted(tmp_path):
    folder = save_tiny(tmp_path / "mixtral", "mixtral")
    done = invoke("tune", "--model", folder, "--int8", "--max-seq-len", 256)
    assert done.exit_code == 0, done.output
    assert "experts of a layer" in done.stdout and "if independent" in done.stdout


def test_chains_of_a_given_depth_are_tuned(tiny_dir):
    """As a conversation with these options does, whose costs these are."""
    done = invoke("tune", "--model", tiny_dir, "--precision", "int8-native", "--lookup-depth", 5)
    assert done.exit_code == 0, done.output
    assert len(list((cache_dir() / "tuner").glob("*-ngram-chain5.json"))) == 1


def test_sizes_to_choose_from_are_printed(capsys):
    size = FusedShape(3, 3, 8, 8)
    print_sizes(Policy(costs(), DEFAULT_RANKS, [size], head=True, lookup=True))
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("plain") and line.split()[-1] == "1.00" for line in lines)
    assert any(line.startswith("3/3/8/8") for line in lines)


def test_the_costs_of_chains_are_printed(capsys):
    made = Costs({1: 4.0, 2: 4.5, 9: 8.0}, {}, {}, 0.3, 0.2, chain={1: 0.3, LONGEST: 1.7})
    print_costs(made)
    print_sizes(Policy(made, DEFAULT_RANKS, [GatedChain(LONGEST)], head=True, lookup=False))
    text = capsys.readouterr().out
    assert "draft, a chain, levels" in text and "1: 0.30  8: 1.70" in text
    assert "first level" not in text and "chain of 1 to 8" in text
