"""Weight layouts of GPTQ, AWQ and compressed-tensors tools, and checks of their settings.

A layout knows how a tool names the parts of a weight (after `PREFIX.`), and which of their axes
are rows. Without a part that config.json calls for (g_idx), the others would be read wrongly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fasteagle.config_fields import Fields
from fasteagle.errors import FasteagleError
from fasteagle.quant import formats
from fasteagle.quant.formats import Geometry, Imported, Shape, refused

ACT_ORDERED = (True, "group", "dynamic")  # of compressed-tensors; "weight" needs no order
Kind = tuple[int, int]  # bits, and columns of a group, 0 for a whole row


class GPTQLayout:
    """Parts of a weight that AutoGPTQ and GPTQModel write."""

    parts = ("qweight", "qzeros", "scales", "g_idx")
    row_axis = 1

    def __init__(self, settings: dict[str, Any], qzeros: Tensor | None) -> None:
        """Read the offset of zeros from one weight's: a tool writes all of a folder alike."""
        self.required = self.parts if settings.get("desc_act") else self.parts[:3]
        v2, sym = gptq_format(Fields(settings, "")) == "gptq_v2", settings.get("sym", True)
        self.zero_offset = 0 if v2 else 1  # of a damaged folder, which is refused
        if qzeros is not None and qzeros.dim() == 2 and qzeros.numel():
            bits = settings["bits"]
            self.zero_offset = formats.gptq_zero_offset(qzeros, bits=bits, v2=v2, sym=sym)

    def geometry(self, parts: Mapping[str, Tensor]) -> Geometry:
        return formats.gptq_geometry(*_shapes(parts, self.parts[:3]))

    def unpack(self, parts: Mapping[str, Tensor]) -> Imported:
        qweight, qzeros, scales = (parts[part] for part in self.parts[:3])
        g_idx, offset = parts.get("g_idx"), self.zero_offset
        return formats.from_gptq(qweight, qzeros, scales, g_idx, zero_offset=offset)


class AWQLayout:
    """Parts of a weight that AutoAWQ writes, version gemm."""

    parts = required = ("qweight", "qzeros", "scales")
    row_axis = 1

    def geometry(self, parts: Mapping[str, Tensor]) -> Geometry:
        return formats.awq_geometry(*_shapes(parts, self.required))

    def unpack(self, parts: Mapping[str, Tensor]) -> Imported:
        return Imported(formats.from_awq(*(parts[part] for part in self.required)), None)


class CompressedTensorsLayout:
    """Parts of a weight that llm-compressor writes, `pack-quantized`."""

    parts = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
    row_axis = 0

    def __init__(self, settings: dict[str, Any]) -> None:
        schemes = [group["weights"] for group in settings["config_groups"].values()]
        needed = {
            "weight_zero_point": all(not scheme.get("symmetric", True) for scheme in schemes),
            "weight_g_idx": all(scheme.get("actorder") in ACT_ORDERED for scheme in schemes),
        }
        self.required = tuple(part for part in self.parts if needed.get(part, True))

    def geometry(self, parts: Mapping[str, Tensor]) -> Geometry:
        shape = _two_integers(parts["weight_shape"])
        packed, scales = _shapes(parts, self.parts[:2])
        return formats.compressed_tensors_geometry(packed, scales, shape)

    def unpack(self, parts: Mapping[str, Tensor]) -> Imported:
        # The rows that were read, which may be only the first ones.
        shape = (len(parts["weight_packed"]), _two_integers(parts["weight_shape"])[1])
        return formats.from_compressed_tensors(
            parts["weight_packed"],
            parts["weight_scale"],
            shape,
            parts.get("weight_zero_point"),
            parts.get("weight_g_idx"),
        )


def _shapes(parts: Mapping[str, Tensor], names: Sequence[str]) -> list[Shape]:
    return [tuple(parts[name].shape) for name in names]


def _two_integers(weight_shape: Tensor) -> tuple[int, int]:
    if weight_shape.shape != (2,) or weight_shape.dtype not in (torch.int32, torch.int64):
        raise FasteagleError(
            f"weight_shape is {weight_shape.dtype} {tuple(weight_shape.shape)}: must be two "
            "integers; fetch the file again"
        )
    n_rows, n_columns = weight_shape.tolist()
    return n_rows, n_columns


Layout = GPTQLayout | AWQLayout | CompressedTensorsLayout


def declared_kinds(method: str, settings: dict[str, Any]) -> frozenset[Kind]:
    """Return the kinds of weight that settings of `method` declare.

    Raises `FasteagleError` that names a format without an exact import.
    """
    if method not in _CHECKS:
        raise refused(f"{method!r} weights")
    return _CHECKS[method](Fields(settings, "quantization_config"))


def _check_gptq(settings: Fields) -> frozenset[Kind]:
    """Return the kinds of weight. Raises `FasteagleError` for those that cannot be imported."""
    bits = settings.integer("bits")
    if bits not in (4, 8):
        raise refused(f"{bits}-bit GPTQ weights")
    layout = "marlin" if settings.flag("is_marlin_format") else gptq_format(settings)
    if layout not in ("gptq", "gptq_v2"):
        raise refused(f"GPTQ weights in {layout} layout")
    # Keys "-:PATTERN" leave modules unquantized; others give them bits or groups of their own.
    if any(not key.startswith("-:") for key in settings.part("dynamic")):
        raise refused("GPTQ weights with settings of single modules (dynamic)")
    settings.flag("sym")  # how zeros are read
    return frozenset({_as_kind(bits, settings, "group_size")})


def gptq_format(settings: Fields) -> str:
    return settings.text("checkpoint_format", settings.text("format", "gptq")).lower()


def _check_awq(settings: Fields) -> frozenset[Kind]:
    layout = "gemm"
    for key in ("checkpoint_format", "format", "version"):  # GPTQModel, transformers 5, AutoAWQ
        layout = settings.text(key, layout).lower()
    if settings.text("backend", "") == "llm-awq":
        layout = "llm-awq"
    if layout != "gemm":
        raise refused(f"AWQ weights in {layout} layout")
    bits = settings.integer("bits", settings.integer("w_bit", 4))
    if bits != 4:
        raise refused(f"{bits}-bit AWQ weights")
    size = "q_group_size" if "q_group_size" in settings else "group_size"
    return frozenset({_as_kind(bits, settings, size)})


def _check_compressed(settings: Fields) -> frozenset[Kind]:
    if not settings.part("kv_cache_scheme").empty:
        raise refused("compressed-tensors weights with a quantized KV cache")
    if not settings.part("transform_config").empty:
        raise refused("compressed-tensors weights with rotations (transform_config)")
    if settings.part("sparsity_config").text("format", "dense") != "dense":
        raise refused("sparse compressed-tensors weights")
    groups = settings.part("config_groups")
    kinds = {_kind_of_group(groups.part(name), settings) for name in groups}
    if not kinds:
        raise refused("compressed-tensors weights without a scheme in config_groups")
    return frozenset(kinds)


def _kind_of_group(group: Fields, settings: Fields) -> Kind:
    weights = group.part("weights")
    if weights.empty:
        raise refused("compressed-tensors weights without a scheme in config_groups")
    layout = group.text("format", settings.text("format", "(no format)"))
    if layout != "pack-quantized":
        raise refused(f"compressed-tensors {layout} weights")
    for key in ("input_activations", "output_activations"):
        if not group.part(key).empty:
            raise refused("compressed-tensors weights with quantized activations")
    bits, kind = weights.integer("num_bits"), weights.text("type", "int")
    strategy = weights.text("strategy", "group")
    if bits not in (4, 8) or kind != "int" or strategy not in ("group", "channel"):
        raise refused(f"compressed-tensors weights of {bits}-bit {kind} by {strategy}")
    weights.flag("symmetric")  # which parts there are
    return (bits, 0) if strategy == "channel" else _as_kind(bits, weights, "group_size", -1)


def _as_kind(bits: int, settings: Fields, key: str, default: int = 128) -> Kind:
    """Return the kind of weights with `bits` whose group size is at `key`; -1: a whole row."""
    size = settings.integer(key, default, least=-1)
    return bits, max(size, 0)


_CHECKS = {"gptq": _check_gptq, "awq": _check_awq, "compressed-tensors": _check_compressed}
