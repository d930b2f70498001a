"""What `fasteagle tune` does: measure, and show the tuner's choice for each acceptance rate."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from fasteagle.compile.blocks import compile_now
from fasteagle.compile.costs import costs_of, follow_costs, tunable
from fasteagle.drafting.controller import name
from fasteagle.drafting.plan import FACTORS, AnyPlan, Costs
from fasteagle.errors import FasteagleError, note
from fasteagle.llm import open_llm
from fasteagle.options import DraftOptions, RuntimeOptions


def run_tune(model: str, runtime_options: RuntimeOptions, draft: DraftOptions) -> None:
    """Measure anew, keep the costs, print them and the plan."""
    if not draft.auto_tree:
        raise FasteagleError(
            "nothing to tune: the tree is fixed; leave out --drafter and the --tree options"
        )
    engine = open_llm(model, runtime_options, draft, note).engine
    drafter = tunable(engine)
    if drafter is None:
        raise FasteagleError("nothing to tune without a drafter")
    note("compiling (kept for the next start) ...")
    compiled = compile_now(engine)
    costs, seconds = costs_of(engine, drafter, note, anew=True, compiled=compiled)
    plan = follow_costs(engine, drafter, costs)
    assert drafter.tuning is not None, "or it were not tunable"
    console = Console(width=100)
    console.print(_costs_table(plan.costs))
    console.print(_plan_table(plan))
    note(f"tuned in {seconds:.1f} s; kept in {drafter.tuning.path}")


def _costs_table(costs: Costs) -> Table:
    table = Table("", "ms", box=None, pad_edge=False, title="costs", title_justify="left")
    table.add_row("target pass, rows", _cells(costs.passes))
    if costs.chain:
        table.add_row("draft, a chain, levels", _cells(costs.chain))
    else:
        table.add_row("draft, first level, width", _cells(costs.first_level))
        table.add_row("draft, each later level, width", _cells(costs.level))
    table.add_row(
        "other, of a cycle / of a plain pass", f"{costs.other:.2f} / {costs.plain_other:.2f}"
    )
    return table


def _cells(times: dict[int, float]) -> str:
    return "  ".join(f"{key}: {value:.2f}" for key, value in sorted(times.items()))


def _plan_table(plan: AnyPlan) -> Table:
    table = Table(
        "acceptance, x recorded",
        "tree (depth/width/nodes)",
        "tokens a pass",
        "tok/s",
        "x plain",
        box=None,
        pad_edge=False,
        title="plan (1.0 is the head's own record)",
        title_justify="left",
    )
    plain = plan.rate(None, 1.0)
    for factor in FACTORS:
        shape = plan.at(factor)
        accepted = plan.expected(shape, factor) if shape else 0.0
        rate = plan.rate(shape, factor)
        table.add_row(
            f"{factor:.1f}",
            name(shape),
            f"{1 + accepted:.2f}",
            f"{rate:.1f}",
            f"{rate / plain:.2f}",
        )
    return table
