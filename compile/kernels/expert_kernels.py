"""Triton kernels of a mixture of experts: router, grouping of rows by expert, experts' products.

A layer is four launches: norm and scores of all experts, the choice of experts, gate and up of the
chosen experts, and down. Nothing is read on the host. The grid of a product has a place for as many
experts as its rows can choose; programs of places that are not taken end at once, and a weight is
read once for all rows of its expert. The shared expert is a mixture of one expert for all rows.

The bits of a row do not depend on other rows: a product is never split along K, a row's sums are in
one order, and the results of its experts are added up in the order of their ids, by the kernel that
reads them.

Shapes: M rows, D model dim, X experts, k for each row, F FFN dim of one, P places.
"""

# mypy: disallow-untyped-defs=False
# (what Triton compiles has no Python types)

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fasteagle.compile.kernels.block_kernels import normed, sum_of_parts
from fasteagle.quant import kernels
from fasteagle.quant.interleaved import BLOCK_N, InterleavedWeight
from fasteagle.quant.kernels import SPAN, gated_halves, product
from fasteagle.quant.tiling import cut_rows

BLOCK_M = 16  # rows of an expert in one program
SCORES = 4  # experts of one program of `score_kernel`
UNFUSED = {"enable_fp_fusion": False}  # fused only where the code says so
ROUTE_ROWS = 8  # rows that `route_kernel` takes at a time, always: it decides the order of sums


def score_options(D: int) -> dict[str, object]:
    """Return launch options, which depend only on the width of a row."""
    return {"num_warps": min(16, max(1, triton.next_power_of_2(D) // 512)), **UNFUSED}


def route_options(n_expert: int) -> dict[str, object]:
    """Return launch options, which depend only on the number of experts."""
    return {"num_warps": 4 if n_expert <= 256 else 8, **UNFUSED}


class Routing(NamedTuple):
    """Rows of each chosen expert, in int32, and the weights of the experts.

    Slot `j M + m` belongs to the expert of row m with the j-th lowest id.
    """

    experts: Tensor  # [P], ids of the chosen experts, ascending, then -1
    counts: Tensor  # [P], rows of each of them, then 0
    slots: Tensor  # [X, M], those of an expert first, in the order of rows
    weights: Tensor  # [k M], fp32, by slot

    @classmethod
    def empty(cls, n_expert: int, top_k: int, M: int, device: torch.device) -> Routing:
        """Return a routing of M rows, without values."""

        def ints(*size: int) -> Tensor:
            return torch.empty(size, dtype=torch.int32, device=device)

        places, weights = min(n_expert, top_k * M), torch.empty(top_k * M, device=device)
        return cls(ints(places), ints(places), ints(n_expert, M), weights.float())


def norm_scores(
    x: Tensor, parts: Tensor, scale: Tensor, router: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return fp32 x [M, D] plus the sum of `parts`, its norm in fp16, and scores [M, R] in fp32.

    Scores are products of the norm, before it is rounded, with the rows of `router` [R, D].
    """
    (M, D), R = x.shape, len(router)
    S, _, Np = parts.shape
    total = torch.empty_like(x)
    out = torch.empty(M, D, dtype=torch.float16, device=x.device)
    scores = torch.empty(M, R, dtype=torch.float32, device=x.device)
    score_kernel[(M, triton.cdiv(R, SCORES))](
        x,
        parts,
        scale,
        router,
        total,
        out,
        scores,
        D,
        R,
        Np,
        M * Np,
        eps,
        SPLIT=S,
        BLOCK=triton.next_power_of_2(D),
        SCORES=SCORES,
        **score_options(D),
    )
    return total, out, scores


def route(
    scores: Tensor,
    n_expert: int,
    top_k: int,
    renormalizes: bool,
    scale: float,
    shares: bool,
    choice_bias: Tensor | None = None,
) -> tuple[Routing, Routing | None]:
    """Return each row's `top_k` experts by scores [M, R], and the routing of the shared expert.

    The choice is by probability plus `choice_bias` [X]; of equal ones the lower id wins. Weights
    are the softmax of all experts, or of the chosen ones if it `renormalizes`, times `scale`; that
    of the shared expert is the sigmoid of the score after the others, or 1 where R has none.
    """
    M, R = scores.shape
    routing = Routing.empty(n_expert, top_k, M, scores.device)
    shared = Routing.empty(1, 1, M, scores.device) if shares else None
    route_kernel[(1,)](
        scores,
        scores if choice_bias is None else choice_bias,
        *routing,
        *(shared or routing),
        M,
        R,
        n_expert,
        len(routing.experts),
        scale,
        TOP_K=top_k,
        RENORMALIZES=renormalizes,
        BIASED=choice_bias is not None,
        SHARES=shares,
        GATED=n_expert < R,
        ROWS=ROUTE_ROWS,
        X_PAD=max(16, triton.next_power_of_2(n_expert)),
        **route_options(n_expert),
    )
    return routing, shared


def gated(
    x: Tensor, weight: InterleavedWeight, routing: Routing, accumulate: str
) -> tuple[Tensor, Tensor]:
    """Return silu(gate) * up [k M, F] in fp16 for fp16 x [M, D], and scales [F / SPAN, k M].

    Of the rows that an expert has in `weight`, even ones belong to gate, odd ones to up.
    """
    n_slots, N = len(routing.weights), weight.N // len(routing.slots)
    out = x.new_empty(n_slots, N // 2)
    scales = x.new_empty(N // 2 // SPAN, n_slots, dtype=torch.float32)
    _launch(x, weight, routing, accumulate, out, scales, None)
    return out, scales


def weighted(
    values: Tensor,
    scales: Tensor,
    weight: InterleavedWeight,
    routing: Routing,
    accumulate: str,
    parts: Tensor,
) -> None:
    """Store the weighted results of the experts in `parts` [k, M, D], for results of `gated`."""
    _launch(values, weight, routing, accumulate, parts, scales, scales)


def constants(weight: InterleavedWeight, accumulate: str, scaled: bool) -> dict[str, object]:
    """Return the compile-time constants of `expert_kernel`: of down if `scaled`."""
    cut = cut_rows(weight.layout, BLOCK_M, BLOCK_M, split=1)
    return kernels.constants(weight, cut, accumulate, scaled, gated=not scaled)


def _launch(
    x: Tensor,
    weight: InterleavedWeight,
    routing: Routing,
    accumulate: str,
    out: Tensor,
    out_scales: Tensor,
    scales: Tensor | None,
) -> None:
    n_expert, M = routing.slots.shape
    N, Np = weight.N // n_expert, weight.words.shape[1]
    assert N % BLOCK_N == 0 and N * n_expert == Np, "an expert is a number of whole blocks"
    grid = triton.cdiv(M, BLOCK_M), N // BLOCK_N, len(routing.experts)
    expert_kernel[grid](
        x,
        weight.words,
        weight.params,
        out,
        out_scales if scales is None else scales,
        out_scales,
        *routing,
        M,
        len(routing.weights),
        N,
        out.shape[-1],
        Np,
        x.shape[1],
        x.shape[1] // weight.layout.tile,
        **constants(weight, accumulate, scales is not None),
        **kernels.OPTIONS,
    )


@triton.jit(do_not_specialize=["stride_split"])
def score_kernel(
    x_ptr,
    parts_ptr,
    scale_ptr,
    router_ptr,
    total_ptr,
    out_ptr,
    scores_ptr,
    D,
    R,
    Np,
    stride_split,
    eps,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    SCORES: tl.constexpr,
):
    """Compute the norm of one row, and its products with a few rows of the router."""
    row = tl.program_id(0)
    n = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * D + n, mask=n < D, other=0.0)
    scale = tl.load(scale_ptr + n, mask=n < D, other=0.0)
    x += sum_of_parts(parts_ptr + row * Np, stride_split, n, D, SPLIT, BLOCK)
    y = normed(x, scale, D, eps)
    if tl.program_id(1) == 0:
        tl.store(total_ptr + row * D + n, x, mask=n < D)
        tl.store(out_ptr + row * D + n, y.to(out_ptr.dtype.element_ty), mask=n < D)
    r = tl.program_id(1) * SCORES + tl.arange(0, SCORES)
    real = (r < R)[:, None] & (n < D)[None, :]
    weights = tl.load(router_ptr + r[:, None] * D + n[None, :], mask=real, other=0.0)
    tl.store(scores_ptr + row * R + r, tl.sum(weights * y[None, :], 1), mask=r < R)


@triton.jit(do_not_specialize=["M", "P"])
def route_kernel(
    scores_ptr,
    choice_bias_ptr,
    experts_ptr,
    counts_ptr,
    slots_ptr,
    weights_ptr,
    shared_experts_ptr,
    shared_counts_ptr,
    shared_slots_ptr,
    shared_weights_ptr,
    M,
    R,
    X,
    P,
    factor,
    TOP_K: tl.constexpr,
    RENORMALIZES: tl.constexpr,
    BIASED: tl.constexpr,
    SHARES: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    X_PAD: tl.constexpr,
):
    """Choose the experts of all rows, and list the rows of each expert; one program.

    Keys are the ranks as integers of the same order, above the ids in reverse: no two are equal,
    and whatever a rank is, so many experts are chosen.
    """
    x = tl.arange(0, X_PAD)
    counts = tl.zeros((X_PAD,), tl.int32)
    for first in range(0, M, ROWS):
        row = first + tl.arange(0, ROWS)
        real = (row < M)[:, None] & (x < X)[None, :]
        at = scores_ptr + row[:, None] * R + x[None, :]
        scores = tl.load(at, mask=real, other=float("-inf"))
        powers = tl.exp(scores - tl.max(scores, 1)[:, None])
        ranks = scores
        if BIASED:
            bias = tl.load(choice_bias_ptr + x, mask=x < X, other=0.0)
            ranks = powers / tl.sum(powers, 1)[:, None] + bias[None, :]
        bits = (ranks + 0.0).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
        ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
        keys = (ordered << 32) | (X_PAD - 1 - x).to(tl.int64)[None, :]
        keys = tl.where((x < X)[None, :], keys, -0x8000000000000000)
        left = keys
        for _ in range(TOP_K):
            left = tl.where(left == tl.max(left, 1)[:, None], -0x8000000000000000, left)
        chosen = (left != keys) & real
        if RENORMALIZES:  # those chosen by their bias may be far below the largest
            largest = tl.max(tl.where(chosen, scores, float("-inf")), 1)
            powers = tl.where(chosen, tl.exp(scores - largest[:, None]), 0.0)
        total = tl.sum(powers, 1)
        ones = chosen.to(tl.int32)
        slot = (tl.cumsum(ones, 1) - ones) * M + row[:, None]
        tl.store(weights_ptr + slot, powers / total[:, None] * factor, mask=chosen)
        before = counts[None, :] + tl.cumsum(ones, 0) - ones
        tl.store(slots_ptr + x[None, :] * M + before, slot, mask=chosen)
        counts += tl.sum(ones, 0)
        if SHARES:
            gate = tl.full((ROWS,), 1.0, tl.float32)
            if GATED:
                gate = 1.0 / (1.0 + tl.exp(-tl.load(scores_ptr + row * R + X, mask=row < M)))
            tl.store(shared_weights_ptr + row, gate, mask=row < M)
            tl.store(shared_slots_ptr + row, row, mask=row < M)
    used = (counts > 0).to(tl.int32)
    place = tl.cumsum(used, 0) - used
    tl.store(experts_ptr + place, x, mask=used > 0)
    tl.store(counts_ptr + place, counts, mask=used > 0)
    left_over = (x >= tl.sum(used, 0)) & (x < P)
    tl.store(experts_ptr + x, -1, mask=left_over)
    tl.store(counts_ptr + x, 0, mask=left_over)
    if SHARES:
        tl.store(shared_experts_ptr, 0)
        tl.store(shared_counts_ptr, M)


@triton.jit(do_not_specialize=["M", "n_slots", "tiles"])
def expert_kernel(
    x_ptr,
    words_ptr,
    params_ptr,
    out_ptr,
    scales_ptr,
    out_scales_ptr,
    experts_ptr,
    counts_ptr,
    slots_ptr,
    weights_ptr,
    M,
    n_slots,
    N,
    out_columns,
    Np,
    Kp,
    tiles,
    BITS: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    OFFSETS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FP16: tl.constexpr,
    UNIT: tl.constexpr,
    STAGES: tl.constexpr,
    ROW_SCALES: tl.constexpr,
    GATED: tl.constexpr,
    EXPONENT: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Compute a block of rows and columns of one expert: gated values, or weighted results.

    Gate and up read rows of x, and down the slots that they have written.
    """
    expert = tl.load(experts_ptr + tl.program_id(2))
    count = tl.load(counts_ptr + tl.program_id(2))
    i = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    if tl.program_id(0) * BLOCK_M >= count:
        return
    # Rows past the last one read it again, as in `interleaved_kernel`.
    slot = tl.load(slots_ptr + expert * M + tl.minimum(i, count - 1))
    read = slot % M if GATED else slot
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = expert * N + n
    acc = product(
        x_ptr + read[:, None] * Kp,
        words_ptr + column[None, :],
        params_ptr + column,
        scales_ptr + slot[:, None],
        0,
        tiles,
        Np,
        n_slots,
        BITS,
        TILE,
        GROUP,
        OFFSETS,
        BLOCK_M,
        BLOCK_N,
        FP16,
        UNIT,
        STAGES,
        ROW_SCALES,
        SPAN,
    )
    if GATED:
        values, scale = gated_halves(acc, EXPONENT)
        n = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
        at = out_ptr + slot[:, None] * out_columns + n[None, :]
        tl.store(at, values, mask=(i < count)[:, None])
        tl.store(out_scales_ptr + tl.program_id(1) * n_slots + slot, scale, mask=i < count)
    else:
        acc *= tl.load(weights_ptr + slot)[:, None]
        at = out_ptr + slot[:, None] * out_columns + n[None, :]
        tl.store(at, acc, mask=(i < count)[:, None])
