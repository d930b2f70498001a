"""The stages of the check, in their order, and how long each may take. Needs no torch."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from fasteagle.errors import FasteagleError, suggest

DRY_SECONDS = 400  # that a stage may take at least on a dry run


@dataclasses.dataclass(frozen=True)
class Stage:
    """One part of the check. `name` is that of its module."""

    name: str
    what: str
    seconds: float  # at most; of one that takes the rest, what is planned for it
    needed: bool = False  # the others have no meaning where this one fails
    takes_rest: bool = False  # may take the time that is left, instead of `seconds`

    def limit(self, left: float, dry_run: bool) -> float:
        """Seconds that it may take of those that are left."""
        # How long a dry run takes says nothing, and the machine may be busy.
        seconds = max(self.seconds, DRY_SECONDS) if dry_run else self.seconds
        return left if self.takes_rest else min(seconds, left)


# Limits that leave time for cold compilers; together with the last stage's plan 28 minutes.
STAGES = (
    Stage("start", "versions, one kernel, one small capture", 60, needed=True),
    Stage("gpu_tests", "tests marked gpu", 270),
    Stage("captures", "1,000 captures of real cycles", 120),
    Stage("kernels", "linears of 7B and 70B alone", 210),
    Stage("profile", "what a replayed cycle of 33B and of 7B int4 consists of", 210),
    Stage("speed", "tokens per second of 7B at bf16, int8 and int4", 330),
    Stage("large", "passes and tokens per second of 33B and 70B at int4", 210),
    Stage("invariance", "rows at 7B width have the same bits in any company", 120),
    Stage("cold_start", "seconds to the first token, caches empty and warm", 90),
    Stage("head", "the default model writes text and trains a draft head", 60, takes_rest=True),
)
STAGE_NAMES = tuple(stage.name for stage in STAGES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """What to run. Raises `FasteagleError` for stages that are not known."""

    out: Path
    stages: tuple[str, ...] = STAGE_NAMES
    minutes: float = 30.0
    dry_run: bool = False  # on the CPU, with tiny shapes
    model: str | None = None  # of the stage `head`; None: the default model

    def __post_init__(self) -> None:
        for name in self.stages:
            if name not in STAGE_NAMES:
                known = ", ".join(STAGE_NAMES)
                raise FasteagleError(
                    f"unknown stage {name!r}{suggest(name, STAGE_NAMES)}: use {known}"
                )
        if not self.stages:
            raise FasteagleError(f"no stage was named: use {', '.join(STAGE_NAMES)}")
        if not 0 < self.minutes < 10_000:
            raise FasteagleError(f"minutes {self.minutes:g} is out of range: use more than 0")

    @property
    def chosen(self) -> list[Stage]:
        """The stages to run, in the plan's order."""
        return [stage for stage in STAGES if stage.name in self.stages]


def stage_command(
    stage: Stage, options: CheckOptions, results: Path, seconds: float
) -> Sequence[str]:
    """What runs a stage in a process of its own; it writes `results` as it goes."""
    command = [sys.executable, "-m", "fasteagle.bench.gpu_check.stage", stage.name]
    command += ["--results", str(results), "--out", str(options.out), "--seconds", f"{seconds:g}"]
    command += ["--dry-run"] if options.dry_run else []
    return [*command, "--model", options.model] if options.model else command
