"""The speed limit of a device, from bytes and FLOPs, next to measured values if there are any.

python scripts/roofline.py --device 3090 --model llama2-7b --tau 3.6 --context 1024
python scripts/roofline.py --device 3090 --model llama2-7b --tau 3.6 --terms   # int4, term by term
python scripts/roofline.py --device this --measured record.json

A record has its own model, rows, trees, tau and context. `int4` means the widest groups that fit
the model; the default model's own file has int4-g32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from fasteagle.bench.roofline import DEVICES, THIS, Device, device_named
from fasteagle.cli.command import Script
from fasteagle.cli.options import comma_list
from fasteagle.errors import FasteagleError
from fasteagle.options import DEFAULT_MODEL, DraftOptions


@click.command(cls=Script)
@click.option(
    "--device",
    default=THIS,
    show_default=True,
    help=f"{', '.join(DEVICES)}, or {THIS}: this machine, measured now.",
)
@click.option("--model", help=f"Registry name, folder or file.  [default: {DEFAULT_MODEL}]")
@click.option("--precision", help="Comma list.  [default: bf16,int8,int4]")
@click.option("--rows", help="Comma list.  [default: hf,plain,eagle]")
@click.option("--context", type=int, help="Positions in the cache.  [default: 1024]")
@click.option("--tau", type=float, help="Tokens per cycle of rows that draft.  [default: 2.3]")
@click.option("--lm-head", help="Of quantized models: int8, int4 or keep.  [default: int8]")
@click.option("--tree-depth", type=int)
@click.option("--tree-topk", type=int)
@click.option("--tree-nodes", type=int)
@click.option("--fp16-accumulate", is_flag=True, help="Tensor cores add up in fp16: 2 x on RTX.")
@click.option("--terms", is_flag=True, help="A captured cycle, by product and node: a prediction.")
@click.option(
    "--measured",
    "record_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A record of tokens_per_sec.py --json: predict its rows and compare.",
)
def main(
    device: str, fp16_accumulate: bool, terms: bool, record_path: Path | None, **given: Any
) -> None:
    """Predict tokens per second; see the module's docstring for examples."""
    # Here and below: --help answers without importing torch.
    from fasteagle.bench import roofline_report as report

    given = {name: value for name, value in given.items() if value is not None}
    if record_path and given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise FasteagleError(f"--measured brings its own conditions: drop {names}")
    if terms:
        _print_terms(device, fp16_accumulate, record_path, given)
        return
    where = None if device == THIS else device_named(device)
    record = report.read_record(record_path) if record_path else None
    model = record["meta"].get("model", "") if record else given.pop("model", DEFAULT_MODEL)
    config = report.model_shape(model)
    if record:
        cases = report.recorded_cases(record, config, str(record_path))
    else:
        cases = report.planned_cases(_options(given), config, where is None and _on_cpu())
    where = where or _this(record)
    found = report.predictions(cases, where, model, config, fp16_accumulate)
    columns = (*report.COLUMNS, *(report.MEASURED if record else ()))
    _print(columns, report.table_rows(found, where, record), report.conditions(where, model))


def _print_terms(device: str, fp16: bool, record_path: Path | None, given: dict[str, Any]) -> None:
    from fasteagle.bench import cycle_terms
    from fasteagle.bench import roofline_report as report
    from fasteagle.loading.find_head import head_shape
    from fasteagle.quant.scheme import parse_scheme
    from fasteagle.shapes import TreeShape

    if record_path or "rows" in given or "lm_head" in given:
        raise FasteagleError("--terms predicts an int8 LM head and eagle: drop --measured, --rows")
    name = given.get("model", DEFAULT_MODEL)
    config = report.model_shape(name)
    scheme = parse_scheme(given.get("precision", "int4"), config)
    sizes = (given.get(f"tree_{part}") for part in ("depth", "topk", "nodes"))
    tree = TreeShape(*(size or default for size, default in zip(sizes, (5, 4, 15), strict=True)))
    card, context = cycle_terms.card_named(device), given.get("context", 1024)
    model = cycle_terms.CycleModel(card, config, scheme, context, fp16)
    head, tau = head_shape(name, config), given.get("tau", 2.3)
    print("\n".join(cycle_terms.lines(model, head, tree, tau)))


def _options(given: dict[str, Any]) -> Any:
    from fasteagle.bench.roofline_report import RooflineOptions

    sizes = {name: given.pop(name) for name in list(given) if name.startswith("tree_")}
    if "precision" in given:
        given["precisions"] = comma_list(given.pop("precision"))
    if "rows" in given:
        given["rows"] = comma_list(given["rows"])
    return RooflineOptions(draft=DraftOptions(**sizes), **given)


def _on_cpu() -> bool:
    from fasteagle.device import pick_device

    return pick_device("auto").type == "cpu"


def _this(record: dict[str, Any] | None) -> Device:
    """This machine, measured with the threads of the record, if there is one."""
    import torch

    from fasteagle.bench.measure import this_device
    from fasteagle.device import device_name, pick_device

    device = pick_device("auto")
    name = device_name(device)
    if record:
        measured_on = record["meta"].get("device")
        if measured_on != name:
            device = torch.device("cpu")
            name = device_name(device)
        if measured_on != name:
            raise FasteagleError(
                f"the record is of {measured_on}, this machine is {name}: say --device "
                f"{', '.join(DEVICES)}"
            )
        torch.set_num_threads(record["meta"]["threads"])
    return this_device(device, name)


def _print(columns: tuple[str, ...], rows: list[tuple[str, ...]], text: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns, box=None, pad_edge=False)
    for cells in rows:
        table.add_row(*cells)
    Console(width=240).print(table)  # wider than any row: wrapped rows are hard to read
    print(text)


if __name__ == "__main__":
    main()
