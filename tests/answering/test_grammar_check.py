"""Grammars of strangers are tried in a process that is ended when it takes too long or too much."""

from __future__ import annotations

import io
import re
import resource
import sys
import time

import pytest

from fasteagle import trial
from fasteagle.answering import grammar_check
from fasteagle.answering.grammar import GrammarCompiler
from fasteagle.errors import FasteagleError
from fasteagle.loading.tokenizer import dummy_tokenizer
from fasteagle.options import GrammarSpec

pytest.importorskip("llguidance")

RULES = "start: r0\n" + "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(3000)) + 'r3000: "a"'


# 700 characters that would keep llguidance busy for hours once it makes a mask.
SLOW = "start: A\nA: " + " & ".join(f"/.*a.{{{i}}}/" for i in range(60))


@pytest.mark.parametrize(
    ("kind", "text", "part"),
    [
        ("regex", "a" * (2**18 + 1), "262,145 characters are too many: use at most 262,144"),
        ("grammar", RULES, "too complex to compile"),  # it ends the process
        ("grammar", SLOW, "not compiled within 1 seconds"),
    ],
    ids=lambda value: value[:20],
)
def test_what_is_wrong_is_one_line(kind, text, part, monkeypatch):
    # A machine may be busy: what ends by itself has a minute.
    monkeypatch.setattr(grammar_check, "TRIAL_SECONDS", 1 if text == SLOW else 60)
    with pytest.raises(FasteagleError) as caught:
        GrammarCompiler(dummy_tokenizer(4), 4).start(GrammarSpec(kind, text))
    assert part in str(caught.value)


def test_what_takes_long_is_ended_and_tried_again_when_it_comes_again(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(grammar_check, "TRIAL_SECONDS", 0.01)
        begin = time.perf_counter()
        with pytest.raises(FasteagleError, match=r"regex: not compiled within 0\.01 seconds"):
            grammar_check.try_grammar("regex", "slow+")
        assert time.perf_counter() - begin < 5
    grammar_check.try_grammar("regex", "slow+")


def test_what_is_right_is_tried_once(monkeypatch):
    for kind, text in (("json_object", ""), ("regex", "[ab]+"), ("json_schema", "{}")):
        grammar_check.try_grammar(kind, text)
        with monkeypatch.context() as patch:
            patch.setattr(grammar_check, "run_trial", None)
            grammar_check.try_grammar(kind, text)


@pytest.mark.parametrize("hard", [resource.RLIM_INFINITY, 2**20])
def test_a_trial_limits_its_process(hard, monkeypatch, capsys):
    limits = {}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (0, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, pair: limits.update({kind: pair}))
    monkeypatch.setattr(sys, "stdin", io.StringIO('["regex", "("]'))
    grammar_check.main()
    wanted = {resource.RLIMIT_AS: 2**31, resource.RLIMIT_STACK: 2**21, resource.RLIMIT_CORE: 0}
    wanted[resource.RLIMIT_CPU] = 60
    most = 2**31 if hard == resource.RLIM_INFINITY else hard
    assert limits == {kind: (min(n, most),) * 2 for kind, n in wanted.items()}
    assert capsys.readouterr().out.startswith("at 1")


@pytest.mark.parametrize("name", ["resource.py", "json.py", "llguidance.py"])
def test_files_where_the_person_is_are_not_run(name, tmp_path, monkeypatch):
    (tmp_path / name).write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    grammar_check.try_grammar("regex", f"of {re.escape(name)}")
    assert not (tmp_path / "executed").exists()


def test_packages_beside_ours_do_not_replace_modules_of_python(tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise SystemExit(9)")
    (tmp_path / "probe.py").write_text("import json\ndef main(): print(json.loads('7'))")
    monkeypatch.setattr(trial, "PACKAGE", str(tmp_path))
    assert trial.run_trial("probe", [], 60) == "7\n"
