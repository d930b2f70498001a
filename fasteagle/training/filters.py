"""Filters of training text: benchmark prompts, which must not be in it, and repetition."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from fasteagle.prompts import read_questions

GRAM = 8  # words, or tokens, in a row
CYCLE_TOKENS = 64  # longest text that counts as said over and over
REPEATED_TOKENS = 40  # so many in a row, and twice the cycle, all as one cycle before


class Excluded:
    """Turns of question files, with which a text must not share `GRAM` words in a row.

    Raises `FasteagleError` for other files.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        turns = (turn for path in paths for question in read_questions(path) for turn in question)
        self._grams = {gram for turn in turns for gram in _grams(turn)}

    def identity(self) -> str:
        """Return a digest of all that is excluded."""
        text = json.dumps(sorted(self._grams))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def matches(self, text: str) -> bool:
        return not self._grams.isdisjoint(_grams(text))


def _grams(text: str) -> set[tuple[str, ...]]:
    """Return the runs of `GRAM` words, without case and punctuation; all of a shorter text."""
    words = re.findall(r"\w+", text.lower())
    starts = range(max(1, len(words) - GRAM + 1)) if words else ()
    return {tuple(words[at : at + GRAM]) for at in starts}


def repetition(ids: Sequence[int]) -> int | None:
    """Return where a text begins to repeat a short one at least three times, else None."""
    starts = range(len(ids) - GRAM + 1)
    again = len(starts) - len({tuple(ids[at : at + GRAM]) for at in starts})
    if again <= REPEATED_TOKENS - GRAM:  # each of those in a repetition has been there before
        return None
    begins = (repeated_from(ids, end) for end in range(len(ids) + 1))
    return next((begin for begin in begins if begin is not None), None)


def ends_in_repetition(ids: Sequence[int]) -> bool:
    """Return whether a `repetition` reaches the end of the text; fast where none does."""
    return repeated_from(ids, len(ids)) is not None


def repeated_from(ids: Sequence[int], end: int) -> int | None:
    """Return the beginning of the repetition that reaches `end`, or None."""
    for cycle in range(1, min(CYCLE_TOKENS, end - 1) + 1):
        least = max(REPEATED_TOKENS, 2 * cycle)
        at = end
        while at > cycle and ids[at - 1] == ids[at - 1 - cycle] and end - at < least:
            at -= 1
        if end - at == least:
            return at
    return None
