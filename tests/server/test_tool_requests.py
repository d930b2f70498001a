"""Tools and earlier calls as requests hold them."""

from __future__ import annotations

import functools
import math

import pydantic
import pytest
from live_server import QWEN, SHORT, WEATHER

from fasteagle.errors import FasteagleError
from fasteagle.server.protocol import MOST_TOOLS, ChatRequest

(HELLO,) = SHORT["messages"]


def named(name):
    return {"type": "function", "function": {"name": name}}


@pytest.fixture
def plan(plan):
    """Plan a chat with a model that calls tools, or with another template."""
    return functools.partial(plan, template=QWEN)


@pytest.mark.parametrize("arguments", ["", "{}", None])
def test_a_call_without_arguments_has_none(plan, arguments):
    """Clients write them as an empty text, too, which is no JSON."""
    call = {"id": "a", "function": {"name": "now", "arguments": arguments}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    text = plan(messages=[HELLO, answer]).text
    assert '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>' in text


def test_a_tool_that_is_not_there_is_named_in_short(plan):
    with pytest.raises(FasteagleError, match="there is no tool 'xxx") as caught:
        plan(tools=[WEATHER], tool_choice=named("x" * 10**6))
    assert len(str(caught.value)) < 200


def test_numbers_that_json_has_not_are_in_no_schema(plan):
    """The grammar took them for null, without a word."""
    function = {**WEATHER["function"], "parameters": {"const": math.nan}}
    with pytest.raises(pydantic.ValidationError, match="not JSON compliant"):
        plan(tools=[{**WEATHER, "function": function}])


def test_a_thought_before_a_call_goes_back_to_the_model(plan):
    call = {"id": "a", "function": {"name": "now"}}
    answer = {"role": "assistant", "reasoning_content": "what time?", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "a", "content": "noon"}
    text = plan(messages=[HELLO, answer, result]).text
    assert "<think>\nwhat time?\n</think>\n\n<tool_call>" in text


def test_templates_that_write_the_ids_of_calls_get_them(plan):
    template = (
        "{% for message in messages %}"
        "{% for call in message.tool_calls or [] %}{{ call.id }}: {{ call.type }}; {% endfor %}"
        "{{ message.tool_call_id }}{% endfor %}"
    )
    call = {"id": "call_1", "function": {"name": "now"}}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "noon"}
    messages = [HELLO, {"role": "assistant", "tool_calls": [call]}, result]
    assert plan(template=template, messages=messages).text == "call_1: function; call_1"


def test_marks_for_caches_change_nothing(plan):
    """Clients for several services send them along."""
    mark = {"cache_control": {"type": "ephemeral"}}
    parts = [{"type": "text", "text": "hello", **mark}]
    message = {"role": "user", "content": parts, **mark}
    marked = plan(messages=[message], tools=[{**WEATHER, **mark}])
    assert marked.text == plan(tools=[WEATHER]).text
    plan(prediction={"type": "content", "content": parts})


def test_a_chosen_tool_is_the_only_one(plan):
    tools = [named("now"), WEATHER]
    form = plan(tools=tools, tool_choice=named("weather")).form.text
    assert "weather" in form and "now" not in form
    assert "now" in plan(tools=tools, tool_choice="required").form.text


def test_any_json_and_calls_are_one_form(plan):
    """Of which no field alone is at fault."""
    both = plan(tools=[WEATHER], response_format={"type": "json_object"})
    assert both.form.kind == "grammar" and "weather" in both.form.text
    assert both.form_field is None
    assert plan(tools=[WEATHER], tool_choice="required").form_field == "tools"


@pytest.mark.parametrize("name", ["", "a b", 'a"', "ä", "a" * 65])
def test_names_that_no_tool_has(name):
    ChatRequest(messages=[HELLO], tools=[named("get-Weather_2")])
    with pytest.raises(pydantic.ValidationError, match="tools.0.function.name"):
        ChatRequest(messages=[HELLO], tools=[named(name)])


def test_how_many_tools_there_may_be():
    tools = [named("f")] * MOST_TOOLS
    ChatRequest(messages=[HELLO], tools=tools)
    with pytest.raises(pydantic.ValidationError, match="at most 1024 items"):
        ChatRequest(messages=[HELLO], tools=[*tools, named("f")])
