"""The plan's arithmetic, and the controller against simulations."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random

import pytest

from fasteagle.drafting.controller import PROBE_CYCLES, START_FACTOR, Controller
from fasteagle.drafting.plan import (
    DEFAULT_RANKS,
    FACTORS,
    NGRAM_RANKS,
    Costs,
    best_shape,
    chance,
    expected_accepted,
    make_plan,
    ranks_of,
    shapes,
)
from fasteagle.options import SamplingParams
from fasteagle.tree import TreeShape
from helpers import ROWS, costs

GREEDY = SamplingParams()


def brute_force(shape, ranks, factor):
    """Sum of the best `nodes` path probabilities, by listing every path."""
    paths = [
        path
        for depth in range(1, shape.depth + 1)
        for path in itertools.product(range(shape.topk), repeat=depth)
    ]
    chances = []
    for path in paths:
        p = 1.0
        for level, rank in enumerate(path, 1):
            p *= chance(ranks, level, rank, factor)
        chances.append(p)
    return sum(sorted(chances, reverse=True)[: shape.nodes])


@pytest.mark.parametrize("shape", [TreeShape(3, 1, 3), TreeShape(2, 3, 5), TreeShape(3, 3, 8)])
@pytest.mark.parametrize("factor", [0.3, 1.0, 1.4])
def test_expectation_is_the_sum_over_the_likeliest_paths(shape, factor):
    found = expected_accepted(shape, DEFAULT_RANKS, factor)
    assert found == pytest.approx(brute_force(shape, DEFAULT_RANKS, factor))


def test_chances_stay_chances():
    for ranks in (DEFAULT_RANKS, NGRAM_RANKS, ((0.9, 0.08),)):
        for factor in FACTORS:
            for level in (1, 2, 9):
                found = [chance(ranks, level, rank, factor) for rank in range(len(ranks[0]))]
                assert sum(found) <= 0.971 and found == sorted(found, reverse=True)


def test_a_flat_pass_takes_large_trees_and_a_steep_one_small_ones():
    flat = costs(dict.fromkeys(ROWS, 10.0), level=0.1)
    steep = costs({T: 10.0 * (0.9 + 0.1 * T) for T in ROWS})
    large = best_shape(flat, DEFAULT_RANKS, 1.0, shapes(32, 8))
    small = best_shape(steep, DEFAULT_RANKS, 1.0, shapes(32, 8))
    assert large.nodes == 31 and small.nodes < 8


def test_nothing_is_better_than_drafts_that_cost_more_than_they_save():
    dear = costs(first=30.0)
    assert best_shape(dear, DEFAULT_RANKS, 1.0, shapes(32, 8)) is None
    plan = make_plan(dear, DEFAULT_RANKS, 8)
    assert plan.shapes == [] and plan.at(1.0) is None
    controller = Controller(plan)
    for _ in range(2000):
        assert controller.shape is None  # and it never probes what cannot pay
        controller.learn(None)


def test_a_plan_keeps_few_shapes_and_the_choice_follows_quality():
    plan = make_plan(costs(), DEFAULT_RANKS, 8)
    assert 1 <= len(plan.shapes) <= 4
    rates = [plan.rate(plan.at(q), q) for q in FACTORS]
    assert rates == sorted(rates)
    assert all(rate >= plan.rate(None, 1.0) for rate in rates)


def simulate(controller, plan, factor, n_tokens, seed=0):
    """Seconds for n tokens of text whose guesses have this factor, and of plain decoding."""
    draw, total, tokens = random.Random(seed), 0.0, 0
    while tokens < n_tokens:
        shape = controller.shape
        if shape is None:
            total, tokens = total + plan.costs.plain, tokens + 1
            controller.learn(None)
            continue
        total += plan.costs.cycle(shape)
        share = expected_accepted(shape, plan.ranks, factor) / shape.depth
        accepted = sum(draw.random() < share for _ in range(shape.depth))
        tokens += accepted + 1
        controller.learn(accepted)
    return total, n_tokens * plan.costs.plain


@pytest.mark.parametrize("seed", range(3))
def test_useless_guesses_cost_little_over_plain_decoding(seed):
    plan = make_plan(costs(), DEFAULT_RANKS, 8)
    controller = Controller(plan)
    spent, plain = simulate(controller, plan, 0.0, 2000, seed)
    assert spent < 1.04 * plain
    assert controller.used[None] > 0.8 * sum(controller.used.values())


@pytest.mark.parametrize("seed", range(3))
def test_good_guesses_after_bad_ones_are_found_again(seed):
    plan = make_plan(costs(), DEFAULT_RANKS, 8)
    controller = Controller(plan)
    simulate(controller, plan, 0.0, 1500, seed)
    assert controller.used[None] > 0.8 * sum(controller.used.values())
    spent, plain = simulate(controller, plan, 1.2, 3000, seed)
    assert spent < 0.8 * plain
    assert controller.shape is not None


def test_a_probe_is_short():
    plan = make_plan(costs(), DEFAULT_RANKS, 8)
    controller = Controller(plan)
    while controller.shape is not None:
        controller.learn(0)
    pause = 0
    while controller.shape is None:
        controller.learn(None)
        pause += 1
    probe = 0
    while controller.shape is not None:
        controller.learn(0)
        probe += 1
    assert pause >= 32 and probe == PROBE_CYCLES


def test_a_drafter_without_a_guess_teaches_nothing():
    controller = Controller(make_plan(costs(), DEFAULT_RANKS, 8))
    before = controller.factor
    for _ in range(100):
        controller.learn(None)
    assert controller.factor == before and controller.used[None] == 100


def test_explaining_names_the_tree_and_its_price():
    plan = make_plan(costs(), DEFAULT_RANKS, 8)
    line = Controller(plan).explain()
    shape = plan.at(START_FACTOR)
    assert f"{shape.depth}/{shape.topk}/{shape.nodes}" in line
    assert f"verify {plan.costs.verify(shape.rows):.1f}" in line and "plain" in line


def test_ranks_come_from_the_header():
    assert ranks_of(None) == ranks_of({}) == DEFAULT_RANKS
    assert ranks_of({"ranks": [[0.5, 0.1], [0.6, 0.1]]}) == ((0.5, 0.1), (0.6, 0.1))


def test_what_was_measured_counts_more_than_an_estimate():
    estimated = make_plan(costs(), DEFAULT_RANKS, 8)
    first = estimated.shapes[0]
    slow = dataclasses.replace(costs(), cycles=dict.fromkeys(estimated.shapes, 1e3))
    assert slow.cycle(first) == 1e3 and make_plan(slow, DEFAULT_RANKS, 8).shapes == []
    one = dataclasses.replace(costs(), cycles={first: costs().cycle(first)})
    assert make_plan(one, DEFAULT_RANKS, 8).shapes == [first]
    assert Costs.from_json(json.loads(json.dumps(one.as_json()))) == one
