"""Text that is not kept."""

from __future__ import annotations

import random

import pytest

from fasteagle.errors import FasteagleError
from fasteagle.training.filters import Excluded, ends_in_repetition, repeated_from, repetition
from helpers import write_questions

ONE = "Compose an engaging travel blog post about a recent trip to Hawaii"


@pytest.mark.parametrize(
    ("text", "is_like"),
    [
        (ONE, True),
        ("please COMPOSE an engaging, travel blog: post about a (long) trip", True),  # 8 words
        ("compose an engaging travel blog post about the recent trip", False),  # 7 words
        ("so: compose an engaging travel blog post about a", True),  # the last 8 of the text
        ("travel blog post about a recent trip to Hawaii", True),  # the last 8 of the prompt
        ("blog post about a recent trip to Hawaii with you", True),
        ("post about a recent trip to Hawaii with you and me", False),
        ("why not?", True),  # all of a short prompt
        ("so why not?", False),
        ("", False),
        ("?!", False),
    ],
)
def test_eight_words_in_a_row_are_too_many(tmp_path, text, is_like):
    prompts = write_questions(tmp_path / "prompts.jsonl", [ONE, "Why not?", "..."])
    assert Excluded([prompts]).matches(text) is is_like


def test_every_turn_of_every_file_is_excluded(tmp_path):
    files = [
        write_questions(tmp_path / "a.jsonl", ["first", ONE]),
        write_questions(tmp_path / "b.jsonl", ["second"]),
    ]
    excluded = Excluded(files)
    assert all(excluded.matches(text) for text in ("first", "second", ONE))
    assert excluded.identity() != Excluded(files[:1]).identity()
    assert not Excluded(()).matches(ONE)
    with pytest.raises(FasteagleError, match="cannot read"):
        Excluded([tmp_path / "none.jsonl"])


@pytest.mark.parametrize(
    ("ids", "said_again", "at_the_end"),
    [
        ([5] * 41, 1, True),
        ([5] * 40, None, False),
        ([1, 2, 3] + list(range(10, 30)) * 3 + [1, 2], 23, False),
        ([1, 2, 3] + list(range(10, 30)) * 4, 23, True),
        (list(range(20)) * 2, None, False),
        (list(range(64)) * 3, 64, True),
        (list(range(60)) * 2 + list(range(59)), None, False),
        (list(range(65)) * 4, None, False),
        ([t for n in range(50) for t in (7, 8, n)], None, False),
        ([], None, False),
    ],
)
def test_a_text_said_three_times_is_a_repetition(ids, said_again, at_the_end):
    assert repetition(ids) == said_again
    assert ends_in_repetition(ids) is at_the_end


def test_a_repetition_is_found_whatever_is_around_it():
    """`repetition` looks closer only where texts of eight tokens recur often enough."""
    draw = random.Random(0)
    n_whole = 0
    for _ in range(300):
        cycle = draw.choices(range(10), k=draw.randint(1, 70))
        said = (cycle * 170)[: draw.randint(0, 170)]
        before, after = (draw.choices(range(30), k=draw.randint(0, 60)) for _ in range(2))
        ids = [*before, *said, *after]
        begins = (repeated_from(ids, end) for end in range(len(ids) + 1))
        wanted = next((begin for begin in begins if begin is not None), None)
        assert repetition(ids) == wanted
        n_whole += wanted is not None
    assert 50 < n_whole < 250
