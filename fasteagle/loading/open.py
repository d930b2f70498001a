"""Open and load a model: from its name and options to an engine that is ready to answer.

`open_model` finds a model and opens its files. `OpenedModel.check` refuses options that can be
refused without weights, `prepared` chooses the scheme, `PreparedModel.engine` loads the weights and
chooses the backend, which proves itself. `make_drafter` then attaches the drafter.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

import torch

from fasteagle.compile.backend import choose_backend
from fasteagle.compile.proof import prove
from fasteagle.config import HeadConfig
from fasteagle.device import (
    TORCH_DTYPES,
    accumulate_on,
    available_bytes,
    pick_device,
    pick_dtype,
    short_of_memory,
    unless_short,
)
from fasteagle.errors import FasteagleError, note, size_of, telling
from fasteagle.generate import Engine
from fasteagle.loading import registry
from fasteagle.loading.checkpoint import load_model, open_checkpoint, required_bytes
from fasteagle.loading.entries import REGISTRY
from fasteagle.loading.memory import Setting, needed_bytes, smaller_fit
from fasteagle.loading.quantize import scheme_for, with_scheme
from fasteagle.loading.source import Linears
from fasteagle.loading.tensors import Checkpoint, DummyCheckpoint
from fasteagle.loading.tokenizer import ChatTokenizer, dummy_tokenizer, load_tokenizer
from fasteagle.loading.torchao_backend import quantize_with_torchao
from fasteagle.options import RuntimeOptions
from fasteagle.paths import ensure_cache
from fasteagle.quant import cpu_build
from fasteagle.quant.scheme import BF16, Scheme, parse_scheme


def open_model(
    model: str, options: RuntimeOptions | None = None, notify: Callable[[str], None] = note
) -> OpenedModel:
    """Find a model (registry name, folder, file, Hugging Face id), fetch it if needed, open it.

    Raises `FasteagleError` for a device in `options` that is absent before anything is fetched.
    """
    if options is not None:
        pick_device(options.device)
        if options.threads:
            torch.set_num_threads(options.threads)
    ensure_cache(notify)
    if options is not None and model in REGISTRY and registry.local_path(model) is None:
        require_memory_of(model, options, notify)
    path = registry.resolve(model)
    template = REGISTRY[model].template if model in REGISTRY else None
    start = time.perf_counter()
    with telling(f"opening {path.name} ...", notify):
        checkpoint = open_checkpoint(path)
        tokenizer = load_tokenizer(path, template)
    seconds = time.perf_counter() - start
    return OpenedModel(model, checkpoint, tokenizer, seconds, path)


def require_memory_of(name: str, options: RuntimeOptions, notify: Callable[[str], None]) -> None:
    """Say what memory a model of the registry needs, before it is downloaded.

    Raises `FasteagleError` where the device has less.
    """
    entry, device = REGISTRY[name], pick_device(options.device)
    if entry.repo is None:
        return
    config, quantized = entry.config, options.quant is not None
    scheme = BF16
    if options.quant is not None:
        scheme = parse_scheme(options.quant, config, options.head_bits)
    dtype = pick_dtype(options.dtype, device, quantized)
    context = options.seq_len_for(config.max_seq_len, name)
    kv = "int8" if options.kv == "int8" else "auto"
    dense, cache = required_bytes(config, TORCH_DTYPES[dtype], context, kv)
    need = cache + (scheme.model_bytes(config) if quantized else dense)
    if device.type == "cuda":  # which counts no fp32
        need = max(need, needed_bytes(config, Setting(scheme, kv, context)))
    free = available_bytes(device)
    precision = scheme.name if quantized else dtype
    line = f"{name} needs {size_of(need)} of memory ({precision}, {context:,} tokens)"
    if free is not None and need > free:
        fit = smaller_fit(config, free, scheme, kv, context)
        raise FasteagleError(f"{line}, {size_of(free)} free on {device}: {fit}")
    room = "" if free is None else f", {size_of(free)} free on {device}: it fits"
    notify(f"{line}{room}")


def open_dummy(name: str) -> OpenedModel:
    """Open random weights in the shape of a registry model, for benchmarks without a download."""
    checkpoint = DummyCheckpoint(registry.preset(name))
    return OpenedModel(name, checkpoint, dummy_tokenizer(checkpoint.config.vocab_size))


@dataclasses.dataclass(frozen=True)
class OpenedModel:
    """Model whose files are open: its weights as they are stored, none of them loaded yet."""

    name: str
    checkpoint: Checkpoint
    tokenizer: ChatTokenizer
    seconds: float = 0.0  # duration of opening
    path: Path | None = None  # of its files

    def check(self, options: RuntimeOptions) -> None:
        """Raise `FasteagleError` for options that this model cannot have; reads no weights."""
        config = self.checkpoint.config
        options.seq_len_for(config.max_seq_len, self.name)
        quant = self.quant_of(options)
        if quant is not None:
            scheme_for(self.checkpoint, quant, options.head_bits)
        elif options.lm_head != "int8" and self.checkpoint.scheme is None:
            raise FasteagleError(
                "-lm4 and -lm16 are parts of a quantized precision, and this model's is not: use "
                f"int4-lm{options.head_bits} or int8-lm{options.head_bits}, or leave it out"
            )
        beyond = [token for token in self.tokenizer.eos_ids if token >= config.vocab_size]
        if beyond:
            raise FasteagleError(
                f"{self.name}: eos_token_id {max(beyond)} is beyond the vocabulary of "
                f"{config.vocab_size:,}: correct config.json, "
                "generation_config.json or the tokens added in tokenizer.json"
            )

    def quant_of(self, options: RuntimeOptions) -> str | None:
        """Return the scheme that `options` name, else that of the files unless a dtype is named."""
        own = self.checkpoint.own_scheme
        is_named = options.quant is not None or options.dtype != "auto"
        return options.quant if is_named or own is None else f"int{own.bits}"

    def quantized_on_cpu(self, options: RuntimeOptions) -> bool:
        """Return whether `options` run the model quantized by us on a CPU.

        Such a model has a default tree of its own.
        """
        ours = options.backend == "fasteagle" and self.quant_of(options) is not None
        on_cpu = pick_device(options.device).type == "cpu"
        return on_cpu and (ours or self.checkpoint.scheme is not None)

    def prepared(
        self, options: RuntimeOptions, notify: Callable[[str], None] = note
    ) -> PreparedModel:
        """Return the model with weights as `options` name them, quantized now if necessary.

        Where they name neither a scheme nor a dtype, files that hold 4 or 8 bits run in these.
        Raises `FasteagleError` for schemes that do not fit the model or contradict its own.
        """
        checkpoint, quant = self.checkpoint, self.quant_of(options)
        device = pick_device(options.device)
        quantized = quant is not None or checkpoint.scheme is not None
        dtype_name = pick_dtype(options.dtype, device, quantized)
        if self.quantized_on_cpu(options):
            wants_cpu_kernels(options, device, dtype_name)  # refuses before quantizing
        scheme = None
        if options.backend == "torchao" and quant is not None:  # which quantizes loaded weights
            scheme, quant = parse_scheme(quant, checkpoint.config, options.head_bits), None
        checkpoint = with_scheme(checkpoint, quant, options.head_bits, notify, device)
        scheme = scheme or checkpoint.scheme
        return PreparedModel(self.name, checkpoint, options, scheme, device, dtype_name)

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
        engine = prepared.engine(head, notify)
        seconds = self.seconds + time.perf_counter() - start
        notify(f"{prepared}, loaded in {seconds:.1f} s; {engine.backend.describe()}")
        return Runtime(self.name, prepared.checkpoint, self.tokenizer, engine)


@dataclasses.dataclass(frozen=True)
class PreparedModel:
    """Model ready to load: the scheme, device and dtype of its weights are decided."""

    name: str
    checkpoint: Checkpoint
    options: RuntimeOptions
    scheme: Scheme | None  # in which the linears run; None: dense
    device: torch.device
    dtype_name: str

    @property
    def dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.dtype_name]

    def engine(
        self, head: HeadConfig | None = None, notify: Callable[[str], None] = note
    ) -> Engine:
        """Load the weights into an engine that runs eagerly, on the backend that fits them.

        Linears of a checkpoint that has a `scheme` are quantized. Raises `FasteagleError` for what
        is missing, and where memory is short, with what fits beside a draft `head`.
        """
        checkpoint, options, device = self.checkpoint, self.options, self.device
        config, scheme = checkpoint.config, checkpoint.scheme
        max_seq_len = options.seq_len_for(config.max_seq_len, self.name)

        def fitting(n_bytes: int, head: HeadConfig | None = head) -> str:
            return smaller_fit(config, n_bytes, scheme, options.kv, max_seq_len, head)

        def advice(head: HeadConfig | None) -> str:
            """Return what would fit on the device; memory that the model holds counts as free."""
            n_bytes = torch.cuda.memory_reserved(device) + (available_bytes(device) or 0)
            return fitting(n_bytes, head)

        def load() -> Engine:
            linears = None
            if scheme is not None:
                native = wants_cpu_kernels(options, device, self.dtype_name)
                native = native and has_cpu_kernels(options.cpu_kernels, notify)
                linears = Linears(checkpoint, device, self.dtype, native)
            model = load_model(
                checkpoint,
                dtype=self.dtype,
                device=device,
                max_seq_len=max_seq_len,
                quantized=linears,
                kv=options.kv,
            )
            if options.backend == "torchao" and options.quant:
                quantize_with_torchao(model, options.quant, options.head_bits, notify)
            backend = choose_backend(model, options.kv, advice if device.type == "cuda" else None)
            prove(backend, options.strict)
            return Engine(model, max_seq_len, backend=backend)

        return unless_short(load, lambda: short_of_memory("loading", device, fitting))

    def __str__(self) -> str:
        """Describe the model in words: its name, scheme, dtype and device."""
        scheme = ""
        if self.scheme:
            ours = self.options.backend == "fasteagle"
            sums = ", fp16 accumulation" if ours and accumulate_on(self.device) == "fp16" else ""
            scheme = f"{self.scheme.name}{sums} ({self.options.backend}), "
        return f"{self.name}: {scheme}{self.dtype_name} on {self.device}"


@dataclasses.dataclass
class Runtime:
    """Loaded model with everything needed to talk to it."""

    name: str
    checkpoint: Checkpoint
    tokenizer: ChatTokenizer
    engine: Engine


# Our CPU kernels


def wants_cpu_kernels(options: RuntimeOptions, device: torch.device, dtype_name: str) -> bool:
    """Return whether quantized weights run by our CPU kernels, if these can be built.

    Raises `FasteagleError` where options name the kernels and these do not take the dtype.
    """
    if device.type != "cpu" or options.cpu_kernels == "aten":
        return False
    if dtype_name == "fp16" and options.cpu_kernels == "native":
        raise FasteagleError(
            "our CPU kernels have no fp16: use bf16 or fp32 in the precision, or leave -native out"
        )
    return dtype_name != "fp16"


def has_cpu_kernels(choice: str, notify: Callable[[str], None]) -> bool:
    """Load our CPU kernels, built at first use; return False and warn where there are none."""
    why_not = cpu_build.available(choice, notify)
    if why_not is not None:
        note(f"warning: torch's own CPU kernels are used: {why_not}")
    return why_not is None
