"""Drafters that only the benchmark has, by the names of their rows; the core knows none of them."""

from __future__ import annotations

from pathlib import Path

from fasteagle.bench.rivals.lookahead import LOOKAHEAD_SHAPE, LookaheadDrafter
from fasteagle.bench.rivals.medusa import MEDUSA_SHAPE, MedusaDrafter, load_medusa
from fasteagle.drafting.base import Drafter
from fasteagle.generate import Engine
from fasteagle.shapes import AnyShape

SHAPES: dict[str, AnyShape] = {"lookahead": LOOKAHEAD_SHAPE, "medusa": MEDUSA_SHAPE}


def rival(kind: str, engine: Engine, medusa: Path | None) -> Drafter:
    """Return the drafter of one of `row_spec.RIVALS`; `medusa` is the file of that row's heads."""
    config = engine.model.config
    if kind == "lookahead":
        return LookaheadDrafter(config.vocab_size, engine.device)
    assert kind == "medusa" and medusa is not None, "checked with the options"
    return MedusaDrafter(*load_medusa(medusa, config.dim), engine.model)
