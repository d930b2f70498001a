"""A quantized linear on CUDA: our small-M kernels behind the op `fasteagle::planes_linear`."""

from __future__ import annotations

from torch import Tensor, nn

from fasteagle.quant import planes
from fasteagle.quant.packed import PackedWeight
from fasteagle.quant.planes import PlanesWeight


class PlanesLinear(nn.Module):
    """Maps [T, K] to [T, N]: fp16 products, fp32 sums, output in the input's dtype."""

    planes: Tensor
    params: Tensor

    def __init__(self, weight: PackedWeight, bias: Tensor | None, accumulate: str = "fp32") -> None:
        super().__init__()
        packed = planes.pack_planes(weight)
        self.out_features, self.in_features = packed.shape
        # As buffers rather than one object, so that they move with the model and compile.
        self.register_buffer("planes", packed.planes)
        self.register_buffer("params", packed.params)
        self.format = packed.bits, packed.group_size, packed.offsets
        self.accumulate = accumulate
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = planes.planes_linear(
            x.half(),
            self.planes,
            self.params,
            self.out_features,
            self.in_features,
            *self.format,
            self.accumulate,
        ).to(x.dtype)
        return y if self.bias is None else y + self.bias

    def rows(self, index: Tensor) -> Tensor:
        """Rows [n, K] of the weight, in fp32."""
        weight = PlanesWeight(
            self.planes, self.params, self.out_features, self.in_features, *self.format
        )
        return planes.dequantize(weight)[index]
