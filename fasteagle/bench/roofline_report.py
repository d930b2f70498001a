"""The roofline of every row of a benchmark, planned or recorded, as a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fasteagle.bench.roofline import ELEMENT_BYTES, Case, Device, Prediction, Storage, predict
from fasteagle.bench.roofline import storage_named as named
from fasteagle.bench.row_spec import RowSpec, parse_rows
from fasteagle.config import ModelConfig
from fasteagle.errors import FasteagleError
from fasteagle.loading.checkpoint import open_checkpoint
from fasteagle.loading.find_head import head_shape
from fasteagle.loading.registry import REGISTRY, preset
from fasteagle.loading.tensors import read_json
from fasteagle.options import LM_HEAD_BITS, DraftOptions
from fasteagle.shapes import shape_of


@dataclasses.dataclass(frozen=True)
class RooflineOptions:
    """Rows to predict that were not measured. `tau` is that of every row that drafts."""

    rows: tuple[str, ...] = ("hf", "plain", "eagle")
    precisions: tuple[str, ...] = ("bf16", "int8", "int4")
    context: int = 1024  # positions in the cache
    tau: float = 2.3  # what the default head reaches on MT-bench; see BENCHMARKS.md
    lm_head: str = "int8"  # of quantized models
    draft: DraftOptions = dataclasses.field(default_factory=DraftOptions)

    def __post_init__(self) -> None:
        parse_rows(self.rows, self.draft)  # checks them
        if self.lm_head not in LM_HEAD_BITS:
            known = ", ".join(LM_HEAD_BITS)
            raise FasteagleError(f"lm-head {self.lm_head!r} is unknown: use {known}")
        if self.context < 0:
            raise FasteagleError(f"context {self.context} is out of range: use 0 or more")


def model_shape(model: str) -> ModelConfig:
    """Shape of a registry model, a folder or a file; fetches nothing."""
    if model not in REGISTRY and Path(model).expanduser().exists():
        return open_checkpoint(Path(model).expanduser()).config
    return preset(model)


def planned_cases(options: RooflineOptions, config: ModelConfig, on_cpu: bool) -> list[Case]:
    """Every row at every precision. Raises `FasteagleError` for a tau that a tree cannot give."""
    cases = []
    for precision in options.precisions:
        dense = precision in ELEMENT_BYTES
        storage = named(precision, config, LM_HEAD_BITS[options.lm_head])
        for row in parse_rows(options.rows, options.draft):
            if row.is_hf and not dense:
                continue
            tree = row.planned_tree(options.draft, on_cpu and not dense)
            tau = 1.0 if tree is None else options.tau
            limit = 1 if tree is None else tree.depth + 1
            if not 1 <= tau <= limit:
                raise FasteagleError(
                    f"tau {tau:g} is out of range for {row} at {precision}: its tree of depth "
                    f"{limit - 1} gives 1 .. {limit} tokens a cycle: change it or --tree-depth"
                )
            rows = 1 if tree is None else tree.rows
            cases.append(Case(row, precision, storage, tree, tau, options.context, rows))
    return cases


def read_record(path: Path) -> dict[str, Any]:
    """What `tokens_per_sec.py --json` wrote."""
    record = read_json(path)
    if not isinstance(record.get("meta"), dict) or not record.get("rows"):
        raise FasteagleError(f"{path}: not a record of tokens_per_sec.py --json")
    return record


def recorded_cases(record: dict[str, Any], config: ModelConfig, source: str) -> list[Case]:
    """The rows of a record under its own conditions: tree, tau, context, scheme."""
    try:
        return [_recorded_case(row, config) for row in record["rows"]]
    except (KeyError, TypeError) as error:
        raise FasteagleError(
            f"{source}: a row lacks {error}: it is of another version of fasteagle: measure again"
        ) from error


def _recorded_case(row: dict[str, Any], config: ModelConfig) -> Case:
    tree = shape_of(**row["tree"]) if row["tree"] else None
    element_bytes = ELEMENT_BYTES[row["dtype"]]
    storage = Storage.of(None, element_bytes)
    if row["scheme"] is not None:
        storage = named(row["scheme"], config, row["lm_head_bits"])
        storage = dataclasses.replace(storage, element_bytes=element_bytes)
    rows = row["plain_rows"] or 1 if tree is None else tree.rows
    context = round(row["context"])
    spec = RowSpec.parse(row["name"])
    return Case(spec, row["precision"], storage, tree, row["tau"], context, rows)


def predictions(
    cases: Sequence[Case],
    device: Device,
    model: str,
    config: ModelConfig,
    fp16_accumulate: bool = False,
) -> list[Prediction]:
    """Limits of every case, with the draft head that `model` gets."""
    return predict(cases, device, config, head_shape(model, config), fp16_accumulate)


COLUMNS = (
    "row",
    "precision",
    "tree",
    "context",
    "plain ms",
    "verify ms",
    "draft ms",
    "tau",
    "tok/s",
    "bound",
    "GB",
)
MEASURED = ("verify ms measured", "draft ms measured", "tok/s measured")


def table_rows(
    found: Sequence[Prediction], device: Device, record: dict[str, Any] | None = None
) -> list[tuple[str, ...]]:
    """Cells under `COLUMNS`, and under `MEASURED` where there is a record of the same rows."""
    cells = [_cells(prediction, device) for prediction in found]
    if record is None:
        return cells
    return [
        (*predicted, *_measured(prediction, row))
        for predicted, prediction, row in zip(cells, found, record["rows"], strict=True)
    ]


def _cells(found: Prediction, device: Device) -> tuple[str, ...]:
    case = found.case
    fits = found.memory_gb <= device.memory_gb
    return (
        case.row.label,
        case.precision,
        str(case.tree) if case.tree else "-",
        f"{case.context:,}",
        f"{found.plain.ms:.2f}",
        f"{found.verify.ms:.2f} (T={case.rows})",
        f"{found.draft.ms:.2f}" if found.draft else "-",
        f"{case.tau:.2f}",
        f"{found.tok_s:.1f}",
        found.bound,
        f"{found.memory_gb:.1f}" + ("" if fits else f" of {device.memory_gb:.0f}: does not fit"),
    )


def _measured(found: Prediction, row: dict[str, Any]) -> tuple[str, ...]:
    """Measured values, and how many times the predicted ones they are."""

    def beside(measured: float | None, predicted: float | None, note: str = "") -> str:
        if measured is None or predicted is None:
            return "-"
        return f"{measured:.2f} ({measured / predicted:.2f} x){note}"

    note = " *simulated*" if row.get("simulated") else ""
    return (
        beside(row.get("verify_ms"), found.verify.ms),
        beside(row.get("draft_ms"), found.draft.ms if found.draft else None),
        beside(row["tok_s"], found.tok_s, note),
    )


def conditions(device: Device, model: str) -> str:
    """The numbers that the prediction is based on."""
    return (
        f"{model} on {device.name}: {device.gb_s:,.1f} GB/s, {device.tflops:,.3g} TFLOP/s in 16 "
        f"bits ({device.tflops_fp16:,.3g} accumulating in fp16), {device.tflops_fp32:,.3g} in "
        "fp32. These are limits: bytes and FLOPs only. tree: depth, top-k, nodes"
    )
