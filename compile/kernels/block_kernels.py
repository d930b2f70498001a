"""Triton kernels of a decoder block between its products: norms, RoPE; and of a commit.

Each kernel first adds up the partial sums [S, M, Np] of the product before it, in their order. A
row's bits do not depend on the number of rows: a program computes one row, blocks and warps are
fixed by the model's dims, and operations are fused only where the code says so.

Shapes: M rows, D model dim, S parts, Np columns of a part, H query heads, G KV heads, E head dim.
"""

# mypy: disallow-untyped-defs=False
# (what Triton compiles has no Python types)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fasteagle.compile.kernels.int8_kernels import UNIT, int8_values
from fasteagle.compile.kernels.rope_kernels import row_sums
from fasteagle.compile.kernels.sequence_kernels import keys_and_values
from fasteagle.compile.kernels.tree_kernels import Cache, Unrotated, cache_arguments

ONE_WARP = {"num_warps": 1, "enable_fp_fusion": False}


def norm_options(D: int) -> dict[str, object]:
    """Return launch options, which depend only on the width of a row.

    A thread has four neighbouring columns where that many threads exist: it loads them, and those
    of every part, at once. With 16 columns a row of 4,096 took 1.8 us longer on an H200.
    """
    warps = min(32, max(4, triton.next_power_of_2(D) // 128))
    return {"num_warps": warps, "enable_fp_fusion": False}


def add_norm(
    x: Tensor,
    parts: Tensor | None,
    scale: Tensor | None,
    eps: float,
    dtype: torch.dtype,
    limit: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return fp32 x [M, D] plus the sum of `parts`, and its RMSNorm by `scale` [D] in `dtype`.

    Without `scale` the second result is the first one in `dtype`; without `parts` the first is x.
    With `parts`, x may be one row [D], of any dtype, that is added to all rows. The second result
    is clamped to +-`limit` unless that is 0.
    """
    shape = x.shape if parts is None else (parts.shape[1], x.shape[-1])
    out = torch.empty(shape, dtype=dtype, device=x.device)
    return _norm(x, parts, scale, eps, out, limit), out


def _norm(
    x: Tensor,
    parts: Tensor | None,
    scale: Tensor | None,
    eps: float,
    out: Tensor | None,
    limit: float = 0.0,
) -> Tensor:
    D = x.shape[-1]
    M = len(x) if parts is None else parts.shape[1]
    total = x if parts is None else torch.empty(M, D, dtype=torch.float32, device=x.device)
    S, Np = (0, 0) if parts is None else (parts.shape[0], parts.shape[2])
    norm_kernel[(M,)](
        x,
        x if parts is None else parts,
        x if scale is None else scale,
        total,
        x if out is None else out,
        D,
        D if x.dim() == 2 else 0,
        Np,
        M * Np,
        eps,
        SPLIT=S,
        NORMED=scale is not None,
        STORED=out is not None,
        LIMIT=limit,
        BLOCK=triton.next_power_of_2(D),
        **norm_options(D),
    )
    return total


def add(x: Tensor, parts: Tensor) -> Tensor:
    """Return x + the sum of `parts`."""
    return _norm(x, parts, None, 0.0, None)


def rope(new: Unrotated, k_cache: Cache, v_cache: Cache) -> Tensor:
    """Return rotated queries [G, H / G * M, E]; write keys and values to their slots."""
    parts, bias, cos, sin, slots, n_head, dtype, q_norm, k_norm, eps = new
    S, M, Np = parts.shape
    G, E = k_cache.shape[0], cos.shape[2]
    pointers, strides, plane, shared = cache_arguments(k_cache, v_cache)
    q = torch.empty(G, n_head // G * M, E, dtype=dtype, device=parts.device)
    rope_kernel[(M, n_head + 2 * G)](
        parts,
        parts if bias is None else bias,
        parts if q_norm is None else q_norm,
        parts if k_norm is None else k_norm,
        cos,
        sin,
        slots,
        q,
        *pointers,
        slots if shared is None else shared.members,
        M,
        Np,
        M * Np,
        n_head,
        G,
        *strides,
        eps,
        plane,
        SPLIT=S,
        E=E,
        HALF=triton.next_power_of_2(E // 2),
        BIASED=bias is not None,
        NORMED=q_norm is not None,
        INT8=k_cache.dtype == torch.int8,
        SHARED=shared is not None,
        **ONE_WARP,
    )
    return q


def commit(rows: Tensor, start: Tensor, path: Tensor) -> None:
    """Copy slots `start + path` [n] to those from `start` on in all planes of `rows` [P, G, S, E].

    `path` ascends, and an entry is below its index only where nothing has to move (padding).
    """
    P, G, _, E = rows.shape
    commit_kernel[(P, G)](
        rows,
        start,
        path,
        len(path),
        *rows.stride()[:3],
        E=E,
        E_PAD=triton.next_power_of_2(E),
        **ONE_WARP,
    )


@triton.jit
def sum_of_parts(parts_at, stride_split, n, D, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    """Return columns `n` of a row's parts, added up in their order; `parts_at` is the first's."""
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLIT):
        total += tl.load(parts_at + split * stride_split + n, mask=n < D, other=0.0)
    return total


@triton.jit
def normed(x, scale, D, eps):
    """Return x / rms(x) * scale of one row, whose columns past D are zeros."""
    return x / tl.sqrt_rn(tl.sum(x * x, 0) / D + eps) * scale.to(tl.float32)


@triton.jit(do_not_specialize=["stride_split"])
def norm_kernel(
    x_ptr,
    parts_ptr,
    scale_ptr,
    total_ptr,
    out_ptr,
    D,
    stride_x,
    Np,
    stride_split,
    eps,
    SPLIT: tl.constexpr,
    NORMED: tl.constexpr,
    STORED: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute one row: x + parts[0] + parts[1] + ..., then x / rms(x) * scale."""
    row = tl.program_id(0)
    n = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride_x + n, mask=n < D, other=0.0).to(tl.float32)
    if NORMED:  # before the sums, which would delay it: it comes from memory, they from the cache
        scale = tl.load(scale_ptr + n, mask=n < D, other=0.0)
    if SPLIT > 0:
        x += sum_of_parts(parts_ptr + row * Np, stride_split, n, D, SPLIT, BLOCK)
        tl.store(total_ptr + row * D + n, x, mask=n < D)
    if NORMED:
        x = normed(x, scale, D, eps)
    if LIMIT > 0:
        x = tl.minimum(tl.maximum(x, -LIMIT), LIMIT)
    if STORED:
        tl.store(out_ptr + row * D + n, x.to(out_ptr.dtype.element_ty), mask=n < D)


@triton.jit(do_not_specialize=["M", "stride_split", "plane"])
def rope_kernel(
    parts_ptr,
    bias_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    members_ptr,
    M,
    Np,
    stride_split,
    n_head,
    G,
    stride_kg,
    stride_ks,
    stride_vg,
    stride_vs,
    eps,
    plane,
    SPLIT: tl.constexpr,
    E: tl.constexpr,
    HALF: tl.constexpr,
    BIASED: tl.constexpr,
    NORMED: tl.constexpr,
    INT8: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Compute one attention head of one row: queries first, then keys, then values.

    SHARED is as in `attention_kernels.finish_kernel`.
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    k_head = k_ptr + (head - n_head).to(tl.int64) * stride_kg
    v_head = v_ptr + (head - n_head - G).to(tl.int64) * stride_vg
    if SHARED:
        sequence = tl.load(members_ptr + row)
        if sequence < 0:
            return
        dtype: tl.constexpr = tl.int8 if INT8 else q_ptr.dtype.element_ty
        kv_head = (head - n_head) % G
        k_head, v_head = keys_and_values(k_ptr, sequence, plane, kv_head, dtype)
    e = tl.arange(0, HALF)
    real = e < E // 2
    first = tl.zeros((HALF,), tl.float32)
    second = tl.zeros((HALF,), tl.float32)
    for split in tl.static_range(SPLIT):
        at = parts_ptr + split * stride_split + row * Np + head * E + e
        first += tl.load(at, mask=real, other=0.0)
        second += tl.load(at + E // 2, mask=real, other=0.0)
    if BIASED:
        bias_at = bias_ptr + head * E + e
        first += tl.load(bias_at, mask=real, other=0.0).to(tl.float32)
        second += tl.load(bias_at + E // 2, mask=real, other=0.0).to(tl.float32)
    if head < n_head + G:
        if NORMED:
            norm_at = tl.where(head < n_head, q_norm_ptr, k_norm_ptr) + e
            lower = row_sums(tl.reshape(first * first, (1, HALF)), HALF)
            upper = row_sums(tl.reshape(second * second, (1, HALF)), HALF)
            rms = tl.sqrt_rn(tl.sum(lower + upper, 0) / E + eps)
            first = first / rms * tl.load(norm_at, mask=real, other=0.0).to(tl.float32)
            second = second / rms * tl.load(norm_at + E // 2, mask=real, other=0.0).to(tl.float32)
        cos = tl.load(cos_ptr + row * E + e, mask=real, other=0.0)
        sin = tl.load(sin_ptr + row * E + e, mask=real, other=0.0)
        turned = first * cos - second * sin
        second = second * cos + first * sin
        first = turned
    slot = tl.load(slots_ptr + row)
    first = first.to(q_ptr.dtype.element_ty)
    second = second.to(q_ptr.dtype.element_ty)
    if head < n_head:
        q_at = q_ptr + (head * M + row) * E + e
        tl.store(q_at, first, mask=real)
        tl.store(q_at + E // 2, second, mask=real)
    else:
        out = k_head + slot * stride_ks if head < n_head + G else v_head + slot * stride_vs
        if INT8:
            lower, upper = first.to(tl.float32), second.to(tl.float32)
            most = tl.maximum(tl.max(tl.abs(lower), 0), tl.max(tl.abs(upper), 0))
            scale = most * UNIT
            scales = tl.full((HALF,), 0.0, tl.float32) + scale
            tl.store(out + e, int8_values(lower, scales), mask=real)
            tl.store(out + E // 2 + e, int8_values(upper, scales), mask=real)
            tl.store((out + E).to(tl.pointer_type(tl.float32)), scale)
        else:
            tl.store(out + e, first, mask=real)
            tl.store(out + E // 2 + e, second, mask=real)


@triton.jit
def commit_kernel(
    rows_ptr,
    start_ptr,
    path_ptr,
    n,
    stride_plane,
    stride_head,
    stride_slot,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
):
    """Move the rows of one KV head of one plane.

    Slots ascend, so that each is read before it is written, and every element stays in its thread.
    """
    at = rows_ptr + tl.program_id(0).to(tl.int64) * stride_plane
    at += tl.program_id(1).to(tl.int64) * stride_head
    at += tl.load(start_ptr) * stride_slot
    e = tl.arange(0, E_PAD)
    for i in range(0, n):
        row = tl.load(path_ptr + i)
        moves = e < tl.where(row > i, E, 0)
        values = tl.load(at + row * stride_slot + e, mask=moves)
        tl.store(at + i * stride_slot + e, values, mask=moves)
