"""The benchmark on a tiny model: what it measures, in which order, and how it counts."""

from __future__ import annotations

import dataclasses
import errno
import gc
import json
import weakref

import pytest
import torch

from fasteagle.bench import run as bench
from fasteagle.bench.hf import HFDecoder
from fasteagle.bench.options import BenchOptions
from fasteagle.bench.report import build_report, print_report
from fasteagle.bench.rivals.ablation import AblatedDrafter
from fasteagle.bench.rivals.medusa import HEADS, RANKS, MedusaHeads, save_medusa
from fasteagle.bench.row_spec import ROW_NAMES, RowSpec
from fasteagle.bench.rows import Decoder, EngineDecoder, Row, Turn
from fasteagle.bench.run import run
from fasteagle.decoding.runner import Runner
from fasteagle.errors import FasteagleError
from fasteagle.loading.checkpoint import open_checkpoint
from fasteagle.loading.open import open_model
from fasteagle.loading.tokenizer import load_tokenizer
from fasteagle.options import DraftOptions, RuntimeOptions
from fasteagle.prompts import read_questions
from helpers import invoke, raising, save_tiny, write_questions

CPU = RuntimeOptions(device="cpu")


def measure(folder, questions, **options):
    options = {"precisions": ("fp32",), "rows": ("hf", "plain"), **options}
    options = BenchOptions(
        model=str(folder), data=questions, max_new_tokens=12, compile=False, **options
    )
    rows = run(options, CPU, open_model(str(folder)), read_questions(options.data)[: options.limit])
    return build_report(rows, options, CPU, save_outputs=True)


def test_the_model_of_a_group_is_gone_before_the_next_one_is_loaded(
    tiny_dir, questions, monkeypatch
):
    """Even where engines are part of circles of references, as compiled code makes them."""
    monkeypatch.setattr(
        bench,
        "_fitting_groups",
        lambda options, *_: [[(p, options.specs)] for p in ("fp32", "bf16")],
    )
    made, alive = [], []
    build = bench.build_rows

    def noting(*args):
        alive.append([each() is not None for each in made])
        rows = build(*args)
        engine = rows[0].decoder.engine
        engine.circle = engine
        made.append(weakref.ref(engine.model))
        return rows

    monkeypatch.setattr(bench, "build_rows", noting)
    gc.disable()
    try:
        options = {"rows": ("plain",), "precisions": ("fp32", "bf16"), "limit": 1}
        report = measure(tiny_dir, questions, **options)
    finally:
        gc.enable()
    assert alive == [[], [False]]
    assert [row["precision"] for row in report["rows"]] == ["fp32", "bf16"]


def test_hf_and_plain_give_the_same_greedy_tokens_in_fp32(tiny_dir, questions, monkeypatch, capsys):
    monkeypatch.setattr("fasteagle.errors.TELL_SECONDS", 0)
    monkeypatch.setattr(Runner, "error", "no memory is left")
    report = measure(tiny_dir, questions)
    said = capsys.readouterr().err
    assert "answered 3 of 3 questions: hf fp32 " in said
    assert "warning: plain fp32 runs without CUDA graphs: no memory is left" in said
    hf, plain = report["rows"]
    assert (hf["name"], plain["name"]) == ("hf", "plain")
    assert hf["outputs"] == plain["outputs"] and len(plain["outputs"]) == 4
    assert plain["tokens"] == sum(map(len, plain["outputs"]))
    assert plain["speedup_vs_plain"] == 1.0 and hf["speedup_vs_plain"] > 0
    assert plain["tau"] == hf["tau"] == 1.0
    for row in report["rows"]:
        assert row["mbu"] > 0 and not row["simulated"] and row["tree"] is None
        assert 0 < row["p50_ms"] <= row["p99_ms"]
        assert 12 < row["context"] < 100 and row["dtype"] == "fp32" and row["scheme"] is None
        assert row["peak_mem_gb"] > 0.05 and row["ttft_s"] > 0 and row["precision"] == "fp32"
        rates = sorted(rate for turns in row["turn_tok_s"] for rate in turns)
        assert list(map(len, row["turn_tok_s"])) == [2, 1, 1]
        assert (rates[0], rates[-1]) == (row["tok_s_min"], row["tok_s_max"])
        assert rates[1] <= row["tok_s_median"] <= rates[2]
    meta = report["meta"]
    assert meta["torch"] == torch.__version__ and meta["device"] and meta["date"]
    assert meta["max_new_tokens"] == 12 and meta["model"] == str(tiny_dir)
    assert meta["bandwidth"]["gb_s"] == meta["bandwidth"]["measured_gb_s"] > 0.1
    threads = torch.get_num_threads()
    assert meta["bandwidth"]["source"] == f"measured, reading with {threads} threads"
    parts = [plain[name] for name in ("draft_ms", "verify_ms", "other_ms")]
    assert parts[0] < min(parts[1:]) and "draft_ms" not in hf
    assert sum(parts) == pytest.approx(1e3 / plain["tok_s"], rel=0.01)  # a token a cycle


def test_every_row_drafts_what_it_says(
    tiny_dir, checkpoint, head_dirs, questions, tmp_path, capsys
):
    """All rows answer alike in fp32; drafted ones report acceptance and the parts of a cycle."""
    medusa = MedusaHeads(checkpoint.config.dim)
    save_medusa(tmp_path / "medusa", medusa, ((0.1,) * RANKS,) * HEADS)
    draft = DraftOptions(head=str(head_dirs / "eagle1"), draft_model=str(tiny_dir))
    names = (*ROW_NAMES, f"eagle-chain={head_dirs / 'eagle3'}")
    report = measure(tiny_dir, questions, rows=names, draft=draft, medusa=tmp_path / "medusa")
    rows = {row["name"]: row for row in report["rows"]}
    assert list(rows) == [name for name in names if name != "gpt-fast"], "which is int4 only"
    for name, row in rows.items():
        assert row["outputs"] == rows["plain"]["outputs"], name
        assert row["tau"] >= 1
        planned = RowSpec.parse(name).planned_tree(draft, quantized_on_cpu=False)
        assert row["tree"] == (planned and dataclasses.asdict(planned))
        drafted = name not in ("hf", "hf-pld", "plain")
        assert ("accepted_by_depth" in row) == drafted
        if drafted:
            shares = row["accepted_by_depth"]
            assert shares == sorted(shares, reverse=True) and all(0 < s <= 1 for s in shares)
            # The bonus token, and a share of a pass for every depth reached (last ones cut short).
            assert row["tau"] <= 1 + sum(shares) + 1e-3
            assert row["draft_ms"] > 0 and row["verify_ms"] > 0 and row["other_ms"] > 0
            assert (row["n_alpha"] is not None) == name.startswith("eagle-chain")
    capsys.readouterr()
    print_report(report, md=True)
    table = capsys.readouterr().out
    headings, _, *lines = (line.split(" | ") for line in table.split("\n\n")[0].splitlines())
    shown = {cells[0].strip("| "): dict(zip(headings, cells, strict=True)) for cells in lines}
    first = rows["model"]["accepted_by_depth"][0]  # a draft model that is the target
    assert shown["model"]["accepted by depth"].startswith(f"{first:.2f}")
    assert shown["plain"]["accepted by depth"] == "-"
    assert "| 3, 3, 8 |" in table and "| 5, -, 25 |" in table and "simulated" not in table
    # A tree from a file is the static row's alone.
    (tmp_path / "tree.json").write_text("[[0], [1]]")
    draft = DraftOptions(head=str(head_dirs / "eagle1"), tree_file=str(tmp_path / "tree.json"))
    report = measure(tiny_dir, questions, rows=("eagle", "eagle-static", "ngram"), draft=draft)
    for row in report["rows"]:
        assert row["outputs"] == rows["plain"]["outputs"], row["name"]
        if row["name"] == "eagle-static":
            assert len(row["accepted_by_depth"]) <= 1 and row["tau"] <= 2


def test_what_cannot_run_is_refused_before_weights_are_loaded(tiny_dir, questions, monkeypatch):
    monkeypatch.setattr(bench, "build_rows", lambda *args: pytest.fail("loaded"))
    for rows, message in ((("plain", "eagle=nowhere/at/all"), "nowhere"), (("eagle",), "no draft")):
        with pytest.raises(FasteagleError, match=message):
            measure(tiny_dir, questions, rows=rows)


def test_a_question_that_is_too_long_is_refused_before_any_is_answered(
    tiny_dir, tmp_path, monkeypatch
):
    monkeypatch.setattr(bench, "answer", lambda *args: pytest.fail("answered"))
    questions = write_questions(tmp_path / "long.jsonl", ["short"], ["much too long " * 50])
    with pytest.raises(FasteagleError, match="the prompt is too long"):
        measure(tiny_dir, questions, rows=("plain",))


def test_rows_take_turns_and_each_has_its_own_history(tiny_dir, questions, monkeypatch):
    calls = []
    for kind in (HFDecoder, EngineDecoder):
        original = kind.turn

        def turn(self, prompt, n, original=original, kind=kind):
            result = original(self, prompt, n)
            calls.append((kind.__name__, prompt, result.tokens))
            return result

        monkeypatch.setattr(kind, "turn", turn)
    measure(tiny_dir, questions, limit=2)
    names = [name for name, _, _ in calls]
    assert names[:2] == ["HFDecoder", "EngineDecoder"]  # warm-up
    assert names[2:] == ["HFDecoder"] * 2 + ["EngineDecoder"] * 2 + ["HFDecoder", "EngineDecoder"]
    tokenizer = load_tokenizer(tiny_dir)
    for first, second in ((2, 3), (4, 5)):
        messages = [
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": tokenizer.decode(calls[first][2])},
            {"role": "user", "content": "and then?"},
        ]
        assert calls[second][1] == tokenizer.encode(tokenizer.render(messages))


def test_a_row_has_the_peak_of_its_own_turns(tiny_dir, questions, monkeypatch):
    used = iter([9, 9, 5, 3, 2, 4])  # GB: warm-ups, then two turns of each row
    peak, turn = [0], EngineDecoder.turn

    def noting(self, *arguments):
        peak[0] = max(peak[0], next(used) * 10**9)
        return turn(self, *arguments)

    monkeypatch.setattr(EngineDecoder, "turn", noting)
    monkeypatch.setattr(bench, "reset_peak", lambda device: peak.__setitem__(0, 0))
    monkeypatch.setattr(bench, "peak_bytes", lambda device: peak[0])
    report = measure(tiny_dir, questions, rows=("plain", "ngram"), limit=1)
    assert [row["peak_mem_gb"] for row in report["rows"]] == [5.0, 4.0]


def test_another_process_begins_anew_and_has_a_peak_of_its_own(tiny_dir, monkeypatch):
    decoder, calls = Decoder(), []
    decoder.peak_bytes = 7
    monkeypatch.setattr(Decoder, "restart", lambda self: calls.append("restart"))
    monkeypatch.setattr(
        Decoder, "turn", lambda self, *_: calls.append("turn") or Turn([5], 0.1, 0.0, 0)
    )
    row = Row("gpt-fast", "int4", decoder, 1)
    bench.answer(row, ["one", "two"], load_tokenizer(tiny_dir), 9, torch.device("cpu"))
    assert calls == ["restart", "turn", "turn"] and row.peak_bytes == 7


def test_our_rows_share_weights_and_one_kv_cache(tiny_dir):
    """One cache of 4k is 2 GB at 7B: the rows of a table must not each have one."""
    options = BenchOptions(str(tiny_dir), ("plain", "ngram"), compile=False)
    rows = bench.build_rows("fp32", options, open_model(str(tiny_dir)), CPU)
    engines = [row.decoder.engine for row in rows]
    assert len({id(engine.cache) for engine in engines}) == 1
    assert len({id(engine.model) for engine in engines}) == 1
    assert len({id(engine.state) for engine in engines}) == 2


def test_ablations_are_those_of_the_eagle_row(tiny_dir, head_dirs):
    draft, drafters = DraftOptions(head=str(head_dirs / "eagle1")), []
    for more in ({}, {"rerank": False}, {"tree_value": "confidence"}):
        options = BenchOptions(
            str(tiny_dir), ("eagle", "fused"), draft=draft, compile=False, **more
        )
        rows = bench.build_rows("fp32", options, open_model(str(tiny_dir)), CPU)
        drafters += [row.decoder.engine.drafter for row in rows]
    ablated = [d for d in drafters if isinstance(d, AblatedDrafter)]
    assert ablated == [drafters[2], drafters[4]]
    assert [(d.by_confidence, d.reranks) for d in ablated] == [(False, False), (True, True)]


def test_transformers_reads_dense_weights_and_a_dense_cache(tmp_path):
    """Whatever the files and the cache of our rows are."""
    model, folder = save_tiny(tmp_path / "model", head_dim=64), str(tmp_path / "int8")
    done = invoke("quantize", "--model", model, "--out", folder, "--int8")
    assert done.exit_code == 0, done.stderr
    runtime = RuntimeOptions(device="cpu", kv="int8")
    options = BenchOptions(folder, ("hf", "plain"), compile=False)
    theirs, ours = bench.build_rows("auto", options, open_model(folder, runtime), runtime)
    assert (theirs.precision, theirs.scheme, ours.precision) == (theirs.dtype, None, "int8")
    assert theirs.weight_bytes > 1.5 * ours.weight_bytes and theirs.kv_bytes > 1.5 * ours.kv_bytes


@pytest.mark.parametrize(
    ("free_of_one", "groups"),
    [
        (9.0, [["fp32 hf,plain", "bf16 hf,plain"]]),
        (2.5, [["fp32 hf,plain"], ["bf16 hf,plain"]]),
        (1.5, [["fp32 plain"], ["fp32 hf"], ["bf16 hf,plain"]]),
        (0.1, [["fp32 plain"], ["fp32 hf"], ["bf16 plain"], ["bf16 hf"]]),
    ],
)
def test_a_second_copy_of_the_weights_is_loaded_where_it_fits(
    tiny_dir, monkeypatch, free_of_one, groups
):
    """`free_of_one`: memory as a multiple of the model in fp32."""
    checkpoint = open_checkpoint(tiny_dir)
    one = sum(bench.required_bytes(checkpoint.config, torch.float32, 512))
    monkeypatch.setattr(bench, "available_bytes", lambda device: int(1.2 * free_of_one * one))
    for theirs in ("hf", "gpt-fast"):
        options = BenchOptions(str(tiny_dir), (theirs, "plain"), ("fp32", "bf16"), compile=False)
        fitting = bench._fitting_groups(options, CPU, checkpoint, torch.device("cpu"))
        names = [[f"{p} {','.join(map(str, specs))}" for p, specs in g] for g in fitting]
        assert names == [[name.replace("hf", theirs) for name in group] for group in groups]


# The script


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], ("auto",)),
        (["--int4"], ("int4",)),
        (["--quant", "int8"], ("int8",)),
        (["--dtype", "bf16"], ("bf16",)),
        (["--dtype", "fp32", "--precision", "bf16,int4"], ("bf16", "int4")),
    ],
)
def test_precision_is_what_the_model_options_say(script, monkeypatch, flags, expected):
    chosen = []

    def check(options, *_):
        chosen.append(options.precisions)
        raise FasteagleError("far enough")

    monkeypatch.setattr("tokens_per_sec.check_simulated", check)
    assert script(*flags).exit_code == 2 and chosen == [expected]


def test_the_script_writes_what_it_prints(
    script, tiny_dir, questions, tmp_path, capsys, monkeypatch
):
    """What cannot be written has been printed."""
    out = tmp_path / "record.json"
    words = f"--precision fp32 --rows plain --limit 2 --max-new-tokens 8 --lookup {__file__}"
    words = f"{words} --no-compile --md --save-outputs".split()
    chart = tmp_path / "chart.png"
    paths = ["--model", tiny_dir, "--data", questions, "--json", out, "--plot", chart]
    done = script(*paths, *words)
    assert done.exit_code == 0, done.stderr
    assert chart.stat().st_size > 5000
    record = json.loads(out.read_text())
    assert len(record["rows"][0]["outputs"]) == 3 and record["meta"]["draft"]["lookup"]
    assert done.stdout.startswith("| row | precision | tok/s |")
    capsys.readouterr()
    print_report(record, md=True)
    assert done.stdout == capsys.readouterr().out
    monkeypatch.setattr("tokens_per_sec.write_json", raising(OSError(errno.ENOSPC, "full")))
    full = script(*paths, *words)
    assert full.exit_code == 2 and full.stdout.startswith("| row | precision | tok/s |")
