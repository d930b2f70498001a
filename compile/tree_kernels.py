"""Attention of the few rows of a draft tree over a long cache, in Triton, bit for bit per row.

The cache is cut at fixed logical positions: blocks of keys, and splits of SPLIT positions whose
softmax is computed apart and merged afterwards, the split-KV idea of Flash-Decoding (Dao et al.
2023). `prefix_kernel` reads every committed block that is full, once for a block of rows.
`finish_kernel` does the rest of each tree row: the blocks that reach behind the committed text,
whose keys it gathers along the row's path, and the merge.

A row's bits depend on its own logical keys alone. It meets them in the same blocks, in the same
order, by the same function `_attend_block`, in whichever kernel. Nor does it matter which threads
the compiler gives a row: maxima are exact, and every sum over keys or over E is a tensor core
product by m16n8k16, added up in ascending order of K. For blocks of 64 rows Hopper would take
another instruction, so they are 16 or 32. Only what the code says is fused.

Shapes: T tree rows, G KV heads, R = group * T query rows of a KV head, E head dim, S cache slots.
"""

# mypy: disallow-untyped-defs=False
# (what Triton compiles has no Python types)

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from fasteagle.compile.int8_kernels import int8_rows
from fasteagle.errors import FasteagleError

SPLIT = 256  # logical positions; a constant, so that nothing else can move a row's bits
ROW_BLOCKS = (16, 32)  # of query rows in a program
SUM_COLUMNS = 8  # of the product with ones that sums a row: the least an instruction yields
MIN_HEAD_DIM = 16
MAX_HEAD_DIM = 256  # beyond it a program's sums do not fit into its registers
INTERPRETED = triton.knobs.runtime.interpret  # runs on the CPU
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}  # fused only where the code says so
# A row gathers one or two blocks; buffers for more would only cost registers and shared memory.
FINISH_OPTIONS = OPTIONS | {"num_stages": 1}


def key_block(E: int) -> int:
    """Keys of one step: what two programs of E columns can hold in shared memory."""
    return 64 if E <= 128 else 32


def row_block(n_rows: int) -> int:
    """Query rows of one program of `prefix_kernel`."""
    return ROW_BLOCKS[0] if n_rows <= ROW_BLOCKS[0] else ROW_BLOCKS[1]


def prefix_constants(
    E: int, n_rows: int, window: int | None, int8: bool = False
) -> dict[str, object]:
    """What `prefix_kernel` is compiled for."""
    return common_constants(E, window, int8) | {"BLOCK_M": row_block(n_rows), "STAGES": 2}


def finish_constants(
    E: int, window: int | None, by_rows: bool = False, int8: bool = False
) -> dict[str, object]:
    """What `finish_kernel` is compiled for."""
    return common_constants(E, window, int8) | {"BY_ROWS": by_rows}


def common_constants(E: int, window: int | None, int8: bool = False) -> dict[str, object]:
    """What both are compiled for."""
    return {
        "E": E,
        "E_PAD": triton.next_power_of_2(E),
        "BLOCK": key_block(E),
        "SPLIT": SPLIT,
        "WINDOW": window or 0,
        "SUM_COLUMNS": SUM_COLUMNS,
        "INT8": int8,
    }


def tree_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_len: Tensor,
    paths: Tensor,
    depths: Tensor,
    window: int | None,
    out_rows: torch.dtype | None = None,
) -> Tensor:
    """See `fasteagle.compile.tree_attention`; on CUDA, or on the CPU in Triton's interpreter.

    With `out_rows` the result is the input of the next product: [T, G * group * E] in that dtype.
    Raises `FasteagleError` for a dtype, head_dim or window that no kernel is made for.
    """
    G, R, E = q.shape
    check(q.dtype, E, window)
    T, P = paths.shape
    q, paths = q.contiguous(), paths.contiguous()
    n_splits, group = triton.cdiv(k_cache.shape[1], SPLIT), R // T
    int8 = k_cache.dtype == torch.int8
    shape = q.shape if out_rows is None else (T, G * group * E)
    usual = q.dtype if int8 else v_cache.dtype
    out = torch.empty(shape, dtype=out_rows or usual, device=q.device)
    parts = q.new_empty(G, n_splits, R, E, dtype=torch.float32)
    stats = q.new_empty(2, G, n_splits, R, dtype=torch.float32)
    scale = math.log2(math.e) / math.sqrt(E)  # the exponentials are powers of two
    strides = *k_cache.stride()[:2], *v_cache.stride()[:2]
    prefix = prefix_constants(E, R, window, int8)
    prefix_kernel[(triton.cdiv(R, row_block(R)), G, n_splits)](
        q,
        k_cache,
        v_cache,
        seq_len,
        depths,
        parts,
        stats,
        *strides,
        scale,
        R,
        T,
        **prefix,
        **OPTIONS,
    )
    finish_kernel[(T, G, triton.cdiv(group, 16))](
        q,
        k_cache,
        v_cache,
        seq_len,
        depths,
        parts,
        stats,
        paths,
        out,
        *strides,
        scale,
        R,
        T,
        P,
        n_splits,
        **finish_constants(E, window, out_rows is not None, int8),
        **FINISH_OPTIONS,
    )
    return out


def check(dtype: torch.dtype, E: int, window: int | None) -> None:
    """Refuse what a model or its user may ask for and no kernel is made for."""
    fix = "pass a mask instead of a TreeView"
    if dtype not in (torch.float16, torch.bfloat16):
        raise FasteagleError(f"tree attention takes float16 or bfloat16, got {dtype}: {fix}")
    if not MIN_HEAD_DIM <= E <= MAX_HEAD_DIM:
        raise FasteagleError(
            f"head_dim {E} is out of tree attention's {MIN_HEAD_DIM} to {MAX_HEAD_DIM}: {fix}"
        )
    if window is not None and window < 1:
        raise FasteagleError(f"sliding_window {window} is out of range: use >= 1, or none")


@triton.jit
def _attend_block(q, k, v, peak, total, acc, visible, scale, MASKED: tl.constexpr):
    """One step of online softmax: q [M, E] over k, v [BLOCK, E], in units of log2.

    State: `peak` [M] the largest score so far, `total` [M, SUM_COLUMNS] the sum of the weights in
    every column, `acc` [M, E] the sum of weighted values. A row that sees nothing of the block
    keeps its state: its weights are 0, and what it had is scaled by 2^0. `total` sums the rounded
    weights that the values are multiplied by.
    """
    scores = tl.dot(q, tl.trans(k))
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
    shift = new_peak
    if MASKED:
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    minus = tl.broadcast_to(-shift[:, None], scores.shape)
    weights = tl.exp2(tl.fma(scores, tl.full(scores.shape, scale, tl.float32), minus))
    weights = weights.to(v.dtype)
    shrink = tl.exp2(peak - shift)[:, None]
    ones = tl.full((v.shape[0], total.shape[1]), 1.0, v.dtype)
    total = tl.dot(weights, ones, total * shrink)
    acc = tl.dot(weights, v, acc * shrink)
    return new_peak, total, acc


@triton.jit(do_not_specialize=["R", "T"])
def prefix_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    seq_len_ptr,
    depths_ptr,
    parts_ptr,
    stats_ptr,
    stride_kg,
    stride_ks,
    stride_vg,
    stride_vs,
    scale,
    R,
    T,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    SUM_COLUMNS: tl.constexpr,
    INT8: tl.constexpr,
    BLOCK_M: tl.constexpr,
    STAGES: tl.constexpr,
):
    """State of a block of query rows after the full committed blocks of one split.

    Row blocks vary fastest, so that those after the first find the keys in the cache. Blocks before
    the window of the root are before that of every row.
    """
    head = tl.program_id(1)
    split = tl.program_id(2)
    seq_len = tl.load(seq_len_ptr).to(tl.int32)
    begin = split * SPLIT
    if WINDOW > 0:
        begin = tl.maximum(begin, tl.maximum(seq_len - WINDOW + 1, 0) // BLOCK * BLOCK)
    end = tl.minimum(split * SPLIT + SPLIT, seq_len // BLOCK * BLOCK)
    if begin >= end:
        return
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    e = tl.arange(0, E_PAD)
    n = tl.arange(0, BLOCK)
    q = tl.load(
        q_ptr + (head * R + row)[:, None] * E + e[None, :],
        mask=(row < R)[:, None] & (e < E)[None, :],
        other=0.0,
    )
    first = tl.zeros((BLOCK_M,), tl.int32)  # position that the row's window begins with
    if WINDOW > 0:
        depth = tl.load(depths_ptr + row % T).to(tl.int32)
        first = seq_len + depth - (WINDOW - 1)
    k_head = k_ptr + head.to(tl.int64) * stride_kg
    v_head = v_ptr + head.to(tl.int64) * stride_vg
    k_at = k_head + n[:, None] * stride_ks + e[None, :]
    v_at = v_head + n[:, None] * stride_vs + e[None, :]
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M, SUM_COLUMNS), tl.float32)
    acc = tl.zeros((BLOCK_M, E_PAD), tl.float32)
    for start in tl.range(begin, end, BLOCK, num_stages=STAGES):
        if INT8:
            slot = start + n
            k = int8_rows(k_head + slot * stride_ks, e, slot < end, q, E)
            v = int8_rows(v_head + slot * stride_vs, e, slot < end, q, E)
        elif E == E_PAD:
            k = tl.load(k_at + start * stride_ks)
            v = tl.load(v_at + start * stride_vs)
        else:
            k = tl.load(k_at + start * stride_ks, mask=(e < E)[None, :], other=0.0)
            v = tl.load(v_at + start * stride_vs, mask=(e < E)[None, :], other=0.0)
        visible = (start + n)[None, :] >= first[:, None]
        peak, total, acc = _attend_block(q, k, v, peak, total, acc, visible, scale, WINDOW > 0)
    n_splits = tl.num_programs(2)
    at = (head * n_splits + split) * R + row
    tl.store(
        parts_ptr + at.to(tl.int64)[:, None] * E + e[None, :],
        acc,
        mask=(row < R)[:, None] & (e < E)[None, :],
    )
    tl.store(stats_ptr + at, peak, mask=row < R)
    totals_at = stats_ptr + tl.num_programs(1) * n_splits * R + at
    tl.store(totals_at, tl.max(total, 1), mask=row < R)  # its columns are equal


@triton.jit(do_not_specialize=["R", "T", "P", "n_splits"])
def finish_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    seq_len_ptr,
    depths_ptr,
    parts_ptr,
    stats_ptr,
    paths_ptr,
    out_ptr,
    stride_kg,
    stride_ks,
    stride_vg,
    stride_vs,
    scale,
    R,
    T,
    P,
    n_splits,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    SUM_COLUMNS: tl.constexpr,
    INT8: tl.constexpr,
    BY_ROWS: tl.constexpr,
):
    """The output of one tree row, up to 16 of its query heads at a time.

    Goes through the row's splits in order: takes the state that the first kernel left, if the split
    has full committed blocks that the row sees, adds the blocks that it left out, merges.
    """
    tree_row = tl.program_id(0)
    head = tl.program_id(1)
    member = tl.program_id(2) * 16 + tl.arange(0, 16)  # of the group of heads
    row = member * T + tree_row
    real = row < R
    e = tl.arange(0, E_PAD)
    n = tl.arange(0, BLOCK)
    inside = real[:, None] & (e < E)[None, :]
    seq_len = tl.load(seq_len_ptr).to(tl.int32)
    position = seq_len + tl.load(depths_ptr + tree_row).to(tl.int32)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(position - (WINDOW - 1), 0)
    done = seq_len // BLOCK * BLOCK  # the first kernel has been up to here
    q = tl.load(q_ptr + (head * R + row)[:, None] * E + e[None, :], mask=inside, other=0.0)
    k_head = k_ptr + head.to(tl.int64) * stride_kg
    v_head = v_ptr + head.to(tl.int64) * stride_vg
    peak = tl.full((16,), float("-inf"), tl.float32)
    total = tl.zeros((16, SUM_COLUMNS), tl.float32)
    acc = tl.zeros((16, E_PAD), tl.float32)
    for split in range(first // SPLIT, position // SPLIT + 1):
        begin = split * SPLIT
        end = tl.minimum(begin + SPLIT, done)
        stored = row < tl.where(tl.maximum(begin, first) < end, R, 0)
        at = (head * n_splits + split) * R + row
        part_peak = tl.load(stats_ptr + at, mask=stored, other=float("-inf"))
        totals_at = stats_ptr + tl.num_programs(1) * n_splits * R + at
        part_total = tl.load(totals_at, mask=stored, other=0.0)
        part_total = tl.broadcast_to(part_total[:, None], total.shape)
        part_acc = tl.load(
            parts_ptr + at.to(tl.int64)[:, None] * E + e[None, :],
            mask=stored[:, None] & (e < E)[None, :],
            other=0.0,
        )
        start = tl.maximum(tl.maximum(begin, done), first // BLOCK * BLOCK)
        for block in range(start, tl.minimum(begin + SPLIT, position + 1), BLOCK):
            key = block + n
            depth = key - seq_len
            seen = (key <= position) & (key >= first)
            own = tl.load(
                paths_ptr + tree_row * P + depth, mask=seen & (depth >= 0) & (depth < P), other=0
            )
            slot = tl.where(depth < 0, key, seq_len + own)
            # Of slots that the row does not see not even the values count: they may hold NaN.
            if INT8:
                k = int8_rows(k_head + slot * stride_ks, e, seen, q, E)
                v = int8_rows(v_head + slot * stride_vs, e, seen, q, E)
            else:
                mask = seen[:, None] & (e < E)[None, :]
                k = tl.load(k_head + slot[:, None] * stride_ks + e[None, :], mask=mask, other=0.0)
                v = tl.load(v_head + slot[:, None] * stride_vs + e[None, :], mask=mask, other=0.0)
            part_peak, part_total, part_acc = _attend_block(
                q, k, v, part_peak, part_total, part_acc, seen[None, :], scale, True
            )
        new_peak = tl.maximum(peak, part_peak)
        # -inf only in the spare rows of q: their output is dropped, but NaN would be slow to find.
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        old, new = tl.exp2(peak - shift)[:, None], tl.exp2(part_peak - shift)[:, None]
        total = tl.fma(part_total, tl.broadcast_to(new, total.shape), total * old)
        acc = tl.fma(part_acc, tl.broadcast_to(new, acc.shape), acc * old)
        peak = new_peak
    out = acc / tl.max(total, 1)[:, None]
    place = head * R + row  # of [G, group, T]
    if BY_ROWS:
        place = (tree_row * tl.num_programs(1) + head) * (R // T) + member  # of [T, G, group]
    tl.store(
        out_ptr + place[:, None] * E + e[None, :], out.to(out_ptr.dtype.element_ty), mask=inside
    )
