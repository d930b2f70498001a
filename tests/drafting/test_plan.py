"""The tuner: its arithmetic, the pilot against simulations, measuring on tiny models."""

from __future__ import annotations

import itertools
import json
import random

import pytest
import torch

from fasteagle.compile import costs as tune
from fasteagle.drafting.base import Tuning
from fasteagle.drafting.controller import PROBE_CYCLES, START_QUALITY, Controller
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.drafting.ngram import NgramDrafter
from fasteagle.drafting.plan import (
    DEFAULT_RANKS,
    NGRAM_RANKS,
    QUALITIES,
    best_shape,
    chance,
    expected_accepted,
    make_plan,
    ranks_of,
    shapes,
)
from fasteagle.generate import Engine
from fasteagle.options import DraftOptions, SamplingParams
from fasteagle.tree import TreeShape
from helpers import ROWS, costs, random_head, random_target, tiny_config

GREEDY = SamplingParams()


def brute_force(shape, ranks, quality):
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
            p *= chance(ranks, level, rank, quality)
        chances.append(p)
    return sum(sorted(chances, reverse=True)[: shape.nodes])


@pytest.mark.parametrize("shape", [TreeShape(3, 1, 3), TreeShape(2, 3, 5), TreeShape(3, 3, 8)])
@pytest.mark.parametrize("quality", [0.3, 1.0, 1.4])
def test_expectation_is_the_sum_over_the_likeliest_paths(shape, quality):
    found = expected_accepted(shape, DEFAULT_RANKS, quality)
    assert found == pytest.approx(brute_force(shape, DEFAULT_RANKS, quality))


def test_chances_stay_chances():
    for ranks in (DEFAULT_RANKS, NGRAM_RANKS, ((0.9, 0.08),)):
        for quality in QUALITIES:
            for level in (1, 2, 9):
                found = [chance(ranks, level, rank, quality) for rank in range(len(ranks[0]))]
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
    pilot = Controller(plan)
    for _ in range(2000):
        assert pilot.shape is None  # and it never probes what cannot pay
        pilot.learn(None)


def test_a_plan_keeps_few_shapes_and_the_choice_follows_quality():
    plan = make_plan(costs(), DEFAULT_RANKS, 8)
    assert 1 <= len(plan.shapes) <= 4
    rates = [plan.rate(plan.at(q), q) for q in QUALITIES]
    assert rates == sorted(rates)
    assert all(rate >= plan.rate(None, 1.0) for rate in rates)


def simulate(pilot, plan, quality, n_tokens, seed=0):
    """Seconds for n tokens of text whose guesses have this quality, and of plain decoding."""
    draw, total, tokens = random.Random(seed), 0.0, 0
    while tokens < n_tokens:
        shape = pilot.shape
        if shape is None:
            total, tokens = total + plan.costs.plain, tokens + 1
            pilot.learn(None)
            continue
        total += plan.costs.cycle(shape)
        share = expected_accepted(shape, plan.ranks, quality) / shape.depth
        accepted = sum(draw.random() < share for _ in range(shape.depth))
        tokens += accepted + 1
        pilot.learn(accepted)
    return total, n_tokens * plan.costs.plain


@pytest.mark.parametrize("seed", range(3))
def test_useless_guesses_cost_little_over_plain_decoding(seed):
    plan = make_plan(costs(), DEFAULT_RANKS, 8)
    pilot = Controller(plan)
    spent, plain = simulate(pilot, plan, 0.0, 2000, seed)
    assert spent < 1.04 * plain
    assert pilot.used[None] > 0.8 * sum(pilot.used.values())


@pytest.mark.parametrize("seed", range(3))
def test_good_guesses_after_bad_ones_are_found_again(seed):
    plan = make_plan(costs(), DEFAULT_RANKS, 8)
    pilot = Controller(plan)
    simulate(pilot, plan, 0.0, 1500, seed)
    assert pilot.used[None] > 0.8 * sum(pilot.used.values())
    spent, plain = simulate(pilot, plan, 1.2, 3000, seed)
    assert spent < 0.8 * plain
    assert pilot.shape is not None


def test_a_probe_is_short():
    plan = make_plan(costs(), DEFAULT_RANKS, 8)
    pilot = Controller(plan)
    while pilot.shape is not None:
        pilot.learn(0)
    rest = 0
    while pilot.shape is None:
        pilot.learn(None)
        rest += 1
    probe = 0
    while pilot.shape is not None:
        pilot.learn(0)
        probe += 1
    assert rest >= 32 and probe == PROBE_CYCLES


def test_a_drafter_without_a_guess_teaches_nothing():
    pilot = Controller(make_plan(costs(), DEFAULT_RANKS, 8))
    before = pilot.quality
    for _ in range(100):
        pilot.learn(None)
    assert pilot.quality == before and pilot.used[None] == 100


def test_explaining_names_the_tree_and_its_price():
    plan = make_plan(costs(), DEFAULT_RANKS, 8)
    line = Controller(plan).explain()
    shape = plan.at(START_QUALITY)
    assert f"{shape.depth}/{shape.topk}/{shape.nodes}" in line
    assert f"verify {plan.costs.verify(shape.rows):.1f}" in line and "plain" in line


def test_ranks_come_from_the_header():
    assert ranks_of(None) == ranks_of({}) == DEFAULT_RANKS
    assert ranks_of({"ranks": [[0.5, 0.1], [0.6, 0.1]]}) == ((0.5, 0.1), (0.6, 0.1))


# Measuring, and what is kept of it


@pytest.fixture(scope="module")
def target():
    return random_target(tiny_config())


@pytest.fixture
def engine(target, tmp_path):
    made = Engine(target, 512)
    drafter = EagleDrafter(random_head(target), TreeShape(3, 3, 8), 512)
    drafter.tuning = Tuning(tmp_path / "costs.json", DEFAULT_RANKS)
    made.use(drafter)
    return made


def generated(engine, n=40):
    return [t for ids in engine.generate([5, 6, 7, 8], GREEDY, n) for t in ids]


def test_measuring_leaves_the_conversation_alone_and_is_kept(engine, target):
    expected = generated(Engine(target, 512), 60)
    lines = []
    first = generated(engine, 20)
    held = list(engine.cached)
    plan, seconds = tune.tune_now(engine, lines.append)
    assert engine.cached == held and seconds > 0 and lines == []
    assert set(plan.costs.passes) >= {1, 2, 4, 8, 32}
    assert all(v > 0 for v in plan.costs.passes.values())
    again, none = tune.tune_now(engine, lines.append)
    assert none == 0.0 and again.costs == plan.costs and lines == []
    assert first == expected[:20]
    assert generated(engine, 60) == expected  # whatever the pilot does


def test_resting_and_drafting_in_turn_changes_no_token(engine, target):
    expected = generated(Engine(target, 512), 200)
    # The tree pays only for good guesses; these are bad: rests and probes follow each other.
    plan = tune.follow_costs(engine, engine.drafter, costs())
    assert plan.shapes
    assert generated(engine, 200) == expected
    used = engine.drafter.pilot.used
    assert used[None] > 30 and len(used) > 1
    assert engine.stats.passes == sum(used.values())
    # What was slept through is shown to the head at the end: a follow-up finds it there.
    assert len(engine.cached) - engine.drafter.length <= 8
    follow_up = [5, 6, 7, 8, *expected, 9, 10]
    fresh = Engine(target, 512)
    want = [t for ids in fresh.generate(follow_up, GREEDY, 30) for t in ids]
    assert [t for ids in engine.generate(follow_up, GREEDY, 30) for t in ids] == want
    assert engine.stats.cached_tokens > 190


def test_ngrams_may_be_tuned_too(target, tmp_path):
    engine = Engine(target, 512)
    drafter = NgramDrafter()
    drafter.tuning = Tuning(tmp_path / "costs.json", NGRAM_RANKS)
    engine.use(drafter)
    expected = generated(Engine(target, 512), 80)
    plan, _ = tune.tune_now(engine, print)
    assert all(shape.topk == 1 for shape in plan.shapes)
    assert generated(engine, 80) == expected


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text.replace('"torch"', '"tensor"'),
        lambda text: text.replace(f'"{torch.__version__}"', '"1.0"'),
        lambda text: text[:40],
        lambda text: "[]",
        lambda text: text.replace('"rest"', '"best"'),
        lambda text: json.dumps(json.loads(text) | {"costs": {"passes": 3}}),
    ],
)
def test_a_table_that_does_not_fit_is_ignored_with_one_line(engine, damage):
    path = engine.drafter.tuning.path
    tune.store_costs(path, engine, costs(), 1.0)
    assert tune.load_costs(path, engine, print) == costs()
    path.write_text(damage(path.read_text()))
    lines = []
    assert tune.load_costs(path, engine, lines.append) is None
    assert len(lines) == 1 and "tuner" in lines[0] and "\n" not in lines[0]


def test_another_thread_count_is_another_device(engine):
    path = engine.drafter.tuning.path
    tune.store_costs(path, engine, costs(), 1.0)
    threads = torch.get_num_threads()
    lines = []
    try:
        torch.set_num_threads(threads + 1)
        assert tune.load_costs(path, engine, lines.append) is None
    finally:
        torch.set_num_threads(threads)
    assert f"threads {threads}, now {threads + 1}" in lines[0]


def test_a_fixed_tree_is_not_tuned(target):
    engine = Engine(target, 512)
    engine.use(EagleDrafter(random_head(target), TreeShape(3, 3, 8), 512))
    assert tune.tune_now(engine, print) is None


@pytest.mark.parametrize(
    ("options", "auto"),
    [
        (DraftOptions(), True),
        (DraftOptions("eagle"), True),
        (DraftOptions("ngram"), True),
        (DraftOptions(tree_depth=3), False),
        (DraftOptions(tree_nodes=5), False),
        (DraftOptions("eagle-chain"), False),
        (DraftOptions(tree_file="tree.json"), False),
        (DraftOptions("none"), False),
    ],
)
def test_who_chooses_the_tree(options, auto):
    assert options.auto_tree == auto
