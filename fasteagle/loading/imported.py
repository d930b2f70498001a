"""Folders of weights that another tool has quantized: GPTQ, AWQ and compressed-tensors.

Tensors are told apart here by config.json and their names; `layouts` and `quant.formats` know what
they mean. Formats without an exact import are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from fasteagle.config_hf import from_hf
from fasteagle.errors import FasteagleError, shortened, within
from fasteagle.loading.layouts import (
    AWQLayout,
    CompressedTensorsLayout,
    GPTQLayout,
    Kind,
    Layout,
    declared_kinds,
)
from fasteagle.loading.names import expected_shapes
from fasteagle.loading.tensors import WeightsFolder, read_json
from fasteagle.quant import formats
from fasteagle.quant.formats import Geometry, Imported, refused
from fasteagle.quant.packed import PackedWeight
from fasteagle.quant.scheme import Scheme

ROWS_PER_WORD = 8  # 4-bit rows that may share an int32


class QuantizedFolder(WeightsFolder):
    """Folder of packed linears, listed under the plain names of their weights.

    `scheme` says what its block linears are; `head_bits` is 16 unless the LM head is packed too.
    Raises `FasteagleError` for formats without an exact import, by name, for parts that are missing
    or do not fit each other, and where block linears differ in bits or group size, because fused
    linears need them equal.
    """

    def __init__(self, path: Path, raw: dict[str, Any]) -> None:
        """Open a folder by the `quantization_config` of its config.json, given as `raw`."""
        settings = _settings(path, raw)
        method = str(settings.get("quant_method") or "unknown").lower()
        with within(str(path)):
            self._declared = declared_kinds(method, settings)
        plain = {key: value for key, value in raw.items() if key != "quantization_config"}
        super().__init__(path, from_hf(plain, str(path / "config.json")))
        self._layout: Layout = AWQLayout()
        if method == "gptq":
            zeros = (self._tensors[n] for n in sorted(self._tensors) if n.endswith(".qzeros"))
            self._layout = GPTQLayout(settings, next(zeros, None))
        elif method == "compressed-tensors":
            self._layout = CompressedTensorsLayout(settings)
        self._parts: dict[str, dict[str, Tensor]] = {}
        for name in list(self._tensors):
            prefix, _, part = name.rpartition(".")
            if part in self._layout.parts:
                tensor = self._tensors.pop(name)
                self._parts.setdefault(f"{prefix}.weight", {})[part] = tensor
        self._check_parts()
        self._geometry = {name: self._read_geometry(name) for name in self._parts}
        self._drop_zero_biases()
        self.scheme = self._find_scheme()

    def _check_parts(self) -> None:
        needed = self._layout.required
        problems = [
            f"{name} is there unpacked, too" for name in self._parts.keys() & self._tensors.keys()
        ]
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
        with within(f"{self.path}: {name}"):
            geometry = self._layout.geometry(self._parts[name])
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

    def _drop_zero_biases(self) -> None:
        """Drop biases that are all zeros, which AutoGPTQ adds to linears without a bias."""
        extra = {_part(name, "bias") for name in self._parts} & self._tensors.keys()
        for name in extra - expected_shapes(self.config).keys():
            if not self._tensors[name].any():
                del self._tensors[name]

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
        return self._tensors.keys() | self._parts.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._parts:
            return super().shape(name)
        return self._geometry[name].n_rows, self._geometry[name].n_columns

    def load(self, name: str) -> Tensor:
        """Return a packed weight in fp32, columns in the model's order; others as stored."""
        return self._unpack(name).dequantize() if name in self._parts else super().load(name)

    def start(self, name: str, n: int) -> Tensor:
        """Return the first `n` values or more."""
        if name not in self._parts or self.shape(name)[0] % ROWS_PER_WORD:
            return super().start(name, n)  # whole, where the last word holds padding
        words = -(-self.rows_for(name, n) // ROWS_PER_WORD)
        return self._unpack(name, words * ROWS_PER_WORD).dequantize()

    def packed(self, name: str) -> PackedWeight | None:
        """Return the weight as stored, columns in the order of `columns`; None if plain."""
        return self._unpack(name).weight if name in self._parts else None

    def columns(self, name: str) -> Tensor | None:
        parts = self._parts.get(name, {})
        g_idx = parts.get("g_idx", parts.get("weight_g_idx"))
        if g_idx is None:
            return None
        geometry = self._geometry[name]
        with within(f"{self.path}: {name}"):
            return formats.act_order(g_idx, geometry.n_columns, geometry.group_size)

    def _unpack(self, name: str, n_rows: int | None = None) -> Imported:
        """Return a packed weight, or its first rows (a multiple of `ROWS_PER_WORD`)."""
        axis, parts = self._layout.row_axis, dict(self._parts[name])
        for part, tensor in parts.items():
            if n_rows is not None and tensor.dim() == 2:  # fewer where rows share words
                length = n_rows * tensor.shape[axis] // self.shape(name)[0]
                parts[part] = tensor.narrow(axis, 0, length)
        with within(f"{self.path}: {name}"):
            return self._layout.unpack(parts)


def _listed(kinds: Iterable[Kind]) -> str:
    return " and ".join(f"{bits}-bit g{size or 'row'}" for bits, size in sorted(kinds))


def _part(weight: str, part: str) -> str:
    """Return the name of a part of a weight: `x.weight` becomes `x.PART`."""
    return f"{weight.removesuffix('weight')}{part}"


def _settings(path: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """Return what a tool says; quantize_config.json says what config.json leaves out."""
    settings = raw.get("quantization_config") or {}
    if not isinstance(settings, dict):
        raise FasteagleError(f"{path}: quantization_config in config.json is not a JSON object")
    beside = path / "quantize_config.json"
    if beside.exists():
        settings = {"quant_method": "gptq"} | read_json(beside) | settings
    if settings.get("load_in_4bit") or settings.get("load_in_8bit"):  # older files name no method
        settings = {"quant_method": "bitsandbytes"} | settings
    return settings
