"""Plans and controllers of fused trees: the arithmetic, and simulations of copied texts."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest

from fasteagle.drafting.controller import FIRST_PAUSE
from fasteagle.drafting.fused_controller import FusedController, Outcome
from fasteagle.drafting.fused_plan import (
    COPY,
    HITS,
    MOST,
    FusedPlan,
    expected_fused,
    fused_shapes,
    make_fused_plan,
)
from fasteagle.drafting.plan import DEFAULT_RANKS, FACTORS, Costs, expected_accepted
from fasteagle.shapes import FusedShape, TreeShape
from helpers import costs

EVEN = ((0.5,), (0.5,))


@pytest.mark.parametrize("sizes", [(3, 3, 8), (2, 4, 6), (1, 2, 2)])
def test_a_lookup_that_is_never_right_leaves_eagles_tree(sizes):
    found = expected_fused(FusedShape(*sizes, 8), DEFAULT_RANKS, 1.0, 0.0)
    assert found == pytest.approx(expected_accepted(TreeShape(*sizes), DEFAULT_RANKS, 1.0))


def test_the_lookup_alone_copies_a_chain():
    chain = FusedShape(0, 1, 4, 4)
    assert expected_fused(chain, EVEN, 1.0, 0.0) == 0
    whole = 1 + COPY + COPY**2 + COPY**3
    assert expected_fused(chain, EVEN, 1.0, 1.0) == pytest.approx(whole)
    assert expected_fused(chain, EVEN, 1.0, 0.5) == pytest.approx(whole / 2)


def test_the_nodes_go_to_the_likeliest_of_both():
    # 0.5 and 0.25 of the draft head, 1, 0.85, 0.72, 0.61, 0.52, 0.44 of the lookup.
    five = expected_fused(FusedShape(2, 1, 5, 8), EVEN, 1.0, 1.0)
    assert five == pytest.approx(sum(COPY**d for d in range(5)))
    six = expected_fused(FusedShape(2, 1, 6, 8), EVEN, 1.0, 1.0)
    assert six == pytest.approx(five)  # the draft head's first token adds nothing to a sure one
    both = expected_fused(FusedShape(2, 1, 6, 4), EVEN, 1.0, 1.0)
    either = 1 - (1 - COPY) * (1 - 0.25)  # at depth 2
    assert both == pytest.approx(1 + either + COPY**2 + COPY**3)


def test_more_of_anything_is_worth_more():
    plan = make_fused_plan(costs(), DEFAULT_RANKS, 8)
    for shape in plan.shapes:
        by_hit = [plan.expected(shape, 1.0, hit) for hit in HITS]
        assert by_hit == sorted(by_hit)
    for factor in FACTORS:
        best = [plan.rate(plan.at(factor, hit), factor, hit) for hit in HITS]
        assert best == sorted(best)


def test_a_plan_keeps_few_shapes():
    plan = make_fused_plan(costs(), DEFAULT_RANKS, 8)
    assert 1 <= len(plan.shapes) <= MOST
    assert all(shape.rows <= 32 and shape.depth <= 63 for shape in fused_shapes(32, 8))


def priced(head, lookup=0.1, passes=None):
    """Costs of a draft head and of a lookup, in ms."""
    return dataclasses.replace(costs(passes, first=head, level=head / 2), lookup=lookup)


def test_a_dear_draft_head_is_left_out_while_copying():
    plan = make_fused_plan(priced(6.0), DEFAULT_RANKS, 8)
    assert plan.at(1.2, 0.0).levels > 0 and plan.at(1.2, 0.95).levels == 0
    free = make_fused_plan(priced(0.0, lookup=0.0), DEFAULT_RANKS, 8)
    assert free.at(1.2, 0.5).levels > 0


def test_where_nothing_pays_nothing_is_planned():
    plan = make_fused_plan(priced(90.0, lookup=90.0), DEFAULT_RANKS, 8)
    assert plan.shapes == [] and plan.at(1.0) is None
    controller = FusedController(plan)
    for _ in range(300):
        assert controller.shape is None
        controller.learn_of(None, None)


def test_costs_of_fused_trees_are_kept():
    shapes = {FusedShape(3, 2, 9, 8): 14.5, FusedShape(0, 1, 8, 8): 12.0}
    whole = dataclasses.replace(priced(2.0), cycles=shapes)
    raw = json.loads(json.dumps(whole.as_json()))
    assert Costs.from_json(raw) == whole
    assert whole.cycle(FusedShape(0, 1, 8, 8)) == 12.0
    plan = make_fused_plan(whole, DEFAULT_RANKS, 8)
    assert set(plan.shapes) <= set(shapes)  # what was measured counts, estimates no longer
    del raw["lookup"]  # as tables were before
    assert Costs.from_json(raw).lookup == 0.0
    first, more = whole.first_level[2], whole.level[2]
    assert whole.draft(FusedShape(3, 2, 9, 4)) == first + 2 * more
    assert whole.draft(FusedShape(0, 1, 4, 4)) == whole.lookup


class Text:
    """A text whose stretches differ in how often the draft head and the lookup are right."""

    def __init__(self, plan: FusedPlan, seed=0):
        self.plan, self.draw = plan, random.Random(seed)
        self.spent = 0.0
        self.tokens = 0

    def outcome(self, shape: FusedShape, head: float, hit: float) -> Outcome:
        share = expected_accepted(TreeShape(3, 3, 8), DEFAULT_RANKS, head) / 3
        by_head = sum(self.draw.random() < share for _ in range(min(3, shape.levels)))
        by_lookup = 0
        if self.draw.random() < hit:
            by_lookup = 1
            while by_lookup < min(shape.reach, shape.nodes) and self.draw.random() < 0.95:
                by_lookup += 1
        return Outcome(max(by_head, by_lookup), by_head, by_lookup)

    def decode(self, controller, n_tokens, head, hit):
        used = []
        end = self.tokens + n_tokens
        while self.tokens < end:
            shape = controller.shape
            used.append(shape)
            if shape is None:
                self.spent += self.plan.costs.plain
                self.tokens += 1
                controller.learn_of(None, None)
                continue
            self.spent += self.plan.costs.cycle(shape)
            found = self.outcome(shape, head, hit)
            self.tokens += 1 + found.accepted
            controller.learn_of(shape, found)
        return used


@pytest.mark.parametrize("seed", range(3))
def test_the_draft_head_is_skipped_where_text_is_copied_and_comes_back(seed):
    plan = make_fused_plan(priced(5.0), DEFAULT_RANKS, 8)
    controller, text = FusedController(plan), Text(plan, seed)

    def headless(used):
        return sum(shape is not None and not shape.levels for shape in used) / len(used)

    for _ in range(3):
        for hit, low, high in ((0.03, 0.0, 0.3), (1.0, 0.6, 1.0)):
            text.decode(controller, 1500, 1.2, hit)  # a pause may be left of what was before
            assert low <= headless(text.decode(controller, 500, 1.2, hit)) <= high
    assert text.spent < 0.8 * text.tokens * plan.costs.plain


@pytest.mark.parametrize("seed", range(3))
def test_useless_sources_cost_little_over_plain_decoding(seed):
    plan = make_fused_plan(priced(2.0), DEFAULT_RANKS, 8)
    controller, text = FusedController(plan), Text(plan, seed)
    text.decode(controller, 3000, 0.0, 0.0)
    assert text.spent < 1.05 * text.tokens * plan.costs.plain
    assert controller.used[None] > 0.8 * sum(controller.used.values())
    text.decode(controller, 2000, 1.2, 0.3)  # both have become good, which a pause may hide
    assert None not in text.decode(controller, 500, 1.2, 0.3)


def test_a_lookup_used_alone_for_long_is_followed_by_a_probe_of_the_draft_head():
    plan = make_fused_plan(priced(6.0), DEFAULT_RANKS, 8)
    controller = FusedController(plan)
    copied = Outcome(8, 0, 8)
    used = []
    for _ in range(6 * FIRST_PAUSE):
        used.append(controller.shape)
        controller.learn_of(controller.shape, copied)
    headed = [shape.levels > 0 for shape in used]
    assert not all(headed) and 0 < sum(headed[FIRST_PAUSE:]) < 40


def test_the_draft_heads_prior_holds_where_the_lookup_begins_alone():
    plan = make_fused_plan(priced(6.0), DEFAULT_RANKS, 8)
    alone = tuple((FusedShape(0, 1, 8, 8),) * len(HITS) for _ in FACTORS)
    shape = next(shape for shape in plan.shapes if shape.levels)
    mixed = (*alone[:-1], (*alone[-1][:-1], shape))
    controller = FusedController(dataclasses.replace(plan, choices=mixed))
    assert controller.shape.levels == 0 and controller.factor == pytest.approx(0.8)
    controller.learn_of(shape, Outcome(0, 0, 0))  # one bad cycle is no verdict
    assert 0.6 < controller.factor < 0.8


def test_a_cycle_that_proposed_nothing_is_a_miss_of_the_lookup():
    plan = make_fused_plan(priced(6.0), DEFAULT_RANKS, 8)
    controller = FusedController(plan)
    before = controller.hit
    controller.learn_of(FusedShape(0, 1, 8, 8), None)
    assert controller.hit < before and controller.used == {None: 1}


def test_explaining_names_both_sources():
    plan = make_fused_plan(priced(6.0), DEFAULT_RANKS, 8)
    line = FusedController(plan).explain()
    assert "plain" in line and "lookup right in 0.20" in line and "copying 0/1/" in line
