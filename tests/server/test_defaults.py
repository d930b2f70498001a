"""Defaults of the command line, and which of them a request replaces."""

from __future__ import annotations

import math

import httpx
import pytest
from live_server import QWEN, SHORT, WEATHER

from fasteagle.errors import FasteagleError
from fasteagle.options import AnswerOptions, Defaults, GrammarSpec

HELLO = SHORT["messages"]


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_conversation_keeps_its_own_system_prompt(plan, role):
    defaults = Defaults(system="Be brief.")
    assert "Be brief." in plan(defaults=defaults).text
    text = plan(defaults=defaults, messages=[{"role": role, "content": "Rhyme."}, *HELLO]).text
    assert "Rhyme." in text and "Be brief." not in text


@pytest.mark.parametrize(
    "answer",
    [
        {"content": [{"type": "refusal", "refusal": "I cannot."}]},
        {"content": [{"type": "text", "text": "I "}, {"type": "refusal", "refusal": "cannot."}]},
        {"content": None, "refusal": "I cannot."},
        {"content": "I ", "refusal": "cannot."},
    ],
    ids=str,
)
def test_refusals_of_other_models_are_text(plan, answer):
    """Clients that change from one provider to another send what they have got."""
    plain = {"role": "assistant", "content": "I cannot."}
    wanted, text = (
        plan(messages=[*HELLO, message, *HELLO]).text
        for message in (plain, {"role": "assistant", **answer})
    )
    assert text == wanted


@pytest.mark.parametrize(("stop", "expected"), [(None, ("x",)), ([], ()), ("y", ("y",))])
def test_stop_strings_of_a_request_replace_those_of_the_server(plan, stop, expected):
    defaults = Defaults(answer=AnswerOptions(16, ("x",)))
    assert plan(defaults=defaults, stop=stop).answers[0].answer.stop == expected


@pytest.mark.parametrize(
    ("more", "kind"),
    [
        ({}, "json_object"),
        ({"response_format": {"type": "text"}}, None),
        ({"guided_regex": "a"}, "regex"),
    ],
    ids=str,
)
def test_a_form_of_a_request_replaces_that_of_the_server(plan, more, kind):
    form = plan(defaults=Defaults(form=GrammarSpec("json_object")), **more).form
    assert (form and form.kind) == kind


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "guided_regex"),
        ({"tools": [WEATHER], "tool_choice": "required"}, "tool_choice"),
    ],
    ids=["two forms", "form and call"],
)
def test_two_forms_of_a_request_contradict_each_other(plan, more, param):
    with pytest.raises(FasteagleError, match=f"{param}: contradicts"):
        plan(template=QWEN, guided_regex="a", **more)


def test_numbers_that_json_has_not_are_in_no_form(plan):
    schema = {"type": "number", "maximum": math.inf}
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    with pytest.raises(FasteagleError, match="response_format: json_schema is not JSON"):
        plan(response_format=form)


def test_seeds_of_several_answers_go_round(plan):
    answers = plan(seed=2**63 - 1, n=2, temperature=1.0).answers
    assert [answer.params.seed for answer in answers] == [2**63 - 1, 0]


def test_the_largest_values_are_let_in(plan):
    bias = {"5": 100, "6": -100}
    wanted = plan(stop=["a" * 1000, *"bcdefghijklmnop"], logit_bias=bias).answers[0]
    assert len(wanted.answer.stop) == 16 and wanted.logit_bias == {5: 100, 6: -100}


@pytest.mark.parametrize("logprobs", [False, None])
def test_no_alternatives_of_no_logprobs_are_none(plan, logprobs):
    assert plan(logprobs=logprobs, top_logprobs=0).answers[0].top_logprobs is None


def test_a_context_that_is_full_cuts_the_answer(live):
    size = live.llm.engine.max_seq_len
    body = {"prompt": [5] * (size - 6), "max_tokens": 100, "logit_bias": {"7": 100}}
    reply = httpx.post(f"{live.url}/v1/completions", json=body).json()
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["total_tokens"] == size
