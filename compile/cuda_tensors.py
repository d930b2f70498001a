"""Weights of a block as the kernels of CUDA read them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from fasteagle.model import MLP, Block, Cast, MoE, RMSNorm
from fasteagle.quant.cuda_linear import InterleavedLinear
from fasteagle.quant.interleaved import InterleavedWeight


class BlockWeights(NamedTuple):
    """Weights of one block; parts that it lacks are None."""

    attention_norm: Tensor | None
    qkv: InterleavedWeight
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: InterleavedWeight
    mlp_norm: Tensor
    gate_up: InterleavedWeight
    down: InterleavedWeight
    shared: tuple[InterleavedWeight, InterleavedWeight] | None = None  # gate_up, down
    router: Tensor | None = None  # [X, D] in fp32, and after it the gate of the shared expert
    choice_bias: Tensor | None = None  # [X] in fp32


def weights_of(block: Block) -> BlockWeights:
    """Return the weights of a block; gate and up alternate in their outputs from now on."""
    attention, mlp = block.attention, block.mlp
    _pair_halves(mlp)
    bias = attention.qkv.bias
    weights = BlockWeights(
        attention_norm=_scale(block.attention_norm),
        qkv=_packed(attention.qkv),
        qkv_bias=None if bias is None else bias.detach(),
        q_norm=_scale(attention.q_norm),
        k_norm=_scale(attention.k_norm),
        out=_packed(attention.out),
        mlp_norm=block.mlp_norm.weight.detach(),
        gate_up=_packed(mlp.gate_up),
        down=_packed(mlp.down),
    )
    if not isinstance(mlp, MoE):
        return weights
    gate, choice_bias = mlp.shared_gate, mlp.choice_bias
    scored = [mlp.router.weight] if gate is None else [mlp.router.weight, gate.weight]
    if mlp.shared is not None:
        weights = weights._replace(shared=(_packed(mlp.shared.gate_up), _packed(mlp.shared.down)))
    return weights._replace(
        router=torch.cat(scored).detach().float(),
        choice_bias=None if choice_bias is None else choice_bias.detach().float(),
    )


def _pair_halves(mlp: MLP | MoE) -> None:
    """Let gate and up alternate in the weights of a feed-forward layer, expert by expert."""
    if not isinstance(mlp, MoE):
        mlp.gate_up.pair_halves()
        return
    mlp.gate_up.pair_halves(2 * mlp.config.ffn_dim)
    if mlp.shared is not None:
        mlp.shared.gate_up.pair_halves()


def _packed(linear: InterleavedLinear) -> InterleavedWeight:
    """Return the weight of a linear; N is rounded up to whole blocks of columns, never read."""
    words, params = linear.words, linear.params
    return InterleavedWeight(words, params, words.shape[-1], linear.in_features, *linear.format)


def _scale(norm: nn.Module) -> Tensor | None:
    if isinstance(norm, RMSNorm):
        return norm.weight.detach()
    assert isinstance(norm, (Cast, nn.Identity)), "a block's norms are RMSNorm"
    return None
