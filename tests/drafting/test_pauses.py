"""Pauses of drafting and blocks of plain passes, on simulated machines."""

from __future__ import annotations

import pytest

from fasteagle.drafting.pauses import (
    BLOCK,
    FEWEST,
    FIRST_PAUSE,
    LONGEST_BLOCK,
    LONGEST_PAUSE,
    SETTLED,
    WARM,
    Pauses,
    PlainBlocks,
)
from fasteagle.drafting.policy import Outcome, Policy
from simulated_machine import CHAIN, QUIET, SLOW, Machine, SharedCache, policy_of


def useless(policy: Policy) -> list[int]:
    """Lengths of the pauses while no token is accepted."""
    lengths, now = [], 0
    for _ in range(4000):
        if policy.next_shape is None:
            now += 1
            policy.learn(None, Outcome(ms=2.6, verify_ms=2.5))
        else:
            lengths += [now] if now > BLOCK else []
            now = 0
            policy.learn(CHAIN, Outcome(0, 0, 2, True, (0.5, 0.3), 6.0, 1.0, 4.0))
    return lengths


def test_pauses_become_longer_and_drafting_comes_back():
    policy = policy_of(QUIET)
    lengths = useless(policy)
    assert lengths[1:4] == [48, 96, 192] and max(lengths) <= LONGEST_PAUSE + BLOCK
    assert policy.used[None] > 0.9 * sum(policy.used.values())
    machine = Machine(SLOW, 0.9)
    machine.run(policy, 3000)
    assert machine.run(policy, 500) > 1.5


def test_drafting_comes_back_within_a_few_cycles_after_a_pause():
    """A text that was hard to draft becomes easy: cycles before the pause count little then."""
    speeds = []
    for seed in range(20):
        policy = policy_of(QUIET)
        Machine(QUIET, 0.1, seed).run(policy, 1500)
        policy._pauses.left = min(policy._pauses.left, 1)
        speeds.append(Machine(QUIET, 0.8, seed).run(policy, 120))
    assert sum(speeds) / len(speeds) > 1.13  # else 1.05


def test_the_first_pause_after_long_drafting_is_short_again():
    pauses = Pauses()
    for _ in range(4):
        pauses.begin()
        pauses.end()
    assert pauses.length == 16 * FIRST_PAUSE
    for _ in range(SETTLED + 1):
        pauses.count()
    pauses.begin()
    assert pauses.left == FIRST_PAUSE


@pytest.mark.parametrize(("gain", "drafts"), [(0.985, False), (1.1, True)])
def test_drafting_must_be_worth_two_percent(gain, drafts):
    policy = policy_of(QUIET)
    for _ in range(3000):
        if policy.next_shape is None:
            policy.learn(None, Outcome(ms=2.0, verify_ms=2.0))
        else:
            policy.learn(CHAIN, Outcome(1, 0, 2, True, (), 4.0 / gain, 0.5, 3.0))
    share = policy.used[CHAIN] / sum(policy.used.values())
    assert share > 0.8 if drafts else share < 0.3


@pytest.mark.parametrize(("gain", "least"), [(0.85, 8), (0.95, 16), (1.0, 256)])
def test_it_is_given_up_the_sooner_the_less_it_is_worth(gain, least):
    """The mean of a few cycles may be far from the true one."""
    policy, cycles = policy_of(QUIET), 0
    while policy._shape is not None:
        if policy.next_shape is None:
            policy.learn(None, Outcome(ms=2.0, verify_ms=2.0))
        else:
            policy.learn(CHAIN, Outcome(1, 0, 2, True, (), 4.0 / gain, 0.5, 3.0))
            cycles += 1
    assert least <= cycles < 2 * least


@pytest.mark.parametrize(
    ("pace", "passes"),
    [
        (lambda n: 2.55, 2 * BLOCK),
        (lambda n: 2.55 * 0.9 ** min(n, 20), 5 * BLOCK),
        (lambda n: 2.55 * 0.99**n, LONGEST_BLOCK),
        (lambda n: 4.0, FEWEST),
    ],
)
def test_a_block_lasts_until_its_passes_become_no_faster(pace, passes):
    """A cycle that drafts brings two tokens in the time of two plain passes of 2.55 ms."""
    policy = policy_of(QUIET)
    while not policy._blocks.left:
        policy.learn(CHAIN, Outcome(1, 0, 1, True, (0.5,), 5.1, 0.5, 3.1))
    n = 0
    while policy._blocks.left:
        policy.learn(None, Outcome(ms=pace(n), verify_ms=pace(n)))
        n += 1
    assert n == passes


def test_plain_passes_are_timed_anew_after_512_drafted_ones_at_most():
    blocks = PlainBlocks()
    for _ in range(6):
        blocks.begin()
    assert blocks.until == 512


def test_the_first_passes_of_a_block_are_not_timed():
    blocks = PlainBlocks()
    for _ in range(WARM):
        blocks.add(9.0)
    assert blocks.ms is None
    blocks.add(5.0)
    assert blocks.ms == 5.0
    blocks.forget()
    blocks.begin()
    for _ in range(FEWEST):
        blocks.add(None)
    assert not blocks.wait(9.0)  # it does not end before it has timed a pass


@pytest.mark.parametrize("cold", [1.0, 1.3, 1.5])
@pytest.mark.parametrize("p", [0.4, 0.6, 0.7])
def test_plain_passes_that_become_faster_are_timed_until_they_do_not(p, cold):
    """Right after drafting they are slow, and so drafting seems to pay where it does not."""
    speeds = [SharedCache(QUIET, p, cold, seed).run(policy_of(QUIET), 4000) for seed in range(4)]
    assert sum(speeds) / len(speeds) > 0.94  # plain decoding has 0.98: some passes are interrupted


@pytest.mark.parametrize(
    ("pace", "settles", "timed"),
    [(1.0, True, False), (0.6, True, True), (1.6, True, True), (0.6, False, False)],
)
def test_plain_passes_are_timed_anew_where_the_machine_has_changed(pace, settles, timed):
    policy = policy_of(SLOW)

    def run(speed, cycles):
        """Return after how many drafted cycles the last plain pass came."""
        drafted, last = 0, None
        while drafted < cycles:
            if policy.next_shape is None:
                policy.learn(None, Outcome(ms=speed * 5.0, verify_ms=speed * 4.9))
                last = drafted
                continue
            ms = [speed * time for time in (7.0, 1.2, 5.4)]
            policy.learn(CHAIN, Outcome(2, 0, 3, True, (0.8, 0.7, 0.6), *ms))
            drafted += 1
        return last

    if settles:
        assert run(1.0, 200) == 8 + 32 + 128  # and the next one is due 512 cycles later
    else:
        assert run(1.0, 10) == 8
    last = run(pace, 120 if settles else 20)
    assert (last is not None) == timed
    if timed:
        assert policy.plain_ms == pytest.approx(pace * 5.0)
