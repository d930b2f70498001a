"""Run decoder blocks on CUDA in few launches: quantized products, and our kernels between them.

A block of 4-bit weights is eight launches: norm, query-key-value, two of attention (the first with
RoPE and the new keys), output, norm, gate and up, down. It takes one more where gate and up are
split along K, one where the first kernel of attention does not take the heads, one to choose
experts, and two for a shared expert. The partial sums of a split product, and the results of a
row's experts, are added up by the kernel that reads them. Of more than 64 rows, products are
cuBLAS's over dequantized weights, and attention of a prompt is torch's. The block of a draft head
runs alone, between the layers of `EagleHead.forward`.

Shapes: T rows, D model dim, E head dim, G KV heads, S cache slots.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fasteagle.compile.cuda_tensors import BlockWeights, weights_of
from fasteagle.compile.tree_attention import prompt_attention
from fasteagle.model import Block, Layer, MoE, PromptView, RMSNorm, Rows
from fasteagle.quant.cuda_linear import InterleavedLinear
from fasteagle.quant.interleaved import BLOCK_N
from fasteagle.tree import TreeView

if TYPE_CHECKING:  # Triton exists with CUDA only
    from fasteagle.compile.kernels.tree_kernels import Cache

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
MAX_ROPE_DIM = 128  # columns of the widest attention heads that `prefix_kernel` also rotates
COLUMNS = 64  # a linear's inputs are a multiple of it, and so are the columns of an expert


def tensors_of(rows: Rows) -> list[Tensor]:
    """Return the tensors of `rows`, without a window: an operator takes nothing else."""
    *places, view = rows
    if isinstance(view, PromptView):
        return [*places, view.keys]
    return [*places, view] if isinstance(view, Tensor) else [*places, *view[:3]]


def rows_of(tensors: Sequence[Tensor], window: int) -> Rows:
    """Return the rows with these `tensors`; a window of 0 is none."""
    cos, sin, slots, *own = tensors
    if len(own) == 3:
        return Rows(cos, sin, slots, TreeView(own[0], own[1], own[2], window or None))
    is_mask = own[0].dim() == 2
    return Rows(cos, sin, slots, own[0] if is_mask else PromptView(len(slots), own[0]))


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings that all blocks of a model share."""

    eps: float
    accumulate: str  # dtype of the sum within a group
    top_k: int  # experts of a row; 0: no block has experts
    renormalizes: bool  # whether the weights of a row's experts are a softmax of their own
    weight_scale: float  # factor of these weights


def rotates(E: int, normed: bool) -> bool:
    """Return whether the first kernel of attention norms and rotates heads of E columns itself.

    Norms sum in pairs of columns, of which there is a power of two then.
    """
    return E <= MAX_ROPE_DIM and (not normed or not E & (E - 1))


def fits(block: Block) -> bool:
    """Return whether the CUDA kernels can run this block."""
    return obstacle(block) is None


def obstacle(block: Block) -> str | None:
    """Return what of this block the CUDA kernels cannot run, or None."""
    attention, mlp = block.attention, block.mlp
    layers = [mlp]
    if isinstance(mlp, MoE) and mlp.shared is not None:
        layers.append(mlp.shared)
    others = [attention.out, *(linear for each in layers for linear in (each.gate_up, each.down))]
    linears = [attention.qkv, *others]
    if not all(type(linear) is InterleavedLinear for linear in linears):
        return "weights that are not quantized, or in another order"
    if not all(linear.in_features % COLUMNS == 0 for linear in linears):
        return f"inputs that are no multiple of {COLUMNS}"
    if not all(linear.bias is None for linear in others):
        return "biases"
    if isinstance(mlp, MoE) and mlp.gate_up.in_features % BLOCK_N:
        return f"experts at a model dim that is no multiple of {BLOCK_N}"
    if attention.norm_whole:
        return "norms of whole queries and keys"
    # A row of int8 ends with a scale of four bytes.
    if attention.head_dim % 4 or not 16 <= attention.head_dim <= 256:
        return f"attention heads of {attention.head_dim} columns"
    if isinstance(attention.q_norm, RMSNorm) != isinstance(attention.k_norm, RMSNorm):
        return "norms of queries or keys alone"
    return None


class SharedWeights:
    """Weights of blocks, and settings; operators find them by the address of `key`.

    As arguments they would be hundreds of inputs of a compiled pass: 20 seconds of tracing at 7B.
    """

    def __init__(self, blocks: list[Block], settings: Settings) -> None:
        self.blocks, self.settings = blocks, settings
        self.weights = [weights_of(block) for block in blocks]
        self.key = self.weights[0].qkv.words

    @classmethod
    def of(cls, blocks: list[Block]) -> SharedWeights:
        """Return one object for all who run the same blocks at a time.

        A compiled pass may have been traced with a `FusedBlocks` that is gone when it runs.
        """
        qkv = blocks[0].attention.qkv
        settings = Settings(blocks[0].mlp_norm.eps, qkv.accumulate, *_routing(blocks))
        address = qkv.words.data_ptr()
        shared = _LIVING.get(address)
        if shared is None or (shared.blocks, shared.settings) != (blocks, settings):
            shared = _LIVING[address] = cls(blocks, settings)
        return shared


_LIVING: weakref.WeakValueDictionary[int, SharedWeights] = weakref.WeakValueDictionary()


class FusedBlocks:
    """Blocks of a model or of a draft head by the kernels."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        assert all(fits(block) for block in blocks), "see fits"
        self._index = {id(block): i for i, block in enumerate(blocks)}
        self.shared = SharedWeights.of(list(blocks))

    def run(
        self,
        blocks: Sequence[Block],
        layers: Sequence[tuple[Cache, Cache]],
        x: Tensor,
        rows: Rows,
        entry: Tensor | None = None,
    ) -> Tensor:
        """Return the residual stream [T, D]; blocks write into `layers`, of one text or several."""
        first, view = self._index[id(blocks[0])], rows.visible
        caches = [cache for layer in layers for cache in layer]
        window = (view.window or 0) if isinstance(view, TreeView) else 0
        # The dispatcher, which takes tensors only, costs the host more than a launch.
        traced = torch.compiler.is_compiling() and isinstance(caches[0], Tensor)
        launch = fused_blocks if traced else launch_blocks
        return launch(x, entry, tensors_of(rows), caches, self.shared.key, first, window)

    def run_alone(self, x: Tensor, rows: Rows, layer: Layer, entry: Tensor | None = None) -> Tensor:
        """Run the single block of a draft head; see `Block.forward`."""
        x = x.clamp(-LARGEST_FEATURE, LARGEST_FEATURE)  # no norm bounds it in EAGLE-1/2
        entry = None if entry is None else entry.half()
        y = self.run(self.shared.blocks, [layer], x, rows, entry)
        return y.clamp(-LARGEST_FEATURE, LARGEST_FEATURE)


def _routing(blocks: Sequence[Block]) -> tuple[int, bool, float]:
    """Return the last three of the `Settings`, which all mixtures of experts in a model share."""
    configs = [block.mlp.config for block in blocks if isinstance(block.mlp, MoE)]
    if not configs:
        return 0, False, 1.0
    config = configs[0]
    return config.top_k, config.renormalize, config.scale


@torch.library.custom_op("fasteagle::fused_blocks", mutates_args=("caches",), device_types="cuda")
def fused_blocks(
    x: Tensor,
    entry: Tensor | None,
    rows: Sequence[Tensor],
    caches: Sequence[Tensor],
    key: Tensor,
    first: int,
    window: int,
) -> Tensor:
    """Run blocks over the tensors of `Rows`, fp32 x [T, D]; see `FusedBlocks.run`.

    As many blocks run as there are pairs of `caches`, from `first` on of the `SharedWeights` with
    this `key`. `entry`, in fp16, is what the attention of the first block reads instead of its
    normed input. A row's bits depend on the keys that it sees and on itself alone, not on the other
    rows, if they are up to `MAX_ROWS` of a tree.
    """
    return launch_blocks(x, entry, rows, caches, key, first, window)


@fused_blocks.register_fake
def _fake(x: Tensor, *rest: object) -> Tensor:
    return torch.empty_like(x)


def launch_blocks(
    x: Tensor,
    entry: Tensor | None,
    rows: Sequence[Tensor],
    caches: Sequence[Cache],
    key: Tensor,
    first: int,
    window: int,
) -> Tensor:
    """Launch the kernels of `fused_blocks`, over caches of one sequence or of several."""
    from fasteagle.compile.kernels.block_kernels import add, add_norm  # Triton exists with CUDA

    shared, own, parts = _LIVING[key.data_ptr()], rows_of(rows, window), None
    settings, half = shared.settings, torch.float16
    with torch.cuda.device_of(x):
        for i, weights in enumerate(shared.weights[first : first + len(caches) // 2]):
            normed = entry
            if normed is None:
                limit = 0.0 if weights.attention_norm is not None else MOST_UNNORMED
                x, normed = add_norm(x, parts, weights.attention_norm, settings.eps, half, limit)
            k_cache, v_cache = caches[2 * i : 2 * i + 2]
            parts = _attention(normed, weights, own, k_cache, v_cache, settings)
            if weights.router is not None:
                x, parts = _experts(x, parts, weights, settings)
            else:
                x, normed = add_norm(x, parts, weights.mlp_norm, settings.eps, half)
                parts = _mlp(normed, weights, settings.accumulate)
            entry = None
        return x if parts is None else add(x, parts)


def _attention(
    normed: Tensor,
    weights: BlockWeights,
    rows: Rows,
    k_cache: Cache,
    v_cache: Cache,
    settings: Settings,
) -> Tensor:
    """Return partial sums [S, T, D] of the attention layer's addition to the residual stream."""
    from fasteagle.compile.kernels import block_kernels, tree_kernels
    from fasteagle.quant import kernels

    view, half = rows.visible, torch.float16
    parts = kernels.partial_sums(normed, weights.qkv, settings.accumulate)
    T, _, E = rows.cos.shape
    new = tree_kernels.Unrotated(
        *(parts, weights.qkv_bias, *rows[:3], weights.out.K // E, weights.mlp_norm.dtype),
        q_norm=weights.q_norm,
        k_norm=weights.k_norm,
        eps=settings.eps,
    )
    if not isinstance(view, TreeView):
        q = block_kernels.rope(new, k_cache, v_cache)
        y = prompt_attention(q, k_cache, v_cache, view)
        y = y.view(len(y), -1, T, E).permute(2, 0, 1, 3).reshape(T, -1).to(half)
    elif rotates(E, weights.q_norm is not None):
        y = tree_kernels.rope_attention(new, k_cache, v_cache, view, half)
    else:
        q = block_kernels.rope(new, k_cache, v_cache)
        y = tree_kernels.tree_attention(q, k_cache, v_cache, view, half)
    return kernels.partial_sums(y, weights.out, settings.accumulate)


def _mlp(normed: Tensor, weights: BlockWeights, accumulate: str) -> Tensor:
    """Return partial sums [S, T, D] of the feed-forward layer's addition to the residual stream."""
    from fasteagle.compile.kernels import gate_kernels
    from fasteagle.quant import kernels

    gated = kernels.gated(normed, weights.gate_up, accumulate)
    if gated is None:
        parts = kernels.partial_sums(normed, weights.gate_up, accumulate)
        if len(normed) > MAX_ROWS:
            gated = gate_kernels.gate_rows(parts[0], accumulate)
        else:
            gated = gate_kernels.gate(parts, accumulate)
    values, scales = gated
    return kernels.partial_sums(values, weights.down, accumulate, scales)


def _experts(
    x: Tensor, parts: Tensor, weights: BlockWeights, settings: Settings
) -> tuple[Tensor, Tensor | None]:
    """Run `run_experts` over as many rows at a time as its kernels take.

    Results of more rows are added up at once, as they are several times the residual stream.
    """
    from fasteagle.compile.kernels.block_kernels import add

    if len(x) <= MAX_ROWS:
        return run_experts(x, parts, weights, settings)
    pieces = zip(x.split(MAX_ROWS), parts.split(MAX_ROWS, 1), strict=True)
    return torch.cat([add(*run_experts(*piece, weights, settings)) for piece in pieces]), None


def run_experts(
    x: Tensor, parts: Tensor, weights: BlockWeights, settings: Settings
) -> tuple[Tensor, Tensor]:
    """Return the residual stream x + the sum of `parts`, and its experts' results [k, T, D].

    These are in the order of expert ids; then comes that of a shared expert. T is at most
    `MAX_ROWS`.
    """
    from fasteagle.compile.kernels import expert_kernels

    gate_up, down, accumulate = weights.gate_up, weights.down, settings.accumulate
    k, shares = settings.top_k, weights.shared is not None
    x, normed, scores = expert_kernels.norm_scores(
        x, parts, weights.mlp_norm, weights.router, settings.eps
    )
    n_expert = gate_up.N // (2 * down.K)
    routing, shared = expert_kernels.route(
        scores,
        n_expert,
        k,
        settings.renormalizes,
        settings.weight_scale,
        shares,
        weights.choice_bias,
    )
    results = x.new_empty(k + shares, *x.shape)
    values, scales = expert_kernels.gated(normed, gate_up, routing, accumulate)
    expert_kernels.weighted(values, scales, down, routing, accumulate, results[:k])
    if shared is not None and weights.shared is not None:
        gate_up, down = weights.shared
        values, scales = expert_kernels.gated(normed, gate_up, shared, accumulate)
        expert_kernels.weighted(values, scales, down, shared, accumulate, results[k:])
    return x, results
