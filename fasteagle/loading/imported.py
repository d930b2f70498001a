"""Folders of weights that another tool has quantized: GPTQ, AWQ and compressed-tensors.

Which tensor is which is decided here, from config.json and the tensors' names; what they mean is
the business of `import_formats`. Whatever has no exact import is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fasteagle import config as model_config
from fasteagle.errors import FasteagleError, shortened
from fasteagle.loading.tensors import (
    Checkpoint,
    SafetensorsFolder,
    expected_shapes,
    read_json,
    rows_for,
)
from fasteagle.quant import formats
from fasteagle.quant.formats import Geometry, Imported, Shape, refused
from fasteagle.quant.packed import PackedWeight
from fasteagle.quant.scheme import Scheme

ROWS_PER_WORD = 8  # 4-bit rows that may share an int32
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


# A layout: how a tool names the parts of a weight (behind `PREFIX.`), and which of their axes are
# rows. Without a part that config.json calls for (g_idx), the others would be read wrongly.


class GPTQLayout:
    """AutoGPTQ, GPTQModel."""

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
    """AutoAWQ, version gemm."""

    parts = required = ("qweight", "qzeros", "scales")
    row_axis = 1

    def geometry(self, shapes: Mapping[str, Shape], load: Callable[[str], Tensor]) -> Geometry:
        return formats.awq_geometry(*(shapes[part] for part in self.required))

    def unpack(self, parts: Mapping[str, Tensor]) -> Imported:
        return Imported(formats.from_awq(*(parts[part] for part in self.required)), None)


class CompressedTensorsLayout:
    """llm-compressor, `pack-quantized`."""

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
        # The rows that are here, which are not all where only the first were read.
        shape = (len(parts["weight_packed"]), int(parts["weight_shape"][1]))
        return formats.from_compressed_tensors(
            parts["weight_packed"],
            parts["weight_scale"],
            shape,
            parts.get("weight_zero_point"),
            parts.get("weight_g_idx"),
        )


Layout = GPTQLayout | AWQLayout | CompressedTensorsLayout


class PartsFolder(SafetensorsFolder):
    """A safetensors folder of which columns can be read, too."""

    def first(self, name: str, axis: int, n: int) -> Tensor:
        part = self._files[name].get_slice(name)
        return part[:n] if axis == 0 else part[:, :n]


class QuantizedFolder(Checkpoint):
    """A folder of packed linears, under the plain names of their weights.

    `scheme` says what its block linears are; `head_bits` is 16 unless the LM head is packed too.
    Raises `FasteagleError` for parts that are missing or do not fit each other, and where block
    linears differ in bits or group size, for fused products need them equal.
    """

    def __init__(self, files: PartsFolder, layout: Layout, declared: frozenset[Kind]) -> None:
        """`declared` are the kinds of weight that config.json tells of."""
        self.path, self.config = files.path, files.config
        self._files, self._layout, self._declared = files, layout, declared
        self._parts: dict[str, set[str]] = {}
        self._plain: set[str] = set()
        for name in files.names():
            prefix, _, part = name.rpartition(".")
            if part in layout.parts:
                self._parts.setdefault(f"{prefix}.weight", set()).add(part)
            else:
                self._plain.add(name)
        self._check_parts()
        self._geometry = {name: self._read_geometry(name) for name in self._parts}
        self._plain -= self._zero_biases()
        self.scheme = self._find_scheme()

    def _check_parts(self) -> None:
        needed = self._layout.required
        problems = [f"{name} is there unpacked, too" for name in self._parts.keys() & self._plain]
        for name, parts in self._parts.items():
            problems += [f"missing {_part(name, part)}" for part in needed if part not in parts]
        if not self._parts:
            problems = [f"config.json tells of them, but there is no *.{needed[0]}"]
        if problems:
            raise FasteagleError(
                f"{self.path}: {len(problems)} wrong parts of quantized weights: "
                f"{shortened(problems)}; fetch the folder again"
            )

    def _read_geometry(self, name: str) -> Geometry:
        shapes = {part: self._files.shape(_part(name, part)) for part in self._parts[name]}
        try:
            geometry = self._layout.geometry(shapes, lambda p: self._files.load(_part(name, p)))
        except FasteagleError as error:
            raise self._named(name, error) from error
        kind = self._kind(geometry)
        if kind not in self._declared:
            raise FasteagleError(
                f"{self.path}: {name} is {_listed({kind})}, where config.json says "
                f"{_listed(self._declared)}; fetch the folder again"
            )
        return geometry

    def _kind(self, geometry: Geometry) -> Kind:
        by_row = (geometry.bits, 0)
        is_row = geometry.group_size == geometry.n_columns and by_row in self._declared
        return by_row if is_row else (geometry.bits, geometry.group_size)

    def _zero_biases(self) -> set[str]:
        """Biases of nothing but zeros, which AutoGPTQ gives to linears that have none."""
        extra = {_part(name, "bias") for name in self._parts} & self._plain
        extra -= expected_shapes(self.config).keys()
        return {name for name in extra if not self._files.load(name).any()}

    def _find_scheme(self) -> Scheme:
        blocks = [g for name, g in self._geometry.items() if name.startswith("model.layers.")]
        kinds = {self._kind(geometry) for geometry in blocks}
        if len(kinds) != 1:
            what = f"blocks of {_listed(kinds)}" if kinds else "blocks without packed"
            raise FasteagleError(f"{self.path}: {refused(f'{what} weights')}")
        ((bits, group_size),) = kinds
        head = self._geometry.get("lm_head.weight")
        return Scheme(bits, group_size, "own", head_bits=16 if head is None else head.bits)

    def _named(self, name: str, error: FasteagleError) -> FasteagleError:
        return FasteagleError(f"{self.path}: {name}: {error}")

    def names(self) -> set[str]:
        return self._plain | self._parts.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._parts:
            return self._files.shape(name)
        return self._geometry[name].n_rows, self._geometry[name].n_columns

    def load(self, name: str) -> Tensor:
        """A packed weight dequantized in fp32, columns in the model's order; others as stored."""
        if name not in self._parts:
            return self._files.load(name)
        return self._unpack(name).dequantize()

    def start(self, name: str, n: int) -> Tensor:
        """The first `n` values or more."""
        if name not in self._parts:
            return self._files.start(name, n)
        if self.shape(name)[0] % ROWS_PER_WORD:  # the last word holds padding
            return self.load(name)
        words = -(-rows_for(self.shape(name), n) // ROWS_PER_WORD)
        return self._unpack(name, words * ROWS_PER_WORD).dequantize()

    def packed(self, name: str) -> PackedWeight | None:
        """The weight as stored, columns in the order of `columns`; None for plain tensors."""
        return self._unpack(name).weight if name in self._parts else None

    def columns(self, name: str) -> Tensor | None:
        for part in self._parts.get(name, set()) & {"g_idx", "weight_g_idx"}:
            geometry = self._geometry[name]
            g_idx = self._files.load(_part(name, part))
            try:
                return formats.act_order(g_idx, geometry.n_columns, geometry.group_size)
            except FasteagleError as error:
                raise self._named(name, error) from error
        return None

    def _unpack(self, name: str, n_rows: int | None = None) -> Imported:
        """A packed weight, or its first rows (a multiple of `ROWS_PER_WORD`)."""
        axis, parts = self._layout.row_axis, {}
        for part in self._parts[name]:
            stored = _part(name, part)
            shape = self._files.shape(stored)
            if n_rows is None or len(shape) != 2:
                parts[part] = self._files.load(stored)
            else:
                length = n_rows * shape[axis] // self.shape(name)[0]  # less where rows share words
                parts[part] = self._files.first(stored, axis, length)
        try:
            return self._layout.unpack(parts)
        except FasteagleError as error:
            raise self._named(name, error) from error


def _listed(kinds: Iterable[Kind]) -> str:
    return " and ".join(f"{bits}-bit g{size or 'row'}" for bits, size in sorted(kinds))


def _part(weight: str, part: str) -> str:
    """`x.weight` to `x.PART`."""
    return f"{weight.removesuffix('weight')}{part}"


def open_quantized(path: Path, raw: dict[str, Any]) -> QuantizedFolder:
    """Open a folder by the `quantization_config` of its config.json, given as `raw`.

    quantize_config.json, as GPTQ tools write it, says what config.json leaves out. Raises
    `FasteagleError` for formats without an exact import, by name, and for damaged folders.
    """
    settings = _settings(path, raw)
    method = str(settings.get("quant_method") or "unknown").lower()
    try:
        if method not in _CHECKS:
            raise refused(f"{_METHOD_NAMES.get(method, repr(method))} weights")
        declared = _CHECKS[method](settings)
    except FasteagleError as error:
        raise FasteagleError(f"{path}: {error}") from error
    plain = {key: value for key, value in raw.items() if key != "quantization_config"}
    config = model_config.from_hf(plain, str(path))
    if not any(path.glob("*.safetensors")):
        raise FasteagleError(f"{path}: quantized weights are read from *.safetensors: none here")
    files = PartsFolder(path, config)
    layout: Layout = AWQLayout()
    if method == "gptq":
        layout = GPTQLayout(settings, _gptq_zero_offset(files, settings))
    elif method == "compressed-tensors":
        layout = CompressedTensorsLayout(settings)
    return QuantizedFolder(files, layout, declared)


def _settings(path: Path, raw: dict[str, Any]) -> dict[str, Any]:
    settings = raw.get("quantization_config") or {}
    if not isinstance(settings, dict):
        raise FasteagleError(f"{path}: quantization_config in config.json is not a JSON object")
    beside = path / "quantize_config.json"
    if beside.exists():
        settings = {"quant_method": "gptq"} | read_json(beside) | settings
    if settings.get("load_in_4bit") or settings.get("load_in_8bit"):  # older files name no method
        settings = {"quant_method": "bitsandbytes"} | settings
    return settings


def _check_gptq(settings: dict[str, Any]) -> frozenset[Kind]:
    """The kinds of weight, after refusing what we cannot import; so do the other checks."""
    bits = settings.get("bits")
    if bits not in (4, 8):
        raise refused(f"{bits}-bit GPTQ weights")
    layout = "marlin" if settings.get("is_marlin_format") else _gptq_format(settings)
    if layout not in ("gptq", "gptq_v2"):
        raise refused(f"GPTQ weights in {layout} layout")
    # Keys "-:PATTERN" leave modules unquantized; others give them bits or groups of their own.
    if any(not key.startswith("-:") for key in settings.get("dynamic") or ()):
        raise refused("GPTQ weights with settings of single modules (dynamic)")
    return frozenset({_as_kind(bits, settings.get("group_size", 128))})


def _gptq_format(settings: dict[str, Any]) -> str:
    return str(settings.get("checkpoint_format") or settings.get("format") or "gptq").lower()


def _gptq_zero_offset(files: PartsFolder, settings: dict[str, Any]) -> int:
    """One answer for the folder, from the zeros of one weight: a tool writes all of them alike."""
    v2, sym = _gptq_format(settings) == "gptq_v2", bool(settings.get("sym", True))
    names = sorted(name for name in files.names() if name.endswith(".qzeros"))
    if not names:
        return 0 if v2 else 1  # the folder is incomplete, which `QuantizedFolder` reports
    qzeros = files.load(names[0])
    return formats.gptq_zero_offset(qzeros, bits=settings["bits"], v2=v2, sym=sym)


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
