"""Answers that begin with a thought: what is shown, what later turns keep, and the KV cache."""

from __future__ import annotations

import re
import shutil

import pytest

import fasteagle
from fasteagle.cli.session import ChatSession
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.generate import Engine
from fasteagle.llm import LLM
from fasteagle.loading.tokenizer import ChatTokenizer
from fasteagle.options import AnswerOptions, Defaults, GrammarSpec, SamplingParams
from fasteagle.shapes import TreeShape
from helpers import THINKING_TEMPLATE, TINY_VOCAB, Letters, random_head

DRAWN = SamplingParams(1.0, top_p=0.95, seed=3)


class Thinker(Letters):
    """Letters, two of which are the marks of a thought; its template drops earlier thoughts."""

    has_thinking_switch = knows_thoughts = True
    check_think = ChatTokenizer.check_think

    def __init__(self, marks: dict[int, str], opened: str = "") -> None:
        super().__init__(TINY_VOCAB)
        self.marks, self.opened = marks, opened

    def encode(self, text):
        ids = {mark: [i] for i, mark in self.marks.items()}
        parts = re.split("(</?think>)", text)
        return [i for part in parts for i in ids.get(part) or Letters.encode(self, part)]

    def decode(self, ids) -> str:
        return "".join(self.marks.get(i) or Letters.decode(self, [i]) for i in ids)

    raw = decode

    def render(self, turns, think=None) -> str:
        text = "".join(turn["content"].split("</think>")[-1] for turn in turns)
        return text + ("<think></think>" if think is False else self.opened)


def new_session(model, tokenizer, drafter=None):
    engine = Engine(model, 512)
    if drafter == "eagle":
        head = random_head(model, rope_scaling=None, rope_base=10000.0)
        engine.use(EagleDrafter(head, TreeShape(3, 3, 8)))
    session = ChatSession(LLM("thinker", engine, tokenizer), Defaults(DRAWN, AnswerOptions(12)))
    session.remarks = []
    session.notify = session.remarks.append
    return session


def answer(session, text):
    """The answer, each piece of its thought in brackets."""
    pieces = session.ask(text)
    return "".join(f"[{piece.text}]" if piece.is_thought else piece.text for piece in pieces)


def spelled(session, text):
    """A text as its tokens are written out."""
    return session.llm.tokenizer.raw(session.llm.tokenizer.encode(text))


def cached_text(session):
    """The conversation as the KV cache holds it: all but the last token."""
    return session.llm.tokenizer.raw(session.llm.engine.cached)


def thinker(model, opened=""):
    """A tokenizer with which the model's answer to "hello" begins with a thought of some tokens."""
    begin = 7
    prompt = Letters(TINY_VOCAB).encode("hello") + ([begin] if opened else [])
    ids = [i for chunk in Engine(model, 512).generate(prompt, DRAWN, 12) for i in chunk]
    if not opened:
        begin = ids[0]
    end = next(i for i in ids[3:-2] if i not in (begin, *ids[:3]))
    return Thinker({begin: "<think>", end: "</think>"}, opened)


@pytest.mark.parametrize("drafter", [None, "eagle"])
@pytest.mark.parametrize("opened", ["", "<think>"])
def test_later_turns_do_without_the_thought(model, drafter, opened):
    """They are answered as by an engine that never saw it, from a cache that ends before it."""
    tokenizer = thinker(model, opened)
    session = new_session(model, tokenizer, drafter)
    shown = answer(session, "hello")
    thought, rest = re.fullmatch(r"((?:\[.+?\])+)(.+)", shown).groups()
    assert thought.endswith("</think>]") and "[" not in rest
    content = opened + shown.replace("[", "").replace("]", "")
    assert session.turns[-1]["content"] == content and content.startswith("<think>")
    for question in ("and more", "third"):
        answer(session, question)
        assert spelled(session, "hello" + rest + "and more") in cached_text(session)
        assert session.stats.cached_tokens >= len("hello") - 1
        fresh = new_session(model, tokenizer)
        fresh.turns = session.turns[:-2]
        answer(fresh, question)
        assert fresh.turns == session.turns and cached_text(fresh) == cached_text(session)
        assert fresh.stats.cached_tokens == 0


@pytest.mark.parametrize("opened", ["", "<think>"])
def test_a_thought_without_an_end_is_not_taken_for_the_answer(model, opened):
    session = new_session(model, thinker(model, opened))
    session.answer = AnswerOptions(2)
    shown = answer(session, "hello").replace("[", "").replace("]", "")
    assert session.remarks == ["[2 tokens ended inside the thought: raise max-new-tokens]"]
    assert session.turns[-1]["content"] == f"{opened}{shown}\n</think>\n\n"
    session.answer = AnswerOptions(12)
    answer(session, "and more")
    assert cached_text(session).startswith(spelled(session, "hello\n\nand more"))


@pytest.fixture
def thinking_dir(tiny_dir, tmp_path):
    """A tiny model whose template opens a thought, or an empty one."""
    folder = shutil.copytree(tiny_dir, tmp_path / "thinking")
    (folder / "chat_template.jinja").write_text(THINKING_TEMPLATE)
    return folder


def test_a_form_leaves_no_room_for_a_thought(thinking_dir):
    """It was written inside the open one, so that the next prompt had an empty answer."""
    pytest.importorskip("llguidance")
    llm = fasteagle.load(str(thinking_dir), precision="fp32", drafter="none")
    form = GrammarSpec("regex", "yes|no")
    text = "<|user|>hello<|end|><|assistant|><think>\n\n</think>\n\n"
    answers = [llm.chat("hello", regex=form.text), *llm.chat_batch(["hello"], regex=form.text)]
    n_tokens = len(llm.tokenizer.encode(text))
    assert [one.stats.prompt_tokens for one in answers] == [n_tokens] * 2
    session = ChatSession(llm, Defaults(answer=AnswerOptions(12), form=form))
    shown = answer(session, "hello")
    assert shown in ("yes", "no") and session.turns[-1]["content"] == shown
    assert answer(session, "and more") in ("yes", "no")
    assert f"<|assistant|>{shown}<|end|><|user|>and more<|end|>" in cached_text(session)


def test_interrupting_a_thought_closes_it(model):
    session = new_session(model, thinker(model))
    pieces = session.ask("hello")
    assert next(pieces)[::2] == ("<think>", True)
    with pytest.raises(KeyboardInterrupt):
        pieces.throw(KeyboardInterrupt)
    assert session.turns[-1]["content"].startswith("<think>")
    assert session.turns[-1]["content"].endswith("</think>\n\n")
