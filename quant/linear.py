"""Linears over quantized weights: each holds its weight once, in the layout of its kernel.

On a CPU: our kernels (`cpu_linear`) if they are built. Without them ATen's int4 and int8 products
in bf16, for the groups that it has; else, and in fp32, the weight is dequantized once. On CUDA: our
own kernels.

Shapes: T rows, N outputs, K inputs, G groups in a row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fasteagle.device import accumulate_on
from fasteagle.model import sharpen
from fasteagle.quant.cpu_linear import NativeLinear, fits
from fasteagle.quant.cuda_linear import InterleavedLinear
from fasteagle.quant.packed import KernelLinear, PackedWeight

ATEN_GROUPS = (256, 128, 64, 32)  # that the int4 product takes
ATEN_INPUTS = 32  # the int8 product reads whole vectors, beyond the weight for other numbers


def make_linear(
    weight: PackedWeight,
    bias: Tensor | None,
    device: torch.device | str,
    dtype: torch.dtype,
    native: bool = False,
) -> nn.Module:
    """Return a module that maps [T, K] to [T, N] in `dtype`, on any device.

    `native`: on a CPU use our kernels, which must be loaded (`cpu_build`).
    """
    device = torch.device(device)
    bias = None if bias is None else bias.to(device, dtype)
    if device.type == "cuda":
        return InterleavedLinear(weight.to(device), bias, accumulate_on(device))
    if native and fits(weight):
        return NativeLinear(weight, bias)
    if dtype == torch.bfloat16 and weight.bits == 4:
        group = next((size for size in ATEN_GROUPS if weight.group_size % size == 0), None)
        if group is not None:
            return Int4Linear(weight.in_groups_of(group), bias)
    by_row = weight.bits == 8 and weight.group_size == weight.shape[1]
    if dtype == torch.bfloat16 and by_row and weight.shape[1] % ATEN_INPUTS == 0:
        return Int8Linear(weight, bias)
    return dense_linear(weight, bias, dtype)


def dense_linear(weight: PackedWeight, bias: Tensor | None, dtype: torch.dtype) -> nn.Linear:
    """Return an ordinary linear of the dequantized weight: exact in fp32, without saving memory."""
    N, K = weight.shape
    linear = nn.Linear(K, N, bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.dequantize().to(dtype), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


class Int4Linear(nn.Module):
    """Linear by ATen's `_weight_int4pack_mm_for_cpu`, with bf16 scales and midpoints.

    w = (q - 8) * scale + midpoint.
    """

    packed: Tensor
    scales_and_midpoints: Tensor

    def __init__(self, weight: PackedWeight, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.group_size = weight.group_size
        scales, offsets = weight.affine()
        params = torch.stack((scales, offsets + 8 * scales), dim=-1).to(torch.bfloat16)  # [N, G, 2]
        values = weight.values().to(torch.int32)
        spare = -self.out_features % 16  # the kernel takes sixteen rows at a time
        if spare:
            values, params = (
                F.pad(t, (0, 0) * (t.ndim - 1) + (0, spare)) for t in (values, params)
            )
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values, 1)
        self.register_buffer("packed", packed)
        self.register_buffer("scales_and_midpoints", params.transpose(0, 1).contiguous())
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x, self.packed, self.group_size, self.scales_and_midpoints
        )
        if y.shape[1] != self.out_features:
            y = y[:, : self.out_features]
        return y if self.bias is None else y + self.bias

    def rows_product(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Return outputs `start .. stop` of a linear without bias.

        The kernel has blocks of 16, 32 or 64 outputs; within one all of the linear are computed.
        """
        if start % 64 or stop % 64:
            return self(x)[:, start:stop]
        params = self.scales_and_midpoints[:, start:stop].contiguous()
        packed = self.packed[start:stop]
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, self.group_size, params)

    def rows(self, index: Tensor) -> Tensor:
        """Return rows [n, K] of the weight in the kernel's bf16, by products with unit vectors."""
        unit = torch.eye(self.in_features, dtype=torch.bfloat16)
        return torch.cat([self(part)[:, index] for part in unit.split(64)]).T.contiguous()


class Int8Linear(nn.Module):
    """Linear by ATen's `_weight_int8pack_mm`, with one bf16 scale per row."""

    packed: Tensor
    scales: Tensor

    def __init__(self, weight: PackedWeight, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.register_buffer("packed", weight.q.contiguous())
        self.register_buffer("scales", weight.scales[:, 0].to(torch.bfloat16))
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.ops.aten._weight_int8pack_mm(x, self.packed, self.scales)
        return y if self.bias is None else y + self.bias

    def rows_product(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Return outputs `start .. stop` of a linear without bias."""
        packed, scales = self.packed[start:stop], self.scales[start:stop]
        return torch.ops.aten._weight_int8pack_mm(x, packed, scales)

    def rows(self, index: Tensor) -> Tensor:
        """Return rows [..., K] of the weight, in fp32."""
        return self.packed[index].float() * self.scales[index].float().unsqueeze(-1)


class QuantizedLMHead(nn.Module):
    """LM head with fp32 logits from a quantized linear; the highest are recomputed in fp32.

    `model.sharpen` recomputes them, only where single rows of the weight are cheap to read (8
    bits, or dense). Our own kernels yield fp32 sums of fp16 or 8-bit inputs, which need no
    sharpening.
    """

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear
        if isinstance(linear, InterleavedLinear):
            linear.expect_range()  # after the final norm
            linear.sum_in_fp32()  # bound by memory either way

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.linear, KernelLinear):
            return self.linear.exact(x)
        logits = self.linear(x)
        if logits.dtype == torch.float32 or not isinstance(self.linear, Int8Linear | nn.Linear):
            return logits.float()
        return sharpen(logits, x, self.rows)

    def rows(self, index: Tensor) -> Tensor:
        """Return rows [n, K] of the weight."""
        dense = isinstance(self.linear, nn.Linear)
        return self.linear.weight[index] if dense else self.linear.rows(index)


class Permuted(nn.Module):
    """Linear or LM head that permutes its inputs first (GPTQ's act-order)."""

    columns: Tensor

    def __init__(self, linear: nn.Module, columns: Tensor) -> None:
        super().__init__()
        self.linear = linear
        self.register_buffer("columns", columns)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.index_select(-1, self.columns))

    def rows(self, index: Tensor) -> Tensor:
        """Return rows [n, K] of the weight, inputs in the order of x."""
        rows: Tensor = self.linear.rows(index)
        return rows[..., self.columns.argsort()]


class SideBySide(nn.Module):
    """Linears of one input that cannot be fused; their outputs are concatenated."""

    def __init__(self, linears: list[nn.Module]) -> None:
        super().__init__()
        self.linears = nn.ModuleList(linears)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([linear(x) for linear in self.linears], dim=-1)


def use_references(module: nn.Module, on: bool = True) -> None:
    """Compute the products inside `module` in torch from now on, or by our kernels again."""
    for linear in module.modules():
        if isinstance(linear, KernelLinear):
            linear.use_reference(on)
