"""One answer: token ids in, chunks of text out. What chat, the Python API and the server share."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Mapping, Sequence

from fasteagle.generate import Engine
from fasteagle.logits import AnswerLogits, TokenLogprob, TokenMask
from fasteagle.options import AnswerOptions, SamplingParams
from fasteagle.stream import Decoder, TextStream


@dataclasses.dataclass(frozen=True)
class AnswerRequest:
    """What to answer and how. `n_top` None: no log-probabilities."""

    prompt: Sequence[int]
    params: SamplingParams
    answer: AnswerOptions
    eos_ids: frozenset[int]
    bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    mask: TokenMask | None = None
    n_top: int | None = None
    speculate: bool = True


@dataclasses.dataclass(frozen=True)
class Chunk:
    """What one pass of the model has brought.

    `text` will not change any more; it may lag behind `tokens`, whose characters or stop strings
    are not complete. The first `accepted` tokens were guessed by the drafter, and the first
    `n_guessed` characters of `text` come from such tokens.
    """

    text: str
    tokens: tuple[int, ...] = ()
    accepted: int = 0
    n_guessed: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()


def answer(
    engine: Engine,
    decoder: Decoder,
    request: AnswerRequest,
    check: Callable[[], None] = lambda: None,
) -> Generator[Chunk]:
    """The answer, a chunk for each pass; statistics in `engine.stats`.

    Closing it ends the answer. `check` is called before every pass and may raise.
    """
    stream = TextStream(decoder, request.answer.stop)
    logits = AnswerLogits(request.bias, request.mask, request.n_top)
    cycles = engine.generate(
        request.prompt,
        request.params,
        request.answer.max_new_tokens,
        request.eos_ids,
        processor=logits if logits.is_needed else None,
        speculate=request.speculate,
        check=check,
    )
    n_passes = n_logprobs = 0  # that drafted; given out
    with contextlib.closing(cycles):
        for ids in cycles:
            stats = engine.stats
            drafted = len(stats.path_lengths) > n_passes
            accepted = stats.path_lengths[-1] if drafted else 0
            n_passes = len(stats.path_lengths)
            guessed = stream.push(i for i in ids[:accepted] if i not in request.eos_ids)
            rest = stream.push(i for i in ids[accepted:] if i not in request.eos_ids)
            found = tuple(logits.logprobs[n_logprobs:])
            n_logprobs += len(found)
            yield Chunk(guessed + rest, tuple(ids), accepted, len(guessed), found)
            if stream.stopped:
                stats.finish = "stop"
                break
            check()
    left = stream.finish()
    if left:
        yield Chunk(left)
