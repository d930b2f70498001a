"""Questions about long documents, as the benchmarks ask them."""

from __future__ import annotations

import re

import long_prompts
from fasteagle.prompts import read_questions
from helpers import invoke


def test_the_argument_to_rename_is_no_self():
    code = "class A:\n    def f(self):\n        pass\n    def g(self, *, size=3): ..."
    assert long_prompts._argument(code) == "size" and long_prompts._argument("pass") == "x"


def test_three_kinds_in_turn(tiny_dir, tmp_path):
    out, again = tmp_path / "long.jsonl", tmp_path / "again.jsonl"
    for path in (out, again):
        args = ("--model", tiny_dir, "--tokens", 400, "--count", 7, "--out", path)
        done = invoke(*args, main=long_prompts.main)
        assert done.exit_code == 0, done.output
    assert re.search(r"7 questions of 4\d\d to 5\d\d tokens", done.stderr), done.stderr
    texts = [question[0] for question in read_questions(out)]
    assert len(set(texts)) == 7 and out.read_bytes() == again.read_bytes()
    for first in (0, 3, 6):
        assert texts[first].startswith("Summarize")
    for number in (1, 4):
        text, _, question = texts[number].rpartition("\n\n")
        words = question.split('contains "')[1].rsplit('"', 1)[0]
        assert words and words in " ".join(text.split())
    for number in (2, 5):
        name = texts[number].rsplit("called `", 1)[1].split("`")[0]
        assert name in texts[number].split("```")[1]
