"""Read and write rows of an int8 KV cache in Triton kernels; see `int8_cache`.

Shapes: BLOCK keys, E head dim, E_PAD the next power of two.
"""

# mypy: disallow-untyped-defs=False
# (what Triton compiles has no Python types)

from __future__ import annotations

import triton
import triton.language as tl

from fasteagle.compile import int8_cache

UNIT = tl.constexpr(int8_cache.UNIT)


@triton.jit
def int8_rows(rows, e, seen, like, E: tl.constexpr):
    """Load keys or values [BLOCK, E_PAD], in the dtype of `like`, of rows at the pointers `rows`.

    The scale of a row follows its values. The results are those of `int8_cache.dense_rows`; a
    product adds them up in another order than keys of a dense cache, because a thread loads four
    neighbours, but in both kernels in the same one. Rows that are not `seen` become 0, because they
    may hold NaN.
    """
    mask = seen[:, None] & (e < E)[None, :]
    values = tl.load(rows[:, None] + e[None, :], mask=mask, other=0)
    scales = tl.load((rows + E).to(tl.pointer_type(tl.float32)), mask=seen, other=0.0)
    return (values.to(tl.float32) * scales[:, None]).to(like.dtype)


@triton.jit
def int8_values(values, scales):
    """Round fp32 `values` to nearest units of `scales`, halves to even, like torch."""
    units = tl.div_rn(values, tl.maximum(scales, 1e-30))
    return ((units + 12582912.0) - 12582912.0).to(tl.int8)  # 1.5 * 2^23: leaves no fraction bits


@triton.jit
def write_rows(rows, e, real, values, like, E: tl.constexpr, INT8: tl.constexpr):
    """Store `values` [BLOCK, E_PAD] in the rows at the pointers `rows`, where `real`.

    The bits are those of `int8_cache.quantized_rows` for values in the dtype of `like`.
    """
    mask = real[:, None] & (e < E)[None, :]
    at = rows[:, None] + e[None, :]
    if INT8:
        values = tl.where(mask, values.to(like).to(tl.float32), 0.0)
        scales = tl.max(tl.abs(values), 1) * UNIT
        tl.store(at, int8_values(values, tl.broadcast_to(scales[:, None], values.shape)), mask=mask)
        tl.store((rows + E).to(tl.pointer_type(tl.float32)), scales, mask=real)
    else:
        tl.store(at, values.to(like), mask=mask)
