"""Speed of this machine's memory, measured in about a second, and peaks of its use.

The best of several runs counts: other work on the machine only ever makes a run slower.
"""

from __future__ import annotations

import contextlib
import dataclasses
import resource
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from fasteagle.bench.roofline import device_reported_as
from fasteagle.device import available_bytes, proc_field
from fasteagle.errors import counted
from fasteagle.generate import Engine

READ_BYTES = 2**28  # far more than a last-level cache holds
COPY_BYTES = 2**30
SECONDS = 0.25  # of each measurement, at least


@dataclasses.dataclass(frozen=True)
class Bandwidth:
    """Memory bandwidth in GB/s (1e9), with its source in words."""

    gb_s: float
    source: str
    measured_gb_s: float


def memory_bandwidth(device: torch.device, name: str) -> Bandwidth:
    """Return the bandwidth: measured by reading on a CPU; on CUDA the data sheet's, or a copy's."""
    if device.type == "cpu":
        read = read_bandwidth()
        threads = counted(torch.get_num_threads(), "thread")
        return Bandwidth(read, f"measured, reading with {threads}", read)
    copied = copy_bandwidth(device)
    sheet = device_reported_as(name)
    if sheet is None:
        return Bandwidth(copied, "measured, copying", copied)
    return Bandwidth(sheet.card.gb_s, f"data sheet of {sheet.name}", copied)


def read_bandwidth(n_bytes: int = READ_BYTES) -> float:
    """Return the GB/s at which all CPU threads together read one large array."""
    free = available_bytes("cpu")
    n_bytes = n_bytes if free is None else min(n_bytes, free // 4)
    data = torch.ones(max(1, n_bytes // 4))
    return data.nbytes / _best_seconds(data.sum) / 1e9


def copy_bandwidth(device: torch.device, n_bytes: int = COPY_BYTES) -> float:
    """Return the GB/s of a copy on the device, bytes read and bytes written."""
    free = available_bytes(device)
    n_bytes = n_bytes if free is None else min(n_bytes, free // 4)
    source = torch.zeros(n_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    with torch.cuda.device_of(source):  # for which the timer waits
        return 2 * source.nbytes / _best_seconds(lambda: target.copy_(source)) / 1e9


def add_barrier(barriers: list[float], engine: Engine) -> None:
    """Add the nanoseconds of a barrier of the CPU kernels' threads, where the engine runs them.

    On a virtual machine it tells where the host has put its cores at the moment: some 65 where they
    share a cache, 300 where they do not, and then passes over several rows are slower.
    """
    if engine.backend.name == "cpu":
        barriers.append(torch.ops.fasteagle_cpu.barrier_ns())


def barrier_line(barriers: Sequence[float]) -> str:
    """Return a line on the values of `add_barrier`."""
    return f"a barrier of the threads: {min(barriers):.0f} to {max(barriers):.0f} ns"


def _best_seconds(work: Callable[[], object]) -> float:
    """Return the time of the fastest run; the timer warms up, and waits for a GPU."""
    from torch.utils.benchmark import Timer  # 0.4 s

    threads = torch.get_num_threads()
    timer = Timer("work()", globals={"work": work}, num_threads=threads)
    return min(timer.blocked_autorange(min_run_time=SECONDS).times)


def reset_peak(device: torch.device) -> None:
    """Begin a new measurement of `peak_bytes`."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):  # then the peak is that of the whole process so far
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory since `reset_peak`, on a CPU that of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = proc_field("self/status", "VmHWM")
    kib = int(peak.split()[0]) if peak else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return 1024 * kib
