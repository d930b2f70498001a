"""Streaming of tokens as text: whole UTF-8 characters, stop strings, the end of a thought."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

WRONG = "\ufffd"  # text of wrong bytes and of an unfinished character
MOST_BYTES = 4  # of a character
MOST_UNREAD = 16  # tokens that are held back; more are no unfinished character


class Decoder(Protocol):
    """Part of a tokenizer that streaming needs."""

    def decode(self, ids: Sequence[int]) -> str: ...


class TextStream:
    """Decoder of a stream: token ids in, final text out.

    Text is held back while it ends in an unfinished character or in the beginning of a stop
    string. Once a stop string is complete, `stopped` is true and the text ends before it.
    """

    def __init__(self, decoder: Decoder, stop: Iterable[str] = ()) -> None:
        self._decoder = decoder
        self._stop = tuple(stop)
        self._context: list[int] = []  # tokens in the text that still matter for decoding
        self._n_known = 0  # characters of their text
        self._unread: list[int] = []  # tokens that are not in the text yet
        self._held = ""
        self.stopped = False

    def push(self, ids: Iterable[int]) -> str:
        """Add tokens; return the text that they complete (may be empty)."""
        if self.stopped:
            return ""
        self._unread.extend(ids)
        n_unread = len(self._unread)
        for n in range(n_unread, max(0, n_unread - MOST_BYTES), -1):
            text = self._text(n)
            if not text.endswith(WRONG):  # else a character may be split: wait for the rest
                return self._read(n, text)
        if n_unread < MOST_UNREAD:
            return ""
        return self._read(n_unread, self._text(n_unread), rest=WRONG)

    def _text(self, n: int) -> str:
        return self._decoder.decode(self._context + self._unread[:n])

    def _read(self, n: int, text: str, rest: str = "", final: bool = False) -> str:
        """Count `n` tokens more as read: `text` is the whole, without `rest` at its end."""
        new = text.removesuffix(rest)[self._n_known :]
        self._context, self._unread = self._unread[:n], self._unread[n:]
        self._n_known = len(self._text(0).removesuffix(rest))
        return self._release(self._held + new, final)

    def finish(self) -> str:
        """Return the text that was held back, since no token follows."""
        if self.stopped:
            return ""
        n_unread = len(self._unread)
        return self._read(n_unread, self._text(n_unread), final=True)

    def _release(self, text: str, final: bool) -> str:
        places = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if places:
            self.stopped = True
            return text[: min(places)]
        keep = 0 if final else max((overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


THINK, END_THINK = "<think>", "</think>"


def opened_thought(prompt: str) -> str:
    """Return the end of `prompt` that begins a thought (DeepSeek-R1 has one), or an empty text."""
    _, mark, after = prompt.rpartition(THINK)
    return mark + after if mark and not after.strip() else ""


def without_open_thought(prompt: str) -> str:
    """Return `prompt` with the thought ended that it begins: a form leaves no room for one."""
    return f"{prompt}\n{END_THINK}\n\n" if opened_thought(prompt) else prompt


class ThoughtSplitter:
    """Splitter of an answer into its thought, from `<think>` to `</think>`, and the rest.

    The `prompt` may have begun the thought; else one `may_begin`. Text is held back while it may be
    the beginning of a mark.
    """

    def __init__(self, prompt: str = "", may_begin: bool = True) -> None:
        self._opened = opened_thought(prompt)
        self.inside = bool(self._opened)
        self._may_begin = may_begin and not self.inside  # only blanks so far
        self._held = ""

    def push(self, text: str) -> list[tuple[str, bool]]:
        """Add text; return the parts that it completes, each with whether it is of the thought."""
        text, self._held = self._held + text, ""
        start = text.lstrip()
        if self._may_begin:
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
        """Return the parts that were held back, since no text follows."""
        return _filled((self._held, self.inside))

    def closed(self, answer: str) -> str:
        """Return the whole `answer` with both marks of its thought, which templates may drop."""
        end = f"\n{END_THINK}\n\n" if self.inside else ""
        return self._opened + answer + end


def _filled(*parts: tuple[str, bool]) -> list[tuple[str, bool]]:
    return [part for part in parts if part[0]]


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a beginning of `stop`."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
