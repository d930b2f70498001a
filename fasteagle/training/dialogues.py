"""Conversations with a model for training data: the questions, and the answers that are kept.

A conversation is a generator that yields requests, is sent the replies, and returns a `Dialogue`;
`hold` lets a model answer several of them side by side.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from fasteagle.config_fields import parse_json
from fasteagle.errors import FasteagleError
from fasteagle.loading.tokenizer import Message
from fasteagle.options import SamplingParams
from fasteagle.prompts import Question, expecting, json_lines, read_questions
from fasteagle.training.filters import Excluded, repetition
from fasteagle.training.options import DataOptions

ANSWER_TOKENS = 3  # shorter answers are not read by training either
INSTRUCTION_TOKENS = 192  # of one that the model writes itself
INSTRUCTION_TEMPERATURE = 0.8
SHOTS = 5  # seed tasks shown before a new one is asked for
SHORT = 300  # characters; longer seeds cost more to read than the answer to write
WRITE_A_TASK = "Write a task."


@dataclasses.dataclass(frozen=True)
class Request:
    """Messages to answer; without any, the model writes what a person would say first."""

    messages: tuple[Message, ...]
    params: SamplingParams
    max_new_tokens: int


@dataclasses.dataclass(frozen=True)
class Reply:
    """Tokens before an answer and of the answer, end mark included; None: there was no room."""

    prompt: list[int]
    ids: list[int]
    text: str
    is_cut: bool  # at `max_new_tokens`, or where the context ended


@dataclasses.dataclass(frozen=True)
class Dialogue:
    """Answers of a conversation that are kept, and the reason why it ended early, if it did."""

    answers: list[tuple[Reply, SamplingParams]]
    dropped: str | None = None


Conversing = Generator[Request, Reply | None, Dialogue]


class Conversations:
    """Conversations that `options` describe; each number stands for one fixed conversation."""

    def __init__(self, options: DataOptions) -> None:
        self._options, self.excluded = options, Excluded(options.exclude)
        self._questions: list[Question] = []
        self._seeds: list[str] = []
        if options.prompts is not None:
            self._questions = read_questions(options.prompts)
        if options.seeds is not None:
            self._seeds = read_seeds(options.seeds)

    @property
    def count(self) -> int | None:
        """Number of conversations; None: no end."""
        if self._options.prompts is None:
            return self._options.count
        n = len(self._questions)
        return n if self._options.count is None else min(n, self._options.count)

    def identity(self) -> str:
        """Return a digest of the files that the conversations are made from."""
        text = json.dumps([self._questions, self._seeds])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def start(self, number: int) -> Conversing:
        """Start conversation `number`, counted from 0."""
        options = self._options
        temperature = options.temperatures[number % len(options.temperatures)]
        if options.prompts is None:
            # Seeds of their own: else an answer's draws would repeat those of its instruction.
            drawn = self._params(INSTRUCTION_TEMPERATURE, number, -1)
            first = yield Request(self._few_shot(number), drawn, INSTRUCTION_TOKENS)
            if first is None or first.is_cut or not first.text.strip():
                return Dialogue([], "instruction without an end")
            turns: Sequence[str] = [first.text.strip()]
        else:
            turns = self._questions[number]
        answers: list[tuple[Reply, SamplingParams]] = []
        messages: list[Message] = []
        for turn, text in enumerate(turns):
            if self.excluded.matches(text):
                return Dialogue(answers, "like an excluded prompt")
            params = self._params(temperature, number, turn)
            messages.append({"role": "user", "content": text})
            reply = yield Request(tuple(messages), params, options.max_new_tokens)
            dropped = self._why_dropped(reply)
            if reply is None or dropped is not None:
                return Dialogue(answers, dropped)
            said_again = repetition(reply.ids)
            if said_again is not None:
                cut = dataclasses.replace(reply, ids=reply.ids[:said_again])
                if said_again >= ANSWER_TOKENS and not options.drop_cut:
                    answers.append((cut, params))
                return Dialogue(answers, "repetition")
            answers.append((reply, params))
            messages.append({"role": "assistant", "content": reply.text})
        return Dialogue(answers)

    def _few_shot(self, number: int) -> tuple[Message, ...]:
        """Return a conversation in which some seeds were written; empty without seeds."""
        if not self._seeds:
            return ()
        chosen = random.Random(f"{self._options.seed} {number}").sample(
            self._seeds, min(SHOTS, len(self._seeds))
        )
        request: Message = {"role": "user", "content": WRITE_A_TASK}
        shown = [m for text in chosen for m in (request, {"role": "assistant", "content": text})]
        return (*shown, request)

    def _params(self, temperature: float, number: int, turn: int) -> SamplingParams:
        digest = hashlib.sha256(f"{self._options.seed} {number} {turn}".encode()).digest()
        seed = int.from_bytes(digest[:4], "little") >> 1  # some servers take 31 bits
        return SamplingParams(temperature, top_p=self._options.top_p, seed=seed)

    def _why_dropped(self, reply: Reply | None) -> str | None:
        if reply is None:
            return "longer than the context"
        if len(reply.ids) < ANSWER_TOKENS or not reply.text.strip():
            return "empty answer"
        if reply.is_cut and self._options.drop_cut:
            return "cut answer"
        return "like an excluded prompt" if self.excluded.matches(reply.text) else None


def read_seeds(path: Path) -> list[str]:
    """Return the short tasks of a JSONL file with `instruction` and perhaps `input`.

    Raises `FasteagleError` for other lines, and where no task is short.
    """
    seeds = [_seed(line, where) for line, where in json_lines(path)]
    short = [seed for seed in seeds if len(seed) <= SHORT]
    if not short:
        raise FasteagleError(f"{path}: no seed task of at most {SHORT} characters in it")
    return short


def _seed(line: str, where: str) -> str:
    with expecting('{"instruction": "text", "input": "text"}', where):
        raw = parse_json(line)
        parts = (raw["instruction"], raw.get("input", ""))
        if not all(isinstance(part, str) for part in parts) or not parts[0].strip():
            raise ValueError("instruction and input must be texts")
        "".join(parts).encode()  # JSON may hold halves of characters
    return "\n".join(part.strip() for part in parts if part.strip())


class Answerer(Protocol):
    """Model that answers requests, several at a time: on this machine or behind a server."""

    def begin(self, number: int, request: Request) -> None:
        """Begin to answer the request of conversation `number`."""

    def replies(self) -> list[tuple[int, Reply | None]]:
        """Go on answering; return what is answered by now, each with its number."""


def hold(started: Iterable[Conversing], answerer: Answerer, batch: int) -> Iterator[Dialogue]:
    """Hold conversations, `batch` at a time; yield them in their order, once ended."""
    numbered, upcoming = enumerate(started), 0
    active: dict[int, Conversing] = {}
    ended: dict[int, Dialogue] = {}

    def advance(number: int, reply: Reply | None) -> None:
        try:
            request = active[number].send(reply)
        except StopIteration as end:
            del active[number]
            ended[number] = end.value
        else:
            answerer.begin(number, request)

    while True:
        if len(active) < batch and (new := next(numbered, None)):
            number, active[number] = new
            advance(number, None)
        elif active:
            for number, reply in answerer.replies():
                advance(number, reply)
        else:
            return
        while upcoming in ended:
            yield ended.pop(upcoming)
            upcoming += 1
