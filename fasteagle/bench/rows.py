"""Rows of the benchmark: the decoder that answers, what was measured, and its arithmetic."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from fasteagle.decoding.stats import Stats
from fasteagle.generate import Engine
from fasteagle.options import SamplingParams
from fasteagle.quant.scheme import Scheme
from fasteagle.shapes import AnyShape

Chunk = tuple[int, float]  # tokens in it, seconds since the chunk before


@dataclasses.dataclass(frozen=True)
class Turn:
    """Measured answer; times in seconds."""

    tokens: list[int]
    ttft: float
    seconds: float  # first to last token
    passes: int  # target passes after prefill
    stats: Stats | None = None  # of our own engine
    first: int = 1  # tokens that came with the first one, at `ttft`
    prompt_tokens: int = 0
    chunks: tuple[Chunk, ...] = ()  # after the first


class Decoder:
    """One way to answer: `turn` gets a whole prompt, `restart` begins a new question."""

    engine: Engine | None = None  # where it is ours
    tree: AnyShape | None = None  # that was drafted
    auto: str | None = None  # what the policy chose, and why
    auto_shares: str | None = None  # share of the passes that each tree had
    peak_bytes: int | None = None  # of the last turn, where another process decodes

    def turn(self, prompt: list[int], max_new_tokens: int) -> Turn:
        raise NotImplementedError

    def restart(self) -> None:
        """Do nothing: this decoder keeps nothing of a conversation."""

    def close(self) -> None:
        """Let go of the model, and note what was drafted."""


class EngineDecoder(Decoder):
    """Decoder with an engine of ours; keeps the KV cache over the turns of a question.

    It times the engine alone, without the making of text from tokens.
    """

    engine: Engine

    def __init__(self, engine: Engine, params: SamplingParams, eos_ids: frozenset[int]) -> None:
        self.engine, self.params, self.eos_ids = engine, params, eos_ids

    def restart(self) -> None:
        self.engine.restart()

    def turn(self, prompt: list[int], max_new_tokens: int) -> Turn:
        chunks = list(self.engine.generate(prompt, self.params, max_new_tokens, self.eos_ids))
        stats = self.engine.stats
        sizes = (len(ids) for ids in chunks[1:])
        return Turn(
            [token for ids in chunks for token in ids],
            stats.ttft,
            stats.decode_seconds,
            stats.passes,
            stats,
            prompt_tokens=len(prompt),
            chunks=tuple(zip(sizes, stats.cycle_seconds, strict=True)),
        )

    def close(self) -> None:
        drafter = self.engine.drafter
        if drafter is not None:
            self.tree = drafter.shape
            if policy := drafter.policy:
                self.auto, self.auto_shares = policy.explain(), policy.shares()
        del self.engine


@dataclasses.dataclass
class Row:
    """Line of the table, while it is being measured.

    With `simulated_tau` the weights are random: cycle times are measured, and every number that
    depends on how many tokens a cycle yields is derived from that tau instead.
    """

    name: str
    precision: str
    decoder: Decoder
    weight_bytes: int  # read by every pass
    kv_bytes: int = 0  # of one cached position
    scheme: Scheme | None = None  # None: dense
    dtype: str = ""
    simulated_tau: float | None = None
    questions: list[list[Turn]] = dataclasses.field(default_factory=list)
    peak_bytes: int = 0
    barriers: list[float] = dataclasses.field(default_factory=list)  # by question

    @property
    def turns(self) -> list[Turn]:
        return [turn for turns in self.questions for turn in turns]

    @property
    def simulated(self) -> bool:
        return self.simulated_tau is not None

    @property
    def tokens(self) -> int:
        return sum(len(turn.tokens) for turn in self.turns)

    @property
    def seconds(self) -> float:
        return sum(turn.seconds for turn in self.turns)

    @property
    def passes(self) -> int:
        """Target passes after prefill."""
        return sum(turn.passes for turn in self.turns)

    @property
    def passes_s(self) -> float:
        """Target passes, which are cycles, per second."""
        return self.passes / self.seconds if self.seconds else 0.0

    @property
    def tok_s(self) -> float:
        return self._rate(self.turns) or 0.0

    @property
    def turn_rates(self) -> list[list[float | None]]:
        """tok/s of each turn of each question; None for answers of one token."""
        return [[self._rate([turn]) for turn in turns] for turns in self.questions]

    def _rate(self, turns: Sequence[Turn]) -> float | None:
        """Return tok/s after each answer's first tokens; None where no time has passed."""
        seconds = sum(turn.seconds for turn in turns)
        if not seconds:
            return None
        if self.simulated_tau is not None:
            return self.simulated_tau * sum(turn.passes for turn in turns) / seconds
        return _later_tokens(turns) / seconds

    @property
    def tau(self) -> float:
        return self.measured_tau if self.simulated_tau is None else self.simulated_tau

    @property
    def measured_tau(self) -> float:
        return _later_tokens(self.turns) / self.passes if self.passes else 1.0

    @property
    def context(self) -> float:
        """Positions in the cache, averaged over the passes."""
        seen = sum(turn.passes * (turn.prompt_tokens + len(turn.tokens) / 2) for turn in self.turns)
        return seen / self.passes if self.passes else 0.0

    @property
    def pass_bytes(self) -> float:
        """Bytes that a pass of the target reads: weights, and keys and values of the context."""
        return self.weight_bytes + self.kv_bytes * self.context

    @property
    def stats(self) -> list[Stats]:
        """Statistics of the turns that our own engine decoded."""
        return [turn.stats for turn in self.turns if turn.stats]

    @property
    def path_lengths(self) -> list[int]:
        """Accepted tokens of every drafted pass."""
        return [n for stats in self.stats for n in stats.path_lengths]

    @property
    def latencies(self) -> list[float]:
        """Seconds of every token as a reader sees them, after each answer's first chunk.

        A cycle's tokens arrive together: each counts as the time since the chunk before, divided
        by the tokens in the chunk, so that an answer's latencies add up to its decoding time.
        """
        chunks = [chunk for turn in self.turns for chunk in turn.chunks]
        if self.simulated_tau is not None:
            return [seconds / self.simulated_tau for _, seconds in chunks]
        return [seconds / n for n, seconds in chunks for _ in range(n)]


def _later_tokens(turns: Sequence[Turn]) -> int:
    """Return the tokens that seconds and passes account for: those after the first ones."""
    return sum(len(turn.tokens) - turn.first for turn in turns)


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the smallest value that at least `share` (0 .. 1) of all do not exceed, or None."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
