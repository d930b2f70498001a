"""`torch.compile` for CUDA without CUDA: what Inductor generates runs on tensors of a CPU.

A function is traced and functionalized as `torch.compile` does. Its graph is moved to the device
"cuda" on fake tensors, lowered for a card to Python code, and that code is run with the device
"cpu" in the place of "cuda". The Triton kernels in it are launched on a `Card`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from types import SimpleNamespace
from unittest import mock

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._inductor import config as inductor_config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import PyCodeCache
from torch._inductor.compile_fx import (
    _recursive_post_grad_passes,
    fake_tensor_prop,
    view_to_reshape,
)
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.triton_heuristics import GridExpr
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
# Casts round as in eager mode, so that results can be compared bit for bit.
OPTIONS = FOR_GRAPHS | {"emulate_precision_casts": True}


def compiled(function: Callable) -> Callable:
    """Return `function` as `torch.compile` makes it for an RTX 3090."""
    backend = aot_autograd(
        fw_compiler=_lowered,
        inference_compiler=_lowered,
        decompositions=select_decomp_table(),
        keep_inference_input_mutations=True,
    )
    return torch.compile(function, fullgraph=True, dynamic=False, backend=backend)


class _Kernel:
    """A Triton kernel of Inductor's, with the first of its configurations."""

    def __init__(self, name: str, source: str) -> None:
        autotuner = getattr(PyCodeCache.load(source), name)
        self._function, self._config = autotuner.fn, autotuner.configs[0]
        self._signature = autotuner.triton_meta["signature"]
        self._constants = autotuner.triton_meta["constants"]
        self._meta = autotuner.inductor_meta

    def run(self, *args, stream: int) -> None:
        rest, values = iter(args), self._config.kwargs | self._constants
        for name in self._function.arg_names:
            if self._signature[name] != "constexpr":
                values[name] = next(rest)
        grid = GridExpr.from_meta(self._meta, self._config).eval_slow(values)
        values = {name: values[name] for name in self._function.arg_names}
        # With more warps threads past the end read scalars that the first thread writes, and drop
        # them: harmless, but a race.
        self._function[grid](**values, num_warps=1, enable_fp_fusion=True)  # as Inductor asks


def _lowered(graph: fx.GraphModule, inputs: list) -> Callable:
    """Return the code that Inductor generates for `graph`, as a function of tensors of a CPU."""
    mode = next(t.fake_mode for t in inputs if hasattr(t, "fake_mode"))
    with contextlib.ExitStack() as stack:
        for target, value in _driver().items():
            stack.enter_context(mock.patch(target, value))
        stack.enter_context(inductor_config.patch(OPTIONS))
        stack.enter_context(V.set_fake_mode(mode))
        view_to_reshape(graph)
        _recursive_post_grad_passes(graph, is_inference=True)
        moved = _move(graph, inputs, mode)
        lowering = GraphLowering(graph, shape_env=mode.shape_env, example_inputs=moved)
        stack.enter_context(V.set_graph_handler(lowering))
        stack.enter_context(V.set_debug_handler(DebugContext()))
        lowering.run(*moved)
        code = lowering.codegen()[0].value
        return _loaded(code)


def _loaded(code: str) -> Callable:
    """Return the function that generated code defines, for tensors of a CPU."""
    for written, meant in (
        (r"device\(type='cuda', index=0\)", "device('cpu')"),
        (r"device='cuda(:0)?'", "device='cpu'"),
        (r"with torch\.cuda\._DeviceGuard\(0\):", "if True:"),
        (r"torch\.cuda\.set_device\(0\)", "pass"),
        (r"from torch\._C import _cuda_getCurrentRawStream as get_raw_stream", ""),
        (r"get_raw_stream\(0\)", "0"),
        (r"_empty_strided_cuda$", "_empty_strided_cpu"),
    ):
        code = re.sub(written, meant, code, flags=re.M)
    names: dict = {"__name__": "generated"}
    with (
        mock.patch.object(
            AsyncCompile, "triton", lambda _, name, source, **_device: _Kernel(name, source)
        ),
        mock.patch.object(AsyncCompile, "wait", lambda *_: None),
    ):
        exec(compile(code, "generated", "exec"), names)
    return lambda *args: names["call"](list(args))


def _driver() -> dict[str, object]:
    """Return what Inductor asks of a device."""

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
        "torch._subclasses.fake_tensor.init_gpu_context": lambda *_: None,
        "torch._inductor.runtime.triton_helpers.set_driver_to_gpu": lambda: None,
    }


def _move(graph: fx.GraphModule, inputs: list, mode) -> list:
    """Move the graph to CUDA's fake tensors, and return its inputs there."""
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
