"""Open and load a model: from its name and options to an engine that is ready to answer.

`open_model` finds a model and opens its files, `prepared` puts its weights under the scheme that
options name, `engine` loads them. `loaded` does the last two and tells the user. Options that can
be refused without weights are checked between opening and loading.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import threading
import time
from collections.abc import Callable, Iterator

import torch

from fasteagle.compile.backend import choose_backend
from fasteagle.compile.proof import prove
from fasteagle.config import HeadConfig
from fasteagle.decoding.runner import Advice
from fasteagle.device import (
    TORCH_DTYPES,
    accumulate_on,
    available_bytes,
    pick_device,
    pick_dtype,
    short_of_memory,
    unless_short,
)
from fasteagle.errors import FasteagleError, note
from fasteagle.generate import Engine
from fasteagle.loading import registry
from fasteagle.loading.checkpoint import load_model, open_checkpoint
from fasteagle.loading.memory import smaller_fit
from fasteagle.loading.quantize import scheme_asked, with_scheme
from fasteagle.loading.source import Linears
from fasteagle.loading.tensors import Checkpoint, DummyCheckpoint
from fasteagle.loading.tokenizer import ChatTokenizer, DummyTokenizer, load_tokenizer
from fasteagle.loading.torchao_backend import quantize_with_torchao
from fasteagle.options import RuntimeOptions
from fasteagle.paths import ensure_cache
from fasteagle.quant import cpu_build
from fasteagle.quant.scheme import Scheme, parse_scheme

PATIENCE = 1.0  # seconds


@dataclasses.dataclass(frozen=True)
class OpenedModel:
    """Model whose files are open: its weights as they are stored, none of them loaded yet."""

    name: str
    checkpoint: Checkpoint
    tokenizer: ChatTokenizer
    seconds: float = 0.0  # duration of opening

    def prepared(
        self, options: RuntimeOptions, notify: Callable[[str], None] = note
    ) -> PreparedModel:
        """Return the model with weights as `options` name them, quantized now if necessary.

        Where they name neither a scheme nor a dtype, files that hold 4 or 8 bits run in these.
        Raises `FasteagleError` for schemes that do not fit the model or contradict its own.
        """
        checkpoint, quant = self.checkpoint, self._quant(options)
        device = pick_device(options.device)
        if self.quantized_on_cpu(options):
            dtype_name = pick_dtype(options.dtype, device, quantized=True)
            may_use_native(options, device, TORCH_DTYPES[dtype_name])  # refuses before quantizing
        if isinstance(checkpoint, DummyCheckpoint):
            checkpoint = DummyCheckpoint(checkpoint.config, checkpoint.scheme, device)
        if options.backend == "torchao" and options.quant is not None:
            scheme: Scheme | None = parse_scheme(
                options.quant, checkpoint.config, options.head_bits
            )
        else:
            checkpoint = with_scheme(checkpoint, quant, options.head_bits, notify, device)
            scheme = checkpoint.scheme
        dtype_name = pick_dtype(options.dtype, device, scheme is not None)
        return PreparedModel(
            self.name, checkpoint, self.tokenizer, options, scheme, device, dtype_name
        )

    def check(self, options: RuntimeOptions) -> None:
        """Raise `FasteagleError` for options that this model cannot have; reads no weights."""
        config = self.checkpoint.config
        options.seq_len_for(config.max_seq_len, self.name)
        quant = self._quant(options)
        if quant is not None:
            scheme_asked(self.checkpoint, quant, options.head_bits)
        elif options.lm_head != "int8" and self.checkpoint.scheme is None:
            raise FasteagleError(
                "-lm4 and -lm16 are parts of a quantized precision, and this model's is not: use "
                f"int4-lm{options.head_bits} or int8-lm{options.head_bits}, or leave it out"
            )
        beyond = [token for token in self.tokenizer.eos_ids if token >= config.vocab_size]
        if beyond:
            raise FasteagleError(
                f"{self.name}: eos_token_id {max(beyond)} is beyond the vocabulary of "
                f"{config.vocab_size:,}: correct config.json or generation_config.json"
            )

    @property
    def own_quant(self) -> str | None:
        """Option for the scheme in which the files hold the weights, None where there is none."""
        own = self.checkpoint.own_scheme
        return None if own is None else f"int{own.bits}"

    def _quant(self, options: RuntimeOptions) -> str | None:
        if options.quant is None and options.dtype == "auto":
            return self.own_quant
        return options.quant

    def quantized_on_cpu(self, options: RuntimeOptions) -> bool:
        """Return whether `options` run the model quantized by us on a CPU.

        Such a model has a default tree of its own.
        """
        on_cpu = pick_device(options.device).type == "cpu"
        ours = options.backend == "fasteagle" and self._quant(options) is not None
        return on_cpu and (ours or self.checkpoint.scheme is not None)

    def loaded(
        self,
        options: RuntimeOptions,
        notify: Callable[[str], None] = note,
        head: HeadConfig | None = None,
    ) -> Runtime:
        """Prepare and load the model. Raises `FasteagleError` with value, limit and fix.

        `head` is the shape of the draft head that will be loaded too, for which memory must be
        left.
        """
        start = time.perf_counter()
        prepared = self.prepared(options, notify)
        engine = prepared.engine(head)
        seconds = self.seconds + time.perf_counter() - start
        notify(f"{prepared}, loaded in {seconds:.1f} s; {engine.backend.describe()}")
        return Runtime(prepared.name, prepared.checkpoint, prepared.tokenizer, engine)


@dataclasses.dataclass(frozen=True)
class PreparedModel:
    """Model ready to load: the scheme, device and dtype of its weights are decided."""

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

    def engine(self, head: HeadConfig | None = None) -> Engine:
        """Load the weights into an engine that runs eagerly; see `build_engine`."""
        return build_engine(
            self.checkpoint, self.dtype_name, self.device, self.options, self.name, head
        )

    def __str__(self) -> str:
        """Describe the model in words: its name, scheme, dtype and device."""
        scheme = ""
        if self.scheme:
            ours = self.options.backend == "fasteagle"
            sums = ", sums in fp16" if ours and accumulate_on(self.device) == "fp16" else ""
            scheme = f"{self.scheme.name}{sums} ({self.options.backend}), "
        return f"{self.name}: {scheme}{self.dtype_name} on {self.device}"


def open_model(model: str, notify: Callable[[str], None] = note) -> OpenedModel:
    """Find a model (registry name, folder, file, Hugging Face id), fetch it if needed, open it."""
    ensure_cache(notify)
    source = registry.resolve(model)
    start = time.perf_counter()
    with telling(f"opening {source.path.name} ...", notify):
        checkpoint = open_checkpoint(source.path)
        tokenizer = load_tokenizer(source.path, source.template)
    return OpenedModel(source.name, checkpoint, tokenizer, time.perf_counter() - start)


def open_for(
    model: str, options: RuntimeOptions, notify: Callable[[str], None] = note
) -> OpenedModel:
    """Open a model once the device that `options` name is known to exist; see `open_model`."""
    pick_device(options.device)  # before anything is fetched
    if options.threads:
        torch.set_num_threads(options.threads)
    return open_model(model, notify)


@contextlib.contextmanager
def telling(line: str, notify: Callable[[str], None]) -> Iterator[None]:
    """Notify with `line` if the block inside takes longer than `PATIENCE`."""
    timer = threading.Timer(PATIENCE, notify, [line])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def open_dummy(name: str) -> OpenedModel:
    """Open random weights in the shape of a registry model, for benchmarks without a download."""
    checkpoint = DummyCheckpoint(registry.preset(name))
    return OpenedModel(name, checkpoint, DummyTokenizer(checkpoint.config.vocab_size))


@dataclasses.dataclass
class Runtime:
    """Loaded model with everything needed to talk to it."""

    name: str
    checkpoint: Checkpoint
    tokenizer: ChatTokenizer
    engine: Engine


def load_runtime(model: str, options: RuntimeOptions) -> Runtime:
    """Find, check and load a model. Raises `FasteagleError` with the value, limit and fix."""
    return open_for(model, options).loaded(options)


def build_engine(
    checkpoint: Checkpoint,
    dtype_name: str,
    device: torch.device,
    options: RuntimeOptions,
    name: str,
    head: HeadConfig | None = None,
) -> Engine:
    """Load the weights into an engine that runs eagerly.

    Linears of a checkpoint that has a `scheme` are quantized; see `OpenedModel.prepared`. Raises
    `FasteagleError` for what is missing, and where memory is short, with what fits beside a draft
    `head`.
    """
    max_seq_len = options.seq_len_for(checkpoint.config.max_seq_len, name)
    needs_kernels = device.type == "cuda" and checkpoint.scheme is not None
    if needs_kernels and importlib.util.find_spec("triton") is None:
        raise FasteagleError(
            "quantized weights run on CUDA by Triton kernels, and Triton is not installed: "
            "pip install triton, or use --precision bf16"
        )
    dtype = TORCH_DTYPES[dtype_name]
    config, scheme = checkpoint.config, checkpoint.scheme

    def fitting(n_bytes: int, head: HeadConfig | None = head) -> str:
        return smaller_fit(config, n_bytes, scheme, options.kv, max_seq_len, head)

    def advice(head: HeadConfig | None) -> str:
        """Return what would fit on the device; memory that the model holds counts as free."""
        n_bytes = torch.cuda.memory_reserved(device) + (available_bytes(device) or 0)
        return fitting(n_bytes, head)

    return unless_short(
        lambda: _built_engine(checkpoint, dtype, device, options, max_seq_len, advice),
        lambda: short_of_memory("loading", device, fitting),
    )


def _built_engine(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    options: RuntimeOptions,
    max_seq_len: int,
    advice: Advice,
) -> Engine:
    """Build the engine of `build_engine` without its report on short memory."""

    quantized = checkpoint.scheme is not None
    native = quantized and may_use_native(options, device, dtype) and use_native(options)
    model = load_model(
        checkpoint,
        dtype=dtype,
        device=device,
        max_seq_len=max_seq_len,
        quantized=Linears(checkpoint, device, dtype, native) if quantized else None,
        kv=options.kv,
    )
    if options.backend == "torchao" and options.quant:
        quantize_with_torchao(model, options.quant, options.head_bits)
    backend = choose_backend(model, options.kv, advice if device.type == "cuda" else None)
    prove(backend, options.strict)
    return Engine(model, max_seq_len, backend=backend)


def may_use_native(options: RuntimeOptions, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether quantized weights run by our CPU kernels, if these can be built.

    Raises `FasteagleError` where options name the kernels and these do not take the dtype.
    """
    if device.type != "cpu" or options.cpu_kernels == "aten":
        return False
    if dtype != torch.float16:
        return True
    if options.cpu_kernels == "native":
        raise FasteagleError(
            "our CPU kernels have no fp16: use bf16 or fp32 in the precision, or leave -native out"
        )
    return False


def use_native(options: RuntimeOptions) -> bool:
    """Load our CPU kernels, built at first use; return False and warn where there are none."""
    why_not = cpu_build.available(options.cpu_kernels, note)
    if why_not is not None:
        note(f"warning: torch's own CPU kernels are used: {why_not}")
    return why_not is None
