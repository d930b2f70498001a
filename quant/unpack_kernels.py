"""Unpack weights and scale activations into the range of fp16, in Triton kernels.

The masks follow Kim et al. 2022 (arXiv 2211.10017) and Marlin (arXiv 2408.11743).
"""

# mypy: disallow-untyped-defs=False
# (what Triton compiles has no Python types)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def as_row(values, like):
    return tl.broadcast_to(values[None, :], like.shape)


@triton.jit
def group_params(
    params_at,
    tile,
    j,
    Np,
    second,
    BITS: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Return scale and second parameter of the group at plane j; see `InterleavedWeight.params`.

    At 8 bits the second parameter is the scale of the tile's second group.
    """
    if BITS == 8 and j > 0:
        return second, second
    group = tile * (TILE // GROUP) + j * ROWS // GROUP
    word = tl.load(params_at + (tile if BITS == 8 else group) * Np)
    scale = (word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    second = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return scale, second


@triton.jit
def plane_values(
    q,
    scale,
    second,
    PLANE: tl.constexpr,
    BITS: tl.constexpr,
    OFFSETS: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Return fp16 values of plane PLANE: (q - zero) * UNIT, or the weights if they have offsets.

    A field that starts at bit 4 reads 1024 + 16 q, a sixteenth of which is 64 + q. Every step but
    the one with an offset is exact, with small integers times powers of two.
    """
    HIGH: tl.constexpr = BITS == 4 and PLANE % 2 == 1
    BASE: tl.constexpr = 64 if HIGH else 1024
    MUL: tl.constexpr = UNIT / 16 if HIGH else UNIT
    if OFFSETS:
        add = tl.full(q.shape, -8.0 - BASE, tl.float16)
    elif BITS == 8:
        add = tl.full(q.shape, (-128.0 - BASE) * UNIT, tl.float16)
    else:
        add = as_row((second + (1024.0 - BASE)) * UNIT, q)
    values = tl.inline_asm_elementwise(
        unpack_asm(BITS, PLANE, MUL), "=r,r,r", [q, add], dtype=tl.float16, is_pure=True, pack=2
    )
    if not OFFSETS:
        return values
    return tl.inline_asm_elementwise(
        "fma.rn.f16x2 $0, $1, $2, $3;",
        "=r,r,r,r",
        [values, as_row(scale, q), as_row(second, q)],
        dtype=tl.float16,
        is_pure=True,
        pack=2,
    )


@triton.constexpr_function
def unpack_asm(bits, plane, mul):
    """Return PTX for two values: fields of `plane` under 0x6400 (0xEA: a & b | c), * mul + $2."""
    mask = 0x00FF00FF if bits == 8 else (0x00F000F0 if plane % 2 else 0x000F000F)
    exponent = 15  # exponent of 1.0 in fp16; `mul` is a power of two
    while mul < 1:
        mul, exponent = mul * 2, exponent - 1
    factor = (exponent << 10) * 0x10001
    return f"""{{
        .reg .b32 pair, factor;
        shr.b32 pair, $1, {8 * (plane * bits // 8)};
        lop3.b32 pair, pair, {mask:#010x}, 0x64006400, 0xEA;
        mov.b32 factor, {factor:#010x};
        fma.rn.f16x2 $0, pair, factor, $2;
    }}"""


@triton.jit
def swiglu(gate, up):
    """Return silu(gate) * up."""
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def half_range(values, EXPONENT: tl.constexpr):
    """Return fp32 values [rows, span] scaled into fp16, and scales [rows] >= 1 that undo it.

    Scales are powers of two, and 1 where the row's values are below 2^(EXPONENT + 1). NaN and inf
    are unchanged.
    """
    scale, shrink = range_scales(tl.max(tl.abs(values), 1), EXPONENT)
    return (values * shrink[:, None]).to(tl.float16), scale


@triton.jit
def range_scales(largest, EXPONENT: tl.constexpr):
    """Return the scales of `half_range` and their reciprocals, by the largest absolute values."""
    excess = ((largest.to(tl.int32, bitcast=True) >> 23) & 255) - 127 - EXPONENT
    excess = tl.maximum(excess, 0)
    scale = ((excess + 127) << 23).to(tl.float32, bitcast=True)
    return scale, ((127 - excess) << 23).to(tl.float32, bitcast=True)
