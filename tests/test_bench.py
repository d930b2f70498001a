"""The benchmark on a tiny model: what it measures, in which order, and how it counts."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from fasteagle import bench
from fasteagle.bench import BenchOptions, Row, Turn, read_questions, run
from fasteagle.bench_report import build_report, markdown
from fasteagle.checkpoint import open_checkpoint
from fasteagle.errors import FasteagleError
from fasteagle.options import RuntimeOptions
from fasteagle.tokenizer import load_tokenizer

SCRIPT = Path(__file__).parent.parent / "scripts" / "tokens_per_sec.py"
CPU = RuntimeOptions(device="cpu")


def write_questions(path, *questions):
    path.write_text("".join(json.dumps({"turns": turns}) + "\n" for turns in questions))
    return path


@pytest.fixture
def questions(tmp_path):
    return write_questions(tmp_path / "q.jsonl", ["one", "and then?"], ["two"], ["three"])


def measure(folder, questions, **options):
    options = {"precisions": ("fp32",), "rows": ("hf", "plain"), **options}
    options = BenchOptions(model=str(folder), data=questions, max_new_tokens=12, compile=False,
                           **options)  # fmt: skip
    rows = run(options, CPU, open_checkpoint(folder), load_tokenizer(folder),
               read_questions(options.data, options.limit))  # fmt: skip
    return build_report(rows, options, CPU, save_outputs=True)


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
        assert row["mbu"] is None  # nobody told us this CPU's bandwidth
        assert row["peak_mem_gb"] > 0.05 and row["ttft_s"] > 0 and row["precision"] == "fp32"
        assert row["tok_s_min"] <= row["tok_s_median"] <= row["tok_s_max"]
    meta = report["meta"]
    assert meta["torch"] == torch.__version__ and meta["device"] and meta["date"]
    assert meta["max_new_tokens"] == 12 and meta["model"] == str(tiny_dir)


def test_every_row_drafts_what_it_says(tiny_dir, questions, tmp_path):
    """All rows answer alike in fp32; drafted ones report acceptance and the parts of a cycle."""
    from fasteagle.checkpoint import load_model
    from fasteagle.head_file import save_head
    from fasteagle.options import DraftOptions
    from test_drafters import random_head

    checkpoint = open_checkpoint(tiny_dir)
    model = load_model(checkpoint, dtype=torch.float32, device="cpu", max_seq_len=64)
    head = random_head(model, rope_scaling=None, rope_base=10000.0)
    save_head(tmp_path / "head", head, {}, torch.float32)
    report = measure(tiny_dir, questions, rows=bench.ROW_NAMES,
                     draft=DraftOptions(head=str(tmp_path / "head")))  # fmt: skip
    rows = {row["name"]: row for row in report["rows"]}
    assert list(rows) == list(bench.ROW_NAMES)
    for name, row in rows.items():
        assert row["outputs"] == rows["plain"]["outputs"], name
        assert row["tau"] >= 1
        drafted = name not in ("hf", "hf-pld", "plain")
        assert ("accepted_by_depth" in row) == drafted
        if drafted:
            shares = row["accepted_by_depth"]
            assert shares == sorted(shares, reverse=True) and all(0 < s <= 1 for s in shares)
            # The bonus token, and a share of a pass for every depth reached (last ones cut short).
            assert row["tau"] <= 1 + sum(shares) + 1e-3
            assert row["draft_ms"] > 0 and row["verify_ms"] > 0 and row["other_ms"] > 0
            assert (row["n_alpha"] is not None) == (name == "eagle-chain")
    assert "draft + verify + other ms" in markdown(report)
    # A tree from a file is the static row's alone.
    (tmp_path / "tree.json").write_text("[[0], [1]]")
    draft = DraftOptions(head=str(tmp_path / "head"), tree_file=str(tmp_path / "tree.json"))
    report = measure(tiny_dir, questions, rows=("eagle", "eagle-static", "ngram"), draft=draft)
    for row in report["rows"]:
        assert row["outputs"] == rows["plain"]["outputs"], row["name"]
        if row["name"] == "eagle-static":
            assert len(row["accepted_by_depth"]) <= 1 and row["tau"] <= 2


def test_prompt_lookup_counts_its_first_batch_apart():
    """What comes with the first pass took no decoding time of its own."""
    from fasteagle.hf_baseline import _Clock

    clock = _Clock()
    for n in (9, 4, 2):  # the prompt, four tokens of the first pass, two of the next
        clock.put(torch.zeros(n))
    assert clock.first == 4 and len(clock.times) == 2
    row = bench.Row("hf-pld", "fp32", None, 1)
    row.turns.append(bench.Turn([0] * 6, 0.5, 0.1, 1, first=clock.first))
    assert row.tok_s == pytest.approx(20) and row.tau == 2 and row.turn_rates == [20]


def test_rows_take_turns_and_each_has_its_own_history(tiny_dir, questions, monkeypatch):
    calls = []
    for kind in (bench.HFDecoder, bench.EngineDecoder):
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


def test_precisions_run_together_or_one_by_one(tiny_dir, questions, monkeypatch):
    seen = []
    answer = bench._answer

    def spy(row, question, *rest):
        seen.append((row.name, row.precision, question.turns[0]))
        answer(row, question, *rest)

    monkeypatch.setattr(bench, "_answer", spy)
    options = {"precisions": ("bf16", "fp32"), "rows": ("plain",), "limit": 2}
    measure(tiny_dir, questions, **options)
    assert [p for _, p, _ in seen] == ["bf16", "fp32", "bf16", "fp32"]
    seen.clear()
    monkeypatch.setattr(bench, "available_bytes", lambda device: 1000)
    report = measure(tiny_dir, questions, **options)
    assert [p for _, p, _ in seen] == ["bf16", "bf16", "fp32", "fp32"]
    assert [row["precision"] for row in report["rows"]] == ["bf16", "fp32"]


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
    monkeypatch.setattr("fasteagle.bench_report._device_name", lambda d: "NVIDIA GeForce RTX 3090")
    row = Row("plain", "bf16", decoder=None, weight_bytes=int(9.36e9))
    row.turns = [Turn([1] * 51, 0.5, 1.0, 25)]  # 50 tokens in 25 passes of one second
    report = build_report([row], BenchOptions(), CPU, save_outputs=False)
    assert report["rows"][0]["mbu"] == pytest.approx(0.25)


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
        [sys.executable, SCRIPT, "--model", tiny_dir, "--data", questions, "--precision", "fp32",
         "--rows", "plain", "--limit", "2", "--max-new-tokens", "8", "--no-compile", "--md",
         "--save-outputs", "--json", out],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    record = json.loads(out.read_text())
    assert len(record["rows"][0]["outputs"]) == 3
    assert done.stdout.startswith("| row | precision | tok/s |")
    assert done.stdout.strip() == markdown(record).strip()


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import tokens_per_sec

    return lambda *args: CliRunner().invoke(tokens_per_sec.main, [str(a) for a in args])


def test_the_script_measures_shapes_without_weights(script, monkeypatch, tmp_path, questions):
    from fasteagle import registry

    small = dataclasses.replace(registry.preset("llama2-7b"), dim=64, n_layer=2, n_head=4,
                                n_kv_head=4, head_dim=16, ffn_dim=96, vocab_size=100)  # fmt: skip
    monkeypatch.setitem(registry.REGISTRY, "llama2-70b", registry.Entry(small, "none"))
    out = tmp_path / "r.json"
    result = script("--model", "llama2-70b", "--load-format", "dummy", "--data", questions,
                    "--no-compile", "--max-new-tokens", 9, "--precision", "fp32", "--json", out,
                    "--rows", "hf,plain",
                    "--save-outputs")  # fmt: skip
    assert result.exit_code == 0, result.stderr
    rows = json.loads(out.read_text())["rows"]
    assert [row["name"] for row in rows] == ["hf", "plain"]
    assert rows[0]["outputs"] == rows[1]["outputs"] and rows[1]["tokens"] == 4 * 9
    assert "llama2-70b" in result.stdout


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
