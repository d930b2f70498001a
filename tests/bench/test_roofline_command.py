"""The command that prints predicted times."""

from __future__ import annotations

import dataclasses
import functools
import json
import re

import pytest
import torch

from fasteagle.bench.roofline import DEVICES
from fasteagle.device import device_name
from fasteagle.loading.registry import preset
from helpers import SCRIPTS, invoke

CPU = torch.device("cpu")
LLAMA = preset("llama2-7b")
RTX3090 = DEVICES["3090"]


@pytest.fixture
def roofline(monkeypatch):
    """Runs scripts/roofline.py in this process, on a machine of known speed."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import roofline

    def measured(device, name):
        return dataclasses.replace(RTX3090, name=f"this machine ({name})")

    monkeypatch.setattr(roofline, "this_device", measured)
    return functools.partial(invoke, main=roofline.main)


def cells(result):
    """Rows of the printed table by name and precision, each by its headings."""
    assert result.exit_code == 0, result.stderr
    headings, *lines = [re.split(r"  +", line.strip()) for line in result.stdout.splitlines()]
    rows = [dict(zip(headings, line, strict=False)) for line in lines[:-1]]
    return {(row["row"], row["precision"]): row for row in rows}


SEVEN_B = ("--device", "RTX 3090", "--model", "llama2-7b", "--tau", 3.6)


def test_the_command_prints_the_limits(roofline):
    rows = "--rows", "hf,plain,eagle,eagle-chain,ngram", "--precision", "bf16,int4"
    trees = "--tree-depth", 5, "--tree-topk", 4, "--tree-nodes", 15
    table = cells(roofline(*SEVEN_B, *rows, *trees))
    assert len(table) == 5 + 4 and ("hf", "int4") not in table
    assert table["hf", "bf16"]["tok/s"] == table["plain", "bf16"]["tok/s"] == "68.1"
    plain, eagle = table["plain", "int4"], table["eagle", "int4"]
    assert (plain["tree"], plain["draft ms"], plain["context"]) == ("-", "-", "1,024")
    assert eagle["tree"] == "5, 4, 15" and eagle["verify ms"].endswith("(T=16)")
    ms = float(eagle["verify ms"].split()[0]) + float(eagle["draft ms"])
    assert float(eagle["tok/s"]) == pytest.approx(3.6e3 / ms, rel=0.01)
    assert table["ngram", "int4"]["draft ms"] == "-" and plain["bound"] == "memory"
    # 2 FLOPs a weight and row, and those of attention.
    flops = 2 * (LLAMA.linear_params + 32000 * 4096) + 4 * 32 * 4096 * 1024
    assert float(plain["GFLOP"]) == pytest.approx(flops / 1e9, abs=0.5)


def test_the_terms_add_up_to_the_speed_that_the_readme_names(roofline):
    done = roofline(*SEVEN_B, "--fp16-accumulate", "--terms")
    assert done.exit_code == 0, done.stderr
    _, terms, predicted = done.stdout.strip().split("\n\n")
    *parts, total = [line.split("|")[1:-1] for line in terms.splitlines()[2:]]
    assert total[0].strip() == "cycle, tree 5, 4, 15"
    assert sum(int(row[1]) for row in parts) == int(total[1])
    assert int(total[1]) == 348, "as docs/how-it-works.md says"
    for column in (3, 4, 5):
        times = [float(row[column]) for row in parts]
        assert sum(times) == pytest.approx(float(total[column]), abs=0.05)
    assert predicted.startswith("predicted: 443 tok/s at tau 3.6 (400 to 479), plain 169 tok/s (")


def test_the_table_has_every_size_on_every_card_with_the_memory(roofline):
    done = roofline("--tau", 3.6, "--fp16-accumulate", "--table")
    assert done.exit_code == 0, done.stderr
    rows = [[c.strip() for c in line.split("|")[1:-1]] for line in done.stdout.splitlines()[2:]]
    table = {(model, card): cells for model, card, *cells in rows}
    assert len(table) == 16
    without = {place for place, cells in table.items() if cells[0] == "does not fit"}
    assert without == {("llama2-70b", "RTX 3090"), ("llama2-70b", "RTX 4090")}
    mid, low, high = map(int, re.findall(r"\d+", table["llama2-7b", "RTX 3090"][1]))
    assert low < mid < high


def test_batches_with_what_fits_the_card(roofline):
    batch = "--batch", "1,8,9,16", "--context", 2048, "--precision", "fp16,int4"
    done = roofline(*SEVEN_B, *batch)
    assert done.exit_code == 0, done.stderr
    fp16, fp16_fits, int4, int4_fits = done.stdout.strip().split("\n\n")
    assert fp16_fits.startswith("predicted, total tok/s: fp16 on RTX 3090, tree 5, 4, 15 and tau")
    assert fp16_fits.endswith("hold 8 sequences of 2,048 positions, 8 with a draft head")
    assert int4_fits.endswith("hold 16 sequences of 2,048 positions, 15 with a draft head")
    one, eight, nine, _ = [[c.strip() for c in x.split("|")[1:-1]] for x in fp16.splitlines()[2:]]
    assert eight[:2] == ["8", "128"] and nine[2:] == ["does not fit", *["does not fit", "-"] * 2]
    assert one[3:5] == one[5:], "one sequence has nobody to wait for"
    plain, low, high = map(int, re.findall(r"\d+", eight[2]))
    together, in_turn = (int(re.match(r"\d+", cell)[0]) for cell in (eight[3], eight[5]))
    assert low < plain < high and in_turn < together
    assert float(eight[4]) == pytest.approx(together / plain, abs=0.01)
    sixteen = int4.splitlines()[-1]
    assert re.fullmatch(r"\| 16 \| 256 \| \d+ \(.*\) \| does not fit \| - .*", sixteen)


def row(name, **values):
    usual = {"precision": "int4", "tree": None, "dtype": "bf16", "scheme": "int4-g128-hqq"}
    usual |= {"lm_head_bits": 8, "context": 99.6, "tau": 1.0, "tok_s": 5.0}
    return {"name": name, **usual, **values}


def record(path, *rows, **meta):
    path.write_text(json.dumps({"meta": {"model": "llama2-7b", **meta}, "rows": rows}))
    return "--measured", path


def test_a_record_is_predicted_under_its_own_conditions(roofline, tmp_path):
    tree = {"depth": 3, "topk": 3, "nodes": 8}
    rows = [
        row("hf", precision="bf16", scheme=None, lm_head_bits=None),
        row("plain", verify_ms=9.0, draft_ms=0.0),
        row("eagle", tree=tree, tau=2.0, tok_s=200.0, simulated=True, verify_ms=9.0, draft_ms=1.0),
    ]
    path = tmp_path / "r.json"
    hf, plain, eagle = cells(roofline(*record(path, *rows), "--device", "3090")).values()
    assert hf["verify ms measured"] == "-" and hf["tok/s measured"].startswith("5.00 (")
    assert plain["verify ms"].endswith("(T=1)") and plain["draft ms measured"] == "-"
    assert eagle["verify ms"].endswith("(T=9)") and eagle["context"] == "100"
    assert eagle["tok/s measured"].endswith("*simulated*") and eagle["tau"] == "2.00"
    times = 9.0 / float(eagle["verify ms"].split()[0])
    shown = re.fullmatch(r"9.00 \((.*) x\)", eagle["verify ms measured"])
    assert shown and float(shown[1]) == pytest.approx(times, abs=0.02)
    del rows[1]["context"]
    result = roofline(*record(path, *rows), "--device", "3090")
    assert result.exit_code == 2 and "lacks 'context': it is of another version" in result.stderr


def test_a_record_of_the_benchmark_has_what_is_read(
    roofline, script, tiny_preset, questions, tmp_path
):
    path = tmp_path / "r.json"
    words = "--rows plain,eagle-static --precision bf16 --load-format dummy --no-compile --limit 1"
    words = [*words.split(), "--max-new-tokens", 6, "--data", questions, "--json", path]
    done = script("--model", tiny_preset, *words)
    assert done.exit_code == 0, done.stderr
    table = cells(roofline("--measured", path, "--device", "3090"))
    assert [name for name, _ in table] == ["plain", "eagle-static"]
    assert all(" x)" in row["tok/s measured"] for row in table.values())


def test_a_record_of_another_machine_is_not_this_one(roofline, tmp_path):
    path = tmp_path / "r.json"
    result = roofline(*record(path, row("plain"), device="Z80", threads=1))
    assert result.exit_code == 2 and "the record is of Z80, this machine is" in result.stderr
    here = record(path, row("plain"), device=device_name(CPU), threads=1)
    assert list(cells(roofline(*here))) == [("plain", "int4")]
    assert torch.get_num_threads() == 1
    result = roofline(*record(path))
    assert result.exit_code == 2 and "not a record of tokens_per_sec.py" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "3080"], "device '3080' is unknown: use 3090, 3090ti, 4090, h100, h200, or"),
        (["--tau", "9", "--device", "3090"], "tau 9 is out of range for eagle"),
        (["--measured", "/nowhere.json"], "/nowhere.json: file is missing"),
        (["--measured", "x.json", "--tau", "2"], "brings its own conditions: drop --tau"),
        (["--terms", "--rows", "plain", "--device", "3090"], "drop --measured, --rows"),
        (["--terms"], "device 'this' is unknown"),
        (["--terms", "--precision", "bf16", "--device", "3090"], "quantized weights are predicted"),
        (["--table", "--device", "3090"], "--table has its own models and cards"),
        (["--terms", "--table"], "give one of --terms, --table, --batch"),
        (["--terms", "--tau", "7", "--device", "3090"], "tau 7 is out of range for eagle"),
        (["--batch", "1,0", "--device", "3090"], "batch 0 is out of range: use 1 or more"),
        (["--batch", "2"], "device 'this' is unknown"),
        (["--batch", "2", "--rows", "plain", "--device", "3090"], "drop --measured, --rows"),
        (["--batch", "2", "--precision", "int4,fp32", "--device", "3090"], "below: drop fp32"),
    ],
)
def test_bad_input_to_the_command(roofline, arguments, message):
    result = roofline(*arguments)
    assert result.exit_code == 2 and message in result.stderr and result.stdout == ""
    assert result.stderr.count("\n") == 1
