"""Predicted times against figures worked out by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from fasteagle.bench import measure as device_speed
from fasteagle.bench import roofline as roofline_module
from fasteagle.bench.measure import memory_bandwidth
from fasteagle.bench.roofline import (
    DEVICES,
    FINISH_SMALL,
    GATHER_SMALL,
    MID,
    OUTLOOKS,
    PASS_SMALL,
    CapturedCycle,
    Part,
    Storage,
    Workload,
    device_reported_as,
    limit,
    storage_named,
)
from fasteagle.loading.heads.find import head_shape
from fasteagle.loading.registry import preset
from fasteagle.quant.interleaved import layout_for
from fasteagle.quant.scheme import Scheme, parse_scheme
from fasteagle.quant.tiling import Card, Tiling, microseconds
from fasteagle.shapes import StaticShape, TreeShape

CPU = torch.device("cpu")
LLAMA = preset("llama2-7b")
RTX3090 = DEVICES["3090"]
HEAD = head_shape("llama2-7b", LLAMA)
TREE = TreeShape(5, 4, 15)
G128 = layout_for(4, 128, 4096)


def work(precision="int4-g128", context=1024):
    return Workload(LLAMA, storage_named(precision, LLAMA), context)


def verify(precision, rows, context=0):
    """Milliseconds of a target pass on a 3090, and what bounds it."""
    pass_ = work(precision, context)
    return limit(pass_.verifying(rows), RTX3090, pass_.storage.element_bytes)


def draft_ms(precision, tree, head=HEAD):
    return limit(work(precision, 0).drafting(head, tree), RTX3090)[0]


@pytest.mark.parametrize(
    ("precision", "empty", "at_1k"),
    [
        ("bf16", 70.8, 68.1),
        ("int8-lm4", 141.7, 131.0),
        ("int4-g128-lm4", 266.6, 231.3),
        ("int4-g32-lm4", 226.6, 200.6),
    ],
)
def test_the_limits_of_7b_on_a_3090(precision, empty, at_1k):
    """LLaMA2-7B on 936 GB/s, one token a pass; the LM head in 4 bits too."""
    for context, expected in ((0, empty), (1024, at_1k)):
        ms, bound = verify(precision, 1, context)
        assert 1e3 / ms == pytest.approx(expected, rel=0.01) and bound == "memory"
    # An LM head in int8 costs two percent of an int4 pass.
    assert 1e3 / verify("int4-g128", 1)[0] == pytest.approx(262.1, rel=0.001)


def test_drafting_is_a_pass_of_the_head_for_each_level():
    """0.37 G parameters in bf16: 0.8 ms a step, 4 ms for five."""
    assert draft_ms("bf16", TreeShape(1, 4, 4)) == pytest.approx(0.8, abs=0.02)
    assert draft_ms("bf16", TREE) == pytest.approx(4.0, rel=0.03)
    assert draft_ms("bf16", StaticShape(5, None, 25)) == pytest.approx(4.0, rel=0.03)
    assert draft_ms("int4", TREE) < 1.5
    # The first reads the tokens of the longest path and the bonus token, and drafts after the last.
    parts = work("bf16", 0).drafting(HEAD, TREE)
    assert [part.rows for part in parts if part.name == "draft LM head"] == [1, 4, 4, 4, 4]
    assert [part.rows for part in parts if part.block is not None] == [6, 4, 4, 4, 4]
    parts = work("bf16", 0).drafting(HEAD, StaticShape(5, None, 23))  # about evenly
    assert [part.rows for part in parts if part.block is not None] == [6, 5, 5, 5, 5]
    # A trimmed vocabulary saves its part of the LM head in every step.
    trimmed = dataclasses.replace(HEAD, draft_vocab_size=8000)
    saved = draft_ms("bf16", TreeShape(2, 1, 2)) - draft_ms("bf16", TreeShape(2, 1, 2), trimmed)
    assert saved * 936e6 == pytest.approx(2 * 2 * 24000 * 4096)


QWEN_MOE = preset("qwen3-30b-a3b")


def test_more_rows_read_more_experts():
    """d(T) = E (1 - (1 - k / E)^T): 8.0, 15.5, 29.1 and 51.6 of 128 experts."""
    work = Workload(QWEN_MOE, storage_named("int4", QWEN_MOE), 1000)
    read = [sum(part.n_bytes for part in work.verifying(rows)) for rows in (1, 2, 4, 8)]
    cached = QWEN_MOE.kv_bytes(1000)
    assert read[0] == pytest.approx(work.storage.pass_bytes(QWEN_MOE) + cached, rel=1e-6)
    assert read[0] - cached < 2.1e9
    expert = 3 * 2048 * 768 * work.storage.linear_bytes * 48
    distinct = [(more - read[0]) / expert + 8 for more in read]
    assert distinct == pytest.approx([8, 15.5, 29.1, 51.6], abs=0.1)


def test_a_mixture_of_experts_on_a_3090():
    """Plain decoding far above the 140 tok/s that engines report, below the bandwidth's 450."""
    work = Workload(QWEN_MOE, storage_named("int4", QWEN_MOE), 1024)
    bound, what = limit(work.verifying(1), DEVICES["3090"])
    assert what == "memory"
    cycle = CapturedCycle(DEVICES["3090"].card, work)
    speeds = cycle.speeds(head_shape("qwen3-30b-a3b", QWEN_MOE), TreeShape(3, 1, 3), 2.95)
    assert 1000 / bound > speeds.plain
    assert (round(speeds.plain), round(speeds.drafted)) == (248, 381), "as docs/measuring.md says"


@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen1.5-moe", "ernie-4.5-21b-a3b"])
def test_a_row_reads_its_experts_the_shared_ones_routers_and_dense_blocks(name):
    config = dataclasses.replace(preset(name), ffn_dim=4096)  # of the dense blocks
    load = Workload(config, storage_named("int4", config), 100)
    read = sum(part.n_bytes for part in load.verifying(1))
    expected = load.storage.pass_bytes(config) + config.kv_bytes(100)
    assert read == pytest.approx(expected, rel=1e-5)


def test_products_in_fp32_run_at_the_rate_of_fp32():
    part = Part("a product", 1, flops=35.6e9)
    assert limit([part], RTX3090, element_bytes=4) == (pytest.approx(1.0), "compute")
    assert limit([part], RTX3090)[0] == pytest.approx(35.6 / 71)
    assert limit([part], RTX3090, fp16=True)[0] == pytest.approx(35.6 / 142)


@pytest.mark.parametrize(
    ("changes", "launches"),
    [
        ({}, 2),
        ({"qk_norm": True}, 2),
        ({"qk_norm": True, "head_dim": 80}, 3),
        ({"head_dim": 80}, 2),
        ({"qk_norm_whole": True}, 3),
        ({"head_dim": 256}, 3),
    ],
)
def test_launches_of_a_block_that_neither_multiply_nor_attend(changes, launches):
    """Attention rotates heads of 128 columns itself, and norms those of a power of two."""
    config = dataclasses.replace(LLAMA, **changes)
    load = Workload(config, storage_named("int4", config), 100)
    (rest,) = (part for part in load.verifying(1) if part.name == "norms, rest of the pass")
    assert rest.launches == 32 * launches + PASS_SMALL
    *_, rest = dataclasses.replace(load, sequences=2).verifying(1)
    assert rest.launches == 32 * launches + PASS_SMALL + GATHER_SMALL


@pytest.mark.parametrize("name", ["llama2-7b", "llama3-8b", "qwen3-8b"])
def test_bytes_of_the_parts_are_those_of_the_model(name):
    config = preset(name)
    head = head_shape(name, config)
    for scheme in (Scheme(8, head_bits=8), parse_scheme("int4-g32", config, 4)):
        load = Workload(config, Storage(scheme), 100)
        read = sum(part.n_bytes for part in load.verifying(4))
        assert read == pytest.approx(load.storage.pass_bytes(config) + config.kv_bytes(100))
        one = load.drafting(head, TreeShape(1, 2, 2))
        linears = [part for part in one if part.N and not part.is_lm_head]
        assert sum(p.N * p.K for p in linears) == head.linear_params
    assert storage_named("int4-torchao", LLAMA) == storage_named("int4", LLAMA)
    # A file's own groups cost what anybody's do.
    own, hqq = (Storage(Scheme(4, 32, method, 8)) for method in ("own", "hqq"))
    assert own.pass_bytes(LLAMA) == hqq.pass_bytes(LLAMA)


@pytest.mark.parametrize(
    ("reported", "bandwidth"),
    [
        ("NVIDIA GeForce RTX 3090", 936),
        ("NVIDIA GeForce RTX 3090 Ti", 1008),
        ("NVIDIA H200", 4800),
        ("NVIDIA H100 80GB HBM3", 3350),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA GH200 480GB", None),
        ("AMD EPYC", None),
    ],
)
def test_devices_by_what_the_driver_calls_them(reported, bandwidth):
    device = device_reported_as(reported)
    assert (device and device.card.gb_s) == bandwidth


def test_bandwidth_comes_from_the_data_sheet_where_there_is_one(monkeypatch):
    monkeypatch.setattr(device_speed, "copy_bandwidth", lambda device: 850.0)
    cuda = torch.device("cuda")
    known = memory_bandwidth(cuda, "NVIDIA GeForce RTX 3090")
    assert (known.gb_s, known.source, known.measured_gb_s) == (936, "data sheet of RTX 3090", 850)
    unknown = memory_bandwidth(cuda, "NVIDIA T4")
    assert (unknown.gb_s, unknown.source) == (850, "measured, copying")


# A captured cycle


def test_waves_of_programs_by_hand():
    """164 slots: 164 columns are one wave, 165 two; the second wave waits for latency alone."""
    card = Card(82, 936.0, reach=1.0, latency_us=0.0, launch_us=0.0, cache_gb_s=1e9)
    cut = Tiling(16, 1, 1, 3, 2)

    def us(columns: int, card: Card = card) -> float:
        return microseconds(cut, G128, 128 * columns, 4096, 16, card, fp16=True)

    assert us(164) == pytest.approx(32 * 164 * 128 * 128 * 0.53125 / 936e3, rel=1e-4)
    arithmetic = 128 * 128 * 2.6 / 128 / 1695  # of one program: its instructions, not its products
    assert us(165) - us(164) == pytest.approx(32 * max(arithmetic, 16 * 128 * 128 / 512 / 1695))
    slow = dataclasses.replace(card, latency_us=3.0)
    assert us(165, slow) - us(164, slow) == pytest.approx(32 * 3.0 / 2, rel=1e-4)
    assert us(1, dataclasses.replace(card, launch_us=1.5)) == pytest.approx(us(1) + 1.5)
    # Partial sums go through the cache.
    card = RTX3090.card
    one, two = (
        microseconds(Tiling(16, 1, split, 3, 3), G128, 12288, 4096, 16, card, fp16=True)
        for split in (1, 2)
    )
    assert two - one == pytest.approx(3 * 4 * 16 * 12288 / (1e3 * card.cache_gb_s), abs=0.6)


@pytest.mark.parametrize(
    ("precision", "together"), [("fp16", [2.81, 2.81, 2.79, 2.20]), ("int4", [2.63])]
)
def test_drafts_of_several_sequences_on_a_3090(precision, together):
    """Table 7 of EAGLE-1 has 2.90, 2.87 and 2.76 for 1, 2 and 4 in fp16."""
    sizes = (1, 2, 4, 8)[: len(together)]
    loads = [dataclasses.replace(work(precision), sequences=n) for n in sizes]
    cycles = [CapturedCycle(RTX3090.card, load, fp16=False) for load in loads]
    speeds = [cycle.speeds(HEAD, TREE, 3.6) for cycle in cycles]
    assert [s.drafted / s.plain for s in speeds] == pytest.approx(together, abs=0.01)
    finishes = [cycle.ms([load.finishing]) for cycle, load in zip(cycles, loads, strict=True)]
    once, *others = (load.finishing.launches for load in loads)
    assert once == FINISH_SMALL and others == [n * (FINISH_SMALL + 2) for n in sizes[1:]]
    for n, load, cycle, speed, finish in zip(sizes, loads, cycles, speeds, finishes, strict=True):
        ms = cycle.ms([*load.verifying(16), *load.drafting(HEAD, TREE)]) + finish
        assert speed.drafted == pytest.approx(3600 * n / ms)
        assert speed.plain == pytest.approx(1000 * n / (cycle.ms(load.verifying(1)) + finish))


def test_a_dense_product_takes_the_longer_of_memory_and_tensor_cores():
    card, N = RTX3090.card, 4096
    slow, fast = card.macs_fp32, card.macs_fp16
    for name, fp16, macs in (("q", False, slow), ("q", True, fast), ("LM head", True, slow)):
        cycle = CapturedCycle(card, work("fp16"), fp16)
        us = [cycle.product_us(Part(name, 1, N=N, K=N, rows=rows)) for rows in (1, N)]
        memory, products = 2 * N**2 / (936 * MID.reach), N**3 / (82 * macs * card.ghz)
        assert [each - MID.launch - MID.latency for each in us] == pytest.approx(
            [memory / 1e3, products / 1e3]
        )


def test_a_short_text_is_read_in_fewer_steps_of_attention():
    cycles = [CapturedCycle(RTX3090.card, work(context=context)) for context in (64, 256)]
    parts = [[p for p in cycle.work.verifying(1) if p.block is not None] for cycle in cycles]
    short, long = (1e3 * cycle.ms(part) for cycle, part in zip(cycles, parts, strict=True))
    read = LLAMA.kv_bytes(192) / (1e3 * 936 * MID.reach)
    assert long - short == pytest.approx(32 * 3 * MID.latency + read)


def test_an_outlook_changes_times_and_no_tiling(monkeypatch):
    """The kernels cut a product by what they take the card for."""
    cards = []
    tiling = roofline_module.tiling
    monkeypatch.setattr(
        roofline_module, "tiling", lambda *key: cards.append(key[-1]) or tiling(*key)
    )
    parts = work().verifying(16)
    low, mid, high = (
        CapturedCycle(RTX3090.card, work(), outlook=outlook).ms(parts) for outlook in OUTLOOKS
    )
    assert low > mid > high and set(cards) == {RTX3090.card}
    cycle = CapturedCycle(RTX3090.card, work())
    part, whole = (Part("a product", 1, N=N, K=4096, rows=1) for N in (100, 128))
    assert cycle.share(part) == pytest.approx(cycle.share(whole), rel=0.05), "whole tiles are read"


def test_this_machine_is_measured(monkeypatch):
    for speed in (device_speed.read_bandwidth(2**24), device_speed.copy_bandwidth(CPU, 2**24)):
        assert 1e-3 < speed < 10_000  # one run, on a machine that may be busy
    monkeypatch.setattr(device_speed, "_best_seconds", lambda work: 0.5)
    assert device_speed.read_bandwidth(2**20) == pytest.approx(2**21 / 1e9)
    assert device_speed.copy_bandwidth(CPU, 2**20) == pytest.approx(2**22 / 1e9)
    monkeypatch.setattr(device_speed, "available_bytes", lambda device: 2**20)
    assert device_speed.read_bandwidth(2**20) == pytest.approx(2**19 / 1e9), "in a quarter of it"
    assert device_speed.copy_bandwidth(CPU, 2**20) == pytest.approx(2**20 / 1e9)


def test_the_peak_of_this_process_is_in_bytes_and_since_the_last_reset(monkeypatch):
    held = torch.ones(2**26)  # 256 MiB
    before = device_speed.peak_bytes(CPU)
    del held
    device_speed.reset_peak(CPU)
    if Path("/proc/self/clear_refs").exists():
        assert device_speed.peak_bytes(CPU) < before - 2**27
    monkeypatch.setattr(device_speed, "proc_field", lambda *names: "2048 kB")
    assert device_speed.peak_bytes(CPU) == 2**21
