"""How GPTQ, AWQ and compressed-tensors tools lay weights out, and what their settings declare.

A layout knows how a tool names the parts of a weight (behind `PREFIX.`), and which of their axes
are rows. Without a part that config.json calls for (g_idx), the others would be read wrongly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from fasteagle.quant import formats
from fasteagle.quant.formats import Geometry, Imported, Shape, refused

ACT_ORDERED = (True, "group", "dynamic")  # of compressed-tensors; "weight" needs no order
Kind = tuple[int, int]  # bits, and columns of a group, 0 for a whole row

_METHOD_NAMES = {
    "aqlm": "AQLM",
    "auto-round": "AutoRound",
    "bitsandbytes": "bitsandbytes (NF4 or int8)",
    "exl2": "EXL2",
    "exl3": "EXL3",
    "fbgemm_fp8": "FBGEMM fp8",
    "fp8": "fp8",
    "hqq": "HQQ",
    "marlin": "Marlin-serialized",
    "torchao": "torchao-serialized",
}


class GPTQLayout:
    """The parts that AutoGPTQ and GPTQModel write."""

    parts = ("qweight", "qzeros", "scales", "g_idx")
    row_axis = 1

    def __init__(self, settings: dict[str, Any], zero_offset: int) -> None:
        self.required = self.parts if settings.get("desc_act") else self.parts[:3]
        self.zero_offset = zero_offset

    def geometry(self, shapes: Mapping[str, Shape], load: Callable[[str], Tensor]) -> Geometry:
        return formats.gptq_geometry(shapes["qweight"], shapes["qzeros"], shapes["scales"])

    def unpack(self, parts: Mapping[str, Tensor]) -> Imported:
        return formats.from_gptq(
            parts["qweight"],
            parts["qzeros"],
            parts["scales"],
            parts.get("g_idx"),
            zero_offset=self.zero_offset,
        )


class AWQLayout:
    """The parts that AutoAWQ writes, version gemm."""

    parts = required = ("qweight", "qzeros", "scales")
    row_axis = 1

    def geometry(self, shapes: Mapping[str, Shape], load: Callable[[str], Tensor]) -> Geometry:
        return formats.awq_geometry(*(shapes[part] for part in self.required))

    def unpack(self, parts: Mapping[str, Tensor]) -> Imported:
        return Imported(formats.from_awq(*(parts[part] for part in self.required)), None)


class CompressedTensorsLayout:
    """The parts that llm-compressor writes, `pack-quantized`."""

    parts = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
    row_axis = 0

    def __init__(self, settings: dict[str, Any]) -> None:
        schemes = [group["weights"] for group in settings["config_groups"].values()]
        needed = {
            "weight_zero_point": all(not scheme.get("symmetric", True) for scheme in schemes),
            "weight_g_idx": all(scheme.get("actorder") in ACT_ORDERED for scheme in schemes),
        }
        self.required = tuple(part for part in self.parts if needed.get(part, True))

    def geometry(self, shapes: Mapping[str, Shape], load: Callable[[str], Tensor]) -> Geometry:
        shape = tuple(load("weight_shape").flatten().tolist())
        return formats.compressed_tensors_geometry(
            shapes["weight_packed"], shapes["weight_scale"], shape
        )

    def unpack(self, parts: Mapping[str, Tensor]) -> Imported:
        # The rows that were read, which may be only the first ones.
        shape = (len(parts["weight_packed"]), int(parts["weight_shape"][1]))
        return formats.from_compressed_tensors(
            parts["weight_packed"],
            parts["weight_scale"],
            shape,
            parts.get("weight_zero_point"),
            parts.get("weight_g_idx"),
        )


Layout = GPTQLayout | AWQLayout | CompressedTensorsLayout


def declared_kinds(method: str, settings: dict[str, Any]) -> frozenset[Kind]:
    """The kinds of weight that settings of `method` tell of.

    Raises `FasteagleError` for what has no exact import, by name.
    """
    if method not in _CHECKS:
        raise refused(f"{_METHOD_NAMES.get(method, repr(method))} weights")
    return _CHECKS[method](settings)


def _check_gptq(settings: dict[str, Any]) -> frozenset[Kind]:
    """The kinds of weight; refuses what cannot be imported, like the other checks."""
    bits = settings.get("bits")
    if bits not in (4, 8):
        raise refused(f"{bits}-bit GPTQ weights")
    layout = "marlin" if settings.get("is_marlin_format") else gptq_format(settings)
    if layout not in ("gptq", "gptq_v2"):
        raise refused(f"GPTQ weights in {layout} layout")
    # Keys "-:PATTERN" leave modules unquantized; others give them bits or groups of their own.
    if any(not key.startswith("-:") for key in settings.get("dynamic") or ()):
        raise refused("GPTQ weights with settings of single modules (dynamic)")
    return frozenset({_as_kind(bits, settings.get("group_size", 128))})


def gptq_format(settings: dict[str, Any]) -> str:
    return str(settings.get("checkpoint_format") or settings.get("format") or "gptq").lower()


def _check_awq(settings: dict[str, Any]) -> frozenset[Kind]:
    keys = ("version", "format", "checkpoint_format")  # AutoAWQ, transformers 5, GPTQModel
    layout = next((str(settings[key]).lower() for key in keys if settings.get(key)), "gemm")
    if settings.get("backend") == "llm-awq":
        layout = "llm-awq"
    if layout != "gemm":
        raise refused(f"AWQ weights in {layout} layout")
    bits = settings.get("bits", settings.get("w_bit", 4))
    if bits != 4:
        raise refused(f"{bits}-bit AWQ weights")
    size = settings.get("group_size", settings.get("q_group_size", 128))
    return frozenset({_as_kind(bits, size)})


def _check_compressed(settings: dict[str, Any]) -> frozenset[Kind]:
    if settings.get("kv_cache_scheme"):
        raise refused("compressed-tensors weights with a quantized KV cache")
    if settings.get("transform_config"):
        raise refused("compressed-tensors weights with rotations (transform_config)")
    if (settings.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise refused("sparse compressed-tensors weights")
    kinds = set()
    for group in (settings.get("config_groups") or {None: None}).values():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not weights:
            raise refused("compressed-tensors weights without a scheme in config_groups")
        layout = group.get("format") or settings.get("format")
        if layout != "pack-quantized":
            raise refused(f"compressed-tensors {layout} weights")
        if group.get("input_activations") or group.get("output_activations"):
            raise refused("compressed-tensors weights with quantized activations")
        bits, kind = weights.get("num_bits"), weights.get("type", "int")
        strategy = weights.get("strategy", "group")
        if bits not in (4, 8) or kind != "int" or strategy not in ("group", "channel"):
            raise refused(f"compressed-tensors weights of {bits}-bit {kind} by {strategy}")
        kinds.add(_as_kind(bits, weights.get("group_size") if strategy == "group" else None))
    return frozenset(kinds)


def _as_kind(bits: int, group_size: int | None) -> Kind:
    return bits, 0 if group_size in (None, -1) else int(group_size)


_CHECKS = {"gptq": _check_gptq, "awq": _check_awq, "compressed-tensors": _check_compressed}
