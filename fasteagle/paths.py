"""Folders of fasteagle on this machine, and atomic writing of files."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import glob
import json
import os
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fasteagle.errors import FasteagleError, first_line, note, reason_of, size_of

PARTIAL = ".partial"  # ending of temporary folders
UNUSED_SECONDS = 30 * 86_400.0  # see `remove_unused`


def home() -> Path:
    """Return the user's home folder; a temporary one for a user without, as in some containers."""
    try:
        return Path.home()
    except RuntimeError:
        return _temporary_home()


@functools.cache
def _temporary_home() -> Path:
    """Return a folder that this user alone can write: code is loaded from it."""
    place = Path(tempfile.gettempdir(), f"fasteagle-{os.getuid()}")
    with contextlib.suppress(OSError):
        place.mkdir(mode=0o700, exist_ok=True)
        status = place.lstat()
        is_own = status.st_uid == os.getuid() and not status.st_mode & 0o22
        if stat.S_ISDIR(status.st_mode) and is_own:
            return place
    other = Path(tempfile.mkdtemp(prefix="fasteagle-home-"))
    atexit.register(shutil.rmtree, other, ignore_errors=True)
    return other


def cache_dir() -> Path:
    """Return the XDG cache folder: models, compiled code, other files that can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or home() / ".cache") / "fasteagle"


def ensure_cache(notify: Callable[[str], None]) -> None:
    """Make `cache_dir` writable; if it is not, use a temporary one that links to its files."""
    cache = place = cache_dir()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        # Models are fetched seldom, and may lie where nothing is written.
        parts = [entry for entry in cache.iterdir() if entry.is_dir() and entry.name != "models"]
        for place in (cache, *parts):
            with tempfile.TemporaryFile(dir=place):
                pass
        return
    except OSError as error:
        reason = error.strerror
    other = Path(tempfile.mkdtemp(prefix="fasteagle-cache-"))
    atexit.register(shutil.rmtree, other, ignore_errors=True)
    for entry in cache.glob("*/*"):
        part = other / "fasteagle" / entry.parent.name
        part.mkdir(parents=True, exist_ok=True)
        (part / entry.name).symlink_to(entry)
    os.environ["XDG_CACHE_HOME"] = str(other)
    notify(f"warning: nothing is kept for the next start: cannot write {place} ({reason})")


def compiled_dir() -> Path:
    """Return the folder of compiled code, in the user cache unless the user named another one.

    Inductor reads its folder from the environment, and writes a default there on import. Its cache
    keys do not contain ATEN_CPU_CAPABILITY: code cached for AVX-512 gave wrong numbers under AVX2.
    So each capability has a folder of its own.
    """
    named = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    default = f"{tempfile.gettempdir()}/torchinductor_"
    if named is None or named.startswith(default):
        limit = os.environ.get("ATEN_CPU_CAPABILITY")
        return cache_dir() / (f"inductor-{limit}" if limit else "inductor")
    return Path(named)


def state_dir() -> Path:
    """Return the XDG state folder, of the chat history file."""
    return Path(os.environ.get("XDG_STATE_HOME") or home() / ".local/state") / "fasteagle"


def costs_path(identity: str, scheme: str, drafter: str) -> Path:
    """Return the file of measured costs of a model (by fingerprint), scheme and drafter."""
    return cache_dir() / "tuner" / f"{identity[:32]}-{scheme}-{drafter}.json"


def checkout_commit() -> str | None:
    """Return the commit of this file's checkout, marked if it was changed; None outside one."""
    command = ["git", "-C", str(Path(__file__).resolve().parent), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def require_free_space(folder: Path, n_bytes: int, what: str) -> None:
    """Raise `FasteagleError` unless the disk that holds `folder` has `n_bytes` left."""
    existing = folder
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < n_bytes:
        raise FasteagleError(
            f"{what} needs {size_of(n_bytes)} on disk, {size_of(free)} free "
            f"at {existing}: {more_space(existing)}"
        )


def more_space(place: Path) -> str:
    """Return what to do where the disk of `place` is full."""
    in_cache = place.absolute().is_relative_to(cache_dir().parent)
    other = "set XDG_CACHE_HOME to another disk" if in_cache else "choose another place"
    return f"free some space, or {other}"


def require_readable(file: Path) -> None:
    """Raise `FasteagleError` for a file that cannot be read, as another user's."""
    try:
        with file.open("rb") as opened:
            opened.read(1)
    except OSError as error:
        raise FasteagleError(f"{file}: cannot be read ({error.strerror})") from error


def require_no_pipe(path: Path) -> None:
    """Raise `FasteagleError` for a pipe or device at `path` or in that folder."""
    for file in (path, *(path.iterdir() if path.is_dir() else ())):
        if file.exists() and not (file.is_file() or file.is_dir()):  # opening it may not return
            raise FasteagleError(f"{file} is a pipe or a device: give a file")


def require_writable(target: Path) -> None:
    """Raise `FasteagleError` unless a file can be written at `target`, whose folder may be missing.

    Called before a long run, whose result would otherwise be lost at its end.
    """
    try:
        if target.exists() and not target.is_file():  # a device would be replaced by a file
            kind = "folder" if target.is_dir() else "pipe or a device"
            raise FasteagleError(f"cannot write {target}: it is a {kind}: give a file's name")
        with _folder(target.parent), tempfile.TemporaryFile(dir=target.parent):
            pass
    except OSError as error:
        raise FasteagleError(
            f"cannot write {target} ({error.strerror}): choose another place"
        ) from error


@contextlib.contextmanager
def _folder(folder: Path) -> Iterator[None]:
    """Make a folder; after the block inside remove what was made and is empty."""
    missing = [part for part in (folder, *folder.parents) if not os.path.lexists(part)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        with contextlib.suppress(OSError):
            for part in missing:
                part.rmdir()


def require_place(target: Path) -> None:
    """Raise `FasteagleError` unless `target` is an empty folder or a name that can be written."""
    _require_empty(target)
    require_writable(target / "config.json" if target.exists() else target)


@contextlib.contextmanager
def atomic_dir(target: Path, *, shared: bool = False) -> Iterator[Path]:
    """Yield a temporary folder that becomes `target` on success and is removed otherwise.

    An empty folder at `target` is filled: it may be a mount, or where a shell is. Raises
    `FasteagleError` for anything else there, but if `shared`, as caches are, another process that
    was faster has made the same.
    """
    target = Path(os.path.abspath(target))  # "." has neither a name nor a parent
    fills = not shared and target.is_dir()
    with _temporary(target if fills else target.parent, target.name) as temporary:
        if not shared:
            _require_empty(target, temporary)
        yield temporary
        _flush(temporary)
        if shared and _is_filled(target):
            return
        if not shared:
            _require_empty(target, temporary)
        if fills:
            # An index last: with it a folder is complete.
            parts = sorted(temporary.iterdir(), key=lambda part: part.name.endswith(".index.json"))
            for part in parts:
                os.replace(part, target / part.name)
        else:
            temporary.chmod(0o777 & ~_umask())  # temporary folders are private
            try:
                os.replace(temporary, target)
            except OSError:
                if not (shared and _is_filled(target)):
                    raise


def _is_filled(target: Path) -> bool:
    """Return whether a folder with files is there, as of a process that was faster."""
    return target.is_dir() and any(target.iterdir())


def _require_empty(target: Path, temporary: Path | None = None) -> None:
    """Raise `FasteagleError` for anything at `target` but an empty folder, `temporary` aside."""
    if not os.path.lexists(target):  # a link to nothing is there, and cannot be replaced
        return
    if not target.is_dir() or any(entry != temporary for entry in target.iterdir()):
        raise FasteagleError(f"{target} is there already and not empty: choose another place")


@contextlib.contextmanager
def _temporary(place: Path, name: str) -> Iterator[Path]:
    """Yield a new folder in `place`, locked so that other processes leave it, and remove it.

    Those of processes that were killed go first.
    """
    place.mkdir(parents=True, exist_ok=True)
    for old in place.glob(f".{glob.escape(name)}-*{PARTIAL}"):
        with contextlib.suppress(OSError), _locked(old, fcntl.LOCK_EX | fcntl.LOCK_NB):
            shutil.rmtree(old)
    with contextlib.ExitStack() as stack:
        while True:
            temporary = Path(tempfile.mkdtemp(prefix=f".{name}-", suffix=PARTIAL, dir=place))
            stack.callback(shutil.rmtree, temporary, ignore_errors=True)
            with contextlib.suppress(OSError):  # file systems without locks keep what was killed
                stack.enter_context(_locked(temporary, fcntl.LOCK_SH))
            if temporary.exists():  # else another process took it for an old one
                break
        yield temporary


def remove_damaged(folder: Path) -> None:
    """Remove a folder of the cache, which another process may make again at the same time."""
    with contextlib.suppress(OSError), _temporary(folder.parent, folder.name) as place:
        folder.replace(place / folder.name)


def mark_used(path: Path) -> None:
    """Mark a part of the cache as used for `remove_unused`."""
    with contextlib.suppress(OSError):  # of another user, for example
        os.utime(path)


def remove_unused(path: Path, notify: Callable[[str], None]) -> None:
    """Remove parts of the cache of the kind of `path`, beside it, not used for 30 days."""
    limit = time.time() - UNUSED_SECONDS
    for old in path.parent.glob(f"[!.]*{path.suffix}"):  # others are being written
        with contextlib.suppress(OSError):
            if not old.is_symlink() and old.stat().st_mtime < limit:
                notify(f"removing {old}: not used for 30 days")
                shutil.rmtree(old) if old.is_dir() else old.unlink()


@contextlib.contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Make a folder that no other process writes meanwhile; raise `FasteagleError` where one does.

    A file system without locks has none. The folder is removed again where nothing was written.
    """
    with contextlib.ExitStack() as stack, _folder(folder):
        handle = os.open(folder, os.O_RDONLY)
        stack.callback(os.close, handle)
        lock_alone(handle, folder)
        yield


def lock_alone(handle: int, path: Path) -> None:
    """Keep other processes from writing to an open file or folder, until it is closed.

    Raises `FasteagleError` where one does.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise FasteagleError(
            f"{path} is being written by another process: wait for it, or give another --out"
        ) from error
    except OSError:  # a file system without locks
        pass


def require_no_model(folder: Path) -> None:
    """Raise `FasteagleError` where a folder holds weights or a config."""
    for kind in ("config.json", "*.safetensors*", "*.bin", "*.gguf"):
        if file := next(folder.glob(kind), None):
            raise FasteagleError(
                f"{folder} holds a model or a head ({file.name}): give another --out"
            )


@contextlib.contextmanager
def _locked(folder: Path, kind: int) -> Iterator[None]:
    """Lock a folder as `fcntl.flock` does; may raise `OSError`."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, kind)
        yield
    finally:
        os.close(handle)


def _flush(folder: Path) -> None:
    """Write a folder to the disk: a loss of power after its rename leaves no part of it."""
    for path in (*folder.rglob("*"), folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a temporary path for a library to write; on success it replaces `target`.

    Libraries report a full disk in different ways: here any failure to write raises
    `FasteagleError`, and the old file stays.
    """
    try:
        with _temporary(target.parent, target.name) as folder:
            yield folder / target.name
            os.replace(folder / target.name, target)
    except Exception as error:
        reason = first_line(error, 160)
        raise FasteagleError(
            f"cannot write {target} ({reason}): free some space; what was there is kept"
        ) from error


def write_json(target: Path, value: Any) -> None:
    """Write a JSON file, completely or not at all; values that JSON has not become texts."""
    with replacing(target) as temporary:
        temporary.write_text(json.dumps(value, indent=1, default=str) + "\n")


def write_atomic(target: Path, data: bytes) -> None:
    """Write `data` to `target` so that readers see the old file or the new one, never a part."""
    with _temporary(target.parent, target.name) as folder:
        (folder / target.name).write_bytes(data)
        os.replace(folder / target.name, target)


def keep(target: Path, content: Any, otherwise: str, notify: Callable[[str], None] = note) -> bool:
    """Write JSON into the user cache; return whether that was possible, else say what follows."""
    try:
        write_atomic(target, (json.dumps(content, indent=1) + "\n").encode())
    except OSError as error:
        notify(f"warning: {target} cannot be written ({reason_of(error)}): {otherwise}")
        return False
    return True


def _umask() -> int:
    mask = os.umask(0)  # there is no way to read it without setting it
    os.umask(mask)
    return mask
