"""Drafting of several sequences that share passes, on simulated machines."""

from __future__ import annotations

import dataclasses

import pytest

from fasteagle.drafting.company import LONGEST_REST, Company, Sharing, Speed
from fasteagle.drafting.pauses import BLOCK, FEWEST, FIRST_DISTANCE
from fasteagle.drafting.policy import EVERY, LOOKED_UP_ROW, USUAL_CHAIN, Average, Outcome
from fasteagle.shapes import AnyShape, TreeShape
from simulated_machine import CARD, QUIET, SLOW, Machine, SharedCache, policy_of


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize(("true", "p"), [(QUIET, 0.3), (QUIET, 0.6), (SLOW, 0.2), (SLOW, 0.95)])
def test_sequences_that_share_passes_are_not_slower_than_plain_ones(true, p, n):
    speeds = []
    for seed in range(3):
        company = Company()
        company.follow(policy_of(true))
        Machine(true, p, seed).run_together(company, n, 400)
        speeds.append(Machine(true, p, seed + 10).run_together(company, n, 1200))
    assert sorted(speeds)[1] > 0.96
    if (true, p) == (SLOW, 0.95):
        assert sorted(speeds)[1] > 1.2


def test_a_row_costs_more_among_others():
    """What the same chain is worth alone, and to a sequence among others."""
    shared, machine = [], Machine(QUIET, 0.5)
    for n in (2, 8):
        company = Company()
        company.follow(policy_of(QUIET))
        assert company.next_shape is None  # until a pass has shown what it costs
        machine.run_together(company, n, 200)
        shared.append(company)
    alone = policy_of(QUIET).thresholds.verify[0]
    assert alone < shared[0].thresholds.verify[0] < shared[1].thresholds.verify[0]
    assert shared[1].head_gain is None and machine.drafted < 40
    # Texts that begin at once: the prices of the pass before, of fewer, are not theirs.
    machine.run_together(company, 2, 200)
    assert company.head_gain is not None
    company.expect(8)
    assert company.head_gain is None and company.thresholds.verify[0] > 1.5 * alone


def test_what_no_row_costs_counts_as_well():
    """Looking up takes each sequence a tenth of a millisecond, for nothing."""
    company = Company()
    company.follow(policy_of(QUIET, lookup=True))
    machine = Machine(QUIET, 0.2)
    machine.run_together(company, 8, 2000, looking_ms=0.1)
    assert machine.run_together(company, 8, 4000, looking_ms=0.1) > 0.94  # 0.02 are interruptions
    assert company._now.rests.length == LONGEST_REST  # a text may begin to copy
    company._now.rests.left = 0
    while company.next_shape is None:  # it tries again
        machine.run_together(company, 8, 8)


@pytest.mark.parametrize(("cold", "least"), [(1.0, 1.24), (1.5, 0.9)])
def test_drafting_that_pushes_weights_out_of_the_cache_rests(cold, least):
    """Right after drafting plain passes are slow, too: only long blocks show what they cost."""
    speeds = []
    for seed in range(8):
        company, machine = Company(), SharedCache(SLOW, 0.7, cold, seed)
        company.follow(policy_of(SLOW))
        machine.run_together(company, 2, 1000)
        speeds.append(machine.run_together(company, 2, 3000))
    assert sum(speeds) / len(speeds) > least


def test_without_costs_nothing_is_drafted_among_others():
    company = Company()
    assert Machine(QUIET, 0.9).run_together(company, 4, 200) > 0.9
    assert company.next_shape is None


SIZES = TreeShape(1, 1, 1), TreeShape(3, 1, 3), TreeShape(3, 2, 8), TreeShape(5, 4, 15)


LEAST = [(False, 0.2, 0.95), (False, 0.5, 0.95), (False, 0.8, 1.12)]
LEAST += [(True, 0.2, 0.95), (True, 0.5, 1.15), (True, 0.8, 1.4)]


@pytest.mark.parametrize(("together", "p", "least"), LEAST)
@pytest.mark.parametrize("n", [2, 8])
def test_sizes_that_are_fixed_before_a_pass_are_not_slower_than_plain_rows(n, together, p, least):
    """Each drafts for itself, or one run of the draft head serves all."""
    gains = []
    for seed in range(3):
        company, machine = Company(), Machine(CARD, p, seed)
        company.drafts_together = together
        company.follow(policy_of(CARD, *SIZES))
        assert company.next_shape is None  # plain passes are timed first
        machine.run_together(company, n, 1000)
        gains.append(machine.run_together(company, n, 4000))
    assert sorted(gains)[1] > least


def test_sequences_among_more_others_have_smaller_trees():
    sizes = []
    for n in (2, 8):
        company = Company()
        company.follow(policy_of(CARD, *SIZES))
        machine = Machine(CARD, 0.8)
        machine.run_together(company, n, 3000)
        while company.next_shape is None:
            machine.run_together(company, n, 8)
        sizes.append(company.next_shape)
    assert sizes[0].rows > sizes[1].rows


def test_drafting_that_takes_longer_than_was_measured_rests():
    slow = dataclasses.replace(CARD, first_level={1: 3.0, 8: 4.0})
    gains = []
    for seed in range(3):
        company, machine = Company(), Machine(slow, 0.5, seed)
        company.follow(policy_of(CARD, *SIZES))
        machine.run_together(company, 8, 4000)
        gains.append(machine.run_together(company, 8, 8000))
    assert sorted(gains)[1] > 0.94
    while company.next_shape is None:  # it tries again
        machine.run_together(company, 8, 8)


def test_drafting_comes_back_within_a_few_passes_after_a_rest():
    """A text that was hard to draft becomes easy: passes before the rest count little then."""
    gains = []
    for seed in range(3):
        company = Company()
        company.follow(policy_of(CARD, *SIZES))
        Machine(CARD, 0.02, seed).run_together(company, 4, 4000)
        company._now.rests.left = min(company._now.rests.left, 1)
        gains.append(Machine(CARD, 0.9, seed).run_together(company, 4, 800))
    assert sorted(gains)[1] > 1.2


def test_a_head_that_has_paused_is_judged_by_what_it_brings_then():
    """What its chains brought before the pause counts little after it."""
    gains = []
    for seed in range(6):
        company = Company()
        company.follow(policy_of(SLOW))
        Machine(SLOW, 0.02, seed).run_together(company, 4, 4000)
        for pause in (company._now.pauses, company._now.rests):
            pause.left = min(pause.left, 1)
        gains.append(Machine(SLOW, 0.95, seed).run_together(company, 4, 600))
    assert sum(gains) / len(gains) > 1.08  # else 1.0


@pytest.mark.parametrize(
    ("true", "p", "before", "n", "least"),
    [(CARD, 0.3, 2, 8, 0.93), (SLOW, 0.9, 2, 8, 0.97), (SLOW, 0.7, 8, 2, 1.1)],
)
def test_what_other_numbers_of_sequences_have_shown_does_not_count(true, p, before, n, least):
    """Neither their time between blocks of plain passes nor their pauses."""
    gains = []
    for seed in range(5):
        company = Company()
        company.follow(policy_of(true, *(SIZES if true is CARD else ())))
        Machine(true, p, seed).run_together(company, before, 6000)
        gains.append(Machine(true, p, seed + 10).run_together(company, n, 150 * n))
    assert sorted(gains)[2] > least


@pytest.mark.parametrize(("true", "sizes"), [(SLOW, ()), (CARD, SIZES)])
def test_a_sequence_that_decodes_while_others_stand_still(true, sizes):
    company = Company()
    company.follow(policy_of(true, *sizes))
    assert Machine(true, 0.95).run_together(company, 1, 2000) > 2
    assert Machine(true, 0.0).run_together(company, 1, 2000) > 0.94  # else 0.9


def test_where_a_sequence_may_not_draft_the_others_do():
    gains = []
    for seed in range(3):
        company = Company()
        company.follow(policy_of(SLOW))
        Machine(SLOW, 0.9, seed).run_together(company, 2, 600, n_plain=1)
        gains.append(Machine(SLOW, 0.9, seed).run_together(company, 2, 2000, n_plain=1))
    assert sorted(gains)[1] > 1.3


def outcome(accepted: int) -> Outcome:
    return Outcome(accepted, 0, 2, True, (0.5, 0.3), draft_ms=0.2)


def test_passes_of_one_call_are_as_many_passes():
    """A text that ended in the second one has no part in the third."""
    several = []
    for calls in ([(3, 15.0)], [(1, 5.0)] * 3):
        company = Company()
        company.follow(policy_of(QUIET))
        shape = company.policy.shapes[0]
        for passes, ms in calls:
            for _ in range(passes):
                company.learn(shape, outcome(1))
                company.learn(shape, outcome(2))
            if passes > 1:
                company._shapes[shape] -= 1
            company.end_passes(passes, ms)
        several.append(company)
    one, three = several
    assert set(one._all) == set(three._all) == {2}
    assert one._now.speeds[shape].mean() == pytest.approx(three._now.speeds[shape].mean())
    assert one._now.blocks.until == three._now.blocks.until
    one.learn(shape, outcome(1))
    one.end_passes(0, 9.0)  # of a text that was joined
    assert set(one._all) == {2}


def test_prices_follow_rows_levels_and_usual_passes():
    company = Company()
    company.follow(policy := policy_of(QUIET))
    shape, level = policy.shapes[0], company._levels.ms
    for ms in [20.0] * 100 + [2e4]:  # the last is an interruption
        speed = company._now.speeds[shape].mean() if ms > 20.0 else 0.0
        for _ in range(2):
            company.learn(shape, Outcome(3, 0, 7, True, (0.5,) * 7, draft_ms=10.4))
        company.end_passes(1, ms)
    assert company._now.speeds[shape].mean() > 0.9 * speed
    assert company._row_ms > 1.1 * policy.row_ms(2, 4)  # of eight rows each, not of one
    assert company._levels.ms > 3 * level and policy.honesty.ratio(0) > 1.5
    row = company._row_ms * company._speed
    assert company.lookup_threshold == pytest.approx(min(1.0, LOOKED_UP_ROW * row))
    assert company._factor.mean() == pytest.approx(3 / policy.accepted(shape), rel=0.1)
    gain = company._now.gain.mean()
    company.learn(shape, Outcome(9, 9, 16, draft_ms=0.1))  # of the lookup alone
    assert company._now.gain.mean() == gain
    company._now.gain, company._now.pauses.probing = Average(-1.0), 1
    company.end_passes(1, 20.0)
    assert company.head_gain == 0  # no less while it is tried


def test_a_head_that_does_not_pay_is_not_tried_anew_at_another_number():
    company = Company()
    company.follow(policy_of(QUIET))
    Machine(QUIET, 0.2).run_together(company, 8, 2000)
    assert company._now.gain.mean() < 0
    company._now.blocks.distance = 4 * FIRST_DISTANCE
    company.follow(company.policy)  # as whenever a text begins or ends
    company.learn(None, Outcome(0, 0, 0, False, ()))
    company.end_passes(1, 4.0)
    assert company._now.n == 1 and company._now.gain.mean() < 0 and company.head_gain is None
    # Blocks of plain passes are as rare as they were, after a first one soon.
    assert company._now.blocks.distance == 4 * FIRST_DISTANCE
    assert company._now.blocks.until == FIRST_DISTANCE


def test_a_pass_of_one_size_at_a_time_is_observed():
    company = Company()
    company.follow(policy_of(CARD, *SIZES))
    for _ in range(3):
        company.learn(SIZES[0], outcome(1))
    company.end_passes(1, 7.0)
    before = speeds(company)
    for shape in (*SIZES[:2], None):
        company.learn(shape, outcome(1))
    company.end_passes(1, 1e-3)
    assert speeds(company) == before
    for shape in (SIZES[0], SIZES[0], None):  # plain rows of those that may not draft
        company.learn(shape, outcome(1))
    company.end_passes(1, 7.0)
    assert speeds(company)[SIZES[0]] != before[SIZES[0]]


def test_a_text_that_is_hard_to_draft_lowers_what_sizes_promise_that_were_not_in_use():
    company, policy = Company(), policy_of(CARD, *SIZES)
    company.follow(policy)
    before = company._speed_of(Sharing(2, policy), SIZES[3])
    for _ in range(20):
        company.learn(SIZES[0], outcome(0))
    assert company._speed_of(Sharing(2, policy), SIZES[3]) < 0.8 * before


def test_what_a_draft_head_is_worth_before_it_was_tried():
    company = Company()
    company.follow(policy := policy_of(SLOW))
    for _ in range(2 * BLOCK):
        company.learn(None, Outcome())
        company.learn(None, Outcome())
        company.end_passes(1, 5.1)
    cost = USUAL_CHAIN * (company._row_ms + company._levels.ms) * company._speed
    assert cost > 0.1
    assert company.head_gain == pytest.approx(policy.accepted(policy.shapes[0]) - cost, rel=0.05)


def speeds(company: Company) -> dict[AnyShape, float]:
    return {shape: speed.mean() for shape, speed in company._now.speeds.items()}


def decode(company: Company, shape: TreeShape | None, passes: int = 1) -> None:
    """Passes of two sequences: plain ones of 6.6 ms, or drafted ones of 8 ms."""
    for _ in range(passes):
        for _ in range(2):
            company.learn(shape, Outcome() if shape is None else outcome(3)._replace(drafted=3))
        company.end_passes(1, 6.6 if shape is None else 8.0)


def test_a_size_is_in_use_for_some_drafted_passes():
    company = Company()
    company.follow(policy_of(CARD, *SIZES))
    while company.next_shape is None:
        decode(company, None)
    decode(company, company.next_shape, 12)
    own = company._now
    usual = own.size
    while own.size == usual:
        own.speeds[SIZES[0]] = Speed(2, 1e3, 1.0)  # as if it had become fast
        decode(company, usual)
    own.speeds[usual] = Speed(2, 1e6, 1.0)
    decode(company, None, EVERY)
    decode(company, SIZES[0], EVERY - 1)
    assert own.size == SIZES[0]
    decode(company, SIZES[0])
    assert own.size == usual


@pytest.mark.parametrize(("gain", "changes"), [(1.02, False), (1.05, True)])
def test_another_size_must_promise_three_percent(gain, changes):
    policy = policy_of(CARD, *SIZES)
    own = Sharing(2, policy)
    own.size, own.speeds = SIZES[0], {shape: Speed(2, 2.0, 8.0) for shape in SIZES}
    own.speeds[SIZES[1]] = Speed(2, 2.0, 8.0 / gain)
    for _ in range(EVERY):
        Company()._choose_size(own, True)
    assert (own.size == SIZES[1]) == changes


def test_passes_before_a_rest_count_little_after_it():
    """Neither their tokens nor their time."""
    speed = Speed(2)
    for accepted, ms, n in ((1, 9.0, 100), (3, 5.0, 16)):
        speed.forget()
        for _ in range(n):
            speed.add(accepted, ms)
    assert speed.mean() > 0.55  # 0.33 before it, 1.0 now; else 0.50


def test_a_block_of_plain_passes_is_short_where_drafting_is_clearly_faster():
    """It goes on while sequences draft that were ahead of it."""
    company = Company()
    company.follow(policy_of(CARD, *SIZES))
    while company.next_shape is None:
        decode(company, None)
    while (shape := company.next_shape) is not None:
        decode(company, shape)
    decode(company, shape := company._now.size, 20)
    assert company.next_shape is None
    plain = 0
    while company.next_shape is None:
        decode(company, None)
        plain += 1
    assert plain == FEWEST


def test_one_run_of_the_draft_head_for_all_takes_less_than_one_for_each():
    company, policy = Company(), policy_of(CARD, *SIZES)
    alone = company._draft_ms(policy, 1, SIZES[2])
    assert company._draft_ms(policy, 4, SIZES[2]) == 4 * alone
    company.drafts_together = True
    assert alone < company._draft_ms(policy, 4, SIZES[2]) < 2 * alone


def test_sizes_that_were_not_in_use_cost_the_rows_of_all_and_the_rest_of_each():
    speeds = []
    for n in (1, 8):
        for other in (0.1, 1.0):
            policy = policy_of(dataclasses.replace(CARD, other=other), *SIZES)
            speeds.append(Company()._speed_of(Sharing(n, policy), SIZES[0]))
    assert speeds[0] < 1.2 * speeds[1] and speeds[2] > 1.5 * speeds[3]
    policy = policy_of(dataclasses.replace(CARD, passes={1: 6.5, 16: 6.5, 128: 52.0}), *SIZES)
    one, eight = (Company()._speed_of(Sharing(n, policy), SIZES[3]) for n in (1, 8))
    assert eight < 1.5 * one


def test_times_of_other_code_are_forgotten():
    """Passes become faster where compiled code replaces other code, and costs are measured anew."""
    slow = dataclasses.replace(CARD, passes={T: 4 * ms for T, ms in CARD.passes.items()})
    company = Company()
    company.follow(policy_of(slow, *SIZES))
    Machine(slow, 0.8).run_together(company, 4, 4000)
    before = plain_speed(company)
    company.follow(policy_of(CARD, *SIZES))
    Machine(CARD, 0.8).run_together(company, 4, 60)
    assert plain_speed(company) > 3 * before
    company = Company()
    company.follow(policy_of(SLOW))
    Machine(SLOW, 0.95).run_together(company, 2, 400)
    assert company.head_gain is not None
    company.follow(policy_of(SLOW))
    assert company.next_shape is None  # until a pass has shown what it costs


def plain_speed(company: Company) -> float:
    return company._now.blocks.speed
