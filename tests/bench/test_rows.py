"""Rows of the benchmark: their names and trees, and the arithmetic of what was measured."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from fasteagle import paths
from fasteagle.bench import report as reports
from fasteagle.bench.measure import Bandwidth
from fasteagle.bench.options import BenchOptions
from fasteagle.bench.report import build_report, conditions
from fasteagle.bench.row_spec import RowSpec
from fasteagle.bench.rows import Decoder, EngineDecoder, Row, Turn, percentile
from fasteagle.decoding.stats import Stats
from fasteagle.drafting.ngram import NgramDrafter
from fasteagle.errors import FasteagleError
from fasteagle.generate import Engine
from fasteagle.options import DraftOptions, RuntimeOptions, SamplingParams
from fasteagle.quant.scheme import Scheme
from fasteagle.shapes import FusedShape, StaticShape, TreeShape
from helpers import raising


def row_of(*turns, name="plain", weight_bytes=10**9, tree=None, auto_shares=None, **values):
    decoder = Decoder()
    decoder.tree, decoder.auto_shares = tree, auto_shares
    return Row(name, "bf16", decoder, weight_bytes, questions=[[*turns]], **values)


def report_of(*rows):
    return build_report(rows, BenchOptions(), RuntimeOptions(device="cpu"), save_outputs=False)


def reported(*rows):
    return report_of(*rows)["rows"]


def test_arithmetic_of_a_row():
    row = row_of(Turn([1] * 11, 0.5, 2.0, 10), Turn([1] * 31, 0.7, 3.0, 10), Turn([1], 1.0, 0.0, 0))
    assert row.tokens == 43 and row.seconds == 5.0
    assert row.tok_s == pytest.approx(40 / 5)
    assert row.tau == pytest.approx(40 / 20)
    assert row.turn_rates == [[pytest.approx(5), pytest.approx(10), None]]
    other = row_of(Turn([1] * 21, 0.5, 1.0, 10), name="eagle", scheme=Scheme(4, 64, "hqq"))
    first, second = reported(row, other)
    assert (first["speedup_vs_plain"], second["speedup_vs_plain"]) == (1.0, 2.5)
    assert first["ttft_s"] == 0.7 and "outputs" not in first
    assert first["turn_ttft_s"] == [[0.5, 0.7, 1.0]]
    assert (first["scheme"], first["lm_head_bits"]) == (None, None)
    assert (second["scheme"], second["lm_head_bits"]) == ("int4-g64-hqq", 16)
    assert first["turn_tok_s"] == [[5.0, 10.0, None]] and first["tok_s_median"] == 7.5


def test_latency_of_a_token_is_its_share_of_its_chunk():
    row = row_of(Turn([1] * 7, 0.5, 0.9, 3, chunks=((3, 0.3), (1, 0.5), (2, 0.1))))
    assert row.latencies == pytest.approx([0.1, 0.1, 0.1, 0.5, 0.05, 0.05])
    assert sum(row.latencies) == pytest.approx(row.seconds)
    (record,) = reported(row)
    assert (record["p50_ms"], record["p99_ms"]) == (100, 500)
    assert percentile(range(100, 0, -1), 0.99) == 99 and percentile([2.0, 1.0], 1.0) == 2.0
    (record,) = reported(row_of(Turn([1], 0.5, 0.0, 0)))  # an answer of one token has no gaps
    assert record["p50_ms"] is None and record["tok_s_median"] is None and record["tau"] == 1
    assert percentile([2.0, 1.0], 0.0) == 1.0


def test_a_turn_of_a_model_is_what_its_engine_did(target):
    engine, same = (Engine(target, 128, drafter=NgramDrafter(4)) for _ in range(2))
    decoder = EngineDecoder(engine, SamplingParams(), frozenset())
    prompt = [5, 6, 7, 8] * 4
    one, two = (decoder.turn(prompt, 40) for _ in range(2))
    chunks = [*same.generate(prompt, SamplingParams(), 40)]
    assert one.tokens == two.tokens == [token for new in chunks for token in new]
    assert one.prompt_tokens == 16 and two.stats.cached_tokens == 15
    sizes = [len(new) for new in chunks[1:]]
    assert [n for n, _ in one.chunks] == sizes and one.passes == len(sizes) < 39
    assert sum(seconds for _, seconds in one.chunks) == pytest.approx(one.seconds, rel=0.05)
    decoder.restart()
    decoder.eos_ids = frozenset({one.tokens[20]})
    assert decoder.turn(prompt, 40).tokens == one.tokens[: one.tokens.index(one.tokens[20]) + 1]
    decoder.restart()
    assert decoder.turn(prompt, 2).stats.cached_tokens == 0
    row = Row("ngram", "fp32", decoder, 1, questions=[[one]])
    engine.drafter.policy = SimpleNamespace(explain=lambda: "it pays", shares=lambda: "all of it")
    row.decoder.close()
    assert decoder.tree == engine.drafter.shape and decoder.engine is None
    assert (decoder.auto, decoder.auto_shares) == ("it pays", "all of it")


def test_prompt_lookup_counts_its_first_batch_apart():
    """What comes with the first pass took no decoding time of its own."""
    row = row_of(Turn([0] * 6, 0.5, 0.1, 1, first=4))
    assert row.tok_s == pytest.approx(20) and row.tau == 2


def test_bandwidth_use_where_the_bandwidth_is_known(monkeypatch):
    bandwidth = Bandwidth(936, "data sheet of RTX 3090", 850)
    monkeypatch.setattr("fasteagle.bench.report.memory_bandwidth", lambda *device: bandwidth)
    turn = Turn([1] * 51, 0.5, 1.0, 25, prompt_tokens=75)  # 50 tokens in 25 passes, 1 s
    row = row_of(turn, weight_bytes=int(9.36e9))
    (record,) = reported(row)
    assert record["mbu"] == pytest.approx(0.25)
    assert record["context"] == 100.5  # halfway through the answer
    row.kv_bytes = int(9.36e9 / 100.5)  # the cache is read too: as much again
    report = report_of(row)
    assert report["rows"][0]["mbu"] == pytest.approx(0.5)
    said = conditions(report)
    assert "MBU of 936.0 GB/s (data sheet of RTX 3090)" in said and "barrier" not in said


def test_the_conditions_below_the_table():
    machine = {"device": "a CPU", "threads": 1, "torch": "2", "transformers": "5"}
    machine |= {"fasteagle": "0.1", "bandwidth": {"gb_s": 20.04, "source": "measured"}}
    meta = {"model": "tiny", "data": "q.jsonl", "max_new_tokens": 1, "temperature": 0.7, **machine}
    row = {"turns": 3, "tokens": 9, "barrier_ns": None, "simulated": False}
    for commit, version in ((None, "0.1"), ("abcd", "abcd")):
        said = conditions({"meta": meta | {"commit": commit}, "rows": [row, row]})
        assert said.startswith(
            "tiny, 3 turns of q.jsonl, at most 1 new token, T=0.7; a CPU, 1 thread; torch 2, "
            f"transformers 5, fasteagle {version}; MBU of 20.0 GB/s (measured); "
        )


def test_what_a_barrier_took_is_told():
    rows = [row_of(Turn([1] * 51, 0.5, 1.0, 25)) for _ in range(3)]
    rows[0].barriers, rows[2].barriers = [40.0, 310.0, 60.4], [299.6]
    report = report_of(*rows)
    assert [record["barrier_ns"] for record in report["rows"]] == [60.4, None, 299.6]
    assert "; a barrier of the threads: 60 to 300 ns" in conditions(report)


def test_arithmetic_of_a_simulated_row():
    stats = Stats(
        passes=10, draft_seconds=0.5, verify_seconds=1.0, decode_seconds=2.0, path_lengths=[0] * 10
    )
    turn = Turn([1] * 11, 0.5, 2.0, 10, stats, chunks=((1, 0.1), (2, 0.4)))
    row = row_of(turn, name="eagle", tree=TreeShape(3, 3, 8), simulated_tau=3.0)
    assert row.tok_s == 15 and row.tau == 3 and row.measured_tau == 1
    assert row.turn_rates == [[15]] and row.latencies == pytest.approx([0.1 / 3, 0.4 / 3])
    assert row.passes_s == 5  # what MBU counts is measured
    _, record = reported(row_of(Turn([1] * 11, 0.5, 2.0, 10)), row)
    assert (record["speedup_vs_plain"], record["tau"], record["measured_tau"]) == (3.0, 3.0, 1.0)
    assert [record[name] for name in ("draft_ms", "verify_ms", "other_ms")] == [50, 100, 50]
    (alone,) = reported(row)
    cells = dict(zip(reports.COLUMNS, reports._cells(alone), strict=True))
    assert (cells["tau"], cells["x plain"]) == ("3.00 *simulated*", "-")


def test_the_cells_of_the_table():
    parts = {"draft_seconds": 0.2, "verify_seconds": 1.0, "decode_seconds": 2.0}
    stats = Stats(passes=10, path_lengths=[0, 1, 1, 2], **parts)
    chunks = ((1, 0.1), (1, 0.4), (2, 0.6))
    slow = Turn([1] * 11, 0.5, 2.0, 10, stats, chunks=chunks)
    turns = slow, Turn([1] * 31, 0.25, 2.0, 10), Turn([1] * 21, 0.75, 2.0, 10)
    row = row_of(*turns, name="eagle", tree=TreeShape(3, 2, 8), peak_bytes=3 * 10**9)
    plain = row_of(Turn([1] * 11, 0.5, 2.0, 10))
    tuned = row_of(*turns, name="fused", tree=TreeShape(3, 2, 8), auto_shares="all")
    tuned.decoder.auto = "it pays"
    records = reported(plain, row, tuned)
    assert [record["auto"] for record in records] == [None, None, "it pays"]
    _, cells, tuned = (dict(zip(reports.COLUMNS, reports._cells(r), strict=True)) for r in records)
    assert {name: cells[name] for name in cells if name != "MBU"} == {
        "row": "eagle",
        "precision": "bf16",
        "tok/s": "10.0",
        "median (min - max) per turn": "10.0 (5.0 - 15.0)",
        "x plain": "2.00",
        "tau": "2.00",
        "accepted by depth": "0.75 0.25",
        "tree": "3, 2, 8",
        "draft + verify + other ms": "20.0 + 100.0 + 80.0",
        "P50 / P99 ms per token": "300.0 / 400.0",
        "TTFT s": "0.500",
        "peak GB": "3.00",
    }
    assert tuned["tree"] == "auto: all"
    untimed = dataclasses.replace(slow, stats=dataclasses.replace(stats, parts_timed=False))
    assert "draft_ms" not in reported(row_of(slow, untimed))[0]


def test_acceptance_of_a_chain_is_counted_by_depth():
    stats = Stats(passes=5, path_lengths=[0, 1, 2, 2, 4])
    turn = Turn([1] * 15, 0.5, 2.0, 5, stats)
    chain, tree = reported(row_of(turn, name="eagle-chain"), row_of(turn, name="eagle"))
    assert chain["accepted_by_depth"] == tree["accepted_by_depth"] == [0.8, 0.6, 0.2, 0.2]
    assert (chain["n_alpha"], tree["n_alpha"]) == ([0.8, 0.75, 0.3333, 1.0], None)


@pytest.mark.parametrize(("backend", "sums"), [("fasteagle", "fp32"), ("torchao", None)])
def test_a_report_says_how_our_kernels_accumulate(backend, sums):
    runtime = RuntimeOptions(device="cpu", backend=backend, quant="int4")
    report = build_report([], BenchOptions(), runtime, save_outputs=False)
    assert report["meta"]["accumulate"] == sums and report["meta"]["data"] == "package prompts"


# Names


@pytest.mark.parametrize(
    ("name", "tree"),
    [("eagle@4/2/10", TreeShape(4, 2, 10)), ("fused@4/2/10/12", FusedShape(4, 2, 10, 12))],
)
def test_a_row_may_name_its_tree_and_its_head(name, tree):
    options = BenchOptions(rows=(name, f"{name}=some/head"), draft=DraftOptions(head="own"))
    for row, label, head in zip(options.specs, options.rows, ("own", "some/head"), strict=True):
        draft = row.draft_options(options.draft)
        assert (draft.drafter, draft.tree_shape(False)) == (name.split("@")[0], tree)
        assert not draft.auto_tree and row.planned_tree(DraftOptions(), True) == tree
        assert str(row) == label and draft.head == head and row.has_head


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({"tap_layers": (1, 2, 3), "head": "own"}, "eagle fused eagle-chain"),
        ({"lookup": (Path("a.txt"),)}, "fused ngram"),
        ({"verify": "multi-round", "drafter": "eagle-static"}, "eagle-chain"),
    ],
)
def test_options_are_for_rows_that_read_them(options, rows):
    draft, name = DraftOptions(**options), next(iter(options))
    for row in ("eagle", "fused", "ngram", "eagle-chain"):
        read = getattr(RowSpec(row).draft_options(draft), name)
        assert read == (options[name] if row in rows.split() else getattr(DraftOptions(), name))


def test_the_usual_trees(tmp_path):
    draft = DraftOptions(lookup_depth=5)
    assert RowSpec("fused").planned_tree(draft, False) == FusedShape(3, 3, 8, 5)
    assert RowSpec("fused").planned_tree(DraftOptions(), True) == FusedShape(2, 3, 3, 8)
    assert RowSpec("eagle").planned_tree(draft, False) == TreeShape(3, 3, 8)
    assert RowSpec("ngram").planned_tree(draft, False) == TreeShape(5, 1, 5)
    (tmp_path / "tree.json").write_text("[[0], [1], [0, 0]]")
    draft = DraftOptions(tree_file=str(tmp_path / "tree.json"))
    assert RowSpec("eagle-static").planned_tree(draft, False) == StaticShape(2, None, 3)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("fused@ fused@3/3/8 fused@3/3/8/x fused@1/2/3/4/5", "DEPTH/TOPK/NODES/LOOKUP-DEPTH"),
        ("eagle@3/3/8/8 eagle@ eagle@3/3 eagle@3/3/x eagle@3/3/-8", "like eagle@3/3/8"),
        ("ngram@3/3/8 fusedx fuse@3/3/8/8 eagel=x", "unknown row"),
        ("ngram=x", "ngram has no draft head: drop =x"),
        ("eagle=", "name the draft head after"),
        ("model", "needs a smaller model: add --draft-model"),
    ],
)
def test_rows_that_are_none(rows, message):
    for row in rows.split():
        with pytest.raises(FasteagleError, match=message):
            BenchOptions(rows=(row,))


@pytest.mark.parametrize("error", [FileNotFoundError("git"), subprocess.TimeoutExpired("git", 10)])
def test_without_git_the_commit_is_not_known(monkeypatch, error):
    monkeypatch.setattr(paths.subprocess, "run", raising(error))
    assert paths.checkout_commit() is None
