"""Statistics of one answer: filled by the engine, read by the chat and the benchmark."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class Stats:
    """Counts and times of one answer; times are in seconds."""

    prompt_tokens: int = 0
    cached_tokens: int = 0  # tokens of the prompt that were in the KV cache
    new_tokens: int = 0
    passes: int = 0  # target passes after prefill
    drafted: int = 0  # verified nodes, without roots
    path_lengths: list[int] = dataclasses.field(default_factory=list)  # accepted tokens per pass
    ttft: float = 0.0  # start to first token, the prompts of answers before it included
    decode_seconds: float = 0.0  # first to last token
    cycle_seconds: list[float] = dataclasses.field(default_factory=list)  # of chunks
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    parts_timed: bool = True  # false where a whole cycle is replayed, and has no parts to time
    finish: str = ""  # "eos", "stop", "length", "context", or "" while running or interrupted

    def add_chunk(self, elapsed: float, ready: int) -> None:
        """Add a chunk, `elapsed` seconds after the first token; the first chunk has no cycle.

        Where `ready` others have come with it, all of them have equal parts of the time.
        """
        if ready:
            return
        n = self.passes - len(self.cycle_seconds)
        self.cycle_seconds += [(elapsed - self.decode_seconds) / max(1, n)] * n
        self.decode_seconds = elapsed

    def add_times(self, draft: float | None, verify: float | None) -> None:
        """Add the times of one cycle; None where its parts were not timed."""
        self.parts_timed = self.parts_timed and draft is not None and verify is not None
        self.draft_seconds += draft or 0.0
        self.verify_seconds += verify or 0.0

    @property
    def tok_s(self) -> float:
        """Tokens per second after the first one."""
        return (self.new_tokens - 1) / self.decode_seconds if self.decode_seconds > 0 else 0.0

    @property
    def tau(self) -> float:
        """Tokens per target pass after prefill, bonus included."""
        return (self.new_tokens - 1) / self.passes if self.passes else 1.0

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Share of passes that accepted at least 1, 2, ... drafted tokens."""
        deepest = max(self.path_lengths, default=0)
        n = len(self.path_lengths)
        return [sum(x >= d for x in self.path_lengths) / n for d in range(1, deepest + 1)]

    @property
    def accepted(self) -> int:
        """Number of drafted tokens that were accepted."""
        return sum(self.path_lengths)
