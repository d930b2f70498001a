"""Quantized linear on CUDA by our small-M kernels, in op `fasteagle::interleaved_linear`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fasteagle.quant import interleaved
from fasteagle.quant.interleaved import InterleavedWeight
from fasteagle.quant.packed import KernelLinear, PackedWeight


class InterleavedLinear(KernelLinear):
    """Linear by fp16 products, with the output in the input's dtype.

    `accumulate` is the dtype of the sum within a group; sums over groups are always in fp32.
    """

    words: Tensor
    params: Tensor

    def __init__(self, weight: PackedWeight, bias: Tensor | None, accumulate: str = "fp32") -> None:
        super().__init__()
        packed = interleaved.pack(weight)
        self.out_features, self.in_features = packed.shape
        # Buffers rather than one object, so that they move with the model and compile.
        self.register_buffer("words", packed.words)
        self.register_buffer("params", packed.params)
        self.format = packed.bits, packed.group_size, packed.offsets
        self.accumulate = accumulate
        self._in_range = False  # whether inputs are known to be small, as after a norm
        self._most = 0.0  # inputs are clamped to it; 0: they are scaled where needed
        self._paired = 0  # outputs of a unit within which gate and up alternate; 0: none do
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def sum_in_fp32(self) -> None:
        """Add up groups in fp32 from now on."""
        self.accumulate = "fp32"

    def expect_range(self, most: float = 0.0) -> None:
        """Expect inputs within fp16 from now on, or clamp them to `most` if it is not 0."""
        self._in_range, self._most = not most, most

    def pair_halves(self, unit: int | None = None) -> None:
        """Let the halves of each `unit` of outputs alternate, so that one program has both.

        Halves are gate and up, a unit is an expert, None means all outputs. Results do not change.
        """
        unit = unit or self.out_features
        if self._paired:
            assert self._paired == unit, "the halves were paired in other units"
            return
        order = torch.arange(self.out_features, device=self.words.device)
        order = order.view(-1, 2, unit // 2).transpose(1, 2).flatten()
        self.words = self.words[:, order].contiguous()
        self.params = self.params[:, order].contiguous()
        self._paired = unit

    def _product(self, x: Tensor) -> Tensor:
        scale = None
        if self._most:
            x = x.clamp(-self._most, self._most).half()
        elif self._in_range:
            x = x.half()
        else:
            x, scale = in_half_range(x, self.accumulate)
        y = interleaved.interleaved_linear(
            x,
            self.words,
            self.params,
            self.out_features,
            self.in_features,
            *self.format,
            self.accumulate,
        )
        y = y if scale is None else y * scale
        if self._paired:
            y = y.unflatten(-1, (-1, self._paired // 2, 2)).transpose(-1, -2).flatten(-3)
        return y if self.bias is None else y + self.bias

    def rows(self, index: Tensor) -> Tensor:
        if unit := self._paired:
            within = index % unit
            index = index + within - (within >= unit // 2) * (unit - 1)
        words, params = self.words[:, index], self.params[:, index]
        weight = InterleavedWeight(words, params, len(index), self.in_features, *self.format)
        return interleaved.dequantize(weight)


def in_half_range(x: Tensor, accumulate: str) -> tuple[Tensor, Tensor | None]:
    """Return x [T, K] scaled into fp16, and the powers of two [T, 1] that undo it in products.

    Returns x and None for fp16 x under fp32 accumulation. fp16 ends at 65,504, and the input of
    Qwen's down projection exceeds it. With fp16 accumulation the sum over a group must be in range
    too.
    """
    if x.dtype == torch.float16 and accumulate == "fp32":
        return x, None
    most = x.abs().amax(-1, keepdim=True).float()
    limit = interleaved.LARGEST_EXPONENT[accumulate]
    _, exponent = torch.frexp(most)  # most < 2^exponent
    excess = (exponent - 1 - limit).clamp(0, 112)
    scale = torch.where(most.isfinite(), torch.exp2(excess.float()), 1.0)
    return (x / scale).half(), scale
