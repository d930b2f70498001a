"""Show an answer on a terminal: print it as it comes, render it as Markdown at its end."""

from __future__ import annotations

import os
import re
import shutil
import sys
from typing import TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.markdown import Markdown

MARKS = re.compile(r"[*_`#|]|^\s*(?:[-+>]|\d+[.)]) ", re.MULTILINE)
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # but newline and tab
ESCAPE = "\x1b["


def harmless(text: str) -> str:
    """Return `text` without control characters: a model may write some, a terminal obeys them."""
    return CONTROL.sub("", text)


class AnswerScreen:
    """Screen for one answer: `write` its pieces, then `finish`.

    The printed text is erased and rendered where that is safe: on a terminal that can, for text
    without control characters that has not scrolled away. Styled text (a thought, tinted tokens)
    stays as it is, and only the text after it is rendered.
    """

    def __init__(self, out: TextIO | None = None, size: tuple[int, int] | None = None) -> None:
        self._out = out or sys.stdout
        self._width, self._height = size or shutil.get_terminal_size()
        self._column = 0
        self._forget()

    def write(self, piece: str) -> None:
        self._out.write(piece)
        self._out.flush()
        if ESCAPE in piece:
            piece = re.sub(r"\x1b\[[0-9;]*m", "", piece)
            self._advance(piece)
            self._forget()
        else:
            self._advance(piece)
            self._text += piece

    def finish(self) -> None:
        """End the line, and replace the plain text by its rendered form if it has marks."""
        text, rows = self._text, self._rows
        if self._began_at:  # in the middle of a line, which belongs to what stays
            if not text.startswith("\n"):
                rows = -1
            text, rows = text[1:], rows - 1
        fits = 0 <= rows < self._height - 1
        if not fits or CONTROL.search(text) or not MARKS.search(text):
            self._out.write("\n")
        else:
            up = f"{ESCAPE}{rows}A" if rows else ""
            self._out.write(f"\r{up}{ESCAPE}J")
            console = Console(file=self._out, width=self._width, force_terminal=True)
            console.print(Markdown(text.strip("\n"), hyperlinks=False))
        self._out.flush()

    def _forget(self) -> None:
        """Forget the text so far and begin a new one at the cursor."""
        self._text, self._rows, self._began_at = "", 0, self._column

    def _advance(self, text: str) -> None:
        """Move the tracked cursor to its position on the terminal after `text`."""
        for character in text:
            if character == "\n":
                self._rows, self._column = self._rows + 1, 0
                continue
            width = 8 - self._column % 8 if character == "\t" else cell_len(character)
            if self._column + width > self._width:
                self._rows, self._column = self._rows + 1, 0
            self._column += width


class PlainScreen:
    """Screen for one answer that prints its pieces without rendering."""

    def write(self, piece: str) -> None:
        print(piece, end="", flush=True)

    def finish(self) -> None:
        print()


def screen(plain: bool) -> AnswerScreen | PlainScreen:
    """Return a screen for the next answer on standard output."""
    can_render = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    return AnswerScreen() if can_render and not plain else PlainScreen()
