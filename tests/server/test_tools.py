"""Tool calls in chats with templates that can write them, streamed or not."""

from __future__ import annotations

import json

import httpx
import openai
import pytest
from live_server import CALL, LLAMA, QWEN, WEATHER

from fasteagle.errors import FasteagleError
from fasteagle.server.tools import HERMES, LLAMA3, answer_grammar, tool_format


def ask(client, live, **more):
    messages = more.pop("messages", [{"role": "user", "content": "hello"}])
    more = {"tools": [WEATHER], "max_tokens": 120, **more}
    return client.chat.completions.create(model=live.server.name, messages=messages, **more)


def test_which_templates_can():
    assert tool_format(QWEN) is HERMES and tool_format(LLAMA) is LLAMA3
    bare = "{% if tools %}{{ tools }}{% endif %}"
    others = "", "{{ messages }}", bare, f'{bare} "parameters"', f"{bare} name", "<tool_call>"
    for other in others:
        with pytest.raises(FasteagleError, match="tools: this model's chat template takes none"):
            tool_format(other)


@pytest.mark.parametrize("template", [QWEN, LLAMA], ids=["qwen", "llama"])
@pytest.mark.parametrize("choice", ["required", "named"])
def test_a_call_that_must_be_made(client, live, monkeypatch, template, choice):
    """A random model calls a tool where only a call is allowed; the arguments fit the schema."""
    pytest.importorskip("llguidance")
    monkeypatch.setattr(live.llm.tokenizer, "_template", template)
    named = {"type": "function", "function": {"name": "weather"}}
    options = {"tool_choice": "required" if choice == "required" else named, "temperature": 1.0}
    options["parallel_tool_calls"] = False  # a random model would call until it is cut
    reply = ask(client, live, seed=1, **options)
    message = reply.choices[0].message
    assert reply.choices[0].finish_reason == "tool_calls" and message.content is None
    (call,) = message.tool_calls
    assert call.function.name == "weather" and call.id.startswith("call_")
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    events = [e.choices[0] for e in ask(client, live, seed=1, stream=True, **options)]
    assert events[-1].finish_reason == "tool_calls"
    (streamed,) = events[-2].delta.tool_calls
    assert streamed.function.arguments == call.function.arguments and streamed.index == 0
    assert not any(e.delta.content for e in events)
    history = [
        {"role": "user", "content": "hello"},
        message,
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    again = ask(client, live, messages=history, tool_choice="auto")
    assert again.usage.prompt_tokens > reply.usage.prompt_tokens


def test_tools_that_the_template_or_the_form_do_not_take(client, live, monkeypatch):
    with pytest.raises(openai.BadRequestError, match="chat template takes none"):
        ask(client, live)
    assert ask(client, live, tool_choice="none").choices[0].message.content is not None
    monkeypatch.setattr(live.llm.tokenizer, "_template", QWEN)
    with pytest.raises(openai.BadRequestError, match="contradicts the form asked for"):
        ask(client, live, tool_choice="required", extra_body={"guided_regex": "a"})


def test_calls_that_are_no_json_are_texts_of_the_conversation(client, live, monkeypatch):
    """An answer that ended within a call goes back to the model, with what the agent says of it."""
    monkeypatch.setattr(live.llm.tokenizer, "_template", QWEN)
    whole = {"role": "assistant", "content": ""}
    lengths = []
    for arguments in ("{}", '{"city": "Ro', "3", "[" * 300, '{"a": ' * 120 + "1" + "}" * 120):
        function = {"name": "f", "arguments": arguments}
        whole["tool_calls"] = [{"id": "a", "type": "function", "function": function}]
        result = {"role": "tool", "tool_call_id": "a", "content": "these arguments are no JSON"}
        reply = ask(client, live, messages=[whole, result], max_tokens=1)
        lengths.append(reply.usage.prompt_tokens)
    assert lengths[1] > lengths[0]


NESTED = {"type": "object", "properties": {"unit": {"$ref": "#/$defs/Place"}}, "required": ["unit"]}
NESTED |= {"$defs": {"Unit": {"enum": ["C"]}, "Place": {"$ref": "#/$defs/Unit"}}}
NESTED = {"type": "function", "function": {"name": "nested", "parameters": NESTED}}
UNTYPED = {"properties": {"a": {"type": "integer"}}, "required": ["a"]}
UNTYPED = {"type": "function", "function": {"name": "untyped", "parameters": UNTYPED}}
FREE = {"type": "object", "additionalProperties": {"type": "integer"}}
FREE = {"type": "function", "function": {"name": "free", "parameters": FREE}}
NAMED = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
MODES = {
    "auto": {},
    "one": {"most_calls": 1},
    "must": {"must_call": True},
    "named": {"must_call": True, "most_calls": 1},
    "form": {"schema": NAMED},
}


@pytest.mark.parametrize("form", [HERMES, LLAMA3], ids=["hermes", "llama3"])
@pytest.mark.parametrize("mode", MODES)
def test_what_an_answer_with_tools_may_be(live, form, mode):
    """Arguments obey the tool's own schema, whose pointers lead into it; `stop` takes none."""

    def call(name, **arguments):
        text = json.dumps({"name": name, form.key: arguments})
        return f"<tool_call>\n{text}\n</tool_call>" if form is HERMES else text

    right = call("nested", unit="C")
    two = right + ("\n" if form is HERMES else "; ") + call("stop")
    table = [
        (right, MODES),
        (call("weather", city="Rome"), MODES),
        (call("stop"), MODES),
        (call("untyped", a=1), MODES),
        (call("untyped", a="x"), ()),
        (call("free", b=1), MODES),
        (call("untyped").replace("{}", "5"), ()),
        (call("nested", unit="F"), ()),
        (call("weather", city="C"), ()),
        (call("stop", x=1), ()),
        (call("other"), ()),
        (right[:-3], ()),
        (two, ("auto", "form", "must")),
        ("text", ("auto", "one")),
        ('{"na', ("auto", "one")),
        ('{"name": "Anna"}', ("form", "auto", "one") if form is HERMES else ("form",)),
        ('{"name": 3}', ("auto", "one") if form is HERMES else ()),
        (f"well {right}", ("auto", "one")),
        (f"{right} bye", ("auto", "one") if form is HERMES else ()),
    ]
    tools = [NESTED, UNTYPED, FREE, WEATHER, {"type": "function", "function": {"name": "stop"}}]
    mask = live.llm.grammar(answer_grammar(form, tools, **MODES[mode]))
    for text, modes in table:
        matcher, ids = mask._matcher.deep_copy(), live.llm.tokenizer.encode(text)
        is_whole = matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
        assert is_whole is (mode in modes), text


def test_keywords_that_no_grammar_knows_bind_only_strict_calls(live):
    """Tools of pydantic and zod have some, and are called beside those that are strict."""
    numbers = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    parameters = {"type": "object", "properties": {"numbers": numbers}, "required": ["numbers"]}
    tags = {"name": "tags", "parameters": parameters}
    tools = [{"type": "function", "function": tags}]
    mask = live.llm.grammar(answer_grammar(HERMES, tools, must_call=True))
    for numbers, is_right in (("[1, 1]", True), ('["a"]', False), ("1", False)):
        text = '<tool_call>\n{"name": "tags", "arguments": {"numbers": '
        ids = live.llm.tokenizer.encode(text + numbers + "}}")
        assert (mask._matcher.deep_copy().try_consume_tokens(ids) == len(ids)) is is_right
    tags["strict"] = True
    with pytest.raises(FasteagleError, match="uniqueItems"):
        live.llm.grammar(answer_grammar(HERMES, tools, must_call=True))


@pytest.mark.parametrize("template", [QWEN, LLAMA], ids=["qwen", "llama"])
def test_a_strict_call_obeys_its_schema_where_the_model_need_not_call(
    client, live, plant, monkeypatch, template
):
    monkeypatch.setattr(live.llm.tokenizer, "_template", template)
    call = CALL if template == QWEN else CALL[12:-13].replace("arguments", "parameters")
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": NAMED}}
    for text, tool, more, city in (
        (call, strict, {}, "Rome"),
        (call.replace("Rome", "X"), strict, {}, "Oslo"),
        (call.replace("Rome", "X"), WEATHER, {}, "X"),  # not strict: as the model likes
        (call.replace("Rome", "X"), strict, {"parallel_tool_calls": False}, "Oslo"),
        (call.replace("Rome", "X"), WEATHER, {"response_format": form}, "Oslo"),
        ('{"name": "Anna"}', WEATHER, {"response_format": form}, None),
        (call, WEATHER, {"response_format": form, "tool_choice": "required"}, "Rome"),
        (call, WEATHER, {"guided_json": NAMED, "tool_choice": "required"}, "Rome"),
        ("no call", strict, {}, None),
    ):
        plant(text)
        (choice,) = ask(client, live, tools=[tool], extra_body=more).choices
        if city is None:
            assert (choice.message.content, choice.finish_reason) == (text, "stop")
            continue
        (made,) = choice.message.tool_calls
        assert json.loads(made.function.arguments)["city"] == city
    plant(call)
    (choice,) = ask(client, live, tools=[strict], max_tokens=len(call) - 5).choices
    assert choice.finish_reason == "length"
    assert not choice.message.content and not choice.message.tool_calls


@pytest.mark.parametrize(
    ("template", "parallel", "n_calls"),
    [
        (QWEN, None, 2),
        (QWEN, True, 2),
        (QWEN, False, 1),
        (LLAMA, None, 1),  # its template takes no more back
        (LLAMA.replace("!= 1", "== 0"), True, 2),
    ],
    ids=["qwen", "qwen-true", "qwen-false", "llama", "llama-true"],
)
def test_several_calls_in_an_answer(client, live, plant, monkeypatch, template, parallel, n_calls):
    monkeypatch.setattr(live.llm.tokenizer, "_template", template)
    calls = [CALL, CALL.replace("Rome", "Oslo")]
    if template != QWEN:
        calls = [call[12:-13].replace("arguments", "parameters") for call in calls]
    plant(("\n" if template == QWEN else "; ").join(calls))
    options = {} if parallel is None else {"parallel_tool_calls": parallel}
    options["max_tokens"] = 120 if n_calls == 1 else 160  # enough for what is wanted
    (whole,) = ask(client, live, **options, tool_choice="required").choices
    *_, event, last = ask(client, live, stream=True, **options)
    for calls, finish in (
        (whole.message.tool_calls, whole.finish_reason),
        (event.choices[0].delta.tool_calls, last.choices[0].finish_reason),
    ):
        cities = [json.loads(call.function.arguments)["city"] for call in calls]
        assert cities == ["Rome", "Oslo"][:n_calls] and finish == "tool_calls"
        assert len({call.id for call in calls}) == n_calls
    assert [call.index for call in event.choices[0].delta.tool_calls] == list(range(n_calls))
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        for call in whole.message.tool_calls
    ]
    history = [{"role": "user", "content": "hello"}, whole.message, *results]
    assert ask(client, live, messages=history, max_tokens=1).usage.completion_tokens == 1


@pytest.mark.parametrize(
    ("template", "choice"), [(QWEN, "auto"), (LLAMA, "auto"), (LLAMA, "named")]
)
def test_a_call_that_max_tokens_cuts(client, live, plant, monkeypatch, template, choice):
    """Wherever it is cut, nothing of it is shown, whole or streamed."""
    monkeypatch.setattr(live.llm.tokenizer, "_template", template)
    plant(CALL if template == QWEN else CALL[12:-13].replace("arguments", "parameters"))
    named = {"type": "function", "function": {"name": "weather"}}
    options = {"tool_choice": named if choice == "named" else choice}
    for n in (1, 14, 30, 40):
        (whole,) = ask(client, live, max_tokens=n, **options).choices
        assert whole.finish_reason == "length"
        assert not whole.message.content and not whole.message.tool_calls
        events = [e.choices[0] for e in ask(client, live, max_tokens=n, stream=True, **options)]
        assert events[-1].finish_reason == "length"
        assert not any(event.delta.content or event.delta.tool_calls for event in events)


@pytest.mark.parametrize(
    ("template", "stop"), [(QWEN, "\n"), (LLAMA, '"name"')], ids=["qwen", "llama"]
)
def test_a_call_that_a_stop_string_cuts(client, live, monkeypatch, template, stop):
    """As where max_tokens cuts one, nothing of it is shown."""
    monkeypatch.setattr(live.llm.tokenizer, "_template", template)
    options = {"tool_choice": "required", "stop": [stop], "max_tokens": 60}
    (whole,) = ask(client, live, **options).choices
    assert not whole.message.content and not whole.message.tool_calls
    assert whole.finish_reason == "stop"
    events = [e.choices[0] for e in ask(client, live, stream=True, **options)]
    assert not any(event.delta.content for event in events)
    assert events[-1].finish_reason == "stop"


def test_results_of_tools_are_in_the_order_of_their_calls(live, monkeypatch):
    monkeypatch.setattr(live.llm.tokenizer, "_template", QWEN)

    def call(name):
        function = {"name": "weather", "arguments": json.dumps({"city": name})}
        return {"id": name, "index": 0, "type": "function", "function": function}

    def result(name, **more):
        return {"role": "tool", "tool_call_id": name, "content": f"in {name}", **more}

    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": None, "tool_calls": [call(c) for c in ("a", "b", "c")]},
    ]

    def tokens(*results):
        body = {"messages": [*messages, *results]}
        return httpx.post(f"{live.url}/tokenize", json=body)

    expected = tokens(result("a"), result("b"), result("c", content=None))
    assert expected.status_code == 200, expected.text
    reply = tokens(result("c", content=None), result("a"), result("b"))
    assert reply.json()["tokens"] == expected.json()["tokens"]
    anonymous = [{"role": "tool", "content": "x"}, {"role": "tool", "content": "y"}]
    assert tokens(*anonymous).status_code == 200
    refused = tokens(result("d"))
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "messages.2.tool_call_id"
    for one in messages[1]["tool_calls"]:
        one["id"] = None  # then an order is not known
    assert tokens(result("d")).status_code == 200


@pytest.mark.parametrize(
    "form",
    [
        {"tools": [WEATHER], "tool_choice": "required"},
        {"tools": [WEATHER], "response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_object"}},
        {"extra_body": {"guided_regex": "(yes|no)"}},
    ],
    ids=["call", "json or call", "json", "regex"],
)
def test_a_fixed_form_ends_the_thought_that_a_template_opens(client, live, monkeypatch, form):
    """There is no room for one: what the grammar allows is the answer, not its thought."""
    pytest.importorskip("llguidance")
    opening = r"<|im_start|>assistant\n"
    template = QWEN.replace(opening, opening + r"<think>\n")
    assert template != QWEN
    monkeypatch.setattr(live.llm.tokenizer, "_template", template)
    messages = [{"role": "user", "content": "hello"}]
    (choice,) = client.chat.completions.create(
        model=live.server.name, messages=messages, max_tokens=60, temperature=1.0, seed=1, **form
    ).choices
    assert not getattr(choice.message, "reasoning_content", None)
    assert choice.message.tool_calls or choice.message.content or choice.finish_reason == "length"
