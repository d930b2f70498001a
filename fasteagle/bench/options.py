"""Options of measuring quality; needs no torch."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from fasteagle.errors import FasteagleError
from fasteagle.option_fields import option
from fasteagle.quant.scheme import check_precision


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
