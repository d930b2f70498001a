"""Chooses among fused trees while decoding, by how good both sources are on this text.

The draft head's acceptance rate is followed as in `controller`, from the accepted tokens that it
had proposed. Of the lookup it counts how often its first token was right: apart for cycles behind
one in which much was copied, for there it nearly always is. So a passage that is being copied is
drafted without the draft head where that is faster.
"""

from __future__ import annotations

from collections.abc import Sequence

from fasteagle.drafting.controller import (
    FIRST_PAUSE,
    MARGIN,
    PRIOR_CYCLES,
    START_FACTOR,
    Controller,
    Outcome,
    name,
)
from fasteagle.drafting.fused_plan import USUAL_HIT, FusedPlan, expected_of_head
from fasteagle.shapes import AnyShape, FusedShape

SURE_TOKENS = 4  # copied in a cycle: then the lookup is very sure of the next one
SURE_HIT = 0.8  # at first
HIT_MEMORY = 0.95  # of a cycle in the average, each cycle


class FusedController(Controller):
    """`shape` is for the next cycle, None for a plain pass; `learn_of` is told what happened."""

    plan: FusedPlan
    shape: FusedShape | None

    def __init__(self, plan: FusedPlan) -> None:
        self._hit = {False: USUAL_HIT, True: SURE_HIT}  # by whether much was copied before
        self._sure = False
        self._without_head = 0  # cycles without the draft head, of whose quality they tell nothing
        super().__init__(plan)
        if self.shape is not None and not self.shape.levels and self._shapes_with_head():
            prior = self._cheapest()  # the shape to begin with says nothing of the draft head
            for _ in range(PRIOR_CYCLES):
                self._count(prior, self._expected(prior, START_FACTOR))

    @property
    def factor(self) -> float:
        return super().factor if self._predicted[-1] > 0 else START_FACTOR

    @property
    def hit(self) -> float:
        """How often the lookup's first token is right now."""
        return self._hit[self._sure]

    def learn_of(self, shape: AnyShape | None, outcome: Outcome | None) -> None:
        """A pass is over whose tree was of `shape`; without an outcome nothing was proposed."""
        self.used[None if outcome is None else shape] += 1
        if shape is None:
            self._pausing -= 1
            if self.shape is None and self._pausing <= 0 and self.plan.shapes:
                self._begin_probe()
            return
        assert isinstance(shape, FusedShape), "the shapes of its plan are fused"
        looked_up = 0 if outcome is None else outcome.by_lookup
        seen = HIT_MEMORY * self._hit[self._sure] + (1 - HIT_MEMORY) * (looked_up > 0)
        self._hit[self._sure] = seen
        was_sure, self._sure = self._sure, looked_up >= SURE_TOKENS
        self._without_head += 1
        if outcome is not None and shape.levels:
            self._count(shape, outcome.by_head)
            self._without_head = 0
        self._drafted += 1
        self._probing = max(0, self._probing - 1)
        if not self._probing:
            self._choose(at_once=self._sure != was_sure)

    def _choose(self, at_once: bool) -> None:
        wanted = self.plan.at(self.factor, self.hit)
        if wanted is None:
            self._decide()  # pauses
        elif self._without_head >= FIRST_PAUSE and self._shapes_with_head():
            self._without_head = 0
            self._begin_probe()
        elif at_once or self.shape is None or self._is_better(wanted, self.shape):
            self.shape = wanted

    def _is_better(self, wanted: FusedShape, used: AnyShape) -> bool:
        assert isinstance(used, FusedShape), "the shapes of its plan are fused"
        rate, factor = self.plan.rate, self.factor
        return rate(wanted, factor, self.hit) > MARGIN * rate(used, factor, self.hit)

    def _wanted(self) -> FusedShape | None:
        return self.plan.at(self.factor, self.hit)

    def _shapes_with_head(self) -> Sequence[FusedShape]:
        return [shape for shape in self.plan.shapes if shape.levels]

    def _cheapest(self) -> FusedShape:
        """That with a draft head, for a probe must tell how good it is."""
        found = self._shapes_with_head() or self.plan.shapes
        return min(found, key=self.plan.costs.cycle)

    def _expected(self, shape: AnyShape, factor: float) -> float:
        """Of the draft head alone: what `_count` compares."""
        assert isinstance(shape, FusedShape), "the shapes of its plan are fused"
        return sum(expected_of_head(shape, self.plan.ranks, factor, shape.nodes))

    def explain(self) -> str:
        line = f"{super().explain()} | lookup right in {self._hit[False]:.2f} of the cycles"
        skipping = self.plan.at(self.factor, self._hit[True])
        if skipping is not None and not skipping.levels:
            line += f", copying {name(skipping)}"
        return line
