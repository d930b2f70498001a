"""Draft trees: what a drafter proposes, how its rows see each other, how candidates become a tree.

All shapes are static and nothing is read by the host, so that every function compiles whole.

Shapes: T tree rows (root first), P pool of candidates, N drafted nodes kept (T = N + 1), k width,
D levels.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from fasteagle.errors import FasteagleError


class DraftTree(NamedTuple):
    """Row 0 is the root; `parents[0] = 0`, `parents[j] < j`; siblings carry distinct tokens.

    Rows that are not `valid` are padding: token 0, seen by nobody, never accepted.
    """

    tokens: Tensor  # [T] target ids
    parents: Tensor  # [T]
    valid: Tensor  # [T] bool


@dataclasses.dataclass(frozen=True)
class TreeShape:
    """Of a dynamic tree: `depth` levels of `topk` nodes each are expanded, `nodes` are verified."""

    depth: int = 3
    topk: int = 3
    nodes: int = 8

    def __post_init__(self) -> None:
        for name in ("depth", "topk", "nodes"):
            if getattr(self, name) < 1:
                raise FasteagleError(f"tree-{name} {getattr(self, name)} is out of range: use >= 1")
        if self.nodes > self.pool:
            raise FasteagleError(
                f"tree-nodes {self.nodes} is more than the {self.pool} candidates that "
                f"--tree-depth {self.depth} and --tree-topk {self.topk} yield"
            )
        if self.nodes < self.depth:
            raise FasteagleError(
                f"tree-nodes {self.nodes} cannot hold a path of --tree-depth {self.depth}"
            )

    @property
    def pool(self) -> int:
        """Candidates: the first level, and k children of each of k nodes on every other level."""
        return self.topk + (self.depth - 1) * self.topk**2

    @property
    def rows(self) -> int:
        """Rows of the verify pass, root included."""
        return self.nodes + 1


def ancestor_mask(parents: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """(tree_mask [T, T], depths [T]): row j sees row i if i is j or an ancestor of j.

    Pointer jumping: after i rounds a row knows its ancestors up to 2^i - 1 steps away.
    """
    T = parents.shape[0]
    own = torch.eye(T, dtype=torch.bool, device=parents.device)
    mask, jump = own, parents
    for _ in range(max(1, (T - 1).bit_length())):
        mask = mask | mask[jump]
        jump = jump[jump]
    mask = (mask & valid.unsqueeze(1) & valid.unsqueeze(0)) | own
    return mask, mask.sum(-1) - 1


class Pool(NamedTuple):
    """Candidates of a dynamic tree in the order they were found, parents before children."""

    tokens: Tensor  # [P] target ids
    scores: Tensor  # [P] never above the parent's
    parents: Tensor  # [P] pool index, -1 for the root's children


def rerank(pool: Pool, root: Tensor, n_nodes: int) -> DraftTree:
    """The `n_nodes` best candidates as a tree under `root` [1].

    The sort is stable and candidates stand behind their parents, so that a child whose score ties
    with its parent's is never kept without it: the kept set is closed under ancestors.
    """
    best = torch.sort(pool.scores, descending=True, stable=True).indices[:n_nodes]
    kept = torch.sort(best).values
    parents = pool.parents[kept]
    rows = torch.where(parents < 0, 0, torch.searchsorted(kept, parents.clamp(min=0)) + 1)
    tokens = torch.cat((root, pool.tokens[kept]))
    return DraftTree(tokens, torch.cat((rows.new_zeros(1), rows)), torch.ones_like(tokens).bool())


def chain(tokens: Tensor, valid: Tensor) -> DraftTree:
    """A path of T rows, root first."""
    parents = (torch.arange(tokens.shape[0], device=tokens.device) - 1).clamp(min=0)
    return DraftTree(torch.where(valid, tokens, 0), parents, valid)


# The 25 nodes of EAGLE-1's static tree as child ranks from the root (paper, figure 7).
PAPER_TREE: tuple[tuple[int, ...], ...] = (
    (0,),
    (1,),
    (2,),
    (3,),
    (0, 0),
    (0, 1),
    (0, 2),
    (1, 0),
    (1, 1),
    (2, 0),
    (2, 1),
    (3, 0),
    (0, 0, 0),
    (0, 0, 1),
    (0, 0, 2),
    (0, 1, 0),
    (0, 1, 1),
    (0, 2, 0),
    (0, 2, 1),
    (1, 0, 0),
    (0, 0, 0, 0),
    (0, 0, 0, 1),
    (0, 0, 0, 2),
    (0, 0, 0, 0, 0),
    (0, 0, 0, 0, 1),
)
