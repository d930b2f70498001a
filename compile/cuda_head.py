"""Run a step of a draft head on CUDA: its block by `cuda_blocks`, with the layers around it.

Before the block, the fc of EAGLE-1/2 leaves partial sums, which the block's first norm adds up. The
block's last kernel writes both the input of the LM head and the next features. The core runs
prompts, which are under a mask.

Shapes: T rows, D model dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fasteagle.compile.cuda_blocks import (
    COLUMNS,
    FORMATS,
    MAX_ROWS,
    MOST_UNNORMED,
    FusedBlocks,
    launch_up_to_last_sum,
    packed,
)
from fasteagle.compile.fixed_norm import LARGEST_HALF
from fasteagle.compile.tree_attention import OPS
from fasteagle.device import on_device_of
from fasteagle.model import EagleHead, KVCache
from fasteagle.quant.cuda_linear import InterleavedLinear
from fasteagle.tree import TreeView


class AttendingHead:
    """Draft head with our tree attention kernels in its block; the core runs everything else.

    `block` is the compiled block, or None.
    """

    def __init__(self, head: EagleHead, block: Callable[..., Tensor] | None = None) -> None:
        self._head, self._compiled = head, block

    def forward(
        self,
        tokens: Tensor,
        features: Tensor,
        positions: Tensor,
        slots: Tensor,
        visible: Tensor | TreeView,
        cache: KVCache,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run a step of the draft head; see `EagleHead.forward`."""
        if isinstance(visible, TreeView) and len(visible.depths) > MAX_ROWS:  # a prompt
            visible = visible.mask(cache.layers[0][0].shape[1])
        found: tuple[Tensor, Tensor] = self._head(
            tokens, features, positions, slots, visible, cache, rows, self._block
        )
        return found

    def _block(self, *rows: Any) -> Tensor:
        if self._compiled is not None:
            return self._compiled(*rows)
        x: Tensor = self._head.block(*rows, OPS)
        return x


class FusedHead:
    """Weights of a draft head as the kernels read them, and its `forward` over a tree."""

    def __init__(self, head: EagleHead) -> None:
        self._head, self._masked = head, AttendingHead(head)
        self._block = FusedBlocks([head.block])
        is_eagle3 = head.config.eagle3 is not None
        self._fc: list[Tensor] = []  # words, params, bias
        self._fc_format: list[int] = []
        fc = head.fc
        if not is_eagle3 and isinstance(fc, InterleavedLinear) and fc.in_features % COLUMNS == 0:
            fc.expect_range(MOST_UNNORMED)  # after the first level it reads its own residual stream
            bias = fc.words.new_zeros(fc.out_features, dtype=torch.float32)
            self._fc = [fc.words, fc.params, bias if fc.bias is None else fc.bias.detach()]
            bits, group_size, offsets = fc.format
            self._fc_format = [fc.in_features, bits, group_size, int(offsets)]
        self._norm = head.norm if is_eagle3 else None

    def forward(
        self,
        tokens: Tensor,
        features: Tensor,
        positions: Tensor,
        slots: Tensor,
        visible: Tensor | TreeView,
        cache: KVCache,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run a step of the draft head; see `EagleHead.forward`."""
        if isinstance(visible, Tensor) or len(visible.depths) > MAX_ROWS:
            return self._masked.forward(tokens, features, positions, slots, visible, cache, rows)
        head, entry = self._head, None
        cos, sin = head.rope_cos[positions].unsqueeze(1), head.rope_sin[positions].unsqueeze(1)
        embeds = head.embedding(tokens)
        if self._fc:
            pair = torch.cat((embeds, features), dim=-1)
            x = pair.clamp(-MOST_UNNORMED, MOST_UNNORMED).half()
        else:
            x, entry = head.enter(embeds, features)
        x, said = fused_head(
            x,
            None if entry is None else entry.half(),
            cos,
            sin,
            slots,
            visible.seq_len,
            visible.paths,
            visible.depths,
            visible.window or 0,
            cache.layers[0],
            *self._block.weights,
            self._fc,
            self._fc_format,
            None if self._norm is None else self._norm.weight.detach(),
            _reads_half(head),
            features.dtype,
        )
        if rows is not None:
            x, said = x.index_select(0, rows), said.index_select(0, rows)
        eagle3 = head.config.eagle3
        following = said if eagle3 is not None and eagle3.norm_output else x
        return head.lm_head(said), following.to(features.dtype)


def _reads_half(head: EagleHead) -> bool:
    """Return whether the LM head's product is by our kernel, which takes fp16."""
    lm_head: Any = head.lm_head
    return isinstance(getattr(lm_head, "linear", lm_head), InterleavedLinear)


@torch.library.custom_op("fasteagle::fused_head", mutates_args=("caches",), device_types="cuda")
def fused_head(
    x: Tensor,
    entry: Tensor | None,
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
    fc: Sequence[Tensor],
    fc_format: Sequence[int],
    norm: Tensor | None,
    half: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return the residual stream after a draft head's block, fp32 [T, D], and the LM head's input.

    With `fc`, x is the input of fc, fp16 [T, 2 D]; without it x is the residual stream before the
    block, and `entry` the input of its attention. The LM head's input is the residual stream,
    normed by `norm` if there is one, in fp16 if `half`, else in `dtype`.
    """
    view = TreeView(seq_len, paths, depths, window or None)
    weights = tensors, formats, eps, accumulate
    with on_device_of(x):
        rows = cos, sin, slots
        return launch_head(x, entry, rows, view, caches, weights, fc, fc_format, norm, half, dtype)


@fused_head.register_fake
def _(x: Tensor, entry: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    tensors, fc, half, dtype = rest[8], rest[12], rest[-2], rest[-1]
    D = fc[2].shape[0] if fc else x.shape[1]
    assert tensors, "a block"
    out = x.new_empty(x.shape[0], D, dtype=torch.float32)
    return out, torch.empty_like(out, dtype=torch.float16 if half else dtype)


def launch_head(
    x: Tensor,
    entry: Tensor | None,
    rows: tuple[Tensor, Tensor, Tensor],
    view: TreeView,
    caches: Sequence[Tensor],
    weights: tuple[Sequence[Tensor], Sequence[int], float, str],
    fc: Sequence[Tensor],
    fc_format: Sequence[int],
    norm: Tensor | None,
    half: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Launch the kernels of `fused_head`, on CUDA or in Triton's interpreter."""
    from fasteagle.compile.kernels import block_kernels  # Triton exists where CUDA does
    from fasteagle.quant import kernels

    tensors, formats, eps, accumulate = weights
    parts = None
    if fc:
        assert len(fc_format) == FORMATS
        words, params, bias = fc
        parts = kernels.partial_sums(x, packed(words, params, fc_format), accumulate)
        x = bias
    x, parts = launch_up_to_last_sum(
        x, parts, rows, view, caches, (tensors, formats), eps, accumulate, entry
    )
    # No norm bounds the output of EAGLE-1/2.
    limit = LARGEST_HALF if half and norm is None else 0.0
    return block_kernels.add_norm(x, parts, norm, eps, torch.float16 if half else dtype, limit)
