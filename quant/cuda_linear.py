"""A quantized linear on CUDA: our small-M kernels behind the op `fasteagle::planes_linear`."""

from __future__ import annotations

from torch import Tensor, nn

from fasteagle.quant import planes
from fasteagle.quant.packed import PackedWeight


class PlanesLinear(nn.Module):
    """Maps [T, K] to [T, N]; fp16 products, fp32 sums, the input's dtype outside."""

    planes: Tensor
    params: Tensor

    def __init__(self, weight: PackedWeight, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._packed = planes.pack_planes(weight)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = planes.linear(x.half(), self._packed).to(x.dtype)
        return y if self.bias is None else y + self.bias

    def rows(self, index: Tensor) -> Tensor:
        """Rows [n, K] of the weight, in fp32."""
        return planes.dequantize(self._packed)[index]
