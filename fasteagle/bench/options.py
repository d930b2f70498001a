"""Options of measuring speed and quality; needs no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from fasteagle.bench.row_spec import RowSpec, parse_rows
from fasteagle.errors import FasteagleError
from fasteagle.option_fields import option
from fasteagle.options import DEFAULT_MODEL, DraftOptions, SamplingParams
from fasteagle.quant.scheme import check_precision, is_scheme_name

DEFAULT_ROWS = ("hf", "plain", "eagle")
PRECISIONS = ("auto", "bf16", "fp16", "fp32", "int8", "int4", "a scheme like int4-g64-hqq")


@dataclasses.dataclass(frozen=True)
class EvalOptions:
    """Text, precisions and windows of a measurement."""

    text: Path = option(text="Text file to predict.", kind="file")
    precisions: tuple[str, ...] = option(
        ("bf16", "int8", "int4"),
        "Comma list: bf16, fp32, int8, int4, schemes like int4-g64-hqq, int4-torchao.",
        flag="--precision",
        kind="comma list",
    )
    tokens: int = option(8192, "Of the text, at most.")
    window: int = option(512, "Tokens predicted in one go.")

    def __post_init__(self) -> None:
        if not self.precisions:
            raise FasteagleError("precision '' names none: give for example int8,int4")
        for precision in self.precisions:
            check_precision(precision)
        if self.window < 16:
            raise FasteagleError(f"window {self.window} is too short: use 16 tokens or more")
        if self.tokens < self.window:
            raise FasteagleError(
                f"tokens {self.tokens} do not fill one window of {self.window}: use more"
            )


@dataclasses.dataclass(frozen=True)
class BenchOptions:
    """Rows, precisions, prompts and settings of a run."""

    model: str = DEFAULT_MODEL
    rows: tuple[str, ...] = DEFAULT_ROWS
    precisions: tuple[str, ...] = ("auto",)
    data: Path | None = None
    limit: int | None = None
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    compile: bool = True
    draft: DraftOptions = dataclasses.field(default_factory=DraftOptions)
    medusa: Path | None = None  # trained heads of the medusa row
    tree_value: str = "cumulative"  # "confidence": EAGLE-2's ablation without cumulative scores
    rerank: bool = True  # False: its ablation that keeps nodes in the order of drafting
    simulate_tau: float | None = None  # of eagle rows on random weights; see `simulate`

    @property
    def specs(self) -> tuple[RowSpec, ...]:
        return parse_rows(self.rows, self.draft)

    def __post_init__(self) -> None:
        for name, values in (("rows", self.rows), ("precision", self.precisions)):
            if not values:
                raise FasteagleError(f"{name} '' names none: give one, or several as A,B")
        for precision in self.precisions:
            if not is_scheme_name(precision.removesuffix("-torchao")):
                _check_known("precision", precision, PRECISIONS)
        _check_known("tree value", self.tree_value, ("cumulative", "confidence"))
        self.params  # noqa: B018 - checks them
        if self.medusa is None and RowSpec("medusa") in self.specs:
            raise FasteagleError(
                "row medusa needs trained heads: add --medusa FILE (scripts/train_medusa.py "
                "makes one)"
            )
        if self.limit is not None and self.limit < 1:
            raise FasteagleError(f"limit {self.limit} is out of range: use 1 or more")
        if self.max_new_tokens < 2:
            raise FasteagleError(
                f"max-new-tokens {self.max_new_tokens} is out of range: a rate needs 2 or more"
            )

    @property
    def params(self) -> SamplingParams:
        """Parameters by which answers are sampled."""
        return SamplingParams(self.temperature, top_p=self.top_p, seed=self.seed)


def _check_known(what: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise FasteagleError(f"unknown {what} {value!r}: use {', '.join(known)}")
