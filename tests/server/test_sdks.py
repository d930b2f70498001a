"""Clients and agents as people use them, unchanged, against one server.

The model is tiny and calls no tool by itself, so most answers are planted; grammars are real.
"""

from __future__ import annotations

import asyncio
import enum
import json

import openai
import pydantic
import pytest
from live_server import QWEN, WEATHER

from fasteagle.options import AnswerOptions, Defaults

pytest.importorskip("llguidance")


class City(enum.Enum):
    ROME = "Rome"
    OSLO = "Oslo"


class Place(pydantic.BaseModel):
    city: City


class Trip(pydantic.BaseModel):
    """A trip to some places."""

    places: list[Place] = pydantic.Field(max_length=1)
    days: int


ANSWER = '{"places": [{"city": "Oslo"}], "days": 3}'
TRIP = Trip.model_validate_json(ANSWER)


@pytest.fixture
def calls(live, monkeypatch):
    """Return how a model writes a call, with the template of one that can."""
    monkeypatch.setattr(live.llm.tokenizer, "_template", QWEN)
    monkeypatch.setattr(live.server.planner, "_defaults", Defaults(answer=AnswerOptions(300)))
    return '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'.format


@pytest.fixture
def where(live):
    return {"base_url": f"{live.url}/v1", "api_key": "none", "max_retries": 0}


MESSAGES = [{"role": "user", "content": "hello"}]


def test_openai_agents(live, where, calls, plant):
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)
    cities = []

    @agents.function_tool
    def weather(city: City) -> str:
        """Tell the weather."""
        cities.append(city)
        plant(ANSWER)  # what the model says once it knows
        return "sunny"

    for output_type, expected in ((None, ANSWER), (Trip, TRIP)):
        client = openai.AsyncOpenAI(**where)  # of one event loop
        model = agents.OpenAIChatCompletionsModel(model=live.server.name, openai_client=client)
        plant(calls("weather", '{"city": "Rome"}'))
        agent = agents.Agent("guide", tools=[weather], model=model, output_type=output_type)
        result = asyncio.run(agents.Runner.run(agent, "hello", max_turns=3))
        assert result.final_output == expected
    assert cities == [City.ROME, City.ROME]


def test_langchain(live, where, calls, plant):
    langchain = pytest.importorskip("langchain_openai")
    chat = langchain.ChatOpenAI(model=live.server.name, model_kwargs={"user": "me"}, **where)
    plant("hello there")
    assert chat.invoke("hello").content == "hello there"
    assert "".join(chunk.content for chunk in chat.stream("hello")) == "hello there"
    plant(calls("Trip", ANSWER))
    for options in ({}, {"strict": True}, {"tool_choice": "any"}):
        (call,) = chat.bind_tools([Trip], **options).invoke("hello").tool_calls
        assert call["name"] == "Trip" and call["args"] == json.loads(ANSWER)
    assert chat.with_structured_output(Trip, method="function_calling").invoke("hello") == TRIP
    plant(ANSWER)
    assert chat.with_structured_output(Trip, method="json_schema").invoke("hello") == TRIP
    with pytest.raises(langchain.chat_models.base.OpenAIContextOverflowError):
        chat.invoke("x" * 3000)


def test_litellm(live, where, calls, plant, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it is fetched
    litellm = pytest.importorskip("litellm")
    model = f"openai/{live.server.name}"
    where = {"api_base": where["base_url"], "api_key": "none", "model": model}
    plant("hello there")
    reply = litellm.completion(messages=MESSAGES, user="me", **where)
    assert reply.choices[0].message.content == "hello there"
    events = litellm.completion(messages=MESSAGES, stream=True, **where)
    assert "".join(e.choices[0].delta.content or "" for e in events) == "hello there"
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=[{"role": "user", "content": "x" * 3000}], **where)
    plant(calls("weather", '{"city": "Rome"}'))
    reply = litellm.completion(messages=MESSAGES, tools=[WEATHER], tool_choice="auto", **where)
    (call,) = reply.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Rome"}


def test_openai(live, where, calls, plant):
    client, name = openai.OpenAI(**where), live.server.name
    ask = client.chat.completions.create
    whole = ask(model=name, messages=MESSAGES, max_tokens=8, user="me")
    events = ask(model=name, messages=MESSAGES, max_tokens=8, stream=True, user="me")
    streamed = "".join(event.choices[0].delta.content or "" for event in events)
    assert streamed == whole.choices[0].message.content
    strict = openai.pydantic_function_tool(Trip)
    assert strict["function"]["strict"] is True
    for wanted, choice, arguments in (
        (calls("Trip", ANSWER), "auto", ANSWER),
        (calls("Trip", ANSWER.replace("Oslo", "Bonn")), "auto", None),  # held to the schema
        (calls("Trip", ANSWER), "required", ANSWER),
        ("text", "auto", ""),
    ):
        plant(wanted)
        options = {"model": name, "messages": MESSAGES, "tools": [strict], "tool_choice": choice}
        (answer,) = client.chat.completions.parse(**options, max_tokens=200).choices
        if arguments == "":
            assert answer.message.content == wanted and not answer.message.tool_calls
            continue
        (call,) = answer.message.tool_calls
        parsed = call.function.parsed_arguments
        assert isinstance(parsed, Trip) and (arguments is None or parsed == TRIP)
        with client.chat.completions.stream(**options, max_tokens=200) as stream:
            kinds = [event.type for event in stream]
            (again,) = stream.get_final_completion().choices
        assert kinds.count("tool_calls.function.arguments.done") == 1
        assert again.message.tool_calls[0].function.parsed_arguments == parsed
    result = {"role": "tool", "tool_call_id": again.message.tool_calls[0].id, "content": "paid"}
    plant(ANSWER)
    for messages in (MESSAGES, [*MESSAGES, again.message, result]):
        reply = client.chat.completions.parse(model=name, messages=messages, response_format=Trip)
        assert reply.choices[0].message.parsed == TRIP
    ask(model=name, messages=[*MESSAGES, reply.choices[0].message, *MESSAGES])
