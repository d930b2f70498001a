"""Device and dtype of a model, and properties of the device: its name, its free memory."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import platform
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from fasteagle.errors import FasteagleError, first_line, is_out_of_memory, note, size_of

OLDEST_CAPABILITY = (8, 0)  # of our compiled kernels and of bf16 products
# GeForce cards of these capabilities run fp32 accumulation at half the rate, others do not.
HALF_RATE = {(8, 6), (8, 9), (12, 0)}
# Error texts of a CUDA build of torch on a machine without a GPU.
NO_CARD = ("Found no NVIDIA driver", "No CUDA GPUs are available")
Made = TypeVar("Made")
TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def pick_device(name: str) -> torch.device:
    """Return the device called `name`; auto is CUDA where it can be used, else the CPU.

    Raises `FasteagleError` for a device that is absent or cannot be used, with the reason.
    """
    if name == "auto":
        return _auto_device()
    try:
        device = torch.device(name)
    except RuntimeError:
        raise FasteagleError(f"device {name!r} is unknown: use auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda" and (problem := cuda_problem(device)) is not None:
        raise FasteagleError(f"device {name!r}: {problem}: use --device cpu")
    return device


@functools.cache
def _auto_device() -> torch.device:
    if torch.cuda.is_available():
        problem = cuda_problem(torch.device("cuda"))
        if problem is None:
            return torch.device("cuda")
        note(f"warning: the CPU is used: {problem}")
    elif torch.version.cuda is not None:
        problem = _init_problem()
        if problem is not None and not any(text in problem for text in NO_CARD):
            note(f"warning: the CPU is used: {problem}")
    return torch.device("cpu")


def cuda_problem(device: torch.device) -> str | None:
    """Return why a CUDA device cannot be used, or None."""
    count = torch.cuda.device_count()
    if not count:
        return _no_cuda()
    if (device.index or 0) >= count:
        return f"{count} CUDA devices found"
    try:
        capability = torch.cuda.get_device_capability(device)
        name = torch.cuda.get_device_name(device)
    except (RuntimeError, AssertionError) as error:
        return _first_line(error)
    if capability < OLDEST_CAPABILITY:
        own, oldest = ("{}{}".format(*pair) for pair in (capability, OLDEST_CAPABILITY))
        return f"{name} is sm_{own}, the kernels need sm_{oldest} (Ampere) or newer"
    if importlib.util.find_spec("triton") is None:
        return "its kernels need Triton, which is not installed (pip install triton)"
    return None


def _no_cuda() -> str:
    """Return why there is no CUDA device: the torch build, the driver, or no GPU."""
    if torch.version.cuda is None:
        return "0 CUDA devices found, and this torch is built for CPUs"
    problem = _init_problem()
    return "0 CUDA devices found" + ("" if problem is None else f" ({problem})")


def _init_problem() -> str | None:
    """Return why the CUDA driver cannot be used, or None; a machine without a GPU has none."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return _first_line(error)
    return None


def _first_line(error: BaseException) -> str:
    text = first_line(error)
    return text.split(". ")[0].rstrip(".")[:200]


def pick_dtype(name: str, device: torch.device, quantized: bool = False) -> str:
    """Return the dtype for `name`, which may be auto.

    auto is bf16 where the hardware has bf16 products, else fp16 on CUDA and fp32 on CPUs. The CPU
    kernels of quantized weights take bf16 on any hardware.
    """
    if name != "auto":
        return name
    if quantized and device.type == "cpu":
        return "bf16"
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported() else "fp16"
    capabilities = torch.cpu.get_capabilities()
    fast = any(capabilities.get(key) for key in ("avx512_bf16", "amx_bf16", "bf16", "arm_bf16"))
    return "bf16" if fast else "fp32"


def accumulate_on(device: torch.device | str) -> str:
    """Return the accumulation dtype within a group: fp16 where that is twice as fast."""
    device = torch.device(device)
    if device.type != "cuda" or torch.cuda.get_device_capability(device) not in HALF_RATE:
        return "fp32"
    return "fp16" if "GeForce" in device_name(device) else "fp32"


def device_name(device: torch.device) -> str:
    """Return the manufacturer's name of a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return proc_field("cpuinfo", "model name") or platform.processor() or platform.machine()


def proc_field(file: str, *names: str) -> str | None:
    """Return the first field of one of these names in a file of /proc; None where there is none."""
    with contextlib.suppress(OSError):
        for line in Path("/proc", file).read_text().splitlines():
            if line.startswith(names):
                return line.split(":", 1)[1].strip()
    return None


def unless_short(work: Callable[[], Made], tell: Callable[[], FasteagleError]) -> Made:
    """Return `work()`; where memory runs out, free its tensors and raise `tell()`."""
    try:
        return work()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    give_back()  # the error is gone, and with it the frames that held tensors
    raise tell()


def short_of_memory(doing: str, device: torch.device, fix: Callable[[int], str]) -> FasteagleError:
    """Return an out-of-memory error; `fix` turns the number of free bytes into advice."""
    free = available_bytes(device) or 0
    return FasteagleError(
        f"out of memory while {doing}, {size_of(free)} free on {device}: {fix(free)}"
    )


def give_back() -> None:
    """Free the memory of unused objects, those in reference cycles included."""
    gc.collect()
    with contextlib.suppress(RuntimeError):  # refused while another thread captures a graph
        torch.cuda.empty_cache()


def available_bytes(device: torch.device | str) -> int | None:
    """Return the free memory of a device in bytes, or None where the system does not report it."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = proc_field("meminfo", "MemAvailable")
    return None if free is None else 1024 * int(free.split()[0])
