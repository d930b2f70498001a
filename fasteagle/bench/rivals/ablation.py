"""Ablations of EAGLE-2's tree (paper, section 4): without cumulative scores or reranking."""

from __future__ import annotations

import torch
from torch import Tensor

from fasteagle.drafting.draft_head import Prediction
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.sampling import SamplingMode
from fasteagle.state import DecodeState
from fasteagle.tree import Pool


class AblatedDrafter(EagleDrafter):
    """EAGLE drafter without cumulative scores, or without reranking.

    `by_confidence` scores a node by its own probability alone; without `reranks` the first nodes
    are used instead of the best.
    """

    by_confidence = False
    reranks = True

    def child_scores(self, scores: Tensor, logp: Tensor) -> Tensor:
        return torch.minimum(logp if self.by_confidence else scores + logp, scores)

    def expand(
        self, prediction: Prediction, state: DecodeState, kind: SamplingMode, depth: int, k: int
    ) -> Pool:
        pool = super().expand(prediction, state, kind, depth, k)
        if self.reranks:
            return pool
        order = torch.arange(len(pool.scores), 0, -1, device=pool.scores.device)
        return pool._replace(scores=order)


def ablated(drafter: EagleDrafter, by_confidence: bool, reranks: bool) -> EagleDrafter:
    """Return the drafter without what is ablated, or `drafter` itself where nothing is."""
    if reranks and not by_confidence:
        return drafter
    made = AblatedDrafter(drafter.head, drafter.shape, drafter.max_seq_len, drafter.noise)
    made.tuning = drafter.tuning
    made.by_confidence, made.reranks = by_confidence, reranks
    return made
