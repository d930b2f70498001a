"""EAGLE-1's static tree, its children ranked, or sampled as in the paper's algorithm 1.

Shapes: T tree rows, D model dim, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fasteagle.drafting.draft_head import HeadDrafter, Prediction
from fasteagle.errors import FasteagleError
from fasteagle.model import EagleHead
from fasteagle.multi_round import DRAFT_STREAM, accept_sampled
from fasteagle.sampling import SamplingMode, gumbel_noise
from fasteagle.shapes import PAPER_TREE, StaticShape
from fasteagle.state import Accept, CycleSpec, DecodeState
from fasteagle.tree import DraftTree


class Level(NamedTuple):
    """One level of the tree, below its frontier: the nodes of the level above with children."""

    above: Tensor  # frontier index of each node's parent
    ranks: Tensor  # rank of each node among its siblings
    expanded: Tensor  # nodes that have children themselves: the next frontier
    frontier_rows: Tensor  # tree row of each frontier node


class StaticTreeDrafter(HeadDrafter):
    """Drafter of a static tree, whose node `path` is the rank-th best child at every step.

    With `sampled` and a temperature, children are instead sampled from the draft distribution
    without replacement, and the rank is the order of sampling; the tree's `distributions` then have
    each row's distribution, which multi-round verification needs.
    """

    name = "eagle-static"

    def __init__(
        self,
        head: EagleHead,
        paths: Sequence[tuple[int, ...]] = PAPER_TREE,
        noise: str = "shared",
        sampled: bool = False,
    ) -> None:
        check_paths(paths, head.config.draft_vocab_size)
        super().__init__(head, noise)
        order = tuple(sorted(paths, key=lambda path: (len(path), path)))
        self.shape = StaticShape(len(order[-1]), None, len(order))
        self.sampled = sampled
        row_of = {(): 0, **{path: row for row, path in enumerate(order, 1)}}
        device = self.target_ids.device
        self._parents = torch.tensor([0] + [row_of[path[:-1]] for path in order], device=device)
        self._widest = max(path[-1] for path in order) + 1
        self._levels: list[Level] = []
        inner = {path[:-1] for path in order}
        frontier: list[tuple[int, ...]] = [()]
        self._inner_rows = 0
        for level in range(1, self.shape.depth + 1):
            here = [path for path in order if len(path) == level]
            following = [path for path in here if path in inner]
            columns: tuple[list[int], ...] = (
                [frontier.index(path[:-1]) for path in here],
                [path[-1] for path in here],
                [here.index(path) for path in following],
                [row_of[path] for path in frontier],
            )
            self._levels.append(
                Level(*(torch.tensor(c, dtype=torch.long, device=device) for c in columns))
            )
            frontier = following
            self._inner_rows += len(following)

    @property
    def tree_rows(self) -> int:
        return self._inner_rows

    def accept_for(self, kind: SamplingMode) -> Accept | None:
        return accept_sampled if self.sampled and not kind.greedy else None

    def propose(self, prediction: Prediction, state: DecodeState, spec: CycleSpec) -> DraftTree:
        logits, features = prediction
        sampled = self.sampled and not spec.kind.greedy
        distributions = None
        if sampled:
            vocab_size = self.head.config.block.vocab_size
            distributions = torch.zeros(self.shape.rows, vocab_size, device=logits.device)
        chosen = [state.root]
        paths = torch.zeros(1, 0, dtype=torch.int32, device=logits.device)
        n_rows = 0  # of the tree in the draft cache
        for number, level in enumerate(self._levels, 1):
            if distributions is not None:
                probs = (logits.float() / state.sampling.temperature).softmax(-1)
                distributions[level.frontier_rows.unsqueeze(1), self.target_ids] = probs
            ranked = self._ranked(logits, state, spec, number, sampled)
            ids, _ = self.ops.top_children(ranked, self._widest)
            tokens = self.target_ids[ids[level.above, level.ranks]]
            chosen.append(tokens)
            expanded = level.expanded
            if not len(expanded):
                break
            first, n_rows = n_rows, n_rows + len(expanded)
            own = torch.arange(first, n_rows, dtype=torch.int32, device=logits.device)
            parents = level.above[expanded]
            paths = torch.cat((paths[parents], own.unsqueeze(1)), dim=1)
            logits, features = self.step(
                tokens[expanded], features[parents], state.seq_len, number - 1, paths, first
            )
        row = torch.cat(chosen)
        return DraftTree(row, self._parents, torch.ones_like(row).bool(), distributions)

    def _ranked(
        self, logits: Tensor, state: DecodeState, spec: CycleSpec, level: int, sampled: bool
    ) -> Tensor:
        """Return the scores that rank children; with noise they sample without replacement."""
        if not sampled:
            return self.ranking_logits(logits, state.seq_len, level, spec.kind, state.sampling)
        position = (state.seq_len + level).unsqueeze(0)
        gumbel = gumbel_noise(state.sampling.seed ^ DRAFT_STREAM, position, self.target_ids)
        return logits.float() / state.sampling.temperature + gumbel


def check_paths(paths: Sequence[tuple[int, ...]], vocab_size: int) -> None:
    """Raise `FasteagleError` unless `paths` are a tree: every node's parent is among them."""
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

    Multi-round sampling samples children without replacement, so it must try every rank.
    """
    known = set(paths)
    for path in paths:
        if path[-1] > 0 and (*path[:-1], path[-1] - 1) not in known:
            raise FasteagleError(f"tree: {list(path)} skips a rank, which multi-round cannot")
