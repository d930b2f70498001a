"""Torch files, read so that they can neither run code nor fill the memory."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fasteagle.errors import FasteagleError, first_line, shortened


def unpickled(file: Path, fix: str = "use a safetensors version of it") -> Any:
    """Read a torch file of tensors and plain values only, so that it cannot run code.

    Raises `FasteagleError` for a damaged file, and for one with other objects, with the `fix`.
    """
    if not file.stat().st_size:
        raise FasteagleError(f"{file} is empty: {fix}")
    is_mapped = zipfile.is_zipfile(file)  # the format before torch 1.6 is none
    try:
        if is_mapped and any(part.compress_type for part in zipfile.ZipFile(file).infolist()):
            raise ValueError("its parts are compressed, which torch does not write")
        return torch.load(file, map_location="cpu", mmap=is_mapped, weights_only=True)
    except Exception as error:  # pickle, zip and RuntimeError, depending on the damage
        raise FasteagleError(
            f"{file}: not a weights-only torch file ({first_line(error)}): it is damaged or would "
            f"run code, {fix}"
        ) from error


def unpickled_tensors(file: Path) -> dict[str, Tensor]:
    """Read the tensors of a torch file by their names, other values left out.

    Raises `FasteagleError` as `unpickled` does, and for tensors whose values are not all in the
    file: a few bytes can stand for any number of them.
    """
    value = unpickled(file)
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise FasteagleError(f"{file}: not a weights-only torch file (no dict of tensors)")
    tensors = {name: tensor for name, tensor in value.items() if isinstance(tensor, Tensor)}
    others = sorted(name for name, tensor in tensors.items() if not is_plain(tensor))
    if others:
        raise FasteagleError(
            f"{file}: not plain tensors: {shortened(others)}: use a safetensors version of it"
        )
    return tensors


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor has a place in memory for each of its values."""
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        return False
    return tensor.nbytes <= tensor.untyped_storage().nbytes()
