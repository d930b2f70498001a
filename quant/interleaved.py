"""Interleaved layout of the CUDA kernels: its packing in plain torch, and the custom op over it.

A weight [N, K] is cut along K into tiles. The values of a tile are spread over bit planes: field j
of row r of the stored int16 holds the value of column `plane_rows * j + r`. A register with two
neighbouring rows then yields, for every j, two neighbouring columns of plane j after one mask.
That is a tensor core operand without another pass through shared memory.

Shapes: N output rows, K input columns, padded to whole blocks Np, Kp; G = Kp / g groups of g.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from fasteagle.errors import FasteagleError
from fasteagle.quant.packed import PackedWeight
from fasteagle.quant.scheme import GROUP_SIZES

BLOCK_N = 128  # output rows of one program; narrower blocks unroll into more instructions
# Activations below 2^(this + 1) are in range; with fp16 accumulation 128 products are too.
LARGEST_EXPONENT = {"fp32": 14, "fp16": 8}


@dataclasses.dataclass(frozen=True)
class Layout:
    """Format of a weight that a kernel is specialized for, and its tile."""

    bits: int
    tile: int  # columns cut into planes together
    group_size: int  # 0: one scale per row

    @property
    def n_planes(self) -> int:
        return 16 // self.bits

    @property
    def plane_rows(self) -> int:
        return self.tile // self.n_planes

    def padded(self, K: int) -> int:
        """Return K rounded up to whole tiles; the added columns of x are zeros."""
        return -(-K // self.tile) * self.tile


@dataclasses.dataclass(frozen=True)
class InterleavedWeight:
    """Weight in the interleaved layout: `(q - zero) * scale` or `(q - 8) * scale + midpoint`.

    The midpoint, the value of q = 8, replaces the offset: an offset can be as large as the largest
    weight, and rounding it to fp16 would shift the whole group. params, by format:
        4 bits   int32 [G, Np]: the fp16 scale low, and high -(1024 + zero) or the midpoint in fp16
        8 bits   int32 [G / 2, Np]: the fp16 scales of two groups, the first one low
        8 bits   int32 [1, Np]: the bits of one fp32 scale per row (group_size = K)
    """

    words: Tensor  # int16 [Kp / n_planes, Np]
    params: Tensor
    N: int
    K: int
    bits: int
    group_size: int
    offsets: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        return self.N, self.K

    @property
    def n_bytes(self) -> int:
        """Bytes that a product reads, padding included."""
        return self.words.nbytes + self.params.nbytes

    @property
    def layout(self) -> Layout:
        return layout_for(self.bits, self.group_size, self.K)


def layout_for(bits: int, group_size: int, K: int) -> Layout:
    """Return the layout for a format; raise `FasteagleError` for group sizes without a kernel.

    Tiles of 128 are fastest; tiles of 64 are for K that 128 does not divide. Grouped 8-bit weights
    use tiles of two groups, so that the two scales fill one 32-bit word: narrower loads are not
    asynchronous.
    """
    if bits == 8 and group_size == K:
        return Layout(8, 64 if K % 128 else 128, 0)
    fix = "32, 64 or 128" if bits == 4 else "32, or one scale a row"
    if group_size not in (GROUP_SIZES if bits == 4 else (32,)):
        raise FasteagleError(f"no CUDA kernel for {bits}-bit groups of {group_size:,}: use {fix}")
    return Layout(bits, 64 if K % 128 or bits == 8 else 128, group_size)


def pack(weight: PackedWeight) -> InterleavedWeight:
    """Pack a weight into the interleaved layout, on its device.

    q and zeros are exact. Scales and midpoints of groups are rounded to fp16: exact for
    those stored in fp16 and for most stored in bf16; a scale per row stays fp32. Raises
    `FasteagleError` for group sizes without a kernel and for parameters beyond fp16.
    """
    N, K = weight.shape
    layout = layout_for(weight.bits, weight.group_size, K)
    padded = -(-N // BLOCK_N) * BLOCK_N, layout.padded(K)
    q = weight.values()
    if weight.bits == 8:
        q = (q.to(torch.int16) + 128).to(torch.uint8)
    q = F.pad(q, (0, padded[1] - K, 0, padded[0] - N))
    return InterleavedWeight(
        _spread(q, layout),
        _params(weight, layout, padded),
        N,
        K,
        weight.bits,
        weight.group_size,
        weight.offsets is not None,
    )


def unpack_values(weight: InterleavedWeight) -> Tensor:
    """Return q [N, K] of a packed weight, uint8 at 4 bits and int8 at 8."""
    layout = weight.layout
    rows = weight.words.view(-1, layout.plane_rows, weight.words.shape[1])
    low, high = rows.contiguous().view(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
    fields = [low & 15, low >> 4, high & 15, high >> 4] if weight.bits == 4 else [low, high]
    q = torch.stack(fields, dim=1).flatten(0, 2).T[: weight.N, : weight.K]
    if weight.bits == 8:
        return (q.to(torch.int16) - 128).to(torch.int8)
    return q.contiguous()


def unpack_params(weight: InterleavedWeight) -> tuple[Tensor, Tensor | None]:
    """Return fp32 scales and, at 4 bits, zeros or midpoints, each [N, groups in a row]."""
    group, N = weight.layout.group_size, weight.N
    if not group:
        return weight.params.view(torch.float32).T[:N], None
    halves = weight.params.view(torch.float16).unflatten(-1, (-1, 2)).float()  # [rows, Np, 2]
    n_groups = weight.K // group
    if weight.bits == 8:
        return halves.permute(1, 0, 2).flatten(1)[:N, :n_groups], None
    scales, second = halves.permute(2, 1, 0)[:, :N, :n_groups]
    return scales, second if weight.offsets else -1024 - second


def dequantize(weight: InterleavedWeight) -> Tensor:
    """Return the weight in fp32 [N, K], the reference of every kernel."""
    scales, second = (None if p is None else p.unsqueeze(-1) for p in unpack_params(weight))
    assert scales is not None
    q = unpack_values(weight).float().view(weight.N, -1, weight.group_size)
    if weight.offsets:
        return ((q - 8) * scales + second).view(weight.shape)
    return ((q if second is None else q - second) * scales).view(weight.shape)


def linear(x: Tensor, weight: InterleavedWeight, *, accumulate: str = "fp32") -> Tensor:
    """Return `x @ w.T` in fp32 [T, N] for fp16 x [T, K], by kernels on CUDA, else by torch."""
    parts = [getattr(weight, field.name) for field in dataclasses.fields(weight)]
    return interleaved_linear(x, *parts, accumulate)


@torch.library.custom_op("fasteagle::interleaved_linear", mutates_args=())
def interleaved_linear(
    x: Tensor,
    words: Tensor,
    params: Tensor,
    N: int,
    K: int,
    bits: int,
    group_size: int,
    offsets: bool,
    accumulate: str,
) -> Tensor:
    """Compute `linear` over the fields of a weight, as custom ops take no dataclasses.

    On a CPU it is always in fp32.
    """
    weight = InterleavedWeight(words, params, N, K, bits, group_size, offsets)
    if not x.is_cuda:
        return x.float() @ dequantize(weight).T
    from fasteagle.quant import kernels  # Triton exists where CUDA does

    with torch.cuda.device_of(x):
        return kernels.linear(x, weight, accumulate=accumulate)


@interleaved_linear.register_fake
def _fake(x: Tensor, words: Tensor, params: Tensor, N: int, K: int, *format: object) -> Tensor:
    torch._check(x.dim() == 2)
    torch._check(x.shape[1] == K)
    return x.new_empty((x.shape[0], N), dtype=torch.float32)


def _spread(q: Tensor, layout: Layout) -> Tensor:
    """Interleave uint8 [Np, Kp] into int16 planes [Kp / n_planes, Np]."""
    tiles = q.T.reshape(-1, layout.n_planes, layout.plane_rows, q.shape[0])
    planes = tiles.unbind(1)  # each [Kp / tile, plane_rows, Np]
    if layout.bits == 4:
        planes = planes[0] | (planes[1] << 4), planes[2] | (planes[3] << 4)
    return torch.stack(planes, dim=-1).view(torch.int16).reshape(-1, q.shape[0])


def _params(weight: PackedWeight, layout: Layout, padded: tuple[int, int]) -> Tensor:
    Np, Kp = padded
    rows = (0, 0, 0, Np - weight.shape[0])
    if not layout.group_size:
        return F.pad(weight.scales.float(), rows).T.contiguous().view(torch.int32)
    groups = (0, Kp // layout.group_size - weight.shape[1] // layout.group_size, *rows[2:])
    scales = _fp16(weight.scales, "scale")
    if weight.bits == 8:
        pairs = F.pad(scales, groups).view(Np, -1, 2).transpose(0, 1)
    else:
        if weight.zeros is not None:
            second = -1024 - weight.zeros.to(torch.float16)  # integers up to 2048 are exact
        else:
            assert weight.offsets is not None
            midpoints = weight.offsets.float() + 8 * weight.scales.float()
            second = _fp16(midpoints, "midpoint")
        pairs = torch.stack((F.pad(scales, groups).T, F.pad(second, groups).T), dim=-1)
    return pairs.contiguous().view(torch.int32).squeeze(-1)


def _fp16(values: Tensor, name: str) -> Tensor:
    limit = torch.finfo(torch.float16).max
    largest = values.abs().max().item() if values.numel() else 0.0
    if not largest <= limit:  # NaN fails too
        raise FasteagleError(
            f"a group's {name} is {largest:.4g}, the kernels hold fp16 up to {limit:,.0f}: "
            "use int8, whose rows have fp32 scales"
        )
    return values.to(torch.float16)
