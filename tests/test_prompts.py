"""Files of questions and of conversations: what is read, and what is refused with its line."""

from __future__ import annotations

import pytest

from fasteagle import prompts
from fasteagle.errors import FasteagleError
from fasteagle.prompts import Conversation, read_conversations, read_questions

# What line 2 is, after one that is right, and what its error says.
BAD_QUESTIONS = [
    ("{", "Expecting"),
    ("[" * 100_000, "nested too deeply"),
    ("5", "it is no JSON object"),
    ("[]", "it is no JSON object"),
    ("{}", "'turns' is missing"),
    ('{"turns": []}', "turns must be a list of texts"),
    ('{"turns": "one"}', "turns must be a list of texts"),
    ('{"turns": [1]}', "each turn must be a text"),
    ('{"turns": ["one", " "]}', "each turn must be a text that is not empty"),
    (r'{"turns": ["\ud83d"]}', "surrogates not allowed"),
]
BAD_CONVERSATIONS = [
    ("{", "Expecting"),
    ('{"ids": [1]}', "'prompt_len' is missing"),
    ('{"ids": {}, "prompt_len": 1}', "ids must be a list of integers"),
    ('{"ids": "abc", "prompt_len": 1}', "ids must be a list of integers"),
    ('{"ids": [1, 2.0], "prompt_len": 1}', "ids must be a list of integers"),
    ('{"ids": [1, true], "prompt_len": 1}', "ids must be a list of integers"),
    ('{"ids": [1, 2], "prompt_len": 0}', "prompt_len must be an integer >= 1"),
    ('{"ids": [1, 2], "prompt_len": "1"}', "prompt_len must be an integer >= 1"),
    ('{"ids": [1, 2], "prompt_len": 1e30}', "prompt_len must be an integer >= 1"),
    ('{"ids": [1, 300], "prompt_len": 1}', "id 300 is outside the vocabulary of 300: use ids of"),
    ('{"ids": [1, -1], "prompt_len": 1}', "token id -1 is outside the vocabulary of 300"),
]


@pytest.mark.parametrize(("line", "message"), BAD_QUESTIONS)
def test_bad_questions(tmp_path, line, message):
    path = tmp_path / "q.jsonl"
    path.write_text('{"turns": ["one"]}\n' + line + "\n")
    with pytest.raises(FasteagleError) as caught:
        read_questions(path)
    assert str(caught.value).startswith(f"{path}, line 2: ") and message in str(caught.value)


@pytest.mark.parametrize(("line", "message"), BAD_CONVERSATIONS)
def test_bad_conversations(tmp_path, line, message):
    path = tmp_path / "c.jsonl"
    path.write_text('{"ids": [1, 2, 3, 4, 5], "prompt_len": 1}\n' + line + "\n")
    with pytest.raises(FasteagleError) as caught:
        read_conversations(path, 300, 512)
    assert str(caught.value).startswith(f"{path}, line 2: ") and message in str(caught.value)


def test_the_shortest_answer_that_is_read(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_text('{"ids": [1, 2, 3], "prompt_len": 1}\n{"ids": [1, 2, 3, 4], "prompt_len": 1}')
    assert read_conversations(path, 300, 512) == [Conversation([1, 2, 3, 4], 1)]


def test_an_answer_is_greedy_at_temperature_0_alone(tmp_path):
    path = tmp_path / "c.jsonl"
    temperatures = ("", ', "T": 0', ', "T": 0.7')
    lines = (f'{{"ids": [1, 2, 3, 4], "prompt_len": 1{t}}}\n' for t in temperatures)
    path.write_text("".join(lines))
    assert [c.greedy for c in read_conversations(path, 300, 512)] == [False, True, False]


def test_a_line_without_an_end(tmp_path, monkeypatch):
    monkeypatch.setattr(prompts, "MOST_TEXT", 1 << 20)
    (path := tmp_path / "q.jsonl").write_text('{"turns": ["one"]}\n' + "[" * (1 << 20))
    with pytest.raises(FasteagleError, match="cannot read .*: line 2 has more than 1 MiB"):
        read_questions(path)


def test_lines_beyond_the_limit_are_not_read(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_text('{"ids": [1, 2, 3, 4], "prompt_len": 1}\n' * 2 + "{")
    assert len(read_conversations(path, 300, 512, 2)) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"turns": ["\xff"]}', "cannot read .*: it is not UTF-8"),
        (b"\n \n", "no questions in it|no conversation with an answer"),
    ],
)
def test_files_without_a_line_to_read(tmp_path, content, message):
    path = tmp_path / "lines.jsonl"
    path.write_bytes(content)
    for read in (lambda: read_questions(path), lambda: read_conversations(path, 300, 512)):
        with pytest.raises(FasteagleError, match=message):
            read()


def test_a_mark_of_the_byte_order(tmp_path):
    """Editors of Windows write one."""
    path = tmp_path / "q.jsonl"
    path.write_text('{"turns": ["hi"]}\n', "utf-8-sig")
    assert read_questions(path) == [("hi",)]


def test_line_separators_inside_of_a_text(tmp_path):
    """JSON may hold U+2028 as it is; a line ends only at a line feed."""
    path = tmp_path / "q.jsonl"
    path.write_text('{"turns": ["a\u2028b"]}\r\n\n{"turns": ["c"]}', encoding="utf-8")
    assert read_questions(path) == [("a\u2028b",), ("c",)]
