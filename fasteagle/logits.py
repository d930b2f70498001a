"""Processors of the target's logits, which change them before tokens are drawn.

A row of the tree is processed as plain decoding would process the text that the row stands for, so
that the tokens with and without speculation are equal.

Shapes: T tree rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from fasteagle.tree import DraftTree


class LogitsProcessor(Protocol):
    """Processor of the logits of every pass; row 0 of the tree is the last token of the text."""

    def __call__(self, logits: Tensor, tree: DraftTree) -> Tensor:
        """Return the logits [T, V] to sample from; may change the given ones in place."""

    def accept(self, tokens: Sequence[int]) -> None:
        """Observe the committed tokens of the last pass, in the order of the text."""
