"""GGUF files: metadata and tensors under Hugging Face names. Knows nothing of the model.

Reads through the `gguf` package. That package spends seconds on the token lists of each file, so
the part we need at every start (fields and tensor offsets) is kept as an index in the user cache.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fasteagle import config as model_config
from fasteagle.config import ModelConfig
from fasteagle.errors import FasteagleError
from fasteagle.loading.tensors import Checkpoint, is_block_linear, rows_for
from fasteagle.paths import cache_dir, write_atomic
from fasteagle.quant.gguf_blocks import GGUF_4_BITS, GGUF_BLOCKS, GGUF_WIDENED, from_gguf_blocks
from fasteagle.quant.packed import PackedWeight
from fasteagle.quant.scheme import Scheme

SUPPORTED_TYPES = ("F32", "F16", "BF16", *GGUF_BLOCKS)
INDEX_VERSION = 1

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.bias": "self_attn.v_proj.bias",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


@dataclasses.dataclass(frozen=True)
class GGUFTensor:
    """Where one tensor lies in the file. `shape` is torch's order (rows first)."""

    kind: str
    shape: tuple[int, ...]
    offset: int
    n_bytes: int


class GGUFFile(Checkpoint):
    """A GGUF checkpoint. Raises `FasteagleError` for damaged files and for types we cannot read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        index = file_index(path)
        self.fields: dict[str, Any] = index["fields"]
        self.tensors = {
            hf_name(name): GGUFTensor(kind, tuple(shape), offset, n_bytes)
            for name, kind, shape, offset, n_bytes in index["tensors"]
            if name != "rope_freqs.weight"
        }
        check_types_and_size(path, self.tensors)
        self.config = self._config(index)
        # A plain view: the memmap subclass costs microseconds on each of a million slices.
        self._data = np.asarray(np.memmap(path, mode="r", dtype=np.uint8))

    def _config(self, index: dict[str, Any]) -> ModelConfig:
        embedding = self.tensors.get("model.embed_tokens.weight")
        if embedding is None:
            raise FasteagleError(f"{self.path}: missing tensor token_embd.weight")
        factors = index["rope_freq_factors"]
        return model_config.from_gguf(
            self.fields,
            vocab_size=embedding.shape[0],
            tied="lm_head.weight" not in self.tensors,
            rope_freq_factors=tuple(factors) if factors else None,
            source=str(self.path),
        )

    def names(self) -> set[str]:
        return set(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def start(self, name: str, n: int) -> Tensor:
        """The first `n` values or more."""
        if self._permuted(name) is not None:  # its first rows are not contiguous
            return self.load(name)
        return self._rows(name, rows_for(self.shape(name), n))

    def _rows(self, name: str, n_rows: int) -> Tensor:
        """The first rows in the file's order, dequantized."""
        return dequantized(self._data, self.tensors[name], n_rows)

    def load(self, name: str) -> Tensor:
        """The dequantized tensor in fp32 (F16/BF16 too: every value is exact there)."""
        values = self._rows(name, self.tensors[name].shape[0])
        n_head = self._permuted(name)
        return values if n_head is None else values[rope_order(len(values), n_head)]

    def kinds(self) -> dict[str, str]:
        """The GGUF type of every tensor."""
        return {name: tensor.kind for name, tensor in self.tensors.items()}

    @property
    def own_scheme(self) -> Scheme | None:
        """8 bits, 4 if any block linear has 4; None where one is dense. Files often mix formats.

        Not the `scheme` it runs in: asked for another precision, the dequantized values run.
        """
        if self.scheme is not None:
            return self.scheme
        linears = self._linear_kinds()
        if not linears <= GGUF_BLOCKS.keys():
            return None
        return Scheme(4 if linears & GGUF_4_BITS else 8, 32, "own")

    @property
    def widened(self) -> list[str]:
        return sorted(self._linear_kinds() & GGUF_WIDENED)

    def _linear_kinds(self) -> set[str]:
        return {kind for name, kind in self.kinds().items() if is_block_linear(name)}

    def bits(self, name: str) -> int | None:
        kind = self.tensors[name].kind
        if kind not in GGUF_BLOCKS:
            return None
        return 4 if kind in GGUF_4_BITS else 8

    def packed(self, name: str) -> PackedWeight | None:
        """The tensor in 4 or 8 bits, rounded as `from_gguf_blocks` says; None for dense types."""
        tensor = self.tensors[name]
        if tensor.kind not in GGUF_BLOCKS:
            return None
        raw = self._data[tensor.offset : tensor.offset + tensor.n_bytes]
        blocks = torch.from_numpy(raw.reshape(tensor.shape[0], -1).copy())
        weight = from_gguf_blocks(blocks, tensor.kind)
        n_head = self._permuted(name)
        return weight if n_head is None else weight.rows(rope_order(tensor.shape[0], n_head))

    def _permuted(self, name: str) -> int | None:
        """Number of attention heads if llama.cpp has reordered the tensor's rows, else None."""
        if self.config.architecture == "LlamaForCausalLM":
            if name.endswith("q_proj.weight"):
                return self.config.n_head
            if name.endswith("k_proj.weight"):
                return self.config.n_kv_head
        return None


def check_types_and_size(path: Path, tensors: Mapping[str, GGUFTensor]) -> None:
    """Raise `FasteagleError` for types that we cannot read and for truncated files."""
    size = path.stat().st_size
    for name, tensor in tensors.items():
        if tensor.kind not in SUPPORTED_TYPES:
            raise FasteagleError(
                f"{path}: tensor {name} has type {tensor.kind}; "
                f"supported: {', '.join(SUPPORTED_TYPES)}"
            )
        if tensor.offset + tensor.n_bytes > size:
            raise FasteagleError(
                f"{path}: truncated: {name} ends at byte "
                f"{tensor.offset + tensor.n_bytes:,}, the file has {size:,}; fetch it again"
            )


def dequantized(data: np.ndarray, tensor: GGUFTensor, n_rows: int) -> Tensor:
    """The first rows of a tensor of the file `data` in fp32, in the file's order."""
    from gguf import GGMLQuantizationType  # 0.2 s, for GGUF files only
    from gguf.quants import dequantize

    raw = data[tensor.offset : tensor.offset + tensor.n_bytes]
    array = dequantize(raw.reshape(tensor.shape[0], -1)[:n_rows], GGMLQuantizationType[tensor.kind])
    values = torch.from_numpy(array if array.flags.writeable else array.copy())
    return values.view(n_rows, *tensor.shape[1:])


def rope_order(n_rows: int, n_head: int) -> Tensor:
    """Row order [n_rows] that undoes llama.cpp's for interleaved RoPE: pairs go back to halves."""
    paired = torch.arange(n_rows).view(n_head, n_rows // n_head // 2, 2)
    return paired.transpose(1, 2).reshape(n_rows)


def hf_name(name: str) -> str:
    """Hugging Face name of a GGUF tensor; unknown names come back unchanged."""
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    parts = name.split(".", 2)
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in _BLOCK_NAMES:
        return f"model.layers.{parts[1]}.{_BLOCK_NAMES[parts[2]]}"
    return name


def file_key(path: Path) -> str:
    """Cache key of a large local file: its path, size and modification time."""
    stat = path.stat()
    text = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}|{INDEX_VERSION}"
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def file_index(path: Path) -> dict[str, Any]:
    """Fields but for long lists of the tokenizer, where tensors lie, and RoPE factors."""
    cached = cache_dir() / "gguf" / f"{file_key(path)}.json"
    try:
        return json.loads(cached.read_text())
    except (OSError, ValueError):
        pass  # absent or damaged: read the file itself
    index = _read_index(path)
    write_atomic(cached, json.dumps(index).encode())
    return index


def _read_index(path: Path) -> dict[str, Any]:
    from gguf import GGUFReader  # 0.2 s, and only for files without an index

    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise FasteagleError(f"{path}: not a GGUF file (it does not start with 'GGUF')")
    try:
        reader = GGUFReader(path)
    except Exception as error:  # the reader does not check offsets: any error is possible
        raise FasteagleError(
            f"{path}: damaged or truncated GGUF ({error}); fetch it again"
        ) from error
    # Token lists are 99 % of the metadata, and only the tokenizer needs them.
    fields = {
        key: field.contents()
        for key, field in reader.fields.items()
        if not (key.startswith("tokenizer.") and len(field.data) > 1)
    }
    tensors = [
        (
            t.name,
            t.tensor_type.name,
            [int(n) for n in reversed(t.shape)],
            int(t.data_offset),
            int(t.n_bytes),
        )
        for t in reader.tensors
    ]
    factors = [t.data.tolist() for t in reader.tensors if t.name == "rope_freqs.weight"]
    return {
        "fields": fields,
        "tensors": tensors,
        "rope_freq_factors": factors[0] if factors else None,
    }
