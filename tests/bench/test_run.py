"""The benchmark on a tiny model: what it measures, in which order, and how it counts."""

from __future__ import annotations

import dataclasses
import gc
import json
import subprocess
import sys
import weakref

import pytest
import torch

from fasteagle.bench import run as bench
from fasteagle.bench.measure import Bandwidth
from fasteagle.bench.report import COLUMNS, build_report, markdown, table_rows
from fasteagle.bench.rivals.medusa import HEADS, RANKS, MedusaHeads, save_medusa
from fasteagle.bench.row_spec import ROW_NAMES, RowSpec
from fasteagle.bench.rows import EngineDecoder, HFDecoder, Row, Turn
from fasteagle.bench.run import BenchOptions, run
from fasteagle.errors import FasteagleError
from fasteagle.loading.checkpoint import open_checkpoint
from fasteagle.loading.heads.write import save_head
from fasteagle.loading.open import open_model
from fasteagle.loading.tokenizer import load_tokenizer
from fasteagle.options import DraftOptions, RuntimeOptions
from fasteagle.prompts import read_questions
from helpers import SCRIPTS, eagle3_of, random_head

SCRIPT = SCRIPTS / "tokens_per_sec.py"
CPU = RuntimeOptions(device="cpu")


def measure(folder, questions, **options):
    options = {"precisions": ("fp32",), "rows": ("hf", "plain"), **options}
    options = BenchOptions(
        model=str(folder), data=questions, max_new_tokens=12, compile=False, **options
    )
    rows = run(options, CPU, open_model(str(folder)), read_questions(options.data, options.limit))
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
        measure(tiny_dir, questions, rows=("plain",), precisions=("fp32", "bf16"), limit=1)
    finally:
        gc.enable()
    assert alive == [[], [False]]


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
    asked = []

    def check(options, *_):
        asked.append(options.precisions)
        raise FasteagleError("far enough")

    monkeypatch.setattr("tokens_per_sec.check_simulated", check)
    assert script(*flags).exit_code == 2 and asked == [expected]


def test_precision_beside_int4_is_refused(script):
    result = script("--int4", "--precision", "bf16")
    assert result.exit_code == 2 and "name all of them in --precision" in result.stderr


def test_hf_and_plain_give_the_same_greedy_tokens_in_fp32(tiny_dir, questions):
    report = measure(tiny_dir, questions)
    hf, plain = report["rows"]
    assert (hf["name"], plain["name"]) == ("hf", "plain")
    assert hf["outputs"] == plain["outputs"] and len(plain["outputs"]) == 4
    assert plain["tokens"] == sum(map(len, plain["outputs"]))
    assert plain["speedup_vs_plain"] == 1.0 and hf["speedup_vs_plain"] > 0
    assert plain["tau"] == hf["tau"] == 1.0
    assert plain["plain_rows"] in (1, 2) and hf["plain_rows"] is None
    for row in report["rows"]:
        assert row["mbu"] > 0 and not row["simulated"] and row["tree"] is None
        assert 0 < row["p50_ms"] <= row["p99_ms"]
        assert 12 < row["context"] < 100 and row["dtype"] == "fp32" and row["scheme"] is None
        assert row["peak_mem_gb"] > 0.05 and row["ttft_s"] > 0 and row["precision"] == "fp32"
        assert row["tok_s_min"] <= row["tok_s_median"] <= row["tok_s_max"]
    meta = report["meta"]
    assert meta["torch"] == torch.__version__ and meta["device"] and meta["date"]
    assert meta["max_new_tokens"] == 12 and meta["model"] == str(tiny_dir)
    assert meta["bandwidth"]["gb_s"] == meta["bandwidth"]["measured_gb_s"] > 0.1
    threads = torch.get_num_threads()
    assert meta["bandwidth"]["source"] == f"measured, reading with {threads} threads"
    parts = [plain[name] for name in ("draft_ms", "verify_ms", "other_ms")]
    assert parts[0] == 0 < min(parts[1:]) and "draft_ms" not in hf
    assert sum(parts) == pytest.approx(1e3 / plain["tok_s"], rel=0.01)  # a token a cycle


def test_every_row_drafts_what_it_says(tiny_dir, questions, tmp_path):
    """All rows answer alike in fp32; drafted ones report acceptance and the parts of a cycle."""
    from fasteagle.loading.checkpoint import load_model

    checkpoint = open_checkpoint(tiny_dir)
    model = load_model(checkpoint, dtype=torch.float32, device="cpu", max_seq_len=64)
    head = random_head(model, rope_scaling=None, rope_base=10000.0)
    save_head(tmp_path / "head", head, {}, torch.float32)
    save_medusa(tmp_path / "medusa", MedusaHeads(model.config.dim), ((0.1,) * RANKS,) * HEADS)
    draft = DraftOptions(head=str(tmp_path / "head"), draft_model=str(tiny_dir))
    report = measure(tiny_dir, questions, rows=ROW_NAMES, draft=draft, medusa=tmp_path / "medusa")
    rows = {row["name"]: row for row in report["rows"]}
    assert list(rows) == [name for name in ROW_NAMES if name != "gpt-fast"], "which is int4 only"
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
            assert (row["n_alpha"] is not None) == (name == "eagle-chain")
    table = markdown(report)
    assert "draft + verify + other ms" in table and "P50 / P99 ms per token" in table
    shown = {line[0]: dict(zip(COLUMNS, line, strict=True)) for line in table_rows(report)}
    first = rows["model"]["accepted_by_depth"][0]  # a draft model that is the target
    assert shown["model"]["accepted by depth"].startswith(f"{first:.2f}")
    assert shown["plain"]["accepted by depth"] == "-"
    assert "| 3, 3, 8 |" in table and "| 5, -, 25 |" in table and "simulated" not in table
    # A tree from a file is the static row's alone.
    (tmp_path / "tree.json").write_text("[[0], [1]]")
    draft = DraftOptions(head=str(tmp_path / "head"), tree_file=str(tmp_path / "tree.json"))
    report = measure(tiny_dir, questions, rows=("eagle", "eagle-static", "ngram"), draft=draft)
    for row in report["rows"]:
        assert row["outputs"] == rows["plain"]["outputs"], row["name"]
        if row["name"] == "eagle-static":
            assert len(row["accepted_by_depth"]) <= 1 and row["tau"] <= 2


def test_rows_with_heads_of_their_own(tiny_dir, questions, tmp_path):
    """EAGLE-1 and EAGLE-3 in one run."""
    target = open_model(str(tiny_dir)).prepared(RuntimeOptions(dtype="fp32", device="cpu"))
    model = target.engine().model
    folders = {}
    for kind in ("eagle1", "eagle3"):
        head = random_head(model, eagle3=eagle3_of(kind, model.config), rope_base=10000.0)
        folders[kind] = tmp_path / kind
        save_head(folders[kind], head, {}, torch.float32)
    rows = ("plain", f"eagle@2/3/5={folders['eagle1']}", f"eagle@2/3/5={folders['eagle3']}")
    report = measure(tiny_dir, questions, rows=rows)
    found = {row["name"]: row["outputs"] for row in report["rows"]}
    assert list(found) == list(rows) and found[rows[0]] == found[rows[1]] == found[rows[2]]
    with pytest.raises(FasteagleError, match="nowhere"):
        measure(tiny_dir, questions, rows=(*rows, "eagle=nowhere/at/all"))


def test_prompt_lookup_counts_its_first_batch_apart():
    """What comes with the first pass took no decoding time of its own."""
    from fasteagle.bench.hf import _Clock

    clock = _Clock()
    for n in (9, 4, 2):  # the prompt, four tokens of the first pass, two of the next
        clock.put(torch.zeros(n))
    assert clock.first == 4 and len(clock.times) == 2
    assert clock.chunks == [(2, clock.times[1] - clock.times[0])]
    row = Row("hf-pld", "fp32", None, 1)
    row.turns.append(Turn([0] * 6, 0.5, 0.1, 1, first=clock.first))
    assert row.tok_s == pytest.approx(20) and row.tau == 2 and row.turn_rates == [20]


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


def test_our_rows_share_one_kv_cache(tiny_dir, questions):
    """One cache of 4k is 2 GB at 7B: the rows of a table must not each have one."""
    options = BenchOptions(str(tiny_dir), ("plain", "ngram"), ("fp32",), questions, compile=False)
    prepared = open_model(str(tiny_dir)).prepared(RuntimeOptions(dtype="fp32", device="cpu"))
    rows = bench.build_rows("fp32", options, prepared)
    assert len({id(row.decoder.engine.cache) for row in rows}) == 1
    assert len({id(row.decoder.engine.state) for row in rows}) == 2
    report = measure(tiny_dir, questions, rows=("plain", "ngram", "hf"))
    assert report["rows"][0]["outputs"] == report["rows"][1]["outputs"]
    assert report["rows"][0]["outputs"] == report["rows"][2]["outputs"]


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
    options = BenchOptions(str(tiny_dir), ("hf", "plain"), ("fp32", "bf16"), compile=False)
    found = bench._fitting_groups(options, CPU, checkpoint, torch.device("cpu"))
    shown = [[f"{p} {','.join(map(str, specs))}" for p, specs in group] for group in found]
    assert shown == groups


def test_precisions_run_together_or_one_by_one(tiny_dir, questions, monkeypatch):
    seen = []
    answer = bench.answer

    def spy(row, question, *rest):
        seen.append((row.name, row.precision, question.turns[0]))
        answer(row, question, *rest)

    monkeypatch.setattr(bench, "answer", spy)
    options = {"precisions": ("bf16", "fp32"), "rows": ("plain",), "limit": 2}
    measure(tiny_dir, questions, **options)
    assert [p for _, p, _ in seen] == ["bf16", "fp32", "bf16", "fp32"]
    seen.clear()
    monkeypatch.setattr(bench, "available_bytes", lambda device: 1000)
    report = measure(tiny_dir, questions, **options)
    assert [p for _, p, _ in seen] == ["bf16", "bf16", "fp32", "fp32"]
    assert [row["precision"] for row in report["rows"]] == ["bf16", "fp32"]


def test_threads_are_those_asked_for(tiny_dir, questions):
    options = BenchOptions(str(tiny_dir), ("plain",), ("fp32",), compile=False, max_new_tokens=2)
    runtime = dataclasses.replace(CPU, threads=1)
    assert torch.get_num_threads() == 2
    run(options, runtime, open_model(str(tiny_dir)), read_questions(questions, 1))
    assert torch.get_num_threads() == 1


def test_same_seed_same_sampled_outputs(tiny_dir, questions):
    first, second = (
        measure(tiny_dir, questions, rows=("plain",), temperature=1.0, seed=5) for _ in range(2)
    )
    assert first["rows"][0]["outputs"] == second["rows"][0]["outputs"]


def test_arithmetic_of_a_row():
    row = Row("plain", "bf16", decoder=None, weight_bytes=10**9)
    row.turns = [Turn([1] * 11, 0.5, 2.0, 10), Turn([1] * 31, 0.7, 3.0, 10), Turn([1], 0.9, 0.0, 0)]
    assert row.tokens == 43 and row.seconds == 5.0
    assert row.tok_s == pytest.approx(40 / 5)
    assert row.tau == pytest.approx(40 / 20)
    assert row.turn_rates == [pytest.approx(5), pytest.approx(10)]
    other = Row("eagle", "bf16", decoder=None, weight_bytes=10**9)
    other.turns = [Turn([1] * 21, 0.5, 1.0, 10)]
    report = build_report([row, other], BenchOptions(), CPU, save_outputs=False)
    assert [r["speedup_vs_plain"] for r in report["rows"]] == [1.0, 2.5]
    assert report["rows"][0]["ttft_s"] == 0.7 and "outputs" not in report["rows"][0]


def test_bandwidth_use_where_the_bandwidth_is_known(monkeypatch):
    bandwidth = Bandwidth(936, "data sheet of RTX 3090", 850)
    monkeypatch.setattr("fasteagle.bench.report.memory_bandwidth", lambda *device: bandwidth)
    row = Row("eagle", "bf16", decoder=None, weight_bytes=int(9.36e9))
    row.turns = [Turn([1] * 51, 0.5, 1.0, 25, prompt_tokens=75)]  # 50 tokens in 25 passes, 1 s
    report = build_report([row], BenchOptions(), CPU, save_outputs=False)
    assert report["rows"][0]["mbu"] == pytest.approx(0.25)
    assert report["rows"][0]["context"] == 100.5  # halfway through the answer
    row.kv_bytes = int(9.36e9 / 100.5)  # the cache is read too: as much again
    report = build_report([row], BenchOptions(), CPU, save_outputs=False)
    assert report["rows"][0]["mbu"] == pytest.approx(0.5)
    assert "MBU of 936.0 GB/s (data sheet of RTX 3090)" in markdown(report)


def test_our_questions_are_ten_and_the_limit_counts_questions(questions):
    assert len(read_questions(None, None)) == 10
    assert [len(q.turns) for q in read_questions(questions, 2)] == [2, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no questions"),
        ('{"turns": ["a"]}\n{"turns": []}\n', "line 2"),
        ('{"turns": [3]}', "line 1"),
        ('{"prompt": "x"}', "line 1"),
        ("not json", "line 1"),
        ("[1]", "line 1"),
    ],
)
def test_question_files_that_are_not(tmp_path, text, message):
    path = tmp_path / "q.jsonl"
    path.write_text(text)
    with pytest.raises(FasteagleError, match=message):
        read_questions(path, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": ("plain", "egale")}, "unknown row 'egale'"),
        ({"precisions": ("int3",)}, "unknown precision 'int3'"),
        ({"limit": 0}, "limit 0"),
        ({"max_new_tokens": 1}, "max-new-tokens 1"),
    ],
)
def test_options_that_cannot_be(options, message):
    with pytest.raises(FasteagleError, match=message):
        BenchOptions(**options)


def test_the_script(tiny_dir, questions, tmp_path):
    out = tmp_path / "record.json"
    done = subprocess.run(
        [
            sys.executable,
            SCRIPT,
            "--model",
            tiny_dir,
            "--data",
            questions,
            "--precision",
            "fp32",
            "--rows",
            "plain",
            "--limit",
            "2",
            "--max-new-tokens",
            "8",
            "--no-compile",
            "--md",
            "--save-outputs",
            "--json",
            out,
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(out.read_text())
    assert len(record["rows"][0]["outputs"]) == 3
    assert done.stdout.startswith("| row | precision | tok/s |")
    assert done.stdout.strip() == markdown(record).strip()


def test_the_script_measures_shapes_without_weights(script, tiny_preset, tmp_path, questions):
    out = tmp_path / "r.json"
    result = script(
        "--model",
        tiny_preset,
        "--load-format",
        "dummy",
        "--data",
        questions,
        "--no-compile",
        "--max-new-tokens",
        9,
        "--precision",
        "fp32",
        "--json",
        out,
        "--rows",
        "hf,plain",
        "--save-outputs",
    )
    assert result.exit_code == 0, result.stderr
    rows = json.loads(out.read_text())["rows"]
    assert [row["name"] for row in rows] == ["hf", "plain"]
    assert rows[0]["outputs"] == rows[1]["outputs"] and rows[1]["tokens"] == 4 * 9
    assert tiny_preset in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "egale"], "Error: unknown row 'egale'"),
        (["--precision", "int3"], "Error: unknown precision 'int3'"),
        (["--data", "/nowhere/q.jsonl"], "Error: cannot read /nowhere/q.jsonl"),
        (["--load-format", "dummy", "--model", "lama2-7b"], "did you mean 'llama2-7b'"),
        (["--temperature", "-1"], "Error: temperature -1"),
    ],
)
def test_bad_input_to_the_script(script, arguments, message):
    result = script(*arguments)
    assert result.exit_code == 2 and message in result.stderr and result.stdout == ""
