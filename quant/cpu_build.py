"""Build `cpu/ops.cpp` once with the machine's C++ compiler, and load it.

The library lies in the user cache under a name made of the sources, the compiler, its flags and
torch's version: after a move to another machine it is built again. Two processes at once build it
only once.

`torch.utils.cpp_extension` does not suffice: it has no time limit, leaves its lock file when it is
killed, and does not rebuild for another compiler or another torch.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fasteagle.errors import FasteagleError
from fasteagle.paths import compiled_dir, mark_used, remove_unused

SOURCE = Path(__file__).with_name("cpu") / "ops.cpp"  # includes the headers beside it
TIME_LIMIT = 300.0  # seconds for the compiler; it takes about half a minute
PROBE_LIMIT = 6.0  # seconds for a question to the compiler; it takes some ms
NAMESPACE = "fasteagle_cpu"
Notify = Callable[[str], None]
FLAGS = "FASTEAGLE_KERNEL_FLAGS"  # environment variable: more compiler flags, such as sanitizers


class Isa(NamedTuple):
    """Instruction set that one path of the kernels needs."""

    level: int  # FASTEAGLE_ISA in the source
    name: str
    needs: tuple[str, ...]  # names in `torch.cpu.get_capabilities`

    @property
    def flags(self) -> tuple[str, ...]:
        return tuple("-m" + need.replace("_", "").replace("fma3", "fma") for need in self.needs)


_AVX2 = ("avx2", "fma3", "f16c")
_AVX512 = (*_AVX2, "avx512_f", "avx512_bw", "avx512_vl", "avx512_dq")
_VNNI = (*_AVX512, "avx512_vnni")
ISAS = (
    Isa(5, "avx512-bf16", (*_VNNI, "avx512_bf16")),
    Isa(4, "avx512-vnni", _VNNI),
    Isa(3, "avx512", _AVX512),
    Isa(2, "avx-vnni", (*_AVX2, "avx_vnni")),
    Isa(1, "avx2", _AVX2),
    Isa(0, "plain", ()),
)


class BuildError(Exception):
    """Error that leaves the CPU without kernels; its message is one line."""


def runnable() -> list[Isa]:
    """Return the paths that this CPU can run, the fastest first.

    ATEN_CPU_CAPABILITY=avx2 or default, which disables AVX-512 in ATen, has the same effect here.
    """
    able = torch.cpu.get_capabilities()
    limit = {"avx2": 2, "default": 0}.get(os.environ.get("ATEN_CPU_CAPABILITY", ""), 5)
    isas = [isa for isa in ISAS if isa.level <= limit and all(able.get(n) for n in isa.needs)]
    # Intel's cores multiply pairs of bf16 at a quarter of the rate of fp32, AMD's at the same rate.
    slow = "Intel" in able.get("cpu_name", "")
    return sorted(isas, key=lambda isa: 3.5 if slow and isa.level == 5 else isa.level, reverse=True)


@functools.cache
def compiler() -> str:
    """Return the C++ compiler that Inductor would use; raise `BuildError` if there is none."""
    for name in (os.environ.get("CXX"), "g++"):
        path = shutil.which(name) if name else None
        if path:
            return path
    raise BuildError("no C++ compiler found (install g++)")


@functools.cache
def why_no_compiler(flags: tuple[str, ...] = ()) -> str | None:
    """Return why compilation with `flags` is impossible, or None; a hanging compiler is one why."""
    try:
        _run([compiler(), *flags, *("-x", "c++", "-E", os.devnull)], PROBE_LIMIT)
    except (BuildError, OSError) as error:
        return str(error)
    return None


def chosen(notify: Notify | None = None) -> Isa:
    """Return the fastest path that this CPU can run: one already built, or known to the compiler.

    `notify` is told before the compiler is asked anything, for it may hang. -mavxvnni came with GCC
    11. If the compiler accepts no flags at all, returns the fastest path: its compilation gives the
    best error message.
    """
    isas = runnable()
    if built := [isa for isa in isas if library_path(isa).exists()]:
        return built[0]
    if notify is not None:
        limit = f"at most {TIME_LIMIT / 60:.0f} minutes"
        notify(f"compiling the CPU kernels (once, half a minute; {limit}) ...")
    if (reason := why_no_compiler()) is not None:
        raise BuildError(reason)
    return next((isa for isa in isas if why_no_compiler(isa.flags) is None), isas[0])


def library_path(isa: Isa, namespace: str = NAMESPACE) -> Path:
    """Return the library's path; raise `BuildError` or `OSError` without compiler or source."""
    stat = os.stat(compiler())
    versions = f"{stat.st_size} {stat.st_mtime_ns} {torch.__version__} {platform.machine()}"
    digest = hashlib.sha256(" ".join([*command(isa, namespace, Path("out")), versions]).encode())
    for file in (SOURCE, *sorted(SOURCE.parent.glob("*.h"))):
        digest.update(b"\0" + file.read_bytes())
    return compiled_dir() / "kernels" / f"{isa.name}-{digest.hexdigest()[:24]}.so"


def command(isa: Isa, namespace: str, out: Path, source: Path | None = None) -> list[str]:
    """Return the compiler's command line that makes the library `out`."""
    root = Path(torch.__file__).parent
    return [
        compiler(),
        *("-std=c++20", "-O3", "-fPIC", "-shared", "-fopenmp"),
        # One rounding per operation in the source; only an explicit `fma` is fused.
        *("-ffp-contract=off", "-fno-math-errno"),
        *isa.flags,
        *(f"-DFASTEAGLE_ISA={isa.level}", f"-DFASTEAGLE_NAMESPACE={namespace}"),
        *(f"-I{root}/include", f"-I{root}/include/torch/csrc/api/include"),
        *os.environ.get(FLAGS, "").split(),
        str(source or SOURCE),
        *("-o", str(out)),
        *(f"-L{root}/lib", "-lc10", "-ltorch_cpu"),
    ]


def build(isa: Isa, namespace: str = NAMESPACE) -> Path:
    """Return the library's path, after compiling it if it is missing.

    Raises `BuildError` if the compiler fails, and `OSError` if a file cannot be read or written.
    """
    path = library_path(isa, namespace)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released when the process ends
            if not path.exists():
                temporary = path.with_suffix(".tmp")
                _run(command(isa, namespace, temporary), TIME_LIMIT)
                os.replace(temporary, path)
                remove_unused(path, lambda line: None)
    mark_used(path)
    return path


def _run(command: list[str], limit: float) -> None:
    """Run the compiler, killed with its children after `limit` seconds; may raise `BuildError`."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    end = functools.partial(_end, process)
    atexit.register(end)
    try:
        _, messages = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        raise BuildError(f"the compiler took more than {limit:.0f} s") from None
    finally:
        end()
        atexit.unregister(end)
    if process.returncode:
        lines = [line for line in messages.splitlines() if "error" in line.lower()]
        reason = (lines or messages.strip().splitlines() or [f"exit {process.returncode}"])[0]
        raise BuildError(f"the compiler failed: {reason.strip()[:160]}")


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
_loaded: dict[str, Path | BuildError] = {}  # by namespace: the library, or why there is none


def load(isa: Isa | None = None, namespace: str = NAMESPACE, notify: Notify | None = None) -> None:
    """Build the kernels if needed, and register their ops under `torch.ops.<namespace>`.

    `isa` defaults to the fastest path that this CPU can run. Raises `BuildError`; after a failure
    later calls in the process raise it again without another attempt.
    """
    with _lock:
        if namespace not in _loaded:
            try:
                library = build(isa or chosen(notify), namespace)
                _load_library(library)
                _register_fakes(namespace)
                _loaded[namespace] = library
            except (BuildError, OSError) as error:
                _loaded[namespace] = BuildError(str(error))
        if isinstance(failure := _loaded[namespace], BuildError):
            raise failure


def loaded(namespace: str = NAMESPACE) -> str | None:
    """Return the name of the loaded library, which tells how it was compiled; None without one."""
    library = _loaded.get(namespace)
    return library.name if isinstance(library, Path) else None


def serves(x: Tensor) -> bool:
    """Return whether loaded kernels take this tensor: one on the CPU."""
    return x.device.type == "cpu" and loaded() is not None


def _load_library(path: Path) -> None:
    try:
        torch.ops.load_library(path)
    except OSError:
        path.unlink(missing_ok=True)  # damaged; the next start builds again
        raise


def available(choice: str, notify: Notify | None = None) -> str | None:
    """Load the kernels for `--cpu-kernels` `choice`; return why they are not used, or None.

    Raises `FasteagleError` if `choice` is "native" and the kernels are unavailable. `auto` leaves
    the plain loops out, whose speed has not been compared with ATen's.
    """
    if choice == "auto" and runnable()[0].level == 0:
        return "this CPU has no AVX2 (int4-native runs plain loops)"
    try:
        load(notify=notify)
    except BuildError as error:
        if choice == "native":
            raise FasteagleError(
                f"-native in the precision: {error}: leave it out, or use -aten"
            ) from error
        return str(error)
    return None


def _register_fakes(namespace: str) -> None:
    """Register the shapes and dtypes of results for tracing."""

    def linear(x: Tensor, packed: Tensor, bias: Tensor | None, n: int, first: int = 0) -> Tensor:
        return x.new_empty(x.shape[0], n, dtype=torch.float32)

    def rows(packed: Tensor, index: Tensor, k: int) -> Tensor:
        return packed.new_empty(index.shape[0], k, dtype=torch.float32)

    def like_x(x: Tensor, *rest: object) -> Tensor:
        return torch.empty_like(x)

    fakes = {"linear": linear, "rows": rows, "norm": like_x, "blocks": like_x}
    for name, fake in fakes.items():
        torch.library.register_fake(f"{namespace}::{name}", fake)
