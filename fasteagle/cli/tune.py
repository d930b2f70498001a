"""Run `fasteagle tune`: measure costs and print the sizes that the policy begins with."""

from __future__ import annotations

from fasteagle.compile.blocks import compile_now
from fasteagle.compile.costs import costs_of, follow_costs, tunable, tuning_of
from fasteagle.compile.experts import distinct_experts
from fasteagle.config import MoEConfig
from fasteagle.drafting.costs import Costs
from fasteagle.drafting.policy import Policy, name
from fasteagle.errors import FasteagleError, note
from fasteagle.llm import open_llm
from fasteagle.options import DraftOptions, RuntimeOptions
from fasteagle.prompts import read_questions
from fasteagle.tables import print_table

FIXED = (
    "nothing to tune: the tree is fixed; leave out --drafter, --draft-model, --lookup-depth and "
    "the --tree options"
)


def run_tune(model: str, runtime_options: RuntimeOptions, draft: DraftOptions) -> None:
    """Measure the costs again, store them, print them and the sizes to choose from."""
    if not draft.auto_chain:  # tunable neither as a tree nor as a chain
        raise FasteagleError(FIXED)
    llm = open_llm(model, runtime_options, draft, note)
    engine = llm.engine
    drafter = tunable(engine)
    if drafter is None:
        raise FasteagleError(FIXED)
    compiled = compile_now(engine, say=note)
    questions = "\n".join(turn for each in read_questions() for turn in each)
    text = llm.tokenizer.encode(questions)[: engine.max_seq_len // 2]
    engine.prefill(text)  # the rows that are timed repeat its tokens
    costs, seconds = costs_of(engine, drafter, note, anew=True, compiled=compiled)
    policy = follow_costs(drafter, costs)
    print_costs(policy.costs)
    print_sizes(policy)
    if engine.target.config.moe is not None:
        print_experts(engine.target.config.moe, distinct_experts(engine.target, text))
    note(f"tuned in {seconds:.1f} s; kept in {tuning_of(drafter).path}")


def print_costs(costs: Costs) -> None:
    """Print the measured costs of the parts of a cycle."""
    rows = [("target pass, rows", _cells(costs.passes))]
    if costs.chain:
        rows.append(("draft, a chain, levels", _cells(costs.chain)))
    if costs.level:
        rows.append(("draft, first level, width", _cells(costs.first_level)))
        rows.append(("draft, each later level, width", _cells(costs.level)))
    if costs.lookup:
        rows.append(("lookup", f"{costs.lookup:.2f}"))
    other = f"{costs.other:.2f} / {costs.plain_other:.2f}"
    rows.append(("other, of a cycle / of a plain pass", other))
    print_table(("", "ms"), rows, title="costs")


def print_experts(config: MoEConfig, measured: dict[int, float]) -> None:
    """Print how many experts of a layer some rows take together, which a pass has to read."""
    rows = [
        (str(T), f"{mean:.1f}", f"{config.distinct_experts(T):.1f}") for T, mean in measured.items()
    ]
    title = f"experts of a layer ({config.n_expert})"
    print_table(("rows", "on text", "if independent"), rows, title=title)


def _cells(times: dict[int, float]) -> str:
    return "  ".join(f"{key}: {value:.2f}" for key, value in sorted(times.items()))


def print_sizes(policy: Policy) -> None:
    """Print the sizes with the speed that the policy expects before any observation."""
    rows = []
    for shape, ms, tokens in policy.expectations():
        rate = tokens / ms
        numbers = f"{ms:.2f}", f"{tokens:.2f}", f"{1e3 * rate:.1f}", f"{rate * policy.plain_ms:.2f}"
        rows.append((name(shape), *numbers))
    headings = ("size (depth/width/nodes)", "ms", "tokens a cycle", "tok/s", "x plain")
    print_table(headings, rows, title="sizes to choose from (what is observed corrects this)")
