"""Surroundings in which drafting is timed."""

from __future__ import annotations

import torch

from fasteagle.compile.measurement import Measurement
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.generate import Engine
from fasteagle.shapes import TreeShape
from helpers import captured_engine, random_head


def test_a_pass_goes_before_a_timed_draft(target, monkeypatch):
    """It leaves the CPU's cache as the pass of a real cycle does."""
    engine, rows = Engine(target, 512), []
    engine.use(EagleDrafter(random_head(target), TreeShape(3, 3, 8)))
    verify = Measurement.verify
    monkeypatch.setattr(Measurement, "verify", lambda self, T: rows.append(T) or verify(self, T))
    assert Measurement(engine, engine.drafter).draft(engine.drafter.shape) > 0
    assert rows == [1]


def test_each_timed_run_begins_at_the_same_place(target):
    engine = captured_engine(target, 512)
    place = engine.state.seq_len
    least, most = place + 1000, place * 0

    def work():
        least.copy_(torch.minimum(least, place))
        most.copy_(torch.maximum(most, place))
        place.add_(3)

    Measurement(engine, None)._timed(work, None)
    assert least == most > 0
