"""Surroundings in which drafting is timed."""

from __future__ import annotations

from fasteagle.compile.measurement import Measurement
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.generate import Engine
from fasteagle.shapes import TreeShape
from helpers import random_head


def test_a_pass_goes_before_a_timed_draft(target, monkeypatch):
    """It leaves the CPU's cache as the pass of a real cycle does."""
    engine, rows = Engine(target, 512), []
    engine.use(EagleDrafter(random_head(target), TreeShape(3, 3, 8)))
    verify = Measurement.verify
    monkeypatch.setattr(Measurement, "verify", lambda self, T: rows.append(T) or verify(self, T))
    assert Measurement(engine, engine.drafter).draft(engine.drafter.shape) > 0
    assert rows == [1]
