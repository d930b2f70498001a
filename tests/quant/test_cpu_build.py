"""Building the CPU kernels: once, by whoever comes first, and one line where it cannot be."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from fasteagle.errors import FasteagleError
from fasteagle.loading.open import has_cpu_kernels
from fasteagle.quant import cpu_build
from fasteagle.quant.cpu_build import BuildError

FASTEST = cpu_build.runnable()[0]
ANSWERS = 'case "$*" in *-E*) exit 0; esac\n'  # which flags it knows
TO_OUTPUT = 'while [ "$1" != "-o" ]; do shift; done\n'
CACHES = (cpu_build.compiler, cpu_build.why_no_compiler)


@pytest.fixture
def fake_compiler(monkeypatch, tmp_path):
    """A compiler that does what a script says; nothing is built or loaded before it."""

    def make(script: str) -> Path:
        path = tmp_path / "bin" / "c++"
        path.parent.mkdir(exist_ok=True)
        path.write_text("#!/bin/sh\n" + script)
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
        for cache in CACHES:
            cache.cache_clear()
        monkeypatch.setattr(cpu_build, "_loaded", {})
        return tmp_path / "cache" / "kernels"

    yield make
    monkeypatch.undo()
    for cache in CACHES:
        cache.cache_clear()


@pytest.mark.parametrize(
    ("script", "message", "left"),
    [
        ('echo "x.cpp:1: error: no such thing" >&2; exit 1\n', "failed: .*no such thing", ".lock"),
        ('echo "error: $(printf %900d 7)" >&2; exit 1\n', "^the compiler failed.{0,180}$", ".lock"),
        (TO_OUTPUT + 'head -c 5000 /dev/zero > "$2"\n', "Could not load this library", ".lock"),
    ],
    ids=["fails", "fails at length", "writes no library"],
)
def test_a_compiler_that_fails_is_quoted_in_one_line_and_leaves_nothing(
    fake_compiler, script, message, left, tmp_path
):
    folder = fake_compiler(f"echo once >> {tmp_path}/calls\n" + ANSWERS + script)
    notes: list[str] = []
    with pytest.raises(BuildError, match=message):
        cpu_build.load(notify=notes.append)
    assert "at most 5 minutes" in notes[0] and len(notes) == 1
    assert [path.suffix for path in folder.iterdir()] == [left]
    calls = (tmp_path / "calls").read_text()
    with pytest.raises(FasteagleError, match="-native in the precision: .*leave it out, or use"):
        cpu_build.available("native")
    reason = cpu_build.available("auto")
    assert reason and "\n" not in reason
    assert (tmp_path / "calls").read_text() == calls, "a failure is remembered"


def test_the_wait_for_the_compiler_is_a_remark(fake_compiler, capsys):
    """--quiet and the Python API leave remarks out; warnings they show."""
    fake_compiler("exit 1\n")
    notes: list[str] = []
    assert not has_cpu_kernels("auto", notes.append)
    (note,), (warning,) = notes, capsys.readouterr().err.splitlines()
    assert note.startswith("compiling the CPU kernels") and warning.startswith("warning: torch's")


def test_a_compiler_that_hangs_is_stopped_with_its_children(fake_compiler, monkeypatch, tmp_path):
    """As the driver g++ starts cc1plus."""
    fake_compiler(f"sleep 60 &\necho $! > {tmp_path}/child\nwait\n")
    monkeypatch.setattr(cpu_build, "TIME_LIMIT", 0.5)
    with pytest.raises(BuildError, match=r"took more than 0 s"):
        cpu_build.build(FASTEST)
    child = int((tmp_path / "child").read_text())
    for _ in range(100):  # its new parent may take a moment to reap it
        stat = Path(f"/proc/{child}/stat")
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    pytest.fail("the child lives on")


def test_a_compiler_that_never_answers_is_asked_once_and_not_for_long(
    fake_compiler, monkeypatch, tmp_path
):
    calls = tmp_path / "calls"
    fake_compiler(f"echo once >> {calls}\nsleep 60\n")
    monkeypatch.setattr(cpu_build, "runnable", lambda: [cpu_build.ISAS[-2]])
    monkeypatch.setattr(cpu_build, "PROBE_LIMIT", 0.5)
    begin, lines = time.monotonic(), []

    def notify(line):
        lines.append(line)
        assert not calls.exists(), "said before it is asked anything"

    for _ in range(2):
        assert cpu_build.available("auto", notify) == "the compiler took more than 0 s"
    assert time.monotonic() - begin < 5 and calls.read_text() == "once\n"
    assert len(lines) == 1 and lines[0].startswith("compiling the CPU kernels (once")


@pytest.mark.parametrize("gone", ["source", "compiler", "interpreter", "cache", "PATH"])
def test_what_is_missing_is_named_in_one_line(fake_compiler, monkeypatch, tmp_path, gone):
    fake_compiler("exit 0\n")
    path = cpu_build.compiler()
    if gone == "source":
        monkeypatch.setattr(cpu_build, "SOURCE", tmp_path / "gone.cpp")
        message = "No such file .*gone.cpp"
    elif gone == "compiler":
        Path(path).unlink()
        message = r"No such file .*bin/c\+\+"
    elif gone == "interpreter":
        Path(path).write_text("#!/nowhere/sh\n")
        message = r"No such file .*bin/c\+\+"
    elif gone == "cache":
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "inside"))
        message = "Not a directory: .*inside"
    else:
        monkeypatch.setenv("PATH", "/nowhere")
        monkeypatch.delenv("CXX")
        cpu_build.compiler.cache_clear()
        message = r"no C\+\+ compiler found \(install g\+\+\)"
    with pytest.raises(BuildError, match=message):
        cpu_build.load(FASTEST)


def test_two_at_once_compile_once(fake_compiler, tmp_path):
    script = f'echo once >> {tmp_path}/calls; sleep 0.3\n{TO_OUTPUT}echo made > "$2"\n'
    folder = fake_compiler(script)
    threads = [threading.Thread(target=cpu_build.build, args=(FASTEST,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "calls").read_text().split() == ["once"]
    assert cpu_build.build(FASTEST).read_text() == "made\n"
    for days in (29, 31):
        (folder / f"{days}.so").touch()
        os.utime(folder / f"{days}.so", times=(0, time.time() - days * 24 * 3600))
    os.utime(cpu_build.library_path(FASTEST), times=(0, 0))
    used, new = cpu_build.build(FASTEST), cpu_build.build(FASTEST, "another")
    assert {file.name for file in folder.glob("*.so")} == {"29.so", used.name, new.name}


def test_the_name_says_what_a_file_is_for(monkeypatch, tmp_path):
    """And what it was made of: the source, and the headers beside it."""
    paths = [cpu_build.library_path(FASTEST), cpu_build.library_path(FASTEST, "another")]
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    paths.append(cpu_build.library_path(FASTEST))
    monkeypatch.setattr(cpu_build, "SOURCE", tmp_path / "ops.cpp")
    for name in ("ops.cpp", "dot.h"):
        for text in ("old", "new"):
            (tmp_path / name).write_text(text)
            paths.append(cpu_build.library_path(FASTEST))
    assert len({*paths}) == 7


def test_cpu_and_compiler_decide_which_path_is_taken(fake_compiler, monkeypatch):
    """-mavxvnni came with GCC 11: an older one builds for AVX2."""
    able = dict.fromkeys(["avx2", "fma3"], True)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: able)
    monkeypatch.setattr(cpu_build, "load", lambda **_: None)
    assert [isa.name for isa in cpu_build.runnable()] == ["plain"]
    assert "no AVX2" in (cpu_build.available("auto") or "")  # nobody compared them with ATen's
    assert cpu_build.available("native") is None
    able |= {need: True for isa in cpu_build.ISAS for need in isa.needs}
    assert cpu_build.runnable()[0].name == "avx512-bf16"
    able["cpu_name"] = "Intel Xeon"
    assert [isa.level for isa in cpu_build.runnable()] == [4, 5, 3, 2, 1, 0], "bf16 is slow there"
    assert cpu_build.ISAS[0].flags[:4] == ("-mavx2", "-mfma", "-mf16c", "-mavx512f")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    folder = fake_compiler(
        'case "$*" in *-mavxvnni*) echo "error: unrecognized" >&2; exit 1; esac\n'
    )
    assert cpu_build.runnable()[0].name == "avx-vnni" and cpu_build.chosen().name == "avx2"
    folder.mkdir(parents=True)
    cpu_build.library_path(cpu_build.ISAS[3]).touch()
    assert cpu_build.chosen().name == "avx-vnni", "built already"
    cpu_build.library_path(cpu_build.ISAS[4]).touch()
    assert cpu_build.chosen().name == "avx-vnni", "the faster one of two"
