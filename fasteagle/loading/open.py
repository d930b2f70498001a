"""The one door: from a model's name and options to an engine that is ready to answer.

`open_model` finds a model and opens its files, `prepared` puts its weights under the scheme that
options ask for, `engine` loads them. `load_runtime` does all of it and tells the person.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from pathlib import Path

import torch

from fasteagle.compile import BlockCompiler
from fasteagle.compile.cpu_blocks import use_native_blocks
from fasteagle.compile.cycles import CycleCompiler
from fasteagle.compile.graphs import make_engine
from fasteagle.compile.tree_attention import has_kernel, use_tree_attention
from fasteagle.device import TORCH_DTYPES, pick_device, pick_dtype
from fasteagle.drafting.draft_head import HeadDrafter
from fasteagle.errors import note
from fasteagle.generate import MAX_TREE_ROWS, Engine
from fasteagle.loading import registry
from fasteagle.loading.checkpoint import load_model, open_checkpoint
from fasteagle.loading.quantize import with_scheme
from fasteagle.loading.source import Linears
from fasteagle.loading.tensors import Checkpoint, DummyCheckpoint, fingerprint
from fasteagle.loading.text import write_conversations
from fasteagle.loading.tokenizer import ChatTokenizer, DummyTokenizer, load_tokenizer
from fasteagle.loading.torchao_backend import quantize_with_torchao
from fasteagle.options import RuntimeOptions, SamplingParams
from fasteagle.paths import cache_dir
from fasteagle.prompts import read_conversations
from fasteagle.quant import cpu_build
from fasteagle.quant.scheme import Scheme, parse_scheme
from fasteagle.sampling import DrawKind

TORCHAO = "-torchao"  # suffix of int4 or int8: torchao's formats and kernels instead of ours
GPTQ_TOKENS = 8192


@dataclasses.dataclass(frozen=True)
class OpenedModel:
    """A model's files, opened: its weights as they are stored, none of them loaded yet."""

    name: str
    checkpoint: Checkpoint
    tokenizer: ChatTokenizer

    def prepared(
        self, options: RuntimeOptions, notify: Callable[[str], None] = note
    ) -> PreparedModel:
        """The weights as `options` ask for them; where it must be, they are quantized now.

        Where they ask for neither a scheme nor a dtype, files that hold 4 or 8 bits run in these.
        Raises `FasteagleError` for schemes that do not fit the model or contradict its own.
        """
        checkpoint = self.checkpoint
        quant = options.quant
        if quant is None and options.dtype == "auto" and checkpoint.own_scheme is not None:
            quant = f"int{checkpoint.own_scheme.bits}"  # as the files hold it
        if options.backend == "torchao" and options.quant is not None:
            scheme: Scheme | None = parse_scheme(
                options.quant, checkpoint.config, options.head_bits
            )
        else:
            texts = functools.partial(self.gptq_texts, notify)
            checkpoint = with_scheme(checkpoint, quant, options.head_bits, notify, texts)
            scheme = checkpoint.scheme
        device = pick_device(options.device)
        dtype_name = pick_dtype(options.dtype, device, scheme is not None)
        return PreparedModel(
            self.name, checkpoint, self.tokenizer, options, scheme, device, dtype_name
        )

    def gptq_texts(
        self, notify: Callable[[str], None], data: Path | None = None
    ) -> list[list[int]]:
        """Token ids for calibration: of a file, or of conversations that the model writes now."""
        if data is None:
            notify(f"the model writes {GPTQ_TOKENS:,} tokens to calibrate on ...")
            data = self._own_text(GPTQ_TOKENS)
        found, total = [], 0
        for conversation in read_conversations(data, self.checkpoint.config.vocab_size, 512):
            found.append(conversation.ids)
            total += len(conversation.ids)
            if total >= GPTQ_TOKENS:
                break
        return found

    def _own_text(self, n_tokens: int) -> Path:
        """A file of conversations that the model wrote, in the user cache; calls append to it."""
        folder = cache_dir() / "text"
        folder.mkdir(parents=True, exist_ok=True)
        options = RuntimeOptions(max_seq_len=min(self.checkpoint.config.max_seq_len, 1024))
        engine = self.prepared(options).engine()
        compile_now(engine)
        out = folder / f"{fingerprint(self.checkpoint)[:24]}.jsonl"
        return write_conversations(engine, self.tokenizer, out, n_tokens, 256)


@dataclasses.dataclass(frozen=True)
class PreparedModel:
    """A model whose weights can be loaded as they shall run: their scheme, device and dtype."""

    name: str
    checkpoint: Checkpoint
    tokenizer: ChatTokenizer
    options: RuntimeOptions
    scheme: Scheme | None  # in which the linears run; None: dense
    device: torch.device
    dtype_name: str

    @property
    def dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.dtype_name]

    def engine(self) -> Engine:
        """Load the weights into an engine that runs eagerly."""
        return build_engine(self.checkpoint, self.dtype_name, self.device, self.options, self.name)

    def __str__(self) -> str:
        """In a person's words."""
        scheme = f"{self.scheme.name} ({self.options.backend}), " if self.scheme else ""
        return f"{self.name}: {scheme}{self.dtype_name} on {self.device}"


def open_model(model: str) -> OpenedModel:
    """Find a model (registry name, folder, file, Hugging Face id), fetch it if needed, open it."""
    return open_source(registry.resolve(model))


def open_source(source: registry.Source) -> OpenedModel:
    checkpoint = open_checkpoint(source.path)
    return OpenedModel(source.name, checkpoint, load_tokenizer(source.path, source.template))


def open_dummy(name: str) -> OpenedModel:
    """Random weights in the shape of a registry model, for benchmarks without a download."""
    checkpoint = DummyCheckpoint(registry.preset(name))
    return OpenedModel(name, checkpoint, DummyTokenizer(checkpoint.config.vocab_size))


@dataclasses.dataclass
class Runtime:
    """A loaded model with everything needed to talk to it."""

    name: str
    checkpoint: Checkpoint
    tokenizer: ChatTokenizer
    engine: Engine


def load_runtime(model: str, options: RuntimeOptions, quiet: bool = False) -> Runtime:
    """Find, check, load. Raises `FasteagleError` with the value, the limit and the fix."""
    pick_device(options.device)  # before anything is fetched
    if options.threads:
        torch.set_num_threads(options.threads)
    source = registry.resolve(model)
    start = time.perf_counter()
    notify = (lambda line: None) if quiet else note
    prepared = open_source(source).prepared(options, notify)
    engine = prepared.engine()
    notify(f"{prepared}, loaded in {time.perf_counter() - start:.1f} s")
    return Runtime(prepared.name, prepared.checkpoint, prepared.tokenizer, engine)


def build_engine(
    checkpoint: Checkpoint,
    dtype_name: str,
    device: torch.device,
    options: RuntimeOptions,
    name: str,
) -> Engine:
    """Load the weights into an engine that runs eagerly.

    Linears of a checkpoint that has a `scheme` are quantized; see `OpenedModel.prepared`.
    """
    max_seq_len = options.seq_len_for(checkpoint.config.max_seq_len, name)
    dtype = TORCH_DTYPES[dtype_name]
    native = checkpoint.scheme is not None and use_native(options, device)
    linears = None
    if checkpoint.scheme is not None:
        linears = Linears(checkpoint, device, dtype, native)
    model = load_model(
        checkpoint,
        dtype=dtype,
        device=device,
        max_seq_len=max_seq_len,
        source=name,
        quantized=linears,
    )
    if options.backend == "torchao" and options.quant:
        quantize_with_torchao(model, options.quant, options.head_bits)
    if native:
        use_native_blocks(model)
    elif has_kernel(checkpoint.config, dtype, device):
        use_tree_attention(model)
    return make_engine(model, max_seq_len)


def use_native(options: RuntimeOptions, device: torch.device) -> bool:
    """Whether quantized weights run by our CPU kernels, which are loaded then; a line if not."""
    if device.type != "cpu" or options.cpu_kernels == "aten":
        return False
    if not cpu_build.is_built():
        note("compiling the CPU kernels (once, about half a minute) ...")
    why_not = cpu_build.available(options.cpu_kernels)
    if why_not is not None:
        note(f"warning: slower CPU kernels, torch's own, are used: {why_not}")
    return why_not is None


def start_compiler(engine: Engine, params: SamplingParams | None = None) -> BlockCompiler:
    """Begin to compile what the engine runs in the background, for answers drawn like `params`."""
    drafter = engine.drafter
    head_block = drafter.head.block if isinstance(drafter, HeadDrafter) else None
    kind = DrawKind.of(params or SamplingParams(), engine.model.config.vocab_size)
    cycles = CycleCompiler(engine, kind)
    max_slots = engine.max_seq_len + MAX_TREE_ROWS
    compiler = BlockCompiler(engine.model, max_slots, head_block, cycles, engine.state.tap_layers)
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
    """`runtime` for a precision by name: auto, bf16, fp16, fp32, a scheme, or one with "-torchao".

    auto: as the model's files hold it.
    """
    if precision == "auto":
        return dataclasses.replace(runtime, dtype="auto", quant=None)
    if precision in TORCH_DTYPES:
        return dataclasses.replace(runtime, dtype=precision, quant=None, backend="fasteagle")
    name = precision.removesuffix(TORCHAO)
    backend = "torchao" if name != precision else runtime.backend
    return dataclasses.replace(runtime, quant=name, backend=backend)
