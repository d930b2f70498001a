"""One answer, from token ids to chunks of text, for chat, the Python API and the server."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator, Sequence

from fasteagle.answering.answer_logits import AnswerLogits, AnswerRequest, TokenLogprob
from fasteagle.answering.stream import Decoder, TextStream
from fasteagle.decoding.stats import Stats
from fasteagle.generate import Engine


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Result of one pass of the model: new tokens and text.

    `text` is final; it may end before `tokens` do, while a character or a stop string is
    incomplete. The first `accepted` tokens were proposed by the drafter, and the first `n_guessed`
    characters of `text` come from such tokens.
    """

    text: str
    tokens: tuple[int, ...] = ()
    accepted: int = 0
    n_guessed: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()

    def __bool__(self) -> bool:
        """Return whether it has anything: it has not where the answer waits for a pass."""
        return bool(self.tokens or self.text)


@dataclasses.dataclass(frozen=True)
class Answer:
    """Whole answer; `finish` is eos, stop, length or context, `seed` reproduces the text."""

    text: str
    tokens: list[int]
    stats: Stats
    seed: int
    logprobs: list[TokenLogprob]

    @classmethod
    def of(cls, chunks: Sequence[Chunk], stats: Stats, seed: int) -> Answer:
        """Return the answer that came in `chunks`."""
        return cls(
            "".join(chunk.text for chunk in chunks),
            [token for chunk in chunks for token in chunk.tokens],
            stats,
            seed,
            [entry for chunk in chunks for entry in chunk.logprobs],
        )

    @property
    def finish(self) -> str:
        return self.stats.finish

    def __str__(self) -> str:
        return self.text


class _StopStrings:
    """Search for the token that completes a stop string, with which the engine ends the answer.

    It goes token by token: the stop string that is complete first counts, and this must not depend
    on how many tokens a pass brings.
    """

    def __init__(self, decoder: Decoder, request: AnswerRequest) -> None:
        self.stream = TextStream(decoder, request.answer.stop)
        self._new: list[str] = []  # text of the tokens of the last pass

    def push(self, token: int) -> bool:
        """Add a token; return whether the answer ends with it."""
        self._new.append(self.stream.push([token]))
        return self.stream.stopped

    def take(self, n: int) -> tuple[str, str]:
        """Return the text of the first `n` tokens since the last call, and of the others."""
        new, self._new = self._new, []
        return "".join(new[:n]), "".join(new[n:])


def answer(
    engine: Engine, decoder: Decoder, request: AnswerRequest, stats: Stats | None = None
) -> Generator[Chunk]:
    """Yield the answer, one chunk for each pass; `engine.stats`, or `stats`, are filled.

    Where the engine's runner waits, empty chunks are yielded too: see `Engine.generate`.

    Closing the generator ends the answer.
    """
    stops = _StopStrings(decoder, request) if request.answer.stop else None
    stream = TextStream(decoder)
    logits = AnswerLogits(request)
    cycles = engine.generate(
        request.prompt,
        request.params,
        request.answer.max_new_tokens,
        request.eos_ids,
        processor=logits if logits.is_needed else None,
        speculate=request.speculate,
        is_last=stops.push if stops is not None else lambda token: False,
        stats=stats,
    )
    n_passes = n_logprobs = 0  # passes that drafted; log-probabilities yielded
    with contextlib.closing(cycles):
        for ids in cycles:
            if not ids:
                yield Chunk("")
                continue
            stats = engine.stats
            drafted = len(stats.path_lengths) > n_passes
            accepted = stats.path_lengths[-1] if drafted else 0
            n_passes = len(stats.path_lengths)
            if stops is None:
                guessed = stream.push(i for i in ids[:accepted] if i not in request.eos_ids)
                rest = stream.push(i for i in ids[accepted:] if i not in request.eos_ids)
            else:
                guessed, rest = stops.take(accepted)
            logprobs = tuple(logits.logprobs[n_logprobs:])
            n_logprobs += len(logprobs)
            yield Chunk(guessed + rest, tuple(ids), accepted, len(guessed), logprobs)
    left = stream.finish() if stops is None else stops.stream.finish()
    if left:
        yield Chunk(left)
