"""Linears over our own CPU kernels (`cpu/gemm.h`), and the layout of weights they read.

Activations are rounded to 8 bits per row and block of 32. A product's result is fp32, and the bits
of a row do not depend on the number of rows.

Shapes: T rows, N outputs, K inputs, G groups in a row, B blocks of 32 inputs.
"""

from __future__ import annotations

import contextlib
import mmap
import struct
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fasteagle.quant.packed import KernelLinear, PackedWeight

BLOCK = 32  # inputs
COLUMNS = 16  # adjacent outputs in the layout
ALIGNMENT = 64  # bytes: one cache line
MAGIC = 0x45474C46
HEADER = struct.Struct("<8i3q8x")  # as `Header` in cpu/gemm.h; 64 bytes
SCALES_ONLY, OFFSETS, ZEROS = range(3)


class NativeLinear(KernelLinear):
    """Linear over the C++ kernels, in fp32 or bf16."""

    packed: Tensor

    def __init__(self, weight: PackedWeight, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.register_buffer("packed", pack(weight))
        self.register_buffer("bias", None if bias is None else bias.float())

    def rows(self, index: Tensor) -> Tensor:
        rows = torch.ops.fasteagle_cpu.rows(self.packed, index.flatten(), self.in_features)
        return rows.view(*index.shape, self.in_features)

    def rows_product(self, x: Tensor, start: int, stop: int) -> Tensor:
        if self._by_reference or start % COLUMNS or stop % COLUMNS:
            return super().rows_product(x, start, stop)
        y = torch.ops.fasteagle_cpu.linear(x, self.packed, None, stop - start, start)
        return y.to(x.dtype)

    def _product(self, x: Tensor) -> Tensor:
        return torch.ops.fasteagle_cpu.linear(x, self.packed, self.bias, self.out_features)


def in_huge_pages(modules: Iterable[nn.Module]) -> None:
    """Move the weights of each `NativeLinear` to one buffer, in pages of 2 MiB, if one is there.

    A pass reads every weight once, and with pages of 4 KiB it would miss the TLB on each page.
    """
    linears = [module for module in modules if isinstance(module, NativeLinear)]
    if not linears:
        return
    sizes = [-(-linear.packed.numel() // ALIGNMENT) * ALIGNMENT for linear in linears]
    try:
        memory = mmap.mmap(-1, sum(sizes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # no memory for both copies
        return
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    for linear, piece in zip(
        linears, torch.frombuffer(memory, dtype=torch.uint8).split(sizes), strict=True
    ):
        own = piece[: linear.packed.numel()]
        own.copy_(linear.packed)
        linear.packed = own


class NativeNorm(nn.Module):
    """RMSNorm by one kernel; the bits of a row do not depend on the number of rows."""

    weight: Tensor

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        assert isinstance(norm.weight, Tensor) and isinstance(norm.eps, float)
        self.eps = norm.eps
        self.weight = nn.Parameter(norm.weight.detach(), requires_grad=False)
        self.register_buffer("scale", norm.weight.detach().float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.fasteagle_cpu.norm(x.float(), self.scale, self.eps).to(self.weight.dtype)


def fits(weight: PackedWeight) -> bool:
    """Return whether groups are whole blocks of 32 inputs or one per row, as the kernels need."""
    return weight.group_size % BLOCK == 0 or weight.group_size == weight.shape[1]


def pack(weight: PackedWeight) -> Tensor:
    """Return the bytes that the kernels read: a header, then 16 outputs at a time.

    Each 16 outputs begin with their values: four inputs of each of the 16 together, at 4 bits the
    inputs 4 j .. 4 j + 3 of a block in the low nibbles, and the inputs 16 further in the high
    nibbles of line j. Then come the scales [G, 16] of all groups, then offsets or zero points
    [G, 16]; in fp16 where that is exact, else all in fp32.
    """
    assert fits(weight), "see fits"
    N, K = weight.shape
    Np, Kp = -(-N // COLUMNS) * COLUMNS, -(-K // BLOCK) * BLOCK
    B = Kp // BLOCK
    scales, second, kind, base = _parameters(weight)
    parts = [scales] if second is None else [scales, second]
    wide = not all(_in_fp16(part) for part in parts)
    values = weight.values()
    # int8 is stored as value + 128. Padding meets activations of zero, or is cut off.
    values = (values.to(torch.int16) + 128).to(torch.uint8) if weight.bits == 8 else values
    values = F.pad(values, (0, Kp - K, 0, Np - N))
    quads = values.view(Np // COLUMNS, COLUMNS, B, 8, 4).permute(0, 2, 3, 1, 4)  # [., B, 8, 16, 4]
    if weight.bits == 4:
        quads = quads[:, :, :4] | (quads[:, :, 4:] << 4)
    pieces = [quads.reshape(Np // COLUMNS, -1)]
    for part in parts:
        part = F.pad(part, (0, 0, 0, Np - N)).view(-1, COLUMNS, part.shape[1]).transpose(1, 2)
        part = part.to(torch.float32 if wide else torch.float16).contiguous()
        pieces.append(part.view(torch.uint8).flatten(1))
    at, places = 0, []
    for i, piece in enumerate(pieces):
        pieces[i] = F.pad(piece, (0, -piece.shape[1] % 64))
        places.append(at)
        at += pieces[i].shape[1]
    second_at = places[2] if len(places) > 2 else 0
    group_blocks = -(-weight.group_size // BLOCK)
    header = HEADER.pack(
        MAGIC, N, K, weight.bits, group_blocks, wide, kind, base, at, places[1], second_at
    )
    body = torch.cat(pieces, dim=1).flatten()
    return torch.cat((torch.frombuffer(bytearray(header), dtype=torch.uint8), body))


def _parameters(weight: PackedWeight) -> tuple[Tensor, Tensor | None, int, int]:
    """Return fp32 scales [N, G], offsets or zero points [N, G] or None, their kind, and the base.

    w = (stored - base) * scale + offset, or (stored - base - zero) * scale. HQQ's offsets are
    rounded as the value of q = 8, so that with base 8 they fit into fp16.
    """
    scales = weight.scales.float()
    if weight.bits == 8:
        return scales, None, SCALES_ONLY, 128
    if weight.zeros is not None:
        return scales, weight.zeros.float(), ZEROS, 0
    assert weight.offsets is not None
    offsets = weight.offsets.float()
    midpoints = offsets + 8 * scales
    exact = torch.equal((midpoints.double() - 8 * scales.double()).float(), offsets)
    if not _in_fp16(offsets) and exact and _in_fp16(midpoints):
        return scales, midpoints, OFFSETS, 8
    return scales, offsets, OFFSETS, 0


def _in_fp16(values: Tensor) -> bool:
    """Return whether fp16 represents all values exactly."""
    return torch.equal(values.to(torch.float16).float(), values)
