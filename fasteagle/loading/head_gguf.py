"""EAGLE-3 draft heads in the GGUF files of llama.cpp, architecture `eagle3`: reading and writing.

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

from fasteagle.config import HeadConfig, ModelConfig
from fasteagle.config_fields import Fields
from fasteagle.errors import FasteagleError
from fasteagle.loading.gguf import ROPE_FACTORS, check_types, dequantized, rope_factors, rope_order
from fasteagle.loading.gguf_index import GGUFIndex, GGUFTensor, read_index
from fasteagle.loading.head_dialects import HeadSource
from fasteagle.model import rope_frequencies
from fasteagle.paths import replacing

ARCHITECTURE = "eagle3"
DIALECT = "llama.cpp GGUF EAGLE-3"
N_TAPS = 3  # what released versions of llama.cpp read
TOKENIZER = "tokenizer."  # prefix of the fields that a head takes from its target
_INTEGERS = {"I32": np.int32, "I64": np.int64}
_MAPS = ("d2t", "d2t.weight")  # absolute ids, and the offsets of forks
_EXACT = {"F16": torch.float16, "BF16": torch.bfloat16}  # others are read as fp32

NAMES = {
    "fc.weight": "fc.weight",
    "enc.output_norm.weight": "input_norm.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "lm_head.weight",
    "token_embd.weight": "embed_tokens.weight",
    "blk.0.attn_norm.weight": "midlayer.input_layernorm.weight",
    "blk.0.attn_norm_2.weight": "midlayer.hidden_norm.weight",
    "blk.0.attn_q.weight": "midlayer.self_attn.q_proj.weight",
    "blk.0.attn_k.weight": "midlayer.self_attn.k_proj.weight",
    "blk.0.attn_v.weight": "midlayer.self_attn.v_proj.weight",
    "blk.0.attn_output.weight": "midlayer.self_attn.o_proj.weight",
    "blk.0.ffn_norm.weight": "midlayer.post_attention_layernorm.weight",
    "blk.0.ffn_gate.weight": "midlayer.mlp.gate_proj.weight",
    "blk.0.ffn_up.weight": "midlayer.mlp.up_proj.weight",
    "blk.0.ffn_down.weight": "midlayer.mlp.down_proj.weight",
}
_PERMUTED = ("blk.0.attn_q.weight", "blk.0.attn_k.weight")
_FORKS = {"blk.0.hidden_norm.weight": "midlayer.hidden_norm.weight"}


def gguf_of(path: Path) -> Path | None:
    """The GGUF file that `path` is, or the only one in a folder that has no config.json."""
    if path.suffix == ".gguf":
        return path
    files = [] if (path / "config.json").exists() else list(path.glob("*.gguf"))
    return files[0] if len(files) == 1 else None


def open_gguf_head(path: Path) -> HeadSource:
    """The head in a GGUF file, its quantized tensors in fp32.

    Raises `FasteagleError` for files of another architecture, incomplete and damaged ones.
    """
    if not path.is_file():
        raise FasteagleError(f"{path}: no such file")
    index = read_index(path)
    fields = Fields(index.fields, str(path))
    kind = fields.text("general.architecture", "(none)")
    if kind != ARCHITECTURE:
        raise FasteagleError(
            f"{path}: GGUF architecture {kind!r} is no draft head: give a file of architecture "
            f"{ARCHITECTURE!r}, or a folder"
        )
    maps = {name: index.tensors[name] for name in _MAPS if name in index.tensors}
    _check_types(path, index, maps)
    data = np.asarray(np.memmap(path, mode="r", dtype=np.uint8))
    raw = _config(path, fields, index)
    if ROPE_FACTORS in index.tensors:
        raw["rope_freq_factors"] = list(rope_factors(path, data, index.tensors[ROPE_FACTORS]))
    state = _weights(data, index.tensors, raw["head_dim"])
    for name, tensor in maps.items():
        state |= _map(data, name, tensor, raw["vocab_size"])
    return HeadSource(str(path), DIALECT, raw, state, None, True, _taps(path, index.fields))


def _check_types(path: Path, index: GGUFIndex, maps: Mapping[str, GGUFTensor]) -> None:
    check_types(path, {name: t for name, t in index.tensors.items() if name not in maps})
    for name, tensor in maps.items():
        if tensor.kind not in _INTEGERS or len(tensor.shape) != 1:
            raise FasteagleError(
                f"{path}: {name} is {tensor.kind} of shape {tensor.shape}: must be a list of "
                f"{' or '.join(_INTEGERS)}: convert the head again"
            )


def _taps(path: Path, fields: Mapping[str, Any]) -> tuple[int, ...]:
    """Blocks whose input is read; older files have another name for them."""
    for key in ("eagle3.target_layers", "eagle3.extract_layers"):
        if key in fields:
            taps = fields[key]
            if isinstance(taps, list) and taps and all(type(tap) is int for tap in taps):
                return tuple(taps)
            raise FasteagleError(f"{path}: {key} is {taps!r}: must be a list of block numbers")
    raise FasteagleError(
        f"{path}: GGUF metadata lacks eagle3.target_layers: convert the head again"
    )


def _config(path: Path, fields: Fields, index: GGUFIndex) -> dict[str, Any]:
    """The fields under the names of a `config.json`. Raises `FasteagleError`."""
    p = f"{ARCHITECTURE}."
    dim, n_head = fields.width(p + "embedding_length"), fields.width(p + "attention.head_count")
    head_dim = fields.width(p + "attention.key_length", max(1, dim // n_head))
    scaling = fields.text(p + "rope.scaling.type", "none")
    if (
        scaling not in ("none", "linear")
        or fields.width(p + "rope.dimension_count", head_dim) != head_dim
        or fields.integer(p + "block_count", 1) != 1
    ):
        raise FasteagleError(
            f"{path}: a head with RoPE scaling {scaling!r}, RoPE on a part of each attention head "
            "or several blocks does not run here: choose another with --head"
        )
    length = fields.integer(p + "context_length") if p + "context_length" in fields else None
    linear = {"rope_type": "linear", "factor": fields.number(p + "rope.scaling.factor", 1.0)}
    return {
        "hidden_size": dim,
        "intermediate_size": fields.width(p + "feed_forward_length"),
        "num_attention_heads": n_head,
        "num_key_value_heads": fields.width(p + "attention.head_count_kv", n_head),
        "head_dim": head_dim,
        "vocab_size": _vocab_size(path, fields, index),
        "rms_norm_eps": fields.number(p + "attention.layer_norm_rms_epsilon"),
        "rope_theta": fields.number(p + "rope.freq_base", 10000.0),
        "rope_scaling": linear if scaling == "linear" else None,
        "target_hidden_size": fields.width(p + "target_hidden_size", dim),
        "norm_before_residual": fields.flag(p + "norm_before_residual"),
        "norm_before_fc": fields.flag(p + "norm_before_fc"),
        "max_position_embeddings": length,
    }


def _vocab_size(path: Path, fields: Fields, index: GGUFIndex) -> int:
    """The target's vocabulary: said, or what the embedding or the tokenizer of the file has."""
    embedding = index.tensors.get("token_embd.weight")
    if f"{ARCHITECTURE}.vocab_size" in fields:
        return fields.width(f"{ARCHITECTURE}.vocab_size")
    return _n_tokens(_tokenizer_fields(path)) if embedding is None else embedding.shape[0]


def _weights(
    data: np.ndarray, tensors: Mapping[str, GGUFTensor], head_dim: int
) -> dict[str, Tensor]:
    """The tensors under their official names, rows in the order of HF files."""
    state = {}
    for name, tensor in tensors.items():
        if name in (ROPE_FACTORS, *_MAPS):
            continue
        values = dequantized(data, tensor)
        if name in _PERMUTED and len(values) % head_dim == 0:  # else told as misshapen
            values = values[rope_order(len(values), len(values) // head_dim)]
        official = NAMES.get(name) or _FORKS.get(name, name)
        state[official] = values.to(_EXACT.get(tensor.kind, torch.float32))
    return state


def _map(data: np.ndarray, name: str, tensor: GGUFTensor, vocab_size: int) -> dict[str, Tensor]:
    """The draft vocabulary as offsets; one of all tokens is none."""
    raw = data[tensor.offset : tensor.offset + tensor.n_bytes]
    values = torch.from_numpy(raw.view(_INTEGERS[tensor.kind]).astype(np.int64))
    if len(values) == vocab_size:
        return {}
    return {"d2t": values - torch.arange(len(values)) if name == "d2t" else values}


# Writing


def write_gguf_head(
    path: Path,
    config: HeadConfig,
    state: Mapping[str, Tensor],
    target: ModelConfig,
    tokenizer: Path,
) -> None:
    """Write a head, given as official tensors, with the tokenizer of the GGUF file `tokenizer`.

    The head must be one that llama.cpp can run: see `export_head`. Raises `FasteagleError` for
    the tokenizer of another model.
    """
    from gguf import GGUFWriter  # 0.2 s

    tokens = _tokenizer_fields(tokenizer)
    n_tokens = _n_tokens(tokens)
    if n_tokens != target.vocab_size:
        raise FasteagleError(
            f"{tokenizer}: its tokenizer has {n_tokens:,} tokens, the model {target.vocab_size:,}: "
            "give the target's own GGUF file as --tokenizer-from"
        )
    with replacing(path) as temporary:
        writer = GGUFWriter(temporary, ARCHITECTURE)
        _add_fields(writer, path.stem, config, target)
        for key, (kind, value, item) in tokens.items():
            writer.add_key_value(key, value, kind, sub_type=item)
        _add_tensors(writer, config.block, state)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _tokenizer_fields(path: Path) -> dict[str, tuple[Any, Any, Any]]:
    """Type, value and type of items of every tokenizer field of a GGUF file."""
    from gguf import GGUFReader, GGUFValueType  # 0.2 s

    try:
        fields = GGUFReader(path).fields.values()
    except Exception as error:  # the reader does not check offsets: any error is possible
        raise FasteagleError(
            f"{path}: damaged, or no GGUF file ({error}): fetch it again"
        ) from error
    return {
        f.name: (
            f.types[0],
            f.contents(),
            f.types[-1] if f.types[0] == GGUFValueType.ARRAY else None,
        )
        for f in fields
        if f.name.startswith(TOKENIZER)
    }


def _n_tokens(fields: Mapping[str, tuple[Any, Any, Any]]) -> int:
    return len(fields.get("tokenizer.ggml.tokens", (None, (), None))[1])


def _add_fields(writer: Any, name: str, config: HeadConfig, target: ModelConfig) -> None:
    from gguf import RopeScalingType

    block, own = config.block, config.eagle3
    assert own is not None, "see export_head"
    writer.add_name(name)
    writer.add_block_count(1)
    writer.add_context_length(target.max_seq_len)
    writer.add_embedding_length(block.dim)
    writer.add_feed_forward_length(block.ffn_dim)
    writer.add_head_count(block.n_head)
    writer.add_head_count_kv(block.n_kv_head)
    writer.add_key_length(block.head_dim)
    writer.add_value_length(block.head_dim)
    writer.add_layer_norm_rms_eps(block.norm_eps)
    writer.add_rope_freq_base(block.rope_base)
    writer.add_rope_dimension_count(block.head_dim)
    writer.add_vocab_size(target.vocab_size)
    if block.rope_linear_factor != 1.0:
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(block.rope_linear_factor)
    writer.add_array(f"{ARCHITECTURE}.target_layers", list(own.tap_layers))
    writer.add_uint32(f"{ARCHITECTURE}.target_hidden_size", own.target_dim)
    writer.add_bool(f"{ARCHITECTURE}.norm_before_residual", own.norm_before_residual)
    if own.tap_norm == "all":  # a field that older versions do not know
        writer.add_bool(f"{ARCHITECTURE}.norm_before_fc", True)


def _add_tensors(writer: Any, block: ModelConfig, state: Mapping[str, Tensor]) -> None:
    """Matrices in their own dtype, norms in fp32, absolute ids."""
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
    if "d2t" in state:
        writer.add_tensor("d2t", (state["d2t"] + torch.arange(len(state["d2t"]))).numpy())
    factors = _rope_factors(block)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors.numpy())


def _rope_factors(block: ModelConfig) -> Tensor | None:
    """Divisors of the plain frequencies [E / 2], of Llama-3 scaling too; None where all are 1."""
    if block.rope_scaling is None and block.rope_freq_factors is None:
        return None
    stretched = dataclasses.replace(block, rope_linear_factor=1.0)
    plain = dataclasses.replace(stretched, rope_scaling=None, rope_freq_factors=None)
    return rope_frequencies(plain) / rope_frequencies(stretched)
