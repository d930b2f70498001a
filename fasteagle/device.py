"""The device and the dtype a model runs in, and what the system says about the device."""

from __future__ import annotations

import contextlib
import platform
from pathlib import Path

import torch

from fasteagle.errors import FasteagleError

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise FasteagleError(f"device {name!r} is not one: use auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise FasteagleError(f"device {name!r}: {count} CUDA devices found: use --device cpu")
    return device


def pick_dtype(name: str, device: torch.device, quantized: bool = False) -> str:
    """ "auto" is bf16 where the hardware has bf16 products, else fp32.

    The CPU kernels of quantized weights take bf16 on any hardware.
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


def device_name(device: torch.device) -> str:
    """What the maker calls it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def available_bytes(device: torch.device | str) -> int | None:
    """Free memory of a device, or None where the system does not report it."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None
