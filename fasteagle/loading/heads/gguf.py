"""EAGLE-3 draft heads in the GGUF files of llama.cpp, architecture `eagle3`: read and write.

Such a file names target blocks by their input, as we do, lists absolute target ids in `d2t`, has
the rows of q and k in the order of interleaved RoPE, and carries the target's tokenizer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fasteagle.config import ANY_LENGTH, Eagle3Config, HeadConfig, ModelConfig
from fasteagle.config_fields import Fields
from fasteagle.config_gguf import read_layer
from fasteagle.errors import FasteagleError
from fasteagle.loading import gguf
from fasteagle.loading.changed import rope_order
from fasteagle.loading.gguf_index import GGUFIndex, read_index
from fasteagle.loading.heads.tables import (
    GGUF_LAYERS,
    MAP,
    State,
    layer_config,
    official_name,
    target_ids,
)
from fasteagle.model import rope_frequencies
from fasteagle.paths import replacing

P = "eagle3."  # prefix of the keys
OLD_LAYERS = "eagle3.extract_layers"  # of older files
FLAGS = ("norm_before_residual", "norm_before_fc")
# Tensors that a target's file has too have their names from there.
_BLOCK = ["attn_norm", "attn_q", "attn_k", "attn_v", "attn_output"]
_BLOCK += ["ffn_norm", "ffn_gate", "ffn_up", "ffn_down"]
_SHARED = ["output_norm", "output", "token_embd", *(f"blk.0.{part}" for part in _BLOCK)]
NAMES = {
    "fc.weight": "fc.weight",
    "enc.output_norm.weight": "input_norm.weight",
    "blk.0.attn_norm_2.weight": "midlayer.hidden_norm.weight",
    **{
        f"{name}.weight": official_name(gguf.hf_name(f"{name}.weight").removeprefix("model."))
        for name in _SHARED
    },
}
_FORKS = {"blk.0.hidden_norm.weight": "midlayer.hidden_norm.weight"}
_PERMUTED = ("blk.0.attn_q.weight", "blk.0.attn_k.weight")
_MAPS = (MAP, "d2t.weight")  # absolute ids, and the offsets of forks
_INTEGERS = {"I32": np.int32, "I64": np.int64}
_EXACT = {"F16": torch.float16, "BF16": torch.bfloat16}  # others are read as fp32


def gguf_of(path: Path) -> Path | None:
    """Return the GGUF file that `path` is, or the only one in a folder without config.json."""
    if path.suffix == ".gguf":
        return path
    files = [] if (path / "config.json").exists() else list(path.glob("*.gguf"))
    return files[0] if len(files) == 1 else None


def read_gguf_head(path: Path) -> tuple[dict[str, Any], State]:
    """Read the draft head in a GGUF file: its fields and tensors under the names of a folder's.

    Quantized tensors come in fp32. Raises `FasteagleError` for files of another architecture,
    incomplete and damaged ones.
    """
    if not path.is_file():
        raise FasteagleError(f"{path}: no such file")
    index = read_index(path)
    fields, tensors = Fields(index.fields, str(path)), dict(index.tensors)
    kind = fields.text("general.architecture", "(none)")
    if kind != "eagle3":
        raise FasteagleError(
            f"{path}: GGUF architecture {kind!r} is no draft head: give a file of architecture "
            "'eagle3', or a folder"
        )
    layers = next((key for key in (GGUF_LAYERS, OLD_LAYERS) if key in fields), None)
    if layers is None:
        raise FasteagleError(f"{path}: GGUF metadata lacks {GGUF_LAYERS}: convert the head again")
    gguf.check_types(path, {name: t for name, t in tensors.items() if name not in _MAPS})
    data = np.asarray(np.memmap(path, mode="r", dtype=np.uint8))
    rope = tensors.pop(gguf.ROPE_FACTORS, None)
    factors = None if rope is None else gguf.rope_factors(path, data, rope)
    block = _block(path, index, fields, factors)
    raw = layer_config(block, torch.float32) | {
        "architectures": ["eagle3"],
        GGUF_LAYERS: index.fields[layers],
        "target_hidden_size": fields.width(P + "target_hidden_size", block.dim),
        **{key: fields.flag(P + key) for key in FLAGS},
    }
    if factors is not None:
        raw["rope_freq_factors"] = list(factors)
    state: State = {}
    for name, tensor in tensors.items():
        if name in _MAPS:
            if tensor.kind not in _INTEGERS or len(tensor.shape) != 1:
                raise FasteagleError(
                    f"{path}: {name} is {tensor.kind} of shape {tensor.shape}: must be a list of "
                    f"{' or '.join(_INTEGERS)}: convert the head again"
                )
            stored = data[tensor.offset : tensor.offset + tensor.n_bytes]
            ids = torch.from_numpy(stored.view(_INTEGERS[tensor.kind]).astype(np.int64))
            _put(path, state, MAP, ids - torch.arange(len(ids)) if name == MAP else ids)
            continue
        values = gguf.dequantized(data, tensor)
        n_head, odd = divmod(len(values), block.head_dim)
        if name in _PERMUTED and not odd:  # else the shape is refused later
            values = values[rope_order(len(values), n_head)]
        official = NAMES.get(name) or _FORKS.get(name, name)
        _put(path, state, official, values.to(_EXACT.get(tensor.kind, torch.float32)))
    return raw, state


def _put(path: Path, state: State, name: str, tensor: Tensor) -> None:
    """Put a tensor into `state`. Raises `FasteagleError` where another one has its name."""
    if name in state:
        raise FasteagleError(f"{path}: two tensors are {name}: convert the head again")
    state[name] = tensor


def _block(
    path: Path, index: GGUFIndex, fields: Fields, factors: tuple[float, ...] | None
) -> ModelConfig:
    """Return the decoder layer. Raises `FasteagleError` for what does not run here."""
    shape = read_layer(fields, "eagle3", factors)
    if fields.integer(P + "block_count", 1) != 1:
        raise fields.error(P + "block_count", "1: choose another with --head")
    size, length = P + "vocab_size", P + "context_length"
    if size in fields:
        n_tokens = fields.width(size)
    elif (embedding := index.tensors.get("token_embd.weight")) is not None:
        n_tokens = embedding.shape[0]
    else:
        n_tokens = _n_tokens(_tokenizer_fields(path))
    max_seq_len = fields.integer(length) if length in fields else ANY_LENGTH
    return ModelConfig(**shape, n_layer=1, vocab_size=n_tokens, max_seq_len=max_seq_len)


# Writing


def write_gguf_head(path: Path, config: HeadConfig, state: State, tokenizer: Path) -> None:
    """Write an EAGLE-3 head for llama.cpp with the tokenizer of the GGUF file `tokenizer`.

    `state` are its official tensors. Raises `FasteagleError` for the tokenizer of another model.
    """
    from gguf import GGUFWriter  # 0.2 s

    assert config.eagle3 is not None, "see write.check_exportable"
    tokens = _tokenizer_fields(tokenizer)
    if _n_tokens(tokens) != config.block.vocab_size:
        raise FasteagleError(
            f"{tokenizer}: its tokenizer has {_n_tokens(tokens):,} tokens, the model "
            f"{config.block.vocab_size:,}: give the target's own GGUF file as --tokenizer-from"
        )
    with replacing(path) as temporary:
        writer = GGUFWriter(temporary, "eagle3")
        writer.add_name(path.stem)
        _add_fields(writer, config.block, config.eagle3)
        for key, (kind, value, item) in tokens.items():
            writer.add_key_value(key, value, kind, sub_type=item)
        _add_tensors(writer, config.block, state)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _add_fields(writer: Any, block: ModelConfig, own: Eagle3Config) -> None:
    """Add the fields of a draft head."""
    writer.add_block_count(1)
    writer.add_context_length(block.max_seq_len)
    writer.add_vocab_size(block.vocab_size)
    writer.add_embedding_length(block.dim)
    writer.add_uint32(P + "target_hidden_size", own.target_dim)
    writer.add_feed_forward_length(block.ffn_dim)
    writer.add_head_count(block.n_head)
    writer.add_head_count_kv(block.n_kv_head)
    for add in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
        add(block.head_dim)
    writer.add_layer_norm_rms_eps(block.norm_eps)
    writer.add_rope_freq_base(block.rope_base)
    if block.rope_linear_factor != 1:
        writer.add_string(P + "rope.scaling.type", "linear")
        writer.add_rope_scaling_factor(block.rope_linear_factor)
    writer.add_bool(P + "norm_before_residual", own.norm_before_residual)
    if own.aux_norm == "all":  # older versions do not know the key
        writer.add_bool(P + "norm_before_fc", True)
    writer.add_array(GGUF_LAYERS, list(own.aux_layers))


def _add_tensors(writer: Any, block: ModelConfig, state: State) -> None:
    """Add matrices in their own dtype, norms in fp32, absolute ids."""
    from gguf import GGMLQuantizationType

    for name, official in NAMES.items():
        if official not in state:
            continue
        values = state[official]
        if name in _PERMUTED:
            order = rope_order(len(values), len(values) // block.head_dim)
            values = values[order.argsort()]
        values = values.contiguous().cpu()
        if values.ndim == 2 and values.dtype == torch.bfloat16:
            as_bytes = values.view(torch.uint8).numpy()
            writer.add_tensor(name, as_bytes, raw_dtype=GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(name, (values.float() if values.ndim == 1 else values).numpy())
    if MAP in state:
        writer.add_tensor(MAP, target_ids(state[MAP]).numpy())
    if block.rope_scaling is not None or block.rope_freq_factors is not None:
        writer.add_tensor(gguf.ROPE_FACTORS, _rope_factors(block).numpy())


def _rope_factors(block: ModelConfig) -> Tensor:
    """Return the divisors of the plain frequencies [E / 2], of Llama-3 scaling too."""
    stretched = dataclasses.replace(block, rope_linear_factor=1.0)
    plain = dataclasses.replace(stretched, rope_scaling=None, rope_freq_factors=None)
    return rope_frequencies(plain) / rope_frequencies(stretched)


_TokenizerFields = Mapping[str, tuple[Any, Any, Any]]  # type, value, type of items


def _tokenizer_fields(path: Path) -> _TokenizerFields:
    """Return every tokenizer field of a GGUF file. Raises `FasteagleError`."""
    from gguf import GGUFReader, GGUFValueType  # 0.2 s

    try:
        fields = [f for f in GGUFReader(path).fields.values() if f.name.startswith("tokenizer.")]
        values = [field.contents() for field in fields]
    except Exception as error:  # the reader checks neither offsets nor texts: any error is possible
        raise FasteagleError(
            f"{path}: damaged, or no GGUF file ({error}): fetch it again"
        ) from error
    return {
        f.name: (f.types[0], value, f.types[-1] if GGUFValueType.ARRAY in f.types else None)
        for f, value in zip(fields, values, strict=True)
    }


def _n_tokens(fields: _TokenizerFields) -> int:
    return len(fields.get("tokenizer.ggml.tokens", (None, (), None))[1])
