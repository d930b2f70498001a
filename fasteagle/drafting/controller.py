"""Chooses while decoding: which tree the next cycle drafts, and when to pause drafting.

The plan says what each tree costs, and what it yields at each acceptance rate. The controller
estimates the rate, as a factor of the one that the draft head's header records, from the tokens
accepted lately, and takes the plan's tree for it. Where plain decoding is faster it pauses, and
probes after a while; pauses become longer while nothing changes.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections import Counter
from typing import NamedTuple

from fasteagle.drafting.plan import FACTORS, AnyPlan, Drafted
from fasteagle.shapes import AnyShape, SureChain

# At first. A header records acceptance on text that the model wrote; questions of people have less:
# the default head's first token is accepted for 0.50 of MT-bench, 0.69 of its held-out text.
START_FACTOR = 0.8
MEMORY = 0.98  # of a cycle in the average, each cycle: about the last 50 count
PRIOR_CYCLES = 8  # that this weighs at first
PROBE_CYCLES = 5
FIRST_PAUSE, LONGEST_PAUSE = 48, 768  # passes
SETTLED = 40  # cycles of drafting after a probe that succeeded: the next pause is short again
EVERY = 4  # cycles between decisions
MARGIN = 1.03  # another tree must promise this over the one in use


class Outcome(NamedTuple):
    """What was accepted of one tree."""

    accepted: int
    by_head: int = 0  # of the accepted tokens those that the draft head had proposed
    by_lookup: int = 0
    drafted: int = 0  # tokens verified
    extended: bool = False  # whether the draft head was run


class Controller:
    """`shape` is for the next cycle, None for a plain pass; `learn` is told what was accepted."""

    def __init__(self, plan: AnyPlan) -> None:
        self.plan = plan
        self.used: Counter[AnyShape | str | None] = Counter()  # passes
        self._observed = 0.0
        self._predicted = [0.0] * len(FACTORS)  # accepted tokens, had that been the factor
        self._next_pause = FIRST_PAUSE  # its passes
        self._pausing = 0  # passes left of this pause
        self._probing = 0  # cycles left of this probe
        self._since = 0
        self._drafted = 0  # cycles since the last pause
        self.shape: Drafted | None = plan.at(START_FACTOR)
        if not plan.shapes:  # no tree is faster here, whatever is accepted
            return
        prior = self.shape or self._cheapest()
        for _ in range(PRIOR_CYCLES):
            self._count(prior, self._expected(prior, START_FACTOR))
        if self.shape is None:
            self._begin_probe()

    @property
    def next_shape(self) -> AnyShape | None:
        """Of the next cycle's tree."""
        return self.shape

    @property
    def factor(self) -> float:
        """The acceptance rate of late, as a factor of the recorded one."""
        place = bisect_left(self._predicted, self._observed)
        if place == 0:
            return FACTORS[0]
        if place == len(FACTORS):
            return FACTORS[-1]
        low, high = self._predicted[place - 1], self._predicted[place]
        share = (self._observed - low) / (high - low)
        return FACTORS[place - 1] + share * (FACTORS[place] - FACTORS[place - 1])

    def learn_of(self, shape: AnyShape | None, outcome: Outcome | None) -> None:
        """A pass is over whose tree was of `shape`; without an outcome nothing was proposed."""
        if self.shape == shape:  # what has changed since the cycle was launched teaches nothing
            self.learn(None if outcome is None else outcome.accepted)

    def learn(self, accepted: int | None) -> None:
        """A pass is over: `accepted` tokens of the tree of `shape`; None: nothing was proposed."""
        self.used[None if accepted is None else self.shape] += 1
        if self.shape is None:
            self._pausing -= 1
            if self._pausing <= 0 and self.plan.shapes:
                self._begin_probe()
            return
        if accepted is None:  # the drafter proposed nothing
            return
        self._count(self.shape, accepted)
        self._after_drafting()

    def _after_drafting(self) -> None:
        """Decide now and then."""
        self._since += 1
        self._drafted += 1
        if self._probing:
            self._probing -= 1
            if not self._probing:
                self._decide()
        elif self._since >= EVERY:
            self._decide()

    def _expected(self, shape: Drafted, factor: float) -> float:
        """What `_count` compares with the tokens that were accepted."""
        return self.plan.expected(shape, factor)

    def _count(self, shape: Drafted, accepted: float) -> None:
        self._observed = MEMORY * self._observed + accepted
        self._predicted = [
            MEMORY * old + self._expected(shape, factor)
            for old, factor in zip(self._predicted, FACTORS, strict=True)
        ]

    def _decide(self) -> None:
        self._since = 0
        factor, rate = self.factor, self.plan.rate
        wanted = self._wanted()
        if (
            wanted is not None
            and self.shape is not None
            and rate(wanted, factor) <= MARGIN * rate(self.shape, factor)
        ):
            wanted = self.shape
        self._pause_or_take(wanted)

    def _pause_or_take(self, wanted: Drafted | None) -> None:
        if wanted is None:
            if self._drafted > SETTLED:
                self._next_pause = FIRST_PAUSE
            self._pausing, self._drafted = self._next_pause, 0
            self._next_pause = min(2 * self._next_pause, LONGEST_PAUSE)
        self.shape = wanted

    def _wanted(self) -> Drafted | None:
        """The plan's choice for what was observed."""
        return self.plan.at(self.factor)

    def _begin_probe(self) -> None:
        self.shape, self._probing, self._since = self._cheapest(), PROBE_CYCLES, 0

    def _cheapest(self) -> Drafted:
        """The tree for the lowest acceptance rate at which any tree is faster."""
        return self.plan.shapes[0]

    def explain(self) -> str:
        """One line: what is in use, what it costs, what it should yield."""
        costs, factor, total = self.plan.costs, self.factor, sum(self.used.values())
        shape = self.plan.at(factor)
        plain = f"plain {costs.plain:.1f} ms a token"
        if shape is None:
            line = f"tree auto: none, acceptance {factor:.1f} x the recorded one; {plain}"
        else:
            accepted = self.plan.expected(shape, factor)
            line = (
                f"tree auto: {name(shape)}, draft {costs.draft(shape):.1f} + verify "
                f"{costs.verify(shape.rows):.1f} + other {costs.other:.1f} ms for "
                f"{1 + accepted:.2f} tokens: {self.plan.rate(shape, factor):.0f} tok/s expected, "
                f"{plain}: {self.plan.rate(None, factor):.0f}"
            )
        if not total:
            return line
        return line + " | used " + self.shares()

    def shares(self) -> str:
        """How many of the passes each tree had."""
        total = sum(self.used.values())
        return ", ".join(
            f"{name(shape)} {100 * n / total:.0f} %" for shape, n in self.used.most_common()
        )


def name(shape: AnyShape | str | None) -> str:
    if isinstance(shape, str):
        return shape
    if isinstance(shape, SureChain):
        return f"chain of {shape}"
    return "plain" if shape is None else "/".join(map(str, dataclasses.astuple(shape)))
