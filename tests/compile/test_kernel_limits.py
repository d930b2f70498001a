"""What the kernels of blocks, attention and drafting compile to, without a GPU.

No program spills registers or takes more than its share of a multiprocessor, and no sum has an
order that may change: bits of a row are its own on every card.
"""

from __future__ import annotations

import re

import pytest
import torch

import sass
from fasteagle.compile.kernels import (
    block_kernels,
    draft_kernels,
    draw_kernels,
    expert_kernels,
    gate_kernels,
    lookup_kernels,
    order_kernels,
    sequence_kernels,
    tree_kernels,
)
from fasteagle.quant import kernels
from fasteagle.quant.interleaved import InterleavedWeight

pytestmark = pytest.mark.slow
CARDS = {"sm_86": sass.SM_86, "sm_90": sass.GPUTarget("cuda", 90, 32)}
F32, I32, I64 = "*fp32", "*i32", "*i64"
POINTERS = {
    **dict.fromkeys(("parts_ptr", "stats_ptr", "sums_ptr", "cos_ptr", "sin_ptr"), F32),
    **dict.fromkeys(("x_ptr", "total_ptr", "scales_ptr", "logits_ptr", "logp_ptr"), F32),
    **dict.fromkeys(("ids_ptr", "paths_ptr", "rows_ptr", "members_ptr", "blocks_ptr"), I32),
    **dict.fromkeys(("scores_ptr", "choice_bias_ptr", "router_ptr", "weights_ptr"), F32),
    **dict.fromkeys(("shared_weights_ptr", "out_scales_ptr"), F32),
    **dict.fromkeys(("experts_ptr", "counts_ptr", "slots_ptr", "params_ptr"), I32),
    **dict.fromkeys(("shared_experts_ptr", "shared_counts_ptr", "shared_slots_ptr"), I32),
    **dict.fromkeys(("seq_len_ptr", "depths_ptr", "slots_ptr", "start_ptr", "path_ptr"), I64),
    **dict.fromkeys(("table_ptr", "positions_ptr", "seq_lens_ptr"), I64),
    **dict.fromkeys(("best_ptr", "tokens_ptr", "parents_ptr", "root_ptr"), I64),
    **dict.fromkeys(("out_tokens_ptr", "out_parents_ptr", "out_sources_ptr", "sources_ptr"), I64),
    **dict.fromkeys(("valid_ptr", "mask_ptr", "out_valid_ptr"), "*i1"),
    **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "q_norm_ptr", "k_norm_ptr", "scale_ptr"), "*bf16"),
    **dict.fromkeys(("bias_ptr",), "*bf16"),
    **dict.fromkeys(("out_ptr",), "*fp16"),
    **dict.fromkeys(("eps", "scale", "factor"), "fp32"),
}


def norm(D, **changes):
    constants = dict(SPLIT=4, NORMED=False, STORED=True, LIMIT=0.0, BLOCK=D) | changes
    return block_kernels.norm_kernel, {}, constants, block_kernels.norm_options(D)


def rope(cache, shared=False):
    constants = dict(SPLIT=3, E=128, HALF=64, BIASED=False, NORMED=True, INT8=cache == "*i8")
    constants["SHARED"] = shared
    types = {"bias_ptr": F32} | dict.fromkeys(("k_ptr", "v_ptr"), I64 if shared else cache)
    return block_kernels.rope_kernel, types, constants, block_kernels.ONE_WARP


def rerank(P_PAD, CHUNK):
    constants = dict(P_PAD=P_PAD, CHUNK=CHUNK, SOURCED=True)
    return order_kernels.rerank_kernel, {}, constants, order_kernels.OPTIONS


def look_up():
    pointers = ("text_ptr", "last_ptr", "recent_ptr", "best_ptr", "tokens_ptr")
    types = dict.fromkeys(pointers, I64) | dict.fromkeys(("table_ptr", "logp_ptr"), F32)
    constants = dict(MOST=63, CLASSES=8, MEMORY=128.0, RAREST=1e-3, NOTHING=-1, C_PAD=64)
    return lookup_kernels.look_up_kernel, types, constants, lookup_kernels.FEW


def match():
    types = dict.fromkeys(("text_ptr", "last_ptr", "best_ptr"), I64)
    constants = dict(LONGEST=8, NOTHING=-1, CHUNK=lookup_kernels.CHUNK)
    return lookup_kernels.match_kernel, types, constants, lookup_kernels.OPTIONS


def draw(**modes):
    constants = dict(NOISY=True, SCALED=True, CHUNK=draw_kernels.CHUNK) | modes
    types = {"positions_ptr": I64, "seed_ptr": I64, "temperature_ptr": F32}
    types |= {"best_ptr": F32}
    return draw_kernels.draw_kernel, types, constants, draw_kernels.OPTIONS


def fuse(K, PAD):
    types = {"looked_up_ptr": I64, "out_scores_ptr": F32}
    constants = dict(K=K, PAD=PAD, HEAD=1, LOOKUP=2)
    return lookup_kernels.fuse_kernel, types, constants, lookup_kernels.FEW


def relations(T_PAD, ROUNDS):
    constants = dict(T_PAD=T_PAD, ROUNDS=ROUNDS)
    return order_kernels.relations_kernel, {}, constants, order_kernels.OPTIONS


def commit(cache, E, E_PAD):
    constants = dict(E=E, E_PAD=E_PAD)
    return block_kernels.commit_kernel, {"rows_ptr": cache}, constants, block_kernels.ONE_WARP


def scores(D):
    constants = dict(SPLIT=3, BLOCK=D, SCORES=expert_kernels.SCORES)
    return expert_kernels.score_kernel, {}, constants, expert_kernels.score_options(D)


def route(X_PAD, TOP_K, shares, biased=False):
    constants = dict(TOP_K=TOP_K, X_PAD=X_PAD, ROWS=expert_kernels.ROUTE_ROWS)
    constants |= dict(RENORMALIZES=not shares, SHARES=shares, GATED=shares)
    constants["BIASED"] = biased
    return expert_kernels.route_kernel, {}, constants, expert_kernels.route_options(X_PAD)


SMALL = {
    "norm of fc's sum": norm(4096, LIMIT=511.75),
    "norm of the last sum": norm(4096, STORED=False),
    "norm": norm(4096, SPLIT=7, NORMED=True),
    "norm, wide": norm(8192, SPLIT=3, NORMED=True),
    "rope": rope("*bf16"),
    "rope to int8": rope("*i8"),
    "rope of several sequences": rope("*bf16", shared=True),
    "rope of several sequences to int8": rope("*i8", shared=True),
    "gather": (
        sequence_kernels.gather_kernel,
        {},
        dict(P=64, P_PAD=64, B=8, BLOCK_M=16),
        sequence_kernels.OPTIONS,
    ),
    "gate": (
        gate_kernels.gate_kernel,
        {},
        dict(SPLIT=3, SPAN=64, SPANS=8, EXPONENT=8),
        dict(num_warps=4, enable_fp_fusion=False),
    ),
    "gate of a prompt": (
        gate_kernels.gate_row_kernel,
        {},
        dict(CHUNK=gate_kernels.CHUNK, EXPONENT=8),
        dict(num_warps=4, enable_fp_fusion=False),
    ),
    "commit": commit("*bf16", 128, 128),
    "commit of int8": commit("*i8", 144, 256),
    "chunk": (
        draft_kernels.chunk_kernel,
        {},
        dict(K=10, CHUNK=draft_kernels.CHUNK),
        draft_kernels.OPTIONS,
    ),
    "merge": (
        draft_kernels.merge_kernel,
        {},
        dict(K=10, C_PAD=64, N_PAD=1024),
        draft_kernels.OPTIONS,
    ),
    "rerank": rerank(1024, 8),
    "rerank of the default": rerank(128, 64),
    "look up": look_up(),
    "match": match(),
    "draw": draw(),
    "draw the best": draw(NOISY=False, SCALED=False),
    "draw, last": (
        draw_kernels.last_kernel,
        {"best_ptr": F32},
        dict(C_PAD=64, BAD_ROW=-1),
        block_kernels.ONE_WARP,
    ),
    "fuse": fuse(10, 128),
    "fuse of many": fuse(32, 1024),
    "relations": relations(64, 6),
    "relations of few rows": relations(16, 4),
    "scores": scores(2048),
    "scores, wide": scores(8192),
    "route": route(128, 8, False),
    "route of a shared expert": route(64, 4, True),
    "route of many": route(512, 10, False),
    "route by a bias": route(64, 6, True, biased=True),
}


def build(kernel, card):
    function, types, constants, options = kernel
    names = function.arg_names
    types = {name: type for name, type in (POINTERS | types).items() if name in names}
    types = {name: type for name, type in types.items() if name not in constants}
    strides = [name for name in names if re.match("stride_[kv]", name)]
    return sass.compile_kernel(function, types, constants, options, strides, CARDS[card])


# On Hopper those that take most registers, or shared memory.
ON_HOPPER = ("norm, wide", "rope to int8", "gate of a prompt", "merge", "rerank", "relations")
ON_HOPPER += ("scores, wide", "route of many", "look up", "match")


@pytest.mark.parametrize(
    ("name", "card"),
    [*((name, "sm_86") for name in SMALL), *((name, "sm_90") for name in ON_HOPPER)],
)
def test_small_kernels(name, card, tmp_path):
    compiled = build(SMALL[name], card)
    _, usage = sass.disassemble(compiled, tmp_path)
    assert usage.stack == usage.local == 0, "registers spill"
    few = "norm", "rerank", "relations", "scores", "route", "look up"
    alone = name.startswith(few)  # few programs, or one
    assert usage.registers <= (200 if alone else 170)
    assert usage.shared <= 32 * 1024
    assert not re.search(r"\b(atom|red)\.", compiled.asm["ptx"]), "sums have a fixed order"


# bits, group size (0: K), whether with offsets, sums within a group
FORMATS = [
    (4, 128, False, "fp16"),
    (4, 64, False, "fp32"),
    (4, 32, True, "fp16"),
    (8, 0, False, "fp32"),
    (8, 32, False, "fp16"),
]


# Gate and up on one card, down on the other.
EXPERTS = [
    (*kind, scaled, [*CARDS][(i + scaled) % 2])
    for i, kind in enumerate(FORMATS)
    for scaled in (False, True)
]


@pytest.mark.parametrize(("bits", "group", "offsets", "accumulate", "scaled", "card"), EXPERTS)
def test_expert_kernel(bits, group, offsets, accumulate, scaled, card, tmp_path):
    """Three programs on a multiprocessor, and loads of gathered rows that nothing waits for."""
    none, K = torch.empty(0), 768
    weight = InterleavedWeight(none, none, 2048, K, bits, group or K, offsets)
    constants = expert_kernels.constants(weight, accumulate, scaled)
    types = POINTERS | {
        "x_ptr": "*fp16",
        "words_ptr": "*i16",
        "out_ptr": F32 if scaled else "*fp16",
    }
    function = expert_kernels.expert_kernel
    types = {n: t for n, t in types.items() if n in function.arg_names and n not in constants}
    aligned = "N", "out_columns", "Np", "Kp"
    compiled = sass.compile_kernel(
        function, types, constants, kernels.OPTIONS, aligned, CARDS[card]
    )
    code, usage = sass.disassemble(compiled, tmp_path)
    assert usage.stack == usage.local == 0, "registers spill"
    assert usage.shared <= sass.TWO_PROGRAMS
    assert usage.registers <= 170
    counts = sass.opcodes(sass.main_loop(code))
    assert counts["LDGSTS"] and counts["LDG"] == 0, "a load in the loop waits for memory"
    assert not re.search(r"\b(atom|red)\.", compiled.asm["ptx"]), "sums have a fixed order"


# E, query rows, dtype, window, whether the cache is int8, whether the kernel rotates, with a bias
PREFIX = [
    (64, 16, "fp16", None, False, False, False),
    (64, 32, "fp16", 4096, False, False, False),
    (80, 32, "fp16", None, False, False, False),
    (128, 16, "bf16", None, False, False, False),
    (128, 32, "bf16", None, False, False, False),
    (256, 32, "fp16", None, False, False, False),
    (64, 16, "fp16", None, True, False, False),
    (128, 32, "bf16", None, True, False, False),
    (80, 32, "bf16", None, False, True, False),
    (128, 16, "bf16", None, False, True, False),
    (128, 32, "bf16", 4096, False, True, True),
    (128, 32, "bf16", None, True, True, True),
]
# E, query heads of a KV head, dtype, window, whether rows go to the next product, int8 cache
FINISH = [
    (64, 3, "fp16", None, False, False),
    (80, 1, "bf16", None, False, False),
    (128, 4, "bf16", 4096, False, False),
    (128, 1, "bf16", None, True, False),
    (128, 8, "bf16", None, True, False),
    (128, 1, "bf16", None, False, True),
    (256, 20, "fp16", None, False, False),
]
# The same over caches of several sequences, which programs find by their addresses.
PREFIX = [(*case, False) for case in PREFIX]
PREFIX += [(*case[:-1], True) for case in PREFIX if case[0] == 128 or case[5]]
FINISH = [(*case, False) for case in FINISH]
FINISH += [(*case[:-1], True) for case in FINISH if case[0] == 128]
# On Hopper these alone, which take more registers.
PREFIX, FINISH = (
    [(*case, card) for case in cases for card in CARDS if case[-1] or card == "sm_86"]
    for cases in (PREFIX, FINISH)
)
SHARED = {(256, 32): 51200}  # by E and rows: one program on a multiprocessor


def attention(function, constants, options, dtype, int8, card):
    types = dict.fromkeys(("q_ptr", "out_ptr", "bias_ptr"), f"*{dtype}")
    cache = I64 if constants["SHARED"] else "*i8" if int8 else f"*{dtype}"
    types |= dict.fromkeys(("k_ptr", "v_ptr"), cache)
    compiled = build((function, types, constants, options), card)
    ptx = compiled.asm["ptx"]
    # One instruction for every product, on Hopper too, whose own adds up in another order.
    kinds = set(re.findall(r"\b\w*mma[.\w]*", ptx))
    halves = "bf16.bf16" if dtype == "bf16" else "f16.f16"
    assert kinds == {f"mma.sync.aligned.m16n8k16.row.col.f32.{halves}.f32"}
    return compiled


@pytest.mark.parametrize(
    ("E", "rows", "dtype", "window", "int8", "rotates", "biased", "shared", "card"), PREFIX
)
def test_prefix_kernel(E, rows, dtype, window, int8, rotates, biased, shared, card, tmp_path):
    constants = tree_kernels.prefix_constants(E, rows, window, int8, rotates, biased, shared)
    function, options = tree_kernels.prefix_kernel, tree_kernels.OPTIONS
    compiled = attention(function, constants, options, dtype, int8, card)
    _, usage = sass.disassemble(compiled, tmp_path)
    spilled = 8 if shared and card == "sm_90" else 0  # two words of a thread
    assert usage.stack <= spilled and usage.local == 0, "registers spill"
    assert usage.shared <= SHARED.get((E, rows), sass.TWO_PROGRAMS)
    three = card == "sm_86" and not int8 and not rotates
    assert usage.registers <= (170 if three else 255), "three programs, or two"
    if not int8 and E in (64, 128):
        # Keys come in whole pieces, which nothing waits for.
        assert "cp.async.cg.shared.global" in compiled.asm["ptx"]
    if not rotates:
        added = re.findall(r"\badd(?:\.\w+)*\.f32", compiled.asm["ptx"])
        assert not added, "a sum outside of the tensor cores"


@pytest.mark.parametrize(
    ("E", "group", "dtype", "window", "by_rows", "int8", "shared", "card"), FINISH
)
def test_finish_kernel(E, group, dtype, window, by_rows, int8, shared, card, tmp_path):
    constants = tree_kernels.finish_constants(E, group, window, by_rows, int8, shared)
    function, options = tree_kernels.finish_kernel, tree_kernels.finish_options(E, int8)
    compiled = attention(function, constants, options, dtype, int8, card)
    _, usage = sass.disassemble(compiled, tmp_path)
    four = E <= 128 and not int8
    spilled = 32 if four and card == "sm_90" else 0  # a few words of a thread
    assert usage.stack <= spilled and usage.local == 0, "registers spill"
    assert usage.shared <= (24 if four else 32) * 1024, "four programs, or two"
    assert usage.registers <= (128 if four else 255), "four programs, or two"
    before_merge = compiled.asm["ptx"].rpartition("mma.sync")[0]
    added = re.findall(r"\badd(?:\.\w+)*\.f32", before_merge)
    assert not added, "a sum over keys outside of the tensor cores"
    assert not re.search(r"\b(atom|red)\.", compiled.asm["ptx"]), "sums have a fixed order"


def test_splits_are_whole_blocks():
    for E in (16, 64, 80, 128, 160, 256):
        assert tree_kernels.SPLIT % tree_kernels.key_block(E) == 0
