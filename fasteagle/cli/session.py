"""A conversation: turns, the model's template, the context limit. Knows no terminal.

The tokens of earlier turns are kept as they were generated, not encoded anew, so that a follow-up
question finds them all in the KV cache. Where the template renders an answer otherwise than it was
generated (without its thought), all is encoded anew, and the cache serves up to that answer.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

from fasteagle.answering.answer import AnswerRequest, answer
from fasteagle.answering.grammar import GrammarCompiler, GrammarMask
from fasteagle.answering.stream import ThoughtSplitter, opened_thought
from fasteagle.decoding.stats import Stats
from fasteagle.errors import FasteagleError
from fasteagle.generate import Engine
from fasteagle.loading.tokenizer import ChatTokenizer, Message
from fasteagle.options import AnswerOptions, GrammarSpec, SamplingParams


class ChatSession:
    """One conversation with one engine. `notify` receives remarks meant for the person."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: ChatTokenizer,
        params: SamplingParams,
        answer: AnswerOptions,
        system: str | None = None,
        notify: Callable[[str], None] = lambda text: None,
        think: bool | None = None,
    ) -> None:
        self.engine, self.tokenizer = engine, tokenizer
        self.params, self.answer = params, answer
        self.notify = notify
        self.mark_accepted: Callable[[str], str] | None = None  # dresses accepted text up
        self.mark_thought: Callable[[str], str] | None = None
        self.clean: Callable[[str], str] = str  # takes out what the screen must not get
        self.turns: list[Message] = []  # user and assistant, alternating
        self.system = system
        self.think = think
        self.grammar: GrammarSpec | None = None  # the form of every answer
        self._grammars = GrammarCompiler(tokenizer, engine.model.config.vocab_size)
        self._text, self._ids = "", []  # type: tuple[str, list[int]]

    @property
    def think(self) -> bool | None:
        """Whether the model is to think before it answers; None: as its template does by itself.

        Setting it raises `FasteagleError` where the template has no switch for it.
        """
        return self._think

    @think.setter
    def think(self, think: bool | None) -> None:
        if think is not None:
            self.tokenizer.check_think(think)
        self._think = think

    @property
    def stats(self) -> Stats:
        """Of the last answer."""
        return self.engine.stats

    def reset(self) -> None:
        """Forget all turns; the system prompt and the options stay."""
        self.turns = []
        self._text, self._ids = "", []

    def ask(self, text: str) -> Iterator[str]:
        """Answer `text`, piece by piece.

        An answer cut short (generator closed, Ctrl-C) stays in the conversation as far as it came;
        a question that got no token at all is taken back.
        """
        if not text.strip():
            raise FasteagleError("the prompt is empty: type a question")
        self.turns.append({"role": "user", "content": text})
        yield from self._answer(self.params)

    def retry(self) -> Iterator[str]:
        """Answer the last question again, with the next seed; if nothing comes, all stays."""
        if not self.turns:
            raise FasteagleError("nothing to retry: ask something first")
        kept = (list(self.turns), self._text, self._ids, self.params)
        if self.turns[-1]["role"] == "assistant":
            self.turns.pop()
            self._text, self._ids = "", []
        self.params = dataclasses.replace(self.params, seed=(self.params.seed + 1) % 2**63)
        n_turns = len(self.turns)
        try:
            yield from self._answer(self.params)
        finally:
            if len(self.turns) < n_turns:  # not one token came
                self.turns, self._text, self._ids, self.params = kept

    def _answer(self, params: SamplingParams) -> Iterator[str]:
        thought = ThoughtSplitter()
        new_ids: list[int] = []
        pieces: list[str] = []
        prompt: list[int] = []
        text = ""
        try:
            text, prompt = self._fit()
            thought = ThoughtSplitter(opened_thought(text))
            eos_ids = self.tokenizer.eos_ids
            request = AnswerRequest(prompt, params, self.answer, eos_ids, mask=self._mask())
            with contextlib.closing(answer(self.engine, self.tokenizer, request)) as chunks:
                for chunk in chunks:
                    new_ids.extend(chunk.tokens)
                    pieces.append(chunk.text)
                    guessed, rest = chunk.text[: chunk.n_guessed], chunk.text[chunk.n_guessed :]
                    yield from self._dressed(thought.push(guessed), self.mark_accepted)
                    yield from self._dressed(thought.push(rest), None)
            yield from self._dressed(thought.finish(), None)
        finally:
            self._record(text, prompt, new_ids, thought.closed("".join(pieces)))
        self._explain_end(thought.inside)

    def _mask(self) -> GrammarMask | None:
        return None if self.grammar is None else self._grammars.start(self.grammar)

    def _dressed(
        self, parts: list[tuple[str, bool]], mark: Callable[[str], str] | None
    ) -> Iterator[str]:
        """The text of `parts` for the screen, those of the thought marked as such."""
        for raw, is_thought in parts:
            text = self.clean(raw)
            text = mark(text) if mark else text
            yield self.mark_thought(text) if is_thought and self.mark_thought else text

    def _explain_end(self, in_thought: bool) -> None:
        if self.stats.finish == "context":
            self.notify(
                f"[context full at {self.engine.max_seq_len:,} tokens: the answer ends here; "
                "the oldest turns make room for the next one]"
            )
        elif self.stats.finish == "length" and in_thought:
            self.notify(
                f"[{self.answer.max_new_tokens:,} tokens ended inside the thought: "
                "raise max-new-tokens]"
            )

    def _record(self, text: str, prompt: list[int], new_ids: list[int], answer: str) -> None:
        if not new_ids:
            self.turns.pop()  # the question
            return
        self.turns.append({"role": "assistant", "content": answer})
        self._text, self._ids = text + self.tokenizer.raw(new_ids), prompt + new_ids

    def _fit(self) -> tuple[str, list[int]]:
        """Rendered conversation and its tokens; drops the oldest turns until an answer fits."""
        limit = self.engine.max_seq_len
        room = min(self.answer.max_new_tokens, limit // 4)
        turns, dropped = list(self.turns), 0
        text, ids = self._render(turns)
        while len(ids) + room > limit and len(turns) > 1:
            del turns[:2]
            dropped += 1
            text, ids = self._render(turns)
        if len(ids) >= limit:
            return text, ids  # the question alone is too long: the engine says so, nothing is lost
        self.turns = turns
        if dropped:
            self.notify(
                f"[context full: {limit:,} tokens; forgot the oldest "
                f"{'turn' if dropped == 1 else f'{dropped} turns'}]"
            )
        return text, ids

    def _render(self, turns: list[Message]) -> tuple[str, list[int]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        text = self.tokenizer.render([*system, *turns], think=self.think)
        if self._text and text.startswith(self._text):
            return text, self._ids + self.tokenizer.encode(text[len(self._text) :])
        return text, self.tokenizer.encode(text)


def format_stats(stats: Stats) -> str:
    """One line about an answer."""
    cached = f" ({stats.cached_tokens:,} cached)" if stats.cached_tokens else ""
    line = (
        f"prefill {stats.prompt_tokens:,} tok{cached} {stats.ttft:.2f} s | "
        f"{stats.new_tokens:,} tok {stats.tok_s:.1f} tok/s | tau {stats.tau:.2f}"
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
    """Of a part of a cycle, on average."""
    return f"{1e3 * seconds / stats.passes:.1f} ms" if stats.parts_timed else "-"
