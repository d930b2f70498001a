"""The chat's commands, and the chat at a terminal, driven as a person's shell would."""

from __future__ import annotations

import importlib.util
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import termios
import time

import pytest
from safetensors.torch import load_file, save_file

import fasteagle
from fasteagle.cli import repl
from fasteagle.cli.markdown import Style
from fasteagle.cli.session import ChatSession
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.options import AnswerOptions, SamplingParams
from fasteagle.paths import state_dir
from fasteagle.shapes import TreeShape
from helpers import THINKING_TEMPLATE, TINY_VOCAB, random_head, save_tiny

READLINE = importlib.util.find_spec("readline") is not None
HANGS = 300  # seconds, after which a process will not answer on any machine


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


@pytest.fixture(scope="module")
def llm(tiny_dir):
    with fasteagle.load(str(tiny_dir), precision="fp32", drafter="ngram") as made:
        yield made


@pytest.fixture
def typed(llm, capsys):
    """Returns what a new chat shows for a line; `typed.chat` is the chat."""
    session = ChatSession(llm, SamplingParams(), AnswerOptions(max_new_tokens=30))
    chat = repl.Repl(session, Style(False, False, False), quiet=False, plain=True)

    def shown(line: str) -> str:
        assert not chat._handle(line)
        return "".join(capsys.readouterr())

    shown.chat = chat
    yield shown
    llm.engine.use(chat.drafter)


def test_commands(typed):
    assert "/retry" in typed("/help") and "Ctrl-C" in typed("/?")
    assert "no answer yet" in typed("/stats") or typed.chat.session.stats.new_tokens
    assert "nothing to retry" in typed("/retry")
    text = typed("/retyr")
    assert "no command '/retyr'; did you mean '/retry'" in text and "prefill" not in text
    assert "prefill" in typed("hello") and "prefill" in typed("/regen")
    assert typed("/metrics").count("tau") == 1
    assert "conversation forgotten" in typed("/reset")
    assert "nothing to retry" in typed("/retry")
    assert "model's own default" in typed("/system")
    typed("/system Be brief.")
    assert "Be brief." in typed("/system")


def test_setting_options(typed):
    typed("/set temperature=0.5;top-p=0.8;seed=23;max_new_tokens=3;stop=a,b")
    shown = typed("/show")
    for line in ("temperature = 0.5", "top_p = 0.8", "max_new_tokens = 3", "stop = a,b"):
        assert line in shown
    for bad, message in (
        ("/set temperature=-1;seed=1", "temperature -1"),
        ("/set top_q=1", "knows no 'top_q'"),
        ("/set greedy=1", "knows no 'greedy'"),
        ("/set seed=x", "'x' is not a number"),
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
    assert "wants on, off or a number" in typed("/spec often")
    head = random_head(llm.engine.model, rope_scaling=None, rope_base=10000.0)
    typed.chat.drafter = EagleDrafter(head, TreeShape(3, 3, 8), 512)
    assert "eagle, 4 nodes" in typed("/spec 4")
    assert "/spec 0 is out of range: tree-nodes 0" in typed("/spec 0")
    assert "/spec 99 is out of range: tree-nodes 99 is more than" in typed("/spec 99")


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
    ({"turns": 3}, "is no saved conversation: turns are no list of messages"),
    ({"turns": ["hi"]}, "is no saved conversation: turns are no list of messages"),
    ({"turns": [{"role": "user"}]}, "is no saved conversation: 'content' is missing"),
    ({"turns": [{"role": "user", "content": 3}]}, "content 3 is no text"),
    ({"system": 3}, "system 3 is no text"),
    ({"params": {"temperature": "hot"}}, "temperature 'hot' is not a number"),
    ({"params": {"heat": 1}}, "is no saved conversation: params knows no 'heat'"),
    ({"answer": {"stop": 3}}, "stop 3 is no text"),
    ({"answer": None}, "is no saved conversation: answer is no JSON object"),
]


def test_save_and_load(typed, tmp_path):
    path = tmp_path / "talk.json"
    typed("/set temperature=0.7;seed=9")
    typed("hello")
    assert "saved 2 messages" in typed(f"/save {path}")
    typed("/reset")
    typed("/set seed=1")
    assert "loaded 2 messages" in typed(f"/load {path}")
    assert "seed = 9" in typed("/show") and "cached" in typed("more")
    for command, message in (
        ("/save", "wants a file name"),
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
        ("[1]", "it is no JSON object"),
        ("{", ""),
        DEEP,
    ):
        path.write_text(text)
        assert f"{path} is no saved conversation" in (shown := typed(f"/load {path}"))
        assert reason in shown
    assert "saved 4 messages" in typed(f"/save {path}")  # nothing was lost


def test_too_long_a_question_leaves_the_conversation_as_it_was(typed):
    typed("hello")
    assert "shorten it" in typed("x" * 600)
    assert "prefill" in typed("short again") and len(typed.chat.session.turns) == 4


class Terminal:
    """`fasteagle chat` on a pseudo-terminal; stderr goes to the same screen."""

    def __init__(self, *args, env=None, before="") -> None:
        """`before` is run by the same process first."""
        self.master, slave = pty.openpty()
        code = f"{before}\nfrom fasteagle.cli.main import main\nmain()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, "chat", *map(str, args)],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=_own_terminal,
            env={**os.environ, "TERM": "dumb", **(env or {})},
        )
        os.close(slave)
        self.screen = ""

    def wait_for(self, pattern: str) -> str:
        """Read until `pattern` appears after what was read before; the text up to its end.

        A pattern that ends in a prompt also waits until that prompt reads keys itself: the terminal
        would echo those that come sooner, and the prompt appear a second time.
        """
        assert self.shows(pattern, HANGS), f"no {pattern!r} on the screen:\n{self.screen}"
        end = time.monotonic() + HANGS
        while pattern.endswith(" $") and READLINE and self._terminal_reads_lines():
            assert time.monotonic() < end, "the prompt does not read keys"
            time.sleep(0.01)
        end_of_match = re.search(pattern, self.screen).end()
        text, self.screen = self.screen[:end_of_match], self.screen[end_of_match:]
        return text

    def _terminal_reads_lines(self) -> bool:
        return bool(termios.tcgetattr(self.master)[3] & termios.ICANON)

    def shows(self, pattern: str, within: float) -> bool:
        """Whether `pattern` is on the screen, or appears in so many seconds."""
        end = time.monotonic() + within
        while not re.search(pattern, self.screen):
            left = end - time.monotonic()
            if left < 0:
                return False
            if select.select([self.master], [], [], left)[0]:
                try:
                    data = os.read(self.master, 65536)
                except OSError:
                    data = b""
                assert data, f"closed before {pattern!r}:\n{self.screen}"
                self.screen += data.decode("utf-8", "replace").replace("\r\n", "\n")
        return True

    def send(self, text: str) -> None:
        os.write(self.master, text.encode())

    def ask(self, line: str, until: str = ">>> $") -> str:
        self.send(line + "\n")
        return self.wait_for(until)

    def close(self) -> int:
        try:
            return self.process.wait(timeout=HANGS)
        finally:
            self.process.kill()
            os.close(self.master)


def _own_terminal() -> None:
    import fcntl

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    for name in (signal.SIGINT, signal.SIGHUP):  # ignored where tests run in the background
        signal.signal(name, signal.SIG_DFL)


def test_a_conversation(tiny_dir, tmp_path):
    terminal = Terminal("--model", tiny_dir, "--no-compile", "--max-new-tokens", 8)
    terminal.wait_for(">>> $")
    assert "no answer yet" in terminal.ask("/stats")
    first = terminal.ask("hello", r"prefill \d+ tok [\d.]+ s \| \d tok [^\n]*tau \d[^\n]*\n>>> $")
    assert "cached" not in first and re.search(r"tok/s \| tau \d\.\d\d", first)
    terminal.ask("and more", r"prefill \d+ tok \(\d+ cached\)[^\n]*\n>>> $")
    stats = terminal.ask("/stats")
    assert "tau 1.00" in stats and re.search(r"context \d+ of 512", stats)
    # Some versions of readline drop the wrong byte, others let it through, to be refused.
    os.write(terminal.master, b"caf\xe9\n")
    assert "Traceback" not in terminal.wait_for(">>> $")
    for line, prompt in (('"""first line', r"\.\.\. $"), ("/second line", r"\.\.\. $")):
        terminal.ask(line, prompt)
    terminal.ask('third"""', r"prefill[^\n]*\n>>> $")
    terminal.ask(f"/save {tmp_path / 'c.json'}")
    turns = json.loads((tmp_path / "c.json").read_text())["turns"]
    assert turns[-2]["content"] == "first line\n/second line\nthird"
    terminal.send("\x04")  # Ctrl-D
    assert terminal.close() == 0


def test_a_terminal_that_goes_away_ends_the_chat(tiny_dir):
    terminal = Terminal("--model", tiny_dir, "--no-compile")
    terminal.wait_for(">>> $")
    os.killpg(terminal.process.pid, signal.SIGHUP)
    assert terminal.close() == -signal.SIGHUP


def test_thoughts_are_dimmed_and_can_be_switched_off(tiny_dir, tmp_path):
    folder = shutil.copytree(tiny_dir, tmp_path / "model")
    (folder / "chat_template.jinja").write_text(THINKING_TEMPLATE)
    terminal = Terminal("--model", folder, "--no-compile", "--max-new-tokens", 8)
    terminal.wait_for(">>> $")
    shown = terminal.ask("hello")
    assert "\x1b[2m" in shown and "tokens ended inside the thought" in shown
    terminal.ask("/set think=off")
    assert "think = off" in terminal.ask("/show")
    assert "\x1b[2m" not in terminal.ask("again")
    terminal.ask(f"/save {tmp_path / 'c.json'}")
    saved = json.loads((tmp_path / "c.json").read_text())
    assert saved["think"] is False and saved["turns"][1]["content"].startswith("<think>")
    terminal.ask("/set think=default")
    terminal.ask(f"/load {tmp_path / 'c.json'}")
    assert "think = off" in terminal.ask("/show")
    terminal.send("/exit\n")
    assert terminal.close() == 0


def test_ctrl_c_stops_the_answer_and_keeps_it(tmp_path):
    terminal = Terminal(
        "--model", endless_model(tmp_path / "model"), "--no-compile", "--max-seq-len", 32768
    )
    terminal.wait_for(">>> $")
    terminal.ask("/set max_new_tokens=30000")
    terminal.send("hello\n")
    terminal.wait_for("hello\n.{4}")  # the answer has begun
    terminal.send("\x03")
    text = terminal.wait_for(">>> $")
    assert "[stopped; the part above stays" in text
    assert "finish stopped" in terminal.ask("/stats")
    terminal.ask(f"/save {tmp_path / 'c.json'}")
    turns = json.loads((tmp_path / "c.json").read_text())["turns"]
    assert [t["role"] for t in turns] == ["user", "assistant"] and turns[1]["content"]
    terminal.ask("/set max_new_tokens=5")
    assert "cached" in terminal.ask("go on", r"prefill[^\n]*\n>>> $")
    terminal.send("/exit\n")
    assert terminal.close() == 0


def endless_model(folder):
    """A model whose greedy answer goes on for minutes: it never says the end of a turn."""
    save_tiny(folder, max_position_embeddings=32768, num_hidden_layers=1)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][TINY_VOCAB - 1] = 0  # and of 259 other logits one is above 0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.slow
def test_history_is_kept_between_sessions(tiny_dir):
    for line in ("first question", "second question"):
        terminal = Terminal("--model", tiny_dir, "--no-compile", "--max-new-tokens", 2)
        terminal.wait_for(">>> $")
        terminal.ask(line)
        terminal.send("/exit\n")
        assert terminal.close() == 0
    lines = (state_dir() / "history").read_text().splitlines()
    assert lines == ["first question", "/exit", "second question", "/exit"]


ENDLESS = """
from fasteagle.compile.blocks import BlockCompiler
def compile_again_and_again(self, compile=BlockCompiler._warm_up):
    while True:
        compile(self)
BlockCompiler._warm_up = compile_again_and_again
"""


@pytest.mark.slow
def test_leaving_while_compilation_goes_on(tiny_dir):
    terminal = Terminal("--model", tiny_dir, "--max-new-tokens", 2, before=ENDLESS)
    terminal.wait_for(">>> $")
    assert "still compiling: this answer runs without" in terminal.ask("hello")
    terminal.send("/exit\n")
    assert terminal.close() == 0
