"""Where things are kept, and writing that leaves nothing half done."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from fasteagle import paths
from fasteagle.paths import atomic_dir, cache_dir, compiled_dir, write_atomic


def test_atomic_writes(tmp_path, monkeypatch):
    write_atomic(tmp_path / "a", b"old")
    monkeypatch.setattr("fasteagle.paths.os.replace", lambda *a: (_ for _ in ()).throw(OSError(28)))
    with pytest.raises(OSError):
        write_atomic(tmp_path / "a", b"new")
    with pytest.raises(OSError), atomic_dir(tmp_path / "d") as folder:
        (folder / "x").write_text("1")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_bytes() == b"old"


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
