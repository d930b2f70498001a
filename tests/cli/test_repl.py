"""The chat's commands, typed into a chat of this process."""

from __future__ import annotations

import json
import os
import re
import sys
from types import SimpleNamespace

import pytest

from fasteagle.cli import repl
from fasteagle.cli.markdown import Style
from fasteagle.cli.session import ChatSession, Piece
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.options import AnswerOptions, Defaults
from fasteagle.shapes import GatedChain, TreeShape
from helpers import THINKING_TEMPLATE, raising, random_head

# What is typed (None: Ctrl-C at the prompt), and which lines the loop acts on.
TYPED = [
    (["/exit", "/help"], ["/exit"]),
    (["/bye", "/help"], ["/bye"]),
    (["/quit", "/help"], ["/quit"]),
    (["", "  ", "/stats"], ["/stats"]),
    ([None, "/stats"], ["/stats"]),
    (["/save x", "/stats"], ["/save x", "/stats"]),  # Ctrl-C in the first one ends only that
    ([b"caf\xe9", "/stats"], ["/stats"]),
]


@pytest.mark.parametrize(("typed", "expected"), TYPED)
def test_the_loop_goes_on_until_the_end(monkeypatch, capsys, typed, expected):
    lines, handled = list(typed), []

    def read(self):
        if not lines:
            raise EOFError
        line = lines.pop(0)
        if line is None:
            raise KeyboardInterrupt
        return line.decode() if isinstance(line, bytes) else line

    def handle(self, line, act=repl.Repl._handle):
        handled.append(line)
        if line == "/save x":
            raise KeyboardInterrupt
        return line != "/stats" and act(self, line)

    monkeypatch.setattr(repl.Repl, "_handle", handle)
    monkeypatch.setattr(repl.Repl, "_read", read)
    repl.Repl.run(object.__new__(repl.Repl))
    shown = capsys.readouterr()
    assert handled == expected
    assert ("/exit to leave" in shown.out) == (None in typed)
    assert ("[stopped]" in shown.out) == ("/save x" in typed)
    assert ("not UTF-8 (unexpected end of data): not sent" in shown.err) == (typed[0] == b"caf\xe9")


def test_quotes_end_a_text_of_several_lines_though_blanks_follow(monkeypatch):
    lines = iter(['  """first', 'second""" ', "next"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    chat = object.__new__(repl.Repl)
    assert [chat._read(), chat._read()] == ["first\nsecond", "next"]


@pytest.fixture
def typed(llm, capsys):
    """Returns what a new chat shows for a line; `typed.chat` is the chat."""
    session = ChatSession(llm, Defaults(answer=AnswerOptions(max_new_tokens=30)))
    chat = repl.Repl(session, Style(False, False, False), quiet=False, plain=True)

    def shown(line: str) -> str:
        assert not chat._handle(line)
        return "".join(capsys.readouterr())

    shown.chat = chat
    yield shown
    llm.engine.use(chat.drafter)


def test_commands(typed, monkeypatch):
    assert "/retry" in typed("/help") and "Ctrl-C" in typed("/?")
    assert "no answer yet: ask" in typed("/stats") or typed.chat.session.stats.new_tokens
    assert "nothing to retry" in typed("/retry")
    text = typed("/retyr")
    assert "no command '/retyr'; did you mean '/retry'" in text and "prefill" not in text
    assert "prefill" in typed("hello") and "prefill" in typed("/regen")
    typed.chat.session.stats.path_lengths = [1, 2, 0, 1]
    drafter = typed.chat.engine.drafter
    monkeypatch.setattr(drafter, "policy", SimpleNamespace(explain=lambda: "policy: sizes"))
    numbers = typed("/metrics")
    monkeypatch.undo()
    assert "policy: sizes\n" in numbers
    assert numbers.count("tau") == 1 and "accepted to depth 1: 75 % 2: 25 %" in numbers
    assert typed.chat.engine.backend.describe() in numbers
    assert "conversation forgotten" in typed("/reset")
    assert "nothing to retry" in typed("/retry")
    assert "model's own default" in typed("/system")
    typed("/system Be brief.")
    assert "Be brief." in typed("/system") and "prefill" in typed("hello")
    llm = typed.chat.session.llm
    assert llm.tokenizer.raw(llm.engine.cached).startswith("<|system|>Be brief.<|end|>")


def test_a_text_of_several_lines_is_no_command(typed):
    shown = typed("/usr/bin/python: no such file\nWhat is wrong?")
    assert "prefill" in shown and "no command" not in shown


def test_setting_options(typed):
    typed("/set temperature=0.5;top-p=0.8;seed=23;max_new_tokens=3;stop=a,b")
    shown = typed("/set")
    assert "stop = x,y\n" in typed("/set stop=x,,y,") + typed("/show")
    for line in ("temperature = 0.5", "top_p = 0.8", "max_new_tokens = 3", "stop = a,b"):
        assert line in shown
    for bad, message in (
        ("/set temperature=-1;seed=1", "temperature -1"),
        ("/set top_q=1", "knows no 'top_q'"),
        ("/set greedy=1", "knows no 'greedy'"),
        ("/set seed=x", "'x' is not a number"),
        ("/set seed=" + "9" * 5000, "9999 ... is not a number"),
        ("/set seed", "wants key=value"),
        ("/set max_new_tokens=0", "max-new-tokens 0"),
        ("/set think=maybe", "'maybe' is unknown: use on, off, default"),
        ("/set seed=1;think=on", "think on: this model's chat template has no thinking switch"),
    ):
        assert message in typed(bad)
    assert "seed = 23" in typed("/show")  # nothing of a wrong line takes effect


def test_switching_speculation(typed, llm):
    first = typed("hello")
    rates = r"accepted \d+/\d+ \(\d+ %\) \| draft [\d.]+ ms verify [\d.]+ ms"
    assert re.search(rates, first)
    assert "no speculation" in typed("/spec off")
    typed("/reset")
    again = typed("hello")
    assert "accepted" not in again and again.split("\n")[0] == first.split("\n")[0]
    assert "ngram, 7 nodes" in typed("/spec on")
    assert "needs a draft head" in typed("/spec 4")
    assert "/spec 10000000 is out of range" in typed("/spec 10000000")
    for word in ("often", "-1", "1.5", "²"):
        assert "wants on, off or a number" in typed(f"/spec {word}")
    head = random_head(llm.engine.model, rope_scaling=None, rope_base=10000.0)
    typed.chat.drafter = EagleDrafter(head, TreeShape(3, 3, 8))
    assert "eagle, 4 nodes" in typed("/spec 4")
    assert "/spec 0 is out of range: tree-nodes 0" in typed("/spec 0")
    assert "/spec 99 is out of range: tree-nodes 99 is more than" in typed("/spec 99")
    typed.chat.drafter = EagleDrafter(head, GatedChain(8))
    assert ", chains of 1 to 8" in typed("/spec on")  # as the line after loading says it


def test_tint_is_switched(typed):
    for command, answer in (
        ("/tint", "are tinted"),
        ("/tint", "are not tinted"),
        ("/tint on", "are tinted"),
        ("/tint off", "are not tinted"),
        ("/tint blue", "/tint wants on or off, got 'blue'"),
    ):
        assert answer in typed(command)


# What stands in the place of a part of a saved conversation, and why that is refused.
DEEP = ("[" * 100_000, "nested too deeply")
NO_TURNS = [{"role": "assistant", "content": "x"}]
UNREADABLE = [
    ({"think": "on"}, "is no saved conversation: think is 'on'"),
    ({"turns": NO_TURNS}, "turns do not alternate"),
    ({"turns": 3}, "is no saved conversation: turns 3 is no list"),
    ({"turns": ["hi"]}, "is no saved conversation: a turn is no JSON object: 'hi'"),
    ({"turns": [{"role": "user"}]}, "is no saved conversation: 'content' is missing"),
    ({"turns": [{"role": "user", "content": 3}]}, "content 3 is no text"),
    ({"system": 3}, "system 3 is no text"),
    ({"params": {"temperature": "hot"}}, "temperature 'hot' is not a number"),
    ({"params": {"heat": 1}}, "got an unexpected keyword argument 'heat'"),
    ({"answer": {"stop": 3}}, "stop 3 is no text"),
    ({"params": 3}, "params is no JSON object: 3"),
    ({"answer": None}, "answer is no JSON object: None"),
]


def test_save_and_load(typed, tmp_path):
    path = tmp_path / "talk.json"
    typed("/set temperature=0.7;seed=9;stop=no such,text")
    typed("hello")
    assert "saved 2 messages" in typed(f"/save {path}")
    typed("/reset")
    typed("/set seed=1")
    assert "loaded 2 messages" in typed(f"/load {path}")
    shown = typed("/show")
    assert "seed = 9" in shown and "stop = no such,text\n" in shown and "cached" in typed("more")
    os.mkfifo(tmp_path / "pipe")
    for command, message in (
        ("/save", "wants a file name"),
        (f"/save {tmp_path / 'pipe'}", "it is a pipe or a device: give a file's name"),
        ("/load /nowhere/x", "cannot read"),
        ("/load ~nobody-at-all/x", "~nobody-at-all/x: "),
        ("/save /proc/nowhere/x", "cannot write"),
    ):
        assert message in typed(command)
    saved = json.loads(path.read_text())
    path.write_text(json.dumps({**saved, "think": True}))
    typed(f"/load {path}")
    assert "think = default" in typed("/show")  # this model has no switch
    typed("more")
    for changed, reason in UNREADABLE:
        path.write_text(json.dumps({**saved, **changed}))
        assert reason in typed(f"/load {path}")
    for text, reason in (
        ("{}", "'turns' is missing"),
        ("[1]", "the file is no JSON object: [1]"),
        ("{", ""),
        DEEP,
    ):
        path.write_text(text)
        assert f"{path} is no saved conversation" in (shown := typed(f"/load {path}"))
        assert reason in shown
    assert "saved 4 messages" in typed(f"/save {path}")  # nothing was lost


def test_a_thought_is_kept_and_switched_with_its_conversation(typed, tmp_path, monkeypatch):
    path = tmp_path / "talk.json"
    monkeypatch.setattr(typed.chat.session.llm.tokenizer, "_template", THINKING_TEMPLATE)
    typed.chat.session.notify = print
    shown = typed("hello")
    assert "tokens ended inside the thought" in shown and "30 tok (cut at max-new-tokens)" in shown
    typed("/set think=off")
    assert "inside the thought" not in typed("again")
    typed(f"/save {path}")
    assert json.loads(path.read_text())["turns"][1]["content"].startswith("<think>")
    typed("/set think=default")
    typed(f"/load {path}")
    assert "think = off" in typed("/show")


def test_an_answer_that_is_stopped_before_its_first_token(typed, capsys):
    def stopped(came):
        try:
            yield from came
            raise KeyboardInterrupt
        finally:
            if came:
                typed.chat.session.turns.append({"role": "assistant", "content": "a"})

    nothing, something = ((), "nothing came yet"), ((Piece("a", False, False),), "stays in the")
    for came, said in (nothing, something, nothing):
        typed.chat._print(stopped(came))
        assert said in capsys.readouterr().out


def test_whole_numbers_of_a_file_may_become_others(typed, tmp_path):
    file = tmp_path / "talk.json"
    content = {"turns": [], "params": {"temperature": 1, "top_p": 1}, "answer": {}}
    file.write_text(json.dumps(content))
    assert "loaded" in typed(f"/load {file}")
    assert "temperature = 0.5" in typed("/set temperature=0.5; seed=4;") + typed("/show")
    assert "'0.5' is not a number (int)" in typed("/set seed=0.5")
    typed("/set temperature=0; seed=0")


# The history of lines


def test_lines_are_kept_for_the_next_chat(monkeypatch):
    readline = pytest.importorskip("readline")
    path = repl.state_dir() / "history"
    limits, files = [], []
    monkeypatch.setattr(readline, "set_history_length", limits.append)
    monkeypatch.setattr(readline, "read_history_file", files.append)
    repl._open_history()()
    assert limits == [repl.HISTORY_LENGTH] and files == [] and path.exists()
    repl._open_history()
    assert files == [path]


def test_a_history_that_cannot_be_written_is_said(monkeypatch, capsys):
    readline = pytest.importorskip("readline")

    error = OSError(28, "No space left on device")
    monkeypatch.setattr(readline, "write_history_file", raising(error))
    repl._open_history()()
    assert capsys.readouterr().err.startswith("history not saved: [Errno 28] No space left")
    repl.state_dir().rmdir()
    repl.state_dir().write_text("a file in the place of the folder")
    repl._open_history()()
    assert capsys.readouterr().err.startswith("history not kept: [Errno 17] File exists")


def test_without_readline_no_history_is_kept(monkeypatch):
    monkeypatch.setitem(sys.modules, "readline", None)
    repl._open_history()()
    assert not (repl.state_dir() / "history").exists()
