"""Run decoder blocks on CUDA in few launches: quantized products, and our kernels between them.

A block of 4-bit weights is eight launches: norm, query-key-value, two of attention (the first with
RoPE and the new keys), output, norm, gate and up, down. It takes one more where gate and up are
split along K, and one where attention heads have norms or more than 128 columns. The partial sums
of a split product are added up by the kernel that reads them. The core runs passes under a mask
(prefill).

Shapes: T rows, D model dim, E head dim, G KV heads, S cache slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fasteagle.compile.tree_attention import OPS
from fasteagle.device import on_device_of
from fasteagle.model import Block, Cast, Ops, RMSNorm, run_blocks
from fasteagle.quant.cuda_linear import InterleavedLinear
from fasteagle.quant.interleaved import InterleavedWeight
from fasteagle.tree import TreeView

TENSORS = 13  # tensors of one block that the kernels read
FORMATS = 4  # numbers that describe a packed weight
MAX_ROWS = 64  # limit of the product kernels
# Limit of the residual stream that EAGLE-1/2's block reads, which no norm bounds: larger values are
# clamped, or fp16 accumulation of 128 products might be infinite, and infinite logits select no
# token. Draft tokens may differ by it, the text does not. Other inputs of products are bounded: 128
# columns of a normed row add up to at most sqrt(128 D) times the norm's scale, and weights enter as
# less than 1, so that scales up to 60 are in range at D = 8,192. Attention yields averages of
# values, which are in range up to 500 even if all 128 are equal. The inputs of `down` have their
# own scales. The norms are checked when a model is loaded (`fixed_norm.keep_sums_finite`).
MOST_UNNORMED = 511.75
COLUMNS = 64  # a linear's inputs are a multiple of it


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
    """Weights of blocks for the kernels: `TENSORS` tensors of each, and their formats."""

    def __init__(self, blocks: Sequence[Block], masked: Ops = OPS) -> None:
        """Collect the weights of `blocks`; the core runs passes under a mask, by ops `masked`."""
        assert all(fits(block) for block in blocks), "see fits"
        for block in blocks:
            block.mlp.gate_up.pair_halves()
        self._masked = masked
        found = [_tensors(block) for block in blocks]
        self._tensors = [tensor for tensors, _ in found for tensor in tensors]
        self._formats = [number for _, formats in found for number in formats]
        self._index = {id(block): i for i, block in enumerate(blocks)}
        self._eps = blocks[0].mlp_norm.eps
        self._accumulate = blocks[0].attention.qkv.accumulate

    @property
    def weights(self) -> tuple[list[Tensor], list[int], float, str]:
        """Tensors and formats of all blocks, the norms' eps, and the dtype of accumulation."""
        return self._tensors, self._formats, self._eps, self._accumulate

    def run(
        self,
        blocks: Sequence[Block],
        layers: Sequence[tuple[Tensor, Tensor]],
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        view: Tensor | TreeView,
    ) -> Tensor:
        """Return the residual stream [T, D] after `blocks`, which write into their `layers`."""
        if isinstance(view, Tensor) or x.shape[0] > MAX_ROWS:
            return run_blocks(blocks, layers, x, cos, sin, slots, view, self._masked)
        caches = [cache for layer in layers for cache in layer]
        first = self._index[id(blocks[0])]
        last = first + len(blocks)
        seen = (view.seq_len, view.paths, view.depths, view.window or 0)
        return fused_blocks(
            x,
            cos,
            sin,
            slots,
            *seen,
            caches,
            self._tensors[TENSORS * first : TENSORS * last],
            self._formats[4 * FORMATS * first : 4 * FORMATS * last],
            self._eps,
            self._accumulate,
        )


def _tensors(block: Block) -> tuple[list[Tensor], list[int]]:
    """Return tensors and formats of a block; parts that the block lacks are empty tensors."""
    attention, mlp = block.attention, block.mlp
    linears = (attention.qkv, attention.out, mlp.gate_up, mlp.down)
    qkv, out, gate_up, down = ([linear.words, linear.params] for linear in linears)
    bias = torch.empty(0) if attention.qkv.bias is None else attention.qkv.bias.detach()
    norms = _scale(attention.q_norm), _scale(attention.k_norm)
    tensors = [_scale(block.attention_norm), *qkv, bias, *norms, *out]
    tensors += [_scale(block.mlp_norm), *gate_up, *down]
    assert len(tensors) == TENSORS, "as `_Weights` reads them"
    formats = []
    for linear in linears:
        bits, group_size, offsets = linear.format
        formats += [linear.in_features, bits, group_size, int(offsets)]
    return tensors, formats


def _scale(norm: nn.Module) -> Tensor:
    if isinstance(norm, RMSNorm):
        return norm.weight.detach()
    assert isinstance(norm, (Cast, nn.Identity)), "a block's norms are RMSNorm"
    return torch.empty(0)


class _Weights:
    """Weights of one block, from its part of the lists of `FusedBlocks`."""

    def __init__(self, tensors: Sequence[Tensor], formats: Sequence[int]) -> None:
        found: list[Tensor | None] = [t if t.numel() else None for t in tensors]
        self.attention_norm, self.mlp_norm = found[0], tensors[8]  # the first may be missing
        self.vectors = found[3], found[4], found[5]
        places = (1, 6, 9, 11)  # index of each linear's words, which its params follow
        self.qkv, self.out, self.gate_up, self.down = (
            packed(tensors[at], tensors[at + 1], formats[FORMATS * i : FORMATS * (i + 1)])
            for i, at in enumerate(places)
        )


def packed(words: Tensor, params: Tensor, format: Sequence[int]) -> InterleavedWeight:
    """Return a weight whose N is rounded up to whole blocks of columns; the padding is not read."""
    K, bits, group_size, offsets = format
    return InterleavedWeight(words, params, words.shape[1], K, bits, group_size, bool(offsets))


@torch.library.custom_op("fasteagle::fused_blocks", mutates_args=("caches",), device_types="cuda")
def fused_blocks(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    seq_len: Tensor,
    paths: Tensor,
    depths: Tensor,
    window: int,
    caches: Sequence[Tensor],
    tensors: Sequence[Tensor],
    formats: Sequence[int],
    eps: float,
    accumulate: str,
) -> Tensor:
    """Run blocks over the rows of a tree, fp32 x [T, D]; see `FusedBlocks.run`.

    A row's bits depend on the keys that it sees and on itself alone, not on the other rows.
    """
    view = TreeView(seq_len, paths, depths, window or None)
    with on_device_of(x):
        return launch_blocks(x, (cos, sin, slots), view, caches, tensors, formats, eps, accumulate)


@fused_blocks.register_fake
def _fake(x: Tensor, *rest: object) -> Tensor:
    return torch.empty_like(x)


def launch_blocks(
    x: Tensor,
    rows: tuple[Tensor, Tensor, Tensor],
    view: TreeView,
    caches: Sequence[Tensor],
    tensors: Sequence[Tensor],
    formats: Sequence[int],
    eps: float,
    accumulate: str,
) -> Tensor:
    """Launch the kernels of `fused_blocks`, on CUDA or in Triton's interpreter."""
    from fasteagle.compile.kernels import block_kernels as kernels  # Triton exists where CUDA does

    weights = tensors, formats
    x, parts = launch_up_to_last_sum(x, None, rows, view, caches, weights, eps, accumulate, None)
    return kernels.add(x, parts)


def launch_up_to_last_sum(
    x: Tensor,
    parts: Tensor | None,
    rows: tuple[Tensor, Tensor, Tensor],
    view: TreeView,
    caches: Sequence[Tensor],
    weights: tuple[Sequence[Tensor], Sequence[int]],
    eps: float,
    accumulate: str,
    entry: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Run blocks; return x [T, D] and `parts` [S, T, D], whose total is the residual stream.

    The input is such a pair too, or x alone; with `parts`, x may be one row [D].
    """
    from fasteagle.compile.kernels import block_kernels as kernels

    tensors, formats = weights
    n_blocks = len(tensors) // TENSORS
    for i in range(n_blocks):
        block = _Weights(
            tensors[TENSORS * i : TENSORS * (i + 1)],
            formats[4 * FORMATS * i : 4 * FORMATS * (i + 1)],
        )
        k_cache, v_cache = caches[2 * i : 2 * i + 2]
        if entry is None:
            scale = block.attention_norm
            limit = 0.0 if scale is not None else MOST_UNNORMED
            x, normed = kernels.add_norm(x, parts, scale, eps, torch.float16, limit)
        else:
            normed = entry
        parts = _attention(normed, block, rows, view, k_cache, v_cache, eps, accumulate)
        x, normed = kernels.add_norm(x, parts, block.mlp_norm, eps, torch.float16)
        parts = _mlp(normed, block, accumulate)
    assert parts is not None, "at least one block"
    return x, parts


def _attention(
    normed: Tensor,
    weights: _Weights,
    rows: tuple[Tensor, Tensor, Tensor],
    view: TreeView,
    k_cache: Tensor,
    v_cache: Tensor,
    eps: float,
    accumulate: str,
) -> Tensor:
    """Return partial sums [S, T, D] of the attention layer's addition to the residual stream."""
    from fasteagle.compile.kernels import block_kernels, tree_kernels
    from fasteagle.quant import kernels

    parts = kernels.partial_sums(normed, weights.qkv, accumulate)
    E = rows[0].shape[2]
    n_head, dtype = weights.out.K // E, weights.mlp_norm.dtype
    bias, *norms = weights.vectors
    # Norms of attention heads are sums, whose order must not depend on the block of rows.
    if norms[0] is None and E <= tree_kernels.MAX_ROPE_DIM:
        new = tree_kernels.Unrotated(parts, bias, *rows, n_head, dtype)
        y = tree_kernels.rope_attention(new, k_cache, v_cache, view, torch.float16)
    else:
        vectors = weights.vectors
        q = block_kernels.rope(parts, vectors, *rows, k_cache, v_cache, n_head, eps, dtype)
        y = tree_kernels.tree_attention(q, k_cache, v_cache, *view, out_rows=torch.float16)
    return kernels.partial_sums(y, weights.out, accumulate)


def _mlp(normed: Tensor, weights: _Weights, accumulate: str) -> Tensor:
    """Return partial sums [S, T, D] of the feed-forward layer's addition to the residual stream."""
    from fasteagle.compile.kernels import block_kernels
    from fasteagle.quant import kernels

    found = kernels.gated(normed, weights.gate_up, accumulate)
    if found is None:
        parts = kernels.partial_sums(normed, weights.gate_up, accumulate)
        found = block_kernels.gate(parts, accumulate)
    values, scales = found
    return kernels.partial_sums(values, weights.down, accumulate, scales)
