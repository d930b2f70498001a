"""Predicted terms of a cycle against figures worked out by hand."""

from __future__ import annotations

import dataclasses
import re

import pytest
from click.testing import CliRunner

from fasteagle.bench.cycle_terms import CARDS, CycleModel, card_named
from fasteagle.bench.roofline import DEVICES
from fasteagle.errors import FasteagleError
from fasteagle.loading.find_head import head_shape
from fasteagle.loading.registry import preset
from fasteagle.quant.planes import layout_for
from fasteagle.quant.scheme import parse_scheme
from fasteagle.quant.tiling import Card, Tiling, microseconds
from fasteagle.shapes import TreeShape
from helpers import SCRIPTS

LLAMA = preset("llama2-7b")
HEAD = head_shape("llama2-7b", LLAMA)
INT4 = parse_scheme("int4-g128", LLAMA)
TREE = TreeShape(5, 4, 15)
G128 = layout_for(4, 128, 4096)
TILE_BYTES = 128 * 128 * 0.53125
MODEL = CycleModel(CARDS["3090"], LLAMA, INT4)


def test_waves_of_programs_by_hand():
    """164 slots: 164 columns are one wave, 165 two; the second wave waits for latency alone."""
    card = Card(82, 936.0, reach=1.0, latency_us=0.0, launch_us=0.0, cache_gb_s=1e9)
    cut = Tiling(16, 1, 1, 3, 2)

    def us(columns: int, card: Card = card) -> float:
        return microseconds(cut, G128, 128 * columns, 4096, 16, card, fp16=True)

    assert us(164) == pytest.approx(32 * 164 * TILE_BYTES / 936e3, rel=1e-4)
    arithmetic = 128 * 128 * 2.6 / 128 / 1695  # of one program: its instructions, not its products
    assert us(165) - us(164) == pytest.approx(32 * max(arithmetic, 16 * 128 * 128 / 512 / 1695))
    slow = dataclasses.replace(card, latency_us=3.0)
    assert us(165, slow) - us(164, slow) == pytest.approx(32 * 3.0 / 2 + 0, rel=1e-4)
    assert us(1, dataclasses.replace(card, launch_us=1.5)) == pytest.approx(us(1) + 1.5)


def test_parts_cost_the_cache():
    card = CARDS["3090"]
    one, two = (
        microseconds(Tiling(16, 1, split, 3, 3), G128, 12288, 4096, 16, card, fp16=True)
        for split in (1, 2)
    )
    assert two - one == pytest.approx(3 * 4 * 16 * 12288 / (1e3 * card.cache_gb_s), abs=0.6)


def test_sums_in_fp32_are_bound_by_the_tensor_cores_from_17_rows_on():
    slow = dataclasses.replace(MODEL, fp16=False)
    for T, ratio in ((1, 1.1), (16, 1.1), (32, 1.3)):
        fast = sum(p.us for p in MODEL.block(LLAMA, T))
        found = sum(p.us for p in slow.block(LLAMA, T)) / fast
        assert found > ratio if T == 32 else found < ratio


def test_products_of_7b_reach_85_percent_but_for_the_smallest():
    """8.9 MB are read in 10 us, of which launch and latency take two."""
    for T in (1, 8, 16):
        products = [*MODEL.block(LLAMA, T), MODEL.lm_head(32000, T)]
        share = {product.name: product.share for product in products}
        assert share.pop("out") > 0.7
        assert all(found > 0.82 for found in share.values()), share
        assert sum(share.values()) / len(share) > 0.86


def test_a_cycle_of_7b_on_a_3090():
    terms = MODEL.cycle(HEAD, TREE)
    assert sum(term.nodes for term in terms) == 348  # as tests/compile/test_cycle_nodes.py counts
    total = sum(term.ms for term in terms)
    assert total <= 7.5 and 3.6 / total * 1e3 >= 450
    trimmed = dataclasses.replace(HEAD, draft_vocab_size=8000)
    assert sum(term.ms for term in MODEL.cycle(trimmed, TREE)) < total - 0.5
    longer = dataclasses.replace(MODEL, context=4096)
    more = 32 * 3072 * 2 * 2 * 4096 / (936e6 * 0.93)  # keys and values in 16 bits, read once
    assert sum(t.ms for t in longer.verify(16)) - sum(t.ms for t in MODEL.verify(16)) > more


@pytest.mark.parametrize(("name", "gb_s"), [("h100", 3350), ("h200", 4800)])
def test_cards_that_may_be_lent(name, gb_s):
    """What the kernels take them for, with their own bandwidth; sums in fp32 cost no more there."""
    card = card_named(name)
    assert (card.gb_s, DEVICES[name].gb_s) == (gb_s, gb_s)
    assert card == dataclasses.replace(Card.of(132, (9, 0)), gb_s=gb_s)
    fp16, fp32 = (CycleModel(card, LLAMA, INT4, fp16=fp16) for fp16 in (True, False))
    assert fp16.cycle(HEAD, TREE) == fp32.cycle(HEAD, TREE)


def test_faster_memory_makes_a_pass_of_one_row_faster():
    plain = {n: sum(t.ms for t in CycleModel(c, LLAMA, INT4).verify(1)) for n, c in CARDS.items()}
    assert plain["h200"] < plain["h100"] < plain["4090"] < plain["3090"]


@pytest.fixture
def roofline(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import roofline

    return roofline


def section(title: str) -> str:
    """Of docs/measuring.md, without its headline."""
    text = (SCRIPTS.parent / "docs" / "measuring.md").read_text("utf-8")
    return text.split(f"\n## {title}\n")[1].split("\n## ")[0]


def table_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("|")]


def test_the_tables_in_the_docs_are_those_of_the_command(roofline):
    """Row by row, by the command that stands above them."""
    text = section("Predicted cycle, term by term")
    command = re.search(r"^python scripts/roofline\.py (.*)$", text, re.MULTILINE)
    assert command is not None
    asked = "--device 3090 --model llama2-7b --tau 3.6 --fp16-accumulate --terms"
    assert command[1] == asked
    done = CliRunner().invoke(roofline.main, asked.split())
    assert done.exit_code == 0, done.stderr
    rows = table_lines(text)
    assert len(rows) == 18 and rows == table_lines(done.stdout)
    predicted = re.search(r"^predicted: (.*)$", done.stdout, re.MULTILINE)
    assert predicted is not None
    assert f"That is {predicted[1]}." in text


def test_the_command(roofline):
    def run(*args: str):
        return CliRunner().invoke(roofline.main, ["--terms", "--model", "llama2-7b", *args])

    done = run("--device", "3090", "--tau", "3.6", "--fp16-accumulate")
    assert done.exit_code == 0, done.stderr
    assert "| cycle, tree 5, 4, 15 | 348 | 7." in done.stdout
    assert "tok/s at tau 3.6" in done.stdout and "| gate_up | 22016 x 4096 | 1 |" in done.stdout
    refused = run("--device", "this")
    known = "3090, 3090ti, 4090, h100, h200"
    assert refused.exit_code == 2 and f"for {known}, not 'this'" in refused.stderr
    assert run("--device", "3090", "--rows", "plain").exit_code == 2
    with pytest.raises(FasteagleError):
        card_named("this")
