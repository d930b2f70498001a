"""Products of a few rows with 4- and 8-bit weights, in Triton: `y = x @ w.T`, fp16 in, fp32 out.

Decoding reads every weight once per pass, so what counts is a kernel's share of the memory
bandwidth. Values go from shared memory into tensor core operands by one `lop3` per pair: a value in
the low bits of 0x6400 is the fp16 number 1024 + value. An integer zero is part of the constant
that is added back. Scales are applied to the accumulators, or to the weights if these have offsets.

Row r of a product has the same bits whatever the number of rows up to 64: one orientation, order
along K, split and accumulator per shape of the weight, and no atomics. The masks follow
Kim et al. 2022 (arXiv 2211.10017) and Marlin (arXiv 2408.11743).

Shapes: M rows of x, N outputs, K inputs, Np outputs in whole blocks, S splits along K.
"""

# mypy: disallow-untyped-defs=False
# (what Triton compiles has no Python types)

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from fasteagle.errors import FasteagleError
from fasteagle.quant.planes import ACCUMULATE, BLOCK_N, PlanesWeight
from fasteagle.quant.tiling import Tiling, tiling

MAX_ROWS = 64  # above this the weight is dequantized and cuBLAS multiplies
INTERPRETED = triton.knobs.runtime.interpret  # has no inline assembly; runs on the CPU
RTX_3090_SMS = 82
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}  # fused only where the code says so


def linear(x: Tensor, weight: PlanesWeight, *, accumulate: str = "fp32") -> Tensor:
    """`x @ w.T` in fp32 [M, N] for fp16 x [M, K], on CUDA (on the CPU in Triton's interpreter).

    accumulate: "fp16" adds up within a group in fp16, at twice the tensor core rate on GeForce
    cards, and in fp32 between groups. Above 64 rows the weight is dequantized into a scratch that
    the caching allocator recycles, and cuBLAS multiplies, always in fp32.
    """
    if x.dtype != torch.float16 or x.dim() != 2 or x.shape[1] != weight.K:
        raise FasteagleError(
            f"the kernels take fp16 [rows, {weight.K:,}], got {x.dtype} {list(x.shape)}"
        )
    if accumulate not in ACCUMULATE:
        raise FasteagleError(f"accumulate={accumulate!r}: use {' or '.join(ACCUMULATE)}")
    spare = weight.layout.padded(weight.K) - weight.K
    x = F.pad(x, (0, spare)) if spare else x.contiguous()
    if x.shape[0] > MAX_ROWS:
        return _large(x, weight)
    if not x.shape[0]:
        return x.new_empty(0, weight.N, dtype=torch.float32)
    return _small(x, weight, accumulate)


def _small(x: Tensor, weight: PlanesWeight, accumulate: str) -> Tensor:
    M, Kp = x.shape
    N, Np = weight.N, weight.planes.shape[1]
    cut = tiling(weight.layout, N, weight.K, M, _multiprocessors(x.device))
    tiles = Kp // weight.layout.tile
    y = x.new_empty(M, N, dtype=torch.float32)
    parts = y if cut.split == 1 else x.new_empty(cut.split, M, Np, dtype=torch.float32)
    planes_kernel[(cut.n_blocks, Np // BLOCK_N, cut.split)](
        x,
        weight.planes,
        weight.params,
        parts,
        M,
        parts.shape[-1],
        Np,
        Kp,
        tiles,
        -(-tiles // cut.split),
        **constants(weight, cut, accumulate),
        **OPTIONS,
    )
    if cut.split > 1:
        sum_kernel[(Np // BLOCK_N, M)](
            parts, y, N, Np, M * Np, SPLIT=cut.split, BLOCK_N=BLOCK_N, **OPTIONS
        )
    return y


def _large(x: Tensor, weight: PlanesWeight) -> Tensor:
    Kp, Np = x.shape[1], weight.planes.shape[1]
    scratch = x.new_empty(Kp, Np)
    dequantize_kernel[(Np // BLOCK_N, Kp // weight.layout.tile)](
        weight.planes, weight.params, scratch, Np, **format_constants(weight), UNIT=1.0, **OPTIONS
    )
    dense = scratch[:, : weight.N]
    if x.is_cuda:
        return torch.mm(x, dense, out_dtype=torch.float32)
    return x.float() @ dense.float()


def constants(weight: PlanesWeight, cut: Tiling, accumulate: str) -> dict[str, object]:
    """The compile-time constants of `planes_kernel`.

    fp16 sums of a group stay in range because values are scaled by 1/16, or at 8 bits by 1/128:
    exact, since both are powers of two.
    """
    fp16 = accumulate == "fp16"
    unit = (1 / 16 if weight.bits == 4 else 1 / 128) if fp16 and not weight.offsets else 1.0
    return format_constants(weight) | {
        "BLOCK_M": cut.block_m,
        "STAGES": cut.n_stages,
        "FP16": fp16,
        "UNIT": unit,
    }


def format_constants(weight: PlanesWeight) -> dict[str, object]:
    """The compile-time constants that all kernels over this format share."""
    layout = weight.layout
    return {
        "BITS": weight.bits,
        "TILE": layout.tile,
        "GROUP": layout.group_size,
        "OFFSETS": weight.offsets,
        "BLOCK_N": BLOCK_N,
        "USE_ASM": not INTERPRETED,
    }


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return RTX_3090_SMS


@triton.jit(do_not_specialize=["M", "tiles", "tiles_per_split"])
def planes_kernel(
    x_ptr,
    planes_ptr,
    params_ptr,
    out_ptr,
    M,
    out_columns,
    Np,
    Kp,
    tiles,
    tiles_per_split,
    BITS: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    OFFSETS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FP16: tl.constexpr,
    UNIT: tl.constexpr,
    STAGES: tl.constexpr,
    USE_ASM: tl.constexpr,
):
    """A block of rows and columns over one split of K: out[split, row, n], out_columns wide.

    Row blocks vary fastest, so that those after the first find the weights in the cache.
    """
    PLANES: tl.constexpr = 16 // BITS
    ROWS: tl.constexpr = TILE // PLANES  # columns of w in a plane of a tile
    SCALED: tl.constexpr = GROUP > 0 and not OFFSETS  # scales act on the sums of a group
    ACC: tl.constexpr = tl.float16 if FP16 else tl.float32
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    k = tl.arange(0, ROWS)
    # Rows past M read the last one again: a mask would make the loads narrow and synchronous.
    x_at = x_ptr + tl.minimum(row, M - 1) * Kp + k[None, :]
    planes_at = planes_ptr + k[:, None] * Np + n[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    first = split * tiles_per_split
    for tile in tl.range(first, tl.minimum(first + tiles_per_split, tiles), num_stages=STAGES):
        q = tl.load(planes_at + tile * ROWS * Np)
        part = tl.zeros((BLOCK_M, BLOCK_N), ACC)
        scale = tl.zeros((BLOCK_N,), tl.float16)
        second = scale
        for j in tl.static_range(PLANES):
            if GROUP > 0 and (j * ROWS) % GROUP == 0:
                scale, second = _group(params_ptr + n, tile, j, Np, second, BITS, TILE, GROUP, ROWS)
            x = tl.load(x_at + tile * TILE + j * ROWS)
            w = _plane(q, scale, second, j, BITS, OFFSETS, UNIT, USE_ASM)
            if FP16 or SCALED:
                part = tl.dot(x, w, part, out_dtype=ACC)
            else:
                acc = tl.dot(x, w, acc)
            if SCALED and ((j + 1) * ROWS) % GROUP == 0:
                acc = tl.fma(part.to(tl.float32), _row(scale.to(tl.float32) / UNIT, acc), acc)
                part = tl.zeros((BLOCK_M, BLOCK_N), ACC)
        if FP16 and not SCALED:
            acc += part.to(tl.float32)
    if GROUP == 0:
        acc *= (tl.load(params_ptr + n).to(tl.float32, bitcast=True) / UNIT)[None, :]
    out_at = out_ptr + (split * M + row) * out_columns + n[None, :]
    tl.store(out_at, acc, mask=(row < M) & (n < out_columns)[None, :])


@triton.jit
def _row(values, like):
    return tl.broadcast_to(values[None, :], like.shape)


@triton.jit
def _group(
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
    """(scale, second parameter) of the group that starts at plane j; see `PlanesWeight.params`.

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
def _plane(
    q,
    scale,
    second,
    PLANE: tl.constexpr,
    BITS: tl.constexpr,
    OFFSETS: tl.constexpr,
    UNIT: tl.constexpr,
    USE_ASM: tl.constexpr,
):
    """fp16 values of plane PLANE: (q - zero) * UNIT, or the weights where they have offsets.

    A field that starts at bit 4 reads 1024 + 16 q, a sixteenth of which is 64 + q. Every step is
    exact but the one with an offset: small integers, times powers of two.
    """
    HIGH: tl.constexpr = BITS == 4 and PLANE % 2 == 1
    BASE: tl.constexpr = 64 if HIGH else 1024
    MUL: tl.constexpr = UNIT / 16 if HIGH else UNIT
    if OFFSETS:
        add = tl.full(q.shape, -8.0 - BASE, tl.float16)
    elif BITS == 8:
        add = tl.full(q.shape, (-128.0 - BASE) * UNIT, tl.float16)
    else:
        add = _row((second + (1024.0 - BASE)) * UNIT, q)
    if USE_ASM:
        values = tl.inline_asm_elementwise(
            _unpack_asm(BITS, PLANE, MUL),
            "=r,r,r",
            [q, add],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
    else:
        SHIFT: tl.constexpr = 8 * (PLANE * BITS // 8)
        MASK: tl.constexpr = 0xFF if BITS == 8 else (0xF0 if HIGH else 0x0F)
        bits = ((q >> SHIFT) & MASK) | 0x6400
        values = bits.to(tl.int16).to(tl.float16, bitcast=True) * MUL + add
    if not OFFSETS:
        return values
    if USE_ASM:
        return tl.inline_asm_elementwise(
            "fma.rn.f16x2 $0, $1, $2, $3;",
            "=r,r,r,r",
            [values, _row(scale, q), _row(second, q)],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
    return values * scale[None, :] + second[None, :]


@triton.constexpr_function
def _unpack_asm(bits, plane, mul):
    """PTX for two values: their fields of `plane` under 0x6400 (0xEA: a & b | c), * mul + $2."""
    mask = 0x00FF00FF if bits == 8 else (0x00F000F0 if plane % 2 else 0x000F000F)
    exponent = 15  # of 1.0 in fp16; `mul` is a power of two
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
def sum_kernel(parts_ptr, y_ptr, N, Np, stride_split, SPLIT: tl.constexpr, BLOCK_N: tl.constexpr):
    """y[m, n] = parts[0, m, n] + parts[1, m, n] + ..., in this order."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for split in tl.static_range(SPLIT):
        total += tl.load(parts_ptr + split * stride_split + m * Np + n)
    tl.store(y_ptr + m * N + n, total, mask=n < N)


@triton.jit
def dequantize_kernel(
    planes_ptr,
    params_ptr,
    out_ptr,
    Np,
    BITS: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    OFFSETS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNIT: tl.constexpr,
    USE_ASM: tl.constexpr,
):
    """One tile of fp16 w.T [Kp, Np], for one block of columns."""
    PLANES: tl.constexpr = 16 // BITS
    ROWS: tl.constexpr = TILE // PLANES
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tile = tl.program_id(1)
    k = tl.arange(0, ROWS)
    q = tl.load(planes_ptr + (tile * ROWS + k)[:, None] * Np + n[None, :])
    scale = tl.zeros((BLOCK_N,), tl.float16)
    second = scale
    for j in tl.static_range(PLANES):
        if GROUP > 0 and (j * ROWS) % GROUP == 0:
            scale, second = _group(params_ptr + n, tile, j, Np, second, BITS, TILE, GROUP, ROWS)
        w = _plane(q, scale, second, j, BITS, OFFSETS, UNIT, USE_ASM)
        if GROUP == 0:
            row_scale = tl.load(params_ptr + n).to(tl.float32, bitcast=True)
            w = (w.to(tl.float32) * row_scale[None, :]).to(tl.float16)
        elif not OFFSETS:
            w = w * scale[None, :]
        at = (tile * TILE + j * ROWS + k)[:, None] * Np + n[None, :]
        tl.store(out_ptr + at, w)
