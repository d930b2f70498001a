"""Attention of a draft tree's rows over the KV cache: the op over its kernels, and its slow twin.

The kernels take a `TreeView` with its path table where the reference takes a mask. A bitmask of
ancestors names the same keys, but in slot order, which differs from tree to tree, and so would the
order of the sums over them. Along its path a row meets its keys in logical order, in the blocks
that plain decoding uses, and has the same bits as there.

Shapes: T tree rows, P depths of the path table, G KV heads, group query heads of each, E head dim,
S cache slots.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from fasteagle import model
from fasteagle.config import ModelConfig
from fasteagle.tree import TreeView

MAX_HEAD_DIM = 256  # of the kernels


def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, mask: Tensor | TreeView) -> Tensor:
    """`model.attend` that also takes a `TreeView`, for which it runs the kernels.

    q [G, group * T, E], rows of a head together; caches [G, S, E]; result like q, in v's dtype.
    """
    if isinstance(mask, Tensor):
        return model.attend(q, k_cache, v_cache, mask)
    return tree_attention(q, k_cache, v_cache, *mask)


def has_kernel(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a target of this shape gets the kernels here."""
    return (
        device.type == "cuda"
        and dtype in (torch.float16, torch.bfloat16)
        and config.head_dim <= MAX_HEAD_DIM
        and importlib.util.find_spec("triton") is not None
    )


def use_tree_attention(target: model.Transformer) -> None:
    """Make the target's blocks take a `TreeView` where they took a mask, besides masks."""
    for block in target.blocks:
        block.attention.attend = attend
    target.visible_keys = lambda view, n_slots: view


def reference(q: Tensor, k_cache: Tensor, v_cache: Tensor, view: TreeView) -> Tensor:
    """What the kernels compute, by `model.attend` in fp32."""
    mask = view.mask(k_cache.shape[1])
    seen = mask.any(0).unsqueeze(1)  # slots seen by nobody may hold NaN, which 0 does not hide
    k, v = (torch.where(seen, cache, 0).float() for cache in (k_cache, v_cache))
    return model.attend(q.float(), k, v, mask).to(v_cache.dtype)


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
    """Attention of q [G, group * T, E] over caches [G, S, E] under `TreeView(seq_len, ...)`.

    The scale is 1 / sqrt(E), the softmax in fp32, the result in v's dtype. Caches may be strided
    but for E. On CUDA q and caches are fp16 or bf16 with E up to 256 (`FasteagleError`), and a
    row's bits depend on the keys it sees alone; see `tree_kernels`. Elsewhere the reference runs.
    """
    check_shapes(q, k_cache, v_cache, seq_len, paths, depths)
    return reference(q, k_cache, v_cache, TreeView(seq_len, paths, depths, window))


@tree_attention.register_fake
def _fake(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_len: Tensor,
    paths: Tensor,
    depths: Tensor,
    window: int | None = None,
) -> Tensor:
    check_shapes(q, k_cache, v_cache, seq_len, paths, depths)
    return q.new_empty(q.shape, dtype=v_cache.dtype)


@tree_attention.register_kernel("cuda")
def _cuda(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_len: Tensor,
    paths: Tensor,
    depths: Tensor,
    window: int | None = None,
) -> Tensor:
    from fasteagle.compile import tree_kernels  # Triton exists where CUDA does

    check_shapes(q, k_cache, v_cache, seq_len, paths, depths)
    return tree_kernels.tree_attention(q, k_cache, v_cache, seq_len, paths, depths, window)


def check_shapes(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, seq_len: Tensor, paths: Tensor, depths: Tensor
) -> None:
    """Assert what the callers in this package guarantee."""
    assert q.dim() == k_cache.dim() == 3, "q is [G, group * T, E], caches are [G, S, E]"
    assert k_cache.shape == v_cache.shape, "keys and values lie in the same slots"
    assert q.shape[0] == k_cache.shape[0] and q.shape[2] == k_cache.shape[2], "one q per KV head"
    assert q.dtype == k_cache.dtype == v_cache.dtype, "one dtype, for the tensor cores"
    assert k_cache.stride(2) == v_cache.stride(2) == 1, "a key is read as one piece"
    assert paths.dim() == 2 and paths.dtype == torch.int32 and depths.dim() == 1, "see TreeView"
    assert paths.shape[0] == depths.shape[0] and q.shape[1] % depths.shape[0] == 0, "T tree rows"
    assert seq_len.dim() == 0 and not seq_len.is_floating_point(), "one integer, on the device"
