"""From a model's name and options to an engine that is ready to answer."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch

from fasteagle.compile.tree_attention import has_kernel, use_tree_attention
from fasteagle.device import TORCH_DTYPES, pick_device, pick_dtype
from fasteagle.drafters import HeadDrafter
from fasteagle.errors import note
from fasteagle.generate import MAX_TREE_ROWS, Engine
from fasteagle.loading import registry
from fasteagle.loading.checkpoint import Checkpoint, DummyCheckpoint, load_model, open_checkpoint
from fasteagle.loading.tokenizer import ChatTokenizer, load_tokenizer
from fasteagle.options import RuntimeOptions
from fasteagle.quant.scheme import Scheme, parse_scheme

if TYPE_CHECKING:
    from fasteagle.compile import BlockCompiler
    from fasteagle.loading.source import QuantizedSource

TORCHAO = "-torchao"  # behind int4 or int8: torchao's formats and kernels instead of ours


@dataclasses.dataclass
class Runtime:
    """A loaded model with everything needed to talk to it."""

    name: str
    checkpoint: Checkpoint
    tokenizer: ChatTokenizer
    engine: Engine
    dtype_name: str
    load_seconds: float


def load_runtime(model: str, options: RuntimeOptions, quiet: bool = False) -> Runtime:
    """Find, check, load. Raises `FasteagleError` with the value, the limit and the fix."""
    device = pick_device(options.device)
    if options.threads:
        torch.set_num_threads(options.threads)
    source = registry.resolve(model)
    start = time.perf_counter()
    stored = open_checkpoint(source.path)
    tokenizer = load_tokenizer(source.path, source.template)
    notify = (lambda line: None) if quiet else note
    checkpoint = quantized_checkpoint(stored, options, tokenizer, notify)
    scheme = scheme_of(checkpoint, options)
    dtype_name = pick_dtype(options.dtype, device, scheme is not None)
    engine = build_engine(checkpoint, dtype_name, device, options, source.name)
    seconds = time.perf_counter() - start
    what = f"{scheme.name} ({options.backend}), {dtype_name}" if scheme else dtype_name
    notify(f"{source.name}: {what} on {device}, loaded in {seconds:.1f} s")
    return Runtime(source.name, checkpoint, tokenizer, engine, dtype_name, seconds)


def build_engine(
    checkpoint: Checkpoint,
    dtype_name: str,
    device: torch.device,
    options: RuntimeOptions,
    name: str,
) -> Engine:
    """Load the weights and make an engine around them, running eagerly.

    Linears of a checkpoint that has a `scheme` are quantized; see `quantized_checkpoint`.
    """
    max_seq_len = options.seq_len_for(checkpoint.config.max_seq_len, name)
    dtype = TORCH_DTYPES[dtype_name]
    linears = None
    if hasattr(checkpoint, "scheme"):
        from fasteagle.loading.source import Linears

        linears = Linears(cast("QuantizedSource", checkpoint), device, dtype)
    model = load_model(
        checkpoint,
        dtype=dtype,
        device=device,
        max_seq_len=max_seq_len,
        source=name,
        quantized=linears,
    )
    if options.backend == "torchao" and options.quant:
        from fasteagle.loading.torchao_backend import quantize_with_torchao

        quantize_with_torchao(model, options.quant, options.head_bits)
    if has_kernel(checkpoint.config, dtype, device):
        use_tree_attention(model)
    return Engine(model, max_seq_len)


def quantized_checkpoint(
    checkpoint: Checkpoint,
    options: RuntimeOptions,
    tokenizer: ChatTokenizer,
    notify: Callable[[str], None] = note,
) -> Checkpoint:
    """The checkpoint under the scheme the options ask for; the same one where they ask for none."""
    if options.backend == "torchao" or options.quant is None:
        return checkpoint
    from fasteagle.loading.quantize import with_scheme

    return with_scheme(checkpoint, options.quant, options.head_bits, notify, tokenizer)


def scheme_of(checkpoint: Checkpoint, options: RuntimeOptions) -> Scheme | None:
    """In which scheme a checkpoint's linears run; None where they are dense."""
    if options.backend == "torchao" and options.quant:
        return parse_scheme(options.quant, checkpoint.config, options.head_bits)
    return getattr(checkpoint, "scheme", None)


def dummy_checkpoint(name: str) -> DummyCheckpoint:
    """Random weights in the shape of a registry model, for benchmarks without a download."""
    return DummyCheckpoint(registry.preset(name))


def start_compiler(engine: Engine) -> BlockCompiler:
    """Begin to compile the engine's blocks in the background."""
    from fasteagle.compile import BlockCompiler

    drafter = engine.drafter
    head_block = drafter.state.head.block if isinstance(drafter, HeadDrafter) else None
    compiler = BlockCompiler(engine.model, engine.max_seq_len + MAX_TREE_ROWS, head_block)
    compiler.start()
    return compiler


def compile_now(engine: Engine) -> bool:
    """Compile the engine's blocks and use them; a warning line and False where that fails."""
    compiler = start_compiler(engine)
    compiler.wait()
    if compiler.apply():
        return True
    note(f"warning: running without compilation: {compiler.error}")
    return False


def precision_options(runtime: RuntimeOptions, precision: str) -> RuntimeOptions:
    """`runtime` for a precision by name: bf16, fp16, fp32, a scheme, or one with "-torchao"."""
    if precision in TORCH_DTYPES:
        return dataclasses.replace(runtime, dtype=precision, quant=None, backend="fasteagle")
    name = precision.removesuffix(TORCHAO)
    backend = "torchao" if name != precision else runtime.backend
    return dataclasses.replace(runtime, quant=name, backend=backend)
