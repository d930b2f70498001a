"""Quality of a draft head on text that it was not trained on."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from fasteagle.errors import FasteagleError
from fasteagle.model import EagleHead, Transformer
from fasteagle.training.data import Features
from fasteagle.training.loss import autocast, compute_dtype, make_batch, unroll
from fasteagle.training.parallel import ALONE, Ranks

RANKS = 4  # children of a node whose acceptance is counted
DEPTH = 5  # of the chains
TENTHS = 10  # of the probability that the head gives a child


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """Quality on held-out text: acceptance by depth of a greedy chain."""

    alphas: tuple[float, ...]  # n-alpha: acceptance of token n + 1 where n were accepted
    tau: float  # tokens per target pass of a chain as deep as `alphas` is long, bonus included
    rows: int
    ranks: tuple[tuple[float, ...], ...] = ()  # how often the child of rank 0, 1, ... matched
    tv: tuple[float, ...] = ()  # mean total variation by depth: 1 - acceptance rate at T = 1
    # Drafted tokens, and the accepted ones, by the tenth that the head's probability lies in.
    by_confidence: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        """Return tau and n-alpha in words."""
        return f"tau {self.tau:.3f}, n-alpha {' '.join(f'{alpha:.3f}' for alpha in self.alphas)}"

    def as_dict(self) -> dict[str, Any]:
        return {
            "alphas": [round(a, 4) for a in self.alphas],
            "tau": round(self.tau, 4),
            "tv": [round(t, 4) for t in self.tv],
            "ranks": [[round(p, 4) for p in level] for level in self.ranks],
        }


def draft_rows(head: EagleHead, target: Transformer) -> Tensor:
    """Return the rows [V, D] that turn the draft head's features into draft logits."""
    if head.own_lm_head is None:
        return target.head_rows(head.target_ids())
    rows = head.own_lm_head.weight
    assert isinstance(rows, Tensor), "an LM head that is evaluated is dense"
    return rows


@torch.no_grad()
def evaluate(
    head: EagleHead, target: Transformer, store: Features, indices: list[int], ranks: Ranks = ALONE
) -> HeldOut:
    """Simulate chain drafting from every answer position of the held-out text.

    This is exact for text the target wrote greedily: the tokens fed are then those it would accept.
    The head has borrowed from the target. Of several processes each takes a part of the
    conversations; all get the whole result. Raises `FasteagleError` for a head that diverged.
    """
    device = head.fc.weight.device
    ids = head.target_ids()
    lm_rows = draft_rows(head, target).to(compute_dtype(device))
    n_ranks = min(RANKS, len(ids))
    hits = torch.zeros(DEPTH, n_ranks, dtype=torch.long)
    tried = torch.zeros(DEPTH, dtype=torch.long)
    variation = torch.zeros(DEPTH, 2, dtype=torch.double)  # its sum, and the number of rows
    by_confidence = torch.zeros(TENTHS, 2, dtype=torch.long)
    for i in ranks.share(indices):
        batch = make_batch(store, [i], device)
        embeds = head.embedding.weight[batch.tokens].float()
        with autocast(device):
            outputs = unroll(head, embeds, batch.features, DEPTH)
        wanted = target.lm_head(batch.targets[0].to(target.norm.weight.dtype)).float()
        best, p = wanted.argmax(-1), wanted.softmax(-1)[:, ids.to(device)]
        alive = torch.ones_like(best, dtype=torch.bool)
        for step, predicted in enumerate(outputs):
            logits = (predicted[0].to(lm_rows.dtype) @ lm_rows.T).float()
            best_ranks, q = logits.topk(n_ranks).indices, logits.softmax(-1)
            drafted = ids[best_ranks]
            counted = batch.counted(step)[0].to(device)
            alive = (torch.cat((alive.new_zeros(1), alive[:-1])) if step else alive) & counted
            tried[step] += int(alive.sum())
            right = (drafted == best.unsqueeze(1)) & alive.unsqueeze(1)
            hits[step] += right.sum(0).cpu()
            alpha = torch.minimum(p, q).sum(-1)[counted]
            variation[step, 0] += (1 - alpha).double().sum().item()
            variation[step, 1] += len(alpha)
            if not variation[step, 0].isfinite():
                raise FasteagleError(
                    "the draft head predicts no finite numbers: train it with a lower --lr"
                )
            confidence = q.gather(1, best_ranks)
            tenth = (confidence[alive] * TENTHS).long().clamp(max=TENTHS - 1).flatten().cpu()
            by_confidence[:, 0] += tenth.bincount(minlength=TENTHS)
            by_confidence[:, 1] += tenth[right[alive].flatten().cpu()].bincount(minlength=TENTHS)
            alive = right[:, 0]
    ranks.sum_([hits, tried, variation, by_confidence])
    shares = hits.double() / tried.clamp(min=1).unsqueeze(1)
    by_rank = tuple(map(tuple, shares.tolist()))
    alphas = tuple(level[0] for level in by_rank)
    tau = 1 + sum(math.prod(alphas[: step + 1]) for step in range(DEPTH))
    tv = tuple((variation[:, 0] / variation[:, 1].clamp(min=1)).tolist())
    tenths = tuple((drafted, hit) for drafted, hit in by_confidence.tolist())
    return HeldOut(alphas, tau, int(tried[0]), by_rank, tv, tenths)
