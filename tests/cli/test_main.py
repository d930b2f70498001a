"""The command line as a person meets it: help, one-shot answers, and every bad input."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import subprocess
import sys

import pytest
import torch

import fasteagle as fasteagle_package
from fasteagle.cli.command import UserPath
from fasteagle.cli.models import int4_bytes
from fasteagle.cli.options import Text
from fasteagle.errors import FasteagleError
from fasteagle.generate import Engine
from fasteagle.options import DEFAULT_MODEL
from helpers import invoke, raising


def fasteagle(*args, stdin=b"", **kwargs) -> subprocess.CompletedProcess:
    """Run the command in a process of its own."""
    arguments = [a if isinstance(a, bytes) else str(a) for a in args]
    command = [sys.executable, "-m", "fasteagle", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, timeout=120, **kwargs)


def assert_one_line(result, *parts) -> None:
    """Exit code 2, one line on stderr that starts with Error and holds `parts`, empty stdout."""
    lines = result.stderr.strip().splitlines()
    text = lines[-1]
    assert result.exit_code == 2, result.stderr
    assert text.startswith("Error: ") and "Traceback" not in result.stderr
    assert result.stdout == ""
    for part in parts:
        assert part in text


def test_help_is_quick_and_needs_no_torch():
    """Quick because nothing heavy is imported; the time itself is the machine's."""
    code = (
        "import sys\n"
        "from fasteagle.cli.main import main\n"
        "main(sys.argv[1:], standalone_mode=False)\n"
        "heavy = {'torch', 'torchao', 'transformers', 'numpy', 'gguf', 'safetensors', 'pydantic'}\n"
        "print('imported:', sorted(heavy & set(sys.modules)))"
    )
    for command, word in (((), "chat"), (("chat",), "--drafter"), (("calibrate-head",), "--data")):
        arguments = [sys.executable, "-c", code, *command, "--help"]
        done = subprocess.run(arguments, capture_output=True, text=True)
        assert done.returncode == 0 and word in done.stdout, done.stderr
        assert done.stdout.endswith("imported: []\n")


def test_answers_of_a_given_form(tiny_dir, tmp_path):
    def ask(*form):
        common = ("--model", tiny_dir, "-p", "x", "--quiet", "--precision", "fp32")
        return invoke("chat", *common, "--max-new-tokens", 40, *form)

    assert re.fullmatch("(yes|no)\n", ask("--regex", "yes|no").stdout)
    schema, lark = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text('{"enum": ["one", "two"]}')
    lark.write_text('start: "a" /[0-9]{3}/')
    assert ask("--json-schema", schema).stdout in ('"one"\n', '"two"\n')
    assert re.fullmatch("a[0-9]{3}\n", ask("--grammar", lark).stdout)


def test_models_names_all_draft_heads_first_the_one_by_default():
    lines = invoke("models").output.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("vicuna-13b"))
    assert "EAGLE-3 yuhuili/EAGLE3-Vicuna1.3-13B" in lines[at]
    assert lines[at + 1].strip() == "or EAGLE-1/2: --head yuhuili/EAGLE-Vicuna-13B-v1.3"


def test_models_say_the_default_and_the_parameters_that_a_token_reads():
    rows = [re.split(r"\s{2,}", line) for line in invoke("models").output.splitlines()]
    params = {row[0]: row[1] for row in rows if len(row) > 1}
    assert [name for name in params if "(default)" in name] == [f"{DEFAULT_MODEL} (default)"]
    assert params["llama2-7b"] == "6.74B" and params["mixtral-8x7b"] == "46.70B, 12.88B a token"
    here = {row[0]: row[5] for row in rows if len(row) > 6}
    assert here["llama2-70b"] == "shape only" and here["llama2-7b"] == "no"


def test_arguments_that_no_shell_has_read(monkeypatch, tmp_path):
    """The home folder after a `=`, and text in UTF-8 under a locale that has none."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert UserPath().convert("~/x", None, None) == tmp_path / "x"
    assert Text().convert("\udcc3\udca9", None, None) == "\u00e9"
    with pytest.raises(FasteagleError, match="the argument is not UTF-8: byte 0xff at offset 1"):
        Text().convert("a\udcff", None, None)


def test_memory_at_int4_counts_the_draft_head_and_the_cache():
    """At 4.25 bits a weight of a linear, with the embedding in 16 bits and the LM head in 8."""
    linears = 4 * 4096**2 + 3 * 4096 * 11008  # of one block
    weights = (33 * linears + 2 * 4096**2) * 17 // 32 + 32000 * 4096 * 3
    assert int4_bytes("llama2-7b") == weights + 2 * 33 * 4096 * 4096 * 2
    attention, mlp = 2560 * (32 + 8 + 8 + 32) * 128, 3 * 2560 * 9728
    linears = 37 * (attention + mlp) + 2560 * 48 * 128 + 3 * 2560**2  # EAGLE-3: QKV is wider
    weights = linears * 17 // 32 + 151936 * 2560 * 3 + 32000 * 2560
    assert int4_bytes("qwen3-4b") == weights + 2 * 37 * 8 * 128 * 4096 * 2


def test_one_shot_answer_is_alone_on_stdout(tiny_dir):
    arguments = ("chat", "--model", tiny_dir, "-p", "hello", "--max-new-tokens", 5)
    done = invoke(*arguments)
    assert done.exit_code == 0 and "prefill" in done.stderr and "tau 1.00" in done.stderr
    quiet = invoke(*arguments, "--quiet")
    assert quiet.stdout_bytes == done.stdout_bytes and quiet.stderr == ""
    assert len(done.stdout_bytes) > 1
    longer = invoke(*arguments, "--system", "Be brief.")
    sizes = [int(re.search(r"prefill (\d+) tok", each.stderr)[1]) for each in (done, longer)]
    assert sizes[1] - sizes[0] >= len("Be brief.")  # a token each


def test_one_shot_says_why_nothing_is_captured(tiny_dir, monkeypatch):
    def refused(engine, *rest):
        engine.runner.error = "operation not permitted"

    monkeypatch.setattr(Engine, "prepare", refused)
    result = invoke("chat", "--model", tiny_dir, "-p", "hello", "--max-new-tokens", 3)
    line = "warning: running without CUDA graphs: operation not permitted\n"
    assert result.exit_code == 0 and result.stderr.count(line) == 1


def test_prompt_from_standard_input(tiny_dir):
    arguments = ("chat", "--model", tiny_dir, "--max-new-tokens", 5, "--quiet")
    expected = invoke(*arguments, "-p", "grüß dich").stdout_bytes
    assert len(expected) > 1
    for more in ((), ("-p", "-")):
        assert invoke(*arguments, *more, input="grüß dich".encode()).stdout_bytes == expected


@pytest.mark.slow
def test_a_locale_without_utf8_still_prints(tiny_dir):
    env = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    arguments = ("chat", "--model", tiny_dir, "-p", "東京", "--max-new-tokens", 5)
    done = fasteagle(*arguments, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout == invoke(*arguments).stdout_bytes
    bad = fasteagle("chat", "--model", tiny_dir, "-p", b"caf\xe9", env=env)
    assert bad.returncode == 2 and b"--prompt is not UTF-8: byte 0xe9 at offset 3" in bad.stderr


def test_seed_is_drawn_and_printed_and_repeats(tiny_dir):
    arguments = ("chat", "--model", tiny_dir, "-p", "x", "--max-new-tokens", 20, "--temperature", 1)
    first, other = invoke(*arguments), invoke(*arguments)
    line = next(t for t in first.stderr.splitlines() if t.startswith("seed "))
    again = invoke(*arguments, "--seed", line.split()[1])
    assert again.stdout_bytes == first.stdout_bytes != other.stdout_bytes
    assert "seed" not in invoke("chat", "--model", tiny_dir, "-p", "x").stderr


def test_quantize_sets_threads_and_says_the_size_of_what_it_wrote(tiny_dir, tmp_path, monkeypatch):
    threads = []

    def write(folder, *rest):
        threads.append(torch.get_num_threads())
        with (folder / "weights").open("wb") as file:
            file.truncate(3 * 10**8)  # takes no room on the disk

    monkeypatch.setattr("fasteagle.cli.quantize.write_folder", write)
    out = tmp_path / "out"
    done = invoke("quantize", tiny_dir, "--int8", "--threads", 1, "-o", out)
    assert done.exit_code == 0 and threads == [1], done.output
    assert done.stderr.endswith(f"written to {out} (300 MB)\n")


def test_cuda_where_there_is_none(tiny_dir, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    result = invoke("chat", "--model", tiny_dir, "-p", "hi", "--device", "cuda")
    assert_one_line(result, "device 'cuda'", "0 CUDA devices found", "--device cpu")


@pytest.mark.parametrize(
    ("error", "parts"),
    [
        (OSError(errno.ENOSPC, "No space left", "/x/y"), ["disk full at /x/y", "XDG_CACHE_HOME"]),
        (OSError(errno.ENOSPC, "No space left", "/z"), ["at /z: free some space, or choose"]),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), ["disk full: free some space"]),
        (OSError(errno.EFBIG, "File too large"), ["limit of sizes here: raise it (ulimit -f)"]),
        (OSError(errno.EACCES, "Permission denied", "/x/y"), ["/x/y: Permission denied"]),
        (MemoryError(), ["out of memory: lower --max-seq-len"]),
        (RuntimeError("CUDA driver error: out of memory"), ["out of memory: lower --max-seq-len"]),
        (FasteagleError("as it was said"), ["as it was said"]),
    ],
)
def test_errors_from_below_become_one_line(tiny_dir, monkeypatch, error, parts):
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    monkeypatch.setattr("fasteagle.loading.open.open_checkpoint", raising(error))
    assert_one_line(invoke("chat", "--model", tiny_dir, "-p", "x"), *parts)


@pytest.mark.parametrize("kind", [AssertionError, RuntimeError])
def test_our_own_mistakes_keep_their_traceback(tiny_dir, monkeypatch, kind):
    monkeypatch.setattr("fasteagle.loading.open.open_checkpoint", raising(kind("a bug")))
    result = invoke("chat", "--model", tiny_dir, "-p", "x")
    assert isinstance(result.exception, kind)


def test_other_systems_are_told_so_in_one_line(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    assert_one_line(invoke("chat", "-p", "x"), "runs on Linux only, and this is win32: use WSL 2")
    with pytest.raises(FasteagleError, match="runs on Linux only"):
        fasteagle_package.load  # noqa: B018


def test_objects_are_collected_again_after_the_start():
    import gc

    from fasteagle.cli.command import uncollected

    with contextlib.suppress(ValueError), uncollected():
        assert not gc.isenabled()
        raise ValueError
    assert gc.isenabled()
    gc.unfreeze()


def test_one_answer_ends_while_something_is_still_prepared(tiny_dir, monkeypatch):
    """The interpreter's own end would abort in the thread that compiles or measures."""
    left = []

    class Busy:
        busy = True

        def __init__(self, *args) -> None: ...

        def wait_for_compiler(self, say) -> None: ...

        def answering(self, params):
            return contextlib.nullcontext()

    monkeypatch.setattr("fasteagle.llm.Preparation", Busy)
    monkeypatch.setattr("fasteagle.cli.chat.leave", lambda: left.append(True))
    model = ("--model", tiny_dir, "--no-spec", "--max-new-tokens", 4)
    done = invoke("chat", *model, "-p", "hi", "--compile")
    assert done.exit_code == 0 and left == [True], done.stderr
