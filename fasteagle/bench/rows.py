"""Rows of the benchmark: the decoder that answers, what was measured, and its arithmetic."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

from fasteagle.bench.hf import hf_generate
from fasteagle.bench.latency import Chunk, token_latencies
from fasteagle.decoding.stats import Stats
from fasteagle.generate import Engine
from fasteagle.options import SamplingParams
from fasteagle.quant.scheme import Scheme
from fasteagle.shapes import AnyShape


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


class Decoder(Protocol):
    """One way to answer: `turn` gets a whole prompt, `restart` begins a new question."""

    def turn(self, prompt: list[int], max_new_tokens: int) -> Turn: ...

    def restart(self) -> None: ...


class EngineDecoder:
    """Decoder with our own engine; keeps the KV cache over the turns of a question."""

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


class HFDecoder:
    """Decoder with transformers' `generate` on our weights, with prompt lookup or without."""

    def __init__(
        self, model: Any, params: SamplingParams, eos_ids: frozenset[int], lookup: bool = False
    ) -> None:
        self.model, self.params, self.eos_ids = model, params, eos_ids
        self.lookup = lookup

    def restart(self) -> None:
        pass

    def turn(self, prompt: list[int], max_new_tokens: int) -> Turn:
        answer = hf_generate(
            self.model, prompt, self.params, max_new_tokens, self.eos_ids, self.lookup
        )
        return Turn(
            answer.tokens,
            answer.ttft,
            answer.seconds,
            answer.passes,
            first=answer.first,
            prompt_tokens=len(prompt),
            chunks=tuple(answer.chunks),
        )


class Spent:
    """Placeholder for the decoder of a finished row, whose model is no longer in memory."""

    def turn(self, prompt: list[int], max_new_tokens: int) -> Turn:
        raise AssertionError("this row has been measured")

    def restart(self) -> None:
        raise AssertionError("this row has been measured")


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
    tree: AnyShape | None = None
    auto: str | None = None  # what the tuner chose, and why
    auto_shares: str | None = None  # how many of the passes each tree had
    simulated_tau: float | None = None
    turns: list[Turn] = dataclasses.field(default_factory=list)
    peak_bytes: int = 0
    plain_rows: int | None = None

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
        if self.simulated_tau is not None:
            return self.simulated_tau * self.passes_s
        return self._later_tokens / self.seconds if self.seconds else 0.0

    @property
    def tau(self) -> float:
        return self.measured_tau if self.simulated_tau is None else self.simulated_tau

    @property
    def measured_tau(self) -> float:
        return self._later_tokens / self.passes if self.passes else 1.0

    @property
    def _later_tokens(self) -> int:
        """Tokens that `seconds` and passes account for: those after each answer's first ones."""
        return self.tokens - sum(turn.first for turn in self.turns)

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
        return [turn.stats for turn in self.turns if turn.stats and turn.stats.passes]

    @property
    def path_lengths(self) -> list[int]:
        """Accepted tokens of every drafted pass."""
        return [n for stats in self.stats for n in stats.path_lengths]

    @property
    def turn_rates(self) -> list[float]:
        """tok/s of each answer of at least two tokens."""
        timed = [turn for turn in self.turns if turn.seconds > 0]
        if self.simulated_tau is not None:
            return [self.simulated_tau * turn.passes / turn.seconds for turn in timed]
        return [(len(turn.tokens) - turn.first) / turn.seconds for turn in timed]

    @property
    def latencies(self) -> list[float]:
        """Seconds of every token after each answer's first ones; see `latency`."""
        chunks = [chunk for turn in self.turns for chunk in turn.chunks]
        if self.simulated_tau is not None:
            return [seconds / self.simulated_tau for _, seconds in chunks]
        return token_latencies(chunks)
