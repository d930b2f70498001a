"""What our CPU kernels see of activations, in plain torch."""

from __future__ import annotations

import torch
from torch import nn


def in_22_bits(scale: torch.Tensor) -> torch.Tensor:
    """Round fp32 down, as our CPU kernels round scales."""
    return (scale.view(torch.int32) & ~3).view(torch.float32)


def rounded_activations(x: torch.Tensor) -> torch.Tensor:
    """x [T, K] as our CPU kernels see it: 8 bits in blocks of 32, or 16; in fp64."""
    K = x.shape[1]
    blocks = torch.nn.functional.pad(x, (0, -K % 32)).unflatten(1, (-1, 32))
    most = blocks.abs().amax(-1, keepdim=True)
    inverse = torch.where(most > 0, 127 / most.clamp(min=1e-30), 0)
    q = (blocks * inverse).round()
    scale = in_22_bits(most / 127)
    rest = ((blocks.double() - q.double() * scale.double()).float() * (254 * inverse)).round()
    large = scale.square() * blocks.shape[1] > 2 * scale.square().sum(1, keepdim=True)
    errors = torch.where(large, rest.double() * in_22_bits(scale / 254), 0)
    rounded = q.double() * scale.double() + errors
    return rounded.flatten(1)[:, :K]


class Rounded(nn.Module):
    """A linear in plain torch over activations as our CPU kernels see them."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.weight, self.bias = weight.double(), None if bias is None else bias.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rounded = rounded_activations(x.float())
        return nn.functional.linear(rounded, self.weight, self.bias).to(x.dtype)

    def rows_product(self, x: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        return self(x)[:, start:stop]
