"""Show an answer: style its pieces, print it as it comes, render its Markdown at its end."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import sys

import click
from markdown_it import MarkdownIt
from rich.cells import cell_len
from rich.console import Console
from rich.markdown import Markdown

from fasteagle.cli.session import Piece

MARKS = re.compile(r"[*_`#|]|~~|^\s*(?:[-+>]|\d+[.)]) ", re.MULTILINE)
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # but newline and tab
ESCAPE = "\x1b["


def rendered(text: str) -> Markdown:
    """Return Markdown for a terminal, in which tags of HTML are text; rich would drop them."""
    markdown = Markdown("", hyperlinks=False)
    parser = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
    markdown.parsed = parser.parse(text)
    return markdown


@dataclasses.dataclass
class Style:
    """Appearance of an answer's pieces: `tints` what was guessed right, `dims_thoughts`.

    A terminal obeys control characters, and a model may write some: they are left out there.
    """

    on_terminal: bool
    tints: bool
    dims_thoughts: bool

    def text_of(self, piece: Piece) -> str:
        """Return the text to show; a colour ends with its line, and begins again on the next."""
        text = CONTROL.sub("", piece.text) if self.on_terminal else piece.text
        if self.tints and piece.is_guess:
            lines = (click.style(line, fg="green") if line else "" for line in text.split("\n"))
            text = "\n".join(lines)
        return click.style(text, dim=True) if self.dims_thoughts and piece.is_thought else text


class AnswerScreen:
    """Screen for one answer: `write` its pieces, then `finish`.

    Unless `plain`, the printed text is erased and rendered where that is safe: on a terminal that
    can, for text without control characters that has not scrolled away. Styled text (a thought,
    tinted tokens) stays as it is, and only the text after it is rendered.
    """

    def __init__(self, plain: bool) -> None:
        self._out = sys.stdout
        can_render = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._renders = can_render and not plain
        self._width, self._height = shutil.get_terminal_size()
        self._column = 0
        self._forget()

    def write(self, piece: str) -> None:
        self._out.write(piece)
        self._out.flush()
        if not self._renders:
            return
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
        may_erase = self._renders and 0 <= rows < self._height - 1
        if not may_erase or CONTROL.search(text) or not MARKS.search(text):
            self._out.write("\n")
        else:
            up = f"{ESCAPE}{rows}A" if rows else ""
            self._out.write(f"\r{up}{ESCAPE}J")
            console = Console(file=self._out, width=self._width, force_terminal=True)
            console.print(rendered(text.strip("\n")))
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
