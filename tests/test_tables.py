"""Tables for people and in Markdown."""

from __future__ import annotations

from fasteagle.tables import print_table

HEADINGS = ("name", "GB")
ROWS = [("a", "1.5"), ("longer [name]", "22.0")]


def test_columns_are_aligned_and_never_cut(capsys):
    print_table(HEADINGS, ROWS, title="sizes", numeric=("GB",))
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    title, headings, *cells = lines
    assert (title, headings.split()) == ("sizes", ["name", "GB"])
    assert [line.split("  ")[0] for line in cells] == [name for name, _ in ROWS]
    assert len({len(line) for line in (headings, *cells)}) == 1, "numbers end in one column"
    print_table(("text",), [("x" * 400,)])
    assert "x" * 400 in capsys.readouterr().out


def test_markdown(capsys):
    print_table(HEADINGS, ROWS, md=True, numeric=("GB",))
    expected = "| name | GB |\n| --- | --- |\n| a | 1.5 |\n| longer [name] | 22.0 |\n"
    assert capsys.readouterr().out == expected
