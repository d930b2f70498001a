"""Functions of Triton kernels that make queries, keys and values of a product's sums.

Shapes: M rows of a block, T rows of a pass, Np columns of the product, E head dim.
"""

# mypy: disallow-untyped-defs=False
# (what Triton compiles has no Python types)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_sums(x, N: tl.constexpr):
    """Return the sum of each row of x [M, N]: of neighbours, then of neighbouring sums, and so on.

    N is a power of two. The order does not depend on the threads that the compiler gives a row.
    """
    if N > 2:
        left, right = tl.split(tl.reshape(x, (x.shape[0], N // 2, 2)))
        x = row_sums(left + right, N // 2)
    else:
        left, right = tl.split(x)
        x = left + right
    return x


@triton.jit
def turned_rows(
    sums_ptr,
    bias_ptr,
    cos_ptr,
    sin_ptr,
    norm_ptr,
    row,
    column,
    real,
    T,
    Np,
    n_parts,
    eps,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    BIASED: tl.constexpr,
    NORMED: tl.constexpr,
    TURNED: tl.constexpr,
):
    """Return the sum of the parts of queries, keys or values in fp32 [M, E], normed, after RoPE.

    `column` [M] is where the attention head of each row `row` [M] begins. Bits do not depend on the
    block of rows: they equal those of `rope_kernel`. Heads with norms have a power of two of
    columns, and TURNED is false for values, which have none.
    """
    e = tl.arange(0, E_PAD)
    mask = real[:, None] & (e < E)[None, :]
    across = tl.where(e < E // 2, e + E // 2, e - E // 2)  # the other element of the pair
    RUN: tl.constexpr = min((E // 2) & -(E // 2), 8)  # always consecutive: vector loads
    across = tl.max_contiguous(tl.multiple_of(across, RUN), RUN)
    own = tl.zeros((row.shape[0], E_PAD), tl.float32)
    other = tl.zeros((row.shape[0], E_PAD), tl.float32)
    # Two parts are loaded at once where registers suffice.
    UNROLL: tl.constexpr = 2 if row.shape[0] <= 16 else 1
    for part in tl.range(0, n_parts, num_stages=1, loop_unroll_factor=UNROLL):
        at = sums_ptr + (part * T + row[:, None]) * Np + column[:, None]
        own += tl.load(at + e[None, :], mask=mask, other=0.0)
        if TURNED:
            other += tl.load(at + across[None, :], mask=mask, other=0.0)
    if BIASED:
        at = bias_ptr + column[:, None]
        own += tl.load(at + e[None, :], mask=mask, other=0.0).to(tl.float32)
        if TURNED:
            other += tl.load(at + across[None, :], mask=mask, other=0.0).to(tl.float32)
    if TURNED and NORMED:
        rms = tl.sqrt_rn(row_sums(own * own, E_PAD) / E + eps)[:, None]
        own = own / rms * tl.load(norm_ptr + e)[None, :].to(tl.float32)
        other = other / rms * tl.load(norm_ptr + across)[None, :].to(tl.float32)
    if TURNED:
        at = row[:, None] * E + e[None, :]
        cos = tl.load(cos_ptr + at, mask=mask, other=0.0)
        sin = tl.load(sin_ptr + at, mask=mask, other=0.0)
        own = own * cos + tl.where((e < E // 2)[None, :], -other, other) * sin
    return own
