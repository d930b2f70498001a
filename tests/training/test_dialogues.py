"""Conversations for training text: seeds, and which answers stay."""

from __future__ import annotations

import json

import pytest

from fasteagle.errors import FasteagleError
from fasteagle.training.dialogues import Conversations, Reply, read_seeds
from fasteagle.training.options import DataOptions
from helpers import write_questions


def test_seeds_may_hold_any_character(tmp_path):
    path = tmp_path / "seeds.jsonl"
    text = "one\u2028two\x85three"
    path.write_text(json.dumps({"instruction": text}, ensure_ascii=False) + "\n", "utf-8")
    assert read_seeds(path) == [text]
    for wrong in ("half \\ud800", " "):
        path.write_text(f'{{"instruction": "{wrong}", "input": "x"}}\n')
        with pytest.raises(FasteagleError, match="line 1: expected"):
            read_seeds(path)


def end_of(conversing, *replies):
    """The dialogue of a conversation that these replies end."""
    next(conversing)
    with pytest.raises(StopIteration) as ended:
        for reply in replies:
            conversing.send(reply)
    return ended.value.value


def test_a_few_seeds_are_shown_and_an_instruction_is_a_text(tmp_path):
    path = tmp_path / "seeds.jsonl"
    path.write_text("".join(json.dumps({"instruction": c * n}) + "\n" for c, n in SEEDS))
    conversations = Conversations(DataOptions(seeds=path, count=1, out=tmp_path / "t.jsonl"))
    conversing = conversations.start(0)
    asked = next(conversing)
    assert len(asked.messages) == 2 * 2 + 1, "two are short enough"
    answered = conversing.send(Reply([1], [2, 3, 4], "a task", False))
    assert answered.params.seed != asked.params.seed, "else both draw by the same noise"
    ended = end_of(conversations.start(0), Reply([1], [2, 3, 4], " \n", False))
    assert ended.dropped == "instruction without an end"
    options = (DataOptions(seeds=path, count=1, seed=n, out=tmp_path / "t") for n in range(5))
    orders = {str(next(Conversations(each).start(0)).messages) for each in options}
    assert len(orders) == 2, "another seed shows them in another order"
    before = conversations.identity()
    path.write_text('{"instruction": "other"}\n')
    changed = Conversations(DataOptions(seeds=path, count=1, out=tmp_path / "t.jsonl"))
    assert changed.identity() != before


SEEDS = ("a", 1), ("b", 300), ("c", 301)


def test_an_answer_that_quotes_a_benchmark_ends_the_conversation(tmp_path):
    benchmark = "How many trees did the gardener plant in the second week"
    exclude = write_questions(tmp_path / "bench.jsonl", [benchmark])
    prompts = write_questions(tmp_path / "prompts.jsonl", ["one", "two", "three"])
    options = DataOptions(prompts=prompts, exclude=(exclude,), out=tmp_path / "t.jsonl")
    for answers, reason in (
        (["fine", f"You ask: {benchmark}?"], "like an excluded prompt"),
        (["fine", "How many trees did the gardener plant again", "good"], None),
        (["fine", " "], "empty answer"),
    ):
        conversing, reply, seeds = Conversations(options).start(0), None, set()
        with pytest.raises(StopIteration) as ended:
            for text in [None, *answers]:
                reply = text and Reply([1], [2, 3, 4], text, False)
                seeds.add(conversing.send(reply).params.seed)
        assert len(seeds) == len(answers), "of each turn its own"
        dialogue = ended.value.value
        assert dialogue.dropped == reason
        assert [reply.text for reply, _ in dialogue.answers] == answers[: 3 if not reason else 1]


@pytest.mark.parametrize("drop_cut", [False, True])
def test_an_answer_that_repeats_itself_is_a_cut_one(tmp_path, drop_cut):
    prompts = write_questions(tmp_path / "prompts.jsonl", ["one"])
    options = DataOptions(prompts=prompts, drop_cut=drop_cut, out=tmp_path / "t.jsonl")
    reply = Reply([1], [*range(10), *[5] * 60], "text", False)
    dialogue = end_of(Conversations(options).start(0), reply)
    assert dialogue.dropped == "repetition" and len(dialogue.answers) == (not drop_cut)
