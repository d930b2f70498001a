"""Several answers at once, from token ids to chunks of text."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import NamedTuple

from fasteagle.answering.answer import AnswerRequest, Chunk, answer
from fasteagle.answering.stream import Decoder
from fasteagle.batch import Batch
from fasteagle.decoding.stats import Stats
from fasteagle.generate import Engine


class Answered(NamedTuple):
    """Whole answer of a request."""

    chunks: list[Chunk]
    stats: Stats


def answer_all(
    engine: Engine, decoder: Decoder, requests: Sequence[AnswerRequest], size: int
) -> list[Answered]:
    """Answer all requests, up to `size` of them at once, by engines like `engine`."""
    answers = [Answered([], Stats()) for _ in requests]
    batch: Batch[int, Chunk] = Batch(engine, min(size, len(requests)))

    def start(engine: Engine, i: int) -> Generator[Chunk]:
        yield from answer(engine, decoder, requests[i])
        answers[i] = answers[i]._replace(stats=engine.stats)

    with closing(batch):
        begun = 0
        while begun < len(requests) or not batch.is_empty:
            while begun < len(requests) and batch.has_room:
                request = requests[begun]
                n_tokens = len(request.prompt) + request.answer.max_new_tokens
                begin: Callable[[Engine], Generator[Chunk]] = functools.partial(start, i=begun)
                batch.begin(begun, min(n_tokens, engine.max_seq_len), begin)
                begun += 1
            for i, chunk in batch.step():
                if chunk is not None:
                    answers[i].chunks.append(chunk)
    return answers
