"""Tokens to text while they arrive: whole UTF-8 characters, and stop strings across tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol


class Decoder(Protocol):
    """The part of a tokenizer that streaming needs."""

    def decode(self, ids: Sequence[int]) -> str: ...


class TextStream:
    """Feed token ids, take text that will not change any more.

    Text is held back while it ends in an unfinished character or in the beginning of a stop
    string. Once a stop string is complete, `stopped` is true and nothing from it on is given out.
    """

    def __init__(self, decoder: Decoder, stop: Iterable[str] = ()) -> None:
        self._decoder = decoder
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._context = 0  # tokens before this one no longer matter for decoding
        self._read = 0  # tokens before this one are in the text already
        self._held = ""
        self.stopped = False

    def push(self, ids: Iterable[int]) -> str:
        """Add tokens; the text they finish (may be empty)."""
        ids = list(ids)
        if self.stopped or not ids:  # decoding nothing would forget what stood before
            return ""
        self._ids.extend(ids)
        before = self._decoder.decode(self._ids[self._context : self._read])
        after = self._decoder.decode(self._ids[self._context :])
        if after.endswith("\ufffd"):
            return ""  # a character is split between tokens: wait for the rest
        self._context, self._read = self._read, len(self._ids)
        return self._release(self._held + after[len(before) :], final=False)

    def finish(self) -> str:
        """What was held back, now that nothing follows."""
        if self.stopped:
            return ""
        before = self._decoder.decode(self._ids[self._context : self._read])
        after = self._decoder.decode(self._ids[self._context :])
        self._context = self._read = len(self._ids)
        return self._release(self._held + after[len(before) :], final=True)

    def _release(self, text: str, final: bool) -> str:
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = 0 if final else max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
