"""Every entrance and every drafter runs the one cycle, replayed where a device can.

The device is a fake on the CPU that replays; everything else is what users run.
"""

from __future__ import annotations

import builtins
from unittest import mock

import pytest
from click.testing import _NamedTextIOWrapper

from fasteagle.cli import chat
from fasteagle.compile import graphs
from fasteagle.decoding.backend import Backend
from fasteagle.decoding.runner import Runner
from fasteagle.loading import open as opening
from fasteagle.model import Target, Transformer
from helpers import invoke
from replaying import FakeGraphs


class Counts:
    passes = 0  # of the target that yield logits: prefill has none
    cycles = 0
    launched = 0
    unreplayed = 0


@pytest.fixture
def counts(monkeypatch):
    """Counts passes and cycles of a process whose device replays."""
    totals = Counts()
    forward, cycle, launch = Transformer.forward, graphs.decode_cycle, graphs.CapturedRunner.launch

    class Replaying(Backend):
        def runner(self, state):
            return graphs.CapturedRunner(self, state, FakeGraphs())

    def counted_forward(self, *args):
        totals.passes += 1
        return forward(self, *args)

    def counted_cycle(*args):
        totals.cycles += 1
        return cycle(*args)

    def counted_launch(self, *args):
        totals.launched += 1
        return launch(self, *args)

    def unreplayed(self, *args):
        totals.unreplayed += 1

    monkeypatch.setattr(opening, "choose_backend", lambda model, *rest: Replaying(Target(model)))
    monkeypatch.setattr(Transformer, "forward", counted_forward)
    monkeypatch.setattr(graphs, "decode_cycle", counted_cycle)
    monkeypatch.setattr(graphs.CapturedRunner, "launch", counted_launch)
    monkeypatch.setattr(Runner, "run", unreplayed)
    return totals


def prompt_option(run, monkeypatch):
    return run(["-p", "a question"])


def pipe(run, monkeypatch):
    return run([], input="a question")


def repl(run, monkeypatch):
    lines = iter(["a question", "another one", "/exit"])
    monkeypatch.setattr(builtins, "input", lambda prompt: next(lines))
    monkeypatch.setattr(_NamedTextIOWrapper, "isatty", lambda self: True, raising=False)
    return run(["--no-compile"])


def test_only_a_terminal_has_dim_thoughts(tiny_dir, monkeypatch):
    """What is written to a file while questions are typed has no codes."""
    styles = []
    monkeypatch.setattr(chat, "_question", lambda prompt: None)
    monkeypatch.setattr(
        chat, "Repl", lambda session, style, *rest: styles.append(style) or mock.Mock()
    )
    for on_terminal in (False, True):
        monkeypatch.setattr(_NamedTextIOWrapper, "isatty", lambda _, is_=on_terminal: is_)
        assert invoke("chat", "--model", tiny_dir, "--no-compile").exit_code == 0
    assert [(style.on_terminal, style.dims_thoughts) for style in styles] == [
        (False,) * 2,
        (True,) * 2,
    ]


@pytest.mark.parametrize(
    ("entrance", "drafter", "kind"),
    [
        (prompt_option, "none", None),
        (prompt_option, "eagle-static", "eagle1"),
        (prompt_option, "fused", "eagle3"),
        (pipe, "ngram", None),
        (pipe, "eagle", "eagle3"),
        (repl, "eagle-chain", "eagle3"),
        (repl, "fused", "eagle1"),
    ],
)
def test_chat_replays_every_pass(tiny_dir, head_dirs, counts, monkeypatch, entrance, drafter, kind):
    common = ["chat", "--model", tiny_dir, "--precision", "fp32", "--drafter", drafter]
    common += [*(["--head", head_dirs / kind] if kind else []), "--max-new-tokens", "12"]

    def run(more, **stdin):
        return invoke(*common, *more, **stdin)

    done = entrance(run, monkeypatch)
    assert done.exit_code == 0, done.stderr
    assert "warning" not in done.stderr and done.stdout.strip()
    assert counts.launched >= 3 and counts.unreplayed == 0
    assert counts.passes == counts.cycles > counts.launched  # capturing ran some as well


def test_the_benchmark_replays_every_row(tiny_dir, head_dirs, counts, script, questions):
    rows, head = "plain,eagle,fused,eagle-static,eagle-chain,ngram", head_dirs / "eagle3"
    common = ("--model", tiny_dir, "--head", head, "--precision", "fp32", "--no-compile")
    done = script(*common, "--rows", rows, "--data", questions, "--max-new-tokens", 8)
    assert done.exit_code == 0, done.stderr
    assert "without CUDA graphs" not in done.stderr
    assert counts.launched > 50 and counts.unreplayed == 0
    assert counts.passes == counts.cycles
