"""Texts with the tokens that they were generated as.

A model may write a word in other tokens than its tokenizer would. Generated text matches the KV
cache only by its own tokens, so a text that continues a known one keeps these tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fasteagle.loading.tokenizer import ChatTokenizer

KNOWN_TEXTS = 16


class Prompt(NamedTuple):
    """Conversation as the model reads it: rendered by its chat template, and its token ids."""

    text: str
    ids: list[int]


class KnownTexts:
    """Store of the last conversations of a model, for any thread."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        # The newest first. It is replaced, never changed, so that no lock is needed: the garbage
        # collector may close a stream in the middle of `encode`, and that calls `add`.
        self._known: tuple[tuple[str, list[int]], ...] = ()

    def encode(self, text: str) -> list[int]:
        """Return token ids of `text`; its longest known beginning keeps its tokens.

        A beginning that ends inside a special token is none: the tokenizer would not find it.
        """
        begins = [known for known in self._known if text.startswith(known[0])]
        for start, ids in sorted(begins, key=lambda known: len(known[0]), reverse=True):
            rest = self._tokenizer.encode_rest(text, len(start))
            if rest is not None:
                return ids + rest
        return self._tokenizer.encode(text)

    def add(self, text: str, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Store the `answer` that followed the `prompt` of `text`."""
        known = text + self._tokenizer.raw(answer), [*prompt, *answer]
        self._known = (known, *self._known)[:KNOWN_TEXTS]
