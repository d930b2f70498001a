"""Predicted times against figures worked out by hand, and the command that prints them."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner

from fasteagle.bench import measure as device_speed
from fasteagle.bench.measure import memory_bandwidth
from fasteagle.bench.roofline import (
    DEVICES,
    Storage,
    device_named,
    device_reported_as,
    draft_parts,
    limit,
    storage_named,
    target_parts,
)
from fasteagle.device import device_name
from fasteagle.errors import FasteagleError
from fasteagle.loading.heads.find import head_shape
from fasteagle.loading.registry import preset
from fasteagle.quant.scheme import Scheme, parse_scheme
from fasteagle.shapes import StaticShape, TreeShape
from helpers import SCRIPTS

CPU = torch.device("cpu")
LLAMA = preset("llama2-7b")
RTX3090 = DEVICES["3090"]
HEAD = head_shape("llama2-7b", LLAMA)


def verify(precision, rows, context=0, head_bits=8, **options):
    """Milliseconds of a target pass on a 3090, and what bounds it."""
    storage = storage_named(precision, LLAMA, head_bits)
    parts = target_parts(LLAMA, storage, rows, context)
    return limit(parts, RTX3090, storage.element_bytes, **options)


def draft_ms(precision, tree, head=HEAD):
    return limit(draft_parts(head, storage_named(precision, LLAMA), tree, 0), RTX3090)[0]


@pytest.mark.parametrize(
    ("precision", "empty", "at_1k"),
    [
        ("bf16", 70.8, 68.1),
        ("int8", 141.7, 131.0),
        ("int4-g128", 266.6, 231.3),
        ("int4-g32", 226.6, 200.6),
    ],
)
def test_the_limits_of_7b_on_a_3090(precision, empty, at_1k):
    """LLaMA2-7B on 936 GB/s, one token a pass; the LM head in 4 bits too."""
    for context, expected in ((0, empty), (1024, at_1k)):
        ms, bound = verify(precision, 1, context, head_bits=4)
        assert 1e3 / ms == pytest.approx(expected, rel=0.01) and bound == "memory"
    # An LM head in int8 costs two percent of an int4 pass.
    assert 1e3 / verify("int4-g128", 1)[0] == pytest.approx(262.1, rel=0.001)


@pytest.mark.parametrize(
    ("precision", "fp32", "fp16"), [("bf16", 76, 152), ("int8", 38, 76), ("int4", 20, 40)]
)
def test_rows_at_which_the_tensor_cores_become_the_limit(precision, fp32, fp16):
    for rows, accumulate in ((fp32, False), (fp16, True)):
        below, above = round(rows * 0.95), round(rows * 1.07)
        assert verify(precision, below, head_bits=4, fp16=accumulate)[1] == "memory"
        assert verify(precision, above, head_bits=4, fp16=accumulate)[1] == "compute"


def test_a_pass_is_flat_until_compute_bounds_it_and_then_linear():
    assert verify("int4", 16) == verify("int4", 1)
    assert verify("int4", 200)[0] == pytest.approx(2 * verify("int4", 100)[0])
    assert verify("fp32", 1)[0] == pytest.approx(2 * verify("bf16", 1)[0])
    assert verify("fp32", 640)[0] == pytest.approx(verify("bf16", 640)[0] * 71 / 35.6)


def test_drafting_is_a_pass_of_the_head_for_each_level():
    """0.37 G parameters in bf16: 0.8 ms a step, 4 ms for five."""
    linears = HEAD.block.linear_params + 2 * 4096**2
    assert linears + 32000 * 4096 == pytest.approx(0.37e9, rel=0.01)
    assert draft_ms("bf16", TreeShape(1, 4, 4)) == pytest.approx(0.8, abs=0.02)
    assert draft_ms("bf16", TreeShape(5, 4, 15)) == pytest.approx(4.0, rel=0.03)
    assert draft_ms("bf16", StaticShape(5, None, 25)) == pytest.approx(4.0, rel=0.03)
    assert draft_ms("int4", TreeShape(5, 4, 15)) < 1.5
    # A trimmed vocabulary saves its part of the LM head in every step.
    trimmed = dataclasses.replace(HEAD, draft_vocab_size=8000)
    saved = draft_ms("bf16", TreeShape(2, 1, 2)) - draft_ms("bf16", TreeShape(2, 1, 2), trimmed)
    assert saved * 936e6 == pytest.approx(2 * 2 * 24000 * 4096)


@pytest.mark.parametrize("name", ["llama2-7b", "llama3-8b", "qwen3-8b"])
def test_bytes_of_the_parts_are_those_of_the_model(name):
    config = preset(name)
    head = head_shape(name, config)
    for scheme in (Scheme(8, head_bits=8), parse_scheme("int4-g32", config, 4)):
        storage = Storage.of(scheme)
        parts = target_parts(config, storage, 4, 100)
        read = sum(part.n_bytes for part in parts)
        assert read == pytest.approx(storage.pass_bytes(config) + config.kv_bytes(100))
        one = draft_parts(head, storage, TreeShape(1, 2, 2), 0)
        linears = [part for part in one if part.N and part.name == "draft head"]
        assert sum(p.N * p.K for p in linears) == head.linear_params
    assert storage_named("int4-torchao", LLAMA) == storage_named("int4", LLAMA)
    # A file's own groups cost what anybody's do.
    assert storage_named("int4-g32-own", LLAMA) == storage_named("int4-g32-hqq", LLAMA)


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


@pytest.fixture
def script_module(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import roofline

    return roofline


@pytest.fixture
def roofline(script_module):
    """Runs scripts/roofline.py in this process."""
    return lambda *args: CliRunner().invoke(script_module.main, [str(a) for a in args])


def cells(result):
    """Rows of the printed table by name and precision, each by its headings."""
    assert result.exit_code == 0, result.stderr
    headings, *lines = [re.split(r"  +", line.strip()) for line in result.stdout.splitlines()]
    rows = [dict(zip(headings, line, strict=False)) for line in lines[:-1]]
    return {(row["row"], row["precision"]): row for row in rows}


SEVEN_B = ("--device", "3090", "--model", "llama2-7b")


def test_the_command_prints_the_limits(roofline):
    rows = "hf,plain,eagle,eagle-chain,ngram"
    trees = "--tree-depth", 5, "--tree-topk", 4, "--tree-nodes", 15
    found = cells(
        roofline(*SEVEN_B, "--rows", rows, "--precision", "bf16,int4", "--tau", 3.6, *trees)
    )
    assert len(found) == 5 + 4 and ("hf", "int4") not in found
    assert found["hf", "bf16"]["tok/s"] == found["plain", "bf16"]["tok/s"] == "68.1"
    plain, eagle = found["plain", "int4"], found["eagle", "int4"]
    assert (plain["tree"], plain["draft ms"], plain["context"]) == ("-", "-", "1,024")
    assert eagle["tree"] == "5, 4, 15" and eagle["verify ms"].endswith("(T=16)")
    ms = float(eagle["verify ms"].split()[0]) + float(eagle["draft ms"])
    assert float(eagle["tok/s"]) == pytest.approx(3.6e3 / ms, rel=0.01)
    assert int(eagle["launches"]) > int(plain["launches"]) > 32 * 6
    assert found["ngram", "int4"]["draft ms"] == "-" and plain["bound"] == "memory"
    # 2 FLOPs a weight and row, and those of attention.
    flops = 2 * (LLAMA.linear_params + 32000 * 4096) + 4 * 32 * 4096 * 1024
    assert float(plain["GFLOP"]) == pytest.approx(flops / 1e9, abs=0.5)


def test_a_record_is_predicted_under_its_own_conditions(roofline, script_module, tmp_path):
    def row(name, **values):
        usual = {"precision": "int4", "tree": None, "dtype": "bf16", "scheme": "int4-g128-hqq"}
        usual |= {"lm_head_bits": 8, "plain_rows": None, "context": 99.6, "tau": 1.0, "tok_s": 5.0}
        return {"name": name, **usual, **values}

    tree = {"depth": 3, "topk": 3, "nodes": 8}
    timed = {"verify_ms": 9.0, "draft_ms": 1.0}
    rows = [
        row("hf", precision="bf16", scheme=None, lm_head_bits=None),
        row("plain", plain_rows=2, verify_ms=9.0, draft_ms=0.0),
        row("eagle", tree=tree, tau=2.0, tok_s=200.0, simulated=True, **timed),
    ]
    path = tmp_path / "r.json"
    path.write_text(json.dumps({"meta": {"model": "llama2-7b"}, "rows": rows}))
    found = cells(roofline("--measured", path, "--device", "3090"))
    hf, plain, eagle = found.values()
    assert hf["verify ms measured"] == "-" and hf["tok/s measured"].startswith("5.00 (")
    assert plain["verify ms"].endswith("(T=2)") and plain["draft ms measured"] == "-"
    assert eagle["verify ms"].endswith("(T=9)") and eagle["context"] == "100"
    assert eagle["tok/s measured"].endswith("*simulated*") and eagle["tau"] == "2.00"
    times = 9.0 / float(eagle["verify ms"].split()[0])
    shown = re.fullmatch(r"9.00 \((.*) x\)", eagle["verify ms measured"])
    assert shown and float(shown[1]) == pytest.approx(times, abs=0.02)
    del rows[1]["context"]
    path.write_text(json.dumps({"meta": {"model": "llama2-7b"}, "rows": rows}))
    result = roofline("--measured", path, "--device", "3090")
    assert result.exit_code == 2 and "lacks 'context': it is of another version" in result.stderr


def test_a_record_of_the_benchmark_has_what_is_read(
    roofline, script, tiny_preset, questions, tmp_path
):
    path = tmp_path / "r.json"
    rows = "--rows", "plain,eagle-static", "--precision", "bf16"
    words = ("--load-format", "dummy", "--no-compile", "--max-new-tokens", 6, "--limit", 1)
    done = script("--model", tiny_preset, *words, "--data", questions, *rows, "--json", path)
    assert done.exit_code == 0, done.stderr
    found = cells(roofline("--measured", path, "--device", "3090"))
    assert [name for name, _ in found] == ["plain", "eagle-static"]
    assert all(" x)" in row["tok/s measured"] for row in found.values())


def test_a_record_of_another_machine_is_not_this_one(roofline, tmp_path):
    row = {
        "name": "plain",
        "precision": "bf16",
        "tree": None,
        "dtype": "bf16",
        "scheme": None,
        "lm_head_bits": None,
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
    assert list(cells(roofline("--measured", path))) == [("plain", "bf16")]
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
        (["--rows", "egale", "--device", "3090"], "unknown row 'egale'"),
        (["--precision", "int4-g48", "--device", "3090"], "group size 48"),
        (["--terms", "--rows", "plain", "--device", "3090"], "drop --measured, --rows"),
        (["--terms"], "for 3090, 3090ti, 4090, h100, h200, not 'this'"),
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
