"""Draft trees: their rows, which rows see each other, and how candidates become a tree.

All shapes are static and the host reads nothing, so that every function compiles as a whole.

Shapes: T tree rows (root first), P pool of candidates, N drafted nodes kept (T = N + 1), k width,
D levels, E candidates of a draft head, R looked-up tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fasteagle.shapes import head_pool

HEAD, LOOKUP = 1, 2  # proposers of a node as bits: draft head, n-gram lookup


class DraftTree(NamedTuple):
    """Rows of a draft tree: row 0 is the root, and siblings carry distinct tokens.

    `parents[0]` is 0, and `parents[j] < j`. Rows that are not `valid` are padding: token 0, seen by
    no other row, never accepted. Where children were sampled, `distributions` has the distribution
    that each row's children were sampled from. Where a tree has two sources, `sources` has the
    proposers of each row: bits of `HEAD` and `LOOKUP`.
    """

    tokens: Tensor  # [T] target ids
    parents: Tensor  # [T]
    valid: Tensor  # [T] bool
    distributions: Tensor | None = None  # [T, V]
    sources: Tensor | None = None  # [T]


def first_rows(tree: DraftTree, n: int) -> DraftTree:
    """Return the tree of the first `n` rows; the rows past them must be padding."""
    cut = {name: value[:n] for name, value in tree._asdict().items() if value is not None}
    return tree._replace(**cut)


class TreeView(NamedTuple):
    """Cache slots that the rows of a tree see.

    Tree row j lies in cache slot `seq_len + j`. It sees the keys at positions `0 .. seq_len +
    depths[j]`, with a sliding window of w only the last w of them. Plain decoding is a tree of one
    row: paths [[0]], depths [0].
    """

    seq_len: Tensor  # 0-d, integer, on the device: a replayed CUDA graph sees the text grow
    paths: Tensor  # [T, P] int32: row of j's ancestor at depth d, itself at its own
    depths: Tensor  # [T] integer, the root's is 0; all below P
    window: int | None = None

    @classmethod
    def of_chain(cls, seq_len: Tensor, T: int, window: int | None = None) -> TreeView:
        """Return the view of T rows, each of which continues the one before it."""
        row = torch.arange(T, device=seq_len.device)
        return cls(seq_len, row.to(torch.int32).expand(T, T).contiguous(), row, window)

    def mask(self, n_slots: int) -> Tensor:
        """Return the mask [T, n_slots] of this view: row j sees slot s."""
        T, P = self.paths.shape
        key = torch.arange(n_slots, device=self.paths.device)
        committed = (key < self.seq_len).expand(T, -1)
        depths = self.depths.unsqueeze(1)
        depth = torch.arange(P, device=key.device)
        seen = depth <= depths
        if self.window is not None:
            first = depths - self.window + 1
            committed = committed & (key >= self.seq_len + first)
            seen = seen & (depth >= first)
        # A row that is no ancestor is replaced by the row itself, which it sees anyway.
        rows = torch.where(seen, self.paths, self.paths.gather(1, depths))
        return committed.clone().scatter_(1, self.seq_len + rows, True)


def tree_paths(tree_mask: Tensor, depths: Tensor, depth: int) -> Tensor:
    """Return the path table [T, depth + 1] int32 of a tree_mask [T, T] and depths [T].

    Both are those of `ancestor_mask`. `depth` is the largest depth of the drafter's trees, which
    the host knows, unlike that of this tree. Entries past a row's own are 0.
    """
    rows = torch.arange(len(depths), device=depths.device, dtype=torch.int32)
    # Row j's ancestor i goes to column depths[i], other rows to a last column, which is cut off.
    column = torch.where(tree_mask & (depths <= depth), depths, depth + 1)
    table = rows.new_zeros(len(depths), depth + 2)
    return table.scatter(1, column.long(), rows.expand_as(tree_mask))[:, :-1].contiguous()


def ancestor_mask(parents: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Return (tree_mask [T, T], depths [T]): row j sees row i if i is j or an ancestor of j.

    Pointer jumping: after i rounds a row knows its ancestors up to 2^i - 1 steps away.
    """
    T = parents.shape[0]
    own = torch.eye(T, dtype=torch.bool, device=parents.device)
    mask, jump = own, parents
    for _ in range((T - 1).bit_length()):
        mask = mask | mask[jump]
        jump = jump[jump]
    mask = (mask & valid.unsqueeze(1) & valid.unsqueeze(0)) | own
    return mask, mask.sum(-1) - 1


class Relations(NamedTuple):
    """Tree mask, depths and path table of a tree's rows."""

    tree_mask: Tensor  # [T, T] bool: row j sees row i
    depths: Tensor  # [T], the root's is 0
    paths: Tensor  # [T, T] int32, see `tree_paths`


def relations(parents: Tensor, valid: Tensor) -> Relations:
    """Return tree mask, depths and path table of a tree's rows [T]."""
    tree_mask, depths = ancestor_mask(parents, valid)
    return Relations(tree_mask, depths, tree_paths(tree_mask, depths, len(depths) - 1))


class Pool(NamedTuple):
    """Candidates of a dynamic tree in the order of drafting, parents before children."""

    tokens: Tensor  # [P] target ids
    scores: Tensor  # [P] never above the parent's
    parents: Tensor  # [P] pool index, -1 for the root's children
    sources: Tensor | None = None  # [P] as in `DraftTree`

    def of_text(self, i: int) -> Pool:
        """Return the candidates of text i, of tensors [B, P]."""
        return Pool(self.tokens[i], self.scores[i], self.parents[i])


def rerank(pool: Pool, root: Tensor, n_nodes: int) -> DraftTree:
    """Return the `n_nodes` best candidates as a tree under `root` [1].

    A score of -inf marks padding, which fills the tree where there are too few candidates. The sort
    is stable and candidates come after their parents, so that a child whose score ties with its
    parent's is never chosen without it: the chosen set is closed under ancestors.
    """
    best = torch.sort(pool.scores, descending=True, stable=True).indices[:n_nodes]
    best_nodes = torch.sort(best).values
    valid = pool.scores[best_nodes] > float("-inf")
    parents = pool.parents[best_nodes]
    rows = torch.searchsorted(best_nodes, parents.clamp(min=0)) + 1
    rows = torch.where(valid & (parents >= 0), rows, 0)
    tokens = torch.cat((root, torch.where(valid, pool.tokens[best_nodes], 0)))
    sources = None
    if pool.sources is not None:
        sources = torch.cat((torch.zeros_like(root), pool.sources[best_nodes]))
    return DraftTree(
        tokens,
        torch.cat((rows.new_zeros(1), rows)),
        torch.cat((torch.ones_like(root).bool(), valid)),
        sources=sources,
    )


def levels_of(k: int, n_levels: int) -> list[slice]:
    """Return the slice of each level's candidates in EAGLE's pool."""
    ends = [head_pool(k, level + 1) for level in range(n_levels)]
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
        paths.append(torch.where(partner, float("-inf"), path))
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


def chain(tokens: Tensor, valid: Tensor) -> DraftTree:
    """Return a chain of T rows, root first."""
    parents = (torch.arange(tokens.shape[0], device=tokens.device) - 1).clamp(min=0)
    return DraftTree(torch.where(valid, tokens, 0), parents, valid)


class Proposal(NamedTuple):
    """Draft tree, with the tree mask, depths and path table of its rows."""

    tree: DraftTree
    tree_mask: Tensor  # [T, T] bool: row j sees row i
    depths: Tensor  # [T], the root's is 0
    paths: Tensor  # [T, T] int32, see `tree_paths`
    extended: bool = False  # whether the drafter has seen the pending pairs
    promised: tuple[float, ...] = ()  # path probabilities of a gated chain, where the host has them

    @classmethod
    def of(
        cls,
        tree: DraftTree,
        extended: bool = False,
        relate: Callable[[Tensor, Tensor], Relations] = relations,
    ) -> Proposal:
        return cls(tree, *relate(tree.parents, tree.valid), extended)

    def first_rows(self, n: int) -> Proposal:
        """Return the proposal of the first `n` rows; the rows past them must be padding."""
        if n == len(self.depths):
            return self
        mask, paths = (each[:n, :n].contiguous() for each in (self.tree_mask, self.paths))
        tree = first_rows(self.tree, n)
        return self._replace(tree=tree, tree_mask=mask, depths=self.depths[:n], paths=paths)
