"""Classic speculative decoding: a smaller model with the target's tokenizer drafts.

It drafts a chain or a tree, reads only tokens, and has a KV cache and a precision of its own. Its
cycle is that of a draft head: the committed tokens, then level by level, then the rerank.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from fasteagle.drafting.draft_head import Prediction, RankingDrafter
from fasteagle.drafting.eagle import expand
from fasteagle.model import Target
from fasteagle.shapes import MAX_DEPTH, TreeShape
from fasteagle.state import CycleSpec, DecodeState
from fasteagle.tree import DraftTree, TreeView


class ModelDrafter(RankingDrafter):
    """Drafter that runs `model`, whose RoPE table must reach as far as the target's cache.

    Row i of its cache is token i of the text, the root included.
    """

    name = "model"
    reads_features = True  # their tokens only: it must see every committed position

    def __init__(
        self, model: Target, shape: TreeShape, vocab_size: int, *, noise: str = "shared"
    ) -> None:
        self.model, self.noise = model, noise
        self.shape: TreeShape = shape
        weight = model.weight
        self.cache, self.window = model.new_cache(1), model.config.sliding_window
        shared = min(vocab_size, model.config.vocab_size)  # either may have unused padding ids
        self.target_ids = torch.arange(shared, device=weight.device)
        self._features = weight.new_zeros(1, 1)  # instead of a draft head's features

    def apart(self) -> Self:
        other = super().apart()
        other.cache = self.model.new_cache(self.cache.n_slots)
        return other

    def resized(self, nodes: int) -> ModelDrafter:
        """Return a drafter with this model that verifies `nodes` candidates."""
        k = self.shape.topk
        depth = max(1, nodes) if k == 1 else min(self.shape.depth, max(1, nodes))
        shape = TreeShape(depth, k, nodes)
        return type(self)(self.model, shape, len(self.target_ids), noise=self.noise)

    def reserve(self, n_tokens: int) -> None:
        tree_rows = (self.shape.depth - 1) * self.shape.topk
        self.cache.resize(n_tokens + tree_rows + self.shape.depth + 2)

    def begin(self, token: int) -> None:
        at = torch.zeros(1, dtype=torch.long, device=self.target_ids.device)
        view = TreeView.of_chain(at[0], 1, self.window)
        self._run(at + token, self._features, at, at, view, at)

    def _slot(self, n_pairs: Tensor) -> Tensor:
        return n_pairs + 1  # the text's first token is in no pair

    def _run(
        self,
        tokens: Tensor,
        features: Tensor,
        positions: Tensor,
        slots: Tensor,
        view: TreeView,
        last: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        known = tokens.clamp(max=self.model.config.vocab_size - 1)  # the target may sample padding
        # The kernels of trees are for the rows of a cycle; those of a prompt are more.
        visible = view if len(tokens) <= MAX_DEPTH + 1 else view.mask(self.cache.n_slots)
        encoded, _ = self.model.encode(known, positions, slots, visible, self.cache)
        if last is not None:
            encoded, features = encoded.index_select(0, last), self._features
        return self.model.lm_head(encoded)[:, : len(self.target_ids)], features

    def propose(self, prediction: Prediction, state: DecodeState, spec: CycleSpec) -> DraftTree:
        assert isinstance(spec.shape, TreeShape), "the engine asks for shapes of this drafter"
        pool = expand(self, prediction, state, spec.kind, spec.shape.depth, spec.shape.topk)
        return self.ops.rerank(pool.of_text(0), state.root, spec.shape.nodes)
