"""Predicted speed of models on cards: captured cycles, their terms, and limits.

    python scripts/roofline.py --model llama2-7b,llama2-13b --device 3090,h100 --tau 3.6
    python scripts/roofline.py --model llama2-7b --precision fp16,int4 --tau 3.6 --batch 1,2,4,8
    python scripts/roofline.py --model llama2-7b --tau 3.6 --terms   # a cycle, term by term
    python scripts/roofline.py --model llama2-7b --tau 3.6 --rows plain,eagle   # limits alone

`int4` means the widest groups that fit the model; the default model's own file has int4-g32.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path

import click

from fasteagle.bench.roofline import (
    DEVICES,
    OUTLOOKS,
    CapturedCycle,
    Device,
    Workload,
    device_named,
    limit,
    storage_named,
)
from fasteagle.bench.row_spec import RowSpec, check_tau, parse_rows
from fasteagle.cli.command import Names, Numbers, Script
from fasteagle.config import HeadConfig, ModelConfig
from fasteagle.errors import FasteagleError
from fasteagle.loading.checkpoint import open_checkpoint
from fasteagle.loading.heads.find import head_shape
from fasteagle.loading.memory import Setting, needed_bytes
from fasteagle.loading.registry import REGISTRY, preset
from fasteagle.options import DEFAULT_MODEL, DraftOptions
from fasteagle.quant.scheme import BF16
from fasteagle.shapes import AnyShape, TreeShape
from fasteagle.tables import print_table

COLUMNS = "model", "card", "precision", "batch"
SPEEDS = "plain tok/s", "tok/s", "x plain", "ms a cycle"
LIMITS = (
    *("row", "tree", "context", "plain ms", "verify ms", "draft ms", "MB", "GFLOP", "launches"),
    *("tau", "tok/s", "bound"),
)
COUNTS = (1, 8, 16, 32, 64)  # rows of the table of products


@click.command(cls=Script, help=__doc__)
@click.option(
    "--model",
    default=DEFAULT_MODEL,
    type=Names(),
    help="Comma list: registry name, folder or file.",
)
@click.option(
    "--device", default="3090", show_default=True, type=Names(), help=f"GPU: {', '.join(DEVICES)}."
)
@click.option(
    "--precision",
    default="int4",
    show_default=True,
    type=Names(),
    help="Comma list: int4, int8 ...",
)
@click.option("--batch", default="1", type=Numbers(least=1), help="Comma list: texts per pass.")
@click.option("--context", default=1024, show_default=True, type=click.IntRange(0))
@click.option("--tau", default=2.3, show_default=True, help="Tokens per cycle of rows that draft.")
@click.option("--tree-depth", default=5, show_default=True)
@click.option("--tree-topk", default=4, show_default=True)
@click.option("--tree-nodes", default=15, show_default=True)
@click.option("--fp16-accumulate", is_flag=True, help="Predict for fp16 accumulation.")
@click.option("--terms", is_flag=True, help="Print the time of each part of a cycle.")
@click.option("--rows", type=Names(), help="Comma list: print bounds of these rows only.")
def main(
    model: tuple[str, ...],
    device: tuple[str, ...],
    precision: tuple[str, ...],
    batch: tuple[int, ...],
    context: int,
    tau: float,
    tree_depth: int,
    tree_topk: int,
    tree_nodes: int,
    fp16_accumulate: bool,
    terms: bool,
    rows: tuple[str, ...] | None,
) -> None:
    if terms and rows:
        raise FasteagleError("each prints tables of its own: give one of --terms, --rows")
    cases = [Case.of(*of, context) for of in itertools.product(model, device, precision, batch)]
    if rows:
        draft = DraftOptions(tree_depth=tree_depth, tree_topk=tree_topk, tree_nodes=tree_nodes)
        print_limits(cases, parse_rows(rows, draft), draft, tau, fp16_accumulate)
        return
    tree = TreeShape(tree_depth, tree_topk, tree_nodes)
    check_tau(tau, RowSpec.parse("eagle"), tree)
    for case in cases:
        case.require_captured(by_terms=terms)
    if terms:
        for case in cases:
            print_terms(case, tree, tau, fp16_accumulate)
        return
    lines = [(*case.cells, *speeds(case, tree, tau, fp16_accumulate)) for case in cases]
    print_table((*COLUMNS, *SPEEDS, f"pass of {tree.rows} rows / of 1"), lines, md=True)
    print(f"\npredicted: total tok/s, tree {tree} at tau {tau:g}, {context:,} positions for each")


@dataclasses.dataclass(frozen=True)
class Case:
    """Model on a card at one precision, whose speed is predicted."""

    model: str
    device: Device
    precision: str
    work: Workload
    head: HeadConfig

    @classmethod
    def of(cls, model: str, device: str, precision: str, batch: int, context: int) -> Case:
        config = config_of(model)
        work = Workload(config, storage_named(precision, config), context, batch)
        return cls(model, device_named(device), precision, work, head_shape(model, config))

    @property
    def cells(self) -> tuple[str, ...]:
        return self.model, self.device.name, self.precision, f"{self.work.sequences}"

    def fits(self, head: HeadConfig | None) -> bool:
        """Return whether the card has the memory, with a draft head or without."""
        work = self.work
        setting = Setting(work.storage.scheme or BF16, "auto", work.context)
        return needed_bytes(work.config, setting, head, work.sequences) <= self.device.gib * 2**30

    def cycles(self, fp16: bool) -> list[CapturedCycle]:
        """Return its captured cycle by `OUTLOOKS`."""
        return [CapturedCycle(self.device.card, self.work, fp16, outlook) for outlook in OUTLOOKS]

    def require_captured(self, by_terms: bool) -> None:
        """Raise `FasteagleError` for a precision whose captured cycles are not predicted."""
        storage = self.work.storage
        if storage.element_bytes > 2:
            raise FasteagleError(
                f"{self.precision}: cycles are predicted in 16 bits and below: use bf16"
            )
        if storage.scheme is None and by_terms:
            raise FasteagleError(
                "terms are those of quantized weights: give int8, int4 or a scheme"
            )
        if storage.scheme is not None and storage.scheme.head_bits != 8:
            raise FasteagleError(
                f"{self.precision}: cycles are predicted with an int8 LM head: leave -lm out"
            )


def config_of(model: str) -> ModelConfig:
    """Return the shape of a model in the registry or of a checkpoint."""
    path = Path(model).expanduser()
    if model not in REGISTRY and path.exists():
        return open_checkpoint(path).config
    return preset(model)


def speeds(case: Case, tree: TreeShape, tau: float, fp16: bool) -> tuple[str, ...]:
    """Return the cells under `SPEEDS` and the ratio of passes, mid (low to high)."""
    low, mid, high = (cycle.speeds(case.head, tree, tau) for cycle in case.cycles(fp16))
    plain = f"{mid.plain:.0f} ({low.plain:.0f} to {high.plain:.0f})"
    if not case.fits(None):
        plain = "does not fit"
    if not case.fits(case.head):
        return plain, "does not fit", "-", "-", "-"
    drafted = f"{mid.drafted:.0f} ({low.drafted:.0f} to {high.drafted:.0f})"
    times, ms = f"{mid.drafted / mid.plain:.2f}", f"{mid.cycle_ms:.2f}"
    return plain, drafted, times, ms, f"{mid.ratio:.2f}"


def print_terms(case: Case, tree: TreeShape, tau: float, fp16: bool) -> None:
    """Print products by rows and terms of a greedy cycle, in Markdown, and the predicted speed."""
    work, cycles = case.work, case.cycles(fp16)
    _, mid, _ = cycles
    products = [
        (
            *(f"{same[0].N} x {same[0].K}", f"{same[0].launches}"),
            *(f"{mid.product_us(part):.1f} us, {mid.share(part):.0%}" for part in same),
        )
        for same in zip(*([p for p in work.verifying(T) if p.N] for T in COUNTS), strict=True)
    ]
    print_table(("N x K", "launches", *(f"T = {T}" for T in COUNTS)), products, md=True)
    parts = [*work.verifying(tree.rows), *work.drafting(case.head, tree), work.finishing]
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
    plain, drafted, *_ = speeds(case, tree, tau, fp16)
    print(
        f"\n{', '.join(case.cells[:3])}, predicted: {drafted} tok/s at tau {tau:g}, plain {plain} "
        f"tok/s, {work.context:,} positions in the cache\n"
    )


def print_limits(
    cases: Sequence[Case], rows: Sequence[RowSpec], draft: DraftOptions, tau: float, fp16: bool
) -> None:
    """Print limits of rows by bytes and FLOPs; transformers have no row of quantized weights."""
    lines = [
        (*case.cells, *limits(case, row, row.planned_tree(draft, False), tau, fp16))
        for case, row in itertools.product(cases, rows)
        if not (row.is_hf and case.work.storage.scheme)
    ]
    print_table((*COLUMNS, *LIMITS), lines)
    for device in dict.fromkeys(case.device for case in cases):
        print(
            f"{device.name}: {device.card.gb_s:,.1f} GB/s, {device.tflops:,.3g} TFLOP/s in 16 bits "
            f"({device.tflops_fp16:,.3g} accumulating in fp16), {device.tflops_fp32:,.3g} in fp32"
        )
    print(
        "These are limits: bytes and FLOPs only. MB, GFLOP and launches are of a cycle; tree: "
        "depth, top-k, nodes"
    )


def limits(
    case: Case, row: RowSpec, tree: AnyShape | None, tau: float, fp16: bool
) -> tuple[str, ...]:
    """Return the cells under `LIMITS`; raise `FasteagleError` for a tau that no tree can give."""
    work, n_rows, drafting = case.work, 1, []
    if tree is None:
        tau = 1.0
    else:
        check_tau(tau, row, tree)
        n_rows, drafting = tree.rows, work.drafting(case.head, tree) if row.has_head else []
    cycle = [*work.verifying(n_rows), *drafting, work.finishing]
    (plain, _), (verify, _), (total, bound) = (
        limit(parts, case.device, work.storage.element_bytes, fp16)
        for parts in (work.verifying(1), work.verifying(n_rows), cycle)
    )
    return (
        *(str(row), str(tree or "-"), f"{work.context:,}"),
        *(f"{plain:.2f}", f"{verify:.2f} (T={n_rows})"),
        f"{total - verify:.2f}" if drafting else "-",
        f"{sum(part.n_bytes for part in cycle) / 1e6:,.0f}",
        f"{sum(part.flops for part in cycle) / 1e9:,.0f}",
        *(f"{sum(part.launches for part in cycle)}", f"{tau:.2f}"),
        *(f"{1e3 * work.sequences * tau / total:.1f}", bound),
    )


if __name__ == "__main__":
    main()
