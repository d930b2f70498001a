"""Triton kernels of SwiGLU between a block's products, where no product has computed it.

Gate and up alternate in the columns that they read. As in `block_kernels` a program computes one
row, whose bits do not depend on the number of rows.

Shapes: M rows, S parts, Np columns of a part, F FFN dim.
"""

# mypy: disallow-untyped-defs=False
# (what Triton compiles has no Python types)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fasteagle.quant.interleaved import LARGEST_EXPONENT
from fasteagle.quant.kernels import OPTIONS, SPAN
from fasteagle.quant.unpack_kernels import half_range, range_scales, swiglu

SPANS = 8  # spans of one program of `gate_kernel`
CHUNK = 1024  # columns that a program of `gate_row_kernel` computes at a time


def gate(parts: Tensor, accumulate: str) -> tuple[Tensor, Tensor]:
    """Compute `quant.kernels.gated` from partial sums of gate and up, whose columns alternate."""
    S, M, Np = parts.shape
    F = Np // 2
    out = torch.empty(M, F, dtype=torch.float16, device=parts.device)
    scales = torch.empty(F // SPAN, M, dtype=torch.float32, device=parts.device)
    gate_kernel[(M, triton.cdiv(F // SPAN, SPANS))](
        parts,
        out,
        scales,
        M,
        Np,
        M * Np,
        SPLIT=S,
        SPAN=SPAN,
        SPANS=SPANS,
        EXPONENT=LARGEST_EXPONENT[accumulate],
        **OPTIONS,
    )
    return out, scales


def gate_rows(sums: Tensor, accumulate: str) -> tuple[Tensor, Tensor]:
    """Compute `gate` of whole sums [M, 2 F], with one scale a row [M, 1] instead of one a span."""
    M, F = sums.shape[0], sums.shape[1] // 2
    out = torch.empty(M, F, dtype=torch.float16, device=sums.device)
    scales = torch.empty(M, 1, dtype=torch.float32, device=sums.device)
    gate_row_kernel[(M,)](
        sums,
        out,
        scales,
        F,
        CHUNK=min(CHUNK, triton.next_power_of_2(F)),
        EXPONENT=LARGEST_EXPONENT[accumulate],
        **OPTIONS,
    )
    return out, scales


@triton.jit(do_not_specialize=["M", "stride_split"])
def gate_kernel(
    parts_ptr,
    out_ptr,
    scales_ptr,
    M,
    Np,
    stride_split,
    SPLIT: tl.constexpr,
    SPAN: tl.constexpr,
    SPANS: tl.constexpr,
    EXPONENT: tl.constexpr,
):
    """Compute up to SPANS spans of one row."""
    row = tl.program_id(0)
    span = tl.program_id(1) * SPANS + tl.arange(0, SPANS)
    n = span[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
    real = n < Np // 2
    gates = tl.zeros((SPANS, SPAN), tl.float32)
    ups = tl.zeros((SPANS, SPAN), tl.float32)
    for split in tl.static_range(SPLIT):
        at = parts_ptr + split * stride_split + row * Np + 2 * n
        gates += tl.load(at, mask=real, other=0.0)
        ups += tl.load(at + 1, mask=real, other=0.0)
    values, scale = half_range(swiglu(gates, ups), EXPONENT)
    tl.store(out_ptr + row * (Np // 2) + n, values, mask=real)
    tl.store(scales_ptr + span * M + row, scale, mask=span < Np // 2 // SPAN)


@triton.jit
def gated_chunk(sums_at, n, F):
    """Return silu(gate) * up of columns `n` of a row, whose sums begin at `sums_at`."""
    gates = tl.load(sums_at + 2 * n, mask=n < F, other=0.0)
    ups = tl.load(sums_at + 2 * n + 1, mask=n < F, other=0.0)
    return swiglu(gates, ups)


@triton.jit
def gate_row_kernel(sums_ptr, out_ptr, scales_ptr, F, CHUNK: tl.constexpr, EXPONENT: tl.constexpr):
    """Compute one row: its largest value first, then all values by the scale for it."""
    row = tl.program_id(0).to(tl.int64)
    sums_at = sums_ptr + row * 2 * F
    n = tl.arange(0, CHUNK)
    largest = tl.zeros((CHUNK,), tl.float32)
    for at in range(0, F, CHUNK):
        largest = tl.maximum(largest, tl.abs(gated_chunk(sums_at, at + n, F)))
    scale, shrink = range_scales(tl.max(largest, 0), EXPONENT)
    for at in range(0, F, CHUNK):
        values = gated_chunk(sums_at, at + n, F) * shrink
        tl.store(out_ptr + row * F + at + n, values.to(tl.float16), mask=at + n < F)
    tl.store(scales_ptr + row, scale)
