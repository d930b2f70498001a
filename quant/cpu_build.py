"""Build `cpu/ops.cpp` once with the machine's C++ compiler, and load it.

The library lies in the user cache under a name made of the sources, the compiler, its flags and
torch's version: after a move to another machine it is built again. Two processes at once build it
only once. A new library is loaded in a separate process before it is used. The build can run in the
background while weights are read.

`torch.utils.cpp_extension` does not suffice: it has no time limit, leaves its lock file when it is
killed, and does not rebuild for another compiler or another torch.
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
PROBE_LIMIT = 20.0  # seconds for a question to the compiler; it takes some ms
NAMESPACE = "fasteagle_cpu"
FLAGS = "FASTEAGLE_KERNEL_FLAGS"  # environment variable: more compiler flags, such as sanitizers


@dataclasses.dataclass(frozen=True)
class Isa:
    """Instruction set that one path of the kernels needs."""

    level: int  # FASTEAGLE_ISA in the source
    name: str
    needs: tuple[str, ...]  # names in `torch.cpu.get_capabilities`
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
    """Return the paths that this CPU can run, the fastest first.

    ATEN_CPU_CAPABILITY=avx2 or default, which disables AVX-512 in ATen, has the same effect here.
    """
    able = torch.cpu.get_capabilities()
    limit = {"avx2": 2, "default": 0}.get(os.environ.get("ATEN_CPU_CAPABILITY", ""), 4)
    return [isa for isa in ISAS if isa.level <= limit and all(able.get(n) for n in isa.needs)]


class BuildError(Exception):
    """Error that leaves the CPU without kernels; its message is one line."""


@functools.cache
def compiler() -> str:
    """Return the C++ compiler that Inductor would use; raise `BuildError` if there is none."""
    for name in (os.environ.get("CXX"), "g++"):
        path = shutil.which(name) if name else None
        if path:
            return path
    raise BuildError("no C++ compiler found (install g++)")


@functools.cache
def why_no_compiler() -> str | None:
    """Return why compilation is impossible (no compiler, or it hangs), or None."""
    try:
        _run([compiler(), "--version"], "the compiler", PROBE_LIMIT)
    except BuildError as error:
        return str(error)
    return None


def chosen() -> Isa:
    """Return the fastest path that this CPU can run and whose flags the compiler knows.

    -mavxvnni came with GCC 11. If the compiler accepts no flags at all, returns the fastest path:
    its compilation gives the best error message.
    """
    if (isa := _built()) is not None:
        return isa
    if (reason := why_no_compiler()) is not None:
        raise BuildError(reason)
    isas = runnable()
    return next((isa for isa in isas if _knows_flags(isa)), isas[0])


def _built() -> Isa | None:
    """Return the fastest path whose library is in the cache, or None."""
    return next((isa for isa in runnable() if library_path(isa).exists()), None)


def _knows_flags(isa: Isa) -> bool:
    command = [compiler(), *_isa_flags(isa), *("-x", "c++", "-E", os.devnull)]
    try:
        _run(command, "the compiler", PROBE_LIMIT)
    except BuildError:
        return False
    return True


def library_path(isa: Isa, namespace: str = NAMESPACE) -> Path:
    """Return the library's path; raise `BuildError` without source or compiler."""
    path = compiler()
    try:
        stat, sources = os.stat(path), [file.read_bytes() for file in source_files()]
    except OSError as error:
        raise BuildError(f"cannot read {error.filename} ({error.strerror})") from error
    parts = (
        *sources,
        f"{path} {stat.st_size} {stat.st_mtime_ns}".encode(),
        " ".join(command(isa, namespace, Path("out"))).encode(),
        f"{torch.__version__} {platform.machine()}".encode(),
    )
    name = hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]
    return compiled_dir() / "kernels" / f"{isa.name}-{name}.so"


def source_files() -> list[Path]:
    """Return the sources of the library: the file that is compiled, and its headers."""
    return [SOURCE, *sorted(SOURCE.parent.glob("*.h"))]


def _isa_flags(isa: Isa) -> tuple[str, ...]:
    return isa.flags if platform.machine() in ("x86_64", "AMD64") else ()


def command(isa: Isa, namespace: str, out: Path, source: Path | None = None) -> list[str]:
    """Return the compiler's command line that makes the library `out`."""
    root = Path(torch.__file__).parent
    return [
        compiler(),
        *("-std=c++20", "-O3", "-fPIC", "-shared", "-fopenmp"),
        # One rounding per operation in the source; only an explicit `fma` is fused.
        *("-ffp-contract=off", "-fno-math-errno"),
        *_isa_flags(isa),
        *(f"-DFASTEAGLE_ISA={isa.level}", f"-DFASTEAGLE_NAMESPACE={namespace}"),
        *(f"-I{root}/include", f"-I{root}/include/torch/csrc/api/include"),
        *os.environ.get(FLAGS, "").split(),
        str(source or SOURCE),
        *("-o", str(out)),
        *(f"-L{root}/lib", "-lc10", "-ltorch_cpu"),
    ]


def build(isa: Isa, namespace: str = NAMESPACE) -> Path:
    """Return the library's path, after compiling it if it is missing; may raise `BuildError`."""
    path = library_path(isa, namespace)
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released when the process ends
            if not path.exists():
                _compile(isa, namespace, path)
    except OSError as error:
        raise BuildError(f"cannot write {path.parent} ({error.strerror})") from error
    return path


def begin() -> bool:
    """Start building the kernels in the background; return False if that is not needed.

    `load` waits for the build. It runs in a daemon thread, and its compiler ends with the process,
    so that the process can exit at once.
    """
    if NAMESPACE in _loaded or NAMESPACE in _building or is_built():
        return False
    thread = threading.Thread(target=_load, args=(None, NAMESPACE), daemon=True)
    _building[NAMESPACE] = thread
    thread.start()
    return True


def is_building() -> bool:
    """Return whether `load` would wait for a build that `begin` started."""
    return NAMESPACE in _building and _building[NAMESPACE].is_alive()


def _compile(isa: Isa, namespace: str, path: Path) -> None:
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        _run(command(isa, namespace, temporary), "the compiler", TIME_LIMIT)
        # A separate process, because a damaged file would crash this one.
        check = f"import torch; torch.ops.load_library({str(temporary)!r})"
        check += f"; assert torch.ops.{namespace}.isa() == {isa.level}"
        _run([sys.executable, "-c", check], "loading what the compiler wrote", TIME_LIMIT)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _run(command: list[str], what: str, limit: float) -> None:
    """Run a command, killed with its children after `limit` seconds; may raise `BuildError`."""
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
        _, said = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        raise BuildError(f"{what} took more than {limit:.0f} s") from None
    finally:
        end()
        atexit.unregister(end)
    if process.returncode:
        lines = [line for line in said.splitlines() if "error" in line.lower()]
        reason = (lines or said.strip().splitlines() or [f"exit {process.returncode}"])[0]
        raise BuildError(f"{what} failed: {reason.strip()[:160]}")


def _end(process: subprocess.Popen[str]) -> None:
    """End a process that still runs, and its children; SIGTERM first lets g++ remove its files."""
    if process.poll() is not None:
        return
    for how in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=2.0)


_lock = threading.Lock()
_loaded: dict[str, BuildError | None] = {}  # by namespace: why there are no kernels, or None
_building: dict[str, threading.Thread] = {}


def load(isa: Isa | None = None, namespace: str = NAMESPACE) -> None:
    """Build the kernels if needed, and register their ops under `torch.ops.<namespace>`.

    `isa` defaults to the fastest path that this CPU can run. Raises `BuildError`; after a failure
    later calls in the process raise it again without another attempt.
    """
    if namespace in _building:
        _building[namespace].join()
    if (failure := _load(isa, namespace)) is not None:
        raise failure


def _load(isa: Isa | None, namespace: str) -> BuildError | None:
    """Load the kernels once; return the error, or None after success."""
    with _lock:
        if namespace not in _loaded:
            try:
                _load_library(build(isa or chosen(), namespace))
                _register_fakes(namespace)
                _loaded[namespace] = None
            except BuildError as error:
                _loaded[namespace] = error
        return _loaded[namespace]


def _load_library(path: Path) -> None:
    try:
        torch.ops.load_library(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            path.unlink()  # damaged after the build; the next start builds again
        raise BuildError(f"{path.name} does not load: {error}"[:200]) from error


def is_built() -> bool:
    """Return whether `load` would find the kernels compiled."""
    try:
        return _built() is not None
    except BuildError:
        return False


def why_not_auto() -> str | None:
    """Return why `--cpu-kernels auto` uses torch's own kernels, or None; build nothing.

    The plain loops run on any CPU, but their speed has not been compared with ATen's.
    """
    if runnable()[0].level == 0:
        return "this CPU has no AVX2 (int4-native runs plain loops)"
    try:
        compiler()
    except BuildError as error:
        return str(error)
    return None


def available(choice: str) -> str | None:
    """Load the kernels for `--cpu-kernels` `choice`; return why they are not used, or None.

    Raises `FasteagleError` if `choice` is "native" and the kernels are unavailable.
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
    """Register the shapes and dtypes of results for tracing."""

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
