"""Tables of times: how they are read, stored, and corrected by observed times."""

from __future__ import annotations

import dataclasses
import json

import pytest

from fasteagle.drafting.costs import Costs, Times
from fasteagle.shapes import GatedChain, TreeShape
from helpers import costs
from simulated_machine import SLOW

TREES = costs()


def test_times_follow_the_machine():
    measured = {1: 4.0, 4: 6.0, 8: 10.0, 16: 18.0}
    times = Times(measured)
    assert times.slope(8) == pytest.approx(6 / 7) and times.slope(40) == pytest.approx(14 / 15)
    for _ in range(12):  # twice as slow as measured
        for size, ms in ((4, 12.0), (8, 20.0)):
            times.observe(size, ms)
    assert times.at(4) == pytest.approx(12.0, rel=0.1) and times.at(16) > 24
    assert times.at(40) == times.at(16) and times.at(6) == pytest.approx(16.0, rel=0.1)
    for odd in (1e6, 1e-6):  # an interruption, a clock that was set back
        before = times.at(4)
        times.observe(4, odd)
        assert 0.8 < times.at(4) / before < 1.2
    before = times.at(4)
    times.observe(4, 0.0)
    assert times.at(4) == before and measured[4] == 6.0
    for ms in [12.0] * 200 + [6.0] * 30:  # also after many observations
        times.observe(4, ms)
    assert times.at(4) == pytest.approx(6.0, rel=0.1)
    assert Times({1: 9.0, 8: 3.0}).slope(8) == Times({1: 9.0}).slope(8) == 0.0


def test_costs_are_kept_as_json():
    for table in (TREES, SLOW):
        text = json.dumps(dataclasses.asdict(table))
        assert Costs.from_json(json.loads(text)) == table
        doubled = json.loads(text, parse_float=lambda ms: 2 * float(ms))
        assert Costs.from_json(doubled) == table.scaled(2.0)
    good = dataclasses.asdict(SLOW)
    for bad in ({"passes": {"2": 2.0}}, {"other": -1}, {"lookup": "nan"}, {"chain": {"1": -1}}):
        with pytest.raises((ValueError, KeyError, TypeError)):
            Costs.from_json({**good, **bad})
    with pytest.raises(ValueError, match="not a table of times"):
        Costs.from_json({**good, "passes": {**good["passes"], "8": float("inf")}})
    with pytest.raises(KeyError):
        Costs.from_json({})
    assert TREES.plain == 10.5
    assert TREES.verify(12) == pytest.approx(29.5) and TREES.verify(33) == float("inf")
    assert TREES.cycle(TreeShape(3, 3, 7)) == pytest.approx(1.0 + 2 * 0.8 + 22.0 + 1.0)
    assert SLOW.draft(GatedChain(2)) == pytest.approx(0.8)
