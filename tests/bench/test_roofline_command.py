"""The command that prints predicted times."""

from __future__ import annotations

import re

import pytest

import roofline
from fasteagle.loading.registry import preset
from helpers import invoke

LLAMA = preset("llama2-7b")


def run(*arguments):
    return invoke(*arguments, main=roofline.main)


def limits(result):
    """Rows of the printed limits by name and precision, each by its headings."""
    assert result.exit_code == 0, result.stderr
    headings, *lines = [re.split(r"  +", line.strip()) for line in result.stdout.splitlines()]
    rows = [dict(zip(headings, line, strict=False)) for line in lines[:-2]]
    return {(row["row"], row["precision"]): row for row in rows}


def speeds(result):
    """Cells of the printed table by model, card, precision and batch."""
    assert result.exit_code == 0, result.stderr
    table, _ = result.stdout.split("\n\n")
    rows = [[c.strip() for c in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    return {tuple(row[:4]): row[4:] for row in rows}


def numbers(cell):
    """Mid, low and high of a predicted speed."""
    return [int(n) for n in re.fullmatch(r"(\d+) \((\d+) to (\d+)\)", cell).groups()]


SEVEN_B = ("--device", "RTX 3090", "--model", "llama2-7b", "--tau", 3.6)


def test_the_command_prints_the_limits():
    rows = "--rows", "hf,plain,eagle,eagle-chain,ngram", "--precision", "bf16,int4"
    table = limits(run(*SEVEN_B, *rows))
    assert len(table) == 5 + 4 and ("hf", "int4") not in table
    assert table["hf", "bf16"]["tok/s"] == table["plain", "bf16"]["tok/s"] == "68.1"
    plain, eagle = table["plain", "int4"], table["eagle", "int4"]
    assert (plain["tree"], plain["draft ms"], plain["context"]) == ("-", "-", "1,024")
    assert eagle["tree"] == "5, 4, 15" and eagle["verify ms"].endswith("(T=16)")
    ms = float(eagle["verify ms"].split()[0]) + float(eagle["draft ms"])
    assert float(eagle["tok/s"]) == pytest.approx(3.6e3 / ms, rel=0.01)
    assert eagle["launches"] == "348", "as --terms says"
    assert table["ngram", "int4"]["draft ms"] == "-" and plain["bound"] == "memory"
    # 2 FLOPs a weight and row, and those of attention.
    flops = 2 * (LLAMA.linear_params + 32000 * 4096) + 4 * 32 * 4096 * 1024
    assert float(plain["GFLOP"]) == pytest.approx(flops / 1e9, abs=0.5)


def test_a_precision_is_named_as_everywhere():
    names = "int4", "int4-aten", "int4-lm4", "int4-fp32"
    table = limits(run(*SEVEN_B, "--rows", "plain", "--precision", ",".join(names)))
    sizes = (table["plain", name]["MB"] for name in names)
    whole, same, small, wide = (float(size.replace(",", "")) for size in sizes)
    head = 32000 * 4096 / 1e6  # a byte for each weight; half of one and 4 for 128 weights
    assert whole == same and whole - small == pytest.approx(head * (0.5 - 4 / 128), abs=1)
    assert wide - whole == pytest.approx(LLAMA.kv_bytes(1024, 2) / 1e6, abs=1)


def test_the_terms_add_up_to_the_speed_that_the_readme_names():
    done = run(*SEVEN_B, "--fp16-accumulate", "--terms")
    assert done.exit_code == 0, done.stderr
    _, terms, predicted = done.stdout.strip().split("\n\n")
    assert predicted.startswith("llama2-7b, RTX 3090, int4, predicted: ")
    *parts, total = [line.split("|")[1:-1] for line in terms.splitlines()[2:]]
    assert total[0].strip() == "cycle, tree 5, 4, 15"
    assert sum(int(row[1]) for row in parts) == int(total[1])
    assert int(total[1]) == 348, "as docs/how-it-works.md says"
    for column in (3, 4, 5):
        times = [float(row[column]) for row in parts]
        assert sum(times) == pytest.approx(float(total[column]), abs=0.05)
    assert "443 (400 to 479) tok/s at tau 3.6, plain 169 (152 to 182) tok/s, 1,024" in predicted


def test_every_model_on_every_card_with_the_memory():
    models, cards = "llama2-7b,vicuna-33b,llama2-70b", "3090,4090,h100,h200"
    done = run("--tau", 3.6, "--fp16-accumulate", "--model", models, "--device", cards)
    table = speeds(done)
    assert len(table) == 12
    without = {place[:2] for place, cells in table.items() if cells[0] == "does not fit"}
    assert without == {("llama2-70b", "RTX 3090"), ("llama2-70b", "RTX 4090")}
    plain, drafted, times, ms, ratio = table["llama2-7b", "RTX 3090", "int4", "1"]
    assert (plain, drafted) == ("169 (152 to 182)", "443 (400 to 479)"), "as the README says"
    assert (times, ms, ratio) == ("2.63", "8.13", "1.05"), "as docs/measuring.md says"


def test_batches_with_what_fits_the_card():
    batch = "--batch", "1,8,9,15,16", "--context", 2048, "--precision", "fp16,int4"
    table = speeds(run(*SEVEN_B, *batch))
    rows = {place[2:]: cells for place, cells in table.items()}
    assert len(rows) == 10
    plain, low, high = numbers(rows["fp16", "8"][0])
    together, _, _ = numbers(rows["fp16", "8"][1])
    assert low < plain < high
    assert float(rows["fp16", "8"][2]) == pytest.approx(together / plain, abs=0.01)
    missing = ["does not fit", "-", "-", "-"]
    assert rows["fp16", "9"] == ["does not fit", *missing], "docs/measuring.md says 8"
    assert rows["int4", "15"][1] != "does not fit" and rows["int4", "16"][1:] == missing
    assert numbers(rows["int4", "16"][0]), "docs/measuring.md says 16, 15 with a draft head"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "3080"], "device '3080' is unknown: use 3090, 3090ti, 4090, h100, h200"),
        (["--tau", "9"], "tau 9 is out of range for eagle"),
        (["--tau", "9", "--rows", "plain,eagle"], "tau 9 is out of range for eagle"),
        (["--terms", "--rows", "plain"], "give one of --terms, --rows"),
        (["--terms", "--precision", "bf16"], "terms are those of quantized weights"),
        (["--terms", "--tau", "7"], "tau 7 is out of range for eagle"),
        (["--batch", "1,0"], "'--batch': 0 is out of range: use >= 1"),
        (["--precision", "int4,fp32"], "fp32: cycles are predicted in 16 bits and below: use"),
        (["--precision", "int4-lm4"], "int4-lm4: cycles are predicted with an int8 LM head: leave"),
        (["--precision", "int3"], "quantization 'int3': 3 bits have no kernel"),
        (["--model", ""], "'--model': '' is empty: give one, or several as A,B"),
        (["--precision", ","], "'--precision': ',' is empty: give one, or several as A,B"),
        (["--rows", ""], "'--rows': '' is empty: give one, or several as A,B"),
        (["--model", "lama"], "unknown preset 'lama'"),
    ],
)
def test_bad_input_to_the_command(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2 and message in result.stderr and result.stdout == ""
    assert result.stderr.count("\n") == 1
