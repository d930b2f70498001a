"""EAGLE-2's dynamic tree: expand by cumulative log-probability, rerank, take the best nodes.

With a lookup its chain is reranked together with the draft head's candidates. A token of both under
the same parent is one candidate. Scores are log-probabilities of paths: the draft head's own, and
those of the lookup's table, which has learned how often looked-up tokens are accepted. So the chain
may continue below the draft head's leaves, or beside them.

Shapes: W rows of the draft head in one step, D model dim, V draft vocabulary, k top-k, P pool, B
texts that draft together (one here; several in `compile.cuda_draft`).
"""

from __future__ import annotations

from typing import Protocol, Self

import torch
from torch import Tensor

from fasteagle.drafting.draft_head import HeadDrafter, Prediction, RankingDrafter
from fasteagle.drafting.lookup import Lookup
from fasteagle.drafting.policy import MAX_CHAIN
from fasteagle.drafting.thresholds import LONGEST, Thresholds
from fasteagle.errors import FasteagleError
from fasteagle.model import EagleHead
from fasteagle.sampling import SamplingMode, SamplingTensors
from fasteagle.shapes import MAX_DEPTH, FusedShape, GatedChain, TreeShape
from fasteagle.state import CycleSpec, DecodeState
from fasteagle.tree import DraftTree, Pool, chain

UNGATED = Thresholds((0.0,) * LONGEST, (0.0,) * LONGEST)


class EagleDrafter(HeadDrafter):
    """Drafter that expands `depth` levels of `topk` nodes and verifies the `nodes` best.

    See the EAGLE-2 paper, section 4. With top-k 1 the tree is a chain. Trees of a `FusedShape` have
    candidates of `lookup`, too; without levels only the lookup drafts.
    """

    def __init__(
        self,
        head: EagleHead,
        shape: TreeShape | GatedChain | FusedShape,
        *,
        noise: str = "shared",
        lookup: Lookup | None = None,
    ) -> None:
        if shape.topk > head.config.draft_vocab_size:
            raise FasteagleError(
                f"tree-topk {shape.topk} is more than the draft vocabulary of "
                f"{head.config.draft_vocab_size:,} tokens: use fewer"
            )
        super().__init__(head, noise)
        self.name = "eagle-chain" if shape.topk == 1 else "eagle"
        if lookup is not None:
            self.name, self.lookup = "fused", lookup
        self.shape: TreeShape | GatedChain | FusedShape = shape

    @property
    def may_skip_head(self) -> bool:
        return self.lookup is not None and isinstance(self.shape, GatedChain)

    @property
    def tree_rows(self) -> int:
        return max(max(0, shape.levels - 1) * (shape.topk or 1) for shape in self.shapes())

    def resized(self, nodes: int) -> EagleDrafter:
        """Return a drafter with this draft head, `nodes` candidates and at most `nodes` levels.

        A gated chain becomes one that does not end early, or a tree whose draft head has no
        branches where kernels draft no chain of so many.
        """
        like, most = self.shape, LONGEST if self.lookup is None else MAX_CHAIN
        if isinstance(like, GatedChain) and 1 <= nodes <= most:
            made = self._with(GatedChain(nodes))
            made.fixed_thresholds = UNGATED
            return made
        if isinstance(like, GatedChain) and self.lookup is not None:
            like = FusedShape(LONGEST, 1, LONGEST, min(like.depth, LONGEST))
        levels = min(like.levels, max(1, nodes))
        if not isinstance(like, FusedShape):
            return self._with(TreeShape(levels, like.topk, nodes))
        if nodes > (most := like.head_pool + MAX_DEPTH):
            raise FasteagleError(f"its trees have at most {most} nodes")
        reach = max(like.reach, nodes - like.head_pool)
        return self._with(FusedShape(levels, like.topk, nodes, reach))

    def _with(self, shape: TreeShape | GatedChain | FusedShape) -> Self:
        """Return a drafter with this draft head and another shape."""
        return type(self)(self.head, shape, noise=self.noise, lookup=self.lookup)

    def propose(
        self, prediction: Prediction | None, state: DecodeState, spec: CycleSpec
    ) -> DraftTree:
        """Expand, if the draft head is run, then look up, rerank; or cut a gated chain."""
        shape = spec.shape
        assert shape is not None and shape.topk is not None, "the engine asks for its shapes"
        if prediction is None:
            none = state.root[:0]
            pool = Pool(none, none.float(), none)
        else:
            pool = expand(self, prediction, state, spec.kind, shape.levels, shape.topk).of_text(0)
        return self.select(pool, state, spec)

    def select(self, pool: Pool, state: DecodeState, spec: CycleSpec) -> DraftTree:
        """Return a tree of `spec.shape` from the draft head's candidates and the lookup's."""
        shape = spec.shape
        if isinstance(shape, GatedChain):
            return gated_chain(pool, state.root, self.thresholds)
        assert isinstance(shape, TreeShape | FusedShape), "the engine asks for its shapes"
        if isinstance(shape, FusedShape):
            assert self.lookup is not None, "such trees have two sources"
            tokens, logp = self.ops.look_up(self.lookup, state.text, state.seq_len, shape.reach)
            pool = self.ops.fuse(pool, shape.topk, shape.levels, tokens, logp)
        return self.ops.rerank(pool, state.root, shape.nodes)


def gated_chain(pool: Pool, root: Tensor, thresholds: Thresholds) -> DraftTree:
    """Return a chain up to the first path probability below its limit, see `Thresholds`."""
    paths = pool.scores.exp()  # [D]
    verify, expand = (paths.new_tensor(bounds[: len(paths)]) for bounds in thresholds)
    deeper = torch.cat((torch.ones_like(paths[:1]), (paths >= expand)[:-1])).bool()
    valid = ((paths >= verify) & deeper).long().cumprod(0).bool()
    valid = torch.cat((torch.ones_like(valid[:1]), valid))
    return chain(torch.cat((root, pool.tokens)), valid)


class Texts(Protocol):
    """Tensors of one text, or of several, that drafting reads."""

    @property
    def seq_len(self) -> Tensor: ...  # 0-d, or [B]

    @property
    def sampling(self) -> SamplingTensors: ...


def expand(
    drafter: RankingDrafter,
    prediction: Prediction,
    texts: Texts,
    kind: SamplingMode,
    depth: int,
    k: int,
) -> Pool:
    """Draft `depth` levels; the frontier of each level are the k best of its candidates.

    `prediction` has a row for each text, and the pool [B, P] too.
    """
    seq_len, sampling = texts.seq_len, texts.sampling
    logits, features = prediction  # [B, V], [B, D]
    B, device = len(logits), logits.device
    logits = drafter.ranking_logits(logits, seq_len, 1, kind, sampling)
    ids, scores = drafter.ops.top_children(logits, k)  # [B, k]
    tokens = drafter.target_ids[ids]
    features = features.repeat_interleave(k, 0)  # [B * k, D]
    all_tokens, all_scores = [tokens], [scores]
    all_parents = [torch.full_like(tokens, -1)]
    frontier = torch.arange(k, device=device).expand(B, k)  # pool index of each frontier node
    text = k * torch.arange(B, device=device).unsqueeze(1)  # first row of each text
    own = torch.arange(k, dtype=torch.int32, device=device).repeat(B).unsqueeze(1)
    paths = own  # cache rows of the path, among the tree's rows in the draft cache
    for level in range(1, depth):
        below = (level - 1) * k  # tree rows in the draft cache so far
        flat = tokens.flatten()  # [B * k]
        logits, features = drafter.step(flat, features, seq_len, level - 1, paths, below)
        logits = drafter.ranking_logits(logits, seq_len, level + 1, kind, sampling)
        ids, logp = drafter.ops.top_children(logits, k)  # [B * k, k]
        child_scores = drafter.child_scores(scores.view(-1, 1), logp).view(B, -1)
        child_tokens = drafter.target_ids[ids.view(B, -1)]
        all_tokens.append(child_tokens)
        all_scores.append(child_scores)
        all_parents.append(frontier.repeat_interleave(k, 1))
        best = torch.sort(child_scores, dim=1, descending=True, stable=True).indices[:, :k]
        tokens, scores = child_tokens.gather(1, best), child_scores.gather(1, best)
        above = (text + best // k).flatten()
        features = features[above]
        frontier = k + below * k + best
        paths = torch.cat((paths[above], level * k + own), dim=1)
    columns = all_tokens, all_scores, all_parents
    return Pool(*(torch.cat(parts, dim=1) for parts in columns))
