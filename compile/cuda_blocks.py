"""Run decoder blocks on CUDA in few launches: quantized products, and our kernels between them.

A block of 4-bit weights is eight launches: norm, query-key-value, two of attention (the first with
RoPE and the new keys), output, norm, gate and up, down. It takes one more where gate and up are
split along K, and one where attention heads have norms or more than 128 columns. The partial sums
of a split product are added up by the kernel that reads them. The core runs passes under a mask
(prefill). The block of a draft head runs alone, between the layers of `EagleHead.forward`.

Shapes: T rows, D model dim, E head dim, G KV heads, S cache slots.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fasteagle.compile.tree_attention import OPS
from fasteagle.device import on_device_of
from fasteagle.model import Block, Cast, Ops, RMSNorm, run_blocks
from fasteagle.quant.cuda_linear import InterleavedLinear
from fasteagle.quant.interleaved import InterleavedWeight
from fasteagle.tree import TreeView

MAX_ROWS = 64  # limit of the product kernels
# Limit of the residual stream that EAGLE-1/2's block reads, which no norm bounds: larger values are
# clamped, or fp16 accumulation of 128 products might be infinite, and infinite logits select no
# token. Draft tokens may differ by it, the text does not. Other inputs of products are bounded: 128
# columns of a normed row add up to at most sqrt(128 D) times the norm's scale, and weights enter as
# less than 1, so that scales up to 60 are in range at D = 8,192. Attention yields averages of
# values, which are in range up to 500 even if all 128 are equal. The inputs of `down` have their
# own scales. The norms are checked when a model is loaded (`fixed_norm.keep_sums_finite`).
MOST_UNNORMED = 511.75
LARGEST_FEATURE = 65280.0  # in fp16 and in bf16; the next number of bf16 is infinite in fp16
COLUMNS = 64  # a linear's inputs are a multiple of it


class Rows(NamedTuple):
    """Rows of a tree, in the order in which the op takes them."""

    cos: Tensor  # [T, 1, E]
    sin: Tensor  # [T, 1, E]
    slots: Tensor  # [T], slots of the cache
    seq_len: Tensor  # the view's, see `TreeView`
    paths: Tensor
    depths: Tensor


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


N_TENSORS = len(BlockTensors._fields)
N_NUMBERS = 16  # numbers that describe the four packed weights of a block


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings that all blocks of a model share, and the window of its attention."""

    eps: float
    accumulate: str  # dtype of the sum within a group
    window: int  # 0: none


def fits(block: Block) -> bool:
    """Return whether the CUDA kernels can run this block."""
    attention, mlp = block.attention, block.mlp
    linears = (attention.qkv, attention.out, mlp.gate_up, mlp.down)
    return (
        all(type(linear) is InterleavedLinear for linear in linears)
        and all(linear.in_features % COLUMNS == 0 for linear in linears)
        and all(linear.bias is None for linear in linears[1:])
        and attention.head_dim % 4 == 0  # a row of int8 ends with a scale of four bytes
        and 16 <= attention.head_dim <= 256
        and isinstance(attention.q_norm, RMSNorm) == isinstance(attention.k_norm, RMSNorm)
    )


class FusedBlocks:
    """Weights of blocks for the kernels: tensors of each and their formats, in two lists."""

    def __init__(self, blocks: Sequence[Block], masked: Ops = OPS) -> None:
        """Collect the weights of `blocks`; the core runs passes under a mask, by ops `masked`."""
        assert all(fits(block) for block in blocks), "see fits"
        for block in blocks:
            block.mlp.gate_up.pair_halves()
        self._blocks, self._masked = blocks, masked
        self._tensors = [tensor for block in blocks for tensor in _tensors(block)]
        self._formats = [number for block in blocks for number in _formats(block)]
        self._index = {id(block): i for i, block in enumerate(blocks)}
        self._eps = blocks[0].mlp_norm.eps
        self.accumulate = blocks[0].attention.qkv.accumulate

    def run(
        self,
        blocks: Sequence[Block],
        layers: Sequence[tuple[Tensor, Tensor]],
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        view: Tensor | TreeView,
        entry: Tensor | None = None,
    ) -> Tensor:
        """Return the residual stream [T, D] after `blocks`, which write into their `layers`."""
        if isinstance(view, Tensor) or x.shape[0] > MAX_ROWS:
            assert entry is None, "see run_alone"
            return run_blocks(blocks, layers, x, cos, sin, slots, view, self._masked)
        first = self._index[id(blocks[0])]
        last = first + len(blocks)
        return fused_blocks(
            x,
            entry,
            [cos, sin, slots, view.seq_len, view.paths, view.depths],  # Rows
            [cache for layer in layers for cache in layer],
            self._tensors[N_TENSORS * first : N_TENSORS * last],
            self._formats[N_NUMBERS * first : N_NUMBERS * last],
            self._eps,
            self.accumulate,
            view.window or 0,
        )

    def run_alone(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        visible: Tensor | TreeView,
        k_cache: Tensor,
        v_cache: Tensor,
        entry: Tensor | None = None,
    ) -> Tensor:
        """Run the single block of a draft head; see `Block.forward`."""
        rows = cos, sin, slots, visible
        if isinstance(visible, Tensor):
            y: Tensor = self._blocks[0](x, *rows, k_cache, v_cache, entry, self._masked)
            return y
        x = x.clamp(-LARGEST_FEATURE, LARGEST_FEATURE)  # no norm bounds it in EAGLE-1/2
        entry = None if entry is None else entry.half()
        y = self.run(self._blocks, [(k_cache, v_cache)], x, *rows, entry)
        return y.clamp(-LARGEST_FEATURE, LARGEST_FEATURE)


def _tensors(block: Block) -> BlockTensors:
    attention, mlp = block.attention, block.mlp
    bias = attention.qkv.bias
    return BlockTensors(
        attention_norm=_scale(block.attention_norm),
        qkv=attention.qkv.words,
        qkv_params=attention.qkv.params,
        qkv_bias=torch.empty(0) if bias is None else bias.detach(),
        q_norm=_scale(attention.q_norm),
        k_norm=_scale(attention.k_norm),
        out=attention.out.words,
        out_params=attention.out.params,
        mlp_norm=_scale(block.mlp_norm),
        gate_up=mlp.gate_up.words,
        gate_up_params=mlp.gate_up.params,
        down=mlp.down.words,
        down_params=mlp.down.params,
    )


def _formats(block: Block) -> list[int]:
    """Return K, bits, group size and offsets of each linear."""
    attention, mlp = block.attention, block.mlp
    numbers = []
    for linear in (attention.qkv, attention.out, mlp.gate_up, mlp.down):
        bits, group_size, offsets = linear.format
        numbers += [linear.in_features, bits, group_size, int(offsets)]
    return numbers


def _scale(norm: nn.Module) -> Tensor:
    if isinstance(norm, RMSNorm):
        return norm.weight.detach()
    assert isinstance(norm, (Cast, nn.Identity)), "a block's norms are RMSNorm"
    return torch.empty(0)


@torch.library.custom_op("fasteagle::fused_blocks", mutates_args=("caches",), device_types="cuda")
def fused_blocks(
    x: Tensor,
    entry: Tensor | None,
    rows: Sequence[Tensor],
    caches: Sequence[Tensor],
    tensors: Sequence[Tensor],
    formats: Sequence[int],
    eps: float,
    accumulate: str,
    window: int,
) -> Tensor:
    """Run blocks over the `Rows` of a tree, fp32 x [T, D]; see `FusedBlocks.run`.

    `entry`, in fp16, is what the attention of the first block reads instead of its normed input. A
    row's bits depend on the keys that it sees and on itself alone, not on the other rows.
    """
    settings = Settings(eps, accumulate, window)
    with on_device_of(x):
        return launch_blocks(x, entry, Rows(*rows), caches, tensors, formats, settings)


@fused_blocks.register_fake
def _fake(x: Tensor, *rest: object) -> Tensor:
    return torch.empty_like(x)


def launch_blocks(
    x: Tensor,
    entry: Tensor | None,
    rows: Rows,
    caches: Sequence[Tensor],
    tensors: Sequence[Tensor],
    formats: Sequence[int],
    settings: Settings,
) -> Tensor:
    """Launch the kernels of `fused_blocks`."""
    from fasteagle.compile.kernels.block_kernels import add, add_norm  # Triton exists with CUDA

    eps, parts, half = settings.eps, None, torch.float16
    for i in range(len(tensors) // N_TENSORS):
        weights = BlockTensors(*tensors[N_TENSORS * i : N_TENSORS * (i + 1)])
        qkv, out, gate_up, down = _packed(weights, formats[N_NUMBERS * i : N_NUMBERS * (i + 1)])
        normed = entry
        if normed is None:
            scale = _or_none(weights.attention_norm)
            limit = 0.0 if scale is not None else MOST_UNNORMED
            x, normed = add_norm(x, parts, scale, eps, half, limit)
        k_cache, v_cache = caches[2 * i : 2 * i + 2]
        parts = _attention(normed, weights, qkv, out, rows, k_cache, v_cache, settings)
        x, normed = add_norm(x, parts, weights.mlp_norm, eps, half)
        parts = _mlp(normed, gate_up, down, settings.accumulate)
        entry = None
    assert parts is not None, "at least one block"
    return add(x, parts)


def _packed(weights: BlockTensors, formats: Sequence[int]) -> list[InterleavedWeight]:
    """Return the four weights; N is rounded up to whole blocks of columns that are not read."""
    pairs = (
        (weights.qkv, weights.qkv_params),
        (weights.out, weights.out_params),
        (weights.gate_up, weights.gate_up_params),
        (weights.down, weights.down_params),
    )
    packed = []
    for i, (words, params) in enumerate(pairs):
        K, bits, group_size, offsets = formats[4 * i : 4 * i + 4]
        N = words.shape[1]
        packed.append(InterleavedWeight(words, params, N, K, bits, group_size, bool(offsets)))
    return packed


def _or_none(tensor: Tensor) -> Tensor | None:
    return tensor if tensor.numel() else None


def _attention(
    normed: Tensor,
    weights: BlockTensors,
    qkv: InterleavedWeight,
    out: InterleavedWeight,
    rows: Rows,
    k_cache: Tensor,
    v_cache: Tensor,
    settings: Settings,
) -> Tensor:
    """Return partial sums [S, T, D] of the attention layer's addition to the residual stream."""
    from fasteagle.compile.kernels import block_kernels, tree_kernels
    from fasteagle.quant import kernels

    view = TreeView(rows.seq_len, rows.paths, rows.depths, settings.window or None)
    parts = kernels.partial_sums(normed, qkv, settings.accumulate)
    E = rows.cos.shape[2]
    bias, q_norm = _or_none(weights.qkv_bias), _or_none(weights.q_norm)
    new = tree_kernels.Unrotated(
        parts, bias, rows.cos, rows.sin, rows.slots, out.K // E, weights.mlp_norm.dtype
    )
    # Norms of attention heads are sums, whose order must not depend on the block of rows.
    if q_norm is None and E <= tree_kernels.MAX_ROPE_DIM:
        y = tree_kernels.rope_attention(new, k_cache, v_cache, view, torch.float16)
    else:
        norms = q_norm, _or_none(weights.k_norm)
        q = block_kernels.rope(new, norms, k_cache, v_cache, settings.eps)
        y = tree_kernels.tree_attention(q, k_cache, v_cache, view, torch.float16)
    return kernels.partial_sums(y, out, settings.accumulate)


def _mlp(
    normed: Tensor, gate_up: InterleavedWeight, down: InterleavedWeight, accumulate: str
) -> Tensor:
    """Return partial sums [S, T, D] of the feed-forward layer's addition to the residual stream."""
    from fasteagle.compile.kernels import block_kernels
    from fasteagle.quant import kernels

    gated = kernels.gated(normed, gate_up, accumulate)
    if gated is None:
        parts = kernels.partial_sums(normed, gate_up, accumulate)
        gated = block_kernels.gate(parts, accumulate)
    values, scales = gated
    return kernels.partial_sums(values, down, accumulate, scales)
