"""Triton kernels for rows of several sequences in one pass: what each row is, and where its cache.

A table of numbers on the device describes the sequences: one row of `FIELDS` for each, with the
addresses of its tensors. `gather_kernel` reads it and lays out the rows of all sequences, one after
the other; other kernels take the addresses of caches from it. So one captured graph runs for any
sequences, whatever trees and caches they have.

Shapes: B sequences in the table, M rows of a pass, N blocks of query rows, P columns of a path
table, group query heads of a KV head.
"""

# mypy: disallow-untyped-defs=False
# (what Triton compiles has no Python types)

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_FIELDS = tl.constexpr(4)
# Fields of a sequence in the table.
SIZE = tl.constexpr(0)  # number of its rows; 0: there is no such sequence
SEQ_LEN = tl.constexpr(1)  # addresses: of int64, its rows' tokens and depths, int32 paths
TOKENS = tl.constexpr(2)
DEPTHS = tl.constexpr(3)
PATHS = tl.constexpr(4)
PATH_COLUMNS = tl.constexpr(5)
CACHE = tl.constexpr(6)  # address of `KVCache.rows`
PLANE_STRIDE = tl.constexpr(7)  # of the cache, in bytes
HEAD_STRIDE = tl.constexpr(8)
FIELDS = tl.constexpr(9)
OPTIONS = {"num_warps": 1, "enable_fp_fusion": False}


class Sequences(NamedTuple):
    """Rows of several sequences, as `gather` lays them out. Padding rows come last."""

    table: Tensor  # [B, FIELDS] int64
    tokens: Tensor  # [M], of padding 0
    positions: Tensor  # [M], of padding 0
    slots: Tensor  # [M], slots of the sequence's own cache
    depths: Tensor  # [M]
    paths: Tensor  # [M, P] int32: rows as the sequence counts them, see `TreeView`
    members: Tensor  # [M] int32: sequence of a row, -1: padding
    seq_lens: Tensor  # [B]
    blocks: Tensor  # [N, 4] int32: sequence (-1: none), its first row, its rows, first query row


def n_blocks(n_rows: int, n_sequences: int, group: int, block: int) -> int:
    """Return the most blocks that `n_rows` rows of up to `n_sequences` sequences are cut into."""
    n_sequences = min(n_sequences, n_rows)
    return n_sequences + (group * n_rows - n_sequences) // block


def empty(table: Tensor, n_rows: int, n_columns: int, n_blocks: int) -> Sequences:
    """Return memory for `gather`: M rows, paths of P columns, N blocks.

    No row belongs to a sequence yet, so that kernels read no cache.
    """
    small = functools.partial(torch.zeros, dtype=torch.int32, device=table.device)
    tokens, positions, slots, depths = (table.new_zeros(n_rows) for _ in range(4))
    return Sequences(
        table=table,
        tokens=tokens,
        positions=positions,
        slots=slots,
        depths=depths,
        paths=small(n_rows, n_columns),
        members=small(n_rows).fill_(-1),
        seq_lens=table.new_zeros(len(table)),
        blocks=small(n_blocks, int(BLOCK_FIELDS)).fill_(-1),
    )


def gather(into: Sequences, group: int, block: int) -> None:
    """Lay out the rows of the sequences in the table, in one launch.

    `block` is the number of query rows in a block; a block has rows of one sequence.
    """
    B, M, N = len(into.table), len(into.members), len(into.blocks)
    gather_kernel[(max(B, M, N),)](
        *into,
        M,
        N,
        group,
        P=into.paths.shape[1],
        P_PAD=triton.next_power_of_2(into.paths.shape[1]),
        B=B,
        BLOCK_M=block,
        **OPTIONS,
    )


@triton.jit
def keys_and_values(table_ptr, sequence, plane, head, dtype: tl.constexpr):
    """Return pointers to a head's keys, in plane `plane` of a cache, and values, in the next one.

    Only on the address itself the compiler keeps the hint that whole pieces can be loaded.
    """
    at = table_ptr + sequence * FIELDS
    stride = tl.load(at + PLANE_STRIDE)
    keys = tl.load(at + CACHE) + plane * stride + head * tl.load(at + HEAD_STRIDE)
    values = (keys + stride).to(tl.pointer_type(dtype))
    keys = keys.to(tl.pointer_type(dtype))
    return tl.multiple_of(keys, 16), tl.multiple_of(values, 16)


@triton.jit
def _within(sizes, i, B: tl.constexpr):
    """Return which of `sizes` [B] items in a row has element i (0 if none), its begin, whether."""
    s = tl.arange(0, B)
    earlier = s[:, None] < s[None, :]
    begins = tl.sum(tl.where(earlier, sizes[:, None], 0), 0)
    begins = tl.sum(tl.where(s[:, None] == s[None, :], begins[None, :], 0), 1)  # as `sizes` lie
    own = (begins <= i) & (i < begins + sizes)
    item = tl.sum(tl.where(own, s, 0), 0)
    begin = tl.sum(tl.where(own, begins, 0), 0)
    return item, begin, tl.sum(tl.where(own, 1, 0), 0) > 0


@triton.jit(do_not_specialize=["M", "N", "group"])
def gather_kernel(
    table_ptr,
    tokens_ptr,
    positions_ptr,
    slots_ptr,
    depths_ptr,
    paths_ptr,
    members_ptr,
    seq_lens_ptr,
    blocks_ptr,
    M,
    N,
    group,
    P: tl.constexpr,
    P_PAD: tl.constexpr,
    B: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Write row i, block i and the length of sequence i."""
    i = tl.program_id(0)
    whole = tl.pointer_type(tl.int64)
    sizes = tl.load(table_ptr + tl.arange(0, B) * FIELDS + SIZE).to(tl.int32)
    sequence, begin, real = _within(sizes, i, B)
    at = table_ptr + sequence * FIELDS
    row = i - begin
    inside = real & (i < M)
    seq_len = tl.load(tl.load(at + SEQ_LEN).to(whole), mask=inside, other=0)
    token = tl.load(tl.load(at + TOKENS).to(whole) + row, mask=inside, other=0)
    depth = tl.load(tl.load(at + DEPTHS).to(whole) + row, mask=inside, other=0)
    tl.store(tokens_ptr + i, token, mask=i < M)
    tl.store(positions_ptr + i, seq_len + depth, mask=i < M)
    tl.store(slots_ptr + i, tl.where(real, seq_len + row, 0), mask=i < M)
    tl.store(depths_ptr + i, depth, mask=i < M)
    tl.store(members_ptr + i, tl.where(real, sequence, -1), mask=i < M)
    p = tl.arange(0, P_PAD)
    columns = tl.load(at + PATH_COLUMNS).to(tl.int32)
    path_at = tl.load(at + PATHS).to(tl.pointer_type(tl.int32)) + row * columns
    path = tl.load(path_at + p, mask=inside & (p < columns), other=0)
    tl.store(paths_ptr + i * P + p, path, mask=(i < M) & (p < P))
    if i < B:
        at = table_ptr + i * FIELDS
        exists = tl.load(at + SIZE) > 0
        seq_len = tl.load(tl.load(at + SEQ_LEN).to(whole), mask=exists, other=0)
        tl.store(seq_lens_ptr + i, seq_len)
    if i < N:
        sequence, first, real = _within((sizes * group + BLOCK_M - 1) // BLOCK_M, i, B)
        s = tl.arange(0, B)
        start = tl.sum(tl.where(s < sequence, sizes, 0), 0)
        size = tl.sum(tl.where(s == sequence, sizes, 0), 0)
        block_at = blocks_ptr + i * BLOCK_FIELDS
        tl.store(block_at, tl.where(real, sequence, -1))
        tl.store(block_at + 1, start)
        tl.store(block_at + 2, size)
        tl.store(block_at + 3, (i - first) * BLOCK_M)
