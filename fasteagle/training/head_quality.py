"""Draft heads on text that the target wrote: acceptance by depth, and by the head's confidence."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from fasteagle.generate import Engine
from fasteagle.loading.heads.find import LoadedHead
from fasteagle.prompts import Conversation
from fasteagle.training.data import LiveFeatures
from fasteagle.training.held_out import TENTHS, HeldOut, evaluate, ready_head


@dataclasses.dataclass(frozen=True)
class HeadQuality:
    """Quality of one draft head on one text."""

    name: str
    algorithm: str
    held: HeldOut


def measure(
    engine: Engine, heads: Sequence[LoadedHead], conversations: Sequence[Conversation]
) -> list[HeadQuality]:
    """Measure chains of five from every position of the answers; exact on greedy text."""
    qualities = []
    for loaded in heads:
        aux_layers = loaded.head.config.aux_layers
        text = LiveFeatures(engine, conversations, aux_layers)
        ready = ready_head(loaded.head, engine)
        held = evaluate(ready, engine.model, text, list(range(len(text))))
        qualities.append(HeadQuality(loaded.origin, "EAGLE-3" if aux_layers else "EAGLE-1/2", held))
    return qualities


def tables(qualities: Sequence[HeadQuality]) -> tuple[list[tuple[str, ...]], ...]:
    """Return acceptance by depth, and by confidence: headings, then a line for each draft head."""
    depth = len(qualities[0].held.alphas)
    by_depth = [
        ("head", "algorithm", *(f"{n}-alpha" for n in range(depth)), "tau of a chain"),
        *(
            (q.name, q.algorithm, *(f"{a:.3f}" for a in q.held.alphas), f"{q.held.tau:.2f}")
            for q in qualities
        ),
    ]
    by_confidence = [
        ("accepted, by confidence", *(f"{n / TENTHS:.1f}" for n in range(TENTHS))),
        *((q.name, *(_share(tenth) for tenth in q.held.by_confidence)) for q in qualities),
    ]
    return by_depth, by_confidence


def _share(tenth: tuple[int, int]) -> str:
    drafted, accepted = tenth
    return f"{accepted / drafted:.2f}" if drafted else "-"
