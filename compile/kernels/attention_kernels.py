"""Triton kernels of a draft tree's attention, which `tree_kernels` launches.

Shapes: T tree rows, G KV heads, R = group * T query rows of a KV head, E head dim, S cache slots,
Np columns of the product with query, key and value.
"""

# mypy: disallow-untyped-defs=False
# (what Triton compiles has no Python types)

from __future__ import annotations

import triton
import triton.language as tl

from fasteagle.compile.kernels.int8_kernels import int8_rows, write_rows
from fasteagle.compile.kernels.rope_kernels import turned_rows
from fasteagle.compile.kernels.sequence_kernels import BLOCK_FIELDS, keys_and_values


@triton.jit
def _attend_block(q, k, v, peak, total, acc, visible, scale, MASKED: tl.constexpr):
    """Compute one step of online softmax: q [M, E] over k, v [BLOCK, E], in units of log2.

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


@triton.jit(do_not_specialize=["R", "T", "n_parts", "plane"])
def prefix_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    seq_len_ptr,
    depths_ptr,
    parts_ptr,
    stats_ptr,
    sums_ptr,
    bias_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    q_norm_ptr,
    k_norm_ptr,
    blocks_ptr,
    stride_kg,
    stride_ks,
    stride_vg,
    stride_vs,
    scale,
    eps,
    R,
    T,
    Np,
    n_parts,
    plane,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    SUM_COLUMNS: tl.constexpr,
    INT8: tl.constexpr,
    BLOCK_M: tl.constexpr,
    STAGES: tl.constexpr,
    ROPE: tl.constexpr,
    BIASED: tl.constexpr,
    NORMED: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Compute the state of a block of query rows after the full committed blocks of one split.

    Row blocks vary fastest, so that those after the first find the keys in the cache. Blocks before
    the window of the root are before the window of every row.

    With ROPE the queries are not computed yet: `sums` [n_parts, T, Np] add up to queries, keys and
    values. Each program makes the queries it needs. One more program after those of the splits
    does no attention, but writes queries, keys and values for `finish_kernel`. No program of this
    kernel reads the slots that it writes, because they are not committed.

    SHARED: the rows are those of several sequences (`sequence_kernels.Sequences`). `k` is then the
    table with their caches, in which keys are plane `plane`, `seq_len` is [B], and `blocks` says
    which rows of which sequence a program has.
    """
    head = tl.program_id(1)
    split = tl.program_id(2)
    n_splits = tl.num_programs(2)
    group = R // T
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    e = tl.arange(0, E_PAD)
    member, tree_row, real = row // T, row % T, row < R
    new_row, is_new = row, row < T  # of keys and values that are written
    k_head = k_ptr + head.to(tl.int64) * stride_kg
    v_head = v_ptr + head.to(tl.int64) * stride_vg
    if SHARED:
        block_at = blocks_ptr + tl.program_id(0) * BLOCK_FIELDS
        sequence = tl.load(block_at)
        if sequence < 0:
            return
        first_row, n_rows = tl.load(block_at + 1), tl.load(block_at + 2)
        own = tl.load(block_at + 3) + tl.arange(0, BLOCK_M)
        member, tree_row, real = own // n_rows, first_row + own % n_rows, own < group * n_rows
        new_row, is_new = first_row + own, own < n_rows
        row = member * T + tree_row
        dtype: tl.constexpr = tl.int8 if INT8 else q_ptr.dtype.element_ty
        k_head, v_head = keys_and_values(k_ptr, sequence, plane, head, dtype)
        seq_len_ptr += sequence
    if ROPE:
        n_splits -= 1
        if split == n_splits:
            inside = real[:, None] & (e < E)[None, :]
            column = (head * group + member) * E
            q = turned_rows(
                sums_ptr, bias_ptr, cos_ptr, sin_ptr, q_norm_ptr, tree_row, column, real, T, Np,
                n_parts, eps, E, E_PAD, BIASED, NORMED, True,
            )  # fmt: skip
            q_at = q_ptr + (head * R + row)[:, None] * E + e[None, :]
            tl.store(q_at, q.to(q_ptr.dtype.element_ty), mask=inside)
            heads = tl.num_programs(1)
            column = (heads * group + head + row * 0) * E
            slot = tl.load(slots_ptr + new_row, mask=is_new, other=0)
            k = turned_rows(
                sums_ptr, bias_ptr, cos_ptr, sin_ptr, k_norm_ptr, new_row, column, is_new, T, Np,
                n_parts, eps, E, E_PAD, BIASED, NORMED, True,
            )  # fmt: skip
            k_at = k_head + slot * stride_ks
            write_rows(k_at, e, is_new, k, q_ptr.dtype.element_ty, E, INT8)
            v = turned_rows(
                sums_ptr, bias_ptr, cos_ptr, sin_ptr, k_norm_ptr, new_row, column + heads * E,
                is_new, T, Np, n_parts, eps, E, E_PAD, BIASED, NORMED, False,
            )  # fmt: skip
            v_at = v_head + slot * stride_vs
            write_rows(v_at, e, is_new, v, q_ptr.dtype.element_ty, E, INT8)
            return
    seq_len = tl.load(seq_len_ptr).to(tl.int32)
    begin = split * SPLIT
    if WINDOW > 0:
        begin = tl.maximum(begin, tl.maximum(seq_len - WINDOW + 1, 0) // BLOCK * BLOCK)
    end = tl.minimum(split * SPLIT + SPLIT, seq_len // BLOCK * BLOCK)
    if begin >= end:
        return
    n = tl.arange(0, BLOCK)
    if ROPE:
        column = (head * group + member) * E
        q = turned_rows(
            sums_ptr, bias_ptr, cos_ptr, sin_ptr, q_norm_ptr, tree_row, column, real, T, Np,
            n_parts, eps, E, E_PAD, BIASED, NORMED, True,
        )  # fmt: skip
        q = q.to(q_ptr.dtype.element_ty)
    else:
        q = tl.load(
            q_ptr + (head * R + row)[:, None] * E + e[None, :],
            mask=real[:, None] & (e < E)[None, :],
            other=0.0,
        )
    first = tl.zeros((BLOCK_M,), tl.int32)  # first position of the row's window
    if WINDOW > 0:
        depth = tl.load(depths_ptr + tree_row).to(tl.int32)
        first = seq_len + depth - (WINDOW - 1)
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
    at = (head * n_splits + split) * R + row
    tl.store(
        parts_ptr + at.to(tl.int64)[:, None] * E + e[None, :],
        acc,
        mask=real[:, None] & (e < E)[None, :],
    )
    tl.store(stats_ptr + at, peak, mask=real)
    totals_at = stats_ptr + tl.num_programs(1) * n_splits * R + at
    tl.store(totals_at, tl.max(total, 1), mask=real)  # all columns are equal


@triton.jit
def _store_row(
    out_ptr,
    out,
    tree_row,
    head,
    R,
    T,
    e,
    E: tl.constexpr,
    BY_ROWS: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Store the output [HEADS, E_PAD] of some query heads of a tree row."""
    member = tl.program_id(2) * HEADS + tl.arange(0, HEADS)  # of the group of query heads
    row = member * T + tree_row
    place = head * R + row  # of [G, group, T]
    if BY_ROWS:
        place = (tree_row * tl.num_programs(1) + head) * (R // T) + member  # of [T, G, group]
    tl.store(
        out_ptr + place[:, None] * E + e[None, :], out, mask=(row < R)[:, None] & (e < E)[None, :]
    )


@triton.jit(do_not_specialize=["R", "T", "P", "n_splits", "plane"])
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
    members_ptr,
    stride_kg,
    stride_ks,
    stride_vg,
    stride_vs,
    scale,
    R,
    T,
    P,
    n_splits,
    plane,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    SUM_COLUMNS: tl.constexpr,
    INT8: tl.constexpr,
    BY_ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Compute the output of one tree row, HEADS of its query heads at a time.

    The 16 rows of a product are these heads for each of 16 / HEADS splits, which wait for memory
    together: the first kernel's states, if the split has full committed blocks that the row sees,
    and the blocks that are missing in them. Each of the 16 rows merges every 16 / HEADS-th split in
    ascending order, and at the end the rows of a head are added up.

    SHARED is as in `prefix_kernel`; `members` says which sequence a row belongs to. Rows of none
    become 0.
    """
    tree_row = tl.program_id(0)
    head = tl.program_id(1)
    SPLITS: tl.constexpr = 16 // HEADS  # at a time
    m = tl.arange(0, 16)
    row = (tl.program_id(2) * HEADS + m % HEADS) * T + tree_row
    real = row < R
    e = tl.arange(0, E_PAD)
    n = tl.arange(0, BLOCK)
    inside = real[:, None] & (e < E)[None, :]
    k_head = k_ptr + head.to(tl.int64) * stride_kg
    v_head = v_ptr + head.to(tl.int64) * stride_vg
    if SHARED:
        sequence = tl.load(members_ptr + tree_row)
        if sequence < 0:
            none = tl.zeros((HEADS, E_PAD), out_ptr.dtype.element_ty)
            _store_row(out_ptr, none, tree_row, head, R, T, e, E, BY_ROWS, HEADS)
            return
        dtype: tl.constexpr = tl.int8 if INT8 else q_ptr.dtype.element_ty
        k_head, v_head = keys_and_values(k_ptr, sequence, plane, head, dtype)
        seq_len_ptr += sequence
    seq_len = tl.load(seq_len_ptr).to(tl.int32)
    position = seq_len + tl.load(depths_ptr + tree_row).to(tl.int32)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(position - (WINDOW - 1), 0)
    done = seq_len // BLOCK * BLOCK  # the first kernel has computed all before it
    q = tl.load(q_ptr + (head * R + row)[:, None] * E + e[None, :], mask=inside, other=0.0)
    peak = tl.full((16,), float("-inf"), tl.float32)
    total = tl.zeros((16,), tl.float32)
    acc = tl.zeros((16, E_PAD), tl.float32)
    STEP: tl.constexpr = SPLITS * SPLIT
    for begin in range(first // STEP * STEP, position + 1, STEP):
        split = begin // SPLIT + m // HEADS
        end = tl.minimum(split * SPLIT + SPLIT, done)
        stored = real & (tl.maximum(split * SPLIT, first) < end)
        at = (head * n_splits + split) * R + row
        part_peak = tl.load(stats_ptr + at, mask=stored, other=float("-inf"))
        totals_at = stats_ptr + tl.num_programs(1) * n_splits * R + at
        part_total = tl.load(totals_at, mask=stored, other=0.0)
        part_total = tl.broadcast_to(part_total[:, None], (16, SUM_COLUMNS))
        part_acc = tl.load(
            parts_ptr + at.to(tl.int64)[:, None] * E + e[None, :],
            mask=stored[:, None] & (e < E)[None, :],
            other=0.0,
        )
        start = tl.maximum(tl.maximum(begin, done), first // BLOCK * BLOCK)
        for block in range(start, tl.minimum(begin + STEP, position + 1), BLOCK):
            key = block + n
            depth = key - seq_len
            seen = (key <= position) & (key >= first)
            own = tl.load(
                paths_ptr + tree_row * P + depth, mask=seen & (depth >= 0) & (depth < P), other=0
            )
            slot = tl.where(depth < 0, key, seq_len + own)
            # Values in slots that the row does not see are masked too: they may hold NaN.
            if INT8:
                k = int8_rows(k_head + slot * stride_ks, e, seen, q, E)
                v = int8_rows(v_head + slot * stride_vs, e, seen, q, E)
            else:
                mask = seen[:, None] & (e < E)[None, :]
                k = tl.load(k_head + slot[:, None] * stride_ks + e[None, :], mask=mask, other=0.0)
                v = tl.load(v_head + slot[:, None] * stride_vs + e[None, :], mask=mask, other=0.0)
            visible = seen[None, :] & (split == block // SPLIT)[:, None]
            part_peak, part_total, part_acc = _attend_block(
                q, k, v, part_peak, part_total, part_acc, visible, scale, True
            )
        new_peak = tl.maximum(peak, part_peak)
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        old, new = tl.exp2(peak - shift), tl.exp2(part_peak - shift)
        total = tl.fma(tl.max(part_total, 1), new, total * old)  # all columns are equal
        acc = tl.fma(part_acc, tl.broadcast_to(new[:, None], acc.shape), acc * old[:, None])
        peak = new_peak
    peaks = tl.reshape(peak, (SPLITS, HEADS))
    weights = tl.exp2(peaks - tl.max(peaks, 0)[None, :])  # the last split is seen: never -inf
    total = tl.sum(tl.reshape(total, (SPLITS, HEADS)) * weights, 0)
    acc = tl.sum(tl.reshape(acc, (SPLITS, HEADS, E_PAD)) * weights[:, :, None], 0)
    out = acc / total[:, None]
    out = out.to(out_ptr.dtype.element_ty)
    _store_row(out_ptr, out, tree_row, head, R, T, e, E, BY_ROWS, HEADS)
