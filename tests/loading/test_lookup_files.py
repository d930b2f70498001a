"""Files for the lookup: what is read of them, what is refused in one line, how much is used."""

from __future__ import annotations

import pytest

from fasteagle.errors import FasteagleError
from fasteagle.loading import lookup_files
from fasteagle.loading.lookup_files import read_documents


def silent(line):
    pytest.fail(f"said {line}")


def test_each_file_is_a_document(tmp_path, tokenizer):
    a, b = tmp_path / "a.py", tmp_path / "b.txt"
    a.write_text("def f():\n    return 'é'\n")
    b.write_bytes(b"\xef\xbb\xbfsome text")  # with a byte order mark
    documents = read_documents([a, b], tokenizer, silent)
    texts = ["def f():\n    return 'é'\n", "some text"]
    assert [tokenizer.decode(ids) for ids in documents] == texts
    assert read_documents([], tokenizer, silent) == []


def test_pieces_are_whole_lines(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(lookup_files, "PIECE", 10)
    text = "one\ntwo three\n" + "long" * 9 + "\nend"
    (tmp_path / "a").write_text(text)
    pieces = list(lookup_files._pieces(text))
    assert "".join(pieces) == text and pieces[0] == "one\n" and max(map(len, pieces)) == 10
    (ids,) = read_documents([tmp_path / "a"], tokenizer, silent)
    assert tokenizer.decode(ids) == text


def test_a_huge_file_is_used_in_part_and_that_is_said(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(lookup_files, "MAX_BYTES", 1001)
    huge, later = tmp_path / "huge.txt", tmp_path / "later.txt"
    huge.write_text("é" * (1 << 20))
    later.write_text("more")
    lines = []
    documents = read_documents([huge, later], tokenizer, lines.append)
    first, second = documents
    assert tokenizer.decode(first) == "é" * 500 and second == []  # half an é is left out
    assert len(lines) == 2
    assert f"{huge}: only the first 0.0 of 2.0 MiB are used" in lines[0] and "later" in lines[1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b" \n\t ", "is empty: leave it out"),
        (b"text\0more", "is no text \\(byte 0x00\\): give text or code"),
        (b"\x7fELF\x02\x01", None),
        (b"caf\xe9 au lait", "cannot read .*: it is not UTF-8"),
        (b"caf\xc3", "cannot read .*: it is not UTF-8"),
    ],
)
def test_what_is_no_text_costs_one_line(tmp_path, tokenizer, content, message):
    path = tmp_path / "file"
    path.write_bytes(content)
    if message is None:  # control characters are text, if not a pretty one
        assert read_documents([path], tokenizer, silent) != [[]]
        return
    with pytest.raises(FasteagleError, match=message) as raised:
        read_documents([path], tokenizer, silent)
    assert str(path) in str(raised.value) and "\n" not in str(raised.value)


def test_what_is_not_there(tmp_path, tokenizer):
    with pytest.raises(FasteagleError, match="nowhere.txt: No such file"):
        read_documents([tmp_path / "nowhere.txt"], tokenizer, silent)
    with pytest.raises(FasteagleError, match="Is a directory"):
        read_documents([tmp_path], tokenizer, silent)


# On the command line


def test_an_answer_with_files_is_the_same(chat, tmp_path):
    base = ("--precision", "fp32", "--max-new-tokens", 30, "--seed", 5)
    expected = chat(*base, "--no-spec").stdout
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for file in files:
        file.write_text("hello " + expected)
    result = chat(*base, "--lookup", files[0], "--lookup", files[1])
    assert result.exit_code == 0 and result.stdout == expected, result.stderr
    assert "tokens of files, 0.0 MB" in result.stderr
