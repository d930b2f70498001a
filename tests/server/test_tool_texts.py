"""Calls of tools and thoughts read from the text of an answer, whole or as it comes."""

from __future__ import annotations

import json
import time

import pytest
from live_server import CALL

from fasteagle.answering.answer import Chunk
from fasteagle.answering.answer_logits import AnswerRequest
from fasteagle.options import AnswerOptions, SamplingParams
from fasteagle.server.prepare import Plan
from fasteagle.server.replies import AnswerText
from fasteagle.server.tools import HERMES, LLAMA3, Call, before_cut_call, parse_calls

BARE = '{"name": "weather", "parameters": {"city": "Rome"}}'
ROME = ("weather", {"city": "Rome"})
NOTHING = '{"name": "f", "parameters": {}}'
MARK = "x </tool_call> y"
ANNA = '<tool_call>{"name": "Anna"}</tool_call>'


def read(text, step=1000, form=None, is_cut=False, opened="", most_calls=None, may_think=False):
    """Read an answer that comes in steps: what is shown before its end, all of it, and the rest."""
    request = AnswerRequest([1], SamplingParams(), AnswerOptions(), frozenset())
    names = frozenset({"weather"})
    tools = dict(tools=form, tool_names=names, most_calls=most_calls)
    plan = Plan([request], text=opened, may_think=may_think, **tools)
    answer = AnswerText(plan)
    pieces = [answer.push(Chunk(text[i : i + step])) for i in range(0, len(text), step)]
    shown = "".join(piece.content for piece in pieces)
    pieces.append(answer.finish(is_cut))
    return shown, "".join(p.content for p in pieces), "".join(p.reasoning for p in pieces), answer


@pytest.mark.parametrize(
    ("text", "form", "left", "calls"),
    [
        (CALL, HERMES, "", [ROME]),
        ("Let me see. " + CALL, HERMES, "Let me see.", [ROME]),
        (CALL + "\n" + CALL, HERMES, "", [ROME] * 2),
        ('<tool_call>{"name": "f"}</tool_call>', HERMES, "", [("f", {})]),
        ("<tool_call>{broken}</tool_call>", HERMES, None, []),
        ('<tool_call>{"name": "f", "arguments": 3}</tool_call>', HERMES, None, []),
        ('<tool_call>{"name": "f"', HERMES, None, []),
        ("no call", HERMES, None, []),
        (CALL.replace("Rome", MARK) + " z", HERMES, "z", [("weather", {"city": MARK})]),
        (CALL + ANNA + CALL, HERMES, ANNA, [ROME] * 2),
        (CALL.replace('"Rome"', r'"\ud83d"'), HERMES, "", [("weather", {"city": "?"})]),
        (CALL.replace('"Rome"', "NaN"), HERMES, None, []),
        ('{"name": "f", "parameters": {"a": 1}}', LLAMA3, "", [("f", {"a": 1})]),
        (f"{NOTHING}; {NOTHING.replace('f', 'g')}", LLAMA3, "", [("f", {}), ("g", {})]),
        (f" \n{BARE}\n", LLAMA3, "", [ROME]),
        (f"{BARE}\n{BARE}", LLAMA3, "", [ROME] * 2),
        (f"{NOTHING} and more", LLAMA3, None, []),
        ('{"name": "f"}', LLAMA3, None, []),
        ('{"name": "Anna", "parameters": {}}', LLAMA3, None, []),
        ('{"name": [], "parameters": {}}', LLAMA3, None, []),
        ("[" * 100_000, LLAMA3, None, []),
        (ANNA, HERMES, None, []),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", HERMES, None, []),
        ("</tool_call> " + CALL, HERMES, "</tool_call>", [ROME]),
        ("say <tool_call> like " + CALL, HERMES, "say <tool_call> like", [ROME]),
        ('{"city": "Rome"}', LLAMA3, None, []),
    ],
)
def test_reading_calls_back(text, form, left, calls):
    rest, parsed = parse_calls(text, form, ("weather", "f", "g"))
    assert rest == (text if left is None else left)
    assert [(call.name, json.loads(call.arguments)) for call in parsed] == calls


@pytest.mark.parametrize("step", [1, 3, 7, 1000])
@pytest.mark.parametrize("form", [HERMES, LLAMA3], ids=["hermes", "llama3"])
def test_a_stream_shows_text_and_never_a_part_of_a_call(form, step):
    call = CALL if form is HERMES else BARE
    texts = ["plain < text", call, "[{"] + (["a <b> " + call] if form is HERMES else [])
    for text in texts:
        shown, content, _, answer = read(text, step, form)
        if call in text:
            assert answer.calls == [Call("weather", '{"city": "Rome"}')]
            assert "tool_call" not in content and "{" not in shown + content
            assert content.strip() == text.replace(call, "").strip()
        else:
            assert content == text and not answer.calls


@pytest.mark.parametrize("step", [1, 3, 5, 7, 1000])
def test_an_answer_that_begins_with_text_is_no_call_without_marks(step):
    """However it is cut into pieces; and what `max_tokens` cuts of it stays."""
    for text in (f"Sure: {BARE}", 'JSON is\n{"name": "Bob", "age'):
        for is_cut in (False, True):
            shown, content, _, answer = read(text, step, LLAMA3, is_cut)
            assert shown == content == text and not answer.calls


@pytest.mark.parametrize(
    ("form", "text", "content", "n_calls"),
    [
        (HERMES, f"well {CALL[:40]}", "well", 0),
        (HERMES, f"well {CALL}{CALL[:-3]}", "well", 1),
        (HERMES, f"well {CALL}", "well", 1),
        (HERMES, "well <tool_", "well ", 0),
        (HERMES, "a < b", "a < b", 0),
        (LLAMA3, '{"na', "", 0),
        (LLAMA3, '{"name": "weather", "parameters": {"ci', "", 0),
        (LLAMA3, '{"other": 1', '{"other": 1', 0),
        (LLAMA3, f"{BARE}; {BARE[:-5]}", "", 1),
        (LLAMA3, f'{BARE}; {{"na', "", 1),
    ],
)
def test_a_call_that_was_cut_leaves_no_markup(form, text, content, n_calls):
    for step in (1, 7, 100):
        _, rest, _, answer = read(text, step, form, is_cut=True)
        assert rest.strip() == content.strip() and len(answer.calls) == n_calls
        assert answer.ends_in_call == (text not in (f"well {CALL}", "a < b", '{"other": 1'))
        one = read(text, step, form, is_cut=True, most_calls=1)[3]
        assert one.calls == answer.calls and not (one.calls and one.ends_in_call)


@pytest.mark.parametrize(
    ("form", "text", "left"),
    [
        (HERMES, "well \n<tool_call>{", "well"),
        (HERMES, f"{CALL}\n<tool_call>{{", CALL),
        (HERMES, "no <tool_call>x</tool_call> of mine", None),  # whole, though no call of a tool
        (LLAMA3, '{\n    "name" : "we', ""),
        (LLAMA3, '{\n    "number": 1', None),
        (LLAMA3, " \n", None),
    ],
)
def test_what_is_before_a_call_that_was_cut(form, text, left):
    assert before_cut_call(text, form) == (text if left is None else left)


def test_text_after_calls_is_no_cut_call():
    text = f"{BARE} and more"
    assert parse_calls(text, LLAMA3, ("weather",), is_cut=True) == (text, [])


@pytest.mark.parametrize("step", [1, 4, 100])
def test_thoughts_are_told_apart(step):
    for opened, begin in (("", "<think>"), ("<think>\n", "")):
        text = f"{begin}\nhm\n</think>\n\nyes"
        _, content, reasoning, _ = read(text, step, opened=opened, may_think=True)
        assert content == "yes" and reasoning.strip() == "hm"
    text = "<think>\nhm\n</think>\n\nyes"  # of a model without thoughts, or in a form
    assert read(text, step)[1:3] == (text, "")
    pieces = ["\n", "<think>", "\nThe mark", " <think>", " begins it.", "</think>", "\n\nyes"]
    for cut in (pieces, ["".join(pieces)]):
        request = AnswerRequest([1], SamplingParams(), AnswerOptions(), frozenset())
        answer = AnswerText(Plan([request], may_think=True))
        parts = [*(answer.push(Chunk(piece)) for piece in cut), answer.finish()]
        assert "".join(part.content for part in parts) == "yes"
        assert "".join(part.reasoning for part in parts) == "\nThe mark <think> begins it."


def test_reading_takes_time_linear_in_the_text():
    for text in ("<tool_call>{" * 8000, "<tool_call>{" * 8000 + "</tool_call>" * 8000):
        start = time.process_time()
        assert parse_calls(text, HERMES, ("f",)) == (text, [])
        assert time.process_time() - start < 0.5
