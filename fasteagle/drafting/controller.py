"""Decides while decoding: which tree the next cycle drafts, and when to rest from drafting.

The plan knows what each tree costs and yields by quality of the guesses; the pilot estimates that
quality from what was accepted lately, and takes the plan's tree for it. Where plain decoding is
faster it rests, and probes again after a while, less and less often while nothing changes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter

from fasteagle.drafting.plan import QUALITIES, Plan, expected_accepted
from fasteagle.tree import TreeShape

# Of the guesses at first. A header tells of text the model made up; people's questions are harder:
# the default head's first guess is right for 0.50 of MT-bench's tokens, 0.69 of its held-out text.
START_QUALITY = 0.8
MEMORY = 0.98  # of a cycle in the average, each cycle: about the last 50 count
PRIOR_CYCLES = 8  # that this weighs at first
PROBE_CYCLES = 5
FIRST_REST, LONGEST_REST = 48, 768  # passes
SETTLED = 40  # cycles of drafting after which a rest was not in vain, and the next is short again
EVERY = 4  # cycles between decisions
MARGIN = 1.03  # another tree must promise this over the one in use


class Controller:
    """`shape` is for the next cycle, None for a plain pass; `learn` hears what became of it."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.used: Counter[TreeShape | None] = Counter()  # passes
        self._observed = 0.0
        self._predicted = [0.0] * len(QUALITIES)  # accepted guesses, had that been the quality
        self._rest = FIRST_REST  # how long the next rest is
        self._resting = 0  # passes left of this one
        self._probing = 0  # cycles left of this probe
        self._since = 0
        self._drafted = 0  # cycles since the last rest
        self.shape = plan.at(START_QUALITY)
        if not plan.shapes:  # nothing pays here, however good the guesses
            return
        prior = self.shape or self._cheapest()
        for _ in range(PRIOR_CYCLES):
            self._count(prior, expected_accepted(prior, plan.ranks, START_QUALITY))
        if self.shape is None:
            self._begin_probe()

    @property
    def quality(self) -> float:
        """At which quality of the guesses the plan would predict what was accepted lately."""
        place = bisect_left(self._predicted, self._observed)
        if place == 0:
            return QUALITIES[0]
        if place == len(QUALITIES):
            return QUALITIES[-1]
        low, high = self._predicted[place - 1], self._predicted[place]
        share = (self._observed - low) / (high - low)
        return QUALITIES[place - 1] + share * (QUALITIES[place] - QUALITIES[place - 1])

    def learn(self, accepted: int | None) -> None:
        """One pass is over: `accepted` guesses of the tree of `shape`, None where it had none."""
        self.used[None if accepted is None else self.shape] += 1
        if self.shape is None:
            self._resting -= 1
            if self._resting <= 0 and self.plan.shapes:
                self._begin_probe()
            return
        if accepted is None:  # the drafter had no guess
            return
        self._count(self.shape, accepted)
        self._since += 1
        self._drafted += 1
        if self._probing:
            self._probing -= 1
            if not self._probing:
                self._decide()
        elif self._since >= EVERY:
            self._decide()

    def _count(self, shape: TreeShape, accepted: float) -> None:
        self._observed = MEMORY * self._observed + accepted
        self._predicted = [
            MEMORY * old + expected_accepted(shape, self.plan.ranks, quality)
            for old, quality in zip(self._predicted, QUALITIES, strict=True)
        ]

    def _decide(self) -> None:
        self._since = 0
        quality = self.quality
        wanted = self.plan.at(quality)
        if wanted is None:
            if self._drafted > SETTLED:
                self._rest = FIRST_REST
            self.shape, self._resting, self._drafted = None, self._rest, 0
            self._rest = min(2 * self._rest, LONGEST_REST)
            return
        rate = self.plan.rate
        if self.shape is None or rate(wanted, quality) > MARGIN * rate(self.shape, quality):
            self.shape = wanted

    def _begin_probe(self) -> None:
        self.shape, self._probing, self._since = self._cheapest(), PROBE_CYCLES, 0

    def _cheapest(self) -> TreeShape:
        """The tree for the poorest guesses that any tree is for."""
        return self.plan.shapes[0]

    def explain(self) -> str:
        """One line: what is in use, what it costs, what it should yield."""
        costs, quality, total = self.plan.costs, self.quality, sum(self.used.values())
        shape = self.plan.at(quality)
        plain = f"plain {costs.plain:.1f} ms a token"
        if shape is None:
            line = f"tree auto: none, guesses at {quality:.1f} of their usual quality; {plain}"
        else:
            accepted = expected_accepted(shape, self.plan.ranks, quality)
            line = (
                f"tree auto: {name(shape)}, draft {costs.draft(shape):.1f} + verify "
                f"{costs.verify(shape.rows):.1f} + rest {costs.rest:.1f} ms for "
                f"{1 + accepted:.2f} tokens: {self.plan.rate(shape, quality):.0f} tok/s expected, "
                f"{plain}: {self.plan.rate(None, quality):.0f}"
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


def name(shape: TreeShape | None) -> str:
    return "plain" if shape is None else f"{shape.depth}/{shape.topk}/{shape.nodes}"
