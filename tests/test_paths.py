"""Where things are kept, and writing that leaves nothing half done."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from fasteagle import paths
from fasteagle.errors import FasteagleError
from fasteagle.paths import (
    atomic_dir,
    cache_dir,
    compiled_dir,
    ensure_cache,
    replacing,
    write_atomic,
)
from helpers import raising


def test_atomic_writes(tmp_path, monkeypatch):
    write_atomic(tmp_path / "a", b"old")
    monkeypatch.setattr("fasteagle.paths.os.replace", lambda *a: (_ for _ in ()).throw(OSError(28)))
    with pytest.raises(OSError):
        write_atomic(tmp_path / "a", b"new")
    with pytest.raises(OSError), atomic_dir(tmp_path / "d") as folder:
        (folder / "x").write_text("1")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_bytes() == b"old"


def test_a_file_appears_with_the_usual_permissions(tmp_path):
    mask = os.umask(0o027)
    try:
        write_atomic(tmp_path / "a", b"new")
    finally:
        os.umask(mask)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("spelling", ["{}", "."])
def test_a_folder_appears_whole_with_the_usual_permissions(tmp_path, monkeypatch, spelling, there):
    target = tmp_path / "out"
    if there or spelling == ".":
        target.mkdir()
        target.chmod(0o755)
    monkeypatch.chdir(target if spelling == "." else tmp_path)
    mask = os.umask(0o022)
    try:
        with atomic_dir(Path(spelling.format(target))) as folder:
            for name in ("a.index.json", "b"):
                (folder / name).write_text(name)
            assert not (target / "b").exists()
    finally:
        assert os.umask(mask) == 0o022
    assert sorted(p.name for p in target.iterdir()) == ["a.index.json", "b"]
    assert target.stat().st_mode & 0o777 == 0o755
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    if spelling == ".":
        assert sorted(os.listdir(".")) == ["a.index.json", "b"], "a shell in it sees the files"


@pytest.mark.parametrize("existed", [False, True])
def test_a_result_is_not_thrown_away_in_silence(tmp_path, existed):
    """Something came to the target in the meantime; only the same in a cache is welcome."""
    target = tmp_path / "out"
    if existed:
        target.mkdir()
    with (
        pytest.raises(FasteagleError, match="out is there already and not empty"),
        atomic_dir(target) as folder,
    ):
        (folder / "x").write_text("ours")
        target.mkdir(exist_ok=True)
        (target / "x").write_text("theirs")
    with atomic_dir(target, shared=True) as folder:
        (folder / "x").write_text("ours")
    assert (target / "x").read_text() == "theirs"
    assert [p.name for p in tmp_path.rglob("*")] == ["out", "x"]
    (tmp_path / "link").symlink_to("nowhere")
    for there in (target, tmp_path / "link"):
        with pytest.raises(FasteagleError, match="not empty"), atomic_dir(there):
            pytest.fail("the work is not begun")


def test_an_empty_folder_that_cannot_be_written_is_no_place(tmp_path, monkeypatch):
    paths.require_place(tmp_path)
    read_only = OSError(errno.EROFS, "Read-only file system")
    monkeypatch.setattr(tempfile, "TemporaryFile", raising(read_only))
    with pytest.raises(FasteagleError, match=r"cannot write .* \(Read-only file system\): choose"):
        paths.require_place(tmp_path)


def test_another_process_may_be_faster_at_the_last_moment(tmp_path, monkeypatch):
    """It fills the target between the look at it and the rename."""
    target, replace = tmp_path / "out", os.replace

    def fill_and_replace(source, place):
        place.mkdir()
        (place / "x").write_text("theirs")
        replace(source, place)

    monkeypatch.setattr("fasteagle.paths.os.replace", fill_and_replace)
    with atomic_dir(target, shared=True) as folder:
        (folder / "x").write_text("ours")
    assert (target / "x").read_text() == "theirs"
    assert [p.name for p in tmp_path.rglob("*")] == ["out", "x"]


def test_an_index_comes_last_into_a_folder_that_is_there(tmp_path, monkeypatch):
    moved, replace = [], os.replace

    def replace_and_note(source, place):
        moved.append(place.name)
        replace(source, place)

    monkeypatch.setattr("fasteagle.paths.os.replace", replace_and_note)
    with atomic_dir(tmp_path) as folder:
        for name in ("model.index.json", "tensors"):
            (folder / name).write_text("")
    assert moved == ["tensors", "model.index.json"]


def test_folders_of_killed_runs_go_and_those_of_others_stay(tmp_path):
    code = f"""
from pathlib import Path
from fasteagle.paths import atomic_dir
with atomic_dir(Path({str(tmp_path / "out")!r})) as folder:
    (folder / "x").write_text("x" * 100)
    print(folder, flush=True)
    input()
"""
    user = tmp_path / ".out-original"
    user.mkdir()
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, text=True, stdin=-1, stdout=-1) as process:
        other = Path(process.stdout.readline().strip())
        with atomic_dir(tmp_path / "out", shared=True):
            assert (other / "x").exists()
        (tmp_path / "out").rmdir()
        process.kill()
    assert (other / "x").exists()
    with atomic_dir(tmp_path / "out") as folder:
        assert {p for p in tmp_path.iterdir()} == {user, folder}


def test_cache_follows_xdg(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "fasteagle"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "fasteagle"


def test_compiled_code_lies_where_a_person_said(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    own = tmp_path / "torchinductor_of_mine"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(own))
    assert compiled_dir() == own
    # torch writes its own default into the environment.
    default = f"{tempfile.gettempdir()}/torchinductor_somebody"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default)
    assert compiled_dir() == tmp_path / "fasteagle" / "inductor"


def test_compiled_code_of_other_instructions_lies_elsewhere(monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    usual = paths.compiled_dir()
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    assert paths.compiled_dir() != usual
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    assert paths.compiled_dir() == Path("/elsewhere")


def test_two_writers_of_one_file_do_not_meet(tmp_path):
    target = tmp_path / "features.safetensors"
    with replacing(target) as first:
        first.write_text("first, whole")
        with replacing(target) as second:
            second.write_text("sec")
        assert target.read_text() == "sec" and first.read_text() == "first, whole"
    assert target.read_text() == "first, whole" and list(tmp_path.iterdir()) == [target]


def test_a_place_that_is_only_checked_stays_as_it_was(tmp_path):
    paths.require_writable(tmp_path / "a" / "b" / "file")
    with paths.only_writer(tmp_path / "a" / "b"):
        pass
    assert list(tmp_path.iterdir()) == []
    with paths.only_writer(tmp_path / "a" / "b"):
        (tmp_path / "a" / "b" / "file").write_text("")
    (tmp_path / "empty").mkdir()
    with paths.only_writer(tmp_path / "empty"):
        pass
    assert (tmp_path / "empty").is_dir() and (tmp_path / "a" / "b" / "file").exists()
    with pytest.raises(FasteagleError, match="cannot write .*it is a folder: give"):
        paths.require_writable(tmp_path / "empty")
    os.mkfifo(tmp_path / "pipe")
    for device in (tmp_path / "pipe", Path(os.devnull)):
        with pytest.raises(FasteagleError, match="it is a pipe or a device: give a file's name"):
            paths.require_writable(device)


def test_one_process_writes_a_folder(tmp_path):
    out = tmp_path / "a" / "out"
    with paths.only_writer(out):
        refused = pytest.raises(FasteagleError, match="is being written by another process")
        with refused, paths.only_writer(out):
            pass
        with paths.only_writer(tmp_path / "other"):
            pass
    with paths.only_writer(out):
        pass


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors.index.json", "pytorch_model.bin", "a.gguf"]
)
def test_a_folder_of_a_model_is_no_place_for_other_files(tmp_path, name):
    (tmp_path / "text.jsonl").write_text("")
    paths.require_no_model(tmp_path)
    paths.require_no_model(tmp_path / "missing")
    (tmp_path / name).write_text("")
    with pytest.raises(FasteagleError, match=re.escape(f"({name}): give another --out")):
        paths.require_no_model(tmp_path)


def test_a_user_without_a_home_has_a_temporary_one_that_is_its_own(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", raising(RuntimeError("Could not determine home directory.")))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    usual = tmp_path / f"fasteagle-{os.getuid()}"
    for made in ("now", "before", "by its group", "by others", "a link", "of another user"):
        paths._temporary_home.cache_clear()
        if made.startswith("by "):
            usual.chmod(0o770 if made == "by its group" else 0o702)
        if made == "a link":
            usual.rmdir()
            usual.symlink_to(tmp_path)
        if made == "of another user":
            usual = tmp_path / f"fasteagle-{(other := os.getuid() + 1)}"
            monkeypatch.setattr(os, "getuid", lambda: other)
        is_own = made in ("now", "before")
        place = cache_dir()
        assert place.is_relative_to(usual) == is_own and place.is_relative_to(tmp_path), made
        assert cache_dir() == place and place.parents[1].stat().st_mode & 0o77 == 0
    paths._temporary_home.cache_clear()


def test_a_cache_is_made_at_the_first_start_and_found_at_the_next(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home" / "cache"))
    said = []
    for _ in range(2):
        ensure_cache(said.append)
        assert not said and cache_dir() == tmp_path / "home" / "cache" / "fasteagle"
        assert cache_dir().is_dir()


def test_a_part_of_the_cache_that_cannot_be_written(tmp_path, monkeypatch):
    """As after one run with sudo."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (cache_dir() / "tokenizers").mkdir(parents=True)
    for name in ("kept", "other"):
        (cache_dir() / "tokenizers" / name).write_text("x")
    real = tempfile.TemporaryFile

    def temporary(dir):
        if dir.name == "tokenizers":
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(dir=dir)

    monkeypatch.setattr(tempfile, "TemporaryFile", temporary)
    said = []
    ensure_cache(said.append)
    assert "nothing is kept" in said[0] and cache_dir().parent != tmp_path
    for name in ("kept", "other"):
        assert (cache_dir() / "tokenizers" / name).read_text() == "x"


@pytest.mark.parametrize("name", ["state.pt", "state[1].pt"])
def test_temporary_files_of_killed_runs_go(tmp_path, name):
    target = tmp_path / name
    old, other = (tmp_path / f".{name}-{end}.partial" for end in ("ab", "cd"))
    for place in (old, other):
        place.mkdir()
        (place / name).write_text("part")
    handle = os.open(other, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_SH)  # its process runs
    with replacing(target) as temporary:
        temporary.write_text("whole")
    os.close(handle)
    assert not old.exists() and other.exists() and target.read_text() == "whole"
