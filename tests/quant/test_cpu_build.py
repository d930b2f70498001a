"""Building the CPU kernels: once, by whoever comes first, and one line where it cannot be."""

from __future__ import annotations

import os
import platform
import signal
import stat
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from fasteagle.errors import FasteagleError
from fasteagle.quant import cpu_build
from fasteagle.quant.cpu_build import BuildError

FASTEST = cpu_build.runnable()[0]
ANSWERS = 'case "$*" in *--version*|*-E*) exit 0; esac\n'  # what it is, and which flags it knows


@pytest.fixture
def fake_compiler(monkeypatch, tmp_path):
    """A compiler that does what a script says; nothing is built or loaded before it."""

    def make(script: str) -> Path:
        path = tmp_path / "bin" / "c++"
        path.parent.mkdir(exist_ok=True)
        path.write_text("#!/bin/sh\n" + script)
        path.chmod(path.stat().st_mode | stat.S_IEXEC)
        monkeypatch.setenv("CXX", str(path))
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
        cpu_build.compiler.cache_clear()
        cpu_build.why_no_compiler.cache_clear()
        for results in ("_loaded", "_building"):
            monkeypatch.setattr(cpu_build, results, {})
        return tmp_path / "cache" / "kernels"

    yield make
    monkeypatch.undo()
    cpu_build.compiler.cache_clear()
    cpu_build.why_no_compiler.cache_clear()


def test_a_compiler_that_fails_is_quoted_in_one_line(fake_compiler):
    folder = fake_compiler(ANSWERS + 'echo "kernels.cpp:1: error: no such thing" >&2; exit 1\n')
    with pytest.raises(BuildError, match="the compiler failed: .*no such thing"):
        cpu_build.load()
    assert [path.suffix for path in folder.iterdir()] == [".lock"]
    with pytest.raises(FasteagleError, match="-native in the precision: .*leave it out, or use"):
        cpu_build.available("native")
    assert "no such thing" in (cpu_build.available("auto") or "")
    assert cpu_build.available("aten") is not None


def test_a_compiler_that_hangs_is_stopped_with_its_children(fake_compiler, monkeypatch, tmp_path):
    """As the driver g++ starts cc1plus."""
    fake_compiler(f"sleep 60 &\necho $! > {tmp_path}/child\nwait\n")
    monkeypatch.setattr(cpu_build, "TIME_LIMIT", 1.0)
    with pytest.raises(BuildError, match=r"took more than 1 s"):
        cpu_build.build(FASTEST)
    child = int((tmp_path / "child").read_text())
    for _ in range(100):  # its new parent may take a moment to reap it
        stat = Path(f"/proc/{child}/stat")
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    pytest.fail("the child lives on")


def test_a_compiler_that_never_answers_is_asked_once_and_not_for_long(fake_compiler, monkeypatch):
    fake_compiler("sleep 60\n")
    monkeypatch.setattr(cpu_build, "PROBE_LIMIT", 1.0)
    begin = time.monotonic()
    assert cpu_build.begin() and cpu_build.is_building()
    assert time.monotonic() - begin < 0.5, "a person is told at once"
    for _ in range(2):
        assert cpu_build.available("auto") == "the compiler took more than 1 s"
    assert time.monotonic() - begin < 5


def test_a_compiler_or_a_source_that_has_gone_is_one_line(fake_compiler, monkeypatch, tmp_path):
    fake_compiler("exit 0\n")
    monkeypatch.setattr(cpu_build, "SOURCE", tmp_path / "gone.cpp")
    with pytest.raises(BuildError, match=r"cannot read .*gone.cpp \(No such file"):
        cpu_build.load()
    assert not cpu_build.is_built()
    monkeypatch.undo()
    fake_compiler("exit 0\n")
    assert not cpu_build.is_built()  # which keeps the compiler's path
    (tmp_path / "bin" / "c++").unlink()
    assert not cpu_build.is_built()
    with pytest.raises(BuildError, match=r"cannot read .*c\+\+ \(No such file"):
        cpu_build.load()


def test_a_compiler_that_does_not_start_is_named(fake_compiler, tmp_path):
    fake_compiler("exit 0\n")
    (tmp_path / "bin" / "c++").write_text("#!/nowhere/sh\n")
    with pytest.raises(BuildError, match=r"cannot start .*bin/c\+\+ \(No such file"):
        cpu_build.build(FASTEST)


def test_flags_that_the_compiler_lacks_cost_a_path(fake_compiler, monkeypatch):
    """-mavxvnni came with GCC 11: an older one builds for AVX2."""
    everything = {need: True for isa in cpu_build.ISAS for need in isa.needs}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: everything)
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    fake_compiler('case "$*" in *-mavxvnni*) echo "error: unrecognized option" >&2; exit 1; esac\n')
    assert cpu_build.runnable()[0].name == "avx-vnni"
    assert cpu_build.chosen().name == "avx2"


def test_plain_loops_are_taken_only_where_they_are_asked_for(monkeypatch):
    """Nobody has compared them with ATen's kernels: on ARM, or on x86 without AVX2."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {})
    monkeypatch.setattr(cpu_build, "load", lambda: None)
    assert "no AVX2" in (cpu_build.available("auto") or "")
    assert cpu_build.available("native") is None


def test_a_build_in_the_background_is_waited_for_and_its_failure_remembered(
    fake_compiler, tmp_path
):
    fake_compiler(
        ANSWERS + f'echo once >> {tmp_path}/calls; sleep 0.5; echo "error: no" >&2; exit 1\n'
    )
    assert cpu_build.begin() and cpu_build.is_building()
    assert not cpu_build.begin()  # it has begun
    with pytest.raises(BuildError, match="the compiler failed: error: no"):
        cpu_build.load()
    calls = (tmp_path / "calls").read_text()
    with pytest.raises(BuildError, match="the compiler failed: error: no"):
        cpu_build.load()
    assert (tmp_path / "calls").read_text() == calls and not cpu_build.is_building()


def test_a_broken_file_is_not_kept(fake_compiler):
    folder = fake_compiler(
        'while [ "$1" != "-o" ]; do shift; done\nhead -c 5000 /dev/zero > "$2"\n'
    )
    with pytest.raises(BuildError, match="loading what the compiler wrote failed"):
        cpu_build.build(FASTEST)
    assert not list(folder.glob("*.so")) and not list(folder.glob("*.tmp"))


def test_no_compiler(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    cpu_build.compiler.cache_clear()
    try:
        with pytest.raises(BuildError, match=r"install g\+\+"):
            cpu_build.library_path(FASTEST)
        assert not cpu_build.is_built()
    finally:
        cpu_build.compiler.cache_clear()


@pytest.mark.skipif(os.geteuid() == 0 and not sys.platform.startswith("linux"), reason="root")
def test_a_cache_that_cannot_be_written(fake_compiler, monkeypatch, tmp_path):
    fake_compiler("exit 0\n")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "inside"))
    with pytest.raises(BuildError, match="cannot write"):
        cpu_build.build(FASTEST)


def test_two_at_once_compile_once(fake_compiler, monkeypatch, tmp_path):
    fake_compiler(
        f"echo once >> {tmp_path}/calls; sleep 0.3\n"
        'while [ "$1" != "-o" ]; do shift; done\necho made > "$2"\n'
    )
    run = cpu_build._run
    monkeypatch.setattr(
        cpu_build, "_run", lambda command, what, _: what == "the compiler" and run(command, what, 9)
    )
    threads = [threading.Thread(target=cpu_build.build, args=(FASTEST,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "calls").read_text().split() == ["once"]
    assert cpu_build.build(FASTEST).read_text() == "made\n"


def test_the_name_says_what_a_file_is_for(monkeypatch):
    first = cpu_build.library_path(FASTEST)
    assert first != cpu_build.library_path(cpu_build.ISAS[-1])
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    assert first != cpu_build.library_path(FASTEST)


def test_the_cpu_decides_which_path_is_taken(monkeypatch):
    names = [isa.name for isa in cpu_build.runnable()]
    assert names[-1] == "plain"
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "fma3": True})
    assert [isa.name for isa in cpu_build.runnable()] == ["plain"]
    everything = {need: True for isa in cpu_build.ISAS for need in isa.needs}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: everything)
    assert cpu_build.runnable()[0].name == "avx512-vnni"
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    assert cpu_build.runnable()[0].name == "avx-vnni"
