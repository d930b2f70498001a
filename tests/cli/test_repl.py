"""The chat at a terminal, driven through a pseudo-terminal as a person's shell would."""

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

from fasteagle.cli import repl
from fasteagle.paths import state_dir
from helpers import THINKING_TEMPLATE, TINY_VOCAB, save_tiny

READLINE = importlib.util.find_spec("readline") is not None
HANGS = 300  # seconds, after which a process will not answer on any machine


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
        found = re.search(pattern, self.screen)
        text, self.screen = self.screen[: found.end()], self.screen[found.end() :]
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


@pytest.fixture(scope="module")
def shared(tiny_dir, tmp_path_factory):
    """One chat for all tests that leave it at its prompt."""
    state = tmp_path_factory.mktemp("state")
    made = Terminal("--model", tiny_dir, "--no-compile", env={"XDG_STATE_HOME": str(state)})
    made.wait_for(">>> $")
    yield made
    made.send("/exit\n")
    assert made.close() == 0


@pytest.fixture
def terminal(shared):
    """The shared chat as if just begun."""
    shared.ask("/set temperature=0;top_p=1;seed=0;max_new_tokens=8;stop=")
    shared.ask("/reset")
    return shared


@pytest.fixture
def own_terminal(tiny_dir):
    """A chat that the test may end."""
    made = Terminal("--model", tiny_dir, "--no-compile", "--max-new-tokens", 8)
    made.wait_for(">>> $")
    yield made
    if made.process.poll() is None:
        made.process.kill()


def test_a_conversation(own_terminal):
    terminal = own_terminal
    assert "no answer yet" in terminal.ask("/stats")
    first = terminal.ask("hello", r"prefill \d+ tok [\d.]+ s \| \d tok [^\n]*tau \d[^\n]*\n>>> $")
    assert "cached" not in first and re.search(r"tok/s \| tau \d\.\d\d", first)
    terminal.ask("and more", r"prefill \d+ tok \(\d+ cached\)[^\n]*\n>>> $")
    stats = terminal.ask("/stats")
    assert "tau 1.00" in stats and re.search(r"context \d+ of 512", stats)
    assert terminal.ask("/metrics").count("tau") == 1
    terminal.send("\x04")  # Ctrl-D
    assert terminal.close() == 0


@pytest.mark.parametrize("leave", ["/exit", "/bye", "/quit"])
def test_leaving(monkeypatch, leave):
    lines = ["/help", leave]
    monkeypatch.setattr(repl.Repl, "_read", lambda self: lines.pop())
    repl.Repl.run(object.__new__(repl.Repl))
    assert lines == ["/help"]


def test_commands(own_terminal):
    terminal = own_terminal
    assert "/retry" in terminal.ask("/help") and "Ctrl-C" in terminal.ask("/?")
    assert "no answer yet" in terminal.ask("/stats")
    assert "nothing to retry" in terminal.ask("/retry")
    terminal.ask("hello")
    terminal.ask("/regen", r"prefill[^\n]*\n>>> $")
    assert "conversation forgotten" in terminal.ask("/reset")
    assert "nothing to retry" in terminal.ask("/retry")
    assert "model's own default" in terminal.ask("/system")
    terminal.ask("/system Be brief.")
    assert "Be brief." in terminal.ask("/system")


def test_unknown_command_is_not_sent_to_the_model(terminal):
    text = terminal.ask("/retyr")
    assert "no command '/retyr'; did you mean '/retry'" in text and "prefill" not in text
    assert "nothing to retry" in terminal.ask("/retry")


def test_setting_options(terminal):
    terminal.ask("/set temperature=0.5;top-p=0.8;seed=23;max_new_tokens=3;stop=a,b")
    shown = terminal.ask("/show")
    for line in (
        "temperature = 0.5",
        "top_p = 0.8",
        "seed = 23",
        "max_new_tokens = 3",
        "stop = a,b",
    ):
        assert line in shown
    for bad, message in (
        ("/set temperature=-1;seed=1", "temperature -1"),
        ("/set top_q=1", "knows no 'top_q'"),
        ("/set seed=x", "'x' is not a number"),
        ("/set seed", "wants key=value"),
        ("/set max_new_tokens=0", "max-new-tokens 0"),
        ("/set think=maybe", "'maybe' is unknown: use on, off, default"),
        ("/set seed=1;think=on", "think on: this model's chat template has no thinking switch"),
    ):
        assert message in terminal.ask(bad)
    assert "seed = 23" in terminal.ask("/show")  # nothing of a wrong line takes effect


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


def test_several_lines_make_one_question(terminal, tmp_path):
    terminal.send('"""first line\n')
    terminal.wait_for(r"\.\.\. $")
    terminal.send("/second line\n")
    terminal.wait_for(r"\.\.\. $")
    terminal.ask('third"""', r"prefill[^\n]*\n>>> $")
    terminal.ask(f"/save {tmp_path / 'c.json'}")
    turns = json.loads((tmp_path / "c.json").read_text())["turns"]
    assert turns[0]["content"] == "first line\n/second line\nthird"


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


def test_ctrl_c_at_an_empty_prompt(own_terminal):
    terminal = own_terminal
    # CPython's `input` misses a signal between showing the prompt and waiting for a key.
    hint = "Ctrl-D or /exit to leave\n>>> $"
    for _ in range(100):
        terminal.send("\x03")
        if terminal.shows(hint, within=0.2):
            break
    else:
        terminal.wait_for(hint)
    terminal.send("/exit\n")
    assert terminal.close() == 0


def test_ctrl_c_in_a_command_ends_the_command_only(monkeypatch, capsys):
    lines = ["/stats", "/save x"]
    handled = []

    def read(self):
        if not lines:
            raise EOFError
        return lines.pop()

    def handle(self, line):
        handled.append(line)
        if line == "/save x":
            raise KeyboardInterrupt

    monkeypatch.setattr(repl.Repl, "_handle", handle)
    monkeypatch.setattr(repl.Repl, "_read", read)
    repl.Repl.run(object.__new__(repl.Repl))
    assert handled == ["/save x", "/stats"] and "[stopped]" in capsys.readouterr().out


def test_save_and_load(terminal, tmp_path):
    path = tmp_path / "talk.json"
    terminal.ask("/set temperature=0.7;seed=9")
    terminal.ask("hello")
    assert "saved 2 messages" in terminal.ask(f"/save {path}")
    terminal.ask("/reset")
    terminal.ask("/set seed=1")
    assert "loaded 2 messages" in terminal.ask(f"/load {path}")
    assert "seed = 9" in terminal.ask("/show")
    assert "cached" in terminal.ask("more", r"prefill[^\n]*\n>>> $")
    assert "wants a file name" in terminal.ask("/save")
    assert "cannot read" in terminal.ask("/load /nowhere/x")
    assert "cannot write" in terminal.ask("/save /proc/nowhere/x")
    saved = json.loads(path.read_text())
    path.write_text(json.dumps({**saved, "think": True}))
    terminal.ask(f"/load {path}")
    assert "think = default" in terminal.ask("/show")  # this model has no switch
    terminal.ask("more")
    path.write_text(json.dumps({**saved, "think": "on"}))
    assert "is no saved conversation (think is 'on')" in terminal.ask(f"/load {path}")
    path.write_text('{"turns": [{"role": "assistant", "content": "x"}]}')
    assert "is no saved conversation" in terminal.ask(f"/load {path}")
    for text, reason in (("{}", "'turns' is missing"), ("[1]", "it is no JSON object")):
        path.write_text(text)
        assert reason in terminal.ask(f"/load {path}")
    assert "saved 4 messages" in terminal.ask(f"/save {path}")  # nothing was lost


def test_a_line_that_is_not_utf8_costs_at_most_that_line(terminal):
    """Some versions of readline drop the wrong byte, others let it through, to be refused."""
    os.write(terminal.master, b"caf\xe9\n")
    assert "Traceback" not in terminal.wait_for(">>> $")
    assert "/retry" in terminal.ask("/help")


def test_a_line_that_is_not_utf8_is_not_sent(monkeypatch, capsys):
    lines = [b"/stats", b"caf\xe9"]
    handled = []

    def read(self):
        if not lines:
            raise EOFError
        return lines.pop().decode()

    monkeypatch.setattr(repl.Repl, "_handle", lambda self, line: handled.append(line))
    monkeypatch.setattr(repl.Repl, "_read", read)
    repl.Repl.run(object.__new__(repl.Repl))
    assert handled == ["/stats"]
    assert "that line is not UTF-8 (unexpected end of data): not sent" in capsys.readouterr().err


def test_an_empty_line_is_nothing(terminal):
    assert "prefill" not in terminal.ask("")


def test_too_long_a_question_leaves_the_conversation_as_it_was(terminal):
    terminal.ask("hello")
    terminal.send('"""' + "x" * 300 + "\n")
    terminal.wait_for(r"\.\.\. $")
    assert "shorten it" in terminal.ask("y" * 300 + '"""')
    assert "prefill" in terminal.ask("short again", r"prefill[^\n]*\n>>> $")


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


def test_a_terminal_that_goes_away_ends_the_chat(own_terminal):
    os.killpg(own_terminal.process.pid, signal.SIGHUP)
    assert own_terminal.close() == -signal.SIGHUP


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


@pytest.mark.slow
def test_switching_speculation(tiny_dir):
    terminal = Terminal(
        "--model", tiny_dir, "--no-compile", "--max-new-tokens", 80, "--drafter", "ngram"
    )
    terminal.wait_for(">>> $")
    first = terminal.ask("hello", r"prefill[^\n]*\n>>> $")
    assert re.search(r"accepted \d+/\d+ \(\d+ %\) \| draft [\d.]+ ms verify [\d.]+ ms", first)
    assert "no speculation" in terminal.ask("/spec off")
    terminal.ask("/reset")
    again = terminal.ask("hello", r"prefill[^\n]*\n>>> $")
    assert "accepted" not in again
    assert again.split("\n")[1] == first.split("\n")[1]  # the same answer
    assert "ngram, 7 nodes" in terminal.ask("/spec on")
    assert "needs a draft head" in terminal.ask("/spec 4")
    assert "/spec 10000000 is out of range" in terminal.ask("/spec 10000000")
    assert "wants on, off or a number" in terminal.ask("/spec often")
    terminal.send("/exit\n")
    assert terminal.close() == 0


def test_tint_is_switched(shared):
    for command, answer in (
        ("/tint", "are tinted"),
        ("/tint", "are not tinted"),
        ("/tint on", "are tinted"),
        ("/tint off", "are not tinted"),
        ("/tint blue", "/tint wants on or off, got 'blue'"),
    ):
        assert answer in shared.ask(command)
