"""Conversation with a model: turns, chat template, context limit. Knows no terminal.

The model knows the tokens of earlier turns as they were generated, so that a follow-up question
finds them all in the KV cache. Where the template renders an answer otherwise than it was generated
(without its thought), the cache serves up to that answer.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Generator
from typing import NamedTuple

from fasteagle.answering.known_texts import Prompt
from fasteagle.answering.stream import ThoughtSplitter
from fasteagle.decoding.stats import Stats
from fasteagle.errors import FasteagleError, counted
from fasteagle.llm import LLM
from fasteagle.loading.tokenizer import Message
from fasteagle.options import Defaults


class Piece(NamedTuple):
    """Piece of an answer, whether the drafter proposed it, and whether it is of the thought."""

    text: str
    is_guess: bool
    is_thought: bool


class ChatSession:
    """Conversation with one model; `notify` receives remarks for the user."""

    def __init__(
        self, llm: LLM, defaults: Defaults, notify: Callable[[str], None] = lambda text: None
    ) -> None:
        self.llm, self.notify = llm, notify
        self.params, self.answer, self.form = defaults.params, defaults.answer, defaults.form
        self.turns: list[Message] = []  # user and assistant, alternating
        self.system, self.think = defaults.system, defaults.think

    @property
    def stats(self) -> Stats:
        """Statistics of the last answer."""
        return self.llm.engine.stats

    def ask(self, text: str) -> Generator[Piece]:
        """Yield the answer to `text`, piece by piece.

        An answer cut short (generator closed, Ctrl-C) stays in the conversation as far as it came;
        a question that got no token at all is taken back.
        """
        if not text.strip():
            raise FasteagleError("the prompt is empty: type a question")
        self.turns.append({"role": "user", "content": text})
        yield from self._answer()

    def retry(self) -> Generator[Piece]:
        """Answer the last question again with the next seed; change nothing if no token comes."""
        if not self.turns:
            raise FasteagleError("nothing to retry: ask something first")
        before = (list(self.turns), self.params)
        if self.turns[-1]["role"] == "assistant":
            self.turns.pop()
        self.params = dataclasses.replace(self.params, seed=(self.params.seed + 1) % 2**63)
        question = self.turns[-1]
        try:
            yield from self._answer()
        finally:
            if not any(turn is question for turn in self.turns):  # not one token came
                self.turns, self.params = before

    def _answer(self) -> Generator[Piece]:
        """Answer the last turn, and add the answer; without a token, take the question back."""
        thought = ThoughtSplitter()
        texts: list[str] = []  # of the answer, from its first token on
        try:
            prompt = self._fit()
            may_begin = self.form is None and self.llm.tokenizer.knows_thoughts
            thought = ThoughtSplitter(prompt.text, may_begin)
            request = self.llm.made_request(prompt.ids, self.params, self.answer, self.form)
            with contextlib.closing(self.llm.answers.stream(request, prompt.text)) as chunks:
                for chunk in chunks:
                    texts.append(chunk.text)
                    guess, rest = chunk.text[: chunk.n_guessed], chunk.text[chunk.n_guessed :]
                    for is_guess, part in ((True, guess), (False, rest)):
                        for text, is_thought in thought.push(part):
                            yield Piece(text, is_guess, is_thought)
            for text, is_thought in thought.finish():
                yield Piece(text, False, is_thought)
        finally:
            if texts:
                content = thought.closed("".join(texts))
                self.turns.append({"role": "assistant", "content": content})
            else:
                self.turns.pop()  # the question
        self._explain_end(thought.inside)

    def _explain_end(self, in_thought: bool) -> None:
        if self.stats.finish == "context":
            self.notify(
                f"[context full at {self.llm.engine.max_seq_len:,} tokens: the answer ends here; "
                "the oldest turns make room for the next one]"
            )
        elif self.stats.finish == "length" and in_thought:
            self.notify(
                f"[{counted(self.answer.max_new_tokens, 'token')} ended inside the thought: "
                "raise max-new-tokens]"
            )

    def _fit(self) -> Prompt:
        """Return the prompt of the conversation; drop old turns until an answer fits."""
        limit = self.llm.engine.max_seq_len
        room = min(self.answer.max_new_tokens, limit // 4)
        system = [{"role": "system", "content": self.system}] if self.system else []
        turns = list(self.turns)
        prompt = self.llm.prompt([*system, *turns], self.think, self.form)
        while len(prompt.ids) + room > limit and len(turns) > 1:
            del turns[:2]
            prompt = self.llm.prompt([*system, *turns], self.think, self.form)
        if len(prompt.ids) >= limit:
            return prompt  # the question alone is too long: the engine says so, nothing is lost
        n_dropped = (len(self.turns) - len(turns)) // 2
        self.turns = turns
        if n_dropped:
            self.notify(
                f"[context full: {limit:,} tokens; forgot the oldest "
                f"{'turn' if n_dropped == 1 else f'{n_dropped} turns'}]"
            )
        return prompt


def format_stats(stats: Stats) -> str:
    """Return one line of statistics of an answer."""
    cached = f" ({stats.cached_tokens:,} cached)" if stats.cached_tokens else ""
    cut = " (cut at max-new-tokens)" if stats.finish == "length" else ""
    line = (
        f"prefill {stats.prompt_tokens:,} tok{cached} {stats.ttft:.2f} s | "
        f"{stats.new_tokens:,} tok{cut} {stats.tok_s:.1f} tok/s | tau {stats.tau:.2f}"
    )
    if not stats.path_lengths:
        return line
    return (
        f"{line} | accepted {stats.accepted:,}/{stats.drafted:,} "
        f"({100 * stats.accepted / max(stats.drafted, 1):.0f} %) | "
        f"draft {_milliseconds(stats, stats.draft_seconds)} "
        f"verify {_milliseconds(stats, stats.verify_seconds)}"
    )


def _milliseconds(stats: Stats, seconds: float) -> str:
    """Return the mean time of a part of a cycle in ms, or `-` where parts were not timed."""
    return f"{1e3 * seconds / stats.passes:.1f} ms" if stats.parts_timed else "-"
