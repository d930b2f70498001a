"""The operators of CUDA on CPU tensors: they launch the kernels, for a `Card` that interprets them.

As operators, so that what they declare is checked: what they write, that outputs do not overlap.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fasteagle.compile import cuda_blocks, cuda_ops, fixed_norm
from fasteagle.compile.kernels import (
    block_kernels,
    draft_kernels,
    draw_kernels,
    lookup_kernels,
    order_kernels,
)
from fasteagle.quant import interleaved
from fasteagle.quant import kernels as quant_kernels

cuda_blocks.fused_blocks.register_kernel("cpu")(cuda_blocks.launch_blocks)
cuda_ops.top_children.register_kernel("cpu")(draft_kernels.top_children)
cuda_ops.rerank_pool.register_kernel("cpu")(order_kernels.rerank)
cuda_ops.look_up_text.register_kernel("cpu")(lookup_kernels.look_up)
cuda_ops.fuse_pool.register_kernel("cpu")(lookup_kernels.fuse)
cuda_ops.draw_tokens.register_kernel("cpu")(draw_kernels.draw)
cuda_ops.relate_rows.register_kernel("cpu")(order_kernels.relations)
cuda_ops.move_cache_rows.register_kernel("cpu")(block_kernels.commit)


@fixed_norm.rms_norm.register_kernel("cpu")
def _(x, scale, eps):
    return block_kernels.add_norm(x, None, scale, eps, scale.dtype)[1]


def half_range(values: Tensor, exponent: int) -> tuple[Tensor, Tensor]:
    """Spans of `SPAN` columns as kernels write them: fp16 [M, N], and scales [M, N / SPAN]."""
    spans = values.unflatten(1, (-1, quant_kernels.SPAN))
    most = spans.abs().amax(-1)
    scales = torch.where(most >= 2.0 ** (exponent + 1), 2.0 ** (most.log2().floor() - exponent), 1)
    return (spans / scales.unsqueeze(-1)).half().flatten(1), scales


def launch_by_torch(x, weight, accumulate, cut, out, out_scales, scales, gated=False) -> None:
    """Stand for the launch of a product, whose kernel takes most of a pass to interpret.

    Rows are computed one by one, so that the bits of each are its own.
    """
    dense, rows = interleaved.dequantize(weight).double(), x.double()
    if scales is not None:
        rows = rows * scales.T.repeat_interleave(quant_kernels.SPAN, 1)
    sums = torch.stack([dense @ row for row in rows[:, : weight.K]]).float()
    out.zero_()
    if not gated:
        out[0, :, : weight.N] = sums
        return
    values = torch.nn.functional.silu(sums[:, 0::2]) * sums[:, 1::2]
    out[0], ranges = half_range(values, interleaved.LARGEST_EXPONENT[accumulate])
    out_scales.copy_(ranges.T)


@torch.library.custom_op("fasteagle_tests::product", mutates_args=())
def product(
    x: Tensor,
    words: Tensor,
    params: Tensor,
    N: int,
    K: int,
    bits: int,
    group_size: int,
    offsets: bool,
    accumulate: str,
) -> Tensor:
    """`interleaved_linear`, which has a reference of its own on a CPU, by the kernels."""
    weight = interleaved.InterleavedWeight(words, params, N, K, bits, group_size, offsets)
    return quant_kernels.linear(x, weight, accumulate=accumulate)


@product.register_fake
def _(x, words, params, N, *rest):
    return x.new_empty(len(x), N, dtype=torch.float32)
