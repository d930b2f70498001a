"""Attention of a draft tree's rows over the KV cache: the op over its kernels, and its reference.

The kernels take a `TreeView` with its path table where the reference takes a mask. A bitmask of
ancestors would name the keys in slot order, which differs from tree to tree, and so would the order
of the sums over them. Along its path a row reads its keys in logical order, in the blocks that
plain decoding uses, so that its bits equal those of plain decoding.

Shapes: T tree rows, P depths of the path table, G KV heads, group query heads of each, E head dim,
S cache slots.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fasteagle import model
from fasteagle.compile.int8_cache import dense_rows
from fasteagle.config import ModelConfig
from fasteagle.model import PromptView, Visible
from fasteagle.tree import TreeView

# Of the kernels: the least product of the tensor cores, and what a program's registers hold.
HEAD_DIMS = range(16, 257)
# Without cuDNN's, which torch prefers on Hopper: it builds a plan for each number of rows and keys.
PROMPT_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, visible: Visible) -> Tensor:
    """Compute `model.attend`, by the tree attention kernels for a `TreeView`.

    q [G, group * T, E], rows of a head together; caches [G, S, E], or int8 (`int8_cache`).
    """
    if isinstance(visible, TreeView):
        return tree_attention(q, k_cache, v_cache, *visible)
    return prompt_attention(q, k_cache, v_cache, visible)


def prompt_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, visible: Tensor | PromptView
) -> Tensor:
    """Compute `model.attend` on CUDA without scores in memory (600 MB for 1,024 rows at 7B)."""
    n_keys = len(visible.keys) if isinstance(visible, PromptView) else visible.shape[1]
    k, v = (dense_rows(cache[:, :n_keys], q.dtype) for cache in (k_cache, v_cache))
    if not q.is_cuda:
        return model.attend(q, k, v, model.as_mask(visible, n_keys))
    if isinstance(visible, PromptView):
        return causal_attention(q, k, v, visible.n_rows)
    return fused_attention(q, k, v, visible)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, T: int) -> Tensor:
    """Compute attention of the last T rows of a text over all its keys and values [G, S, E].

    Without a mask torch takes FlashAttention, which skips the blocks of keys that no row sees.
    """
    G, S, E = k.shape
    rows = q.view(G, -1, T, E)  # query heads of a group read the same memory
    keys, values = (part.unsqueeze(1).expand(-1, rows.shape[1], -1, -1) for part in (k, v))
    mask = None
    if T < S:
        from torch.nn.attention.bias import causal_lower_right  # loads the compiler: 1.4 s

        mask = causal_lower_right(T, S)  # not in memory: the kernel knows it
    with sdpa_kernel(PROMPT_KERNELS):
        y = F.scaled_dot_product_attention(rows, keys, values, mask, is_causal=mask is None)
    return y.flatten(1, 2)


def fused_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, mask: Tensor) -> Tensor:
    """Compute `model.attend` by torch's fused kernel; query heads of a group are rows of one."""
    group = q.shape[1] // mask.shape[0]
    rows = mask if group == 1 else mask.repeat(group, 1)
    with sdpa_kernel(PROMPT_KERNELS):
        y = F.scaled_dot_product_attention(q[None], k_cache[None], v_cache[None], attn_mask=rows)
    return y[0]


def has_kernel(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a model of this shape, dtype and device runs the kernels."""
    return (
        device.type == "cuda"
        and dtype in (torch.float16, torch.bfloat16)
        and config.head_dim in HEAD_DIMS
    )


OPS = model.Ops(attend=attend, views=True)


def reference(q: Tensor, k_cache: Tensor, v_cache: Tensor, view: TreeView) -> Tensor:
    """Compute the result of the kernels by `model.attend` in fp32."""
    mask = view.mask(k_cache.shape[1])
    seen = mask.any(0).unsqueeze(1)  # unseen slots may hold NaN, which 0 does not hide
    caches = (dense_rows(cache, q.dtype) for cache in (k_cache, v_cache))
    k, v = (torch.where(seen, cache, 0).float() for cache in caches)
    return model.attend(q.float(), k, v, mask).to(q.dtype)


@torch.library.custom_op("fasteagle::tree_attention", mutates_args=(), device_types="cpu")
def tree_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_len: Tensor,
    paths: Tensor,
    depths: Tensor,
    window: int | None = None,
) -> Tensor:
    """Compute attention of q [G, group * T, E] over caches [G, S, E] under a `TreeView`.

    The scale is 1 / sqrt(E), the softmax in fp32, the result in q's dtype. Caches may be strided
    but for E, and in int8 (`int8_cache`). On CUDA q is fp16 or bf16 with E of
    `HEAD_DIMS` (see `has_kernel`), and a row's bits depend only on the keys it sees; see
    `tree_kernels`. Elsewhere the reference runs.
    """
    return reference(q, k_cache, v_cache, TreeView(seq_len, paths, depths, window))


@tree_attention.register_fake
def _fake(q: Tensor, *rest: Any) -> Tensor:
    return q.new_empty(q.shape)


@tree_attention.register_kernel("cuda")
def _cuda(q: Tensor, k_cache: Tensor, v_cache: Tensor, *view: Any) -> Tensor:
    from fasteagle.compile.kernels import tree_kernels  # Triton exists where CUDA does

    with torch.cuda.device_of(q):
        return tree_kernels.tree_attention(q, k_cache, v_cache, TreeView(*view))
