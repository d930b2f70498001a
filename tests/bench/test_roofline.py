"""Predicted times against figures worked out by hand, and the command that prints them."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner

from fasteagle.bench import measure as device_speed
from fasteagle.bench.measure import memory_bandwidth
from fasteagle.bench.roofline import (
    DEVICES,
    Roofline,
    Storage,
    device_named,
    device_reported_as,
    storage_named,
)
from fasteagle.bench.roofline_report import (
    RooflineOptions,
    planned_cases,
    predictions,
    recorded_cases,
    table_rows,
)
from fasteagle.device import device_name
from fasteagle.errors import FasteagleError
from fasteagle.loading.find_head import head_shape
from fasteagle.loading.registry import preset
from fasteagle.options import DraftOptions
from fasteagle.quant.scheme import BF16, Scheme, parse_scheme
from fasteagle.shapes import StaticShape, TreeShape
from helpers import SCRIPTS

CPU = torch.device("cpu")
LLAMA = preset("llama2-7b")
RTX3090 = DEVICES["3090"]
HEAD = head_shape("llama2-7b", LLAMA)


def model(precision, context=0, device=RTX3090, head_bits=8, **options):
    return Roofline(device, LLAMA, storage_named(precision, LLAMA, head_bits), context, **options)


@pytest.mark.parametrize(
    ("precision", "empty", "at_1k"),
    [
        ("bf16", 70.8, 68.1),
        ("int8", 141.7, 131.0),
        ("int4-g128", 266.6, 231.3),
        ("int4-g32", 226.6, 200.6),
    ],
)
def test_the_limits_of_the_design(precision, empty, at_1k):
    """LLaMA2-7B on 936 GB/s, one token a pass: design.md, section 2.

    Its int4 lines have the LM head in 4 bits too.
    """
    for context, expected in ((0, empty), (1024, at_1k)):
        time = model(precision, context, head_bits=4).verify(1)
        assert 1 / time.seconds == pytest.approx(expected, rel=0.01)
        assert time.bound == "memory"


def test_an_lm_head_in_int8_costs_two_percent_of_an_int4_pass():
    """Why `--int4` predicts 262 tok/s where the design's table has 266.6."""
    time = model("int4-g128").verify(1)
    assert 1 / time.seconds == pytest.approx(262.1, rel=0.001)


@pytest.mark.parametrize(
    ("precision", "fp32", "fp16"), [("bf16", 76, 152), ("int8", 38, 76), ("int4", 20, 40)]
)
def test_rows_at_which_the_tensor_cores_become_the_limit(precision, fp32, fp16):
    """Design.md, section 2, for a 3090: M = 20 rows at int4 with fp32 accumulation, and so on."""
    for rows, accumulate in ((fp32, False), (fp16, True)):
        roofline = model(precision, head_bits=4, fp16_accumulate=accumulate)
        assert roofline.verify(round(rows * 0.95)).bound == "memory"
        assert roofline.verify(round(rows * 1.07)).bound == "compute"


def test_a_pass_is_flat_until_compute_bounds_it_and_then_linear():
    roofline = model("int4")
    assert roofline.verify(16).seconds == roofline.verify(1).seconds
    assert roofline.verify(200).seconds == pytest.approx(2 * roofline.verify(100).seconds)
    fp32 = Roofline(RTX3090, LLAMA, storage_named("fp32", LLAMA))
    assert fp32.verify(1).seconds == pytest.approx(2 * model("bf16").verify(1).seconds)
    assert fp32.verify(64).compute == pytest.approx(model("bf16").verify(64).compute * 71 / 35.6)


def test_drafting_costs_what_the_design_says():
    """0.37 G parameters in bf16: 0.8 ms a step, 4 ms for five."""
    linears = HEAD.block.linear_params + 2 * 4096**2
    assert linears + 32000 * 4096 == pytest.approx(0.37e9, rel=0.01)
    roofline = model("bf16")
    assert roofline.draft(HEAD, TreeShape(1, 4, 4)).ms == pytest.approx(0.8, abs=0.02)
    assert roofline.draft(HEAD, TreeShape(5, 4, 15)).ms == pytest.approx(4.0, rel=0.03)
    assert roofline.draft(HEAD, StaticShape(5, None, 25)).ms == pytest.approx(4.0, rel=0.03)
    assert model("int4").draft(HEAD, TreeShape(5, 4, 15)).ms < 1.5
    # A trimmed vocabulary saves its part of the LM head in every step.
    trimmed = dataclasses.replace(HEAD, draft_vocab_size=8000)
    saved = roofline.draft(HEAD, TreeShape(2, 1, 2)).memory
    saved -= roofline.draft(trimmed, TreeShape(2, 1, 2)).memory
    assert saved * 936e9 == pytest.approx(2 * 2 * 24000 * 4096)


def test_bytes_agree_with_the_schemes():
    for name in ("llama2-7b", "smollm2-135m", "qwen3-8b"):
        config = preset(name)
        for scheme in (BF16, Scheme(8, head_bits=8), parse_scheme("int4-g32", config, 4)):
            assert Storage.of(scheme).model_bytes(config) == scheme.model_bytes(config)
    assert storage_named("int4-torchao", LLAMA) == storage_named("int4", LLAMA)
    # A file's own groups cost what anybody's do.
    assert storage_named("int4-g32-own", LLAMA) == storage_named("int4-g32-hqq", LLAMA)


def test_predicted_rows_of_a_benchmark():
    options = RooflineOptions(
        rows=("hf", "plain", "eagle", "eagle-chain", "ngram"),
        precisions=("bf16", "int4"),
        tau=2.5,
        context=1024,
    )
    cases = planned_cases(options, LLAMA, on_cpu=False)
    predicted = predictions(cases, RTX3090, "llama2-7b", LLAMA)
    found = {(p.case.precision, p.case.row.label): p for p in predicted}
    assert len(found) == 5 + 4 and ("int4", "hf") not in found
    plain, eagle = found["int4", "plain"], found["int4", "eagle"]
    assert plain.tok_s == pytest.approx(1 / plain.plain.seconds) and plain.draft is None
    assert eagle.case.rows == 9 and eagle.draft is not None
    assert eagle.tok_s == pytest.approx(2.5 / (eagle.verify.seconds + eagle.draft.seconds))
    ngram = found["int4", "ngram"]
    assert ngram.draft is None and ngram.case.rows == 8
    assert found["bf16", "hf"].tok_s == pytest.approx(68.1, rel=0.01)
    assert plain.memory_gb < eagle.memory_gb < 5 < found["bf16", "plain"].memory_gb < 15
    on_cpu = planned_cases(options, LLAMA, on_cpu=True)
    assert {str(c.tree) for c in on_cpu if c.row.kind == "eagle"} == {"3, 3, 8", "2, 3, 3"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tau": 4.5}, "tau 4.5 is out of range for eagle at bf16: its tree of depth 3"),
        ({"tau": 0.9}, "gives 1 .. 4"),
        ({"rows": ("egale",)}, "unknown row 'egale'"),
        ({"precisions": ("int3",)}, "unknown precision 'int3'"),
        ({"precisions": ("int4-g48",)}, "group size 48"),
        ({"lm_head": "int2"}, "lm-head 'int2'"),
        ({"context": -1}, "context -1"),
    ],
)
def test_predictions_that_cannot_be(options, message):
    with pytest.raises(FasteagleError, match=message):
        planned_cases(RooflineOptions(**options), LLAMA, on_cpu=False)


def test_devices_by_name():
    assert device_named("RTX 3090") is device_named("3090") is RTX3090
    assert device_named("H200").gb_s == 4800
    with pytest.raises(FasteagleError, match="'3080' is unknown: use 3090, .*h200, or 'this'"):
        device_named("3080")


@pytest.mark.parametrize(
    ("reported", "bandwidth"),
    [
        ("NVIDIA GeForce RTX 3090", 936),
        ("NVIDIA GeForce RTX 3090 Ti", 1008),
        ("NVIDIA H200", 4800),
        ("NVIDIA H100 80GB HBM3", 3350),
        ("NVIDIA GeForce RTX 4090", 1008),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA GH200 480GB", None),
        ("AMD EPYC", None),
    ],
)
def test_devices_by_what_the_driver_calls_them(reported, bandwidth):
    found = device_reported_as(reported)
    assert (found and found.gb_s) == bandwidth


def test_bandwidth_comes_from_the_data_sheet_where_there_is_one(monkeypatch):
    monkeypatch.setattr(device_speed, "copy_bandwidth", lambda device: 850.0)
    cuda = torch.device("cuda")
    known = memory_bandwidth(cuda, "NVIDIA GeForce RTX 3090")
    assert (known.gb_s, known.source, known.measured_gb_s) == (936, "data sheet of RTX 3090", 850)
    unknown = memory_bandwidth(cuda, "NVIDIA T4")
    assert (unknown.gb_s, unknown.source) == (850, "measured, copying")


def test_this_machine_is_measured():
    for speed in (device_speed.read_bandwidth(2**24), device_speed.copy_bandwidth(CPU, 2**24)):
        assert 0.1 < speed < 10_000
    made = device_speed.this_device(CPU, "a CPU")
    assert made.name == "this machine (a CPU)"
    # A busy CPU without bf16 instructions was seen at 0.0004.
    assert made.gb_s > 0.1 and made.tflops > 0 and made.tflops_fp32 > 0
    assert made.memory_gb > 0.1


@pytest.fixture
def roofline(monkeypatch):
    """Runs scripts/roofline.py in this process."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import roofline

    return lambda *args: CliRunner().invoke(roofline.main, [str(a) for a in args])


def words(result):
    """Lines of the table as lists of words."""
    assert result.exit_code == 0, result.stderr
    return [line.split() for line in result.stdout.splitlines()]


def test_the_command_prints_the_limits(roofline):
    lines = words(
        roofline(
            "--device",
            "3090",
            "--model",
            "llama2-7b",
            "--rows",
            "plain,eagle",
            "--precision",
            "bf16,int4",
            "--tau",
            3.6,
            "--tree-depth",
            5,
            "--tree-topk",
            4,
            "--tree-nodes",
            15,
        )
    )
    assert lines[0][:2] == ["row", "precision"] and len(lines) >= 6
    assert lines[1][:4] == ["plain", "bf16", "-", "1,024"] and "68.1" in lines[1]
    assert lines[4][:5] == ["eagle", "int4", "5,", "4,", "15"] and "(T=16)" in lines[4]
    assert not any("fit" in line for line in lines)
    lines = words(roofline("--device", "4090", "--model", "llama2-70b", "--rows", "plain"))
    assert "does not fit" in " ".join(lines[1]) and "of 24" in " ".join(lines[1])


def test_a_record_is_predicted_under_its_own_conditions(
    roofline, script, tiny_preset, questions, tmp_path
):
    path = tmp_path / "r.json"
    done = script(
        "--model",
        tiny_preset,
        "--load-format",
        "dummy",
        "--data",
        questions,
        "--no-compile",
        "--max-new-tokens",
        6,
        "--precision",
        "bf16,int4",
        "--limit",
        1,
        "--rows",
        "hf,plain,eagle,eagle-static,ngram",
        "--simulate-tau",
        2,
        "--json",
        path,
    )
    assert done.exit_code == 0, done.stderr
    lines = words(roofline("--measured", path, "--device", "3090"))
    assert " ".join(lines[0]).endswith("verify ms measured draft ms measured tok/s measured")
    rows = [line[:2] for line in lines[1:10]]
    assert rows[:5] == [[n, "bf16"] for n in ("hf", "plain", "eagle", "eagle-static", "ngram")]
    eagle = " ".join(lines[3])
    assert "3, 3, 8" in eagle and "(T=9)" in eagle and eagle.count(" x)") == 3
    assert eagle.endswith("*simulated*") and " 2.00 " in eagle
    assert " ".join(lines[1]).count(" x)") == 1  # transformers: nothing but tok/s
    # Measured over predicted is what it says.
    record = json.loads(path.read_text())
    assert record["meta"]["model"] == tiny_preset
    config = preset(tiny_preset)
    found = predictions(recorded_cases(record, config, "r"), RTX3090, tiny_preset, config)
    record["rows"][2] |= {"verify_ms": 3 * found[2].verify.ms, "tok_s": found[2].tok_s / 4}
    assert "(3.00 x)" in table_rows(found, RTX3090, record)[2][-3]
    assert "(0.25 x) *simulated*" in table_rows(found, RTX3090, record)[2][-1]
    assert found[5].case.rows == record["rows"][5]["plain_rows"] and found[5].case.row.is_plain
    for change, message in (
        ("context", "lacks 'context': it is of another version"),
        ("tree", "lacks 'tree'"),
    ):
        broken = json.loads(path.read_text())
        del broken["rows"][0][change]
        path.with_name("b.json").write_text(json.dumps(broken))
        result = roofline("--measured", path.with_name("b.json"), "--device", "3090")
        assert result.exit_code == 2 and message in result.stderr


def test_a_record_of_another_machine_is_not_this_one(roofline, tmp_path):
    row = {
        "name": "plain",
        "precision": "bf16",
        "tree": None,
        "dtype": "bf16",
        "scheme": None,
        "plain_rows": 1,
        "context": 9,
        "tau": 1.0,
        "tok_s": 5.0,
    }
    path = tmp_path / "r.json"
    meta = {"model": "llama2-7b", "device": "Z80", "threads": 1}
    path.write_text(json.dumps({"meta": meta, "rows": [row]}))
    result = roofline("--measured", path)
    assert result.exit_code == 2 and "the record is of Z80, this machine is" in result.stderr
    path.write_text(json.dumps({"meta": meta | {"device": device_name(CPU)}, "rows": [row]}))
    assert words(roofline("--measured", path))[1][:2] == ["plain", "bf16"]
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "3080"], "device '3080' is unknown"),
        (["--tau", "9", "--device", "3090"], "tau 9 is out of range for eagle"),
        (["--measured", "/nowhere.json"], "/nowhere.json: file is missing"),
        (["--measured", "x.json", "--tau", "2"], "brings its own conditions: drop --tau"),
        (["--model", "lama2-7b", "--device", "3090"], "did you mean 'llama2-7b'"),
        (["--precision", "int3", "--device", "3090"], "unknown precision 'int3'"),
    ],
)
def test_bad_input_to_the_command(roofline, arguments, message):
    result = roofline(*arguments)
    assert result.exit_code == 2 and message in result.stderr and result.stdout == ""
    assert result.stderr.count("\n") == 1


def test_files_that_are_no_records(roofline, tmp_path):
    path = tmp_path / "r.json"
    for text in ('{"rows": []}', '{"meta": {}, "rows": []}', '{"meta": 3, "rows": [1]}'):
        path.write_text(text)
        result = roofline("--measured", path)
        assert result.exit_code == 2 and "not a record of tokens_per_sec.py" in result.stderr


def test_predicting_needs_no_torch():
    code = "import sys; import fasteagle.bench.roofline; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr


def test_trees_of_a_file_are_predicted(tmp_path):
    (tmp_path / "tree.json").write_text("[[0], [1], [0, 0]]")
    options = RooflineOptions(
        rows=("eagle-static",),
        precisions=("bf16",),
        draft=DraftOptions(tree_file=str(tmp_path / "tree.json")),
    )
    assert planned_cases(options, LLAMA, on_cpu=False)[0].tree == StaticShape(2, None, 3)
