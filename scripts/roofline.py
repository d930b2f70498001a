"""Speed limit of a device, from bytes and FLOPs, next to measured values if there are any.

python scripts/roofline.py --device 3090 --model llama2-7b --tau 3.6 --context 1024
python scripts/roofline.py --device 3090 --model llama2-7b --tau 3.6 --terms   # int4, term by term
python scripts/roofline.py --device this --measured record.json

A record has its own model, rows, trees, tau and context. `int4` means the widest groups that fit
the model; the default model's own file has int4-g32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from fasteagle.bench.roofline import (
    DEVICES,
    ELEMENT_BYTES,
    THIS,
    Device,
    Storage,
    device_named,
    draft_parts,
    limit,
    storage_named,
    target_parts,
)
from fasteagle.bench.row_spec import RowSpec, parse_rows
from fasteagle.cli.command import Script
from fasteagle.cli.options import comma_list
from fasteagle.config import ModelConfig
from fasteagle.errors import FasteagleError
from fasteagle.options import DEFAULT_MODEL, LM_HEAD_BITS, DraftOptions
from fasteagle.shapes import AnyShape, TreeShape, shape_of

COLUMNS = (
    *("row", "precision", "tree", "context", "plain ms", "verify ms", "draft ms", "MB", "GFLOP"),
    *("launches", "tau", "tok/s", "bound"),
)
MEASURED = ("verify ms measured", "draft ms measured", "tok/s measured")


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of a benchmark to predict; `rows` are those of its target pass."""

    row: RowSpec
    precision: str
    storage: Storage
    tree: AnyShape | None
    tau: float
    context: int
    rows: int
    measured: dict[str, Any] | None = None


@click.command(cls=Script)
@click.option(
    "--device",
    default=THIS,
    show_default=True,
    help=f"{', '.join(DEVICES)}, or {THIS}: this machine, measured now.",
)
@click.option("--model", default=DEFAULT_MODEL, help="Registry name, folder or file.")
@click.option("--precision", default="bf16,int8,int4", show_default=True, help="Comma list.")
@click.option("--rows", default="hf,plain,eagle", show_default=True, help="Comma list.")
@click.option("--context", default=1024, show_default=True, type=click.IntRange(0))
@click.option("--tau", default=2.3, show_default=True, help="Tokens per cycle of rows that draft.")
@click.option("--lm-head", default="int8", type=click.Choice(list(LM_HEAD_BITS)))
@click.option("--tree-depth", type=int)
@click.option("--tree-topk", type=int)
@click.option("--tree-nodes", type=int)
@click.option("--fp16-accumulate", is_flag=True, help="Tensor cores add up in fp16: 2 x on RTX.")
@click.option("--terms", is_flag=True, help="A captured cycle, by product and launch.")
@click.option(
    "--measured",
    "record_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A record of tokens_per_sec.py --json: predict its rows and compare.",
)
@click.pass_context
def main(context_: click.Context, device: str, terms: bool, **settings: Any) -> None:
    """Predict tokens per second; see the module's docstring for examples."""
    named = [n for n in settings if context_.get_parameter_source(n) is not SET_BY_DEFAULT]
    if terms:
        refused = {"rows", "lm_head", "record_path"} & set(named)
        if refused:
            raise FasteagleError(
                "--terms predicts an int8 LM head and eagle: drop --measured, --rows"
            )
        print_terms(device, **settings)
        return
    others = [
        f"--{n.replace('_', '-')}" for n in named if n not in ("record_path", "fp16_accumulate")
    ]
    if settings["record_path"] and others:
        raise FasteagleError(f"--measured brings its own conditions: drop {', '.join(others)}")
    print_limits(None if device == THIS else device_named(device), **settings)


SET_BY_DEFAULT = click.core.ParameterSource.DEFAULT


def print_limits(
    device: Device | None,
    model: str,
    record_path: Path | None,
    fp16_accumulate: bool,
    **settings: Any,
) -> None:
    # Here and below: --help answers without importing torch.
    from fasteagle.loading.heads.find import head_shape
    from fasteagle.tables import print_table

    record = read_record(record_path) if record_path else None
    model = record["meta"].get("model", "") if record else model
    config = model_shape(model)
    if record:
        cases = list(recorded_cases(record, config, str(record_path)))
    else:
        cases = list(planned_cases(config, device is None and on_cpu(), **settings))
    where = device or this_machine(record)
    head = head_shape(model, config)
    cells = [row_cells(case, where, config, head, fp16_accumulate) for case in cases]
    print_table((*COLUMNS, *(MEASURED if record else ())), cells)
    print(
        f"{model} on {where.name}: {where.gb_s:,.1f} GB/s, {where.tflops:,.3g} TFLOP/s in 16 bits "
        f"({where.tflops_fp16:,.3g} accumulating in fp16), {where.tflops_fp32:,.3g} in fp32. These "
        "are limits: bytes and FLOPs only. MB, GFLOP and launches are of a cycle; tree: depth, "
        "top-k, nodes"
    )


def print_terms(device: str, model: str, **settings: Any) -> None:
    from fasteagle.bench.cycle_terms import CycleModel, card_named, report
    from fasteagle.loading.heads.find import head_shape
    from fasteagle.quant.scheme import parse_scheme

    config = model_shape(model)
    scheme = parse_scheme(settings["precision"].split(",")[-1], config)
    sizes = (settings[f"tree_{part}"] for part in ("depth", "topk", "nodes"))
    tree = TreeShape(*(size or default for size, default in zip(sizes, (5, 4, 15), strict=True)))
    card = card_named(device)
    cycle = CycleModel(card, config, scheme, settings["context"], settings["fp16_accumulate"])
    print(report(cycle, head_shape(model, config), tree, settings["tau"]))


def model_shape(model: str) -> ModelConfig:
    """Return the shape of a registry model, a folder or a file; fetches nothing."""
    from fasteagle.loading.checkpoint import open_checkpoint
    from fasteagle.loading.registry import REGISTRY, preset

    path = Path(model).expanduser()
    return (
        open_checkpoint(path).config if model not in REGISTRY and path.exists() else preset(model)
    )


def on_cpu() -> bool:
    from fasteagle.device import pick_device

    return pick_device("auto").type == "cpu"


def this_machine(record: dict[str, Any] | None) -> Device:
    """Measure this machine, with the threads of the record if there is one."""
    import torch

    from fasteagle.bench.measure import this_device
    from fasteagle.device import device_name, pick_device

    devices = [pick_device("auto"), torch.device("cpu")]
    if record:
        measured_on = record["meta"].get("device")
        devices = [device for device in devices if device_name(device) == measured_on]
        if not devices:
            raise FasteagleError(
                f"the record is of {measured_on}, this machine is "
                f"{device_name(pick_device('auto'))}: say --device {', '.join(DEVICES)}"
            )
        torch.set_num_threads(record["meta"]["threads"])
    return this_device(devices[0], device_name(devices[0]))


def planned_cases(
    config: ModelConfig, on_cpu: bool, precision: str, rows: str, tau: float, **settings: Any
) -> Iterator[Case]:
    """Yield every row at every precision; raise `FasteagleError` for a tau no tree can give."""
    sizes = {
        name: settings[name] for name in ("tree_depth", "tree_topk", "tree_nodes") if settings[name]
    }
    draft, context = DraftOptions(**sizes), settings["context"]
    for name in comma_list(precision):
        is_dense = name in ELEMENT_BYTES
        storage = storage_named(name, config, LM_HEAD_BITS[settings["lm_head"]])
        for row in parse_rows(comma_list(rows), draft):
            if row.is_hf and not is_dense:
                continue
            tree = row.planned_tree(draft, on_cpu and not is_dense)
            if tree is None:
                yield Case(row, name, storage, None, 1.0, context, 1)
                continue
            if not 1 <= tau <= tree.depth + 1:
                raise FasteagleError(
                    f"tau {tau:g} is out of range for {row} at {name}: its tree of depth "
                    f"{tree.depth} gives 1 .. {tree.depth + 1} tokens a cycle: change it or "
                    "--tree-depth"
                )
            yield Case(row, name, storage, tree, tau, context, tree.rows)


def read_record(path: Path) -> dict[str, Any]:
    """Return the record that `tokens_per_sec.py --json` wrote."""
    from fasteagle.loading.tensors import read_json

    record = read_json(path)
    if not isinstance(record.get("meta"), dict) or not record.get("rows"):
        raise FasteagleError(f"{path}: not a record of tokens_per_sec.py --json")
    return record


def recorded_cases(record: dict[str, Any], config: ModelConfig, source: str) -> Iterator[Case]:
    """Yield the rows of a record under its own conditions: tree, tau, context, scheme."""
    for row in record["rows"]:
        try:
            tree = shape_of(**row["tree"]) if row["tree"] else None
            name = row["scheme"] or row["dtype"]
            storage = storage_named(name, config, row["lm_head_bits"] or 16)
            storage = dataclasses.replace(storage, element_bytes=ELEMENT_BYTES[row["dtype"]])
            rows = row["plain_rows"] or 1 if tree is None else tree.rows
            spec, context = RowSpec.parse(row["name"]), round(row["context"])
            yield Case(spec, row["precision"], storage, tree, row["tau"], context, rows, row)
        except (KeyError, TypeError) as error:
            raise FasteagleError(
                f"{source}: a row lacks {error}: it is of another version of fasteagle: measure "
                "again"
            ) from error


def row_cells(
    case: Case, device: Device, config: ModelConfig, head: Any, fp16: bool
) -> tuple[str, ...]:
    """Return the cells under `COLUMNS`, and under `MEASURED` where the row was measured."""
    storage, tree = case.storage, case.tree
    passes = [target_parts(config, storage, rows, case.context) for rows in (1, case.rows)]
    drafting = []
    if tree is not None and case.row.has_head:
        drafting = draft_parts(head, storage, tree, case.context)
    (plain, _), (verify, _) = (limit(p, device, storage.element_bytes, fp16) for p in passes)
    cycle = [*passes[1], *drafting]
    total, bound = limit(cycle, device, storage.element_bytes, fp16)
    draft, tok_s = total - verify, 1e3 * case.tau / total
    cells = (
        *(case.row.label, case.precision, str(tree) if tree else "-", f"{case.context:,}"),
        *(f"{plain:.2f}", f"{verify:.2f} (T={case.rows})", f"{draft:.2f}" if drafting else "-"),
        *(
            f"{sum(p.n_bytes for p in cycle) / 1e6:,.0f}",
            f"{sum(p.flops for p in cycle) / 1e9:,.0f}",
        ),
        *(f"{sum(p.launches for p in cycle)}", f"{case.tau:.2f}", f"{tok_s:.1f}", bound),
    )
    if case.measured is None:
        return cells
    pairs = (("verify_ms", verify), ("draft_ms", draft if drafting else None), ("tok_s", tok_s))
    note = " *simulated*" if case.measured.get("simulated") else ""
    beside = [_beside(case.measured.get(key), predicted) for key, predicted in pairs]
    return (*cells, *beside[:2], beside[2] + note)


def _beside(measured: float | None, predicted: float | None) -> str:
    """Return a measured value, and how many times the predicted one it is."""
    if measured is None or predicted is None:
        return "-"
    return f"{measured:.2f} ({measured / predicted:.2f} x)"


if __name__ == "__main__":
    main()
