"""What the kernels of blocks, attention and drafting compile to, without a GPU.

No program spills registers or takes more than its share of a multiprocessor, and no sum has an
order that may change: bits of a row are its own on every card.
"""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch

import sass
from fasteagle.compile.int8_cache import SPARE
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
from fasteagle.compile.kernels.tree_kernels import SharedPlane, Unrotated
from fasteagle.compile.tree_attention import TreeView
from sass import brains, flags, floats, halves, ints, longs

pytestmark = pytest.mark.slow
HALF, BF16, EPS, M, G, V = torch.float16, torch.bfloat16, 1e-5, 17, 8, 128_256
AMPERE, HOPPER = 86, 90


def sequences(n_rows=M):
    table = longs(8, int(sequence_kernels.FIELDS))
    return sequence_kernels.empty(table, n_rows, 64, n_blocks=8)


def cache(E, dtype, shared, n_rows=M, block=16):
    """Keys or values of one sequence, or of several."""
    shape = G, 4096, E + SPARE if dtype == torch.int8 else E
    if shared:
        return SharedPlane(sequences(n_rows), 0, shape, dtype, block)
    return floats(shape, dtype=dtype)


def norm(D, S, scaled=True, **limit):
    scale = brains(D) if scaled else None
    block_kernels.add_norm(floats(M, D), floats(S, M, D), scale, EPS, HALF, **limit)


def rope(dtype, shared=False):
    turns, columns = floats(M, 1, 128), (32 + 2 * G) * 128
    norms = brains(128), brains(128), EPS
    new = Unrotated(floats(3, M, columns), None, turns, turns, longs(M), 32, BF16, *norms)
    rows = cache(128, dtype, shared)
    block_kernels.rope(new, rows, rows)


def commit(E, dtype):
    block_kernels.commit(floats(4, G, 64, E, dtype=dtype), longs(()), longs(6))


def scores(D):
    parts = floats(3, M, D)
    expert_kernels.norm_scores(floats(M, D), parts, brains(D), floats(64, D), EPS)


def route(X, top_k, shares, bias=None):
    R = X + shares  # the shared expert's score comes after the others
    expert_kernels.route(floats(M, R), X, top_k, not shares, 1.0, shares, bias)


def rerank(P):
    order_kernels.rerank(longs(P), floats(P), longs(P), longs(P), longs(1), 8)


def fuse(k):
    n = k + k * k
    lookup_kernels.fuse(longs(n), floats(n), longs(n), longs(63), floats(63), k, 2)


def draw(noisy):
    draw_kernels.draw(floats(M, V), longs(M), longs(()), floats(()), noisy, noisy)


SMALL = {
    "norm of fc's sum": partial(norm, 4096, 4, scaled=False, limit=511.75),
    "norm of the last sum": lambda: block_kernels.add(floats(M, 4096), floats(4, M, 4096)),
    "norm": partial(norm, 4096, 7),
    "norm, wide": partial(norm, 8192, 3),
    "rope": partial(rope, BF16),
    "rope to int8": partial(rope, torch.int8),
    "rope of several sequences": partial(rope, BF16, shared=True),
    "rope of several sequences to int8": partial(rope, torch.int8, shared=True),
    "gather": lambda: sequence_kernels.gather(sequences(), 4, 16),
    "gate": lambda: gate_kernels.gate(floats(3, M, 8192), "fp16"),
    "gate of a prompt": lambda: gate_kernels.gate_rows(floats(M, 8192), "fp16"),
    "commit": partial(commit, 128, BF16),
    "commit of int8": partial(commit, 144, torch.int8),
    "children": lambda: draft_kernels.top_children(floats(4, V), 10),
    "rerank": partial(rerank, 1000),
    "rerank of the default": partial(rerank, 100),
    "look up": lambda: lookup_kernels.look_up(longs(2**17), longs(()), floats(8, 2), longs(64), 63),
    "draw": partial(draw, True),
    "draw the best": partial(draw, False),
    "fuse": partial(fuse, 10),
    "fuse of many": partial(fuse, 32),
    "relations": lambda: order_kernels.relations(longs(64), flags(64)),
    "relations of few rows": lambda: order_kernels.relations(longs(16), flags(16)),
    "scores": partial(scores, 2048),
    "scores, wide": partial(scores, 8192),
    "route": partial(route, 128, 8, False),
    "route of a shared expert": partial(route, 64, 4, True),
    "route of many": partial(route, 512, 10, False),
    "route by a bias": partial(route, 64, 6, True, floats(64)),
}
ON_HOPPER = (  # those that take most registers, or shared memory
    *("norm, wide", "rope to int8", "gate of a prompt", "children", "rerank", "relations"),
    *("scores, wide", "route of many", "look up"),
)
# Of few programs, or one.
FEW = "norm_kernel", "rerank_kernel", "relations_kernel", "score_kernel", "route_kernel"
FEW += ("look_up_kernel",)


@pytest.mark.parametrize(
    ("name", "card"), [*((name, AMPERE) for name in SMALL), *((name, HOPPER) for name in ON_HOPPER)]
)
def test_small_kernels(name, card, tmp_path):
    for kernel in sass.compiled(SMALL[name], card):
        _, usage = sass.disassemble(kernel, tmp_path)
        assert usage.stack == usage.local == 0, "registers spill"
        assert usage.registers <= (200 if kernel.name in FEW else 170)
        assert usage.shared <= 32 * 1024
        assert not sass.ATOMIC.search(kernel.asm["ptx"]), "sums have a fixed order"


# bits, group size (0: K), whether with offsets, sums within a group
FORMATS = [(4, 128, False, "fp16"), (4, 64, False, "fp32"), (4, 32, True, "fp16")]
FORMATS += [(8, 0, False, "fp32"), (8, 32, False, "fp16")]
# Gate and up on one card, down on the other.
EXPERTS = [
    (*kind, scaled, (AMPERE, HOPPER)[(i + scaled) % 2])
    for i, kind in enumerate(FORMATS)
    for scaled in (False, True)
]


@pytest.mark.parametrize(("bits", "group", "offsets", "accumulate", "scaled", "card"), EXPERTS)
def test_expert_kernel(bits, group, offsets, accumulate, scaled, card, tmp_path):
    """Three programs on a multiprocessor, and loads of gathered rows that nothing waits for."""
    X, k, K = 4, 2, 768
    weight = sass.empty_weight(2048, K, bits, group or K, offsets)
    routing = expert_kernels.Routing.empty(X, k, M, weight.words.device)
    x, scales = halves(M * (k if scaled else 1), K), floats(K // 64, M * k)

    def launch():
        if scaled:
            parts = floats(k, M, 2048 // X)
            expert_kernels.weighted(x, scales, weight, routing, accumulate, parts)
        else:
            expert_kernels.gated(x, weight, routing, accumulate)

    (kernel,) = sass.compiled(launch, card)
    code, usage = sass.disassemble(kernel, tmp_path)
    assert usage.stack == usage.local == 0, "registers spill"
    assert usage.shared <= sass.TWO_PROGRAMS
    assert usage.registers <= 170
    counts = sass.opcodes(sass.main_loop(code))
    assert counts["LDGSTS"] and counts["LDG"] == 0, "a load in the loop waits for memory"
    assert not sass.ATOMIC.search(kernel.asm["ptx"]), "sums have a fixed order"


# E, query heads of a KV head, T, dtype, window, and what is not as usual
ATTENTION = [
    (64, 3, 5, HALF, None, ""),
    (64, 1, 32, HALF, 4096, ""),
    (80, 1, 32, HALF, None, ""),
    (128, 4, 4, BF16, 4096, ""),
    (128, 1, 32, BF16, None, ""),
    (256, 20, 2, HALF, None, ""),
    (64, 1, 16, HALF, None, "int8"),
    (128, 8, 4, BF16, None, "int8"),
    (80, 1, 32, BF16, None, "rotates"),
    (128, 1, 16, BF16, None, "rotates"),
    (128, 1, 32, BF16, 4096, "rotates, biased"),
    (128, 1, 32, BF16, None, "int8, rotates, biased"),
    (128, 4, 8, BF16, None, "rotates, normed"),
    (128, 8, 1, BF16, None, "int8, rotates, normed"),
]
# Caches of several sequences too, which programs find by their addresses; on Hopper these alone,
# which take more registers.
SHARED = [case for case in ATTENTION if case[0] == 128 or "rotates" in case[-1]]
ATTENTION = [
    *((*case, False, AMPERE) for case in ATTENTION),
    *((*case, True, card) for card in (AMPERE, HOPPER) for case in SHARED),
]


@pytest.mark.parametrize(
    ("E", "group", "T", "dtype", "window", "kind", "shared", "card"), ATTENTION
)
def test_attention(E, group, T, dtype, window, kind, shared, card, tmp_path):
    int8, rotates = "int8" in kind, "rotates" in kind
    rows = cache(E, torch.int8 if int8 else dtype, shared, T, tree_kernels.row_block(group * T))
    view = TreeView(longs(8 if shared else ()), ints(T, 64), longs(T), window)

    def launch():
        if not rotates:
            q = floats(G, group * T, E, dtype=dtype)
            tree_kernels.tree_attention(q, rows, rows, view)
            return
        columns, turns = (group + 2) * G * E, floats(T, 1, E)
        bias = brains(columns) if "biased" in kind else None
        norms = [brains(E), brains(E), EPS] if "normed" in kind else []
        turned = turns, turns, longs(T), group * G, dtype
        new = Unrotated(floats(2, T, columns), bias, *turned, *norms)
        tree_kernels.rope_attention(new, rows, rows, view, dtype)

    prefix, finish = sass.compiled(launch, card)
    halves = "bf16.bf16" if dtype == BF16 else "f16.f16"
    for kernel in (prefix, finish):
        # One instruction for every product, on Hopper too, whose own adds up in another order.
        kinds = set(re.findall(r"\b\w*mma[.\w]*", kernel.asm["ptx"]))
        assert kinds == {f"mma.sync.aligned.m16n8k16.row.col.f32.{halves}.f32"}

    _, usage = sass.disassemble(prefix, tmp_path)
    spilled = 8 if shared and card == HOPPER else 0  # two words of a thread
    assert usage.stack <= spilled and usage.local == 0, "registers spill"
    assert usage.shared <= (51200 if E == 256 else sass.TWO_PROGRAMS), "two programs, or one"
    three = card == AMPERE and not int8 and not rotates
    assert usage.registers <= (170 if three else 255), "three programs, or two"
    ptx = prefix.asm["ptx"]
    if not int8 and E in (64, 128):  # keys come in whole pieces, which nothing waits for
        assert "cp.async.cg.shared.global" in ptx
    assert rotates or not sass.ADDED.search(ptx), "a sum outside of the tensor cores"

    _, usage = sass.disassemble(finish, tmp_path)
    four = E <= 128 and not int8
    spilled = 32 if four and card == HOPPER else 0  # a few words of a thread
    assert usage.stack <= spilled and usage.local == 0, "registers spill"
    assert usage.shared <= (24 if four else 32) * 1024, "four programs, or two"
    assert usage.registers <= (128 if four else 255), "four programs, or two"
    ptx = finish.asm["ptx"]
    assert not sass.ADDED.search(ptx.rpartition("mma.sync")[0]), "a sum over keys outside of them"
    assert not sass.ATOMIC.search(ptx), "sums have a fixed order"


def test_splits_are_whole_blocks():
    for E in (16, 64, 80, 128, 160, 256):
        assert tree_kernels.SPLIT % tree_kernels.key_block(E) == 0
