"""One tree from two sources: EAGLE's candidates and a looked-up chain, reranked together.

A looked-up token that EAGLE proposes under the same parent is one candidate. Scores are
log-probabilities of paths: EAGLE's own, and those of the lookup's table, which has learned how
often looked-up tokens are accepted. So the chain may continue below EAGLE's leaves, or beside them.
"""

from __future__ import annotations

from typing import Self

from torch import Tensor

from fasteagle.drafting.draft_head import Prediction
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.drafting.lookup import Lookup
from fasteagle.drafting.policy import MAX_CHAIN
from fasteagle.drafting.thresholds import LONGEST
from fasteagle.errors import FasteagleError
from fasteagle.model import EagleHead
from fasteagle.shapes import MAX_REACH, FusedShape, GatedChain, TreeShape
from fasteagle.state import CycleSpec, DecodeState
from fasteagle.tree import DraftTree, Pool


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
        if nodes > (most := like.head_pool + MAX_REACH):
            raise FasteagleError(f"its trees have at most {most} nodes")
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
        tokens, logp = self.ops.look_up(self.lookup, state.text, state.seq_len, shape.reach)
        both = self.ops.fuse(pool, shape.topk, shape.levels, tokens, logp)
        return self.rerank(both, state.root, shape.nodes)
