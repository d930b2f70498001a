"""The chat at a terminal, driven as a person's shell would."""

from __future__ import annotations

import importlib.util
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time

import pytest
from safetensors.torch import load_file, save_file

from fasteagle.paths import state_dir
from helpers import TINY_VOCAB, save_tiny

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
        end_of_match = re.search(pattern, self.screen).end()
        text, self.screen = self.screen[:end_of_match], self.screen[end_of_match:]
        return text

    def _terminal_reads_lines(self) -> bool:
        return bool(termios.tcgetattr(self.master)[3] & termios.ICANON)

    def shows(self, pattern: str, within: float) -> bool:
        """Return whether `pattern` is on the screen, or appears in so many seconds."""
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
    assert "no answer yet: ask" in terminal.ask("/stats")
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


def test_ctrl_c_stops_the_answer_and_keeps_it(tmp_path):
    """And a terminal that goes away ends the chat."""
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
    os.killpg(terminal.process.pid, signal.SIGHUP)
    assert terminal.close() == -signal.SIGHUP


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
