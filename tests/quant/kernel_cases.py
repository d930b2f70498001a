"""Random weights of every kernel format, and how far a product may be from fp64."""

from __future__ import annotations

import re

import torch

from fasteagle.quant import packed
from fasteagle.quant.packed import PackedWeight

FORMATS = ("g128", "g64", "g32", "g128-offsets", "g64-offsets", "g32-offsets", "int8", "int8-g32")
# Odd N; K of both tiles, of two splits that differ in length, and without a whole tile.
SHAPES = {"g128": (129, 1152), "g64": (131, 192), "g32": (129, 96), "g128-offsets": (130, 256)}
SHAPES |= {"g64-offsets": (1, 192), "g32-offsets": (131, 1152)}
SHAPES |= {"int8": (129, 1152), "int8-g32": (131, 96)}


def random_weight(
    name: str, N: int, K: int, *, whole: bool = False, seed: int = 0, device: str = "cpu"
) -> PackedWeight:
    """A random weight of a format in `FORMATS`.

    whole: scales are powers of two and the rest so small and round that every product and sum with
    x of -1, 0, 1 is exact, in whatever order and even in fp16.
    """
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    group = re.search(r"g(\d+)", name)
    G = K // int(group[1]) if group else 1
    scales = (torch.rand(N, G, generator=generator) + 0.5) * 0.01
    if whole:
        scales = 2.0 ** -integers(2, 5, N, G)
    if name.startswith("int8"):
        limit = 16 if whole else 128
        values, parts = integers(-limit + 1, limit, N, K), {}
        weight = packed.int8(values, scales.half() if group else scales)
    else:
        values = integers(0, 16, N, K)
        offsets = (torch.rand(N, G, generator=generator) - 1.1) * 0.1
        if whole:
            offsets = -integers(0, 16, N, G) * scales
        parts = {"offsets": offsets.half()} if "offsets" in name else {}
        parts = parts or {"zeros": integers(0, 17, N, G)}
        weight = packed.int4(values, scales.half(), **parts)
    return weight.to(device)


def random_rows(M: int, K: int, *, whole: bool = False, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if whole:
        return torch.randint(-1, 2, (M, K), generator=generator).half()
    return torch.randn(M, K, generator=generator).half()


def relative_error(y: torch.Tensor, x: torch.Tensor, weight: PackedWeight) -> float:
    """Return the error of y against fp64, relative to the size of the terms of a sum."""
    dense = weight.dequantize().double()
    size = x.double().norm(dim=1)[:, None] * dense.norm(dim=1)
    return ((y.double() - x.double() @ dense.T) / size).abs().max().item()


def tolerance(name: str, accumulate: str) -> float:
    """Float offsets round each weight to fp16; sums in fp16 round up to eight times in a group."""
    if accumulate == "fp16":
        return 1.5e-3
    return 2e-4 if "offsets" in name else 5e-7
