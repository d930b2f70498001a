"""Builds `cpu_kernels.cpp` once with the machine's C++ compiler, and loads it.

The file lies in the user cache under a name made of the source, the compiler, the CPU's
instructions and torch's version: a cache that moves to another machine builds again. Two processes
at once build once. A file is tried in a process of its own before it is used.
"""

from __future__ import annotations

import dataclasses
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import torch
from torch import Tensor

from fasteagle.errors import FasteagleError
from fasteagle.paths import compiled_dir

SOURCE = Path(__file__).with_name("cpu_kernels.cpp")
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


def library_path(isa: Isa, namespace: str = NAMESPACE) -> Path:
    """Where the library for `isa` lies, or will."""
    path = compiler()
    stat = os.stat(path)
    parts = (
        SOURCE.read_bytes(),
        f"{path} {stat.st_size} {stat.st_mtime_ns}".encode(),
        " ".join(_command(isa, namespace, Path("out"))).encode(),
        f"{torch.__version__} {platform.machine()}".encode(),
    )
    name = hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]
    return compiled_dir() / "kernels" / f"{isa.name}-{name}.so"


def _command(isa: Isa, namespace: str, out: Path) -> list[str]:
    root = Path(torch.__file__).parent
    return [
        compiler(),
        *("-std=c++20", "-O3", "-fPIC", "-shared", "-fopenmp"),
        # One rounding for each operation written; `fma` in the source is the only fusion.
        *("-ffp-contract=off", "-fno-math-errno"),
        *(isa.flags if platform.machine() in ("x86_64", "AMD64") else ()),
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
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIME_LIMIT, errors="replace"
        )
    except subprocess.TimeoutExpired:
        raise BuildError(f"{what} took more than {TIME_LIMIT:.0f} s") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line.lower()]
        reason = (lines or done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[0]
        raise BuildError(f"{what} failed: {reason.strip()[:160]}")


_lock = threading.Lock()
_loaded: dict[str, BuildError | None] = {}


def load(isa: Isa | None = None, namespace: str = NAMESPACE) -> None:
    """Build the kernels if need be, and register their ops under `torch.ops.<namespace>`.

    Without `isa` the fastest that this CPU can run. Raises `BuildError`, in a process that has
    failed once without another attempt.
    """
    with _lock:
        if namespace not in _loaded:
            try:
                path = build(isa or runnable()[0], namespace)
                torch.ops.load_library(path)
                _register_fakes(namespace)
                _loaded[namespace] = None
            except BuildError as error:
                _loaded[namespace] = error
            except OSError as error:
                path.unlink(missing_ok=True)  # damaged after it was tried; the next start builds
                _loaded[namespace] = BuildError(f"{path.name} does not load: {error}"[:200])
        failure = _loaded[namespace]
    if failure is not None:
        raise failure


def is_built() -> bool:
    """Whether `load` would find the kernels compiled."""
    try:
        return library_path(runnable()[0]).exists()
    except BuildError:
        return False


def available(choice: str) -> str | None:
    """Load the kernels for `--cpu-kernels` `choice`; None, or why they are not used.

    Raises `FasteagleError` where the person asked for them and there are none.
    """
    if choice == "aten":
        return "not asked for"
    try:
        load()
    except BuildError as error:
        if choice == "native":
            raise FasteagleError(
                f"cpu-kernels native: {error}: use --cpu-kernels auto or aten"
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
