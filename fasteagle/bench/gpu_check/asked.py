"""Figures that a lent card is judged by, each beside what is asked of it.

At the shape of a 33B model in int4: cards with 3 to 5 TB/s are bound by launches at 7B. A figure
that is missed is recorded, and is no failure of its stage.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from fasteagle.bench.gpu_check.stage import Context

MODEL = "vicuna-33b"
CARDS = "an H100 or H200"


@dataclasses.dataclass(frozen=True)
class Asked:
    """A figure and its limit."""

    what: str
    limit: float
    at_least: bool = False  # else at most
    share: bool = False  # shown in percent

    def met(self, value: float) -> bool:
        return value >= self.limit if self.at_least else value <= self.limit

    def text(self, value: float) -> str:
        return f"{100 * value:.1f} %" if self.share else f"{value:.2f}"

    @property
    def goal(self) -> str:
        limit = f"{100 * self.limit:g} %" if self.share else f"{self.limit:g}"
        return f"{'>=' if self.at_least else '<='} {limit}"


VERIFY = {16: Asked("verify(16) / decode(1)", 1.15), 32: Asked("verify(32) / decode(1)", 1.4)}
PLAIN = Asked("plain, share of the copy bandwidth", 0.7, at_least=True, share=True)
EAGLE = Asked("eagle at tau 3.6 / plain", 2.5, at_least=True)
GAPS = Asked("gaps", 0.05, share=True)  # of a cycle


def judge(context: Context, title: str, figures: Mapping[Asked, float]) -> None:
    """Enter figures beside those asked for: a line each, and one table of the stage."""
    entered = context.found.get("asked", [])
    for asked, value in figures.items():
        met = asked.met(value)
        entered = [*entered, _entry(asked, value, met)]
        context.save(asked=entered)
        verdict = "met" if met else "missed"
        context.say(f"{title}: {asked.what} {asked.text(value)}, asked {asked.goal}: {verdict}")
    rows = [[e["what"], e["text"], e["asked"], "yes" if e["met"] else "no"] for e in entered]
    columns = ["figure", "measured", f"asked of {CARDS}", "met"]
    context.table(f"{title}: measured beside what is asked", columns, rows)


def _entry(asked: Asked, value: float, met: bool) -> dict[str, object]:
    return {
        "what": asked.what,
        "measured": round(value, 4),
        "text": asked.text(value),
        "asked": asked.goal,
        "met": met,
    }
