"""Conversation with a model: turns, chat template, context limit. Knows no terminal.

The model knows the tokens of earlier turns as they were generated, so that a follow-up question
finds them all in the KV cache. Where the template renders an answer otherwise than it was generated
(without its thought), the cache serves up to that answer.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Iterator

from fasteagle.answering.stream import ThoughtSplitter, opened_thought
from fasteagle.decoding.stats import Stats
from fasteagle.errors import FasteagleError
from fasteagle.llm import LLM
from fasteagle.loading.tokenizer import Message
from fasteagle.options import AnswerOptions, GrammarSpec, SamplingParams


class ChatSession:
    """Conversation with one model; `notify` receives remarks for the user."""

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        answer: AnswerOptions,
        system: str | None = None,
        notify: Callable[[str], None] = lambda text: None,
        think: bool | None = None,
        form: GrammarSpec | None = None,
    ) -> None:
        self.llm, self.form = llm, form
        self.params, self.answer = params, answer
        self.notify = notify
        self.mark_accepted: Callable[[str], str] | None = None  # styles accepted text
        self.mark_thought: Callable[[str], str] | None = None
        self.clean: Callable[[str], str] = str  # removes what the screen must not get
        self.turns: list[Message] = []  # user and assistant, alternating
        self.system = system
        self.think = think

    @property
    def think(self) -> bool | None:
        """Switch for thinking before an answer; None leaves the choice to the chat template.

        Setting it raises `FasteagleError` where the template has no switch for it.
        """
        return self._think

    @think.setter
    def think(self, think: bool | None) -> None:
        if think is not None:
            self.llm.tokenizer.check_think(think)
        self._think = think

    @property
    def stats(self) -> Stats:
        """Statistics of the last answer."""
        return self.llm.engine.stats

    def reset(self) -> None:
        """Forget all turns; the system prompt and the options stay."""
        self.turns = []

    def ask(self, text: str) -> Generator[str]:
        """Yield the answer to `text`, piece by piece.

        An answer cut short (generator closed, Ctrl-C) stays in the conversation as far as it came;
        a question that got no token at all is taken back.
        """
        if not text.strip():
            raise FasteagleError("the prompt is empty: type a question")
        self.turns.append({"role": "user", "content": text})
        yield from self._answer(self.params)

    def retry(self) -> Generator[str]:
        """Answer the last question again with the next seed; change nothing if no token comes."""
        if not self.turns:
            raise FasteagleError("nothing to retry: ask something first")
        before = (list(self.turns), self.params)
        if self.turns[-1]["role"] == "assistant":
            self.turns.pop()
        self.params = dataclasses.replace(self.params, seed=(self.params.seed + 1) % 2**63)
        n_turns = len(self.turns)
        try:
            yield from self._answer(self.params)
        finally:
            if len(self.turns) < n_turns:  # not one token came
                self.turns, self.params = before

    def _answer(self, params: SamplingParams) -> Iterator[str]:
        thought = ThoughtSplitter()
        pieces: list[str] = []  # of the answer, from its first token on
        try:
            text, prompt = self._fit()
            thought = ThoughtSplitter(opened_thought(text))
            request = self.llm.made_request(prompt, params, self.answer, self.form)
            with contextlib.closing(self.llm.stream(request, text=text)) as chunks:
                for chunk in chunks:
                    pieces.append(chunk.text)
                    guessed, rest = chunk.text[: chunk.n_guessed], chunk.text[chunk.n_guessed :]
                    yield from self._dressed(thought.push(guessed), self.mark_accepted)
                    yield from self._dressed(thought.push(rest), None)
            yield from self._dressed(thought.finish(), None)
        finally:
            if pieces:
                content = thought.closed("".join(pieces))
                self.turns.append({"role": "assistant", "content": content})
            else:
                self.turns.pop()  # the question
        self._explain_end(thought.inside)

    def _dressed(
        self, parts: list[tuple[str, bool]], mark: Callable[[str], str] | None
    ) -> Iterator[str]:
        """Yield the text of `parts` for the screen, with those of the thought marked."""
        for raw, is_thought in parts:
            text = self.clean(raw)
            text = mark(text) if mark else text
            yield self.mark_thought(text) if is_thought and self.mark_thought else text

    def _explain_end(self, in_thought: bool) -> None:
        if self.stats.finish == "context":
            self.notify(
                f"[context full at {self.llm.engine.max_seq_len:,} tokens: the answer ends here; "
                "the oldest turns make room for the next one]"
            )
        elif self.stats.finish == "length" and in_thought:
            self.notify(
                f"[{self.answer.max_new_tokens:,} tokens ended inside the thought: "
                "raise max-new-tokens]"
            )

    def _fit(self) -> tuple[str, list[int]]:
        """Return the rendered conversation and its tokens; drop old turns until an answer fits."""
        limit = self.llm.engine.max_seq_len
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
        text = self.llm.tokenizer.render([*system, *turns], think=self.think)
        return text, self.llm.texts.encode(text)


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
