"""The draft head at work: its KV cache, the true pairs it has seen, and one level of a tree.

Shapes: W rows of the draft head in one step, D model dim, S draft cache slots, V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fasteagle.drafting.base import Controlled
from fasteagle.model import EagleHead, KVCache
from fasteagle.sampling import SamplingMode, SamplingTensors, gumbel_noise
from fasteagle.state import Committed
from fasteagle.tree import DraftTree, Pool, TreeView, rerank


class Prediction(NamedTuple):
    """What the draft head says after the last position it has seen."""

    logits: Tensor  # [1, V]
    feature: Tensor  # [1, D]


def top_children(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Draft ids and log-probabilities [W, k] of each row's best children, by logits [W, V]."""
    values, ids = logits.float().topk(k, dim=-1)
    return ids, values - logits.float().logsumexp(-1, keepdim=True)


class DraftOps(NamedTuple):
    """Operations of drafting that a backend may run in a form of its own; here the core's.

    `head` runs a step of the draft head; see `EagleHead.forward`, which None stands for.
    """

    top_children: Callable[[Tensor, int], tuple[Tensor, Tensor]] = top_children
    rerank: Callable[[Pool, Tensor, int], DraftTree] = rerank
    head: Callable[..., tuple[Tensor, Tensor]] | None = None


class RankingDrafter(Controlled):
    """What drafters share that score the children of a node by logits over `target_ids`."""

    noise: str
    target_ids: Tensor
    ops = DraftOps()

    def run_by(self, ops: DraftOps) -> None:
        """Draft by these operations from now on: those of the backend that runs the cycles."""
        self.ops = ops

    def top_children(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return draft ids and log-probabilities [W, k] of each row's best children."""
        return self.ops.top_children(logits, k)

    def rerank(self, pool: Pool, root: Tensor, n_nodes: int) -> DraftTree:
        """Return the tree of the best candidates of `pool`."""
        return self.ops.rerank(pool, root, n_nodes)

    def ranking_logits(
        self,
        logits: Tensor,
        seq_len: Tensor,
        level: int,
        kind: SamplingMode,
        sampling: SamplingTensors,
    ) -> Tensor:
        """What children are ranked by, [W, V]: logits, or with the noise the target will draw with.

        At level `level` the target picks argmax(its logits / T + g); g is known here already. The
        softmax of the draft's own sum then estimates how likely each child is that argmax.
        """
        if kind.greedy or self.noise == "none":
            return logits
        position = (seq_len + level).unsqueeze(0)
        gumbel = gumbel_noise(sampling.seed, position, self.target_ids)
        return logits.float() / sampling.temperature + gumbel

    def child_scores(self, scores: Tensor, logp: Tensor) -> Tensor:
        """Scores [k, k] of children: a path's probability, never above the parent's."""
        return torch.minimum(scores + logp, scores)


class HeadDrafter(RankingDrafter):
    """What drafters with an EAGLE head share: the head and its KV cache."""

    reads_features = True

    def __init__(self, head: EagleHead, max_seq_len: int, noise: str) -> None:
        self.head, self.max_seq_len, self.noise = head, max_seq_len, noise
        weight = head.block.mlp_norm.weight
        self.cache = KVCache(head.config.block, 1, weight.dtype, weight.device)
        self.target_ids = head.target_ids()
        self.tap_layers = head.config.tap_layers

    @property
    def caches(self) -> list[KVCache]:
        return [self.cache]

    @property
    def tree_rows(self) -> int:
        """Cache rows that a tree takes behind the text, at most."""
        raise NotImplementedError

    def reserve(self, n_tokens: int) -> None:
        deepest = max(shape.depth for shape in self.shapes())
        self.cache.resize(n_tokens + self.tree_rows + deepest + 1)

    def extend(self, new: Committed, seq_len: Tensor) -> Prediction:
        """Run the true pairs through the head. Rows behind `count` are padding.

        What padding writes into the cache is overwritten before it is read.
        """
        W, device = new.tokens.shape[0], seq_len.device
        start, row = seq_len - new.count[0], torch.arange(W, device=device)
        view = TreeView(start, row.to(torch.int32).expand(W, W).contiguous(), row)  # a chain
        last = new.count - 1
        features = self.head.read(new.features)
        rows = start + row
        return Prediction(*self._run(new.tokens, features, rows, rows, view, self.cache, last))

    @property
    def _run(self) -> Callable[..., tuple[Tensor, Tensor]]:
        return self.head if self.ops.head is None else self.ops.head

    def step(
        self,
        tokens: Tensor,
        features: Tensor,
        seq_len: Tensor,
        level: int,
        paths: Tensor,
        first: int,
    ) -> tuple[Tensor, Tensor]:
        """One level of the tree: logits [W, V] and features [W, D] of nodes `tokens` [W].

        `seq_len` (0-d): true pairs in the cache; `paths` [W, level + 1] int32: each node's own row
        among those of the tree so far, `first` and the next ones, and before it those of its
        ancestors. All nodes of a level share a position, as in the public implementation.
        """
        view = TreeView(seq_len, paths, torch.full_like(tokens, level))
        positions = torch.zeros_like(tokens) + seq_len + level
        slots = seq_len + first + torch.arange(len(tokens), device=tokens.device)
        return self._run(tokens, features, positions, slots, view, self.cache)
