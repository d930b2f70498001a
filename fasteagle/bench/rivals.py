"""Drafters that only the benchmark has, by the names of their rows."""

from __future__ import annotations

from pathlib import Path

from fasteagle.bench.early_exit import EXIT_SHAPE, early_exit_drafter
from fasteagle.bench.lookahead import LOOKAHEAD_SHAPE, LookaheadDrafter
from fasteagle.bench.medusa import MEDUSA_SHAPE, MedusaDrafter, load_medusa
from fasteagle.drafting.base import Drafter
from fasteagle.generate import Engine
from fasteagle.shapes import AnyShape


def rival_shape(kind: str) -> AnyShape:
    """Of the tree of one of `row_spec.RIVALS`."""
    shapes: dict[str, AnyShape] = {
        "early-exit": EXIT_SHAPE,
        "lookahead": LOOKAHEAD_SHAPE,
        "medusa": MEDUSA_SHAPE,
    }
    return shapes[kind]


def rival(kind: str, engine: Engine, medusa: Path | None) -> Drafter:
    """The drafter of one of `row_spec.RIVALS`; `medusa` holds the heads of that row."""
    config = engine.model.config
    if kind == "early-exit":
        return early_exit_drafter(engine)
    if kind == "lookahead":
        return LookaheadDrafter(config.vocab_size, engine.device)
    assert kind == "medusa" and medusa is not None, "checked with the options"
    return MedusaDrafter(*load_medusa(medusa, config.dim), engine.model)
