"""Quantize a checkpoint once, into our folder format: in the user cache or at a given path.

Some checkpoints come quantized (GGUF, GPTQ, AWQ, our own folders) and run as they are.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from fasteagle.device import short_of_memory, unless_short
from fasteagle.errors import FasteagleError, with_progress
from fasteagle.loading.heads.mtp import layer_names
from fasteagle.loading.names import MTP_LAYERS, expected_shapes, is_block_linear
from fasteagle.loading.stored import StoredFolder, save
from fasteagle.loading.tensors import Checkpoint, DummyCheckpoint, load_floats, weight_bytes
from fasteagle.paths import (
    atomic_dir,
    cache_dir,
    mark_used,
    remove_damaged,
    remove_unused,
    require_free_space,
)
from fasteagle.quant.packed import PackedWeight
from fasteagle.quant.params import quantize_weight
from fasteagle.quant.scheme import Scheme, parse_scheme


def with_scheme(
    checkpoint: Checkpoint,
    quant: str | None,
    head_bits: int = 8,
    notify: Callable[[str], None] = lambda line: None,
    device: torch.device | str = "cpu",
) -> Checkpoint:
    """Return `checkpoint` quantized as `quant` says, unchanged where that is None.

    `quant` is "int4", "int8" or a scheme's name. Values are chosen on `device`, one tensor at a
    time. Raises `FasteagleError` as `scheme_for` does.
    """
    scheme = checkpoint.scheme if quant is None else scheme_for(checkpoint, quant, head_bits)
    if isinstance(checkpoint, DummyCheckpoint):
        return DummyCheckpoint(checkpoint.config, scheme, device)
    if quant is None or scheme is None:
        return checkpoint
    if scheme.method == "own" or checkpoint.scheme is not None:
        if checkpoint.widened:
            kinds = ", ".join(checkpoint.widened)
            notify(f"{kinds} weights are converted: they run in 8 bits, 1.06 bytes each")
        return checkpoint.run_in(scheme)
    name = f"{checkpoint.fingerprint[:24]}-{_source(checkpoint)[:12]}-{scheme.name}"
    folder = cache_dir() / "quantized" / name
    stored = _stored(folder, notify)
    if stored is None:
        remove_unused(folder, notify)  # first: it makes room
        notify(f"quantizing to {scheme.name} (once; kept in the user cache) ...")
        with atomic_dir(folder, shared=True) as temporary:
            write_folder(temporary, checkpoint, scheme, device, notify)
        stored = StoredFolder(folder)
    mark_used(folder)
    # The folder stores the LM head in 16 bits; its precision is chosen at load.
    return stored.run_in(scheme)


def _source(checkpoint: Checkpoint) -> str:
    """Return a digest of the config and of the state of the files.

    The fingerprint knows neither, and of a tensor only the first values.
    """
    states = [(stat.st_size, stat.st_mtime_ns) for stat in (f.stat() for f in checkpoint.files)]
    return hashlib.sha256(repr((checkpoint.config, states)).encode()).hexdigest()


def _stored(folder: Path, notify: Callable[[str], None]) -> StoredFolder | None:
    """Return what an earlier start has kept, or None; a damaged folder is removed."""
    if not folder.exists():
        return None
    try:
        return StoredFolder(folder)
    except FasteagleError as error:
        notify(f"weights in the user cache are damaged and are made again ({error})")
    remove_damaged(folder)
    return None


def scheme_for(checkpoint: Checkpoint, quant: str, head_bits: int) -> Scheme:
    """Return the scheme that `quant` names: the checkpoint's own where that is meant.

    Raises `FasteagleError` if the checkpoint is already quantized in another scheme.
    """
    own = checkpoint.own_scheme
    if own is not None and quant == f"int{own.bits}":
        return dataclasses.replace(own, head_bits=head_bits)
    scheme = parse_scheme(quant, checkpoint.config, head_bits)
    if checkpoint.scheme is not None and scheme.name != checkpoint.scheme.name:
        raise FasteagleError(
            f"this checkpoint is quantized already ({checkpoint.scheme.name}), which {quant} "
            "contradicts: drop the option, or use the unquantized checkpoint"
        )
    return scheme


def write_folder(
    folder: Path,
    checkpoint: Checkpoint,
    scheme: Scheme,
    device: torch.device | str = "cpu",
    notify: Callable[[str], None] = lambda line: None,
) -> None:
    """Quantize every block linear into `folder`, as `StoredFolder` reads it.

    Raises `FasteagleError` where memory is short, with what to do.
    """
    require_free_space(folder, weight_bytes(checkpoint, scheme), f"writing {scheme.name} weights")
    weights = quantized_weights(checkpoint, scheme, device, notify)
    place, fix = torch.device(device), "choose a smaller model"  # one tensor was too much
    if place.type != "cpu":
        fix = f"quantize on the CPU: fasteagle quantize --precision {scheme.name} --device cpu"
    unless_short(
        lambda: save(folder, checkpoint, scheme, weights),
        lambda: short_of_memory(f"quantizing to {scheme.name}", place, lambda free: fix),
    )


def quantized_weights(
    checkpoint: Checkpoint,
    scheme: Scheme,
    device: torch.device | str,
    notify: Callable[[str], None],
) -> Iterator[tuple[str, PackedWeight | Tensor]]:
    """Yield every tensor of a model as `scheme` stores it, in main memory.

    Values are chosen on `device`. A layer for multi-token prediction stays as it is. `notify` gets
    a line now and then.
    """
    names = sorted(expected_shapes(checkpoint.config)) + layer_names(checkpoint)
    for name in with_progress(names, "quantized", "tensors", notify):
        own = None if name.startswith(MTP_LAYERS) else checkpoint.packed(name)
        if own is not None and (scheme.method == "own" or not is_block_linear(name)):
            yield name, own
        elif is_block_linear(name):
            yield name, quantize_weight(load_floats(checkpoint, name).to(device), scheme).to("cpu")
        else:
            yield name, load_floats(checkpoint, name)
