"""Choose the backend of a loaded model by its device, its weights and its KV cache.

eager     the core, operation by operation (`decoding.backend.Backend`)
compiled  the eager backend with its blocks compiled by `torch.compile` (`blocks`)
cpu       quantized blocks in the layout of our C++ kernels (`cpu_backend`)
cuda      Triton kernels and CUDA graphs (`cuda_backend`)
"""

from __future__ import annotations

from fasteagle.compile.cpu_backend import CpuBackend, runs_on_cpu
from fasteagle.compile.cuda_backend import CudaBackend
from fasteagle.compile.int8_cache import core_target
from fasteagle.decoding.backend import Advice, Backend
from fasteagle.model import Transformer


def choose_backend(model: Transformer, kv: str = "auto", advice: Advice | None = None) -> Backend:
    """Return the backend that runs `model`, with the KV cache format that `--kv` names.

    `advice` suggests settings that fit when memory is short.
    """
    if model.norm.weight.device.type == "cuda":
        return CudaBackend(model, kv, advice)
    if runs_on_cpu(model, kv):
        return CpuBackend(model, kv, advice)
    return Backend(core_target(model, kv), advice)
