"""What Inductor would launch on CUDA for a function, counted without a GPU, a driver or CUDA.

The function is traced on CPU tensors and functionalized as `torch.compile` does. Its graph is then
moved to the device "cuda" on fake tensors and lowered for an RTX 3090 up to the Python code that
would launch the kernels; nothing is compiled further or run.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from types import SimpleNamespace
from unittest import mock

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import (
    _recursive_post_grad_passes,
    fake_tensor_prop,
    view_to_reshape,
)
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V

from fasteagle.compile.cycles import FOR_GRAPHS

RTX_3090 = SimpleNamespace(
    name="NVIDIA GeForce RTX 3090",
    gcnArchName="",  # which products ask for on any card
    major=8,
    minor=6,
    multi_processor_count=82,
    total_memory=24 << 30,
    warp_size=32,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=1536,
    max_threads_per_block=1024,
    shared_memory_per_block_optin=101376,
    L2_cache_size=6 << 20,
)
CUDA = torch.device("cuda", 0)


class Counted(Exception):
    """Carries the code out of the compiler."""


def launches(function, *args) -> Counter[str]:
    """Calls in the code for `function(*args)` by name; "triton" are Inductor's own kernels."""
    torch._dynamo.reset()
    backend = aot_autograd(
        fw_compiler=_lower,
        inference_compiler=_lower,
        decompositions=select_decomp_table(),
        keep_inference_input_mutations=True,
    )
    try:
        with torch.no_grad():
            torch.compile(function, fullgraph=True, backend=backend)(*args)
    except (BackendCompilerFailed, Counted) as error:
        cause = error if isinstance(error, Counted) else error.inner_exception
        if isinstance(cause, Counted):
            return calls(str(cause))
        raise
    raise AssertionError("the function has no operation")


def calls(code: str) -> Counter[str]:
    found = Counter({"triton": len(re.findall(r"^\s+triton_\w+\.run\(", code, re.M))})
    for name in re.findall(r"torch\.ops\.(\w+\.\w+)\.\w+\(", code):
        found[name] += 1
    for name in re.findall(r"extern_kernels\.(\w+)\(", code):
        found[name] += 1
    found["copy"] = len(re.findall(r"\.copy_\(", code))
    return found


def _lower(graph: fx.GraphModule, inputs: list[torch.Tensor]):
    mode = next(t.fake_mode for t in inputs if hasattr(t, "fake_mode"))
    with contextlib.ExitStack() as stack:
        for target, value in _driver().items():
            stack.enter_context(mock.patch(target, value))
        stack.enter_context(inductor_config.patch(FOR_GRAPHS))
        stack.enter_context(V.set_fake_mode(mode))
        view_to_reshape(graph)
        _recursive_post_grad_passes(graph, is_inference=True)
        moved = _move(graph, inputs, mode)
        lowering = GraphLowering(graph, shape_env=mode.shape_env, example_inputs=moved)
        stack.enter_context(V.set_graph_handler(lowering))
        stack.enter_context(V.set_debug_handler(DebugContext()))
        lowering.run(*moved)
        raise Counted(lowering.codegen()[0].value)


def _driver() -> dict[str, object]:
    """What Inductor asks of a device."""

    def properties(*_):
        return RTX_3090

    interface = "torch._dynamo.device_interface.CudaInterface"
    return {
        f"{interface}.get_device_properties": properties,
        f"{interface}.Worker.get_device_properties": properties,
        "torch.cuda.get_device_properties": properties,
        "torch.cuda.get_device_capability": lambda *_: (8, 6),
        "torch.cuda.current_device": lambda: 0,
        "torch.cuda.is_available": lambda: True,
        "torch._inductor.scheduler.has_triton": lambda *_: True,
        "torch.utils._triton.triton_hash_with_backend": lambda: "none",
    }


def _move(graph: fx.GraphModule, inputs, mode) -> list[object]:
    """The same graph over CUDA's fake tensors."""
    for node in graph.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": CUDA}
    for name, buffer in list(graph.named_buffers()):
        setattr(graph, name, buffer)
    with mode:
        moved = [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=CUDA)
            if isinstance(t, torch.Tensor)
            else t
            for t in inputs
        ]
        fake_tensor_prop(graph, moved, force_allow_non_fake_inputs=True)
    return moved
