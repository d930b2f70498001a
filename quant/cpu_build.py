"""Builds `cpu/ops.cpp` once with the machine's C++ compiler, and loads it.

The file lies in the user cache under a name made of the sources, the compiler, the CPU's
instructions and torch's version: a cache that moves to another machine builds again. Two processes
at once build once. A file is tried in a process of its own before it is used. The build can begin
in the background while weights are read.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import torch
from torch import Tensor

from fasteagle.errors import FasteagleError
from fasteagle.paths import compiled_dir

SOURCE = Path(__file__).with_name("cpu") / "ops.cpp"  # includes the headers beside it
TIME_LIMIT = 300.0  # seconds for the compiler; it takes about half a minute
NAMESPACE = "fasteagle_cpu"
FLAGS = "FASTEAGLE_KERNEL_FLAGS"  # environment: more flags for the compiler, as for sanitizers


@dataclasses.dataclass(frozen=True)
class Isa:
    """Instructions that one path of the kernels needs."""

    level: int  # FASTEAGLE_ISA in the source
    name: str
    needs: tuple[str, ...]  # of `torch.cpu.get_capabilities`
    flags: tuple[str, ...]


_AVX2 = ("avx2", "fma3", "f16c")
_AVX2_FLAGS = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "avx512_f", "avx512_bw", "avx512_vl", "avx512_dq")
_AVX512_FLAGS = (*_AVX2_FLAGS, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
ISAS = (
    Isa(4, "avx512-vnni", (*_AVX512, "avx512_vnni"), (*_AVX512_FLAGS, "-mavx512vnni")),
    Isa(3, "avx512", _AVX512, _AVX512_FLAGS),
    Isa(2, "avx-vnni", (*_AVX2, "avx_vnni"), (*_AVX2_FLAGS, "-mavxvnni")),
    Isa(1, "avx2", _AVX2, _AVX2_FLAGS),
    Isa(0, "plain", (), ()),
)


def runnable() -> list[Isa]:
    """The paths that this CPU can run, the fastest first.

    ATEN_CPU_CAPABILITY=avx2 or default, which keeps ATen from AVX-512, is obeyed here too.
    """
    found = torch.cpu.get_capabilities()
    limit = {"avx2": 2, "default": 0}.get(os.environ.get("ATEN_CPU_CAPABILITY", ""), 4)
    return [isa for isa in ISAS if isa.level <= limit and all(found.get(n) for n in isa.needs)]


class BuildError(Exception):
    """Why there are no kernels, in one line."""


@functools.cache
def compiler() -> str:
    """The C++ compiler that Inductor would take; raises `BuildError` if there is none."""
    for name in (os.environ.get("CXX"), "g++"):
        path = shutil.which(name) if name else None
        if path:
            return path
    raise BuildError("no C++ compiler found (install g++)")


def chosen() -> Isa:
    """The fastest path that this CPU runs and whose flags the compiler knows; or the fastest one.

    A compiler that takes no flags at all says best by itself what is wrong with it.
    """
    isas = runnable()
    known = (isa for isa in isas if library_path(isa).exists() or _knows_flags(isa))
    return next(known, isas[0])


def _knows_flags(isa: Isa) -> bool:
    """Whether the compiler takes the flags of `isa`: -mavxvnni came with GCC 11."""
    command = [compiler(), *_isa_flags(isa), *("-x", "c++", "-E", os.devnull)]
    try:
        _run(command, "the compiler")
    except BuildError:
        return False
    return True


def library_path(isa: Isa, namespace: str = NAMESPACE) -> Path:
    """Where the library for `isa` lies, or will. Raises `BuildError` without source or compiler."""
    path = compiler()
    try:
        stat, sources = os.stat(path), [file.read_bytes() for file in source_files()]
    except OSError as error:
        raise BuildError(f"cannot read {error.filename} ({error.strerror})") from error
    parts = (
        *sources,
        f"{path} {stat.st_size} {stat.st_mtime_ns}".encode(),
        " ".join(_command(isa, namespace, Path("out"))).encode(),
        f"{torch.__version__} {platform.machine()}".encode(),
    )
    name = hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]
    return compiled_dir() / "kernels" / f"{isa.name}-{name}.so"


def source_files() -> list[Path]:
    """All that the library is made of: the file that is compiled, and its headers."""
    return [SOURCE, *sorted(SOURCE.parent.glob("*.h"))]


def _isa_flags(isa: Isa) -> tuple[str, ...]:
    return isa.flags if platform.machine() in ("x86_64", "AMD64") else ()


def _command(isa: Isa, namespace: str, out: Path) -> list[str]:
    root = Path(torch.__file__).parent
    return [
        compiler(),
        *("-std=c++20", "-O3", "-fPIC", "-shared", "-fopenmp"),
        # One rounding for each operation written; `fma` in the source is the only fusion.
        *("-ffp-contract=off", "-fno-math-errno"),
        *_isa_flags(isa),
        *(f"-DFASTEAGLE_ISA={isa.level}", f"-DFASTEAGLE_NAMESPACE={namespace}"),
        *(f"-I{root}/include", f"-I{root}/include/torch/csrc/api/include"),
        *os.environ.get(FLAGS, "").split(),
        str(SOURCE),
        *("-o", str(out)),
        *(f"-L{root}/lib", "-lc10", "-ltorch_cpu"),
    ]


def build(isa: Isa, namespace: str = NAMESPACE) -> Path:
    """The library's path, compiled if it is not there yet. Raises `BuildError`."""
    path = library_path(isa, namespace)
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # ends with the process that holds it
            if not path.exists():
                _compile(isa, namespace, path)
    except OSError as error:
        raise BuildError(f"cannot write {path.parent} ({error.strerror})") from error
    return path


def begin() -> bool:
    """Begin to build in the background what `load` will wait for; false where there is no need.

    A daemon thread, whose compiler ends with the process: a person who leaves does not wait.
    """
    with _lock:
        if NAMESPACE in _loaded or NAMESPACE in _building or is_built():
            return False
        thread = threading.Thread(target=_build_ahead, name="build-kernels", daemon=True)
        _building[NAMESPACE] = thread
        thread.start()
    return True


def is_building() -> bool:
    """Whether `load` would wait for what `begin` has begun."""
    return NAMESPACE in _building and _building[NAMESPACE].is_alive()


def _build_ahead() -> None:
    try:
        build(chosen())
    except BuildError as error:
        _failed[NAMESPACE] = error  # `load` says it


def _compile(isa: Isa, namespace: str, path: Path) -> None:
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        _run(_command(isa, namespace, temporary), "the compiler")
        # A process of its own: a damaged file would end this one.
        check = f"import torch; torch.ops.load_library({str(temporary)!r})"
        check += f"; assert torch.ops.{namespace}.isa() == {isa.level}"
        _run([sys.executable, "-c", check], "loading what the compiler wrote")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _run(command: list[str], what: str) -> None:
    """Run to the end, or end it with all of its children: a compiler is a driver of others."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise BuildError(f"cannot start {command[0]} ({error.strerror})") from error
    end = functools.partial(_end, process)
    atexit.register(end)
    try:
        _, said = process.communicate(timeout=TIME_LIMIT)
    except subprocess.TimeoutExpired:
        raise BuildError(f"{what} took more than {TIME_LIMIT:.0f} s") from None
    finally:
        end()
        atexit.unregister(end)
    if process.returncode:
        lines = [line for line in said.splitlines() if "error" in line.lower()]
        reason = (lines or said.strip().splitlines() or [f"exit {process.returncode}"])[0]
        raise BuildError(f"{what} failed: {reason.strip()[:160]}")


def _end(process: subprocess.Popen[str]) -> None:
    """End a process that still runs, with all that it has started; g++ removes its files first."""
    if process.poll() is not None:
        return
    for how in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=2.0)


_lock = threading.Lock()
_loaded: dict[str, BuildError | None] = {}
_building: dict[str, threading.Thread] = {}
_failed: dict[str, BuildError] = {}  # in the background


def load(isa: Isa | None = None, namespace: str = NAMESPACE) -> None:
    """Build the kernels if need be, and register their ops under `torch.ops.<namespace>`.

    Without `isa` the fastest that this CPU can run. Raises `BuildError`, in a process that has
    failed once without another attempt.
    """
    with _lock:
        if namespace not in _loaded:
            _loaded[namespace] = _load(isa, namespace)
        failure = _loaded[namespace]
    if failure is not None:
        raise failure


def _load(isa: Isa | None, namespace: str) -> BuildError | None:
    """`load`, once; why there are no kernels, or None."""
    if namespace in _building:
        _building[namespace].join()
        if namespace in _failed:
            return _failed[namespace]
    try:
        path = build(isa or chosen(), namespace)
    except BuildError as error:
        return error
    try:
        torch.ops.load_library(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            path.unlink()  # damaged after it was tried; the next start builds
        return BuildError(f"{path.name} does not load: {error}"[:200])
    _register_fakes(namespace)
    return None


def is_built() -> bool:
    """Whether `load` would find the kernels compiled."""
    try:
        return library_path(chosen()).exists()
    except BuildError:
        return False


def why_not_auto() -> str | None:
    """Why `--cpu-kernels auto` takes torch's own kernels, or None: known before anything is built.

    The plain loops run anywhere, but nobody has compared their speed with ATen's there.
    """
    try:
        isa = chosen()
    except BuildError as error:
        return str(error)
    if isa.level == 0:
        return "this CPU or its compiler has no AVX2 (int4-native runs plain loops)"
    return None


def available(choice: str) -> str | None:
    """Load the kernels for `--cpu-kernels` `choice`; None, or why they are not used.

    Raises `FasteagleError` where the person asked for them and there are none.
    """
    if choice == "aten":
        return "not asked for"
    if choice == "auto" and (reason := why_not_auto()) is not None:
        return reason
    try:
        load()
    except BuildError as error:
        if choice == "native":
            raise FasteagleError(
                f"-native in the precision: {error}: leave it out, or use -aten"
            ) from error
        return str(error)
    return None


def _register_fakes(namespace: str) -> None:
    """What tracing needs to know: the shapes and types of results."""

    def linear(x: Tensor, packed: Tensor, bias: Tensor | None, n: int) -> Tensor:
        return x.new_empty(x.shape[0], n, dtype=torch.float32)

    def maximum(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.new_empty(x.shape[0]), x.new_empty(x.shape[0], dtype=torch.long)

    def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return torch.empty_like(x)

    def blocks(x: Tensor, *rest: object) -> Tensor:
        return torch.empty_like(x)

    def rows(packed: Tensor, index: Tensor, k: int) -> Tensor:
        return packed.new_empty(index.shape[0], k, dtype=torch.float32)

    for fake in (linear, maximum, norm, blocks, rows):
        torch.library.register_fake(f"{namespace}::{fake.__name__}", fake)
