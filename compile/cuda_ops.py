"""Custom ops over the small kernels of the cycle on CUDA.

Each has a reference in plain torch: `base.top_children`, `tree.rerank`, `tree.relations`,
`Lookup.propose`, `tree.fuse`, `sampling.draw`, `KVCache.commit`.

Each makes the GPU of its tensors current, on which Triton launches its kernels. The functions that
declare them return what their results are like, as torch wants it where code is traced.

Shapes: W rows, V vocabulary, P planes of a cache or candidates of a tree, T tree rows, G KV heads,
S slots, E head dim.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fasteagle import tree
from fasteagle.drafting.lookup import Lookup
from fasteagle.model import KVCache
from fasteagle.sampling import SamplingMode, SamplingTensors, process_logits
from fasteagle.tree import DraftTree, Pool, Relations

# Limits of one program of `order_kernels`, candidates of `lookup_kernels`, too.
MOST_CANDIDATES = 1024
MOST_TREE_ROWS = 64


def operator(
    name: str, kernel: str, mutates_args: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], Any]:
    """Make an operator by the launcher `kernel`; what is decorated makes its results, unfilled."""
    module, _, launcher = kernel.partition(".")

    def launch(*arguments: Any) -> Any:
        kernels = importlib.import_module(f"fasteagle.compile.kernels.{module}")  # with CUDA only
        with torch.cuda.device_of(arguments[0]):
            return getattr(kernels, launcher)(*arguments)

    def made(fake: Callable[..., Any]) -> Any:
        own = {"mutates_args": mutates_args, "device_types": "cuda"}
        schema = torch.library.infer_schema(fake, mutates_args=mutates_args)
        op = torch.library.custom_op(f"fasteagle::{name}", launch, schema=schema, **own)
        op.register_fake(fake)
        return op

    return made


@operator("top_children", "draft_kernels.top_children")
def top_children(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return draft ids and log-probabilities [W, k] of the best children, from logits [W, V]."""
    size = logits.shape[0], k
    return logits.new_empty(size, dtype=torch.long), logits.new_empty(size, dtype=torch.float32)


@operator("move_rows", "block_kernels.commit", ("rows",))
def move_cache_rows(rows: Tensor, start: Tensor, path: Tensor) -> None:
    """Move cache rows [P, G, S, E] of a path [n] to `start` onwards; see `block_kernels.commit`."""


def move_rows(cache: KVCache, start: Tensor, path: Tensor) -> None:
    """Run `KVCache.commit` in one launch."""
    move_cache_rows(cache.rows, start, path)


@operator("draw", "draw_kernels.draw")
def draw_tokens(
    logits: Tensor, positions: Tensor, seed: Tensor, temperature: Tensor, noisy: bool, scaled: bool
) -> Tensor:
    """Sample a token for each row of logits [T, V]; see `draw_kernels.draw`."""
    return positions.new_empty(len(logits))


def draw(
    logits: Tensor,
    positions: Tensor,
    kind: SamplingMode,
    sampling: SamplingTensors,
    seen: Tensor | None = None,
    depths: Tensor | None = None,
) -> Tensor:
    """Run `sampling.draw` in two launches, after what excludes or penalizes tokens."""
    alone = not kind.filtered and not kind.penalty
    if not alone:
        logits = process_logits(logits.float(), kind, sampling, seen)
    noisy = not kind.greedy
    rows = positions[depths] if noisy and depths is not None else positions
    seed, temperature = sampling.seed, sampling.temperature
    return draw_tokens(logits, rows, seed, temperature, noisy, noisy and alone)


@operator("rerank", "order_kernels.rerank")
def rerank_pool(
    tokens: Tensor,
    scores: Tensor,
    parents: Tensor,
    sources: Tensor | None,
    root: Tensor,
    n_nodes: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Select the tree of the best candidates; see `order_kernels.rerank`."""
    T = min(n_nodes, len(tokens)) + 1
    rows = tokens.new_empty(T), tokens.new_empty(T), tokens.new_empty(T, dtype=torch.bool)
    return *rows, tokens.new_empty(0 if sources is None else T)


def rerank(pool: Pool, root: Tensor, n_nodes: int) -> DraftTree:
    """Run `tree.rerank` in one launch."""
    if len(pool.tokens) > MOST_CANDIDATES:
        return tree.rerank(pool, root, n_nodes)
    scores = pool.scores.float().contiguous()
    tree_of = rerank_pool(pool.tokens, scores, pool.parents, pool.sources, root, n_nodes)
    tokens, parents, valid, sources = tree_of
    return DraftTree(tokens, parents, valid, sources=None if pool.sources is None else sources)


@operator("look_up", "lookup_kernels.look_up", ("table", "recent"))
def look_up_text(
    text: Tensor, last: Tensor, table: Tensor, recent: Tensor, reach: int
) -> tuple[Tensor, Tensor]:
    """Learn from the last proposal and make the next; see `lookup_kernels.look_up`."""
    return text.new_empty(reach), table.new_empty(reach)


def look_up(lookup: Lookup, text: Tensor, last: Tensor, reach: int) -> tuple[Tensor, Tensor]:
    """Run `Lookup.propose` in two launches, where it has no corpus."""
    if lookup.corpus is not None:
        return lookup.propose(text, last, reach)
    return look_up_text(text, last, lookup.table, lookup.last, reach)


@operator("fuse", "lookup_kernels.fuse")
def fuse_pool(
    tokens: Tensor,
    scores: Tensor,
    parents: Tensor,
    looked_up: Tensor,
    logp: Tensor,
    k: int,
    n_levels: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Merge a draft head's candidates and a looked-up chain; see `lookup_kernels.fuse`."""
    P = len(tokens) + len(looked_up)
    return tokens.new_empty(P), logp.new_empty(P), tokens.new_empty(P), tokens.new_empty(P)


def fuse(pool: Pool, k: int, n_levels: int, tokens: Tensor, logp: Tensor) -> Pool:
    """Run `tree.fuse` in one launch."""
    if len(pool.tokens) > MOST_CANDIDATES:
        return tree.fuse(pool, k, n_levels, tokens, logp)
    scores = pool.scores.float().contiguous()
    both = fuse_pool(pool.tokens, scores, pool.parents, tokens, logp, k, n_levels)
    return Pool(*both)


@operator("relations", "order_kernels.relations")
def relate_rows(parents: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the mask, depths and paths of a tree; see `order_kernels.relations`."""
    T = len(parents)
    mask = parents.new_empty(T, T, dtype=torch.bool)
    return mask, torch.empty_like(parents), mask.new_empty(T, T, dtype=torch.int32)


def relate(parents: Tensor, valid: Tensor) -> Relations:
    """Run `tree.relations` in one launch."""
    if len(parents) > MOST_TREE_ROWS:
        return tree.relations(parents, valid)
    return Relations(*relate_rows(parents, valid))
