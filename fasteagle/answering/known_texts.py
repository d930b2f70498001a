"""Texts with the tokens that they were generated as.

A model may write a word in other tokens than its tokenizer would. Generated text matches the KV
cache only by its own tokens, so a text that continues a known one keeps these tokens.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from fasteagle.loading.tokenizer import ChatTokenizer

KNOWN_TEXTS = 16


class KnownTexts:
    """Store of the last conversations of a model, for any thread."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: deque[tuple[str, list[int]]] = deque(maxlen=KNOWN_TEXTS)  # the newest first
        self._lock = threading.Lock()

    def encode(self, text: str) -> list[int]:
        """Return token ids of `text`; its longest known beginning keeps its tokens."""
        with self._lock:
            begins = [known for known in self._known if text.startswith(known[0])]
        if not begins:
            return self._tokenizer.encode(text)
        start, ids = max(begins, key=lambda known: len(known[0]))
        return ids + self._tokenizer.encode(text[len(start) :])

    def add(self, text: str, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Store the `answer` that followed the `prompt` of `text`."""
        with self._lock:
            self._known.appendleft((text + self._tokenizer.raw(answer), [*prompt, *answer]))
