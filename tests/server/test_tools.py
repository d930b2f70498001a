"""Tool calls: written by the templates that can, read back from answers, streamed or not."""

from __future__ import annotations

import json
import time

import openai
import pytest

from fasteagle.answering.answer import AnswerRequest, Chunk
from fasteagle.errors import FasteagleError
from fasteagle.options import AnswerOptions, SamplingParams
from fasteagle.server.prepare import Plan
from fasteagle.server.replies import AnswerText
from fasteagle.server.tools import HERMES, LLAMA3, Call, call_grammar, parse_calls, tool_format

# The parts of the registry's templates that matter, as Qwen3 and Llama 3.1 write calls.
QWEN = (
    "{% if tools %}<|system|>{% for t in tools %}{{ t | tojson }}{% endfor %}"
    "call with <tool_call>{json}</tool_call><|end|>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LLAMA = (
    '{% if tools %}Respond in the format {"name": function name, "parameters": dictionary}. '
    "{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}"
    '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'
    "{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.fixture
def client(live):
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)


def ask(client, live, **more):
    messages = more.pop("messages", [{"role": "user", "content": "hello"}])
    more = {"tools": [WEATHER], "max_tokens": 120, **more}
    return client.chat.completions.create(model=live.server.name, messages=messages, **more)


def test_which_templates_can():
    assert tool_format(QWEN) is HERMES and tool_format(LLAMA) is LLAMA3
    for other in ("", "{{ messages }}", "{% if tools %}{{ tools }}{% endif %}", "<tool_call>"):
        with pytest.raises(FasteagleError, match="tools: this model's chat template takes none"):
            tool_format(other)


@pytest.mark.parametrize(
    ("text", "form", "left", "calls"),
    [
        (CALL, HERMES, "", [("weather", {"city": "Rome"})]),
        ("Let me see. " + CALL, HERMES, "Let me see.", [("weather", {"city": "Rome"})]),
        (CALL + "\n" + CALL, HERMES, "", [("weather", {"city": "Rome"})] * 2),
        ('<tool_call>{"name": "f"}</tool_call>', HERMES, "", [("f", {})]),
        ("<tool_call>{broken}</tool_call>", HERMES, None, []),
        ('<tool_call>{"name": "f", "arguments": 3}</tool_call>', HERMES, None, []),
        ('<tool_call>{"name": "f"', HERMES, None, []),
        ("no call", HERMES, None, []),
        ('{"name": "f", "parameters": {"a": 1}}', LLAMA3, "", [("f", {"a": 1})]),
        (
            '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}',
            LLAMA3,
            "",
            [("f", {}), ("g", {})],
        ),
        ('{"name": "f", "parameters": {}} and more', LLAMA3, None, []),
        ('{"name": "f"}', LLAMA3, None, []),
        ('{"name": "Anna", "parameters": {}}', LLAMA3, None, []),
        ('{"name": [], "parameters": {}}', LLAMA3, None, []),
        ("[" * 100_000, LLAMA3, None, []),
        ('{"a": ' * 500 + "1" + "}" * 500, LLAMA3, None, []),
        ('<tool_call>{"name": "Anna"}</tool_call>', HERMES, None, []),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", HERMES, None, []),
        ("</tool_call> " + CALL, HERMES, "</tool_call>", [("weather", {"city": "Rome"})]),
        (
            "say <tool_call> like " + CALL,
            HERMES,
            "say <tool_call> like",
            [("weather", {"city": "Rome"})],
        ),
        ('{"city": "Rome"}', LLAMA3, None, []),
        ("[1]", LLAMA3, None, []),
    ],
)
def test_reading_calls_back(text, form, left, calls):
    rest, found = parse_calls(text, form, ("weather", "f", "g"))
    assert rest == (text if left is None else left)
    assert [(call.name, json.loads(call.arguments)) for call in found] == calls


def test_reading_takes_time_linear_in_the_text():
    for text in ("<tool_call>{" * 8000, "<tool_call>{" * 8000 + "</tool_call>" * 8000):
        start = time.process_time()
        assert parse_calls(text, HERMES, ("f",)) == (text, [])
        assert time.process_time() - start < 0.5


@pytest.mark.parametrize("step", [1, 3, 7, 1000])
@pytest.mark.parametrize("form", [HERMES, LLAMA3], ids=lambda form: form.name)
def test_a_stream_shows_text_and_never_a_part_of_a_call(form, step):
    call = CALL if form is HERMES else '{"name": "weather", "parameters": {"city": "Rome"}}'
    texts = ["plain < text", call, "[{"] + (["a <b> " + call] if form is HERMES else [])
    for text in texts:
        request = AnswerRequest([1], SamplingParams(), AnswerOptions(), frozenset())
        answer = AnswerText(Plan(request, tools=form, tool_names=frozenset({"weather"})))
        pieces = [answer.push(Chunk(text[i : i + step])) for i in range(0, len(text), step)]
        shown = "".join(piece.content for piece in pieces)
        last = answer.finish()
        if call in text:
            assert answer.calls == [Call("weather", '{"city": "Rome"}')]
            assert "tool_call" not in shown + last.content and "{" not in shown + last.content
            assert (shown + last.content).strip() == text.replace(call, "").strip()
        else:
            assert shown + last.content == text and not answer.calls


@pytest.mark.parametrize("template", [QWEN, LLAMA], ids=["qwen", "llama"])
@pytest.mark.parametrize("choice", ["required", "named"])
def test_a_call_that_must_be_made(client, live, monkeypatch, template, choice):
    """A random model calls a tool where only a call is allowed; the arguments fit the schema."""
    pytest.importorskip("llguidance")
    monkeypatch.setattr(live.llm.tokenizer, "_template", template)
    named = {"type": "function", "function": {"name": "weather"}}
    given = {"tool_choice": "required" if choice == "required" else named, "temperature": 1.0}
    for seed in range(8):  # until one ends before its tokens do: blanks are allowed in JSON
        reply = ask(client, live, seed=seed, **given)
        if reply.choices[0].finish_reason == "tool_calls":
            break
    message = reply.choices[0].message
    assert reply.choices[0].finish_reason == "tool_calls" and message.content is None
    (call,) = message.tool_calls
    assert call.function.name == "weather" and call.id.startswith("call_")
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    events = [e.choices[0] for e in ask(client, live, seed=seed, stream=True, **given)]
    assert events[-1].finish_reason == "tool_calls"
    (streamed,) = events[-1].delta.tool_calls
    assert streamed.function.arguments == call.function.arguments and streamed.index == 0
    assert not any(e.delta.content for e in events)
    history = [
        {"role": "user", "content": "hello"},
        message,
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    again = ask(client, live, messages=history, tool_choice="auto")
    assert again.usage.prompt_tokens > reply.usage.prompt_tokens


def test_choices_that_are_refused(client, live, monkeypatch):
    with pytest.raises(openai.BadRequestError, match="chat template takes none"):
        ask(client, live)
    assert ask(client, live, tool_choice="none").choices[0].message.content is not None
    monkeypatch.setattr(live.llm.tokenizer, "_template", QWEN)
    other = {"type": "function", "function": {"name": "other"}}
    with pytest.raises(openai.BadRequestError, match="there is no tool 'other'"):
        ask(client, live, tool_choice=other)
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    with pytest.raises(openai.BadRequestError, match="strict: needs tool_choice required"):
        ask(client, live, tools=[strict])
    for arguments in ("{", "3", "[" * 100_000, '{"a": ' * 500 + "1" + "}" * 500):
        function = {"name": "f", "arguments": arguments}
        broken = {"id": "a", "type": "function", "function": function}
        messages = [{"role": "assistant", "content": "", "tool_calls": [broken]}]
        with pytest.raises(openai.BadRequestError, match="are no JSON object"):
            ask(client, live, messages=messages)


NESTED = {
    "type": "function",
    "function": {
        "name": "nested",
        "parameters": {
            "$defs": {"Unit": {"enum": ["C"]}, "Place": {"$ref": "#/$defs/Unit"}},
            "type": "object",
            "properties": {"unit": {"$ref": "#/$defs/Place"}},
            "required": ["unit"],
        },
    },
}


@pytest.mark.parametrize(("form", "key"), [(HERMES, "arguments"), (LLAMA3, "parameters")])
def test_calls_obey_their_own_schemas(live, form, key):
    """Pointers lead into the tool's own schema; a tool without parameters takes none."""
    tools = [NESTED, WEATHER, {"type": "function", "function": {"name": "stop"}}]
    mask = live.llm.grammar(call_grammar(form, tools, None))
    for name, arguments, is_right in (
        ("nested", {"unit": "C"}, True),
        ("nested", {"unit": "F"}, False),
        ("weather", {"city": "Rome"}, True),
        ("weather", {"city": "C"}, False),
        ("stop", {}, True),
        ("stop", {"x": 1}, False),
    ):
        text = json.dumps({"name": name, key: arguments})
        text = f"<tool_call>\n{text}\n</tool_call>" if form is HERMES else text
        ids = live.llm.tokenizer.encode(text)
        matcher = mask._matcher.deep_copy()
        assert (matcher.try_consume_tokens(ids) == len(ids)) is is_right, text


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
    ],
)
def test_a_call_that_was_cut_leaves_no_markup(form, text, content, n_calls):
    request = AnswerRequest([1], SamplingParams(), AnswerOptions(), frozenset())
    names = frozenset({"weather"})
    for step in (1, 7, 100):
        answer = AnswerText(Plan(request, tools=form, tool_names=names))
        pieces = [answer.push(Chunk(text[i : i + step])) for i in range(0, len(text), step)]
        pieces.append(answer.finish(is_cut=True))
        assert "".join(p.content for p in pieces).strip() == content.strip()
        assert len(answer.calls) == n_calls
        assert answer.ends_in_call == (text not in (f"well {CALL}", "a < b", '{"other": 1'))


def test_one_call_where_several_are_not_wanted():
    request = AnswerRequest([1], SamplingParams(), AnswerOptions(), frozenset())
    plan = Plan(request, tools=HERMES, tool_names=frozenset({"weather"}), most_calls=1)
    answer = AnswerText(plan)
    assert answer.push(Chunk(CALL + CALL)).content == answer.finish().content == ""
    assert answer.calls == [Call("weather", '{"city": "Rome"}')]


def test_a_grammar_for_several_tools():
    two = [WEATHER, {"type": "function", "function": {"name": "stop"}}]
    one = json.loads(call_grammar(LLAMA3, two, "stop").text)["anyOf"]
    assert [call["properties"]["name"] for call in one] == [{"const": "stop"}]
    assert len(json.loads(call_grammar(LLAMA3, two, None).text)["anyOf"]) == 2


def test_thoughts_are_told_apart():
    request = AnswerRequest([1], SamplingParams(), AnswerOptions(), frozenset())
    for opened, text in (
        ("", "<think>\nhm\n</think>\n\nyes"),
        ("<think>\n", "\nhm\n</think>\n\nyes"),
    ):
        for step in (1, 4, 100):
            answer = AnswerText(Plan(request, opened=opened))
            pieces = [answer.push(Chunk(text[i : i + step])) for i in range(0, len(text), step)]
            pieces.append(answer.finish())
            assert "".join(p.content for p in pieces) == "yes"
            assert "".join(p.reasoning for p in pieces).strip() == "hm"
