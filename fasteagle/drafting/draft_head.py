"""Drafting with a cache of its own, a draft head's: the committed pairs, one level of a tree.

Shapes: W rows of the draft head in one step, D model dim, S draft cache slots, V draft vocabulary,
B texts that draft together: one, whose length may be 0-d, or several, whose rows lie one text after
the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Self

import torch
from torch import Tensor

from fasteagle.drafting.base import Drafter
from fasteagle.model import EagleHead, KVCache, Layer, Rows, as_mask
from fasteagle.sampling import SamplingMode, SamplingTensors, gumbel_noise
from fasteagle.state import Committed
from fasteagle.tree import TreeView


class Prediction(NamedTuple):
    """Output of the draft head for the last position of each text that it has seen."""

    logits: Tensor  # [B, V]
    feature: Tensor  # [B, D]


class RankingDrafter(Drafter):
    """Base class of drafters that score a node's children by logits over `target_ids`.

    They run over the committed pairs and over a tree's nodes, with a cache of their own.
    """

    noise: str
    target_ids: Tensor
    cache: KVCache
    window: int | None  # of their attention

    @property
    def caches(self) -> list[KVCache]:
        return [self.cache]

    def _slot(self, n_pairs: Tensor) -> Tensor:
        """Return the slot of the cache after `n_pairs` committed pairs."""
        return n_pairs

    def _run(
        self,
        tokens: Tensor,
        features: Tensor,
        positions: Tensor,
        slots: Tensor,
        view: TreeView,
        last: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return logits and features of tree nodes [W], or of the rows `last` [B] of pairs [W]."""
        raise NotImplementedError

    def extend(self, new: Committed, seq_len: Tensor) -> Prediction:
        """Run the committed pairs: as many rows of each text.

        Rows past `count` [B] are padding, whose cache rows are overwritten before they are read.
        """
        B = len(new.count)
        W, device = len(new.tokens) // B, seq_len.device
        start = self._slot(seq_len - new.count.view(seq_len.shape))
        row = torch.arange(W, device=device)
        chain = row.to(torch.int32).expand(W, W).repeat(B, 1)
        view = TreeView(start, chain, row.repeat(B), self.window)
        last = new.count - 1 + W * torch.arange(B, device=device)
        rows = (start.view(B, 1) + row).flatten()
        return Prediction(*self._run(new.tokens, new.features, rows, rows, view, last))

    def step(
        self,
        tokens: Tensor,
        features: Tensor,
        seq_len: Tensor,
        level: int,
        paths: Tensor,
        first: int,
    ) -> tuple[Tensor, Tensor]:
        """Return logits [W, V] and features [W, D] of one level's nodes `tokens` [W].

        `seq_len` (0-d or [B]) counts the committed pairs in the cache. `paths` [W, level + 1] int32
        has the tree rows of each node's ancestors and, last, its own: `first` and the next ones.
        All nodes of a level share a position, as in the public implementation.
        """
        begin = self._slot(seq_len)
        view = TreeView(begin, paths, torch.full_like(tokens, level), self.window)
        starts = begin.view(-1, 1)
        nodes = torch.arange(len(tokens) // len(starts), device=tokens.device)
        positions = (starts + level).repeat(1, len(nodes)).flatten()
        slots = (starts + first + nodes).flatten()
        return self._run(tokens, features, positions, slots, view)

    def ranking_logits(
        self,
        logits: Tensor,
        seq_len: Tensor,
        level: int,
        kind: SamplingMode,
        sampling: SamplingTensors,
    ) -> Tensor:
        """Return the scores [W, V] that rank children: logits, with the target's noise if sampling.

        At level `level` the target picks argmax(its logits / T + g); g is known here already. The
        softmax of the draft's own logits / T + g estimates how likely each child is that argmax.
        """
        if kind.greedy or self.noise == "none":
            return logits
        gumbel = gumbel_noise(sampling.seed, seq_len.view(-1) + level, self.target_ids)  # [B, V]
        of_texts = logits.float().view(len(gumbel), -1, logits.shape[1])
        scores = of_texts / sampling.temperature.view(-1, 1, 1) + gumbel.unsqueeze(1)
        return scores.view(logits.shape)

    def child_scores(self, scores: Tensor, logp: Tensor) -> Tensor:
        """Return scores [k, k] of children: log path probabilities, never above the parent's."""
        return torch.minimum(scores + logp, scores)


class HeadDrafter(RankingDrafter):
    """Base class of drafters with an EAGLE draft head, which own it and its KV cache."""

    reads_features = True

    def __init__(self, head: EagleHead, noise: str) -> None:
        self.head, self.noise = head, noise
        weight = head.block.mlp_norm.weight
        self.cache = KVCache(head.config.block, 1, weight.dtype, weight.device)
        self.target_ids = head.target_ids()
        self.aux_layers = head.config.aux_layers
        self.window = head.config.block.sliding_window

    def apart(self) -> Self:
        other = super().apart()
        rows = self.cache.rows
        other.cache = KVCache(self.head.config.block, 1, rows.dtype, rows.device)
        return other

    @property
    def tree_rows(self) -> int:
        """Largest number of cache rows that a tree takes after the text."""
        raise NotImplementedError

    def reserve(self, n_tokens: int) -> None:
        deepest = max(shape.depth for shape in self.shapes())
        self.cache.resize(n_tokens + self.tree_rows + deepest + 1)

    def show(self, new: Committed, seq_len: Tensor) -> None:
        rows = seq_len - new.count + torch.arange(len(new.tokens), device=seq_len.device)
        self.head.show(new.tokens, self.head.read(new.features), rows, rows, self.cache)

    def _run(
        self,
        tokens: Tensor,
        features: Tensor,
        positions: Tensor,
        slots: Tensor,
        view: TreeView,
        last: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        head = self.head if self.ops.head is None else self.ops.head
        if last is not None:  # the features of pairs are the target's
            features = self.head.read(features)
        return head(tokens, features, positions, slots, view, self.cache, last)


def under_mask(block: Callable[..., Tensor], beyond: int = 0) -> Callable[..., Tensor]:
    """Return the block of a draft head, with masks for views of more than `beyond` rows."""

    def run(x: Tensor, rows: Rows, layer: Layer, entry: Tensor | None = None) -> Tensor:
        if len(x) > beyond:
            rows = rows._replace(visible=as_mask(rows.visible, layer[0].shape[1]))
        return block(x, rows, layer, entry)

    return run
