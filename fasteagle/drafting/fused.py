"""One tree from two sources: EAGLE's candidates and looked-up ones, reranked together.

A looked-up token that EAGLE proposes under the same parent is one candidate. Scores are
log-probabilities of paths: EAGLE's own, and those of the table of acceptance, which has learned
what looked-up tokens are worth. So the lookup may go on below EAGLE's leaves, and beside them.

Shapes: E candidates of EAGLE's pool, k of its first level, P places, R tokens read at each,
L levels.
"""

from __future__ import annotations

import copy
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from fasteagle.drafting.acceptance import (
    OTHERS,
    SAME,
    UNASKED,
    AcceptanceTable,
    Candidates,
    candidates_of,
)
from fasteagle.drafting.draft_head import Prediction
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.drafting.fused_controller import FusedController
from fasteagle.drafting.fused_plan import FusedPlan
from fasteagle.drafting.lookup import Lookup
from fasteagle.drafting.plan import AnyPlan
from fasteagle.drafting.sure_chain import (
    LONGEST,
    START_HEAD_GAIN,
    ChainPlan,
    FusedChainController,
    LookedUp,
)
from fasteagle.model import EagleHead
from fasteagle.shapes import MAX_REACH, FusedShape, SureChain
from fasteagle.state import CycleSpec, DecodeState
from fasteagle.tree import HEAD, LOOKUP, DraftTree, Pool

NEG_INF = float("-inf")


class FusedDrafter(EagleDrafter):
    """EAGLE-2's tree and n-gram lookup in one; a shape without levels is the lookup alone."""

    def __init__(
        self,
        head: EagleHead,
        shape: FusedShape | SureChain,
        max_seq_len: int,
        noise: str = "shared",
        lookup: Lookup | None = None,
    ) -> None:
        super().__init__(head, shape, max_seq_len, noise)
        self.name = "fused"
        self.shape: FusedShape | SureChain = shape
        self.controller: FusedController | FusedChainController | None = None
        self.lookup = lookup or Lookup()
        self.table = AcceptanceTable(self.lookup.places, MAX_REACH, self.target_ids.device)
        self.looked_up = LookedUp()  # in chains, on CPUs

    def follow(self, plan: AnyPlan) -> None:
        if isinstance(plan, ChainPlan):
            self.controller = FusedChainController(plan)
        else:
            assert isinstance(plan, FusedPlan), "the tuner makes the plan of this drafter"
            self.controller = FusedController(plan)

    @property
    def may_skip_head(self) -> bool:
        return isinstance(self.shape, SureChain)

    @property
    def head_gain(self) -> float | None:
        """What a looked-up chain must promise, or the head drafts; None: the head is paused."""
        chosen = self.controller
        return chosen.head_gain if isinstance(chosen, FusedChainController) else START_HEAD_GAIN

    @property
    def advanced(self) -> list[Tensor]:
        return [*self.table.tensors, *self.looked_up.tensors]

    @property
    def tree_rows(self) -> int:
        trees = [shape for shape in self.shapes() if isinstance(shape, FusedShape)]
        rows = [max(0, shape.levels - 1) * shape.topk for shape in trees]
        return max(rows, default=LONGEST)

    def resized(self, nodes: int) -> FusedDrafter:
        """In place of chains, which end by themselves, a tree without branches of the head's."""
        like = self.shape
        if isinstance(like, SureChain):
            like = FusedShape(LONGEST, 1, LONGEST, min(like.depth, LONGEST))
        levels = min(like.levels, max(1, nodes))
        reach = max(like.reach, nodes - like.head_pool)
        shape = FusedShape(levels, like.topk, nodes, reach)
        return type(self)(self.head, shape, self.max_seq_len, self.noise, self.lookup)

    def apart(self) -> Self:
        other = super().apart()
        other.table = copy.deepcopy(self.table)
        other.looked_up = copy.deepcopy(self.looked_up)
        return other

    def propose(
        self, prediction: Prediction | None, state: DecodeState, spec: CycleSpec
    ) -> DraftTree:
        """Learn from what followed the last proposal, expand, look up, merge, rerank."""
        shape = spec.shape
        assert isinstance(shape, FusedShape), "the engine asks for shapes of this drafter"
        self.table.learn(state.text, state.seq_len)
        found = candidates_of(self.lookup.find(state.text, state.seq_len, shape.reach))
        pool = empty_pool(found)
        if prediction is not None:
            pool = self.expand(prediction, state, spec.kind, shape.levels, shape.topk)
        merged = merge(pool, shape.topk, shape.levels, found)
        cells = self.table.cells(found, merged.said)
        self.table.keep(found, cells, state.root, state.seq_len)
        both = fuse(pool, shape.topk, found, merged, self.table.log_probabilities(cells))
        return self.rerank(both, state.root, shape.nodes)


def empty_pool(found: Candidates) -> Pool:
    """That of a draft head which is not run."""
    none = found.tokens.new_zeros(0)
    return Pool(none, none.float(), none)


class Merged(NamedTuple):
    """Which looked-up candidates are EAGLE's too."""

    equal: Tensor  # [P, E] bool: a candidate of EAGLE's is on the path of a place
    partners: Tensor  # [P, R] pool index of the same candidate, -1: EAGLE has none
    said: Tensor  # [P, R] UNASKED, OTHERS or SAME


def levels_of(k: int, n_levels: int) -> list[slice]:
    """Where in EAGLE's pool the candidates of each level are."""
    ends = [k + level * k * k for level in range(n_levels)]
    return [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def merge(pool: Pool, k: int, n_levels: int, found: Candidates) -> Merged:
    """Find the looked-up candidates that have the same token under the same parent as EAGLE's."""
    P, R = found.tokens.shape
    E = pool.tokens.shape[0]
    equal = torch.zeros(P, 0, dtype=torch.bool, device=found.tokens.device)
    partners = []
    for level, here in enumerate(levels_of(k, n_levels)):
        if level == R:
            equal = F.pad(equal, (0, E - equal.shape[1]))
            break
        same = found.tokens[:, level : level + 1] == pool.tokens[here]
        if level:
            same = same & equal[:, pool.parents[here]]
        place = here.start + same.long().argmax(1)
        partners.append(torch.where(same.any(1), place, -1))
        equal = torch.cat((equal, same), dim=1)
    partners += [torch.full_like(found.leaders[:, 0], -1)] * (R - len(partners))
    partner = torch.stack(partners, dim=1)
    # The root's children were asked for, and those of the nodes that were expanded.
    expanded = torch.zeros(E + 1, dtype=torch.bool, device=partner.device)
    expanded = expanded.index_fill(0, pool.parents[k:], True) if n_levels > 1 else expanded
    above = partner[:, :-1]
    asked = (above >= 0) & expanded[above.clamp(min=0)]
    first = torch.full_like(partner[:, :1], n_levels > 0, dtype=torch.bool)
    said = torch.where(torch.cat((first, asked), dim=1), OTHERS, UNASKED)
    return Merged(equal, partner, torch.where(partner >= 0, SAME, said))


def fuse(pool: Pool, k: int, found: Candidates, merged: Merged, logp: Tensor) -> Pool:
    """One pool: EAGLE's candidates, then the looked-up ones that are not among them.

    `logp` [P, R]: that a looked-up token is right where its parent is. A candidate of both sources
    has the higher of the two probabilities, and what is below it gains as well.
    """
    P, R = found.tokens.shape
    E = pool.tokens.shape[0]
    device = logp.device
    scores = _raised_scores(pool, k, found, merged, logp)
    place = torch.arange(P, device=device).unsqueeze(1)
    spare = F.pad(scores, (0, 1))  # so that there is one without a draft head, too
    partners = merged.partners
    # A place that does not lead repeats the path of one that does, and its score.
    own = E + torch.arange(R, device=device) * P + found.leaders
    nodes = torch.where(partners >= 0, partners, own)
    parents = torch.cat((torch.full_like(place, -1), nodes[:, :-1]), dim=1)
    paths = [logp[:, 0]]
    for level in range(1, R):
        above = partners[:, level - 1]
        known = torch.where(above >= 0, spare[above.clamp(min=0)], paths[-1])
        paths.append(known + logp[:, level])
    alone = found.leads & (partners < 0)
    looked_up = torch.where(alone, torch.stack(paths, dim=1), NEG_INF)
    by_both = merged.equal.any(0)
    sources = torch.cat((HEAD + LOOKUP * by_both, torch.full((P * R,), LOOKUP, device=device)))
    # By level, so that parents come before their children.
    return Pool(
        torch.cat((pool.tokens, found.tokens.T.flatten())),
        torch.cat((scores, looked_up.T.flatten())),
        torch.cat((pool.parents, parents.T.flatten())),
        sources,
    )


def _raised_scores(pool: Pool, k: int, found: Candidates, merged: Merged, logp: Tensor) -> Tensor:
    """Scores [E] of EAGLE's pool where looked-up candidates count for their partners."""
    E = pool.tokens.shape[0]
    if not E:
        return pool.scores
    n_levels = 1 + (E - k) // (k * k)
    index = torch.arange(E, device=logp.device)
    level = torch.where(index < k, 0, (index - k) // (k * k) + 1).clamp(max=logp.shape[1] - 1)
    counts = merged.equal & found.leads[:, level]
    best = torch.where(counts, logp[:, level], NEG_INF).amax(0)
    own = pool.scores.clone()
    own[k:] -= pool.scores[pool.parents[k:]]
    own = torch.maximum(own.clamp(max=0), best)
    scores = own[:k]
    for here in levels_of(k, n_levels)[1:]:
        scores = torch.cat((scores, scores[pool.parents[here]] + own[here]))
    return scores
