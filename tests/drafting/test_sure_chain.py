"""Chains that end where the head is unsure: where they end, and when they are drafted at all."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from fasteagle.drafting.controller import FIRST_PAUSE, Outcome
from fasteagle.drafting.eagle import sure_chain
from fasteagle.drafting.ngram import NgramDrafter
from fasteagle.drafting.plan import DEFAULT_RANKS, Costs
from fasteagle.drafting.sure_chain import (
    LONGEST,
    LOOKED_UP,
    REACH,
    ChainController,
    ChainPlan,
    FusedChainController,
    LookupChainController,
    Stopping,
)
from fasteagle.shapes import SureChain
from fasteagle.tree import Pool

PASSES = {1: 4.0, 2: 4.5, 3: 5.0, 4: 5.5, 5: 6.0, 9: 8.0}
SHAPE = SureChain(LONGEST)


def plan(other=0.3, **changes) -> ChainPlan:
    given = dict(passes=PASSES, chain={1: 0.3, LONGEST: 1.7}) | changes
    costs = Costs(given["passes"], {}, {}, other, 0.2, chain=given["chain"])
    return ChainPlan(costs, DEFAULT_RANKS, SHAPE)


def decode(controller: ChainController, accepted: float, n: int, seed=0) -> int:
    """`n` passes of text where each token of a chain of four is right so often; those drafted."""
    rng, drafted = random.Random(seed), 0
    for _ in range(n):
        shape = controller.shape
        if shape is None:
            controller.learn_of(None, None)
            continue
        drafted += 1
        right = 0
        while right < 4 and rng.random() < accepted:
            right += 1
        controller.learn_of(shape, Outcome(right, drafted=4))
    return drafted


def test_a_chain_ends_where_its_path_is_unlikely():
    tokens = torch.arange(10, 14)
    scores = torch.tensor([0.9, 0.5, 0.3, 0.25]).log()
    pool = Pool(tokens, scores, torch.arange(-1, 3))
    root = torch.tensor([7])

    def kept(keep, deepen):
        tree = sure_chain(pool, root, keep, deepen)
        assert tree.tokens[~tree.valid].eq(0).all() and tree.parents.tolist() == [0, 0, 1, 2, 3]
        return tree.tokens[tree.valid].tolist()

    assert kept(0.0, 0.0) == [7, 10, 11, 12, 13]
    assert kept(0.28, 0.0) == [7, 10, 11, 12]
    assert kept(0.0, 0.4) == [7, 10, 11, 12]  # one more than are likelier than that
    assert kept(0.95, 0.0) == [7]
    assert kept(0.5, 0.95) == [7, 10]


def test_where_rows_cost_more_a_token_must_be_surer():
    dear = plan(passes={1: 4.0, 2: 5.0, 5: 8.0, 9: 12.0})
    cheap, rate = plan(), 300.0
    assert cheap.stopping(rate).keep == pytest.approx(0.5 * 0.3)
    assert dear.stopping(rate).keep == pytest.approx(1.0 * 0.3)
    assert cheap.stopping(rate).deepen == pytest.approx((0.5 + 0.2) * 0.3 / 0.65)
    assert cheap.stopping(2 * rate).keep > cheap.stopping(rate).keep  # other tokens come faster
    for any_rate in (1.0, 1e6):
        keep, deepen = cheap.stopping(any_rate)
        assert 0 < keep <= deepen < 1
    free = plan(passes=dict.fromkeys(PASSES, 4.0))
    assert free.stopping(rate).keep > 0  # noise may measure a row as free


def test_it_drafts_where_that_is_faster_and_pauses_where_not():
    good, bad = ChainController(plan()), ChainController(plan())
    assert good.shape == SHAPE
    assert decode(good, 0.8, 400) == 400 and good.factor > 1.2
    assert decode(bad, 0.1, 400) < 120 and bad.factor < 1
    assert bad.used[None] > 280


def test_it_comes_back_when_the_text_changes():
    controller = ChainController(plan())
    decode(controller, 0.05, 300)
    assert controller.shape is None or controller.factor < 1
    assert decode(controller, 0.95, 2000, seed=1) > 700


def test_unsure_cycles_count_as_cycles():
    """What is drafted and not verified costs time, and so must lower the rate."""
    controller = ChainController(plan())
    before, unsure = controller.rate, Outcome(0, extended=True)
    for _ in range(10):
        controller.learn_of(SHAPE, unsure)
    assert controller.rate < before
    for _ in range(200):
        drafting = controller.shape is not None
        controller.learn_of(controller.shape, unsure if drafting else None)
    assert controller.used[None] >= FIRST_PAUSE


def fused_plan(**changes) -> ChainPlan:
    made = plan(**changes)
    return ChainPlan(made.costs, made.ranks, SureChain(REACH))


def by_head(accepted: int) -> Outcome:
    return Outcome(accepted, by_head=accepted, drafted=2, extended=True)


def test_the_head_of_a_fused_drafter_is_followed_apart():
    controller = FusedChainController(fused_plan())
    start = controller.head_gain
    for _ in range(300):  # of copied chains nothing is learned about it
        controller.learn_of(SureChain(REACH), Outcome(9, by_lookup=9, drafted=16))
    assert controller.head_gain == start
    for _ in range(200):
        controller.learn_of(SureChain(REACH), by_head(2))
    assert controller.head_gain > start
    assert controller.used[SureChain(REACH)] == 200 and controller.used[LOOKED_UP] == 300


def test_a_useless_head_pauses_and_is_probed():
    controller = FusedChainController(fused_plan())
    paused = 0
    for _ in range(600):
        if controller.head_gain is None:
            paused += 1
            controller.learn_of(SureChain(REACH), None)
        else:
            assert controller.head_gain >= 0  # a lookup without tokens is no reason to leave it out
            controller.learn_of(SureChain(REACH), by_head(0))
    assert paused > 400
    probes = [controller.head_gain]
    for _ in range(2000):
        gain = controller.head_gain
        controller.learn_of(SureChain(REACH), None if gain is None else by_head(2))
        probes.append(controller.head_gain)
    assert controller.head_gain is not None  # the text has changed, and a probe has told


def test_repetitions_do_not_change_what_time_is_worth():
    controller = FusedChainController(fused_plan())
    before = controller.stopping
    for _ in range(100):
        controller.learn_of(SureChain(REACH), Outcome(16, by_lookup=16, drafted=16))
    assert controller.stopping == before
    for _ in range(100):
        controller.learn_of(SureChain(REACH), by_head(2))
    assert controller.stopping.keep > before.keep


def test_a_lookup_alone_has_no_head_to_pause():
    controller = LookupChainController(fused_plan(chain={1: 0.0, LONGEST: 0.0}))
    for i in range(300):
        found = Outcome(3, by_lookup=3, drafted=4) if i % 2 else None
        controller.learn_of(SureChain(REACH), found)
    assert controller.head_gain is None and controller.used[LOOKED_UP] == 150


def test_its_line_says_what_is_measured():
    controller = ChainController(plan())
    decode(controller, 0.8, 50)
    line = controller.explain()
    assert "chain of 1 to 8 tokens" in line and "plain 238" in line and "used chain" in line


def test_costs_of_chains_are_kept():
    made = plan().costs
    assert Costs.from_json(made.as_json()) == made
    assert made.draft_chain(3) == pytest.approx(0.3 + 2 * 0.2)
    assert made.draft(SHAPE) == pytest.approx(1.7)


def test_without_any_gain_no_chain_is_planned():
    slow = plan(chain={1: 30.0, LONGEST: 60.0})
    assert slow.at(1.0) is None and plan().at(1.0) == SHAPE
    assert plan().rate(SHAPE, 1.4) > plan().rate(SHAPE, 0.6)
    assert Stopping() == Stopping(0.15, 0.4)


def test_long_chains_end_earlier_where_many_rows_cost_more_each():
    even, steep = (
        dataclasses.replace(plan(**changes), shape=SureChain(REACH))
        for changes in ({}, {"passes": PASSES | {17: 28.0}})
    )
    rate = even.rate(None, 1.0)
    assert steep.stopping(rate) == even.stopping(rate)  # of the head's short ones
    assert even.lookup_keep(rate) == pytest.approx(even.stopping(rate).keep)
    assert steep.lookup_keep(rate) == pytest.approx((28.0 - 4.0) / 16 * rate / 1e3)
    drafter = NgramDrafter()
    drafter.shape = SureChain(LONGEST)
    assert drafter.lookup_keep == Stopping().keep
    drafter.follow(steep)
    assert drafter.lookup_keep > even.stopping(rate).keep
