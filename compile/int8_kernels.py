"""What Triton kernels read of a KV cache in 8 bits; see `int8_cache`.

Shapes: BLOCK keys, E head dim, E_PAD the next power of two.
"""

# mypy: disallow-untyped-defs=False
# (what Triton compiles has no Python types)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def int8_rows(rows, e, seen, like, E: tl.constexpr):
    """Keys or values [BLOCK, E_PAD], in the dtype of `like`, of rows that begin at pointers `rows`.

    The scale of a row lies behind its values. The products are those of `int8_cache.dense_rows`, so
    that the bits are those of a cache that holds these. Rows not `seen` are 0: they may hold NaN.
    """
    mask = seen[:, None] & (e < E)[None, :]
    values = tl.load(rows[:, None] + e[None, :], mask=mask, other=0)
    scales = tl.load((rows + E).to(tl.pointer_type(tl.float32)), mask=seen, other=0.0)
    return (values.to(tl.float32) * scales[:, None]).to(like.dtype)
