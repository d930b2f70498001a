"""Decoder blocks as one call of our CPU kernels, where all of their linears are in its layout.

The model file stays as it is: `use_native_blocks` changes a target from outside, and its draft
head. Results are those of `model.Block` but for activations in 8 bits; see `quant/cpu/block.h`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fasteagle.model import Block, Cast, RMSNorm, Transformer
from fasteagle.quant.cpu_linear import BLOCK, NativeLinear, NativeNorm, in_huge_pages
from fasteagle.quant.cpu_tensors import BlockTensors
from fasteagle.tree import TreeView

MAX_HEAD_DIM = 256
MAX_ROWS = 32  # that go through the blocks together; a longer pass is cut
TENSORS = len(BlockTensors._fields)


def fits(block: Block) -> bool:
    """Whether the kernels can run this block."""
    attention, mlp = block.attention, block.mlp
    linears = (attention.qkv, attention.out, mlp.gate_up, mlp.down)
    return (
        all(isinstance(linear, NativeLinear) for linear in linears)
        and all(linear.in_features % BLOCK == 0 for linear in linears)
        and attention.head_dim % 16 == 0
        and attention.head_dim <= MAX_HEAD_DIM
        and attention.out.bias is None
    )


class NativeBlocks:
    """What the kernels read of blocks that follow each other: `TENSORS` of each, in one list."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        assert all(fits(block) for block in blocks), "see fits"
        self._tensors = [tensor for block in blocks for tensor in block_tensors(block)]
        self._first = {id(block): TENSORS * i for i, block in enumerate(blocks)}
        self._n_head, self._eps = blocks[0].attention.n_head, blocks[0].mlp_norm.eps

    def run(
        self,
        blocks: Sequence[Block],
        caches: list[Tensor],
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        visible: Tensor | TreeView,
        entry: Tensor | None = None,
    ) -> Tensor:
        """The residual stream [T, D] behind `blocks`; `caches` are keys and values of each."""
        if isinstance(visible, TreeView):
            seen = (None, visible.seq_len, visible.paths, visible.depths, visible.window or 0)
        else:
            seen = (visible, None, None, None, 0)
        first = self._first[id(blocks[0])]
        tensors = self._tensors[first : first + TENSORS * len(blocks)]
        result: Tensor = torch.ops.fasteagle_cpu.blocks(
            x, cos, sin, slots, *seen, caches, tensors, self._n_head, self._eps, entry
        )
        return result


def block_tensors(block: Block) -> BlockTensors:
    """Return what the kernels read of one block."""
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
    )


def _scale(norm: nn.Module) -> Tensor:
    if isinstance(norm, RMSNorm):
        return norm.weight.detach().float()
    assert isinstance(norm, (Cast, nn.Identity)), "a block's norms are RMSNorm"
    return torch.empty(0)


def use_native_blocks(target: Transformer) -> bool:
    """Run the target's blocks by the kernels if they fit; true if they now are."""
    if not all(fits(block) for block in target.blocks):
        return False
    in_huge_pages(target.modules())
    target.run_blocks = functools.partial(_run_blocks, NativeBlocks(list(target.blocks)))
    target.visible_keys = lambda view, n_slots: view
    target.rows_at_once = MAX_ROWS
    target.norm = NativeNorm(target.norm)
    return True


def is_native(target: Transformer) -> bool:
    """Whether `use_native_blocks` has changed this target."""
    return isinstance(target.norm, NativeNorm)


def use_native_block(block: Any) -> None:
    """The same for the block of a draft head, which its owner calls by itself."""
    if not fits(block):
        return
    native = NativeBlocks([block])

    def forward(
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        mask: Tensor,
        k: Tensor,
        v: Tensor,
        entry: Tensor | None = None,
    ) -> Tensor:
        entry = None if entry is None else entry.float()
        return native.run([block], [k, v], x, cos, sin, slots, mask, entry)

    block.forward, block.native = forward, native


def is_native_block(block: Block) -> bool:
    """Whether `use_native_block` has changed this block."""
    return hasattr(block, "native")


def _run_blocks(
    native: NativeBlocks,
    blocks: Sequence[Block],
    layers: Sequence[tuple[Tensor, Tensor]],
    x: Tensor,
    *rest: Any,
) -> Tensor:
    return native.run(blocks, [cache for layer in layers for cache in layer], x, *rest)
