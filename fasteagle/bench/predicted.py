"""Predicted speeds of greedy decoding on a card, with drafts and without."""

from __future__ import annotations

import dataclasses

from fasteagle.bench.roofline import CapturedCycle
from fasteagle.config import HeadConfig
from fasteagle.shapes import AnyShape


@dataclasses.dataclass(frozen=True)
class Speeds:
    """Predicted tokens per second of all sequences, and milliseconds of the passes behind them."""

    plain: float
    drafted: float
    in_turn: float  # the same, where the draft head runs over one sequence after another
    cycle_ms: float
    ratio: float  # of a pass over the tree and one over a row


def predicted_speeds(cycle: CapturedCycle, head: HeadConfig, tree: AnyShape, tau: float) -> Speeds:
    """Return the speeds of greedy decoding without drafts, and with `tau` tokens per cycle."""
    work, n = cycle.work, cycle.work.sequences
    alone = dataclasses.replace(work, sequences=1)
    one, rows = (cycle.ms(work.verifying(T)) for T in (1, tree.rows))
    rest = cycle.ms([work.finishing])
    together, each = (cycle.ms(load.drafting(head, tree)) for load in (work, alone))
    total, in_turn = (rows + drafting + rest for drafting in (together, n * each))
    plain, drafted, turns = (1e3 * n * t for t in (1 / (one + rest), tau / total, tau / in_turn))
    return Speeds(plain, drafted, turns, total, rows / one)
