"""Weights of a block as lists of tensors and numbers, which an operator on CUDA can take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fasteagle.model import MLP, Block, Cast, MoE, RMSNorm
from fasteagle.quant.interleaved import InterleavedWeight


class BlockTensors(NamedTuple):
    """Tensors of one block that the kernels read; parts that it lacks are empty."""

    attention_norm: Tensor
    qkv: Tensor
    qkv_params: Tensor
    qkv_bias: Tensor
    q_norm: Tensor
    k_norm: Tensor
    out: Tensor
    out_params: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_params: Tensor
    down: Tensor
    down_params: Tensor
    shared_gate_up: Tensor
    shared_gate_up_params: Tensor
    shared_down: Tensor
    shared_down_params: Tensor
    router: Tensor  # [X, D] in fp32, and behind it the gate of the shared expert
    choice_bias: Tensor  # [X] in fp32


class PackedBlock(NamedTuple):
    """Weights of the linears of one block; without a shared expert the last two have no rows."""

    qkv: InterleavedWeight
    out: InterleavedWeight
    gate_up: InterleavedWeight
    down: InterleavedWeight
    shared_gate_up: InterleavedWeight
    shared_down: InterleavedWeight


N_TENSORS = len(BlockTensors._fields)
N_NUMBERS = 24  # numbers that describe the six packed weights of a block


def tensors_of(block: Block) -> BlockTensors:
    """Return the weights of a block; gate and up alternate in their outputs from now on."""
    attention, mlp = block.attention, block.mlp
    _pair_halves(mlp)
    bias, none = attention.qkv.bias, torch.empty(0)
    shared, router, choice_bias = None, none, none
    if isinstance(mlp, MoE):
        shared, gate = mlp.shared, mlp.shared_gate
        scored = [mlp.router.weight] if gate is None else [mlp.router.weight, gate.weight]
        router = torch.cat(scored).detach().float()
        choice_bias = none if mlp.choice_bias is None else mlp.choice_bias.detach().float()
    return BlockTensors(
        attention_norm=_scale(block.attention_norm),
        qkv=attention.qkv.words,
        qkv_params=attention.qkv.params,
        qkv_bias=none if bias is None else bias.detach(),
        q_norm=_scale(attention.q_norm),
        k_norm=_scale(attention.k_norm),
        out=attention.out.words,
        out_params=attention.out.params,
        mlp_norm=_scale(block.mlp_norm),
        gate_up=mlp.gate_up.words,
        gate_up_params=mlp.gate_up.params,
        down=mlp.down.words,
        down_params=mlp.down.params,
        shared_gate_up=none if shared is None else shared.gate_up.words,
        shared_gate_up_params=none if shared is None else shared.gate_up.params,
        shared_down=none if shared is None else shared.down.words,
        shared_down_params=none if shared is None else shared.down.params,
        router=router,
        choice_bias=choice_bias,
    )


def _pair_halves(mlp: MLP | MoE) -> None:
    """Let gate and up alternate in the weights of a feed-forward layer, expert by expert."""
    if not isinstance(mlp, MoE):
        mlp.gate_up.pair_halves()
        return
    mlp.gate_up.pair_halves(2 * mlp.config.ffn_dim)
    if mlp.shared is not None:
        mlp.shared.gate_up.pair_halves()


def formats_of(block: Block) -> list[int]:
    """Return K, bits, group size and offsets of each linear, zeros without a shared expert."""
    attention, mlp = block.attention, block.mlp
    linears = [attention.qkv, attention.out, mlp.gate_up, mlp.down]
    if isinstance(mlp, MoE) and mlp.shared is not None:
        linears += [mlp.shared.gate_up, mlp.shared.down]
    numbers = []
    for linear in linears:
        bits, group_size, offsets = linear.format
        numbers += [linear.in_features, bits, group_size, int(offsets)]
    return numbers + [0] * (N_NUMBERS - len(numbers))


def _scale(norm: nn.Module) -> Tensor:
    if isinstance(norm, RMSNorm):
        return norm.weight.detach()
    assert isinstance(norm, (Cast, nn.Identity)), "a block's norms are RMSNorm"
    return torch.empty(0)


def packed(tensors: BlockTensors, formats: Sequence[int]) -> PackedBlock:
    """Return the six weights; N is rounded up to whole blocks of columns that are not read."""
    pairs = (
        (tensors.qkv, tensors.qkv_params),
        (tensors.out, tensors.out_params),
        (tensors.gate_up, tensors.gate_up_params),
        (tensors.down, tensors.down_params),
        (tensors.shared_gate_up, tensors.shared_gate_up_params),
        (tensors.shared_down, tensors.shared_down_params),
    )
    weights = []
    for i, (words, params) in enumerate(pairs):
        K, bits, group_size, offsets = formats[4 * i : 4 * i + 4]
        N = words.shape[-1]
        weights.append(InterleavedWeight(words, params, N, K, bits, group_size, bool(offsets)))
    return PackedBlock(*weights)
