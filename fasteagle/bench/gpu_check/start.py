"""Stage `start`: what machine this is, and whether one kernel and one small capture work on it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from typing import Any

import torch

from fasteagle.bench.gpu_check.stage import Context
from fasteagle.bench.measure import copy_bandwidth
from fasteagle.compile.graphs import CudaGraphs
from fasteagle.device import device_name, pick_device
from fasteagle.errors import FasteagleError
from fasteagle.quant import packed, planes

N, K, GROUP = 256, 256, 128
MOST_ERROR = 2e-3  # of the kernel's result, relative to its largest value


def run(context: Context) -> None:
    pick_device(str(context.device))  # raises where it is not there, or too old
    context.save(device=machine(context))
    found = context.found["device"]
    context.say(", ".join(f"{key} {value}" for key, value in found.items()))
    error = kernel_error(context)
    context.say(f"int4 kernel, 7 rows of {K} by {N}: error {error:.1e} of the largest value")
    if not error < MOST_ERROR:
        raise FasteagleError(f"the int4 kernel is wrong: error {error:.1e}, limit {MOST_ERROR:g}")
    if not context.dry_run:
        context.say(f"a small capture replays: {small_capture(context.device)}")


def machine(context: Context) -> dict[str, Any]:
    """Device, driver and bandwidth."""
    device = context.device
    found: dict[str, Any] = {"name": device_name(device), "host": platform.machine()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "sm": f"{properties.major}{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_gb": round(properties.total_memory / 1e9, 1),
            "l2_mb": round(properties.L2_cache_size / 1e6, 1),
            "cuda": torch.version.cuda,
            **_driver(),
        }
    n_bytes = 2**24 if context.dry_run else 2**30
    return {**found, "copy_gb_s": round(copy_bandwidth(device, n_bytes), 1)}


def _driver() -> dict[str, str]:
    """Driver version and power limit, as nvidia-smi says; nothing where there is no such tool."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    query = "--query-gpu=driver_version,power.limit,clocks.max.sm"
    try:
        done = subprocess.run(
            [tool, query, "--format=csv,noheader"], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    values = [part.strip() for part in done.stdout.split("\n")[0].split(",")]
    if done.returncode != 0 or len(values) != 3:
        return {}
    return dict(zip(("driver", "power_limit", "max_clock"), values, strict=True))


def kernel_error(context: Context) -> float:
    """The largest error of the int4 kernel, relative to the largest value."""
    if context.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported
    from fasteagle.quant.kernels import linear  # Triton exists where CUDA does

    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, 16, (N, K), generator=generator)
    zeros = torch.randint(0, 16, (N, K // GROUP), generator=generator)
    scales = torch.rand(N, K // GROUP, generator=generator).half() / 100
    weight = packed.int4(values, scales, zeros=zeros)
    x = torch.randn(7, K, generator=generator).half()
    y = linear(x.to(context.device), planes.pack_planes(weight.to(context.device))).cpu()
    expected = x.float() @ weight.dequantize().T
    return float((y - expected).abs().max() / expected.abs().max())


def small_capture(device: torch.device) -> bool:
    """Whether a captured addition adds again when it is replayed."""
    x = torch.zeros(8, device=device)

    def step() -> None:
        x.add_(1)

    replay = CudaGraphs(x.device).capture(step, lambda: None)
    x.zero_()
    replay()
    replay()
    torch.cuda.synchronize(device)
    if x.tolist() != [2.0] * 8:
        raise FasteagleError(f"a captured addition, replayed twice, made {x.tolist()}")
    return True
