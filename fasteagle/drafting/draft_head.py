"""The draft head at work: its KV cache, the true pairs it has seen, and one level of a tree.

Shapes: W rows of the draft head in one step, D model dim, S draft cache slots, V draft vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fasteagle.drafting.base import Controlled
from fasteagle.errors import FasteagleError
from fasteagle.model import EagleHead, KVCache, causal_mask
from fasteagle.sampling import DrawKind, Knobs, gumbel_noise
from fasteagle.state import Committed


class Prediction(NamedTuple):
    """What the draft head says after the last position it has seen."""

    logits: Tensor  # [1, V]
    feature: Tensor  # [1, D]


class HeadDrafter(Controlled):
    """What drafters with an EAGLE head share: the head and its KV cache."""

    reads_features = True

    def __init__(self, head: EagleHead, max_seq_len: int, noise: str) -> None:
        if not head.config.shifted:
            raise FasteagleError(
                "the draft head was trained on unshifted tokens, to be compared, and cannot draft: "
                "train one without --inputs unshifted"
            )
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
        W = new.tokens.shape[0]
        k_cache = self.cache.layers[0][0]
        start = seq_len - new.count[0]
        rows = start + torch.arange(W, device=seq_len.device)
        mask = causal_mask(start, W, k_cache.shape[1], None, seq_len.device)
        last = new.count - 1
        features = self.head.read(new.features)
        return Prediction(*self.head(new.tokens, features, rows, rows, mask, self.cache, last))

    def step(
        self, tokens: Tensor, features: Tensor, seq_len: Tensor, level: int, tree_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One level of the tree: logits [W, V] and features [W, D] of nodes `tokens` [W].

        `seq_len` (0-d): true pairs in the cache; `tree_mask` [W, written + W]: which of the tree's
        rows so far each node sees. All nodes of a level share a position, as in the public
        implementation.
        """
        W, device = tokens.shape[0], tokens.device
        tree_rows = tree_mask.shape[1]
        columns = seq_len + torch.arange(tree_rows, device=device)
        positions = torch.zeros_like(tokens) + seq_len + level
        n_slots = self.cache.layers[0][0].shape[1]
        mask = (torch.arange(n_slots, device=device) < seq_len).expand(W, -1)
        mask = mask.index_copy(1, columns, tree_mask)
        return self.head(tokens, features, positions, columns[tree_rows - W :], mask, self.cache)

    def ranking_logits(
        self, logits: Tensor, seq_len: Tensor, level: int, kind: DrawKind, knobs: Knobs
    ) -> Tensor:
        """See `ranking_logits`."""
        shared = self.noise == "shared"
        return ranking_logits(logits, seq_len, level, kind, knobs, self.target_ids, shared)


def ranking_logits(
    logits: Tensor,
    seq_len: Tensor,
    level: int,
    kind: DrawKind,
    knobs: Knobs,
    target_ids: Tensor,
    shared: bool,
) -> Tensor:
    """What children are ranked by, [W, V]: logits, or with the noise the target will draw with.

    At level `level` the target picks argmax(its logits / T + g); g is known here already. The
    softmax of the draft's own sum then estimates how likely each child is that argmax.
    """
    if kind.greedy or not shared:
        return logits
    position = (seq_len + level).unsqueeze(0)
    gumbel = gumbel_noise(knobs.seed, position, target_ids)
    return logits.float() / knobs.temperature + gumbel


def top_children(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Draft ids and log-probabilities [W, k] of each row's best children, by logits [W, V]."""
    values, ids = logits.float().topk(k, dim=-1)
    return ids, values - logits.float().logsumexp(-1, keepdim=True)
