"""Folders of weights that another tool has quantized: GPTQ, AWQ and compressed-tensors.

Tensors are told apart here by config.json and their names; `layouts` and `quant.formats` know what
they mean. Formats without an exact import are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from fasteagle.config_fields import Fields
from fasteagle.config_hf import from_hf
from fasteagle.errors import FasteagleError, shortened, within
from fasteagle.loading.layouts import (
    AWQLayout,
    CompressedTensorsLayout,
    GPTQLayout,
    Kind,
    Layout,
    declared_kinds,
    gptq_format,
)
from fasteagle.loading.names import expected_shapes
from fasteagle.loading.tensors import Checkpoint, WeightsFolder, read_json, rows_for
from fasteagle.quant import formats
from fasteagle.quant.formats import Geometry, Imported, refused
from fasteagle.quant.packed import PackedWeight
from fasteagle.quant.scheme import Scheme

ROWS_PER_WORD = 8  # 4-bit rows that may share an int32


class QuantizedFolder(Checkpoint):
    """Folder of packed linears, listed under the plain names of their weights.

    `scheme` says what its block linears are; `head_bits` is 16 unless the LM head is packed too.
    Raises `FasteagleError` for parts that are missing or do not fit each other, and where block
    linears differ in bits or group size, because fused linears need them equal.
    """

    def __init__(self, files: WeightsFolder, layout: Layout, declared: frozenset[Kind]) -> None:
        """Check `files` by `layout`; `declared` are the kinds of weight in config.json."""
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
        with within(f"{self.path}: {name}"):
            geometry = self._layout.geometry(shapes, lambda p: self._files.load(_part(name, p)))
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
        """Return biases that are all zeros, which AutoGPTQ adds to linears without a bias."""
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

    def names(self) -> set[str]:
        return self._plain | self._parts.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._parts:
            return self._files.shape(name)
        return self._geometry[name].n_rows, self._geometry[name].n_columns

    def load(self, name: str) -> Tensor:
        """Return a packed weight in fp32, columns in the model's order; others as stored."""
        if name not in self._parts:
            return self._files.load(name)
        return self._unpack(name).dequantize()

    def start(self, name: str, n: int) -> Tensor:
        """Return the first `n` values or more."""
        if name not in self._parts:
            return self._files.start(name, n)
        if self.shape(name)[0] % ROWS_PER_WORD:  # the last word holds padding
            return self.load(name)
        words = -(-rows_for(self.shape(name), n) // ROWS_PER_WORD)
        return self._unpack(name, words * ROWS_PER_WORD).dequantize()

    def packed(self, name: str) -> PackedWeight | None:
        """Return the weight as stored, columns in the order of `columns`; None if plain."""
        return self._unpack(name).weight if name in self._parts else None

    def columns(self, name: str) -> Tensor | None:
        for part in self._parts.get(name, set()) & {"g_idx", "weight_g_idx"}:
            geometry = self._geometry[name]
            g_idx = self._files.load(_part(name, part))
            with within(f"{self.path}: {name}"):
                return formats.act_order(g_idx, geometry.n_columns, geometry.group_size)
        return None

    def _unpack(self, name: str, n_rows: int | None = None) -> Imported:
        """Return a packed weight, or its first rows (a multiple of `ROWS_PER_WORD`)."""
        axis, parts = self._layout.row_axis, {}
        for part in self._parts[name]:
            tensor = self._files.load(_part(name, part))
            if n_rows is not None and tensor.dim() == 2:  # fewer where rows share words
                length = n_rows * tensor.shape[axis] // self.shape(name)[0]
                tensor = tensor.narrow(axis, 0, length)
            parts[part] = tensor
        with within(f"{self.path}: {name}"):
            return self._layout.unpack(parts)


def _listed(kinds: Iterable[Kind]) -> str:
    return " and ".join(f"{bits}-bit g{size or 'row'}" for bits, size in sorted(kinds))


def _part(weight: str, part: str) -> str:
    """Return the name of a part of a weight: `x.weight` becomes `x.PART`."""
    return f"{weight.removesuffix('weight')}{part}"


def open_quantized(path: Path, raw: dict[str, Any]) -> QuantizedFolder:
    """Open a folder by the `quantization_config` of its config.json, given as `raw`.

    quantize_config.json, as GPTQ tools write it, says what config.json leaves out. Raises
    `FasteagleError` for formats without an exact import, by name, and for damaged folders.
    """
    settings = _settings(path, raw)
    method = str(settings.get("quant_method") or "unknown").lower()
    with within(str(path)):
        declared = declared_kinds(method, settings)
    plain = {key: value for key, value in raw.items() if key != "quantization_config"}
    config = from_hf(plain, str(path / "config.json"))
    files = WeightsFolder(path, config)
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


def _gptq_zero_offset(files: WeightsFolder, settings: dict[str, Any]) -> int:
    """Return the zero offset of a folder by the zeros of one weight: a tool writes all alike."""
    v2 = gptq_format(Fields(settings, "quantization_config")) == "gptq_v2"
    sym = settings.get("sym", True)
    names = sorted(name for name in files.names() if name.endswith(".qzeros"))
    shape = files.shape(names[0]) if names else ()
    if len(shape) != 2 or 0 in shape:
        return 0 if v2 else 1  # the folder is damaged, which `QuantizedFolder` reports
    qzeros = files.load(names[0])
    return formats.gptq_zero_offset(qzeros, bits=settings["bits"], v2=v2, sym=sym)
