"""How likely the target agrees with a looked-up token: a table that learns while decoding.

A token that followed earlier places is judged by four things: how many tokens match before the
places, how many of the places agree in it, how deep it is, and whether the draft head proposes it
too. Each combination is a cell: tokens that were right, and tokens whose parent was right. What is
observed counts about the last `MEMORY` tokens of a cell. It starts from a prior.

All of it is tensor code of static shapes over tensors at fixed addresses.

Shapes: P places, R tokens read at each, L lookup levels, C cells, N slots of the text.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fasteagle.drafting.lookup import NOTHING, Matches

# Lower bounds of the classes behind the first one.
SIZES = (2, 3, 4, 6, 8)  # tokens that match
DEPTHS = (2, 3, 4, 6, 9)  # 1: the token after the root
MANY = 4  # places that agree
# How places agree in a token that follows where its parent did.
ONE_OF_SEVERAL, ONLY, SOME, ALL, ALL_OF_MANY = range(5)
# What the draft head says of a token.
UNASKED, OTHERS, SAME = range(3)

# The prior, by hand: the log-odds of a cell are the sum of its classes' terms. A match of one token
# says little, one of eight mostly means a quotation; places that contradict each other share the
# probability; whoever has copied several tokens goes on copying; a draft head that proposes other
# tokens is usually right, and one that proposes the same confirms it.
SIZE_TERMS = (-1.5, -0.4, 0.3, 0.9, 1.4, 2.0)
AGREEMENT_TERMS = (-1.6, 0.0, -0.5, 0.7, 1.2)
DEPTH_TERMS = (0.0, 0.4, 0.6, 0.8, 1.0, 1.2)
HEAD_TERMS = (0.0, -1.6, 1.0)
PRIOR_TOKENS = 8.0  # that the prior counts for
MEMORY = 128.0
RAREST = 1e-3  # no probability is below: what is never right may be right again
SHAPE = (len(SIZE_TERMS), len(AGREEMENT_TERMS), len(DEPTH_TERMS), len(HEAD_TERMS))


class Candidates(NamedTuple):
    """What the places propose, as paths of a tree: equal beginnings are one node.

    Of the places whose first l tokens are equal the first one `leads`, it has the longest match.
    """

    tokens: Tensor  # [P, R] target ids, NOTHING behind a place's end
    leads: Tensor  # [P, R] bool
    leaders: Tensor  # [P, R] the place that leads each
    sizes: Tensor  # [P, R] classes of SIZES
    agreement: Tensor  # [P, R] classes
    depths: Tensor  # [R] classes of DEPTHS


def candidates_of(matches: Matches) -> Candidates:
    """Merge equal beginnings, and count who agrees."""
    tokens = matches.tokens
    P, R = tokens.shape
    device = tokens.device
    valid = tokens != NOTHING
    equal = (tokens.unsqueeze(0) == tokens.unsqueeze(1)) & valid.unsqueeze(1)  # [P, P, R]
    same = equal.long().cumprod(-1)
    agreeing = same.sum(1)  # [P, R], itself included
    first = same.argmax(1)  # the lowest index among the largest
    place = torch.arange(P, device=device).unsqueeze(1)
    above = torch.cat((valid[:, :1].sum().expand(P, 1), agreeing[:, :-1]), dim=1)
    alone, split = agreeing == 1, agreeing < above
    among = torch.where(agreeing >= MANY, ALL_OF_MANY, ALL)
    together = torch.where(alone, ONLY, among)
    apart = torch.where(alone, ONE_OF_SEVERAL, SOME)
    sizes = _classes(matches.sizes, SIZES)
    depth = torch.arange(1, R + 1, device=device)
    return Candidates(
        tokens,
        valid & (first == place),
        first,
        sizes[first],
        torch.where(split, apart, together),
        _classes(depth, DEPTHS),
    )


def _classes(values: Tensor, bounds: tuple[int, ...]) -> Tensor:
    """How many of `bounds` each value reaches."""
    found = torch.zeros_like(values)
    for bound in bounds:
        found = found + (values >= bound)
    return found


def prior() -> Tensor:
    """Probabilities [C] before anything was observed."""
    odds = torch.zeros(SHAPE)
    for dim, terms in enumerate((SIZE_TERMS, AGREEMENT_TERMS, DEPTH_TERMS, HEAD_TERMS)):
        view = [1] * len(SHAPE)
        view[dim] = len(terms)
        odds = odds + torch.tensor(terms).view(view)
    return odds.sigmoid().flatten()


class AcceptanceTable:
    """Probabilities by cell, learned from the tokens that followed.

    What was proposed is kept until the text shows which of it was right: also what was not
    verified, for the tokens that took its place are known as well.
    """

    def __init__(self, places: int, reach: int, device: torch.device | str) -> None:
        def ints(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.long, device=device)

        self.tried = torch.full_like(prior(), PRIOR_TOKENS, device=device)  # [C]
        self.right = prior().to(device) * PRIOR_TOKENS  # [C]
        # Of the last proposal: its tokens and cells, and the root that it hung below.
        self._tokens, self._cells = ints(places, reach), ints(places, reach)
        self._leads = torch.zeros(places, reach, dtype=torch.bool, device=device)
        self._root, self._at = ints(1), ints()

    @property
    def tensors(self) -> list[Tensor]:
        """What a cycle changes."""
        last = [self._tokens, self._cells, self._leads, self._root, self._at]
        return [self.tried, self.right, *last]

    def cells(self, found: Candidates, head: Tensor) -> Tensor:
        """The cell of each candidate [P, R]; `head` [P, R] is what the draft head says of it."""
        _, agreements, depths, heads = SHAPE
        cells = (found.sizes * agreements + found.agreement) * depths + found.depths
        return cells * heads + head

    def log_probabilities(self, cells: Tensor) -> Tensor:
        """That a token is right where its parent is, for `cells` of any shape."""
        return (self.right / self.tried).clamp(RAREST, 1).log()[cells]

    def keep(self, found: Candidates, cells: Tensor, root: Tensor, at: Tensor) -> None:
        """Remember a proposal below `root` [1], which stands at slot `at` (0-d) of the text."""
        R = found.tokens.shape[1]
        self._leads.zero_()
        self._leads[:, :R] = found.leads
        self._tokens[:, :R] = found.tokens
        self._cells[:, :R] = cells
        self._root.copy_(root)
        self._at.copy_(at)

    def learn(self, text: Tensor, last: Tensor) -> None:
        """Count what the tokens of `text` [N] behind the last proposal say of it.

        The newest token is at `last` (0-d). Where the text was replaced meanwhile and another token
        stands in the root's place, nothing is counted.
        """
        R = self._tokens.shape[1]
        ahead = self._at + 1 + torch.arange(R, device=text.device)
        same_text = text.index_select(0, self._at.unsqueeze(0)) == self._root
        known = (ahead <= last) & same_text
        truth = torch.where(known, text[ahead.clamp(max=len(text) - 1)], NOTHING - 1)
        right = (self._tokens == truth).long().cumprod(1).bool()  # [P, R], all before it too
        begins = torch.ones_like(right[:, :1])
        tried = self._leads & known & torch.cat((begins, right[:, :-1]), dim=1)
        self._leads.zero_()  # each proposal counts once
        self._count(tried, tried & right)

    def _count(self, tried: Tensor, right: Tensor) -> None:
        cells = self._cells.flatten()
        self.tried.index_add_(0, cells, tried.flatten().to(self.tried.dtype))
        self.right.index_add_(0, cells, right.flatten().to(self.right.dtype))
        share = (MEMORY / self.tried).clamp(max=1)
        self.tried.mul_(share)
        self.right.mul_(share)
