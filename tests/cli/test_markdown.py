"""Rendered answers: what stands on a terminal of a given size after one."""

from __future__ import annotations

import io
import re

import pytest

from fasteagle.cli.markdown import AnswerScreen, Style
from fasteagle.cli.session import Piece


class Screen:
    """A terminal as far as these tests need it: lines, cursor up, erase, colours ignored."""

    def __init__(self, width: int) -> None:
        self.width, self.lines, self.row, self.column = width, [""], 0, 0

    def feed(self, text: str) -> None:
        text = re.sub(r"\x1b\[[0-9;]*m", "", text)
        for part in re.findall(r"\x1b\[\d*[AJ]|[\r\n]|[^\x1b]", text):
            if part == "\n":
                self.row, self.column = self.row + 1, 0
                self.lines += [""] * (self.row + 1 - len(self.lines))
            elif part == "\r":
                self.column = 0
            elif part.endswith("A") and part[0] == "\x1b":
                self.row -= int(part[2:-1])
            elif part == "\x1b[J":
                self.lines[self.row] = self.lines[self.row][: self.column]
                del self.lines[self.row + 1 :]
            else:
                if self.column == self.width:
                    self.feed("\n")
                line = self.lines[self.row].ljust(self.column)
                self.lines[self.row] = line[: self.column] + part + line[self.column + 1 :]
                self.column += 1

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.lines).rstrip("\n")


class Output(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(*pieces, size=(40, 20), before=">>> hi\n", plain=False, term="xterm"):
    """The screen after an answer, and what was sent to it."""
    with pytest.MonkeyPatch.context() as patch:
        out = Output()
        patch.setattr("sys.stdout", out)
        patch.setattr("shutil.get_terminal_size", lambda: size)
        patch.setenv("TERM", term)
        answer = AnswerScreen(plain)
    for piece in pieces:
        answer.write(piece)
    answer.finish()
    terminal = Screen(size[0])
    terminal.feed(before + out.getvalue())
    assert terminal.lines[-1] == "" and terminal.column == 0  # the next prompt has its own line
    return terminal.text, out.getvalue()


def test_marks_become_what_they_mean():
    text, raw = shown("# Ti", "tle\n\nsome **bo", "ld** and `code`\n\n- one\n- two")
    assert text.startswith(">>> hi\n") and "**" not in text and "`" not in text and "#" not in text
    assert "Title" in text and "some bold and code" in text and "• one" in text
    assert raw.startswith("# Title\n\nsome **bold**")  # it was seen while it came
    assert shown("some ~~gone~~")[0].endswith("some gone")


def test_nothing_before_the_answer_is_erased():
    for length in (1, 38, 39, 40, 41, 77, 79, 80, 81, 117, 200):
        for end in ("", "\n", "\n\n"):
            text, _ = shown("x" * (length - 1) + " *y*" + end, before="one\ntwo\n>>> hi\n")
            lines = text.split("\n")
            assert lines[:3] == ["one", "two", ">>> hi"], length
            assert "*" not in text and text.replace("\n", "").count("x") == length - 1


@pytest.mark.parametrize("n", [1, 7, 8, 9, 16, 31, 32, 33, 39])
def test_tabs_go_to_the_next_eighth_column(n):
    answer = AnswerScreen(plain=True)
    answer._width = 40
    answer._advance("x" * n + "\t")
    column = (n // 8 + 1) * 8
    assert (answer._rows, answer._column) == (0, column)


@pytest.mark.parametrize(
    "pieces",
    [
        ("no marks at all",),
        ("*a*\n" * 30,),  # has scrolled away
        ("*a* \x07 bell",),
        ("*a* \x1b]0;title\x07",),
    ],
)
def test_what_stays_as_it_came(pieces):
    _, raw = shown(*pieces)
    assert raw == "".join(pieces) + "\n"


def test_characters_of_two_columns_fill_a_line_sooner():
    _, raw = shown("**" + "\u6f22" * 25 + "**")  # 54 columns
    assert "\x1b[1A" in raw, "of two lines"


def test_a_thought_stays_and_the_rest_is_rendered():
    text, raw = shown("\x1b[2m<think>*hm*</think>\x1b[0m", "\n\nso **it** is")
    assert "<think>*hm*</think>" in text and "so it is" in text and "**" not in text
    text, raw = shown("\x1b[2m*hm*\x1b[0m", " in **one** line")
    assert text.endswith("*hm* in **one** line") and "\x1b[J" not in raw


def tinted(text):
    return Style(True, tints=True, dims_thoughts=True).text_of(Piece(text, True, False))


def test_tinted_text_keeps_its_lines():
    assert tinted("a\nb") == "\x1b[32ma\x1b[0m\n\x1b[32mb\x1b[0m" and tinted("\n") == "\n"
    text, raw = shown("*one* ", tinted("two *three*"))
    assert text.endswith("*one* two *three*") and "\x1b[J" not in raw


def test_only_terminals_that_can_render(capsys):
    answer = "some **bold**"
    assert shown(answer)[1] != answer + "\n"
    assert shown(answer, plain=True)[1] == shown(answer, term="dumb")[1] == answer + "\n"
    screen = AnswerScreen(plain=False)  # standard output is captured here: no terminal
    screen.write(answer)
    screen.finish()
    assert capsys.readouterr().out == answer + "\n"


@pytest.mark.parametrize("on_terminal", [False, True])
def test_what_a_terminal_would_obey_is_not_shown_there(on_terminal):
    raw = "a\x1b[2J\x1b]0;title\x07b\x9b31m\tc\r\nd\x00\x7f"
    style = Style(on_terminal, tints=False, dims_thoughts=False)
    shown = style.text_of(Piece(raw, is_guess=True, is_thought=True))
    assert shown == ("a[2J]0;titleb31m\tc\nd" if on_terminal else raw)


def test_wide_characters_take_two_columns():
    text, _ = shown("東京" * 15 + " *a*\n*b*", size=(40, 20), before="one\n>>> hi\n")
    # The test's terminal counts one column each, so fewer rows than were erased: nothing is left.
    assert "*" not in text


def test_tags_are_text():
    text = "Use <br> and Vec<String>: **not** <hr>.\n\n<div>hello</div>\n\n<details>x</details>"
    screen, sent = shown(text, size=(60, 20))
    assert "\x1b[J" in sent  # it was rendered
    for part in ("Use <br> and Vec<String>: not <hr>.", "<div>hello</div>", "<details>x</details>"):
        assert part in screen
