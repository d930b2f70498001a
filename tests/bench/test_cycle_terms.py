"""Predicted terms of a cycle against figures worked out by hand."""

from __future__ import annotations

import dataclasses
import re

import pytest

from fasteagle.bench.cycle_terms import CARDS, CycleModel, card_named, report
from fasteagle.bench.roofline import DEVICES
from fasteagle.loading.heads.find import head_shape
from fasteagle.loading.registry import preset
from fasteagle.quant.interleaved import layout_for
from fasteagle.quant.scheme import parse_scheme
from fasteagle.quant.tiling import Card, Tiling, microseconds
from fasteagle.shapes import TreeShape

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


def products_us(model, T):
    return sum(model.product_us(part) for part in model.target(T) if part.N)


def test_sums_in_fp32_are_bound_by_the_tensor_cores_from_17_rows_on():
    slow = dataclasses.replace(MODEL, fp16=False)
    for T, ratio in ((1, 1.1), (16, 1.1), (32, 1.2)):
        times = products_us(slow, T) / products_us(MODEL, T)
        assert times > ratio if T == 32 else times < ratio


def test_products_of_7b_reach_85_percent_but_for_the_smallest():
    """8.9 MB are read in 10 us, of which launch and latency take two."""
    for T in (1, 8, 16):
        shares = {(part.N, part.K): MODEL.share(part) for part in MODEL.target(T) if part.N}
        assert shares.pop((4096, 4096)) > 0.7
        assert all(share > 0.82 for share in shares.values()), shares
        assert sum(shares.values()) / len(shares) > 0.86


def test_a_cycle_of_7b_on_a_3090():
    total = MODEL.ms(MODEL.cycle(HEAD, TREE))
    assert 3.6 / total * 1e3 >= 450, "what is aimed at"
    trimmed = dataclasses.replace(HEAD, draft_vocab_size=8000)
    assert MODEL.ms(MODEL.cycle(trimmed, TREE)) < total - 0.5
    longer = dataclasses.replace(MODEL, context=4096)
    more = 32 * 3072 * 2 * 2 * 4096 / (936e6 * 0.93)  # keys and values in 16 bits, read once
    assert longer.ms(longer.target(16)) - MODEL.ms(MODEL.target(16)) > more


def test_adding_up_the_splits_of_attention_waits_for_each():
    """7 to 14 us a block at 16 rows: two waves of programs, five splits in turn."""
    (attention,) = [part for part in MODEL.target(16) if part.block]
    no_splits = dataclasses.replace(MODEL, context=0)
    (without,) = [part for part in no_splits.target(16) if part.block]
    read = attention.n_bytes / 32 / (936e3 * 0.93)
    added = (MODEL.us(attention) - no_splits.us(without)) / 32 - read
    assert 6 < added < 14


@pytest.mark.parametrize(("name", "gb_s"), [("h100", 3350), ("h200", 4800)])
def test_cards_with_sums_of_one_speed(name, gb_s):
    """What the kernels take them for, with their own bandwidth; sums in fp32 cost no more there."""
    card = card_named(name)
    assert (card.gb_s, DEVICES[name].gb_s) == (gb_s, gb_s)
    assert card == dataclasses.replace(Card.of(132, (9, 0)), gb_s=gb_s)
    fp16, fp32 = (CycleModel(card, LLAMA, INT4, fp16=fp16) for fp16 in (True, False))
    assert fp16.ms(fp16.cycle(HEAD, TREE)) == fp32.ms(fp32.cycle(HEAD, TREE))


def test_faster_memory_makes_a_plain_cycle_faster():
    plain = {name: CycleModel(card, LLAMA, INT4).plain_ms() for name, card in CARDS.items()}
    assert plain["h200"] < plain["h100"] < plain["4090"] < plain["3090"]


def test_the_report_adds_up():
    terms, predicted = report(MODEL, HEAD, TREE, 3.6).split("\n\n")[1:]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in terms.splitlines()[2:]]
    *parts, total = rows
    assert total[0] == "cycle, tree 5, 4, 15"
    assert sum(int(row[1]) for row in parts) == int(total[1])
    assert sum(float(row[3]) for row in parts) == pytest.approx(float(total[3]), abs=0.05)
    rate = re.search(r"predicted: (\d+) tok/s at tau 3.6", predicted)
    assert rate and int(rate[1]) == pytest.approx(3600 / float(total[3]), abs=1)
