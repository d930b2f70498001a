"""Options of measuring speed and quality; needs no torch."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from fasteagle.bench.row_spec import ROW_NAMES, RowSpec, parse_rows
from fasteagle.errors import FasteagleError
from fasteagle.option_fields import check, option
from fasteagle.options import DEFAULT_MODEL, DraftOptions, SamplingParams
from fasteagle.quant.scheme import check_precision

PRECISIONS = ("auto", "bf16", "fp16", "fp32", "int8", "int4", "a scheme like int4-g64-hqq")


@dataclasses.dataclass(frozen=True)
class EvalOptions:
    """Text, precisions and windows of a measurement."""

    text: Path = option(text="Text to predict.", kind="file")
    precisions: tuple[str, ...] = option(
        ("bf16", "int8", "int4"),
        "Comma list: bf16, fp32, int8, int4, schemes like int4-g64-hqq, int4-torchao.",
        flag="--precision",
        kind="comma list",
    )
    tokens: int = option(8192, "Number of tokens to evaluate.")
    window: int = option(512, "Tokens per window.")

    def __post_init__(self) -> None:
        if not self.precisions:
            raise FasteagleError("precision '' is empty: give for example int8,int4")
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
    rows: tuple[str, ...] = option(
        ("hf", "plain", "eagle"),
        f"Comma list of {', '.join(ROW_NAMES)}, or eagle@DEPTH/TOPK/NODES; ROW=HEAD drafts with a "
        "head of its own.",
        kind="comma list",
    )
    precisions: tuple[str, ...] = ("auto",)
    data: Path | None = option(
        None, 'JSONL: {"turns": ["text", ...]}.  [default: ten built-in]', kind="file"
    )
    limit: int | None = option(None, "Only the first N questions.", least=1)
    max_new_tokens: int = option(128, "Longest answer in tokens, at least 2.", least=2)
    temperature: float = option(0.0)
    top_p: float = option(1.0)
    seed: int = option(0)
    compile: bool = option(True, flag="--compile/--no-compile")
    draft: DraftOptions = dataclasses.field(default_factory=DraftOptions)
    medusa: Path | None = option(
        None, "Heads of the medusa row, by scripts/train_medusa.py.", kind="file"
    )
    tree_value: str = option(
        "cumulative",
        "confidence: EAGLE-2's ablation without cumulative scores.",
        kind=("cumulative", "confidence"),
    )
    rerank: bool = option(
        True, "--no-rerank is EAGLE-2's ablation: nodes as drafted.", flag="--rerank/--no-rerank"
    )
    simulate_tau: float | None = option(None, "Tokens per cycle of eagle rows on dummy weights.")

    @property
    def specs(self) -> tuple[RowSpec, ...]:
        return parse_rows(self.rows, self.draft)

    def __post_init__(self) -> None:
        check(self)
        for name, values in (("rows", self.rows), ("precision", self.precisions)):
            if not values:
                raise FasteagleError(f"{name} '' is empty: give one, or several as A,B")
        for precision in self.precisions:
            check_precision(precision)
        self.params  # noqa: B018 - checks them
        if self.medusa is None and RowSpec("medusa") in self.specs:
            raise FasteagleError(
                "row medusa needs trained heads: add --medusa FILE (scripts/train_medusa.py "
                "makes one)"
            )

    @property
    def params(self) -> SamplingParams:
        """Parameters by which answers are sampled."""
        return SamplingParams(self.temperature, top_p=self.top_p, seed=self.seed)
