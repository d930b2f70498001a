"""Parts of a prompt's pass by kernels, between the products of the core: RoPE, keys, SwiGLU.

Norms have an operator in `fixed_norm`, experts one in `cuda_blocks`.

Shapes: T rows, D model dim.
"""

from __future__ import annotations

from torch import Tensor

from fasteagle.compile.fixed_norm import apply_norm
from fasteagle.device import on_device_of
from fasteagle.model import Attention, Block, Ops, RMSNorm
from fasteagle.quant.cuda_linear import InterleavedLinear


def place(
    attention: Attention,
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    ops: Ops,
) -> Tensor:
    """Compute `model.place` in one launch, for blocks that fit."""
    from fasteagle.compile.kernels.block_kernels import rope
    from fasteagle.compile.kernels.tree_kernels import Unrotated

    norms = attention.q_norm, attention.k_norm
    scales = [norm.weight if isinstance(norm, RMSNorm) else None for norm in norms]
    eps = norms[0].eps if isinstance(norms[0], RMSNorm) else 0.0
    new = Unrotated(qkv[None], None, cos, sin, slots, attention.n_head, qkv.dtype)
    with on_device_of(qkv):
        return rope(new, (scales[0], scales[1]), k_cache, v_cache, eps)


def feed_forward(block: Block, x: Tensor) -> Tensor:
    """Return the feed-forward layer's addition [T, D] to x in fp32, for any number of rows."""
    from fasteagle.compile.kernels import gate_kernels

    gate_up, down = block.mlp.gate_up, block.mlp.down
    assert isinstance(gate_up, InterleavedLinear) and isinstance(down, InterleavedLinear)
    sums = gate_up.in_order(apply_norm(block.mlp_norm, x))
    with on_device_of(x):
        values, scales = gate_kernels.gate_rows(sums, down.accumulate)
    return down.of_half(values, scales)
