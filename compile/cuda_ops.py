"""Custom ops over the small kernels of the cycle on CUDA.

Each has a reference in plain torch: `draft_head.top_children`, `tree.rerank`, `tree.relations`,
`KVCache.commit`.

Shapes: W rows, V vocabulary, P planes of a cache or candidates of a tree, T tree rows, G KV heads,
S slots, E head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fasteagle import tree
from fasteagle.device import on_device_of
from fasteagle.model import KVCache
from fasteagle.tree import DraftTree, Pool, Relations

# Limits of one program of `order_kernels`.
MOST_CANDIDATES = 1024
MOST_TREE_ROWS = 64


@torch.library.custom_op("fasteagle::top_children", mutates_args=(), device_types="cuda")
def top_children(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return draft ids and log-probabilities [W, k] of the best children, from logits [W, V]."""
    from fasteagle.compile.kernels import draft_kernels  # Triton exists where CUDA does

    with on_device_of(logits):
        return draft_kernels.top_children(logits, k)


@top_children.register_fake
def _(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    size = logits.shape[0], k
    return logits.new_empty(size, dtype=torch.long), logits.new_empty(size, dtype=torch.float32)


@torch.library.custom_op("fasteagle::move_rows", mutates_args=("rows",), device_types="cuda")
def move_cache_rows(rows: Tensor, start: Tensor, path: Tensor) -> None:
    """Move cache rows [P, G, S, E] of a path [n] to `start` onwards; see `block_kernels.commit`."""
    from fasteagle.compile.kernels import block_kernels

    with on_device_of(rows):
        block_kernels.commit(rows, start, path)


def move_rows(cache: KVCache, start: Tensor, path: Tensor) -> None:
    """Run `KVCache.commit` in one launch."""
    move_cache_rows(cache.rows, start, path)


@torch.library.custom_op("fasteagle::rerank", mutates_args=(), device_types="cuda")
def rerank_pool(
    tokens: Tensor, scores: Tensor, parents: Tensor, root: Tensor, n_nodes: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Select the tree of the best candidates; see `order_kernels.rerank`."""
    from fasteagle.compile.kernels import order_kernels

    with on_device_of(tokens):
        return order_kernels.rerank(tokens, scores, parents, root, n_nodes)


@rerank_pool.register_fake
def _(
    tokens: Tensor, scores: Tensor, parents: Tensor, root: Tensor, n_nodes: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    T = min(n_nodes, len(tokens)) + 1
    rows = tokens.new_empty(T), tokens.new_empty(T)
    return *rows, tokens.new_empty(T, dtype=torch.bool), tokens.new_empty(T)


def rerank(pool: Pool, root: Tensor, n_nodes: int) -> DraftTree:
    """Run `tree.rerank` in one launch."""
    if len(pool.tokens) > MOST_CANDIDATES:
        return tree.rerank(pool, root, n_nodes)
    scores = pool.scores.float().contiguous()
    tokens, parents, valid, places = rerank_pool(pool.tokens, scores, pool.parents, root, n_nodes)
    if pool.sources is None:
        return DraftTree(tokens, parents, valid)
    sources = torch.cat((torch.zeros_like(root), pool.sources[places[1:]]))
    return DraftTree(tokens, parents, valid, sources=sources)


@torch.library.custom_op("fasteagle::relations", mutates_args=(), device_types="cuda")
def relate_rows(parents: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the mask, depths and paths of a tree; see `order_kernels.relations`."""
    from fasteagle.compile.kernels import order_kernels

    with on_device_of(parents):
        return order_kernels.relations(parents, valid)


@relate_rows.register_fake
def _(parents: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    T = len(parents)
    mask = parents.new_empty(T, T, dtype=torch.bool)
    return mask, torch.empty_like(parents), mask.new_empty(T, T, dtype=torch.int32)


def relate(parents: Tensor, valid: Tensor) -> Relations:
    """Run `tree.relations` in one launch."""
    if len(parents) > MOST_TREE_ROWS:
        return tree.relations(parents, valid)
    return Relations(*relate_rows(parents, valid))
