"""Triton kernels for the most likely children of a draft tree's nodes, in two launches.

Shapes: W rows, V vocabulary, C chunks of a row.
"""

# mypy: disallow-untyped-defs=False
# (what Triton compiles has no Python types)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 2048  # logits per program
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


def top_children(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return ids and log-probabilities [W, k] of each row's best, in descending order.

    Among equals the lowest id is first, NaN ranks last, and ids are always below V.
    """
    W, V = logits.shape
    C = triton.cdiv(V, CHUNK)
    parts = torch.empty(W, C, k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(W, C, k, dtype=torch.int32, device=logits.device)
    sums = torch.empty(2, W, C, dtype=torch.float32, device=logits.device)
    best = torch.empty(W, k, dtype=torch.int64, device=logits.device)
    logp = torch.empty(W, k, dtype=torch.float32, device=logits.device)
    chunk_kernel[(W, C)](
        logits, parts, ids, sums, V, logits.stride(0), W * C, K=k, CHUNK=CHUNK, **OPTIONS
    )
    merge_kernel[(W,)](
        parts,
        ids,
        sums,
        best,
        logp,
        C,
        W * C,
        K=k,
        C_PAD=triton.next_power_of_2(C),
        N_PAD=triton.next_power_of_2(C * k),
        **OPTIONS,
    )
    return best, logp


@triton.jit
def chunk_kernel(
    logits_ptr, parts_ptr, ids_ptr, sums_ptr, V, stride, WC, K: tl.constexpr, CHUNK: tl.constexpr
):
    """Compute the K best of a chunk of a row, its maximum, and the sum of exp(logit - maximum)."""
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    n = tl.arange(0, CHUNK)
    v = chunk * CHUNK + n
    x = tl.load(logits_ptr + row * stride + v, mask=v < V, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("-inf"))  # among NaN, compiled code may choose a lane past V
    at = row * tl.num_programs(1) + chunk
    peak = tl.max(x, 0)
    tl.store(sums_ptr + at, peak)
    shift = tl.where(peak == float("-inf"), 0.0, peak)  # a chunk may be masked as a whole
    tl.store(sums_ptr + WC + at, tl.sum(tl.exp(x - shift), 0))
    for i in range(0, K):
        best = tl.argmax(x, 0, tie_break_left=True)
        tl.store(parts_ptr + at * K + i, tl.max(x, 0))
        tl.store(ids_ptr + at * K + i, chunk * CHUNK + best)
        x = tl.where(n == best, float("-inf"), x)


@triton.jit
def merge_kernel(
    parts_ptr,
    ids_ptr,
    sums_ptr,
    best_ptr,
    logp_ptr,
    C,
    WC,
    K: tl.constexpr,
    C_PAD: tl.constexpr,
    N_PAD: tl.constexpr,
):
    """Compute the K best of a row from the chunks' best, which ascend in id at equal value."""
    row = tl.program_id(0)
    c = tl.arange(0, C_PAD)
    peaks = tl.load(sums_ptr + row * C + c, mask=c < C, other=float("-inf"))
    sums = tl.load(sums_ptr + WC + row * C + c, mask=c < C, other=0.0)
    peak = tl.max(peaks, 0)
    total = peak + tl.log(tl.sum(sums * tl.exp(peaks - peak), 0))
    n = tl.arange(0, N_PAD)
    x = tl.load(parts_ptr + row * C * K + n, mask=n < C * K, other=float("-inf"))
    for i in range(0, K):
        best = tl.argmax(x, 0, tie_break_left=True)
        tl.store(best_ptr + row * K + i, tl.load(ids_ptr + row * C * K + best).to(tl.int64))
        tl.store(logp_ptr + row * K + i, tl.max(x, 0) - total)
        x = tl.where(n == best, float("-inf"), x)
