"""Tokens to text while they arrive: whole UTF-8 characters, stop strings, where a thought ends."""

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
        keep = 0 if final else max((overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


THINK, END_THINK = "<think>", "</think>"


def opened_thought(prompt: str) -> str:
    """The end of `prompt` that begins a thought, as in DeepSeek-R1's template; else empty."""
    _, mark, after = prompt.rpartition(THINK)
    return mark + after if mark and not after.strip() else ""


class ThoughtSplitter:
    """Tells an answer's thought from the rest: `<think>` at the beginning, up to `</think>`.

    `opened` is what `opened_thought` found in the prompt. Text is held back while it may be the
    beginning of a mark.
    """

    def __init__(self, opened: str = "") -> None:
        self.inside = bool(opened)
        self._opened = opened
        self._may_begin = not opened  # only blanks came so far
        self._held = ""

    def push(self, text: str) -> list[tuple[str, bool]]:
        """The parts that `text` finishes, each with whether it belongs to the thought."""
        text, self._held = self._held + text, ""
        start = text.lstrip()
        if self._may_begin and start:
            if len(start) < len(THINK) and THINK.startswith(start):
                self._held = text
                return []
            self._may_begin, self.inside = False, start.startswith(THINK)
        if not self.inside:
            return _filled((text, False))
        thought, mark, rest = text.partition(END_THINK)
        if mark:
            self.inside = False
            return _filled((thought + mark, True), (rest, False))
        keep = overlap(text, END_THINK)
        self._held = text[len(text) - keep :]
        return _filled((text[: len(text) - keep], True))

    def finish(self) -> list[tuple[str, bool]]:
        """What was held back, now that nothing follows."""
        text, self._held = self._held, ""
        return _filled((text, self.inside))

    def closed(self, answer: str) -> str:
        """The whole `answer` with both marks round its thought, so that a template can drop it."""
        end = f"\n{END_THINK}\n\n" if self.inside else ""
        return self._opened + answer + end


def _filled(*parts: tuple[str, bool]) -> list[tuple[str, bool]]:
    return [part for part in parts if part[0]]


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
