"""Folders of quantized weights in our own format: safetensors and JSON, bit-equal when loaded.

    config.json                 the model's shape, and what the folder is
    model-00001.safetensors     for a packed weight `NAME.q`, `NAME.scales`, `NAME.zeros` or
                                `NAME.offsets`; other tensors under their Hugging Face name
    model.safetensors.index.json   which tensor lies in which file; written last

Written tensor by tensor, so that no more than one shard is in memory; read memory-mapped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fasteagle.config import ModelConfig, MoEConfig
from fasteagle.config_fields import MOST_EXPERTS, MOST_LAYERS, MOST_WIDTH, Fields
from fasteagle.config_hf import read_freq_factors, read_llama3_scaling, read_shape
from fasteagle.errors import FasteagleError, shortened
from fasteagle.loading.tensors import Checkpoint, WeightsFolder, read_json, save_tensors, weight_map
from fasteagle.paths import write_json
from fasteagle.quant.packed import PackedWeight
from fasteagle.quant.scheme import Scheme

FORMAT = 1
METHOD = "fasteagle"  # `quant_method` in config.json
SHARD_BYTES = 1 << 30
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
INDEX = "model.safetensors.index.json"


def save(
    folder: Path,
    checkpoint: Checkpoint,
    scheme: Scheme,
    weights: Iterable[tuple[str, PackedWeight | Tensor]],
) -> None:
    """Write the `weights` of a quantized `checkpoint`, one by one, into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    shard: dict[str, Tensor] = {}
    where: dict[str, str] = {}
    packed: dict[str, Any] = {}
    n_shards, size = 0, 0

    def flush() -> None:
        nonlocal n_shards, size
        n_shards += 1
        name = f"model-{n_shards:05}.safetensors"
        save_tensors(shard, folder / name)
        where.update(dict.fromkeys(shard, name))
        shard.clear()
        size = 0

    for name, weight in weights:
        if isinstance(weight, PackedWeight):
            packed[name] = {"bits": weight.bits, "group_size": weight.group_size}
            shard |= {f"{name}.{part}": t for part, t in weight.tensors().items()}
            size += weight.n_bytes
        else:
            shard[name] = weight
            size += weight.numel() * weight.element_size()
        if size >= SHARD_BYTES:
            flush()
    if shard:
        flush()
    quantization = {
        "quant_method": METHOD,
        "format": FORMAT,
        "scheme": dataclasses.asdict(scheme),
        "source_fingerprint": checkpoint.fingerprint,
        "packed": packed,
    }
    config = {
        "architectures": [checkpoint.config.architecture],
        "model": dataclasses.asdict(checkpoint.config),
        "quantization_config": quantization,
    }
    write_json(folder / "config.json", config)
    write_json(folder / INDEX, {"weight_map": where})


def is_stored(raw: dict[str, Any]) -> bool:
    """Return whether a config.json is of a folder written by `save`."""
    settings = raw.get("quantization_config")
    return isinstance(settings, dict) and settings.get("quant_method") == METHOD


class StoredFolder(WeightsFolder):
    """Folder written by `save`. Raises `FasteagleError` for damaged and for newer ones."""

    def __init__(self, path: Path, raw: dict[str, Any] | None = None) -> None:
        raw = read_json(path / "config.json") if raw is None else raw
        fields = Fields(raw, str(path / "config.json"))
        header = fields.part("quantization_config")
        version = header.integer("format")
        if version != FORMAT:
            raise FasteagleError(
                f"{path}: quantized format {version}, this fasteagle reads {FORMAT}: "
                "quantize the model again, or upgrade"
            )
        self.scheme = _scheme(header.part("scheme"))
        super().__init__(path, _model_config(fields.part("model")))
        self.source_fingerprint = header.text("source_fingerprint")
        absent = sorted(weight_map(path / INDEX).keys() - self._tensors.keys())
        if absent:
            raise FasteagleError(
                f"{path / INDEX} names tensors that are not there: {shortened(absent)}: "
                "quantize the model again"
            )
        packed = header.part("packed")
        self._packed = {name: self._joined(name, packed.part(name)) for name in packed}

    def _joined(self, name: str, entry: Fields) -> PackedWeight:
        """Take the parts of a packed weight out of the tensors, and return it."""
        form = {"bits": entry.one_of("bits", (4, 8)), "group_size": entry.integer("group_size")}
        names = ("q", "scales", "zeros", "offsets")
        parts: dict[str, Any] = {part: self._tensors.pop(f"{name}.{part}", None) for part in names}
        try:
            weight = PackedWeight(**form, **parts)
            _require_dtypes(weight)
        except (AssertionError, AttributeError, ValueError, FasteagleError) as error:
            raise FasteagleError(
                f"{self.path}: {name} does not fit its header {form} ({error}): "
                "quantize the model again"
            ) from error
        return weight

    def names(self) -> set[str]:
        return self._tensors.keys() | self._packed.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._packed[name].shape if name in self._packed else super().shape(name)

    def bits(self, name: str) -> int | None:
        return self._packed[name].bits if name in self._packed else None

    def packed(self, name: str) -> PackedWeight | None:
        return self._packed.get(name)

    def load(self, name: str) -> Tensor:
        weight = self.packed(name)
        return super().load(name) if weight is None else weight.dequantize()

    def start(self, name: str, n: int) -> Tensor:
        weight = self.packed(name)
        if weight is None:
            return super().start(name, n)
        return weight.rows(slice(0, self.rows_for(name, n))).dequantize()


def _require_dtypes(weight: PackedWeight) -> None:
    """Raise ValueError for parts that are not as `PackedWeight` describes them."""
    kinds = {name: tensor.dtype for name, tensor in weight.tensors().items()}
    integers = {"q": torch.uint8 if weight.bits == 4 else torch.int8, "zeros": torch.uint8}
    for name, dtype in kinds.items():
        if dtype not in ((integers[name],) if name in integers else FLOATS):
            raise ValueError(f"{name} is {dtype}")
    if weight.zeros is not None and (weight.zeros > 16).any():
        raise ValueError("zeros are above 16")


def _scheme(fields: Fields) -> Scheme:
    return Scheme(
        bits=fields.one_of("bits", (4, 8)),
        group_size=fields.integer("group_size", least=0),
        method=fields.text("method"),
        head_bits=fields.one_of("head_bits", (4, 8, 16)),
    )


_ORIGINAL = "original_max_seq_len"
_SHAPE_KEYS = {name: name for name in ("dim", "n_head", "n_kv_head", "head_dim", "ffn_dim")}


def _model_config(fields: Fields) -> ModelConfig:
    """Read a `ModelConfig` back from the fields that `dataclasses.asdict` made of it."""
    shape = read_shape(fields, _SHAPE_KEYS)
    scaling, n_layer = fields.part("rope_scaling"), fields.integer("n_layer", most=MOST_LAYERS)
    return ModelConfig(
        **shape,
        n_layer=n_layer,
        vocab_size=fields.width("vocab_size"),
        max_seq_len=fields.integer("max_seq_len"),
        norm_eps=fields.number("norm_eps", most=1),
        rope_base=fields.number("rope_base"),
        rope_scaling=None if scaling.empty else read_llama3_scaling(scaling, _ORIGINAL, scaling),
        rope_linear_factor=fields.number("rope_linear_factor", 1.0),
        rope_freq_factors=read_freq_factors(fields, shape["head_dim"]),
        tie_embeddings=fields.flag("tie_embeddings"),
        qkv_bias=fields.flag("qkv_bias"),
        qk_norm=fields.flag("qk_norm"),
        qk_norm_whole=fields.flag("qk_norm_whole"),
        moe=None if fields.part("moe").empty else _moe_config(fields.part("moe")),
        dense_blocks=tuple(fields.integers("dense_blocks", most=n_layer - 1)),
        sliding_window=fields.integer("sliding_window") if "sliding_window" in fields else None,
        architecture=fields.text("architecture", "LlamaForCausalLM"),
    )


def _moe_config(fields: Fields) -> MoEConfig:
    n_expert = fields.integer("n_expert", most=MOST_EXPERTS)
    if "score" in fields:  # older folders said by it how weights of experts are normed
        raise fields.error("score", "absent: quantize the model again")
    return MoEConfig(
        n_expert=n_expert,
        top_k=fields.integer("top_k", most=n_expert),
        ffn_dim=fields.width("ffn_dim"),
        renormalize=fields.flag("renormalize"),
        scale=fields.number("scale"),
        shared_ffn_dim=fields.integer("shared_ffn_dim", least=0, most=MOST_WIDTH),
        shared_gate=fields.flag("shared_gate"),
        choice_bias=fields.flag("choice_bias"),
    )
