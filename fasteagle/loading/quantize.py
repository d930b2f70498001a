"""Quantizing a checkpoint: once, into a folder of ours in the user cache or where a person says."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path

from torch import Tensor

from fasteagle.device import pick_device, pick_dtype
from fasteagle.errors import FasteagleError, note
from fasteagle.loading import registry
from fasteagle.loading.checkpoint import (
    Checkpoint,
    DummyCheckpoint,
    expected_shapes,
    fingerprint,
    open_checkpoint,
)
from fasteagle.loading.gptq_pass import gptq_weights
from fasteagle.loading.open import build_engine, compile_now
from fasteagle.loading.source import DummySource, OwnSource, is_block_linear, own_packed, own_scheme
from fasteagle.loading.stored import StoredFolder, is_stored, save
from fasteagle.loading.text import write_conversations
from fasteagle.loading.tokenizer import ChatTokenizer, load_tokenizer
from fasteagle.options import RuntimeOptions
from fasteagle.paths import atomic_dir, cache_dir, require_free_space
from fasteagle.prompts import read_conversations
from fasteagle.quant.packed import PackedWeight
from fasteagle.quant.params import quantize_weight
from fasteagle.quant.scheme import Scheme, parse_scheme

GPTQ_TOKENS = 8192


def with_scheme(
    checkpoint: Checkpoint,
    quant: str | None,
    head_bits: int = 8,
    notify: Callable[[str], None] = lambda line: None,
    tokenizer: ChatTokenizer | None = None,
) -> Checkpoint:
    """`checkpoint` as `quant` wants it: "int4", "int8", a scheme's name, or None for as it is.

    Raises `FasteagleError` for schemes that contradict a checkpoint quantized already.
    """
    own = own_scheme(checkpoint, head_bits)
    fixed = getattr(checkpoint, "scheme", None) is not None
    if quant is None:
        return checkpoint
    if own is not None and quant == f"int{own.bits}":
        return OwnSource(checkpoint, dataclasses.replace(own, head_bits=head_bits))
    if fixed and own is not None:
        raise FasteagleError(
            f"this checkpoint is quantized already ({own.name}), which {quant} contradicts: "
            f"drop the option, or use the unquantized checkpoint"
        )
    scheme = parse_scheme(quant, checkpoint.config, head_bits)
    if isinstance(checkpoint, DummyCheckpoint):
        return DummySource(checkpoint.config, scheme)
    identity = fingerprint(checkpoint)
    folder = cache_dir() / "quantized" / f"{identity[:24]}-{scheme.name}"
    if not is_stored(folder):
        notify(f"quantizing to {scheme.name} (once; kept in the user cache) ...")
        with atomic_dir(folder) as temporary:
            write_folder(temporary, checkpoint, scheme, tokenizer, notify)
    stored = StoredFolder(folder)
    # What the LM head becomes is decided at load; the folder holds it in 16 bits.
    stored.scheme = dataclasses.replace(stored.scheme, head_bits=head_bits)
    return stored


def write_folder(
    folder: Path,
    checkpoint: Checkpoint,
    scheme: Scheme,
    tokenizer: ChatTokenizer | None,
    notify: Callable[[str], None],
    data: Path | None = None,
) -> None:
    """Quantize every block linear into `folder`, as `StoredFolder` reads it."""
    need = scheme.model_bytes(checkpoint.config)
    require_free_space(folder, need, f"the {scheme.name} weights")
    choose = chooser(checkpoint, scheme, tokenizer, notify, data)
    weights = quantized_weights(checkpoint, scheme, choose)
    save(folder, checkpoint, scheme, fingerprint(checkpoint), weights)


def quantized_weights(
    checkpoint: Checkpoint, scheme: Scheme, choose: Callable[[str, Tensor], PackedWeight]
) -> Iterable[tuple[str, PackedWeight | Tensor]]:
    """Every tensor of a model as `scheme` stores it, one by one; `choose` packs a block linear."""
    for name in sorted(expected_shapes(checkpoint.config)):
        linear = is_block_linear(name)
        own = own_packed(checkpoint, name)
        if own is not None and (scheme.method == "own" or not linear):
            yield name, own
        elif linear:
            yield name, choose(name, checkpoint.load(name))
        else:
            yield name, checkpoint.load(name)


def chooser(
    checkpoint: Checkpoint,
    scheme: Scheme,
    tokenizer: ChatTokenizer | None,
    notify: Callable[[str], None],
    data: Path | None = None,
) -> Callable[[str, Tensor], PackedWeight]:
    """What packs one named weight under `scheme`."""
    if scheme.method != "gptq":
        return lambda name, weight: quantize_weight(weight, scheme)
    found: dict[str, PackedWeight] = {}

    def choose(name: str, weight: Tensor) -> PackedWeight:
        if not found:
            assert tokenizer is not None, "GPTQ needs text, and text a tokenizer"
            texts = texts_for_gptq(checkpoint, tokenizer, notify, data)
            found.update(gptq_weights(checkpoint, texts, scheme))
        return found[name]

    return choose


def texts_for_gptq(
    checkpoint: Checkpoint,
    tokenizer: ChatTokenizer,
    notify: Callable[[str], None],
    data: Path | None,
) -> list[list[int]]:
    """Token ids to calibrate on: of a file, or of conversations the model makes up now."""
    config = checkpoint.config
    if data is None:
        notify(f"the model writes {GPTQ_TOKENS:,} tokens to calibrate on ...")
        data = own_text(checkpoint, tokenizer, GPTQ_TOKENS)
    found, total = [], 0
    for conversation in read_conversations(data, config.vocab_size, 512):
        found.append(conversation.ids)
        total += len(conversation.ids)
        if total >= GPTQ_TOKENS:
            break
    return found


def own_text(checkpoint: Checkpoint, tokenizer: ChatTokenizer, n_tokens: int) -> Path:
    """A file of conversations the model made up, kept in the user cache and only added to."""
    folder = cache_dir() / "text"
    folder.mkdir(parents=True, exist_ok=True)
    device = pick_device("auto")
    options = RuntimeOptions(max_seq_len=min(checkpoint.config.max_seq_len, 1024))
    engine = build_engine(checkpoint, pick_dtype("auto", device), device, options, "model")
    compile_now(engine)
    out = folder / f"{fingerprint(checkpoint)[:24]}.jsonl"
    return write_conversations(engine, tokenizer, out, n_tokens, 256)


def quantize_to(model: str, options: RuntimeOptions, out: Path, data: Path | None) -> None:
    """What `fasteagle quantize` does: the weights and the tokenizer of `model` into `out`."""
    if options.quant is None:
        raise FasteagleError("quantize to what? give --int4, --int8 or --quant NAME")
    if out.exists() and any(out.iterdir()):
        raise FasteagleError(f"{out} is there already and not empty: give another -o")
    source = registry.resolve(model)
    checkpoint = open_checkpoint(source.path)
    own = own_scheme(checkpoint, options.head_bits)
    if getattr(checkpoint, "scheme", None) is not None:
        raise FasteagleError(f"{model} is quantized already ({own.name if own else 'packed'})")
    tokenizer = load_tokenizer(source.path, source.template)
    if own is not None and options.quant == f"int{own.bits}":
        scheme = own
    else:
        scheme = parse_scheme(options.quant, checkpoint.config, options.head_bits)
    if out.exists():
        out.rmdir()
    with atomic_dir(out) as temporary:
        write_folder(temporary, checkpoint, scheme, tokenizer, note, data)
        tokenizer.save(temporary)
    size = sum(file.stat().st_size for file in out.iterdir())
    note(f"{scheme.name} weights of {source.name} written to {out} ({size / 1e6:.0f} MB)")
