"""How good a draft head is on text that it was not trained on."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from fasteagle.model import EagleHead, Transformer
from fasteagle.training.data import Features
from fasteagle.training.loss import autocast, compute_dtype, make_batch, unroll
from fasteagle.training.parallel import Ranks

RANKS = 4  # children of a node whose acceptance is counted
TENTHS = 10  # of the probability that the head gives a child


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """Quality on held-out text: acceptance by depth of a greedy chain."""

    alphas: tuple[float, ...]  # n-alpha: acceptance of token n + 1 given that n were accepted
    tau: float  # tokens per target pass of a chain as deep as `alphas` is long, bonus included
    rows: int
    counts: tuple[tuple[int, int], ...] = ()  # (rows, drafted tokens accepted) by conversation
    ranks: tuple[tuple[float, ...], ...] = ()  # how often the child of rank 0, 1, ... matched
    # Drafted tokens, and the accepted ones, by the tenth that the head's probability lies in.
    by_confidence: tuple[tuple[int, int], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {
            "alphas": [round(a, 4) for a in self.alphas],
            "tau": round(self.tau, 4),
            "ranks": [[round(p, 4) for p in level] for level in self.ranks],
        }


def draft_rows(head: EagleHead, target: Transformer) -> Tensor:
    """The rows [V, D] that turn its features into draft logits."""
    if head.own_lm_head is None:
        return target.head_rows(head.target_ids())
    rows = head.own_lm_head.weight
    assert isinstance(rows, Tensor), "an LM head that is evaluated is dense"
    return rows


@torch.no_grad()
def evaluate(
    head: EagleHead,
    target: Transformer,
    store: Features,
    indices: list[int],
    depth: int = 5,
    ranks: Ranks | None = None,
) -> HeldOut:
    """Chain drafting simulated from every answer position of the held-out text.

    Of several processes each takes a part of the conversations; all get the whole result.

    The head has borrowed what it lacks from the target.

    Exact for text the target wrote greedily: the tokens fed are then those it would accept.
    """
    device = head.fc.weight.device
    ids = head.target_ids()
    lm_rows = draft_rows(head, target).to(compute_dtype(device))
    n_ranks = min(RANKS, len(ids))
    hits = torch.zeros(depth, n_ranks, dtype=torch.double)
    accepted = torch.zeros(depth, dtype=torch.double)
    tried = torch.zeros(depth, dtype=torch.double)
    by_confidence = torch.zeros(TENTHS, 2, dtype=torch.long)
    counts = torch.zeros(len(indices), 2, dtype=torch.long)
    processes = ranks or Ranks()
    for number in processes.share(list(range(len(indices)))):
        i, before = indices[number], (int(tried[0]), int(accepted.sum()))
        config = head.config
        batch = make_batch(store, [i], device, config.shifted, len(config.tap_layers))
        embeds = head.embedding.weight[batch.tokens].float()
        with autocast(device):
            outputs = unroll(head, embeds, batch.features, depth)
        best = target.lm_head(batch.targets[0].to(target.norm.weight.dtype)).argmax(-1)
        alive = torch.ones_like(best, dtype=torch.bool)
        for step, predicted in enumerate(outputs):
            logits = (predicted[0].to(lm_rows.dtype) @ lm_rows.T).float()
            values, best_ranks = logits.topk(n_ranks)
            drafted = ids[best_ranks]
            counted = batch.counted(step)[0]
            alive = (torch.cat((alive.new_zeros(1), alive[:-1])) if step else alive) & counted
            tried[step] += alive.sum().cpu()
            right = (drafted == best.unsqueeze(1)) & alive.unsqueeze(1)
            hits[step] += right.sum(0).cpu()
            confidence = torch.exp(values - logits.logsumexp(-1, keepdim=True))
            tenth = (confidence[alive] * TENTHS).long().clamp(max=TENTHS - 1).flatten().cpu()
            by_confidence[:, 0] += tenth.bincount(minlength=TENTHS)
            by_confidence[:, 1] += tenth[right[alive].flatten().cpu()].bincount(minlength=TENTHS)
            alive = right[:, 0]
            accepted[step] += alive.sum().cpu()
        counts[number, 0] = int(tried[0]) - before[0]
        counts[number, 1] = int(accepted.sum()) - before[1]
    processes.sum_([hits, accepted, tried, by_confidence, counts])
    alphas = tuple((accepted / tried.clamp(min=1)).tolist())
    tau = 1 + sum(math.prod(alphas[: n + 1]) for n in range(depth))
    by_rank = tuple(map(tuple, (hits / tried.clamp(min=1).unsqueeze(1)).tolist()))
    tenths = tuple((n, hit) for n, hit in by_confidence.tolist())
    by_conversation = tuple((n, hit) for n, hit in counts.tolist())
    return HeldOut(alphas, tau, int(tried[0]), by_conversation, by_rank, tenths)
