"""Options of training and calibrating a draft head. Needs no torch."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from fasteagle.errors import FasteagleError
from fasteagle.options import TAP_LAYERS_TEXT, option


@dataclasses.dataclass(frozen=True)
class TrainOptions:
    """Hyper-parameters; the defaults are the paper's where it names one."""

    lr: float = 3e-5
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.0
    clip: float = 0.5  # of the gradient's norm
    noise: float = 0.1  # uniform, added to the input features
    ce_weight: float = 0.1
    feature_weight: float = 1.0
    unroll: int = 1
    unroll_decay: float = 0.8
    batch_tokens: int = 4096
    steps: int = 2000
    warmup: int = 100
    draft_vocab_size: int = 16384
    loss_vocab_size: int = 8192  # of the draft vocabulary, its most frequent; drafting uses all
    init_scale: float = 0.02
    seed: int = 0

    def __post_init__(self) -> None:
        for name in (
            "lr",
            "clip",
            "batch_tokens",
            "steps",
            "unroll",
            "draft_vocab_size",
            "loss_vocab_size",
        ):
            if getattr(self, name) <= 0:
                raise FasteagleError(f"{name} {getattr(self, name)} is out of range: use > 0")

    def lr_at(self, step: int) -> float:
        """Linear warm-up, then a cosine down to a tenth."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        done = min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        return self.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainRun:
    """Where a run's text comes from and where its head goes."""

    data: tuple[Path, ...] = option(
        (), "JSONL of token ids the model wrote itself (repeatable).", kind="file"
    )
    prompts: Path | None = option(
        None, 'JSONL with {"turns": [...]} lines; the model answers them first.', kind="file"
    )
    answer_tokens: int = option(256, "Longest answer to those.")
    out: Path = option(text="Folder of the head.", kind="folder")
    resume: bool = option(False, "Continue the run in --out.")
    held_out: int = option(100, "Conversations to measure on.")
    max_len: int = option(640, "Longer conversations are cut.")
    every: int = option(200, "Steps between evaluations.")
    init: Path | None = option(None, "Begin from this head.", kind="existing folder")
    features: str = option(
        "cached",
        "Keep the target's features on disk, or compute them for every batch.",
        kind=("cached", "live"),
    )
    patience: int | None = option(None, "Stop after so many evaluations without gain.")

    def __post_init__(self) -> None:
        for name in ("held_out", "max_len", "every", "answer_tokens"):
            if getattr(self, name) < 1:
                flag = name.replace("_", "-")
                raise FasteagleError(f"{flag} {getattr(self, name)} is out of range: use >= 1")


@dataclasses.dataclass(frozen=True)
class CalibrateOptions:
    """The head to start from, text, time limit and output of a calibration."""

    head: str | None = option(None, "Head to begin from.  [default: the one chat would use]")
    tap_layers: tuple[int, ...] | None = option(None, TAP_LAYERS_TEXT, kind="numbers")
    data: Path | None = option(
        None,
        "JSONL of token ids the quantized model wrote.  [default: it writes some now]",
        kind="file",
    )
    tokens: int = option(50_000, "Of text to write.")
    minutes: float = option(30.0, "For all of it.")
    steps: int | None = option(
        None, "Of each of the two training runs.  [default: as many as fit into --minutes]"
    )
    out: Path | None = option(
        None, "Folder of the head.  [default: the user cache, where chat finds it]", kind="folder"
    )
    resume: bool = option(False, "Continue the run that was cut off.")

    def __post_init__(self) -> None:
        if self.tokens < 2_000:
            raise FasteagleError(
                f"tokens {self.tokens} are too few to learn from: use 2000 or more"
            )
        if not 0 < self.minutes < 10_000:
            raise FasteagleError(f"minutes {self.minutes} is out of range: use more than 0")
        if self.steps is not None and self.steps < 1:
            raise FasteagleError(f"steps {self.steps} is out of range: use 1 or more")
