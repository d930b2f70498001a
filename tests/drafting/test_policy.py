"""The policy against simulated machines whose costs are not what its table says."""

from __future__ import annotations

import dataclasses

import pytest

from fasteagle.drafting.costs import Costs
from fasteagle.drafting.ladder import NGRAM_RANKS, ranks_of
from fasteagle.drafting.pauses import BLOCK
from fasteagle.drafting.policy import (
    COPIED,
    LOOKED_UP,
    LOOKED_UP_ROW,
    REACH,
    Average,
    Outcome,
    Policy,
    name,
)
from fasteagle.drafting.thresholds import Honesty, Thresholds
from fasteagle.shapes import FusedShape, GatedChain, TreeShape
from helpers import costs
from simulated_machine import CHAIN, QUIET, SLOW, Machine, policy_of


def slower(table: Costs, **factors: float) -> Costs:
    """The table with some of its entries times a factor; `passes1` is the plain pass."""
    passes = {T: ms * factors.get("all", 1.0) for T, ms in table.passes.items()}
    passes[1] *= factors.get("plain", 1.0)
    passes[2] *= factors.get("plain", 1.0)
    chain = {n: ms * factors.get("all", 1.0) for n, ms in table.chain.items()}
    return dataclasses.replace(table, passes=passes, chain=chain)


TABLES = {
    "as measured": lambda true: true,
    "of a busy hour": lambda true: slower(true, all=2.0),
    "plain twice as slow": lambda true: slower(true, plain=2.0),
    "plain twice as fast": lambda true: slower(true, plain=0.5),
    "of the other machine": lambda true: SLOW if true is QUIET else QUIET,
}


MACHINES = [(QUIET, 0.3), (SLOW, 0.2), (SLOW, 0.6), (QUIET, 0.6), (QUIET, 0.9), (SLOW, 0.9)]


@pytest.mark.parametrize(  # each table on three of the six machines
    ("table", "true", "p"),
    [(table, *machine) for i, table in enumerate(TABLES) for machine in MACHINES[i % 2 :: 2]],
)
def test_whatever_the_table_says_it_is_not_slower_than_plain_decoding(true, p, table):
    """And where drafting pays, it brings most of what it brings with the right table.

    Interruptions, 10 times in 500 cycles a tenfold time, are in both.
    """
    speeds, best = [], []
    for seed in range(3):
        policy = policy_of(TABLES[table](true))
        Machine(true, p, seed).run(policy, 128)
        speeds.append(Machine(true, p, seed + 10).run(policy, 600))
        right = policy_of(true)
        Machine(true, p, seed).run(right, 1000)
        best.append(Machine(true, p, seed + 10).run(right, 600))
    assert sorted(speeds)[1] > 0.95  # 0.02 of it are the interruptions
    assert sorted(speeds)[1] > 0.9 * sorted(best)[1]


def test_a_wrong_table_costs_few_tokens():
    """Plain passes are written at twice their time; drafting is slower than they are."""
    policy = policy_of(slower(QUIET, plain=2.0))
    machine = Machine(QUIET, 0.2)
    machine.run(policy, 64)
    assert policy.next_shape is None or policy.plain_ms == pytest.approx(QUIET.plain, rel=0.1)
    assert machine.run(policy, 200) > 0.93


def test_a_head_that_boasts_is_seen_through():
    def speed(boast: float) -> float:
        policy = policy_of(SLOW)
        Machine(SLOW, 0.5, boast=boast).run(policy, 1500)
        return Machine(SLOW, 0.5, 1, boast).run(policy, 1500)

    assert speed(1.6) > 0.93 * speed(1.0)
    honesty = Honesty()
    for _ in range(200):
        honesty.learn([0.8, 0.4], 0)
        honesty.learn([0.8, 0.4], 1)
    assert honesty.ratio(0) == pytest.approx(0.5 / 0.8, rel=0.1)
    assert honesty.ratio(1) == 0.25 and honesty.ratio(7) == 1.0
    bounds = Thresholds.at(0.1, 0.2, honesty)
    assert bounds.verify[1] == pytest.approx(0.4) and bounds.verify[7] == pytest.approx(0.1)
    assert bounds.expand[7] == pytest.approx(0.3 / 0.65)
    bounds = Thresholds.at(0.0, 9.0, honesty)
    assert set(bounds.verify) == {0.02} and set(bounds.expand) == {0.95}
    for _ in range(200):
        honesty.learn([0.1], 1)
    assert honesty.ratio(0) == 2.0


def test_rows_become_dearer_with_time_that_is_worth_more():
    policy = policy_of(SLOW)
    before = policy.thresholds.verify[0]
    for _ in range(100):
        policy.learn(CHAIN, Outcome(4, 0, 4, True, (0.9, 0.8, 0.7, 0.6), 7.0, 1.5, 5.9))
    assert policy.thresholds.verify[0] > 1.2 * before
    assert all(e >= v for v, e in zip(*policy.thresholds, strict=True))
    long = policy_of(dataclasses.replace(SLOW, passes=SLOW.passes | {17: 40.0}), GatedChain(REACH))
    assert long.lookup_threshold > long.thresholds.verify[0]


def test_time_is_worth_what_plain_passes_bring_at_least():
    policy = policy_of(QUIET)
    for _ in range(5):  # the first cycles, before drafting may pause
        policy.learn(CHAIN, Outcome(0, 0, 2, True, ms=6.0))
    assert policy.expectations()[1][1] > 1.5 * policy.plain_ms
    assert policy.speed == 1 / policy.plain_ms
    assert policy.head_gain == 0  # no less while it is tried


def test_an_interruption_says_little_about_the_time_of_a_cycle():
    policy, times = policy_of(SLOW), []
    for ms in [7.0] * 100 + [7e3]:
        policy.learn(CHAIN, Outcome(4, 0, 4, True, ms=ms))
        times.append(policy.expectations()[1][1])
    assert times[-2] < times[-1] < 1.2 * times[-2]


@pytest.mark.parametrize("passes", [{2: 8.0, 32: 38.0}, {2: 6.0, 6: 12.0, 32: 90.0}])
def test_a_looked_up_row_is_as_dear_as_one_of_few_or_of_many(passes):
    costs = dataclasses.replace(SLOW, passes={1: 5.0, **passes})
    policy = policy_of(costs, GatedChain(REACH), lookup=True, head=False)
    few, many = (policy.pass_ms(5) - 5.0) / 4, (policy.pass_ms(17) - 5.0) / 16
    assert (few > many) == (len(passes) == 2)
    price = LOOKED_UP_ROW * max(few, many)
    assert policy.lookup_threshold == pytest.approx(price * policy.speed)


def test_a_looked_up_chain_teaches_nothing_of_the_head():
    policy = policy_of(SLOW, GatedChain(REACH), lookup=True)
    gain = policy.head_gain
    for _ in range(300):
        policy.learn(GatedChain(REACH), Outcome(9, 9, 16, ms=13.0, verify_ms=12.0))
    assert policy.head_gain == pytest.approx(gain) and policy.used[LOOKED_UP] == 300
    for _ in range(200):  # while plain passes are timed, only the head pauses
        assert policy.next_shape == GatedChain(REACH)
        timing = policy.head_gain is None
        by_head = Outcome(3, 0, 3, True, (0.9, 0.8, 0.7), 6.5, 1.2, 5.2)
        policy.learn(policy.next_shape, Outcome(ms=5.0, verify_ms=4.9) if timing else by_head)
    assert policy.head_gain > gain and 10 < policy.used[None] < 50


def test_chains_of_the_head_count_alike_after_copied_tokens():
    policy = policy_of(SLOW, chain := GatedChain(REACH), lookup=True)
    for _ in range(40):
        policy.learn(chain, Outcome(9, 9, 16, ms=13.0, verify_ms=12.0))
        policy.learn(chain, Outcome(6, 0, 6, True, ms=8.0))
    for _ in range(10):
        policy.learn(chain, Outcome(0, 0, 3, True, ms=6.5))
    assert policy.accepted(chain) > 4.0


def test_the_lookup_goes_on_while_the_head_pauses():
    chain = GatedChain(REACH)
    policy = policy_of(QUIET, chain, lookup=True)
    paused = 0
    for _ in range(600):
        paused += policy.head_gain is None
        if policy.next_shape is None or policy.head_gain is None:
            policy.learn(policy.next_shape, Outcome(ms=2.6, verify_ms=2.5))
        else:
            policy.learn(chain, Outcome(0, 0, 2, True, (0.5, 0.3), 6.0, 1.0, 4.0))
    assert paused > 400 and policy.used[None] > 400
    while policy.head_gain is not None or policy._pauses.left < 3 * BLOCK:
        policy.learn(chain, Outcome(0, 0, 2, True, (0.5, 0.3), 6.0, 1.0, 4.0))
    before = policy.lookup_threshold
    for _ in range(2 * BLOCK):  # each of them brings half as much as before
        policy.learn(chain, Outcome(ms=5.2))
    assert policy.lookup_threshold == pytest.approx(before / 2, rel=0.1)
    alone = policy_of(QUIET, chain, head=False, lookup=True)
    for i in range(300):
        copied = Outcome(3, 3, 4, ms=5.0, verify_ms=4.9)
        alone.learn(chain, copied if i % 2 else Outcome(ms=2.6, verify_ms=2.5))
        assert alone.next_shape == chain and alone.head_gain is None
    before = alone.lookup_threshold
    for _ in range(50):  # no plain pass comes, and rows have become slower
        alone.learn(chain, Outcome(3, 3, 4, ms=15.0, verify_ms=14.9))
    assert alone.lookup_threshold > 1.5 * before


# Ladders


TREES = costs()


@pytest.mark.parametrize("p", [0.25, 0.6, 0.9])
def test_the_size_in_use_is_nearly_the_best_one(p):
    shapes = [TreeShape(1, 2, 2), TreeShape(3, 3, 8), TreeShape(6, 4, 31)]

    def speed(*choice: TreeShape) -> float:
        policy = policy_of(TREES, *choice)
        Machine(TREES, p).run(policy, 1000)
        return Machine(TREES, p, 1).run(policy, 2000)

    assert speed(*shapes) > 0.93 * max(1.0, *(speed(shape) for shape in shapes))


def test_copied_text_is_drafted_without_the_head():
    """A size whose source is the lookup alone is cheaper while it is right."""
    alone, both = FusedShape(0, 1, 15, 15), FusedShape(3, 2, 15, 8)
    flat = dataclasses.replace(TREES, passes={1: 10.0, 2: 10.0, 16: 13.0}, lookup=0.1)
    policy = policy_of(flat, alone, both, lookup=True)
    used = {True: [], False: []}
    for i in range(800):
        shape, copying = policy.next_shape, i // 50 % 2 == 1
        used[copying].append(shape)
        accepted = 12 if copying else 2 * (shape == both)
        outcome = Outcome(accepted, 12 * copying, 15, shape == both, ms=0.0)
        ms = flat.plain if shape is None else flat.cycle(shape)
        policy.learn(shape, outcome._replace(ms=ms) if shape else Outcome(ms=ms))
    assert used[True][-100:].count(alone) > 60
    assert used[False][-100:].count(alone) < 30


def test_a_size_that_only_looks_up_teaches_nothing_of_the_head():
    alone, both = FusedShape(0, 1, 15, 15), FusedShape(3, 2, 15, 8)
    policy = policy_of(TREES, alone, both, lookup=True)
    before = policy.accepted(both)
    for _ in range(50):
        policy.learn(alone, Outcome(12, 12, 15, ms=5.0))
    assert policy.accepted(both) == before


@pytest.mark.parametrize("n", [COPIED - 1, COPIED])
def test_from_how_many_looked_up_tokens_on_a_text_counts_as_copied(n):
    policy = policy_of(TREES, shape := FusedShape(3, 2, 15, 8), lookup=True)
    policy.learn(shape, Outcome(4, n, 15, ms=5.0))
    before = policy.accepted(shape)
    policy.learn(shape, Outcome(12, 0, 15, ms=5.0))
    assert (policy.accepted(shape) == before) == (n == COPIED)


@pytest.mark.parametrize(("gain", "changes"), [(1.02, False), (1.05, True)])
def test_another_size_must_promise_more_than_the_one_in_use(gain, changes):
    policy = policy_of(TREES, TreeShape(1, 2, 2), TreeShape(3, 3, 8))
    used = policy.next_shape
    (other,) = {*policy.shapes} - {used}
    ratio = policy._speed(other, False) / policy._speed(used, False)
    policy._sizes[other].ms = Average(policy._sizes[other].ms.prior * ratio / gain)
    assert (policy._best() == other) == changes


def test_what_another_size_brought_is_forgotten_with_time():
    """Else it would never be tried again: the text has changed since."""
    shapes = [TreeShape(1, 2, 2), TreeShape(3, 3, 8)]
    policy = policy_of(TREES, *shapes)
    before = [policy.accepted(shape) for shape in shapes]
    for shape, accepted, n in ((shapes[1], 0, 60), (shapes[0], before[0], 600)):
        for _ in range(n):
            policy.learn(shape, Outcome(accepted, 0, shape.nodes, True, ms=5.0))
    assert policy.accepted(shapes[1]) == pytest.approx(before[1], rel=0.1)


def test_an_outcome_of_a_shape_that_is_gone_counts_for_none():
    policy, other = policy_of(TREES, TreeShape(3, 3, 8)), TreeShape(2, 2, 4)
    before = policy.expectations()
    policy.learn(other, Outcome(4, 0, 4, True, ms=99.0))
    assert policy.expectations() == before and policy.used[other] == 1


def test_a_text_that_repeats_raises_what_all_looked_up_chains_promise():
    shapes = [TreeShape(3, 1, 3), TreeShape(7, 1, 7)]
    table = Costs({1: 3.0, 2: 3.1, 8: 4.0}, {}, {}, 0.1, 0.1, 0.1)
    policy = Policy(table, NGRAM_RANKS, shapes, head=False, lookup=True)
    before = {shape: policy.accepted(shape) for shape in shapes}
    for _ in range(20):
        policy.learn(shapes[0], Outcome(3, 3, 3, ms=3.5))
    assert policy.accepted(shapes[1]) > 1.5 * before[shapes[1]]


@pytest.mark.parametrize("shape", [CHAIN, TreeShape(3, 2, 6)])
def test_a_head_that_was_never_right_on_held_out_text_still_drafts(shape):
    ranks = ranks_of({"ranks": [[0.0, 0.0], [0.0, 0.0]]})
    policy = Policy(QUIET, ranks, [shape], head=True, lookup=False)
    policy.learn(shape, Outcome(1, 0, 3, True, ms=5.0))
    assert policy.factor > 1


# Reports


def test_its_line_says_what_is_measured():
    policy = policy_of(SLOW)
    assert "plain 5.0 ms, 202 tok/s" in policy.explain() and "used" not in policy.explain()
    for _ in range(300):
        by_head = Outcome(2, 0, 3, True, (), 7.0, 1.2, 5.4)
        plain = Outcome(ms=5.5, verify_ms=5.4)
        policy.learn(policy.next_shape, plain if policy.next_shape is None else by_head)
    plain = "plain 5.5 ms, 182 tok/s; a row 0.15 ms, worth it from "
    used = " on | used chain of 1 to 8 95 %, plain 5 %"
    drafting = "policy: chain of 1 to 8, 7.0 ms for 3.00 tokens, 428 tok/s; "
    assert policy.explain() == f"{drafting}{plain}0.06{used}"
    assert policy.expectations()[0] == (None, 5.5, 1.0)
    assert policy.expectations()[1] == (CHAIN, pytest.approx(7.0, 1e-3), pytest.approx(3.0, 1e-3))
    policy._shape = None
    assert policy.explain() == f"policy: the draft head pauses; {plain}0.03{used}"
    alone = policy_of(SLOW, GatedChain(REACH), head=False, lookup=True)
    assert alone.explain().startswith("policy: plain 5.0 ms")
    assert name(FusedShape(0, 1, 7, 7)) == "0/1/7/7" and name(None) == "plain"


@pytest.mark.parametrize("rows", [30, 32, 72])
def test_rows_over_the_largest_timed_pass_cost_time(rows):
    """They are those of a further pass, not free."""
    assert policy_of(SLOW).row_ms(rows, 4) == pytest.approx(SLOW.passes[32] / 32)
    assert policy_of(SLOW).pass_ms(64) == 2 * SLOW.passes[32]
