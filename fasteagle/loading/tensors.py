"""Tensors of one model under Hugging Face names, whatever files hold them.

A checkpoint knows its shape (`config`), and gives its tensors one by one; its block linears may be
packed, then it has a `scheme`. Plain Hugging Face folders and random weights are read here, GGUF
files, our own folders and those of other quantizers in `gguf`, `stored` and `imported`.
"""

from __future__ import annotations

import abc
import copy
import hashlib
import math
import zlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fasteagle.config import ModelConfig
from fasteagle.config_fields import Fields, parse_json_file
from fasteagle.errors import FasteagleError, shortened
from fasteagle.loading.names import block_linears, expected_shapes, is_block_linear, parts_of
from fasteagle.loading.pickles import unpickled_tensors
from fasteagle.paths import replacing, require_readable
from fasteagle.quant.packed import PackedWeight
from fasteagle.quant.scheme import Scheme, grouped_bytes

DTYPES_BELOW_A_BYTE = ("F4", "F6_E2M3", "F6_E3M2")
MOST_NAME = 255  # bytes of a file's name on every file system


class Checkpoint(abc.ABC):
    """Named tensors of one model; none of them is packed unless a subclass says so."""

    config: ModelConfig
    files: Sequence[Path] = ()  # that hold the tensors
    scheme: Scheme | None = None  # in which its block linears run; None: dense

    @property
    def own_scheme(self) -> Scheme | None:
        """Scheme in which the files hold the block linears; None where they are dense."""
        return self.scheme

    @abc.abstractmethod
    def names(self) -> set[str]: ...

    @abc.abstractmethod
    def shape(self, name: str) -> tuple[int, ...]: ...

    @abc.abstractmethod
    def load(self, name: str) -> Tensor:
        """Return the whole tensor, dequantized where it is packed."""

    def start(self, name: str, n: int) -> Tensor:
        """Return the first `n` values or more, which is cheaper than all where files are mapped."""
        return self.load(name)[: self.rows_for(name, n)]

    def rows_for(self, name: str, n: int) -> int:
        """Return the number of leading rows of a tensor that hold its first `n` values."""
        rows, *others = self.shape(name)
        return min(rows, -(-n // math.prod(others)))

    @property
    def widened(self) -> list[str]:
        """Formats of block linears that run in clearly more bits than the files hold."""
        return []

    def bits(self, name: str) -> int | None:
        """Return the bits of `packed` without reading it, None where it is None or not known."""
        return None

    def packed(self, name: str) -> PackedWeight | None:
        """Return the packed weight `name`, None where it is stored in full."""
        return None

    def columns(self, name: str) -> Tensor | None:
        """Return the order [K] of a weight's inputs (act-order), None for the model's order."""
        return None

    @cached_property
    def fingerprint(self) -> str:
        """Identity of the weights as stored, a sha256 digest in hex.

        It covers every tensor's name, shape and first 1,024 values, dequantized to fp32, in the
        order of the names: a lossless repack keeps the fingerprint, another quantization does not.
        """
        digest = hashlib.sha256()
        for name in sorted(expected_shapes(self.config)):
            first = self.start(name, 1024).flatten()[:1024].float().cpu().contiguous()
            digest.update(f"{name}{self.shape(name)}".encode())
            digest.update(first.numpy().tobytes())
        return digest.hexdigest()

    def run_in(self, scheme: Scheme) -> Self:
        """Return a copy of the checkpoint whose block linears run in `scheme`.

        Its tensors, and so its fingerprint, stay as they are.
        """
        other = copy.copy(self)
        other.scheme = scheme
        return other


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = parse_json_file(path)
    except FileNotFoundError:
        raise FasteagleError(f"{path}: file is missing: fetch the folder again") from None
    except (ValueError, OSError) as error:
        raise FasteagleError(
            f"{path}: cannot be read as JSON ({error}): correct it, or fetch it again"
        ) from error
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise FasteagleError(f"{path}: expected a JSON object, found {kind}: fetch it again")
    return value


def open_safetensors(file: Path) -> Any:
    """Open a safetensors file. Raises `FasteagleError` for a damaged one, and for some dtypes."""
    require_readable(file)  # of such a file the library says that it is not there
    try:
        handle = safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise FasteagleError(f"{file}: damaged or truncated ({error}): fetch it again") from error
    names = handle.keys()
    lacking = [name for name in names if handle.get_slice(name).get_dtype() in DTYPES_BELOW_A_BYTE]
    if lacking:
        raise FasteagleError(
            f"{file}: values of 4 or 6 bits, which torch has no type for: {shortened(lacking)}: "
            "use a version in 16 bits"
        )
    return handle


def save_tensors(
    tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None
) -> None:
    """Write a safetensors file, completely or not at all."""
    with replacing(path) as temporary:
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            temporary,
            metadata={"format": "pt", **(metadata or {})},
        )
        temporary.chmod(0o644)  # safetensors writes private files


class WeightsFolder(Checkpoint):
    """Folder of memory-mapped safetensors or torch files; an index file lists its shards."""

    def __init__(self, path: Path, config: ModelConfig) -> None:
        self.path, self.config = path, config
        self.files = weight_files(path)
        if not self.files:
            raise FasteagleError(
                f"{path}: no *.safetensors and no pytorch_model*.bin in the folder: fetch the "
                "weights"
            )
        self._tensors: dict[str, Tensor] = {}
        places: dict[str, Path] = {}
        for file in self.files:
            for stored, tensor in mapped_tensors(file).items():
                for name, index in parts_of(config, stored, tuple(tensor.shape)):
                    if name in places:
                        raise FasteagleError(
                            f"{path}: {name} is there twice, in {places[name].name} and in "
                            f"{file.name}: keep one version of the weights"
                        )
                    places[name], self._tensors[name] = file, tensor[index]

    def names(self) -> set[str]:
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def load(self, name: str) -> Tensor:
        return self._tensors[name]


class DummyCheckpoint(Checkpoint):
    """Random weights of a given shape for benchmarks; a tensor's name is its random seed.

    Under a scheme, block linears are random packed weights, made as they are stored. They are made
    on `device`: one thread of a CPU would take a minute for 7B, and many for 70B.
    """

    def __init__(
        self, config: ModelConfig, scheme: Scheme | None = None, device: torch.device | str = "cpu"
    ) -> None:
        self.config, self.scheme, self.device = config, scheme, torch.device(device)
        self._shapes = expected_shapes(config)

    def names(self) -> set[str]:
        return set(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def load(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            value = 0.0 if name.endswith("bias") else 1.0
            return torch.full(shape, value, device=self.device)
        random = self._generator(name)
        return torch.randn(shape, generator=random, device=self.device).mul_(0.02)

    def _generator(self, name: str) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()))

    def packed(self, name: str) -> PackedWeight | None:
        scheme = self.scheme
        if scheme is None or not is_block_linear(name):
            return None
        N, K = self.shape(name)
        G = K // (scheme.group_size or K)
        step = 0.02 / (4 if scheme.bits == 4 else 64)
        with self.device:
            random = self._generator(name)
            scales = torch.full((N, G), step, dtype=torch.bfloat16)
            if scheme.bits == 8:
                q = torch.randint(-127, 128, (N, K), dtype=torch.int8, generator=random)
                return PackedWeight(8, K // G, q, scales)
            q = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8, generator=random)
            if scheme.method == "hqq":  # which makes offsets, and so another kernel
                return PackedWeight(4, K // G, q, scales, offsets=-8 * scales)
            zeros = torch.full((N, G), 8, dtype=torch.uint8)
            return PackedWeight(4, K // G, q, scales, zeros)


def load_floats(checkpoint: Checkpoint, name: str) -> Tensor:
    """Return a whole tensor; raise `FasteagleError` where its values are no floats."""
    tensor = checkpoint.load(name)
    if not tensor.is_floating_point():
        kind = str(tensor.dtype).removeprefix("torch.")
        raise FasteagleError(f"{name} holds {kind} values: weights that are not packed are floats")
    return tensor


def mapped_tensors(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors or torch file by name; they are read when they are used.

    Raises `FasteagleError` for a damaged file, and for a torch file with more than plain tensors.
    """
    if file.suffix != ".safetensors":
        return unpickled_tensors(file)
    handle = open_safetensors(file)
    return {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118


def weight_files(path: Path) -> list[Path]:
    """Return the files of a folder's weights: safetensors, else torch files; may be none."""
    for single, pattern in (
        ("model.safetensors", "*.safetensors"),
        ("pytorch_model.bin", "pytorch_model*.bin"),
    ):
        if (path / single).exists():  # an index is of an older version, as transformers takes it
            return [path / single]
        if (index := path / f"{single}.index.json").exists():
            return _indexed(index)
        if files := sorted(path.glob(pattern)):
            return files
    return []


def _indexed(index: Path) -> list[Path]:
    files = [index.with_name(name) for name in sorted(set(weight_map(index).values()))]
    absent = [file.name for file in files if not file.exists()]
    if absent:
        raise FasteagleError(
            f"{index.parent}: shards named by {index.name} are missing: {', '.join(absent)}: fetch "
            "them"
        )
    return files


def weight_map(index: Path) -> dict[str, str]:
    """Return the name of the file that holds each tensor, as an index file says."""
    fields = Fields(read_json(index), str(index)).part("weight_map")
    if fields.empty:
        raise FasteagleError(f"{index}: its weight_map names no tensor: fetch it again")
    files = {name: fields.text(name) for name in fields}
    for name, file in files.items():
        if Path(file).name != file or not 0 < len(file.encode(errors="replace")) <= MOST_NAME:
            raise fields.error(name, "the name of a file in the same folder")
    return files


def files_digest(path: Path) -> str:
    """Return the identity of a draft head's file or folder, a sha256 digest in hex.

    It covers the name, size and first 64 KiB of each file. These hold a whole config, and the
    names, shapes and header of a tensor file.
    """
    ends = (".json", ".safetensors", ".bin", ".pt")
    files = [path] if path.is_file() else [f for f in path.iterdir() if f.suffix in ends]
    digest = hashlib.sha256()
    for file in sorted(files):
        with open(file, "rb") as opened:
            digest.update(f"{file.name} {file.stat().st_size}\0".encode())
            digest.update(opened.read(1 << 16))
    return digest.hexdigest()


def weight_bytes(checkpoint: Checkpoint, scheme: Scheme) -> int:
    """Return `scheme.model_bytes`, plus the extra bytes of 8-bit weights in a mixed file.

    A product is counted as it runs: in 8 bits if one of its weights has 8 (`source.Linears`).
    """
    total = scheme.model_bytes(checkpoint.config)
    if scheme.method != "own" or scheme.bits == 8:
        return total
    more = grouped_bytes(8, 32) - scheme.linear_bytes
    for i in range(checkpoint.config.n_layer):
        for names in block_linears(checkpoint.config, i).values():
            if any(checkpoint.bits(name) == 8 for name in names):
                total += int(more * sum(math.prod(checkpoint.shape(name)) for name in names))
    return total
