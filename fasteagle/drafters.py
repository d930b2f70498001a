"""Ways to guess what the target will say: EAGLE trees and chains, and n-grams of the context.

A drafter sees every committed position once (`extend`) and then proposes a tree (`propose`). It may
guess anything: verification keeps only what the target would have said.

Shapes: T tree rows, W rows of the draft head in one step, D model dim, S draft cache slots, V draft
vocabulary, k width, P pool.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from fasteagle.drafting.controller import Pilot
from fasteagle.drafting.head_state import HeadState
from fasteagle.drafting.plan import Plan, Ranks
from fasteagle.errors import FasteagleError
from fasteagle.model import EagleHead
from fasteagle.multi_round import DRAFT_STREAM
from fasteagle.options import SamplingParams
from fasteagle.tree import PAPER_TREE, DraftTree, Pool, TreeShape, chain, rerank

GREEDY = SamplingParams()


class Drafter(Protocol):
    """What the engine needs of a drafter. `length` is how many positions it has seen."""

    name: str

    @property
    def depth(self) -> int:
        """Longest path it proposes."""

    @property
    def rows(self) -> int:
        """Of its trees, root included."""

    @property
    def length(self) -> int: ...

    def rewind(self, length: int) -> None:
        """Forget positions from `length` on."""

    def extend(self, tokens: Tensor, features: Tensor, count: int) -> None:
        """See the next positions: `features` [W, D], and `tokens` [W], each the one after its row.

        Only the first `count` rows are real, the others padding.
        """

    def propose(
        self, root: Tensor, context: Sequence[int], params: SamplingParams
    ) -> DraftTree | None:
        """A tree under `root` [1], the token after the last position seen; None: no guess.

        `context` are the committed tokens, root last, for drafters that work on text; `params`
        say how the target will draw, for drafters that can guess the draw itself.
        """

    def rests(self) -> bool:
        """Whether the next pass should be a plain one, because guessing does not pay now."""

    def learn(self, accepted: int | None) -> None:
        """A pass is over: so many guesses were accepted; None if it had none."""


class Piloted:
    """What drafters share that may change their tree while decoding: the pilot, if there is one.

    Without a pilot (no costs measured yet, or sizes asked for) the tree stays as it is.
    """

    pilot: Pilot | None = None
    tuning: Tuning | None = None  # where costs are kept, for drafters that may get a pilot

    def follow(self, plan: Plan) -> None:
        """Guess as the plan finds best from now on."""
        self.pilot = Pilot(plan)

    def rests(self) -> bool:
        return self.pilot is not None and self.pilot.shape is None

    def learn(self, accepted: int | None) -> None:
        if self.pilot is not None:
            self.pilot.learn(accepted)


@dataclasses.dataclass(frozen=True)
class Tuning:
    """What the tuner must know of a drafter."""

    path: Path  # of the measured costs
    ranks: Ranks


class HeadDrafter(Piloted):
    """What drafters with an EAGLE head share: the head's state sees the committed positions."""

    state: HeadState

    @property
    def length(self) -> int:
        return self.state.length

    def rewind(self, length: int) -> None:
        self.state.rewind(length)

    def extend(self, tokens: Tensor, features: Tensor, count: int) -> None:
        self.state.extend(tokens, features, count)


class EagleDrafter(HeadDrafter):
    """EAGLE-2's dynamic tree; with width 1 it is a chain.

    Expands `depth` levels of `topk` nodes by cumulative log-probability, then keeps the `nodes`
    best of all candidates (paper EAGLE-2, section 4). `value` and `do_rerank` are its ablations.
    """

    def __init__(
        self,
        head: EagleHead,
        shape: TreeShape,
        max_seq_len: int,
        value: str = "cumulative",
        do_rerank: bool = True,
        noise: str = "shared",
    ) -> None:
        if shape.topk > head.config.draft_vocab_size:
            raise FasteagleError(
                f"tree-topk {shape.topk} is more than the draft vocabulary of "
                f"{head.config.draft_vocab_size:,} tokens"
            )
        self.name = "eagle-chain" if shape.topk == 1 else "eagle"
        self.shape = shape
        self.value, self.rerank, self.noise = value, do_rerank, noise
        self.state = HeadState(head, max_seq_len, (shape.depth - 1) * shape.topk)

    @property
    def depth(self) -> int:
        return self.shape.depth

    @property
    def rows(self) -> int:
        return self.shape.rows

    def follow(self, plan: Plan) -> None:
        super().follow(plan)
        self.state.make_room(max((s.depth - 1) * s.topk for s in plan.shapes or [self.shape]))

    def resized(self, nodes: int) -> EagleDrafter:
        """A drafter over the same head that keeps `nodes` candidates, fewer levels if need be."""
        depth = min(self.shape.depth, max(1, nodes))
        shape = TreeShape(depth, self.shape.topk, nodes)
        return EagleDrafter(
            self.state.head, shape, self.state.max_seq_len, self.value, self.rerank, self.noise
        )

    def propose(
        self, root: Tensor, context: Sequence[int], params: SamplingParams = GREEDY
    ) -> DraftTree:
        piloted = None if self.pilot is None else self.pilot.shape
        return self.tree_of(piloted or self.shape, root, params)

    def tree_of(self, shape: TreeShape, root: Tensor, params: SamplingParams) -> DraftTree:
        """A tree of this shape, now and until another one is asked for."""
        self.shape = shape
        pool = self.expand(params)
        if not self.rerank:
            pool = pool._replace(scores=torch.arange(len(pool.scores), 0, -1, device=root.device))
        return rerank(pool, root, shape.nodes)

    def expand(self, params: SamplingParams = GREEDY) -> Pool:
        """`depth` levels; every level's frontier are the k best of its candidates."""
        k, state = self.shape.topk, self.state
        logits = state.ranking_logits(state.logits, 1, params, self.noise)
        ids, logp = top_children(logits, k)  # [1, k]
        tokens, scores = state.to_target(ids[0]), logp[0]
        features = state.feature.expand(k, -1)
        all_tokens, all_scores = [tokens], [scores]
        all_parents = [torch.full_like(tokens, -1)]
        frontier = torch.arange(k, device=tokens.device)  # pool index of each frontier node
        mask = torch.eye(k, dtype=torch.bool, device=tokens.device)  # among the head's own rows
        for level in range(1, self.depth):
            logits, features = state.step(tokens, features, level - 1, mask)
            logits = state.ranking_logits(logits, level + 1, params, self.noise)
            ids, logp = top_children(logits, k)  # [k, k]
            reached = scores.unsqueeze(1) + logp if self.value == "cumulative" else logp
            child_scores = torch.minimum(reached, scores.unsqueeze(1)).flatten()
            child_tokens = state.to_target(ids.flatten())
            first = k + (level - 1) * k * k
            all_tokens.append(child_tokens)
            all_scores.append(child_scores)
            all_parents.append(frontier.repeat_interleave(k))
            best = torch.sort(child_scores, descending=True, stable=True).indices[:k]
            above = best // k
            tokens, scores = child_tokens[best], child_scores[best]
            features = features[above]
            frontier = first + best
            own = torch.eye(k, dtype=torch.bool, device=tokens.device)
            mask = torch.cat((mask[above], own), dim=1)
        return Pool(torch.cat(all_tokens), torch.cat(all_scores), torch.cat(all_parents))


class StaticTreeDrafter(HeadDrafter):
    """EAGLE-1's tree of fixed shape: node `path` is the rank-th best child at every step.

    With `sampled` and a temperature, children are instead drawn from the draft's distribution
    without replacement, the rank being the order of drawing; `proposals` [T, V] then holds that
    distribution for every row, as multi-round verification needs it.
    """

    def __init__(
        self,
        head: EagleHead,
        max_seq_len: int,
        paths: Sequence[tuple[int, ...]] = PAPER_TREE,
        noise: str = "shared",
        sampled: bool = False,
    ) -> None:
        check_paths(paths, head.config.draft_vocab_size)
        self.name, self.noise = "eagle-static", noise
        order = sorted(paths, key=lambda path: (len(path), path))
        row_of = {(): 0, **{path: row for row, path in enumerate(order, 1)}}
        self.depth, self.rows = len(order[-1]), len(order) + 1
        self._parents = torch.tensor([0] + [row_of[path[:-1]] for path in order])
        inner = {path[:-1] for path in order} - {()}
        self._rows_of_inner: list[Tensor] = []  # of each level's frontier
        self.sampled = sampled
        self.proposals: Tensor | None = None
        self._levels = []
        frontier: list[tuple[int, ...]] = [()]
        width = 0
        for level in range(1, self.depth + 1):
            here = [path for path in order if len(path) == level]
            above = torch.tensor([frontier.index(path[:-1]) for path in here])
            ranks = torch.tensor([path[-1] for path in here])
            self._rows_of_inner.append(torch.tensor([row_of[path] for path in frontier]))
            frontier = [path for path in here if path in inner]
            kept = torch.tensor([here.index(path) for path in frontier], dtype=torch.long)
            self._levels.append((above, ranks, kept))
            width += len(frontier)
        self.state = HeadState(head, max_seq_len, width)

    def propose(
        self, root: Tensor, context: Sequence[int], params: SamplingParams = GREEDY
    ) -> DraftTree:
        state, device = self.state, root.device
        logits, features = state.logits, state.feature
        sampled = self.sampled and not params.greedy
        self.proposals = None
        if sampled:
            params = dataclasses.replace(params, seed=params.seed ^ DRAFT_STREAM)
            vocab_size = state.head.config.block.vocab_size
            self.proposals = torch.zeros(self.rows, vocab_size, device=device)
        found, mask = [root], torch.zeros(1, 0, dtype=torch.bool, device=device)
        for level, (above, ranks, kept) in enumerate(self._levels, 1):
            above, ranks, kept = above.to(device), ranks.to(device), kept.to(device)
            if sampled and self.proposals is not None:
                probs = (logits.float() / params.temperature).softmax(-1)
                rows = self._rows_of_inner[level - 1].to(device)
                self.proposals[rows.unsqueeze(1), state.to_target(slice(None))] = probs
            # Ranking by the sum with Gumbel noise draws without replacement, in order.
            noise = "shared" if sampled else self.noise
            ranked = state.ranking_logits(logits, level, params, noise)
            ids, _ = top_children(ranked, self._widest)
            tokens = state.to_target(ids[above, ranks])
            found.append(tokens)
            if not len(kept):
                break
            own = torch.eye(len(kept), dtype=torch.bool, device=device)
            mask = torch.cat((mask[above[kept]], own), dim=1)
            logits, features = state.step(tokens[kept], features[above[kept]], level - 1, mask)
        tokens = torch.cat(found)
        return DraftTree(tokens, self._parents.to(device), torch.ones_like(tokens).bool())

    @property
    def _widest(self) -> int:
        return max(int(ranks.max()) for _, ranks, _ in self._levels) + 1


class NgramDrafter(Piloted):
    """A chain copied from where the context's last few tokens stood before; needs no training."""

    name = "ngram"

    def __init__(self, depth: int = 7, longest: int = 3, shortest: int = 1) -> None:
        self.depth = depth
        self._sizes = range(longest, shortest - 1, -1)
        self._length = 0

    @property
    def rows(self) -> int:
        return self.depth + 1

    @property
    def length(self) -> int:
        return self._length

    def rewind(self, length: int) -> None:
        self._length = min(self._length, length)

    def extend(self, tokens: Tensor, features: Tensor, count: int) -> None:
        self._length += count

    def propose(
        self, root: Tensor, context: Sequence[int], params: SamplingParams = GREEDY
    ) -> DraftTree | None:
        if self.pilot is not None and self.pilot.shape is not None:
            self.depth = self.pilot.shape.depth
        found = self.lookup(context)
        if not found:
            return None
        tokens = torch.zeros(self.rows, dtype=torch.long)
        tokens[0] = context[-1]
        tokens[1 : 1 + len(found)] = torch.tensor(found, dtype=torch.long)
        valid = torch.arange(self.rows) <= len(found)
        return chain(tokens.to(root.device), valid.to(root.device))

    def lookup(self, context: Sequence[int]) -> Sequence[int]:
        """What followed the latest earlier occurrence of the longest matching end of `context`."""
        for size in self._sizes:
            end = list(context[-size:])
            if len(end) < size:
                continue
            for at in range(len(context) - size - 1, -1, -1):
                if context[at] == end[0] and list(context[at : at + size]) == end:
                    return context[at + size : at + size + self.depth]
        return []


def top_children(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Draft ids and log-probabilities [W, k] of each row's best children, by logits [W, V]."""
    values, ids = logits.float().topk(k, dim=-1)
    return ids, values - logits.float().logsumexp(-1, keepdim=True)


def check_paths(paths: Sequence[tuple[int, ...]], vocab_size: int) -> None:
    """Raise `FasteagleError` unless `paths` are a tree: every node's parent is there."""
    known = {(), *paths}
    if not paths or len(known) != len(paths) + 1:
        raise FasteagleError("tree: needs at least one node, and each only once")
    for path in paths:
        if path[:-1] not in known:
            raise FasteagleError(f"tree: node {list(path)} has no parent {list(path[:-1])}")
        if not 0 <= path[-1] < vocab_size:
            raise FasteagleError(f"tree: rank {path[-1]} is outside the draft vocabulary")


def check_no_gaps(paths: Sequence[tuple[int, ...]]) -> None:
    """Raise `FasteagleError` unless every node's children are ranked 0, 1, 2, ...

    Multi-round sampling draws children without replacement: a rank left out is a draw not tried.
    """
    known = set(paths)
    for path in paths:
        if path[-1] > 0 and (*path[:-1], path[-1] - 1) not in known:
            raise FasteagleError(f"tree: {list(path)} skips a rank, which multi-round cannot")
