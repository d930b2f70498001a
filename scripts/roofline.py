"""Speed limit of a device, from bytes and FLOPs, next to measured values if there are any.

python scripts/roofline.py --device 3090 --model llama2-7b --tau 3.6 --context 1024
python scripts/roofline.py --device 3090 --model llama2-7b --tau 3.6 --terms   # int4, term by term
python scripts/roofline.py --tau 3.6 --fp16-accumulate --table   # cards and sizes of models
python scripts/roofline.py --device 3090 --model llama2-7b --tau 3.6 --batch 1,2,4,8   # at once
python scripts/roofline.py --device this --measured record.json

A record has its own model, rows, trees, tau and context. `int4` means the widest groups that fit
the model; the default model's own file has int4-g32.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import torch

from fasteagle.bench.measure import this_device
from fasteagle.bench.predicted import predicted_speeds
from fasteagle.bench.roofline import (
    DEVICES,
    ELEMENT_BYTES,
    OUTLOOKS,
    CapturedCycle,
    Device,
    Storage,
    Workload,
    device_named,
    limit,
    storage_named,
)
from fasteagle.bench.row_spec import RowSpec, check_tau, parse_rows
from fasteagle.cli.command import Script
from fasteagle.cli.options import Numbers, comma_list
from fasteagle.config import HeadConfig, ModelConfig
from fasteagle.device import device_name, pick_device
from fasteagle.errors import FasteagleError
from fasteagle.loading.checkpoint import open_checkpoint
from fasteagle.loading.heads.find import head_shape
from fasteagle.loading.memory import Setting, largest_batch, needed_bytes
from fasteagle.loading.registry import REGISTRY, preset
from fasteagle.loading.tensors import read_json
from fasteagle.options import DEFAULT_MODEL, LM_HEAD_BITS, DraftOptions
from fasteagle.quant.scheme import BF16
from fasteagle.shapes import TreeShape, shape_of
from fasteagle.tables import print_table

THIS = "this"  # the device name that means: measure this machine
COLUMNS = (
    *("row", "precision", "tree", "context", "plain ms", "verify ms", "draft ms", "MB", "GFLOP"),
    *("launches", "tau", "tok/s", "bound"),
)
MEASURED = ("verify ms measured", "draft ms measured", "tok/s measured")
TREE_SIZES = {"tree_depth": 5, "tree_topk": 4, "tree_nodes": 15}  # of --terms, --table, --batch
TABLE_MODELS = "llama2-7b", "llama2-13b", "vicuna-33b", "llama2-70b"
TABLE_DEVICES = "3090", "4090", "h100", "h200"
BATCH = (
    *("batch", "rows of a pass", "plain tok/s", "drafted together", "x plain", "drafted in turn"),
    "x plain",
)
COUNTS = (1, 8, 16, 32, 64)  # rows of the table of products


@click.command(cls=Script)
@click.option("--device", default=THIS, show_default=True, help=f"{', '.join(DEVICES)} or {THIS}.")
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
@click.option("--table", is_flag=True, help="Captured cycles of 7B to 70B on four cards.")
@click.option(
    "--batch",
    type=Numbers(),
    help="Comma list of sequences that share a captured pass: predicted total speeds, and how many "
    "fit the card. Draft heads run over one sequence after another: the last two columns.",
)
@click.option("--measured", "record", type=click.Path(path_type=Path), help="JSON of a benchmark.")
def main(
    device: str,
    fp16_accumulate: bool,
    terms: bool,
    table: bool,
    batch: tuple[int, ...] | None,
    record: Path | None,
    **settings: Any,
) -> None:
    """Predict tokens per second; see the module's docstring for examples."""
    source = click.get_current_context().get_parameter_source
    named = [n for n in settings if source(n) is not click.core.ParameterSource.DEFAULT]
    captured = terms or table or batch is not None
    if captured and (record or {"rows", "lm_head"} & set(named)):
        raise FasteagleError(
            "--terms, --table and --batch predict an int8 LM head and eagle: drop --measured, "
            "--rows, --lm-head"
        )
    if terms + table + (batch is not None) > 1:
        raise FasteagleError("each prints tables of its own: give one of --terms, --table, --batch")
    if table:
        if device != THIS or "model" in named:
            raise FasteagleError("--table has its own models and cards: drop --model, --device")
        print_predictions(fp16_accumulate, **settings)
        return
    if record and named:
        drop = ", ".join(f"--{name.replace('_', '-')}" for name in named)
        raise FasteagleError(f"--measured brings its own conditions: drop {drop}")
    meta, rows = read_record(record) if record else ({}, [])
    where = None if device == THIS and not captured else device_named(device)
    model = meta.get("model", "") if record else settings["model"]
    path = Path(model).expanduser()
    is_file = model not in REGISTRY and path.exists()
    config = open_checkpoint(path).config if is_file else preset(model)
    head = head_shape(model, config)
    if captured:
        assert where is not None, "captured cycles are predicted for named devices"
        if batch is None:
            print_terms(where, config, head, fp16_accumulate, **settings)
            return
        if min(batch) < 1:
            raise FasteagleError(f"batch {min(batch)} is out of range: use 1 or more")
        print_batches(where, config, head, fp16_accumulate, batch, **settings)
        return
    if not record:
        on_cpu = where is None and pick_device("auto").type == "cpu"
        rows = list(planned_rows(config, on_cpu, **settings))
    where = where or this_machine(meta)
    cells = [row_cells(row, config, head, where, fp16_accumulate) for row in rows]
    print_table((*COLUMNS, *(MEASURED if record else ())), cells)
    print(
        f"{model} on {where.name}: {where.gb_s:,.1f} GB/s, {where.tflops:,.3g} TFLOP/s in 16 bits "
        f"({where.tflops_fp16:,.3g} accumulating in fp16), {where.tflops_fp32:,.3g} in fp32. These "
        "are limits: bytes and FLOPs only. MB, GFLOP and launches are of a cycle; tree: depth, "
        "top-k, nodes"
    )


def this_machine(meta: dict[str, Any]) -> Device:
    """Measure this machine, with the threads of the record if there is one."""
    devices = [pick_device("auto"), torch.device("cpu")]
    if meta:
        devices = [device for device in devices if device_name(device) == meta.get("device")]
        if not devices:
            raise FasteagleError(
                f"the record is of {meta.get('device')}, this machine is "
                f"{device_name(pick_device('auto'))}: say --device {', '.join(DEVICES)}"
            )
        torch.set_num_threads(meta["threads"])
    return this_device(devices[0], device_name(devices[0]))


def planned_rows(
    config: ModelConfig, on_cpu: bool, precision: str, rows: str, tau: float, **settings: Any
) -> Iterator[dict[str, Any]]:
    """Yield every row at every precision as a record has them, without what is measured.

    Raises `FasteagleError` for a tau no tree can give.
    """
    draft = DraftOptions(**{name: settings[name] for name in TREE_SIZES})
    for name in comma_list(precision):
        head_bits = LM_HEAD_BITS[settings["lm_head"]]
        is_dense = storage_named(name, config, head_bits).scheme is None
        scheme, dtype = (None, name) if is_dense else (name, "bf16")
        for row in parse_rows(comma_list(rows), draft):
            if row.is_hf and not is_dense:
                continue
            tree = row.planned_tree(draft, on_cpu and not is_dense)
            if tree is not None:
                check_tau(tau, row, tree)
            yield {
                **{"name": row.label, "precision": name, "scheme": scheme, "dtype": dtype},
                **{"lm_head_bits": head_bits, "context": settings["context"]},
                **{"tree": tree and dataclasses.asdict(tree), "tau": tau if tree else 1.0},
            }


def read_record(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return conditions and rows of the record that `tokens_per_sec.py --json` wrote."""
    record = read_json(path)
    if not isinstance(record.get("meta"), dict) or not record.get("rows"):
        raise FasteagleError(f"{path}: not a record of tokens_per_sec.py --json")
    return record["meta"], record["rows"]


def row_cells(
    row: dict[str, Any], config: ModelConfig, head: HeadConfig, device: Device, fp16: bool
) -> tuple[str, ...]:
    """Return the cells under `COLUMNS`, and under `MEASURED` where the row was measured."""
    try:
        tree = shape_of(**row["tree"]) if row["tree"] else None
        precision, head_bits = row["scheme"] or row["dtype"], row["lm_head_bits"] or 16
        storage = storage_named(precision, config, head_bits)
        storage = dataclasses.replace(storage, element_bytes=ELEMENT_BYTES[row["dtype"]])
        work, tau = Workload(config, storage, round(row["context"])), row["tau"]
        n_rows = 1 if tree is None else tree.rows
        spec = RowSpec.parse(row["name"])
    except (KeyError, TypeError) as error:
        raise FasteagleError(
            f"a row of the record lacks {error}: it is of another version of fasteagle: measure "
            "again"
        ) from error
    drafting = work.drafting(head, tree) if tree is not None and spec.has_head else []
    cycle = [*work.verifying(n_rows), *drafting]
    (plain, _), (verify, _), (total, bound) = (
        limit(parts, device, storage.element_bytes, fp16)
        for parts in (work.verifying(1), work.verifying(n_rows), cycle)
    )
    draft, tok_s = total - verify, 1e3 * tau / total
    cells = (
        *(spec.label, row["precision"], str(tree or "-"), f"{work.context:,}"),
        *(f"{plain:.2f}", f"{verify:.2f} (T={n_rows})", f"{draft:.2f}" if drafting else "-"),
        f"{sum(part.n_bytes for part in cycle) / 1e6:,.0f}",
        f"{sum(part.flops for part in cycle) / 1e9:,.0f}",
        *(f"{sum(p.launches for p in cycle)}", f"{tau:.2f}", f"{tok_s:.1f}", bound),
    )
    if "tok_s" not in row:
        return cells
    predicted = {"verify_ms": verify, "draft_ms": draft if drafting else None, "tok_s": tok_s}
    beside = [
        f"{row[key]:.2f} ({row[key] / value:.2f} x)" if value and key in row else "-"
        for key, value in predicted.items()
    ]
    note = " *simulated*" if row.get("simulated") else ""
    return (*cells, *beside[:2], beside[2] + note)


def quantized(config: ModelConfig, precision: str) -> Storage:
    """Return the storage that captured cycles are predicted for: the last of a comma list."""
    storage = storage_named(comma_list(precision)[-1], config)
    if storage.scheme is None:
        raise FasteagleError("quantized weights are predicted: give int8, int4 or a scheme")
    return storage


def predicted_tree(settings: dict[str, Any]) -> TreeShape:
    """Return the tree of captured cycles; raise `FasteagleError` for a tau it cannot give."""
    sizes = {name: settings[name] for name in TREE_SIZES if settings[name] is not None}
    tree = TreeShape(*(TREE_SIZES | sizes).values())
    check_tau(settings["tau"], RowSpec.parse("eagle"), tree)
    return tree


def print_terms(
    device: Device, config: ModelConfig, head: HeadConfig, fp16: bool, **settings: Any
) -> None:
    """Print products by rows and terms of a greedy cycle, in Markdown, and the predicted speed."""
    assert device.card is not None, "every named device has one"
    work = Workload(config, quantized(config, settings["precision"]), settings["context"])
    tree, tau = predicted_tree(settings), settings["tau"]
    cycles = [CapturedCycle(device.card, work, fp16, outlook) for outlook in OUTLOOKS]
    _, mid, _ = cycles
    products = [
        (
            *(f"{same[0].N} x {same[0].K}", f"{same[0].launches}"),
            *(f"{mid.product_us(part):.1f} us, {mid.share(part):.0%}" for part in same),
        )
        for same in zip(*([p for p in work.verifying(T) if p.N] for T in COUNTS), strict=True)
    ]
    print_table(("N x K", "launches", *(f"T = {T}" for T in COUNTS)), products, md=True)
    parts = [*work.verifying(tree.rows), *work.drafting(head, tree), work.finishing]
    terms = {name: [p for p in parts if p.name == name] for name in (p.name for p in parts)}
    lines = [
        (
            *(name, f"{sum(part.launches for part in same)}"),
            f"{sum(part.n_bytes for part in same) / 1e6:,.0f}",
            *(f"{cycle.ms(same):.2f}" for cycle in cycles),
        )
        for name, same in {**terms, f"cycle, tree {tree}": parts}.items()
    ]
    print()
    print_table(("term", "launches", "MB", "ms, low", "mid", "high"), lines, md=True)
    slow, middle, fast = (predicted_speeds(cycle, head, tree, tau) for cycle in cycles)
    print(
        f"\npredicted: {middle.drafted:.0f} tok/s at tau {tau:g} ({slow.drafted:.0f} to "
        f"{fast.drafted:.0f}), plain {middle.plain:.0f} tok/s ({slow.plain:.0f} to "
        f"{fast.plain:.0f}), {work.context:,} positions in the cache"
    )


def spread(low: float, mid: float, high: float) -> str:
    return f"{mid:.0f} ({low:.0f} to {high:.0f})"


def print_batches(
    device: Device,
    config: ModelConfig,
    head: HeadConfig,
    fp16: bool,
    sizes: Sequence[int],
    **settings: Any,
) -> None:
    """Print the predicted total speeds of several sequences at each precision, in Markdown.

    Drafted together, the draft head's passes have the rows of all; in turn, it runs over each.
    """
    assert device.card is not None, "every named device has one"
    tree, tau, context = predicted_tree(settings), settings["tau"], settings["context"]
    storages = {name: storage_named(name, config) for name in comma_list(settings["precision"])}
    if any(storage.element_bytes != 2 for storage in storages.values()):
        raise FasteagleError("batches are predicted in 16 bits and below: drop fp32")
    for precision, storage in storages.items():
        setting = Setting(storage.scheme or BF16, "auto", context)
        plain, drafting = (
            largest_batch(config, setting, device.gib * 2**30, of) for of in (None, head)
        )
        lines: list[tuple[str, ...]] = []
        for size in sizes:
            work = Workload(config, storage, context, size)
            low, mid, high = (
                predicted_speeds(CapturedCycle(device.card, work, fp16, outlook), head, tree, tau)
                for outlook in OUTLOOKS
            )
            cells = [
                spread(low.plain, mid.plain, high.plain) if size <= plain else "does not fit",
                *(spread(low.drafted, mid.drafted, high.drafted), f"{mid.drafted / mid.plain:.2f}"),
                *(spread(low.in_turn, mid.in_turn, high.in_turn), f"{mid.in_turn / mid.plain:.2f}"),
            ]
            if size > drafting:
                cells[1:] = ["does not fit", "-"] * 2
            lines.append((f"{size}", f"{size * tree.rows}", *cells))
        print_table(BATCH, lines, md=True)
        print(
            f"\npredicted, total tok/s: {precision} on {device.name}, tree {tree} and tau {tau:g} "
            f"for each; {device.gib} GiB hold {plain} sequences of {context:,} positions, "
            f"{drafting} with a draft head\n"
        )


def print_predictions(fp16: bool, **settings: Any) -> None:
    """Print the predicted speeds of models on cards that have the memory, in Markdown."""
    tree, tau = predicted_tree(settings), settings["tau"]
    lines: list[tuple[str, ...]] = []
    for model, name in itertools.product(TABLE_MODELS, TABLE_DEVICES):
        config, device = preset(model), DEVICES[name]
        storage, head = quantized(config, settings["precision"]), head_shape(model, config)
        assert storage.scheme is not None and device.card is not None, "see quantized"
        n_bytes = needed_bytes(config, Setting(storage.scheme, "auto", settings["context"]), head)
        if n_bytes > device.gib * 2**30:
            lines.append((model, device.name, *["does not fit"] + ["-"] * 3))
            continue
        work = Workload(config, storage, settings["context"])
        low, mid, high = (
            predicted_speeds(CapturedCycle(device.card, work, fp16, outlook), head, tree, tau)
            for outlook in OUTLOOKS
        )
        lines.append(
            (
                *(model, device.name),
                spread(low.plain, mid.plain, high.plain),
                spread(low.drafted, mid.drafted, high.drafted),
                *(f"{mid.cycle_ms:.2f}", f"{mid.ratio:.2f}"),
            )
        )
    ratio = f"pass of {tree.rows} rows / of 1"
    print_table(
        ("model", "card", "plain tok/s", f"tok/s at tau {tau:g}", "ms a cycle", ratio),
        lines,
        md=True,
    )


if __name__ == "__main__":
    main()
