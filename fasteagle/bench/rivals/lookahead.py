"""Lookahead decoding (Fu et al. 2024, arXiv 2402.02057), a rival, as a drafter of the one cycle.

Beside guesses a pass carries a window of the target's own tokens: `LEVELS` rows of `WINDOW` columns
of a fixed-point iteration, in which each row is what the target predicted from the one above. Read
from top to bottom a column is an n-gram that the target might write. These are collected by their
first token, and those that begin with the root are the guesses. The window is a branch of the tree
like any other: a row of column i sees its column above it, and the first level up to there.

Shapes: W columns, L levels, G guesses, V vocabulary.
"""

from __future__ import annotations

import copy
from typing import Self

import torch
from torch import Tensor

from fasteagle.decoding.cycle import drawn_tokens
from fasteagle.drafting.base import Drafter
from fasteagle.sampling import SamplingMode
from fasteagle.shapes import AnyShape, StaticShape
from fasteagle.state import Accept, CycleSpec, DecodeState
from fasteagle.tree import DraftTree, Proposal
from fasteagle.verify import Accepted, accept

WINDOW, LEVELS, GUESSES = 5, 3, 5
NONE = -1
# The deepest row of the window is its last column's on the last level.
LOOKAHEAD_SHAPE = StaticShape(WINDOW + LEVELS - 1, None, (WINDOW + GUESSES) * LEVELS)


class LookaheadDrafter(Drafter):
    """Drafter without weights: it drafts what the target predicted at other positions."""

    name = "lookahead"
    reads_features = False

    def __init__(self, vocab_size: int, device: torch.device | str) -> None:
        self.shape: AnyShape = LOOKAHEAD_SHAPE
        parents = []
        for guess in range(GUESSES):
            first = 1 + guess * LEVELS
            parents += [0, *range(first, first + LEVELS - 1)]
        window = 1 + GUESSES * LEVELS
        parents += [0, *range(window, window + WINDOW - 1)]
        parents += range(window, window + (LEVELS - 1) * WINDOW)
        self._parents = torch.tensor([0, *parents], device=device)

        def ints(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.long, device=device)

        self._window = ints(LEVELS, WINDOW)
        self._drawn = ints(self.shape.rows)  # by the target at every row of the last tree
        self._pool = ints(vocab_size, GUESSES, LEVELS) + NONE
        self._stored = ints(vocab_size)  # n-grams by first token, so far
        self._at = ints() + NONE  # where the last tree's root stood
        self._root = ints(1)

    @property
    def advanced(self) -> list[Tensor]:
        return [self._window, self._drawn, self._pool, self._stored, self._at, self._root]

    def apart(self) -> Self:
        return copy.deepcopy(self)

    def accept_for(self, kind: SamplingMode) -> Accept:
        return self._accept

    def _accept(
        self, state: DecodeState, spec: CycleSpec, proposal: Proposal, logits: Tensor
    ) -> Accepted:
        """Accept along the target's tokens, and remember those of all rows for the window."""
        drawn = drawn_tokens(state, spec, proposal, logits)
        self._drawn.copy_(drawn)
        return accept(drawn, proposal, spec.depth)

    def propose(self, prediction: None, state: DecodeState, spec: CycleSpec) -> DraftTree:
        """Collect the n-grams of the last pass, move the window on, and return guesses with it."""
        text, last = state.text, state.seq_len
        same = text.index_select(0, self._at.clamp(min=0).unsqueeze(0)) == self._root
        goes_on = same & (self._at >= 0) & (self._at < last)  # else the text is another one
        drawn = self._drawn[-WINDOW:]  # of the last level
        grams = torch.cat((self._window, drawn.unsqueeze(0))).T  # [W, L + 1]
        for column in range(WINDOW):
            self._store(grams[column], goes_on)
        # Column i of the next window is so many columns further, and its levels one up.
        back = torch.arange(WINDOW, device=text.device)
        column = (back + (last - self._at - 1).clamp(min=0)).clamp(max=WINDOW - 1)
        moved = grams.T[1:][:, column]
        fresh = text[(last - torch.arange(LEVELS * WINDOW, device=text.device)).clamp(min=0)]
        self._window.copy_(torch.where(goes_on, moved, fresh.view(LEVELS, WINDOW)))
        self._at.copy_(last)
        self._root.copy_(state.root)
        guesses = self._pool.index_select(0, state.root).flatten()  # [G * L]
        rows = torch.cat((state.root, guesses, self._window.flatten()))
        valid = rows != NONE
        return DraftTree(torch.where(valid, rows, 0), self._parents, valid)

    def _store(self, gram: Tensor, wanted: Tensor) -> None:
        """Put an n-gram [L + 1] in the place of the oldest with the same first token.

        It is not stored where it is there already, nor where one of its tokens is missing.
        """
        first, rest = gram[:1].clamp(min=0), gram[1:]
        there = self._pool.index_select(0, first)[0]  # [G, L]
        known = (there == rest).all(-1)
        stored = self._stored.index_select(0, first)
        new = wanted & ~known.any() & (gram >= 0).all()
        slot = stored % GUESSES
        previous = there.index_select(0, slot)
        self._pool.index_put_((first, slot), torch.where(new, rest, previous))
        self._stored.index_copy_(0, first, stored + new.long())
