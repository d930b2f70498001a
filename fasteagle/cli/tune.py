"""What `fasteagle tune` does: measure, and show what the policy begins with."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from fasteagle.compile.blocks import compile_now
from fasteagle.compile.costs import costs_of, follow_costs, tunable
from fasteagle.drafting.costs import Costs
from fasteagle.drafting.policy import Policy, name
from fasteagle.errors import FasteagleError, note
from fasteagle.llm import open_llm
from fasteagle.options import DraftOptions, RuntimeOptions


def run_tune(model: str, runtime_options: RuntimeOptions, draft: DraftOptions) -> None:
    """Measure anew, keep the costs, print them and the sizes to choose from."""
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
    policy = follow_costs(engine, drafter, costs)
    assert drafter.tuning is not None, "or it were not tunable"
    console = Console(width=100)
    console.print(_costs_table(policy.costs))
    console.print(_sizes_table(policy))
    note(f"tuned in {seconds:.1f} s; kept in {drafter.tuning.path}")


def _costs_table(costs: Costs) -> Table:
    table = Table("", "ms", box=None, pad_edge=False, title="costs", title_justify="left")
    table.add_row("target pass, rows", _cells(costs.passes))
    if costs.chain:
        table.add_row("draft, a chain, levels", _cells(costs.chain))
    if costs.level:
        table.add_row("draft, first level, width", _cells(costs.first_level))
        table.add_row("draft, each later level, width", _cells(costs.level))
    if costs.lookup:
        table.add_row("lookup", f"{costs.lookup:.2f}")
    table.add_row(
        "other, of a cycle / of a plain pass", f"{costs.other:.2f} / {costs.plain_other:.2f}"
    )
    return table


def _cells(times: dict[int, float]) -> str:
    return "  ".join(f"{key}: {value:.2f}" for key, value in sorted(times.items()))


def _sizes_table(policy: Policy) -> Table:
    """Sizes, with what is expected of them before anything has been observed."""
    title = "sizes to choose from (what is observed corrects the expectation)"
    columns = ("size (depth/width/nodes)", "ms", "tokens a cycle", "tok/s", "x plain")
    table = Table(*columns, box=None, pad_edge=False, title=title, title_justify="left")
    for shape, ms, tokens in policy.expectations():
        rate = tokens / ms
        cells = (f"{ms:.2f}", f"{tokens:.2f}", f"{1e3 * rate:.1f}", f"{rate * policy.plain_ms:.2f}")
        table.add_row(name(shape), *cells)
    return table
