"""Choose 4- and 8-bit values for a weight: min-max, HQQ, int8 by maximum.

Scales are rounded to bf16 before the values are chosen, because the CPU kernels hold them in bf16:
the stored weight is then exactly the weight that is multiplied. Only `int8_groups` uses fp16
scales.

Shapes: N output rows, K input columns, G groups in a row.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fasteagle.quant import packed
from fasteagle.quant.packed import PackedWeight
from fasteagle.quant.scheme import Scheme


def quantize_weight(weight: Tensor, scheme: Scheme) -> PackedWeight:
    """Quantize a weight [N, K]; raise `FasteagleError` for a group size that does not divide K."""
    weight = weight.float()
    group_size = scheme.group_size or weight.shape[1]
    packed.check_group_size(weight.shape[1], group_size)
    if scheme.bits == 8:
        return _int8(weight, group_size)
    if scheme.method == "hqq":
        return _hqq(weight, group_size)
    scales, zeros = min_max(weight, group_size)
    grouped = weight.unflatten(1, (-1, group_size))
    q = (grouped / scales.float().unsqueeze(-1) + zeros.unsqueeze(-1)).round().clamp(0, 15)
    return packed.int4(q.flatten(1), scales, zeros=zeros)


def min_max(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Return bf16 scales and int32 zeros [N, G] that cover each group's range, including 0."""
    grouped = weight.unflatten(1, (-1, group_size))
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    scales = ((high - low) / 15).clamp(min=1e-8).to(torch.bfloat16)
    zeros = (-low / scales.float()).round().clamp(0, 15).to(torch.int32)
    return scales, zeros


def _hqq(weight: Tensor, group_size: int) -> PackedWeight:
    """Quantize by HQQ (half-quadratic): float zeros that minimize an l_0.7 norm of the error.

    The search is that of Badri and Shaji 2023 (mobiusml.github.io/hqq_blog) with their constants:
    it alternates between a shrunk error and the zeros that fit the weight without it.
    """
    grouped = weight.unflatten(1, (-1, group_size))  # [N, G, g]
    low, high = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)
    inverse = (15 / (high - low)).clamp(max=2e4)
    zeros = (-low * inverse).round()
    beta, best = 10.0, math.inf
    for _ in range(20):
        q = (grouped * inverse + zeros).round().clamp(0, 15)
        error = grouped - (q - zeros) / inverse
        size = error.abs()
        shrunk = error.sign() * (size - (1 / beta) * size.pow(-0.3)).relu()
        zeros = (q - (grouped - shrunk) * inverse).mean(-1, keepdim=True)
        beta *= 1.01
        mean = float(size.mean())
        if mean >= best:
            break
        best = mean
    # The kernels store the value of q = 8 instead of the value of q = 0, in bf16 too.
    scales = (1 / inverse).squeeze(-1)
    midpoint = ((8 - zeros.squeeze(-1)) * scales).to(torch.bfloat16).float()
    scales = scales.to(torch.bfloat16)
    offsets = midpoint - 8 * scales.float()
    q = ((grouped - offsets.unsqueeze(-1)) / scales.float().unsqueeze(-1)).round().clamp(0, 15)
    return packed.int4(q.flatten(1), scales, offsets=offsets)


def _int8(weight: Tensor, group_size: int) -> PackedWeight:
    grouped = weight.unflatten(1, (-1, group_size))
    scales = (grouped.abs().amax(-1) / 127).clamp(min=1e-12).to(torch.bfloat16)
    # Rounded to bf16 a scale is at most 2^-9 too small, so that no value exceeds 127.25.
    q = (grouped / scales.float().unsqueeze(-1)).round()
    return packed.int8(q.flatten(1), scales)


def int8_groups(weight: Tensor, group_size: int = 32) -> PackedWeight:
    """Quantize fp32 [N, K] to 8 bits in groups, with fp16 scales.

    It serves weights that had fewer bits, or that share a product with 8-bit weights.

    A scale is the group's largest magnitude amax / 127, rounded up to fp16 (by at most 2^-10, or
    by 2^-24 where it is subnormal), so that nothing is cut off. The error is at most half a scale:
    amax / 254 * (1 + 2^-10), or amax / 254 + 2^-25. A weight beyond the range keeps fp32 scales.
    """
    grouped = weight.unflatten(1, (-1, group_size))
    exact = grouped.abs().amax(-1) / 127
    short = exact.to(torch.float16)
    next_up = (short.view(torch.int16) + 1).view(torch.float16)
    short = torch.where(short.float() < exact, next_up, short)
    scales = short if bool(short.isfinite().all()) else exact
    q = (grouped / scales.float().clamp(min=1e-30).unsqueeze(-1)).round()
    return packed.int8(q.flatten(1), scales)
