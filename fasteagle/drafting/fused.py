"""One tree from two sources: EAGLE's candidates and a looked-up chain, reranked together.

A looked-up token that EAGLE proposes under the same parent is one candidate. Scores are
log-probabilities of paths: EAGLE's own, and those of the lookup's table, which has learned how
often looked-up tokens are accepted. So the chain may continue below EAGLE's leaves, or beside them.

Shapes: E candidates of EAGLE's pool, k of its first level, R looked-up tokens, L levels.
"""

from __future__ import annotations

from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from fasteagle.drafting.draft_head import Prediction
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.drafting.lookup import Lookup
from fasteagle.drafting.policy import MAX_CHAIN
from fasteagle.drafting.thresholds import LONGEST
from fasteagle.model import EagleHead
from fasteagle.shapes import FusedShape, GatedChain, TreeShape
from fasteagle.state import CycleSpec, DecodeState
from fasteagle.tree import HEAD, LOOKUP, DraftTree, Pool

NEG_INF = float("-inf")


class FusedDrafter(EagleDrafter):
    """Drafter of EAGLE-2's tree and n-gram lookup; without levels only the lookup drafts."""

    looks_up = True

    def __init__(
        self,
        head: EagleHead,
        shape: FusedShape | GatedChain,
        max_seq_len: int,
        noise: str = "shared",
        lookup: Lookup | None = None,
    ) -> None:
        super().__init__(head, shape, max_seq_len, noise)
        self.name = "fused"
        self.shape: FusedShape | GatedChain = shape
        self.lookup = lookup or Lookup(device=self.target_ids.device)

    @property
    def may_skip_head(self) -> bool:
        return isinstance(self.shape, GatedChain)

    @property
    def advanced(self) -> list[Tensor]:
        return self.lookup.tensors

    @property
    def tree_rows(self) -> int:
        trees = [shape for shape in self.shapes() if isinstance(shape, FusedShape)]
        rows = [max(0, shape.levels - 1) * shape.topk for shape in trees]
        return max(rows, default=LONGEST)

    def resized(self, nodes: int) -> FusedDrafter:
        """Return a drafter with this draft head that verifies `nodes` candidates.

        Where kernels draft no chain of so many, it drafts a tree whose draft head has no branches.
        """
        like = self.shape
        if isinstance(like, GatedChain) and 1 <= nodes <= MAX_CHAIN:
            return self._ungated_chain(nodes)
        if isinstance(like, GatedChain):
            like = FusedShape(LONGEST, 1, LONGEST, min(like.depth, LONGEST))
        levels = min(like.levels, max(1, nodes))
        reach = max(like.reach, nodes - like.head_pool)
        return self._with(FusedShape(levels, like.topk, nodes, reach))

    def _with(self, shape: TreeShape | GatedChain | FusedShape) -> Self:
        assert isinstance(shape, FusedShape | GatedChain), "a fused drafter has no other shapes"
        return type(self)(self.head, shape, self.max_seq_len, self.noise, self.lookup)

    def apart(self) -> Self:
        other = super().apart()
        other.lookup = self.lookup.apart()
        return other

    def propose(
        self, prediction: Prediction | None, state: DecodeState, spec: CycleSpec
    ) -> DraftTree:
        """Expand, if the draft head is run; then look up, merge, rerank."""
        if prediction is not None:
            return super().propose(prediction, state, spec)
        none = state.root[:0]
        return self.select(Pool(none, none.float(), none), state, spec)

    def select(self, pool: Pool, state: DecodeState, spec: CycleSpec) -> DraftTree:
        shape = spec.shape
        assert isinstance(shape, FusedShape), "the engine asks for shapes of this drafter"
        tokens, logp = self.lookup.propose(state.text, state.seq_len, shape.reach)
        both = fuse(pool, shape.topk, shape.levels, tokens, logp)
        return self.rerank(both, state.root, shape.nodes)


def levels_of(k: int, n_levels: int) -> list[slice]:
    """Return the slice of each level's candidates in EAGLE's pool."""
    ends = [k + level * k * k for level in range(n_levels)]
    return [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def fuse(pool: Pool, k: int, n_levels: int, tokens: Tensor, logp: Tensor) -> Pool:
    """Return one pool: EAGLE's candidates, then the looked-up ones that are not among them.

    `logp` [R] is the log-probability that a looked-up token is accepted after the one before it. A
    candidate of both sources takes the higher score, which raises its descendants' scores as well.
    """
    R, E, device = tokens.shape[0], pool.tokens.shape[0], tokens.device
    levels = levels_of(k, n_levels)
    on_chain = torch.zeros(0, dtype=torch.bool, device=device)  # EAGLE's, on the lookup's path
    scores = pool.scores[:0]
    parent = torch.full((1,), -1, device=device)  # pool index of the chain's last token
    path = logp.new_zeros(1)  # score of the chain's last token
    parents, paths = [], []  # parents and scores of the chain's tokens
    for depth in range(R):
        parents.append(parent)
        path = path + logp[depth]
        parent = torch.full_like(parent, E + depth)
        partner = torch.zeros(1, dtype=torch.bool, device=device)  # whether EAGLE has it as well
        if depth < len(levels):
            here, base = levels[depth], pool.scores.new_zeros(1)
            same, own = pool.tokens[here] == tokens[depth], pool.scores[here]
            if depth:
                above = pool.parents[here]
                same = same & on_chain[above]
                base, own = scores[above], own - pool.scores[above]
            own = own.clamp(max=0)
            scores = torch.cat((scores, base + torch.where(same, own.maximum(logp[depth]), own)))
            on_chain = torch.cat((on_chain, same))
            partner = same.any(0, keepdim=True)
            place = here.start + same.long().argmax(0, keepdim=True)
            parent = torch.where(partner, place, parent)
            path = torch.where(partner, scores[place], path)
        paths.append(torch.where(partner, NEG_INF, path))
    for here in levels[R:]:
        above = pool.parents[here]
        own = (pool.scores[here] - pool.scores[above]).clamp(max=0)
        scores = torch.cat((scores, scores[above] + own))
    both = F.pad(on_chain, (0, E - len(on_chain)))
    sources = torch.cat((HEAD + LOOKUP * both, torch.full((R,), LOOKUP, device=device)))
    return Pool(
        torch.cat((pool.tokens, tokens)),
        torch.cat((scores, *paths)),
        torch.cat((pool.parents, *parents)),
        sources,
    )
