"""RMSNorm on CUDA with one order of summation for any number of rows, and a check of its scales.

ATen and Inductor choose the threads of a row by the number of rows. Our products do not, so that
after them such a norm would be the only place where a row's bits depend on the rows verified with
it.

Shapes: T rows, D columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fasteagle.errors import note
from fasteagle.model import Block, RMSNorm
from fasteagle.quant.cuda_linear import InterleavedLinear

GROUP = 128  # products that are added up in fp16, at most
LARGEST_HALF = 65504.0  # beyond it fp16 has no numbers


@torch.library.custom_op("fasteagle::rms_norm", mutates_args=(), device_types="cuda")
def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """Return RMSNorm of fp32 x [T, D] in the dtype of `scale` [D], with bits independent of T."""
    from fasteagle.compile.kernels import block_kernels  # Triton exists where CUDA does

    with torch.cuda.device_of(x):
        return block_kernels.add_norm(x, None, scale, eps, scale.dtype)[1]


@rms_norm.register_fake
def _(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x, dtype=scale.dtype)


def apply_norm(norm: nn.Module, x: Tensor) -> Tensor:
    """Return `norm(x)`, by our kernel for an `RMSNorm`."""
    if not isinstance(norm, RMSNorm):
        unchanged: Tensor = norm(x)
        return unchanged
    rows = x.reshape(-1, x.shape[-1]).float().contiguous()  # attention heads of a row are rows too
    return rms_norm(rows, norm.weight, norm.eps).view(x.shape)


def keep_sums_finite(blocks: nn.Module, name: str) -> None:
    """Switch `blocks` to fp32 accumulation if fp16 might overflow.

    Fused blocks pass normed rows to products unchanged. The root of the sum of squares of such a
    row is at most sqrt(D) times the largest scale, so that a group adds up to at most sqrt(GROUP D)
    times the scale. `name` names the model in the line on stderr.
    """
    linears = [module for module in blocks.modules() if isinstance(module, InterleavedLinear)]
    linears = [linear for linear in linears if linear.accumulate == "fp16"]
    largest = [
        norm.weight.abs().max().float() * math.sqrt(GROUP * len(norm.weight))
        for path, norm in blocks.named_modules()
        if isinstance(norm, RMSNorm) and not path.endswith(("q_norm", "k_norm"))  # no product
    ]
    if not linears or not largest:
        return
    most = float(torch.stack(largest).max())  # the kernels take weights as less than 1
    if most < LARGEST_HALF:
        return
    for linear in linears:
        linear.sum_in_fp32()
    note(
        f"sums in fp32: by its norms' scales, sums of the {name} might be {most:,.0f}, beyond fp16"
    )


def expect_normed_inputs(blocks: Iterable[Block]) -> None:
    """Let the products after a block's norms take their inputs unchecked, if scales allow it.

    The core runs blocks that do not fit, and would look for values beyond fp16 in every row. Sums
    in fp16 are finite, see `keep_sums_finite`, and so are their inputs.
    """
    for block in blocks:
        pairs = (block.attention_norm, block.attention.qkv), (block.mlp_norm, block.mlp.gate_up)
        for norm, linear in pairs:
            if not isinstance(norm, RMSNorm) or not isinstance(linear, InterleavedLinear):
                continue
            most = float(norm.weight.abs().max()) * math.sqrt(len(norm.weight))
            if most < LARGEST_HALF:
                linear.expect_range()
