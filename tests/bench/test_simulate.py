"""Shapes without weights: the random draft head, and what a supplied tau may and may not touch."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from fasteagle.bench.options import BenchOptions
from fasteagle.bench.simulate import check_simulated, dummy_drafter
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.errors import FasteagleError
from fasteagle.loading.entries import EAGLE3, REGISTRY, PublishedHead
from fasteagle.loading.heads import find
from fasteagle.loading.open import open_dummy
from fasteagle.model import Eagle3Head, LMHead
from fasteagle.options import DraftOptions, RuntimeOptions
from fasteagle.quant.linear import QuantizedLMHead
from fasteagle.shapes import TreeShape
from helpers import generated

CPU = RuntimeOptions(device="cpu", max_seq_len=64)
EAGLE = DraftOptions(drafter="eagle")


def run_dummy(script, model, questions, tmp_path, words):
    out = tmp_path / "r.json"
    usual = "--load-format dummy --limit 1 --no-compile --max-new-tokens 9 --md --save-outputs"
    paths = ["--model", model, "--data", questions, "--json", out]
    result = script(*paths, *usual.split(), *words.split())
    assert result.exit_code == 0, result.stderr
    return json.loads(out.read_text()), result.stdout


def test_a_supplied_tau_is_labelled_wherever_it_reaches(script, tiny_preset, questions, tmp_path):
    words = "--precision bf16,int4 --rows hf,plain,eagle,eagle-chain,ngram --simulate-tau 2.5"
    report, text = run_dummy(script, tiny_preset, questions, tmp_path, words)
    rows = {(row["precision"], row["name"]): row for row in report["rows"]}
    assert len(report["rows"]) == len(rows) == 5 + 4  # transformers has no int4
    for (precision, name), row in rows.items():
        eagle = name.startswith("eagle")
        assert row["simulated"] is eagle
        assert row["simulated_tau"] == (2.5 if eagle else None)
        assert ("measured_tau" in row) == eagle
        line = next(x for x in text.splitlines() if x.startswith(f"| {name} | {precision} |"))
        assert line.count("*simulated*") == (5 if eagle else 0), line
        if not eagle:
            continue
        assert row["tau"] == 2.5 and "accepted_by_depth" not in row
        cycle = row["draft_ms"] + row["verify_ms"] + row["other_ms"]  # measured
        assert row["tok_s"] == pytest.approx(2.5 / cycle * 1e3, rel=0.01)
        plain = rows[precision, "plain"]["tok_s"]
        shown = pytest.approx(row["tok_s"] / plain, rel=0.01, abs=6e-4)  # of three decimals
        assert row["speedup_vs_plain"] == shown
        assert row["tree"]["depth"] == (2 if precision == "int4" else 3)
    assert rows["int4", "eagle"]["scheme"] == "int4-g32-hqq"
    assert "tau 2.5 was given" in text.splitlines()[-1]


def test_dummy_weights_without_a_tau_are_measured(script, tiny_preset, questions, tmp_path):
    words = "--precision fp32 --rows plain,eagle,eagle-static --tree-depth 2 --threads 1"
    report, text = run_dummy(script, tiny_preset, questions, tmp_path, words)
    plain, *drafting = report["rows"]
    for row in drafting:
        assert row["outputs"] == plain["outputs"]  # a random head changes nothing either
        assert not row["simulated"] and row["accepted_by_depth"] is not None
    assert "simulated" not in text and report["meta"]["threads"] == 1


def made(name, precision):
    prepared = open_dummy(name).prepared(CPU.at(precision))
    engine = prepared.engine()
    return dummy_drafter(name, engine, prepared.checkpoint, EAGLE).head, engine


def test_the_random_head_is_stored_like_its_target(tiny_preset):
    dense, engine = made(tiny_preset, "bf16")
    assert dense.fc.weight.shape == (64, 128) and dense.fc.bias is not None
    assert dense.fc.weight.dtype == torch.bfloat16 and dense.fc.weight.std() > 0.01
    assert dense.lm_head is engine.model.lm_head and isinstance(dense.lm_head, LMHead)
    assert dense.config.draft_vocab_size == 100 and int(dense.d2t.abs().max()) == 0
    again, _ = made(tiny_preset, "bf16")
    for name, value in dense.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    for precision in ("int4", "int8"):
        packed, engine = made(tiny_preset, precision)
        assert not any(isinstance(m, torch.nn.Linear) for m in packed.modules())
        assert isinstance(packed.lm_head, QuantizedLMHead)


def test_the_random_head_is_of_the_published_algorithm(tiny_preset, monkeypatch):
    entry = REGISTRY[tiny_preset]
    config = dataclasses.replace(entry.config, n_layer=6)
    head = PublishedHead("someone/head", EAGLE3)
    monkeypatch.setattr(find, "EAGLE3_TOKENS", 80)
    entry = dataclasses.replace(entry, config=config, heads=(head,))
    monkeypatch.setitem(REGISTRY, tiny_preset, entry)
    for precision in ("bf16", "int4"):
        random, engine = made(tiny_preset, precision)
        assert isinstance(random, Eagle3Head) and random.config.draft_vocab_size == 80
        engine.use(EagleDrafter(random, TreeShape(3, 3, 8)))
        answer = generated(engine, 6, [5, 9, 40])
        assert len(answer) == 6


@pytest.mark.parametrize(
    ("tau", "rows", "precisions", "message"),
    [
        (3.0, "hf,plain,ngram", "bf16", "add eagle to --rows"),
        (4.5, "eagle", "bf16", "depth 3 gives 1 .. 4"),
        (0.5, "eagle", "bf16", "tau 0.5 is out of range"),
        (float("nan"), "eagle", "bf16", "tau nan"),
        (4.0, "eagle", "bf16,int4", "depth 2 gives 1 .. 3"),
        (6.1, "eagle-static", "int4", "depth 5 gives 1 .. 6"),
        (4.0, "plain,eagle,eagle-static,eagle-chain", "bf16,int8-torchao", None),
        (1.0, "eagle", "int4", None),
        (6.0, "eagle-static", "int4", None),
    ],
)
def test_taus_that_a_tree_can_give(tau, rows, precisions, message):
    def check():
        names, at = tuple(rows.split(",")), tuple(precisions.split(","))
        options = BenchOptions(rows=names, precisions=at, simulate_tau=tau)
        check_simulated(options, CPU, open_dummy("smollm2-135m"))

    if message is None:
        check()
        return
    with pytest.raises(FasteagleError, match=message):
        check()
