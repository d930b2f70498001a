"""Chat templates: those of strangers are tried, and which of several is taken."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from fasteagle.errors import FasteagleError
from fasteagle.loading import template_check
from fasteagle.loading.entries import REGISTRY
from fasteagle.loading.tokenizer import ChatTokenizer, load_tokenizer

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
QUESTION = {"role": "user", "content": "Hi"}
MUCH = "{{ 'x' * 2**18 + 'y' }}"
DOUBLED = "{% for i in range(50) %}{% set ns.s = ns.s + ns.s %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "part"),
    [
        (LOOP, "takes too much time or memory"),
        ("{{ 10**(10**9) }}", "takes too much time or memory"),  # one operation
        ("{{ 'x' * 10**14 }}", "takes too much time or memory"),
        ("{% set ns = namespace(s='a' * 999) %}" + DOUBLED, "takes too much time or memory"),
        ("{% generation %}{{ 'x' * 10**14 }}{% endgeneration %}", "takes too much time or memory"),
        (MUCH, "writes 262,145 characters"),
        # In another conversation than the first, after the date, and in a loop that is left.
        ("{{ raise_exception('') if messages|length == 1 }}" + MUCH, "writes 262,145 characters"),
        ("{{ strftime_now('%Y')[:0] }}" + MUCH, "writes 262,145 characters"),
        ("{% for a in range(9) %}" + MUCH + "{% break %}{% endfor %}", "writes 262,145 characters"),
    ],
)
def test_a_template_that_does_too_much_is_refused_before_it_is_used(
    tiny_dir, template, part, monkeypatch
):
    monkeypatch.setattr(template_check, "MOST_SECONDS", 1)
    tokenizer = load_tokenizer(tiny_dir, template)
    with pytest.raises(FasteagleError, match=f"chat template {part} for a short conversation"):
        tokenizer.render([QUESTION])


@pytest.mark.parametrize(
    "template",
    [
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{" * 100_000,
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ raise_exception('no system prompt') }}",
        "{{ strftime_now('%d') }}",
        *{entry.template for entry in REGISTRY.values() if entry.template},
    ],
    ids=lambda value: value[:20],
)
def test_what_a_template_refuses_is_no_matter_of_the_trial(template):
    template_check.try_template(template)


def test_a_template_that_loops_in_a_later_conversation_is_ended(tiny_dir, monkeypatch):
    template = "{% if messages|length > 3 %}" + LOOP + "{% endif %}{{ messages[0].content }}"
    tokenizer = load_tokenizer(tiny_dir, template)
    before = sys.gettrace()
    assert tokenizer.render([QUESTION]) == "Hi"
    monkeypatch.setattr(template_check, "MOST_SECONDS", 0.2)
    with pytest.raises(FasteagleError, match=r"refused: it takes more than 0\.2 seconds"):
        tokenizer.render([QUESTION] * 4)
    assert sys.gettrace() is before


def test_a_template_is_tried_once(monkeypatch):
    trial = template_check.trial_of("{{ 1 }}")
    assert trial.result() is None
    monkeypatch.setattr(template_check, "run_trial", None)
    assert template_check.trial_of("{{ 1 }}") is trial


def test_a_trial_that_does_not_end_is_given_up(monkeypatch):
    monkeypatch.setattr(template_check, "LONGEST_TRIAL", 0.01)
    with pytest.raises(FasteagleError, match=r"takes more than 0\.01 seconds"):
        template_check.try_template("{{ 2 }}")


def test_a_trial_begins_where_a_model_is_to_chat(tiny_dir, monkeypatch):
    tried = []
    monkeypatch.setattr(template_check, "run_trial", lambda *all_: tried.append(all_[1][0]) or "")
    tokenizer = load_tokenizer(tiny_dir, "{{ 3 }}")
    assert not tried
    tokenizer.try_templates()
    assert template_check.trial_of("{{ 3 }}").result() is None and tried == ["{{ 3 }}"]


def named_templates(**templates):
    return SimpleNamespace(chat_template=templates)


def test_without_a_default_the_first_of_several_templates_is_taken():
    tokenizer = ChatTokenizer(named_templates(rag="R", short="S"), frozenset())
    assert (
        tokenizer.template_for([QUESTION]) == tokenizer.template_for([QUESTION], tools=[{}]) == "R"
    )


def test_a_template_that_is_given_replaces_that_for_tools_too():
    backend = named_templates(default="D", tool_use="T")
    assert ChatTokenizer(backend, frozenset()).template_for([QUESTION], tools=[{}]) == "T"
    call, result = {"role": "assistant", "tool_calls": [{}]}, {"role": "tool", "content": "x"}
    for earlier in (call, result):
        assert ChatTokenizer(backend, frozenset()).template_for([QUESTION, earlier]) == "T"
    assert ChatTokenizer(backend, frozenset(), "G").template_for([QUESTION], tools=[{}]) == "G"
