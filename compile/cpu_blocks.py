"""Run decoder blocks by one call of our CPU kernels, if all of their linears are packed for it.

Results are those of `model.Block` with activations in 8 bits; see `quant/cpu/block.h`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fasteagle.model import MLP, Block, Cast, Layer, MoE, RMSNorm, Rows
from fasteagle.quant.cpu_linear import BLOCK, NativeLinear
from fasteagle.quant.cpu_tensors import BlockTensors
from fasteagle.tree import TreeView

MAX_HEAD_DIM = 256
MAX_ROWS = 32  # rows that go through the blocks together; a longer pass is cut
TENSORS = len(BlockTensors._fields)


def fits(block: Block) -> bool:
    """Return whether the CPU kernels can run this block."""
    attention, mlp = block.attention, block.mlp
    linears = [attention.qkv, attention.out, mlp.gate_up, mlp.down]
    if isinstance(mlp, MoE) and mlp.shared is not None:
        linears += [mlp.shared.gate_up, mlp.shared.down]
    return (
        all(isinstance(linear, NativeLinear) for linear in linears)
        and all(linear.in_features % BLOCK == 0 for linear in linears)
        and attention.head_dim % 16 == 0
        and attention.head_dim <= MAX_HEAD_DIM
        and attention.out.bias is None
    )


class NativeBlocks:
    """Weights of consecutive blocks for the kernels: `TENSORS` tensors of each, in one list."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        assert all(fits(block) for block in blocks), "see fits"
        self.tensors = [tensor for block in blocks for tensor in block_tensors(block)]
        self._blocks = blocks
        self._first = {id(block): TENSORS * i for i, block in enumerate(blocks)}
        self._n_head, self._eps = blocks[0].attention.n_head, blocks[0].mlp_norm.eps

    def run(
        self,
        blocks: Sequence[Block],
        layers: Sequence[Layer],
        x: Tensor,
        rows: Rows,
        entry: Tensor | None = None,
    ) -> Tensor:
        """Return the residual stream [T, D] after `blocks`, which write into their `layers`."""
        *places, visible = rows
        seen: tuple[Any, ...] = (visible, None, None, None, 0)
        if isinstance(visible, TreeView):
            seen = (None, visible.seq_len, visible.paths, visible.depths, visible.window or 0)
        first = self._first[id(blocks[0])]
        tensors = self.tensors[first : first + TENSORS * len(blocks)]
        caches = [cache for layer in layers for cache in layer]
        result: Tensor = torch.ops.fasteagle_cpu.blocks(
            x, *places, *seen, caches, tensors, self._n_head, self._eps, entry
        )
        return result

    def run_alone(self, x: Tensor, rows: Rows, layer: Layer, entry: Tensor | None = None) -> Tensor:
        """Run the single block of a draft head; see `Block.forward`."""
        entry = None if entry is None else entry.float()
        return self.run(self._blocks, [layer], x, rows, entry)


def block_tensors(block: Block) -> BlockTensors:
    """Return the tensors of one block that the kernels read."""
    attention, mlp = block.attention, block.mlp
    return BlockTensors(
        attention_norm=_scale(block.attention_norm),
        qkv=attention.qkv.packed,
        qkv_bias=torch.empty(0) if attention.qkv.bias is None else attention.qkv.bias,
        q_norm=_scale(attention.q_norm),
        k_norm=_scale(attention.k_norm),
        out=attention.out.packed,
        mlp_norm=_scale(block.mlp_norm),
        gate_up=mlp.gate_up.packed,
        down=mlp.down.packed,
        **expert_tensors(mlp),
    )


def expert_tensors(mlp: MLP | MoE) -> dict[str, Tensor]:
    """Return the tensors of a router and of a shared expert, by their names in `BlockTensors`."""
    names = ("router", "choice_bias", "routing", "shared_gate_up", "shared_down", "shared_gate")
    tensors = dict.fromkeys(names, torch.empty(0))
    if isinstance(mlp, MLP):
        return tensors
    config = mlp.config
    tensors["router"] = mlp.router.weight.detach().float()
    if mlp.choice_bias is not None:
        tensors["choice_bias"] = mlp.choice_bias.detach().float()
    tensors["routing"] = torch.tensor([config.top_k, config.renormalize, config.scale]).double()
    if mlp.shared is not None:
        tensors["shared_gate_up"] = mlp.shared.gate_up.packed
        tensors["shared_down"] = mlp.shared.down.packed
    if mlp.shared_gate is not None:
        tensors["shared_gate"] = mlp.shared_gate.weight.detach().float()
    return tensors


def _scale(norm: nn.Module) -> Tensor:
    if isinstance(norm, RMSNorm):
        return norm.weight.detach().float()
    assert isinstance(norm, (Cast, nn.Identity)), "a block's norms are RMSNorm"
    return torch.empty(0)
