"""Chat templates of strangers are tried in a process that is ended, and later ones have a limit."""

from __future__ import annotations

import sys

import pytest

from fasteagle.errors import FasteagleError
from fasteagle.loading import template_check
from fasteagle.loading.entries import REGISTRY
from fasteagle.loading.tokenizer import load_tokenizer

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLED = "{% for i in range(50) %}{% set ns.s = ns.s + ns.s %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "part"),
    [
        (LOOP, "takes more than 1 seconds"),
        ("{{ 10**(10**9) }}", "takes more than 1 seconds"),  # one operation
        ("{{ 'x' * 10**14 }}", "needs too much memory"),
        ("{% set ns = namespace(s='a' * 999) %}" + DOUBLED, "needs too much memory"),
        ("{% generation %}{{ 'x' * 10**14 }}{% endgeneration %}", "needs too much memory"),
        ("{{ 'x' * 2**18 + 'y' }}", "writes 262,145 characters"),
    ],
)
def test_a_template_that_does_too_much_is_refused_when_it_is_loaded(
    tiny_dir, template, part, monkeypatch
):
    # A machine may be busy: what ends by itself has a minute.
    seconds = 1 if "takes" in part else 60
    monkeypatch.setattr(template_check, "TRIAL_SECONDS", seconds)
    with pytest.raises(FasteagleError, match=f"chat template {part} for a short conversation"):
        load_tokenizer(tiny_dir, template)


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
    monkeypatch.setattr(template_check, "TRIAL_SECONDS", 0.2)
    question = {"role": "user", "content": "Hi"}
    before = sys.gettrace()
    assert tokenizer.render([question]) == "Hi"
    with pytest.raises(FasteagleError, match=r"refused: it takes more than 0\.2 seconds"):
        tokenizer.render([question] * 4)
    assert sys.gettrace() is before


def test_a_template_is_tried_once(monkeypatch):
    template_check.try_template("{{ 1 }}")
    monkeypatch.setattr(template_check, "run_trial", None)
    template_check.try_template("{{ 1 }}")
