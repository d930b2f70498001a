"""Several answers at once, from token ids to whole answers."""

from __future__ import annotations

import functools
from collections.abc import Generator, Sequence
from contextlib import closing

from fasteagle.answering.answer import Answer, AnswerRequest, Chunk, answer
from fasteagle.answering.stream import Decoder
from fasteagle.batch import Batch
from fasteagle.generate import Engine


def answer_all(
    engine: Engine, decoder: Decoder, requests: Sequence[AnswerRequest], size: int
) -> list[Answer]:
    """Answer all requests, up to `size` of them at once, by engines like `engine`."""
    answers: dict[int, Answer] = {}

    def write(i: int, own: Engine) -> Generator[Chunk]:
        chunks = []
        for chunk in answer(own, decoder, requests[i]):
            chunks.append(chunk)
            yield chunk
        answers[i] = Answer.of(chunks, own.stats, requests[i].params.seed)

    batch: Batch[int, Chunk] = Batch(engine, size)
    with closing(batch):
        waiting = iter(enumerate(requests))
        while len(answers) < len(requests):
            while batch.has_room and (following := next(waiting, None)):
                i, request = following
                n_tokens = len(request.prompt) + request.answer.max_new_tokens
                batch.begin(i, min(n_tokens, engine.max_seq_len), functools.partial(write, i))
            batch.step()
    return [answers[i] for i in range(len(requests))]
