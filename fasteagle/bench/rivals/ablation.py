"""Ablations of EAGLE-2's tree (paper, section 4): without cumulative scores or reranking."""

from __future__ import annotations

import torch
from torch import Tensor

from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.state import CycleSpec, DecodeState
from fasteagle.tree import DraftTree, Pool


class AblatedDrafter(EagleDrafter):
    """EAGLE drafter without cumulative scores, or without reranking.

    `by_confidence` scores a node by its own probability alone; without `reranks` the first nodes
    are used instead of the best.
    """

    by_confidence = False
    reranks = True

    def child_scores(self, scores: Tensor, logp: Tensor) -> Tensor:
        return torch.minimum(logp if self.by_confidence else scores + logp, scores)

    def select(self, pool: Pool, state: DecodeState, spec: CycleSpec) -> DraftTree:
        if not self.reranks:
            order = torch.arange(len(pool.scores), 0, -1, device=pool.scores.device)
            pool = pool._replace(scores=order)
        return super().select(pool, state, spec)


def ablated(drafter: EagleDrafter, by_confidence: bool, reranks: bool) -> EagleDrafter:
    """Return the drafter without what is ablated, or `drafter` itself where nothing is."""
    if reranks and not by_confidence:
        return drafter
    made = AblatedDrafter(drafter.head, drafter.shape, noise=drafter.noise)
    made.tuning = drafter.tuning
    made.by_confidence, made.reranks = by_confidence, reranks
    return made
