"""Attention of a draft tree's rows over the KV cache, the op over its kernels and its slow twin.

At verify, tree row j lies in cache slot `seq_len + j`. It sees the committed prefix, whose slots
are positions, its ancestors and itself. The issue asked for one ancestor bitmask per row. What a
row gets instead is its path, the tree rows of its ancestors by depth: position `seq_len + d` lies
in slot `seq_len + paths[j, d]`. A bitmask names the same keys, but in slot order, which differs
from tree to tree, and so would the order of the sums over them. Along its path a row meets its keys
in logical order, in the blocks that plain decoding uses, and has the same bits as there.

Shapes: T tree rows, P depths of the path table, G KV heads, group query heads of each, E head dim,
S cache slots.
"""

from __future__ import annotations

import importlib.util
from typing import NamedTuple

import torch
from torch import Tensor

from fasteagle import model
from fasteagle.config import ModelConfig

MAX_HEAD_DIM = 256  # of the kernels


class TreeView(NamedTuple):
    """What the rows of a tree see; stands where `model.attend` takes a mask.

    Row j sees the keys at positions `0 .. seq_len + depths[j]`, with a sliding window of w only the
    last w of them. Plain decoding is the tree of one row: paths [[0]], depths [0].
    """

    seq_len: Tensor  # 0-d, integer, on the device: a replayed CUDA graph sees the text grow
    paths: (
        Tensor  # [T, P] int32: row of j's ancestor at depth d, its own at its own; see tree_paths
    )
    depths: Tensor  # [T] integer, the root's is 0; all below P
    window: int | None = None

    def mask(self, n_slots: int) -> Tensor:
        """The same as a mask [T, n_slots]: row j sees slot s."""
        depth = torch.arange(self.paths.shape[1], device=self.paths.device)
        last = (self.seq_len + self.depths).unsqueeze(1)
        key = torch.arange(n_slots, device=self.paths.device)
        first = key.new_zeros(()) if self.window is None else last - self.window + 1
        committed = (key < self.seq_len) & (key >= first)
        position = self.seq_len + depth
        seen = (position <= last) & (position >= first)
        slots = torch.where(seen, self.seq_len + self.paths, n_slots)
        mask = torch.nn.functional.pad(committed.expand(last.shape[0], -1), (0, 1))
        return mask.scatter(1, slots.long(), True)[:, :n_slots]


def tree_paths(tree_mask: Tensor, depths: Tensor, depth: int) -> Tensor:
    """Path table [T, depth + 1] int32 of `tree.ancestor_mask`'s tree_mask [T, T] and depths [T].

    `depth` is the depth of the deepest row, a number that the host knows: the drafter's, not this
    tree's. Entries behind a row's own are 0. No host sync.
    """
    rows = torch.arange(len(depths), device=depths.device, dtype=torch.int32)
    # Row j's ancestor i belongs in column depths[i]; what is no ancestor, in one cut off again.
    column = torch.where(tree_mask & (depths <= depth), depths, depth + 1)
    table = rows.new_zeros(len(depths), depth + 2)
    return table.scatter(1, column.long(), rows.expand_as(tree_mask))[:, :-1].contiguous()


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
    target.takes_tree_view = True


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
