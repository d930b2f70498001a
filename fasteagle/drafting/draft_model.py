"""Classic speculative decoding: a smaller model with the target's tokenizer drafts.

It drafts a chain or a tree, reads only tokens, and has a KV cache and a precision of its own. Its
cycle is that of a draft head: the committed tokens, then level by level, then the rerank.

Shapes: W rows of the draft model in one step, S cache slots, V tokens that both models have.
"""

from __future__ import annotations

import copy
from typing import Self

import torch
from torch import Tensor

from fasteagle.drafting.draft_head import Prediction, RankingDrafter
from fasteagle.drafting.eagle import expand
from fasteagle.model import KVCache, Target, causal_mask
from fasteagle.shapes import TreeShape
from fasteagle.state import Committed, CycleSpec, DecodeState
from fasteagle.tree import DraftTree


class ModelDrafter(RankingDrafter):
    """Drafter that runs `model`, whose RoPE table must reach as far as the target's cache.

    Row i of its cache is token i of the text, the root included.
    """

    name = "model"
    reads_features = True  # their tokens only: it must see every committed position

    def __init__(
        self,
        model: Target,
        shape: TreeShape,
        max_seq_len: int,
        vocab_size: int,
        noise: str = "shared",
    ) -> None:
        self.model, self.max_seq_len, self.noise = model, max_seq_len, noise
        self.shape: TreeShape = shape
        weight = model.weight
        self.cache = model.new_cache(1)
        shared = min(vocab_size, model.config.vocab_size)  # either may have unused padding ids
        self.target_ids = torch.arange(shared, device=weight.device)
        self._features = weight.new_zeros(1, 1)  # instead of a draft head's features

    @property
    def caches(self) -> list[KVCache]:
        return [self.cache]

    def apart(self) -> Self:
        other = copy.copy(self)
        other.cache = self.model.new_cache(self.cache.n_slots)
        return other

    def resized(self, nodes: int) -> ModelDrafter:
        """Return a drafter with this model that verifies `nodes` candidates."""
        k = self.shape.topk
        depth = max(1, nodes) if k == 1 else min(self.shape.depth, max(1, nodes))
        shape = TreeShape(depth, k, nodes)
        n_tokens = len(self.target_ids)
        return type(self)(self.model, shape, self.max_seq_len, n_tokens, self.noise)

    def reserve(self, n_tokens: int) -> None:
        tree_rows = (self.shape.depth - 1) * self.shape.topk
        self.cache.resize(n_tokens + tree_rows + self.shape.depth + 2)

    def begin(self, token: int) -> None:
        at = torch.zeros(1, dtype=torch.long, device=self.target_ids.device)
        self._run(at + token, at, at, self._mask(at, torch.ones_like(at)))

    def extend(self, new: Committed, seq_len: Tensor) -> Prediction:
        """Run the tokens of the pairs, of which the root is the last.

        Rows past `count` are padding, whose cache rows are overwritten before they are read.
        """
        W = new.tokens.shape[0]
        start = seq_len - new.count[0] + 1
        rows = start + torch.arange(W, device=seq_len.device)
        window = self.model.config.sliding_window
        mask = causal_mask(start, W, self.cache.n_slots, window, seq_len.device)
        encoded = self._encode(new.tokens, rows, rows, mask)
        last = encoded.index_select(0, new.count - 1)
        return Prediction(self._logits(last), self._features)

    def step(
        self,
        tokens: Tensor,
        features: Tensor,
        seq_len: Tensor,
        level: int,
        paths: Tensor,
        first: int,
    ) -> tuple[Tensor, Tensor]:
        columns = seq_len + 1 + paths.long()
        positions = torch.zeros_like(tokens) + seq_len + 1 + level
        mask = self._mask(positions, torch.zeros_like(tokens) + seq_len + 1)
        mask = mask.scatter(1, columns, True)
        slots = seq_len + 1 + first + torch.arange(len(tokens), device=tokens.device)
        return self._run(tokens, positions, slots, mask), features

    def _mask(self, positions: Tensor, seen: Tensor) -> Tensor:
        """Return the mask [W, S] of text slots: the first `seen` [W], within the window."""
        slots = torch.arange(self.cache.n_slots, device=positions.device)
        mask = slots < seen.unsqueeze(1)
        window = self.model.config.sliding_window
        return mask if window is None else mask & (slots > positions.unsqueeze(1) - window)

    def _run(self, tokens: Tensor, positions: Tensor, slots: Tensor, mask: Tensor) -> Tensor:
        return self._logits(self._encode(tokens, positions, slots, mask))

    def _encode(self, tokens: Tensor, positions: Tensor, slots: Tensor, mask: Tensor) -> Tensor:
        known = tokens.clamp(max=self.model.config.vocab_size - 1)  # the target may sample padding
        return self.model.encode(known, positions, slots, mask, self.cache)[0]

    def _logits(self, encoded: Tensor) -> Tensor:
        return self.model.lm_head(encoded)[:, : len(self.target_ids)]

    def propose(self, prediction: Prediction, state: DecodeState, spec: CycleSpec) -> DraftTree:
        assert isinstance(spec.shape, TreeShape), "the engine asks for shapes of this drafter"
        pool = expand(self, prediction, state, spec.kind, spec.shape.depth, spec.shape.topk)
        return self.rerank(pool.of_text(0), state.root, spec.shape.nodes)
