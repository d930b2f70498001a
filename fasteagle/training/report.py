"""The result of `calibrate-head`: candidates, their speeds, the table and the record."""

from __future__ import annotations

import copy
import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from fasteagle.compile.blocks import compile_now
from fasteagle.compile.graphs import make_engine
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.generate import Engine
from fasteagle.loading.source import has_native, quantize_head_
from fasteagle.model import EagleHead
from fasteagle.options import DraftOptions, SamplingParams
from fasteagle.prompts import Conversation
from fasteagle.quant.scheme import Scheme
from fasteagle.training.calibrate import Gain
from fasteagle.training.held_out import HeldOut

SPEED_PROMPTS, SPEED_TOKENS = 6, 64


@dataclasses.dataclass
class Candidate:
    """A head after some stages, measured with the weights it would run with."""

    name: str
    head: EagleHead
    held: HeldOut
    kept: bool = True
    gain: Gain | None = None

    def as_dict(self) -> dict[str, Any]:
        interval = None if self.gain is None else [self.gain.low, self.gain.high]
        return {"stage": self.name, "kept": self.kept, "interval": interval, **self.held.as_dict()}

    def line(self) -> str:
        """One line for the user, while it runs."""
        text = f"{self.name}: tau {self.held.tau:.3f}, n-alpha {alphas(self.held.alphas)}"
        if self.gain is None:
            return text
        return f"{text}, {span(self.gain)}: {'kept' if self.kept else 'not kept'}"


def alphas(values: Sequence[float]) -> str:
    return " ".join(f"{value:.3f}" for value in values)


def span(gain: Gain) -> str:
    return f"{gain.tau:+.3f} ({gain.low:+.3f} .. {gain.high:+.3f})"


def ready_head(head: EagleHead, engine: Engine, scheme: Scheme | None) -> EagleHead:
    """A copy of `head` that uses the engine's target, quantized if `scheme` is given."""
    ready = copy.deepcopy(head)
    ready.requires_grad_(False)
    ready.borrow(engine.model, engine.max_seq_len)
    if scheme is not None:
        quantize_head_(ready, scheme, has_native(engine.model))
    return ready


def draft_with(engine: Engine, head: EagleHead, scheme: Scheme | None) -> None:
    """Let `engine` draft with a copy of `head`, in the default tree, compiled."""
    shape = DraftOptions().tree_shape(quantized_on_cpu=engine.on_cpu)
    drafter = EagleDrafter(ready_head(head, engine, scheme), shape, engine.max_seq_len)
    engine.use(drafter)
    compile_now(engine)


class Speeds:
    """tok/s on held-out prompts, measured in turn: each head in 16 bits and quantized."""

    def __init__(
        self,
        engine: Engine,
        candidates: Sequence[Candidate],
        held: Sequence[Conversation],
        head_scheme: Scheme,
    ) -> None:
        self.head_scheme = head_scheme
        engines = {("plain", False): make_engine(engine.model, engine.max_seq_len)}
        for candidate in candidates:
            for quantized in (False, True):
                made = make_engine(engine.model, engine.max_seq_len)
                draft_with(made, candidate.head, head_scheme if quantized else None)
                engines[candidate.name, quantized] = made
        self.of: dict[tuple[str, bool], list[float]] = {way: [] for way in engines}
        for conversation in [held[0], *held[:SPEED_PROMPTS]]:  # the first one twice: to warm up
            prompt = conversation.ids[: conversation.prompt_len]
            for way, one in engines.items():
                one.restart()
                for _ in one.generate(prompt, SamplingParams(), SPEED_TOKENS):
                    pass
                self.of[way].append(one.stats.tok_s)
        self.of = {way: rates[1:] for way, rates in self.of.items()}

    def median(self, name: str, quantized: bool = False) -> float:
        return statistics.median(self.of[name, quantized])

    def shown(self, name: str, quantized: bool = False) -> str:
        """The median in a table; empty for heads that were not measured."""
        return f"{self.median(name, quantized):.1f}" if (name, quantized) in self.of else ""

    def quantized_is_faster(self, name: str) -> bool:
        """Whether a head is faster with quantized weights, by the median ratio over the prompts."""
        pairs = zip(self.of[name, True], self.of[name, False], strict=True)
        return statistics.median(a / b for a, b in pairs if b > 0) > 1


def show(
    candidates: Sequence[Candidate],
    unquantized: dict[str, Any] | None,
    speeds: Speeds,
    best: Candidate,
    minutes: float,
) -> None:
    """The table, on stderr."""
    quantized = f"tok/s, {speeds.head_scheme.name} head"
    table = Table(
        "stage",
        "kept",
        "tau",
        "n-alpha",
        "gain in tau (95 %)",
        "tok/s, 16-bit head",
        quantized,
        box=None,
        pad_edge=False,
    )
    if unquantized is not None:
        table.add_row(
            "i, unquantized target", "", f"{unquantized['tau']:.3f}", alphas(unquantized["alphas"])
        )
    for c in candidates:
        table.add_row(
            c.name,
            "yes" if c.kept else "no",
            f"{c.held.tau:.3f}",
            alphas(c.held.alphas),
            "" if c.gain is None else span(c.gain),
            speeds.shown(c.name),
            speeds.shown(c.name, True),
        )
    console = Console(stderr=True, width=150)
    console.print(table)
    console.print(
        f"plain {speeds.median('plain'):.1f} tok/s; written: {best.name}; {minutes:.1f} minutes"
    )


def record(candidates: Sequence[Candidate], speeds: Speeds) -> dict[str, Any]:
    """Stages and speeds for the JSON report."""
    tok_s: dict[bool, dict[str, float]] = {False: {}, True: {}}
    for name, quantized in speeds.of:
        tok_s[quantized][name] = round(speeds.median(name, quantized), 1)
    return {
        "stages": [c.as_dict() for c in candidates],
        "plain_tok_s": tok_s[False].pop("plain"),
        "tok_s": tok_s[False],
        "tok_s_quantized_head": tok_s[True],
    }
