"""Answers of the model on this machine, several at a time."""

from __future__ import annotations

from collections.abc import Callable

from fasteagle.batch import Batch
from fasteagle.errors import FasteagleError
from fasteagle.generate import Engine
from fasteagle.loading.tokenizer import ChatTokenizer
from fasteagle.training.dialogues import Reply, Request
from fasteagle.training.filters import ends_in_repetition


class LocalModel:
    """Model on this machine: writes up to `batch` answers at once, a token of each in one pass."""

    def __init__(self, engine: Engine, tokenizer: ChatTokenizer, batch: int) -> None:
        self._engine, self._tokenizer = engine, tokenizer
        self._batch: Batch[int, list[int]] = Batch(engine, batch)
        self._prompts: dict[int, list[int]] = {}
        self._written: dict[int, list[int]] = {}
        self._without_room: list[int] = []

    def begin(self, number: int, request: Request) -> None:
        prompt = prompt_of(self._tokenizer, request)
        if len(prompt) >= self._engine.max_seq_len:
            self._without_room.append(number)
            return
        self._prompts[number] = prompt
        self._written[number] = []
        n_tokens = min(len(prompt) + request.max_new_tokens, self._engine.max_seq_len)
        self._batch.begin(
            number,
            prompt,
            n_tokens,
            lambda engine: engine.generate(
                prompt,
                request.params,
                request.max_new_tokens,
                self._tokenizer.eos_ids,
                is_last=repeats(),
            ),
            awaited=False,
        )

    def replies(self) -> list[tuple[int, Reply | None]]:
        replies: list[tuple[int, Reply | None]] = [(number, None) for number in self._without_room]
        self._without_room = []
        for number, new in self._batch.step():
            if isinstance(new, Exception):
                raise new
            if new is not None:
                self._written[number] += new
                continue
            ids = self._written.pop(number)
            is_cut = ids[-1] not in self._tokenizer.eos_ids
            text = self._tokenizer.decode(ids)
            replies.append((number, Reply(self._prompts.pop(number), ids, text, is_cut)))
        return replies


def repeats() -> Callable[[int], bool]:
    """Return a function that reads a text's tokens, and returns whether it repeats itself."""
    text: list[int] = []

    def is_last(token: int) -> bool:
        text.append(token)
        return ends_in_repetition(text)

    return is_last


def prompt_of(tokenizer: ChatTokenizer, request: Request) -> list[int]:
    """Return the tokens after which the model answers a request."""
    if request.messages:
        return tokenizer.encode(tokenizer.render(request.messages))
    return user_prefix(tokenizer)


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
