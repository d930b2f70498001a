"""Triton products of a few rows with 4- and 8-bit weights: `y = x @ w.T`, fp16 in, fp32 out.

Decoding reads every weight once per pass, so that a kernel is measured by its share of the memory
bandwidth. Values go from shared memory into tensor core operands by one `lop3` per pair: a value in
the low bits of 0x6400 is the fp16 number 1024 + value. An integer zero is part of the constant
that is added back. Scales are applied to the accumulators, or to the weights if these have offsets.

The bits of a row do not depend on the number of rows, up to 64: each shape of the weight has one
orientation, order along K, split and accumulator, and there are no atomics.

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

from fasteagle.quant.interleaved import BLOCK_N, LARGEST_EXPONENT, InterleavedWeight
from fasteagle.quant.tiling import BY_CAPABILITY, Card, Tiling, tiling
from fasteagle.quant.unpack_kernels import as_row, group_params, half_range, plane_values, swiglu

MAX_ROWS = 64  # above this the weight is dequantized and cuBLAS multiplies
SPAN = 64  # columns of an activation that share a scale: the output of one gated program
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}  # fused only where the code says so


def linear(x: Tensor, weight: InterleavedWeight, *, accumulate: str = "fp32") -> Tensor:
    """Return `x @ w.T` in fp32 [M, N] for fp16 x [M, K], on CUDA.

    `accumulate` "fp16" means fp16 accumulation within a group, at twice the tensor core rate on
    GeForce cards, and fp32 accumulation over groups. Above 64 rows the weight is
    dequantized into a temporary tensor, and cuBLAS multiplies, always with fp32 accumulation.
    """
    assert x.dtype == torch.float16 and x.shape[1] == weight.K, (x.dtype, x.shape, weight.K)
    spare = weight.layout.padded(weight.K) - weight.K
    x = F.pad(x, (0, spare)) if spare else x.contiguous()
    if x.shape[0] > MAX_ROWS:
        return _large(x, weight)
    if not x.shape[0]:
        return x.new_empty(0, weight.N, dtype=torch.float32)
    parts = partial_sums(x, weight, accumulate)
    S, M, Np = parts.shape
    if S == 1:
        return parts[0]
    y = x.new_empty(M, weight.N, dtype=torch.float32)
    sum_kernel[(Np // BLOCK_N, M)](
        parts, y, weight.N, Np, M * Np, SPLIT=S, BLOCK_N=BLOCK_N, **OPTIONS
    )
    return y


def partial_sums(
    x: Tensor, weight: InterleavedWeight, accumulate: str, scales: Tensor | None = None
) -> Tensor:
    """Return fp32 [S, M, Np], whose sum over S, in order, is the product; [1, M, N] without split.

    x [M, Kp] is fp16. `scales` [Kp / SPAN, M] multiply the spans of its rows, for inputs beyond the
    range of fp16; see `gate_kernel`. Those of more than `MAX_ROWS` rows are [M, 1], one a row.
    """
    M = x.shape[0]
    if M > MAX_ROWS:
        y = _large(x, weight)
        return (y if scales is None else y.mul_(scales))[None]
    cut = tiling(weight.layout, weight.N, weight.K, M, card_of(x.device))
    columns = weight.N if cut.split == 1 else weight.words.shape[1]
    parts = x.new_empty(cut.split, M, columns, dtype=torch.float32)
    _launch(x, weight, accumulate, cut, parts, parts, scales)
    return parts


def gated(x: Tensor, weight: InterleavedWeight, accumulate: str) -> tuple[Tensor, Tensor] | None:
    """Return silu(gate) * up [M, N / 2] in fp16, and scales [N / 2 / SPAN, M] of its spans.

    Even rows of the weight belong to gate, odd ones to up. Returns None where K is split, because
    the sums are complete only after all programs, and for more than `MAX_ROWS` rows.
    """
    M = x.shape[0]
    if M > MAX_ROWS:
        return None
    cut = tiling(weight.layout, weight.N, weight.K, M, card_of(x.device))
    if cut.split > 1:
        return None
    out = x.new_empty(1, M, weight.N // 2)
    scales = x.new_empty(weight.N // 2 // SPAN, M, dtype=torch.float32)
    _launch(x, weight, accumulate, cut, out, scales, None, gated=True)
    return out[0], scales


def _launch(
    x: Tensor,
    weight: InterleavedWeight,
    accumulate: str,
    cut: Tiling,
    out: Tensor,
    out_scales: Tensor,
    scales: Tensor | None,
    gated: bool = False,
) -> None:
    Np, tiles = weight.words.shape[1], x.shape[1] // weight.layout.tile
    interleaved_kernel[(cut.n_blocks, Np // BLOCK_N, cut.split)](
        x,
        weight.words,
        weight.params,
        out,
        x if scales is None else scales,
        out_scales,
        x.shape[0],
        out.shape[-1],
        Np,
        x.shape[1],
        tiles,
        -(-tiles // cut.split),
        **constants(weight, cut, accumulate, scales is not None, gated),
        **options(weight.bits, cut.block_m),
    )


def _large(x: Tensor, weight: InterleavedWeight) -> Tensor:
    Kp, Np = x.shape[1], weight.words.shape[1]
    scratch = x.new_empty(Kp, Np)
    dequantize_kernel[(Np // BLOCK_N, Kp // weight.layout.tile)](
        weight.words, weight.params, scratch, Np, **format_constants(weight), UNIT=1.0, **OPTIONS
    )
    dense = scratch[:, : weight.N]
    if x.is_cuda:
        return torch.mm(x, dense, out_dtype=torch.float32)
    return x.float() @ dense.float()


def options(bits: int, block_m: int) -> dict[str, int]:
    """Return the launch options of `interleaved_kernel`, on which no bit of a result depends.

    Four warps that read the last row of x in the place of 15 more are slow at 8 bits: a row by an
    LM head took 49 us on an H200, as against 33 us by eight warps, which 16 rows take too.
    """
    return OPTIONS | {"num_warps": 8} if bits == 8 and block_m == 16 else OPTIONS


def constants(
    weight: InterleavedWeight,
    cut: Tiling,
    accumulate: str,
    scaled: bool = False,
    gated: bool = False,
) -> dict[str, object]:
    """Return the compile-time constants of `interleaved_kernel`.

    fp16 accumulation over a group stays in range because values are scaled by 1/16, or at 8 bits by
    1/128, which is exact, since both are powers of two.
    """
    fp16 = accumulate == "fp16"
    unit = (1 / 16 if weight.bits == 4 else 1 / 128) if fp16 and not weight.offsets else 1.0
    return format_constants(weight) | {
        "BLOCK_M": cut.block_m,
        "STAGES": cut.n_stages,
        "FP16": fp16,
        "UNIT": unit,
        "ROW_SCALES": scaled,
        "GATED": gated,
        "EXPONENT": LARGEST_EXPONENT[accumulate],
        "SPAN": SPAN,
    }


def format_constants(weight: InterleavedWeight) -> dict[str, object]:
    """Return the compile-time constants that all kernels over this format share."""
    layout = weight.layout
    return {
        "BITS": weight.bits,
        "TILE": layout.tile,
        "GROUP": layout.group_size,
        "OFFSETS": weight.offsets,
        "BLOCK_N": BLOCK_N,
    }


@functools.cache
def card_of(device: torch.device) -> Card:
    """Return the GPU data that tilings are chosen by; without CUDA those of an RTX 3090."""
    if device.type != "cuda":
        return BY_CAPABILITY[8, 6]
    properties = torch.cuda.get_device_properties(device)
    return Card.of(properties.multi_processor_count, (properties.major, properties.minor))


@triton.jit
def product(
    x_at,
    words_at,
    params_at,
    scales_at,
    first,
    last,
    Np,
    stride_scales,
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
    SPAN: tl.constexpr,
):
    """Return fp32 sums [BLOCK_M, BLOCK_N] over the tiles `first` to `last` (exclusive).

    `x_at` [BLOCK_M, 1] points to rows of x, `words_at` [1, BLOCK_N] and `params_at` [BLOCK_N] to
    columns of the weight, `scales_at` [BLOCK_M, 1] to the rows' scales of the first span.
    """
    PLANES: tl.constexpr = 16 // BITS
    ROWS: tl.constexpr = TILE // PLANES  # columns of w in a plane of a tile
    SCALED: tl.constexpr = GROUP > 0 and not OFFSETS  # scales act on the sums of a group
    ACC: tl.constexpr = tl.float16 if FP16 else tl.float32
    WHOLE: tl.constexpr = GROUP if SCALED else TILE  # columns after which part is added to acc
    FLUSH: tl.constexpr = min(WHOLE, SPAN) if ROW_SCALES else WHOLE
    k = tl.arange(0, ROWS)
    x_at = x_at + k[None, :]
    words_at = words_at + k[:, None] * Np
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for tile in tl.range(first, last, num_stages=STAGES):
        q = tl.load(words_at + tile * ROWS * Np)
        part = tl.zeros((BLOCK_M, BLOCK_N), ACC)
        scale = tl.zeros((BLOCK_N,), tl.float16)
        second = scale
        for j in tl.static_range(PLANES):
            if GROUP > 0 and (j * ROWS) % GROUP == 0:
                scale, second = group_params(
                    params_at, tile, j, Np, second, BITS, TILE, GROUP, ROWS
                )
            x = tl.load(x_at + tile * TILE + j * ROWS)
            w = plane_values(q, scale, second, j, BITS, OFFSETS, UNIT)
            if FP16 or SCALED or ROW_SCALES:
                part = tl.dot(x, w, part, out_dtype=ACC)
            else:
                acc = tl.dot(x, w, acc)
            if (FP16 or SCALED or ROW_SCALES) and ((j + 1) * ROWS) % FLUSH == 0:
                whole = part.to(tl.float32)
                if ROW_SCALES:
                    span = tile * (TILE // SPAN) + j * ROWS // SPAN
                    whole *= tl.load(scales_at + span * stride_scales)
                if SCALED:
                    acc = tl.fma(whole, as_row(scale.to(tl.float32) / UNIT, acc), acc)
                else:
                    acc += whole
                part = tl.zeros((BLOCK_M, BLOCK_N), ACC)
    if GROUP == 0:
        acc *= (tl.load(params_at).to(tl.float32, bitcast=True) / UNIT)[None, :]
    return acc


@triton.jit
def gated_halves(acc, EXPONENT: tl.constexpr):
    """Return silu(gate) * up, whose columns alternate in `acc`, in fp16, and scales of the rows."""
    gate, up = tl.split(tl.reshape(acc, (acc.shape[0], acc.shape[1] // 2, 2)))
    return half_range(swiglu(gate, up), EXPONENT)


@triton.jit(do_not_specialize=["M", "tiles", "tiles_per_split"])
def interleaved_kernel(
    x_ptr,
    words_ptr,
    params_ptr,
    out_ptr,
    scales_ptr,
    out_scales_ptr,
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
    ROW_SCALES: tl.constexpr,
    GATED: tl.constexpr,
    EXPONENT: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Compute a block of rows and columns over one split of K: out[split, row, n].

    Rows of `out` have out_columns columns. Row blocks vary fastest, so that those after the first
    find the weights in the cache.
    """
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    first = split * tiles_per_split
    # Rows past M read the last one again: a mask would make the loads narrow and synchronous.
    read = tl.minimum(row, M - 1)
    acc = product(
        x_ptr + read * Kp,
        words_ptr + n[None, :],
        params_ptr + n,
        scales_ptr + read,
        first,
        tl.minimum(first + tiles_per_split, tiles),
        Np,
        M,
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
        at = out_ptr + row * out_columns + n[None, :]
        tl.store(at, values, mask=row < M)
        first_row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
        tl.store(out_scales_ptr + tl.program_id(1) * M + first_row, scale, mask=first_row < M)
    else:
        out_at = out_ptr + (split * M + row) * out_columns + n[None, :]
        tl.store(out_at, acc, mask=(row < M) & (n < out_columns)[None, :])


@triton.jit
def sum_kernel(parts_ptr, y_ptr, N, Np, stride_split, SPLIT: tl.constexpr, BLOCK_N: tl.constexpr):
    """Compute y[m, n] = parts[0, m, n] + parts[1, m, n] + ..., in this order."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for split in tl.static_range(SPLIT):
        total += tl.load(parts_ptr + split * stride_split + m * Np + n)
    tl.store(y_ptr + m * N + n, total, mask=n < N)


@triton.jit
def dequantize_kernel(
    words_ptr,
    params_ptr,
    out_ptr,
    Np,
    BITS: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    OFFSETS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Compute one tile of fp16 w.T [Kp, Np] for one block of columns."""
    PLANES: tl.constexpr = 16 // BITS
    ROWS: tl.constexpr = TILE // PLANES
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tile = tl.program_id(1)
    k = tl.arange(0, ROWS)
    q = tl.load(words_ptr + (tile * ROWS + k)[:, None] * Np + n[None, :])
    scale = tl.zeros((BLOCK_N,), tl.float16)
    second = scale
    for j in tl.static_range(PLANES):
        if GROUP > 0 and (j * ROWS) % GROUP == 0:
            scale, second = group_params(
                params_ptr + n, tile, j, Np, second, BITS, TILE, GROUP, ROWS
            )
        w = plane_values(q, scale, second, j, BITS, OFFSETS, UNIT)
        if GROUP == 0:
            row_scale = tl.load(params_ptr + n).to(tl.float32, bitcast=True)
            w = (w.to(tl.float32) * row_scale[None, :]).to(tl.float16)
        elif not OFFSETS:
            w = w * scale[None, :]
        at = (tile * TILE + j * ROWS + k)[:, None] * Np + n[None, :]
        tl.store(out_ptr + at, w)
