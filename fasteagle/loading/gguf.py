"""GGUF files: metadata and tensors under Hugging Face names, rows in the order of the file.

`gguf_index` finds the tensors in a file; the `gguf` package dequantizes the types that
`quant.gguf_blocks` does not hold exactly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fasteagle.config import ModelConfig
from fasteagle.config_fields import Fields
from fasteagle.config_gguf import from_gguf, mtp_layers
from fasteagle.errors import FasteagleError
from fasteagle.loading.gguf_index import GGUFTensor, read_index
from fasteagle.loading.names import CHOICE_BIAS, is_block_linear, mtp_name, parts_of
from fasteagle.loading.tensors import Checkpoint
from fasteagle.quant.gguf_blocks import (
    CONVERTED_VALUES,
    GGUF_4_BITS,
    GGUF_BLOCKS,
    GGUF_EXACT,
    GGUF_WIDENED,
    from_gguf_blocks,
)
from fasteagle.quant.packed import PackedWeight
from fasteagle.quant.scheme import Scheme

SUPPORTED_TYPES = ("F32", "F16", "BF16", *GGUF_BLOCKS)
ROPE_FACTORS = "rope_freqs.weight"  # belongs to the config

GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
BLOCK_NAMES = {
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
    "ffn_gate_inp.weight": "mlp.gate.weight",
    "exp_probs_b.bias": CHOICE_BIAS,
    "ffn_gate_shexp.weight": "mlp.shared_expert.gate_proj.weight",
    "ffn_up_shexp.weight": "mlp.shared_expert.up_proj.weight",
    "ffn_down_shexp.weight": "mlp.shared_expert.down_proj.weight",
    "ffn_gate_inp_shexp.weight": "mlp.shared_expert_gate.weight",  # a vector in the file
    "ffn_gate_exps.weight": "mlp.experts.gate_proj.weight",  # all experts of a block
    "ffn_up_exps.weight": "mlp.experts.up_proj.weight",
    "ffn_down_exps.weight": "mlp.experts.down_proj.weight",
    # Of a layer for multi-token prediction, beside those of a block
    "nextn.eh_proj.weight": "eh_proj.weight",
    "nextn.enorm.weight": "token_layernorm.weight",
    "nextn.hnorm.weight": "hidden_layernorm.weight",
    "nextn.shared_head_norm.weight": "final_layernorm.weight",
    "nextn.shared_head_head.weight": "lm_head.weight",
    "nextn.embed_tokens.weight": "embed_tokens.weight",
}


class GGUFFile(Checkpoint):
    """GGUF checkpoint. Raises `FasteagleError` for damaged files and for types we cannot read."""

    def __init__(self, path: Path) -> None:
        self.path, self.files = path, [path]
        index = read_index(path)
        self.fields = Fields(index.fields, str(path))
        parts = self.fields.integer("split.count", 1, least=0)
        if parts > 1:
            raise FasteagleError(
                f"{path}: one of {parts} parts: llama-gguf-split --merge joins them"
            )
        check_types(path, index.tensors)
        named: dict[str, GGUFTensor] = {}
        for own, tensor in index.tensors.items():
            if own != ROPE_FACTORS and named.setdefault(hf_name(own), tensor) is not tensor:
                raise FasteagleError(f"{path}: two tensors are {hf_name(own)}: fetch it again")
        # A plain view: the memmap subclass costs microseconds on each of a million slices.
        self._data = np.asarray(np.memmap(path, mode="r", dtype=np.uint8))
        embedding, factors = named.get("model.embed_tokens.weight"), index.tensors.get(ROPE_FACTORS)
        if embedding is None:
            raise FasteagleError(f"{path}: missing tensor token_embd.weight")
        self.config = from_gguf(
            self.fields,
            vocab_size=embedding.shape[0],
            tied="lm_head.weight" not in named,
            rope_freq_factors=None if factors is None else rope_factors(path, self._data, factors),
        )
        self.tensors: dict[str, GGUFTensor] = {}
        for name, tensor in named.items():
            self.tensors |= _matrices(self.config, name, tensor)
        if mtp_layers(self.fields):
            n_layer = self.config.n_layer
            self.tensors = {mtp_name(name, n_layer): t for name, t in self.tensors.items()}

    def names(self) -> set[str]:
        return set(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def start(self, name: str, n: int) -> Tensor:
        """Return the first `n` values or more."""
        return dequantized(self._data, self.tensors[name], self.rows_for(name, n))

    def load(self, name: str) -> Tensor:
        """Return the dequantized tensor in fp32, in which F16 and BF16 values are exact too."""
        return dequantized(self._data, self.tensors[name])

    @property
    def own_scheme(self) -> Scheme | None:
        """Scheme of the stored block linears: 4 bits if any has 4, else 8; None if one is dense.

        Files often mix formats. The model may run in another `scheme`: for another precision the
        dequantized values run.
        """
        linears = self._linear_kinds()
        if not linears <= GGUF_BLOCKS.keys():
            return None
        return Scheme(4 if linears & GGUF_4_BITS else 8, 32, "own")

    @property
    def widened(self) -> list[str]:
        return sorted(self._linear_kinds() & GGUF_WIDENED)

    def _linear_kinds(self) -> set[str]:
        return {t.kind for name, t in self.tensors.items() if is_block_linear(name)}

    def bits(self, name: str) -> int | None:
        kind = self.tensors[name].kind
        if kind not in GGUF_BLOCKS:
            return None
        return 4 if kind in GGUF_4_BITS else 8

    def packed(self, name: str) -> PackedWeight | None:
        """Return the tensor in 4 or 8 bits as `from_gguf_blocks` rounds; None for dense types.

        None too for an embedding that would be rounded: it is looked up, and only an LM head that
        is tied to it needs a product.
        """
        tensor = self.tensors[name]
        if tensor.kind not in GGUF_BLOCKS:
            return None
        is_looked_up = name == "model.embed_tokens.weight" and not self.config.tie_embeddings
        if is_looked_up and tensor.kind not in GGUF_EXACT:
            return None
        raw = self._data[tensor.offset : tensor.offset + tensor.n_bytes]
        blocks = torch.from_numpy(raw.reshape(tensor.shape[0], -1).copy())
        return from_gguf_blocks(blocks, tensor.kind)


def _matrices(config: ModelConfig, name: str, tensor: GGUFTensor) -> dict[str, GGUFTensor]:
    """Return a tensor by its Hugging Face name; of a tensor [X, N, K] its experts one by one."""
    if name.endswith("shared_expert_gate.weight") and len(tensor.shape) == 1:
        return {name: dataclasses.replace(tensor, shape=(1, *tensor.shape))}
    matrices, n_bytes = {}, tensor.n_bytes // tensor.shape[0]
    for part, index in parts_of(config, name, tensor.shape):
        if index and isinstance(index[0], int):
            offset = tensor.offset + index[0] * n_bytes
            matrices[part] = GGUFTensor(tensor.kind, tensor.shape[1:], offset, n_bytes)
        else:
            matrices[part] = tensor
    return matrices


def check_types(path: Path, tensors: Mapping[str, GGUFTensor]) -> None:
    """Raise `FasteagleError` for types we cannot read; `tensors` have llama.cpp's names."""
    for name, tensor in tensors.items():
        supported = ("F32",) if name == ROPE_FACTORS else SUPPORTED_TYPES
        if len(tensor.shape) == 1 and name != ROPE_FACTORS:
            supported = ("F32", "F16", "BF16")  # blocks are those of matrices
        if tensor.kind not in supported:
            raise FasteagleError(
                f"{path}: tensor {hf_name(name)} has type {tensor.kind}; "
                f"supported: {', '.join(supported)}"
            )


def dequantized(data: np.ndarray, tensor: GGUFTensor, n_rows: int | None = None) -> Tensor:
    """Return the first rows of a tensor of the file `data`, or all, in fp32."""
    raw = data[tensor.offset : tensor.offset + tensor.n_bytes]
    raw = raw.reshape(tensor.shape[0], -1)[:n_rows]
    if tensor.kind in GGUF_EXACT and len(tensor.shape) == 2:
        return _dequantized_blocks(raw, tensor)
    if tensor.kind == "F32":
        array = raw.view(np.float32)
    else:
        from gguf import GGMLQuantizationType  # 0.2 s, which most files do without
        from gguf.quants import dequantize

        array = dequantize(raw, GGMLQuantizationType[tensor.kind])
    values = torch.from_numpy(array if array.flags.writeable else array.copy())
    return values.view(-1, *tensor.shape[1:])


def _dequantized_blocks(raw: np.ndarray, tensor: GGUFTensor) -> Tensor:
    """Dequantize the rows `raw` to the values of the `gguf` package.

    The package itself takes a second for an embedding.
    """
    columns = tensor.shape[1]
    values = torch.empty(len(raw), columns)
    n = max(1, CONVERTED_VALUES // columns)
    for begin, part in zip(range(0, len(raw), n), values.split(n), strict=True):
        blocks = torch.from_numpy(raw[begin : begin + n].copy())
        part.copy_(from_gguf_blocks(blocks, tensor.kind).dequantize())
    return values


def rope_factors(path: Path, data: np.ndarray, tensor: GGUFTensor) -> tuple[float, ...]:
    """Return the divisors of RoPE's frequencies that a file holds. Raises `FasteagleError`."""
    values = data[tensor.offset : tensor.offset + tensor.n_bytes].view(np.float32)
    if not (np.isfinite(values) & (values > 0)).all():
        raise FasteagleError(f"{path}: {ROPE_FACTORS} is not above 0: fetch it again")
    return tuple(values.tolist())


def hf_name(name: str) -> str:
    """Return the Hugging Face name of a GGUF tensor; unknown names come back unchanged."""
    if name in GLOBAL_NAMES:
        return GLOBAL_NAMES[name]
    parts = name.split(".", 2)
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in BLOCK_NAMES:
        return f"model.layers.{parts[1]}.{BLOCK_NAMES[parts[2]]}"
    return name
