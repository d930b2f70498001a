"""Triton attention of a draft tree's rows over a long cache, each independent bit for bit.

The cache is cut at fixed logical positions: blocks of keys, and splits of SPLIT positions whose
softmax is computed apart and merged afterwards, the split-KV idea of Flash-Decoding (Dao et al.
2023). `prefix_kernel` reads every committed block that is full, once for a block of rows.
`finish_kernel` does the rest of each tree row: the blocks that reach past the committed text, whose
keys it gathers along the row's path, and the merge.

A row's bits depend only on its own logical keys. Both kernels read them in the same blocks, in the
same order, by the same function `_attend_block`. The threads that the compiler gives a row do not
matter: maxima are exact, and every sum over keys or over E is a tensor core product by m16n8k16,
added up in ascending order of K. The sum over splits is in the order that one compiled program has
for every row; neither T nor the rest of the tree is among its constants. For blocks of 64 rows
Hopper would use another instruction, so they have 16 or 32. Operations are fused only where the
code says so.

Shapes: T tree rows, G KV heads, R = group * T query rows of a KV head, E head dim, S cache slots.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple, TypeAlias

import torch
import triton
from torch import Tensor

from fasteagle.compile.kernels.attention_kernels import finish_kernel, prefix_kernel
from fasteagle.compile.kernels.sequence_kernels import Sequences
from fasteagle.tree import TreeView

SPLIT = 256  # logical positions; a constant, so that nothing else can move a row's bits
ROW_BLOCKS = (16, 32)  # query rows of one program
SUM_COLUMNS = 8  # columns of the product with ones that sums a row: one instruction's minimum
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}  # fused only where the code says so


def key_block(E: int) -> int:
    """Return the number of keys per step, for which shared memory holds two programs."""
    return 64 if E <= 128 else 32


def row_block(n_rows: int) -> int:
    """Return the number of query rows of one program of `prefix_kernel`."""
    return ROW_BLOCKS[0] if n_rows <= ROW_BLOCKS[0] else ROW_BLOCKS[1]


class Unrotated(NamedTuple):
    """Queries, keys and values of a tree's rows before RoPE, and the slots they go to.

    The norms are the scales [E] of those of queries and keys, where the model has them.
    """

    parts: Tensor  # [S, T, Np], partial sums of the product: fp32, or rounded ones if S is 1
    bias: Tensor | None  # [Np]
    cos: Tensor  # [T, 1, E]
    sin: Tensor  # [T, 1, E]
    slots: Tensor  # [T], slots of the cache
    n_head: int  # number of query heads
    dtype: torch.dtype  # dtype of the products
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0


@dataclasses.dataclass(frozen=True)
class SharedPlane:
    """One plane of the caches of several sequences, which kernels find by their addresses.

    All caches have G heads and rows of E elements in one dtype, and at most S slots.
    """

    sequences: Sequences
    number: int  # of the plane; values come after their keys
    shape: tuple[int, int, int]  # [G, S, E]
    dtype: torch.dtype
    row_block: int  # query rows of a block, as `sequences` has them

    @property
    def device(self) -> torch.device:
        """Device of the caches."""
        return self.sequences.table.device


Cache: TypeAlias = Tensor | SharedPlane  # keys or values [G, S, E] of one sequence, or of several


def cache_arguments(
    k_cache: Cache, v_cache: Cache
) -> tuple[tuple[Tensor, Tensor], tuple[int, ...], int, Sequences | None]:
    """Return arguments of the kernels: keys and values, their strides, plane, and sequences."""
    if isinstance(k_cache, SharedPlane):
        table, stride = k_cache.sequences.table, k_cache.shape[2]
        return (table, table), (0, stride, 0, stride), k_cache.number, k_cache.sequences
    assert isinstance(v_cache, Tensor), "both of one sequence, or both shared"
    strides = *k_cache.stride()[:2], *v_cache.stride()[:2]
    return (k_cache, v_cache), strides, 0, None


def prefix_constants(
    E: int,
    n_rows: int,
    window: int | None,
    int8: bool = False,
    new: Unrotated | None = None,
    shared: bool = False,
) -> dict[str, object]:
    """Return the compile-time constants of `prefix_kernel`."""
    rows = {"BLOCK_M": row_block(n_rows), "STAGES": 2, "ROPE": new is not None, "SHARED": shared}
    rows |= {"BIASED": new is not None and new.bias is not None}
    rows |= {"NORMED": new is not None and new.q_norm is not None}
    return common_constants(E, window, int8) | rows


def finish_constants(
    E: int,
    group: int,
    window: int | None,
    by_rows: bool = False,
    int8: bool = False,
    shared: bool = False,
) -> dict[str, object]:
    """Return the compile-time constants of `finish_kernel`."""
    rows = {"BY_ROWS": by_rows, "HEADS": min(16, triton.next_power_of_2(group)), "SHARED": shared}
    return common_constants(E, window, int8) | rows


def finish_options(E: int, int8: bool = False) -> dict[str, int]:
    """Return the options of `finish_kernel`: four programs on a multiprocessor, where they fit.

    A row gathers few blocks: buffers for more would only cost registers and shared memory.
    """
    registers = {"maxnreg": 128} if E <= 128 and not int8 else {}
    return OPTIONS | {"num_stages": 1} | registers


def common_constants(E: int, window: int | None, int8: bool = False) -> dict[str, object]:
    """Return the compile-time constants that both kernels share."""
    return {
        "E": E,
        "E_PAD": triton.next_power_of_2(E),
        "BLOCK": key_block(E),
        "SPLIT": SPLIT,
        "WINDOW": window or 0,
        "SUM_COLUMNS": SUM_COLUMNS,
        "INT8": int8,
    }


def tree_attention(
    q: Tensor, k_cache: Cache, v_cache: Cache, view: TreeView, out_rows: torch.dtype | None = None
) -> Tensor:
    """Compute `fasteagle.compile.tree_attention` on CUDA.

    Over caches of several sequences, the view's `seq_len` is [B]. With `out_rows` the result is the
    input of the next product: [T, G * group * E] in that dtype. Raises `FasteagleError` for a
    dtype, head_dim or window that no kernel is made for.
    """
    return _attention(q.contiguous(), k_cache, v_cache, view, out_rows, None)


def rope_attention(
    new: Unrotated, k_cache: Cache, v_cache: Cache, view: TreeView, out_rows: torch.dtype
) -> Tensor:
    """Compute norms, RoPE, the new rows of the caches, and `tree_attention`, in two launches.

    For heads that `cuda_blocks.rotates` allows.
    """
    G, T, E = k_cache.shape[0], len(view.depths), new.cos.shape[2]
    q = torch.empty(G, new.n_head // G * T, E, dtype=new.dtype, device=k_cache.device)
    return _attention(q, k_cache, v_cache, view, out_rows, new)


def _attention(
    q: Tensor,
    k_cache: Cache,
    v_cache: Cache,
    view: TreeView,
    out_rows: torch.dtype | None,
    new: Unrotated | None,
) -> Tensor:
    """Launch both kernels; with `new`, the first one writes q and rows of the caches."""
    seq_len, paths, depths, window = view
    G, R, E = q.shape
    T, P = paths.shape
    n_splits, group = triton.cdiv(k_cache.shape[1], SPLIT), R // T
    int8 = k_cache.dtype == torch.int8
    shape = q.shape if out_rows is None else (T, G * group * E)
    usual = q.dtype if int8 else v_cache.dtype
    caches, strides, plane, shared = cache_arguments(k_cache, v_cache)
    block, n_blocks = row_block(R), triton.cdiv(R, row_block(R))
    if isinstance(k_cache, SharedPlane):
        block, n_blocks = k_cache.row_block, len(k_cache.sequences.blocks)
    out = torch.empty(shape, dtype=out_rows or usual, device=q.device)
    parts = q.new_empty(G, n_splits, R, E, dtype=torch.float32)
    stats = q.new_empty(2, G, n_splits, R, dtype=torch.float32)
    scale = math.log2(math.e) / math.sqrt(E)  # the exponentials are powers of two
    common = q, *caches, seq_len, depths, parts, stats
    prefix_kernel[(n_blocks, G, n_splits + (new is not None))](
        *common,
        *_pointers(new, q),
        q if shared is None else shared.blocks,
        *strides,
        scale,
        0.0 if new is None else new.eps,
        R,
        T,
        *((0, 0) if new is None else (new.parts.shape[2], len(new.parts))),
        plane,
        **prefix_constants(E, block, window, int8, new, shared is not None),
        **OPTIONS,
    )
    finish_kernel[(T, G, triton.cdiv(group, 16))](
        *common,
        paths.contiguous(),
        out,
        q if shared is None else shared.members,
        *strides,
        scale,
        R,
        T,
        P,
        n_splits,
        plane,
        **finish_constants(E, group, window, out_rows is not None, int8, shared is not None),
        **finish_options(E, int8),
    )
    return out


def _pointers(new: Unrotated | None, other: Tensor) -> tuple[Tensor, ...]:
    """Return the kernel's arguments for `new`; `other` replaces missing tensors."""
    if new is None:
        return (other,) * 7
    own = *new[:5], new.q_norm, new.k_norm
    return tuple(other if tensor is None else tensor for tensor in own)
