"""Ablations of EAGLE-2's tree (paper, section 4): without cumulative scores or reranking."""

from __future__ import annotations

import torch
from torch import Tensor

from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.state import CycleSpec, DecodeState
from fasteagle.tree import DraftTree, Pool


class AblatedDrafter(EagleDrafter):
    """Drafter like `usual` without cumulative scores, or without reranking.

    `by_confidence` scores a node by its own probability alone; without `reranks` the first nodes
    are used instead of the best.
    """

    def __init__(self, usual: EagleDrafter, by_confidence: bool, reranks: bool) -> None:
        super().__init__(usual.head, usual.shape, noise=usual.noise)
        self.tuning = usual.tuning
        self.by_confidence, self.reranks = by_confidence, reranks

    def child_scores(self, scores: Tensor, logp: Tensor) -> Tensor:
        return torch.minimum(logp if self.by_confidence else scores + logp, scores)

    def select(self, pool: Pool, state: DecodeState, spec: CycleSpec) -> DraftTree:
        if not self.reranks:
            order = torch.arange(len(pool.scores), 0, -1, device=pool.scores.device)
            pool = pool._replace(scores=order)
        return super().select(pool, state, spec)
