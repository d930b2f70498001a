"""Quantized weights as plain tensors, and the plain-torch reference for their values.

Every importer and quantizer produces a `PackedWeight`, every kernel layout is made from one, and
all of them are tested against `dequantize`.

Shapes: N output rows, K input columns, g group size, G = K / g groups in a row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from fasteagle.errors import FasteagleError
from fasteagle.quant.scheme import GROUP_SIZES


@dataclasses.dataclass(frozen=True)
class PackedWeight:
    """Weight `w = (q - zero) * scale` or `w = q * scale + offset`, in fp32, by groups in a row.

    4 bits: q is 0 .. 15, column 2i in the low nibble of byte i, with zeros or offsets. 8 bits: q is
    -128 .. 127, and `w = q * scale`.
    """

    bits: int
    group_size: int
    q: Tensor  # uint8 [N, K / 2] or int8 [N, K]
    scales: Tensor  # [N, G] fp16, bf16 or fp32
    zeros: Tensor | None = None  # [N, G] uint8, 0 .. 16
    offsets: Tensor | None = None  # [N, G], like scales

    def __post_init__(self) -> None:
        N, K = self.shape
        G = check_group_size(K, self.group_size)
        parts = [part for part in (self.scales, self.zeros, self.offsets) if part is not None]
        assert all(part.shape == (N, G) for part in parts), [part.shape for part in parts]
        assert len(parts) == (2 if self.bits == 4 else 1), "zeros or offsets at 4 bits, else none"

    @property
    def shape(self) -> tuple[int, int]:
        N, columns = self.q.shape
        return N, columns * 2 if self.bits == 4 else columns

    @property
    def n_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are not None, by name."""
        named = {"q": self.q, "scales": self.scales, "zeros": self.zeros, "offsets": self.offsets}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def values(self) -> Tensor:
        """Return q with one value per element: uint8 or int8 [N, K]."""
        return unpack_nibbles(self.q) if self.bits == 4 else self.q

    def dequantize(self) -> Tensor:
        """Return the weight in fp32 [N, K]."""
        N, K = self.shape
        q = self.values().view(N, -1, self.group_size).float()
        scales = self.scales.float().unsqueeze(-1)
        if self.zeros is not None:
            w = (q - self.zeros.float().unsqueeze(-1)) * scales
        elif self.offsets is not None:
            w = q * scales + self.offsets.float().unsqueeze(-1)
        else:
            w = q * scales
        return w.reshape(N, K)

    def affine(self) -> tuple[Tensor, Tensor]:
        """Return scales and float offsets [N, G] in fp32 of any 4-bit weight, exactly."""
        scales = self.scales.float()
        if self.offsets is not None:
            return scales, self.offsets.float()
        assert self.zeros is not None
        return scales, -self.zeros.float() * scales

    def in_groups_of(self, group_size: int) -> PackedWeight:
        """Return the same weight in groups of `group_size`, which must divide the present one."""
        parts, rest = divmod(self.group_size, group_size)
        assert not rest, f"{group_size} does not divide {self.group_size}"
        if parts == 1:
            return self
        tensors = self.tensors()
        split = {name: tensors[name].repeat_interleave(parts, 1) for name in tensors.keys() - {"q"}}
        return dataclasses.replace(self, group_size=group_size, **split)

    def rows(self, index: Tensor | slice) -> PackedWeight:
        """Return the weight of the output rows at `index`."""
        return self._each(lambda tensor: tensor[index])

    def to(self, device: torch.device | str) -> PackedWeight:
        return self._each(lambda tensor: tensor.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> PackedWeight:
        return dataclasses.replace(
            self, **{name: change(tensor) for name, tensor in self.tensors().items()}
        )


def stack(parts: Sequence[PackedWeight]) -> PackedWeight:
    """Stack weights along their rows, for fused linears.

    If the parts differ, integer zeros become float offsets, which is exact in fp32.
    """
    first = parts[0]
    assert {(p.bits, p.group_size) for p in parts} == {(first.bits, first.group_size)}
    if len({frozenset(p.tensors()) for p in parts}) > 1:
        parts = [_with_offsets(part) for part in parts]
    tensors = [part.tensors() for part in parts]  # `cat` joins fp16 and bf16 to fp32
    joined = {name: torch.cat([each[name] for each in tensors]) for name in tensors[0]}
    return dataclasses.replace(parts[0], **joined)


def stack_one_by_one(parts: Iterable[PackedWeight], n_rows: int) -> PackedWeight | None:
    """Stack weights to `n_rows` rows with one of them in memory beside the result.

    None where they differ in format, which needs all of them at once (`stack`).
    """
    joined: dict[str, Tensor] = {}
    packing, at = (0, 0), 0
    for part in parts:
        tensors = part.tensors()
        if not joined:
            packing = part.bits, part.group_size
            for name, tensor in tensors.items():
                joined[name] = tensor.new_empty(n_rows, tensor.shape[1])
        formats = {name: tensor.dtype for name, tensor in tensors.items()}
        same = packing == (part.bits, part.group_size)
        if not same or formats != {name: tensor.dtype for name, tensor in joined.items()}:
            return None
        for name, tensor in tensors.items():
            joined[name][at : at + len(tensor)] = tensor
        at += part.shape[0]
    assert at == n_rows, f"{at} of {n_rows} rows"
    return PackedWeight(*packing, **joined)


def _with_offsets(part: PackedWeight) -> PackedWeight:
    scales, offsets = part.affine()
    return dataclasses.replace(part, scales=scales, zeros=None, offsets=offsets)


def pack_nibbles(values: Tensor) -> Tensor:
    """Pack uint8 [..., K] of 0 .. 15 into uint8 [..., K / 2], column 2i in the low nibble."""
    return values[..., 0::2] | (values[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Unpack uint8 [..., K / 2] into uint8 [..., K], the inverse of `pack_nibbles`."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def int4(
    values: Tensor, scales: Tensor, *, zeros: Tensor | None = None, offsets: Tensor | None = None
) -> PackedWeight:
    """Make a 4-bit weight of q [N, K] (any integer dtype) and its groups' parameters [N, G]."""
    group_size = values.shape[1] // scales.shape[1]
    zeros = None if zeros is None else zeros.to(torch.uint8)
    q = pack_nibbles(values.to(torch.uint8))
    return PackedWeight(4, group_size, q, scales, zeros, offsets)


def int8(values: Tensor, scales: Tensor) -> PackedWeight:
    """Make an 8-bit weight of q [N, K] and scales [N, G]."""
    group_size = values.shape[1] // scales.shape[1]
    return PackedWeight(8, group_size, values.to(torch.int8), scales)


def check_group_size(columns: int, group_size: int) -> int:
    """Return the number of groups in a row of `columns`.

    Raises `FasteagleError` if the group size does not divide it.
    """
    if columns % group_size:
        fitting = [g for g in GROUP_SIZES if columns % g == 0]
        fix = f"use {' or '.join(f'g{g}' for g in fitting)}" if fitting else "use int8"
        raise FasteagleError(
            f"group size {group_size} does not divide the {columns:,} inputs of a linear: {fix}"
        )
    return columns // group_size


class KernelLinear(nn.Module):
    """Linear from [T, K] to [T, N] by our kernels; the LM head takes `exact`, in fp32."""

    bias: Tensor | None
    out_features: int
    _by_reference = False

    def use_reference(self, on: bool = True) -> None:
        """Compute products in torch from now on, slowly, or by our kernels again."""
        self._by_reference = on

    def forward(self, x: Tensor) -> Tensor:
        return self.exact(x).to(x.dtype)

    def exact(self, x: Tensor) -> Tensor:
        """Return the product in fp32, as the kernels sum it."""
        if not self._by_reference:
            return self._product(x)
        parts = torch.arange(self.out_features, device=x.device).split(1024)
        y = torch.cat([x.float() @ self.rows(part).float().T for part in parts], dim=-1)
        return y if self.bias is None else y + self.bias

    def rows_product(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Return outputs `start .. stop` of a linear without bias, in the dtype of x."""
        rows = self.rows(torch.arange(start, stop, device=x.device)).float()
        return (x.float() @ rows.T).to(x.dtype)

    def rows(self, index: Tensor) -> Tensor:
        """Return rows [..., K] of the weight, in fp32, without dequantizing other rows."""
        raise NotImplementedError

    def _product(self, x: Tensor) -> Tensor:
        """Return the product and the bias in fp32, by kernels."""
        raise NotImplementedError
