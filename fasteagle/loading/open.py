"""From a model's name and options to an engine that is ready to answer."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch

from fasteagle.compile import BlockCompiler
from fasteagle.compile.cycles import CycleCompiler
from fasteagle.compile.graphs import make_engine
from fasteagle.compile.tree_attention import has_kernel, use_tree_attention
from fasteagle.drafting.draft_head import HeadDrafter
from fasteagle.errors import FasteagleError
from fasteagle.generate import MAX_TREE_ROWS, Engine
from fasteagle.loading import registry
from fasteagle.loading.checkpoint import Checkpoint, DummyCheckpoint, load_model, open_checkpoint
from fasteagle.loading.tokenizer import ChatTokenizer, load_tokenizer
from fasteagle.options import RuntimeOptions, SamplingParams
from fasteagle.sampling import DrawKind
from fasteagle.quant.scheme import Scheme, parse_scheme

if TYPE_CHECKING:
    from fasteagle.loading.source import QuantizedSource

TORCHAO = "-torchao"  # behind int4 or int8: torchao's formats and kernels instead of ours
TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def note(text: str) -> None:
    """A line for the person, apart from the answer."""
    print(text, file=sys.stderr, flush=True)


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
        from fasteagle.quant.torchao_backend import quantize_with_torchao

        quantize_with_torchao(model, options.quant, options.head_bits)
    if has_kernel(checkpoint.config, dtype, device):
        use_tree_attention(model)
    return make_engine(model, max_seq_len)


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


def start_compiler(engine: Engine, params: SamplingParams | None = None) -> BlockCompiler:
    """Begin to compile what the engine runs in the background, for answers drawn like `params`."""
    drafter = engine.drafter
    head_block = drafter.head.block if isinstance(drafter, HeadDrafter) else None
    kind = DrawKind.of(params or SamplingParams(), engine.model.config.vocab_size)
    cycles = CycleCompiler(engine, kind)
    max_slots = engine.max_seq_len + MAX_TREE_ROWS
    compiler = BlockCompiler(engine.model, max_slots, head_block, cycles)
    compiler.start()
    return compiler


def compile_now(engine: Engine, params: SamplingParams | None = None) -> bool:
    """Compile what the engine runs and use it; a warning line and False where that fails."""
    compiler = start_compiler(engine, params)
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
    """ "auto" is bf16 where the hardware multiplies it, else fp32.

    The CPU kernels of quantized weights take bf16 whatever the hardware multiplies.
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
