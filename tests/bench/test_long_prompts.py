"""Questions about long documents, as the benchmarks ask them."""

from __future__ import annotations

import long_prompts
from fasteagle.prompts import read_questions
from helpers import invoke


def test_three_kinds_in_turn(tiny_dir, tmp_path):
    out, again = tmp_path / "long.jsonl", tmp_path / "again.jsonl"
    for path in (out, again):
        args = ("--model", tiny_dir, "--tokens", 400, "--count", 7, "--out", path)
        done = invoke(*args, main=long_prompts.main)
        assert done.exit_code == 0, done.output
    texts = [question.turns[0] for question in read_questions(out, None)]
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
