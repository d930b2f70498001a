"""Conversations with the model on this machine, several at a time."""

from __future__ import annotations

from collections.abc import Iterator

from fasteagle.errors import FasteagleError
from fasteagle.generate import Engine
from fasteagle.loading.tokenizer import ChatTokenizer
from fasteagle.training.batch import BatchSampler
from fasteagle.training.dialogues import Conversing, Dialogue, Reply, Request
from fasteagle.training.filters import ends_in_repetition


class LocalModel:
    """Model on this machine: up to `batch` conversations at once, a token of each in one pass."""

    def __init__(self, engine: Engine, tokenizer: ChatTokenizer, batch: int) -> None:
        self._engine, self._tokenizer = engine, tokenizer
        self._sampler = BatchSampler(engine, batch, tokenizer.eos_ids, ends_in_repetition)
        self._waiting: dict[int, tuple[Conversing, list[int]]] = {}

    def hold(self, started: Iterator[tuple[int, Conversing]]) -> Iterator[tuple[int, Dialogue]]:
        """Hold the conversations; yield them by number as they end."""
        sampler = self._sampler
        while True:
            while sampler.has_room and (new := next(started, None)):
                yield from self._advance(*new, None)
            if sampler.is_empty:
                return
            for number, ids in sampler.step():
                conversing, prompt = self._waiting.pop(number)
                reply = self._reply(prompt, ids)
                yield from self._advance(number, conversing, reply)

    def _advance(
        self, number: int, conversing: Conversing, reply: Reply | None
    ) -> Iterator[tuple[int, Dialogue]]:
        """Begin the conversation's next answer; yield the dialogue if there is none."""
        while True:
            try:
                request = conversing.send(reply)
            except StopIteration as end:
                yield number, end.value
                return
            prompt = self._prompt(request)
            if len(prompt) < self._engine.max_seq_len:
                self._waiting[number] = (conversing, prompt)
                self._sampler.add(number, prompt, request.params, request.max_new_tokens)
                return
            reply = None

    def _prompt(self, request: Request) -> list[int]:
        if not request.messages:
            return user_prefix(self._tokenizer)
        return self._tokenizer.encode(self._tokenizer.render(request.messages))

    def _reply(self, prompt: list[int], ids: list[int]) -> Reply:
        is_cut = ids[-1] not in self._tokenizer.eos_ids
        return Reply(prompt, ids, self._tokenizer.decode(ids), is_cut)


def user_prefix(tokenizer: ChatTokenizer) -> list[int]:
    """Return the tokens of the chat template up to where the first question begins.

    Raises `FasteagleError` where there are none.
    """
    mark = "QUESTION-GOES-HERE"
    text = tokenizer.render([{"role": "user", "content": mark}])
    before, is_there, _ = text.partition(mark)
    if not is_there or not before:
        raise FasteagleError(
            "the model's chat template has no beginning of a question, so that the model cannot "
            "write one: give questions"
        )
    return tokenizer.encode(before)
