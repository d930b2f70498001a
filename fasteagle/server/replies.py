"""Answers in the form of OpenAI's API: whole, and as server-sent events."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Self

from fasteagle.answering.answer import Chunk
from fasteagle.answering.answer_logits import TokenLogprob
from fasteagle.answering.stream import END_THINK, THINK, TextStream, ThoughtSplitter, overlap
from fasteagle.decoding.stats import Stats
from fasteagle.loading.tokenizer import ChatTokenizer
from fasteagle.server.job import Job
from fasteagle.server.prepare import Plan
from fasteagle.server.tools import LLAMA3, Call, before_cut_call, parse_calls

Json = dict[str, Any]


class Piece(NamedTuple):
    """Text for the client; the first `n_guessed` characters of `content` are accepted drafts."""

    content: str = ""
    reasoning: str = ""
    n_guessed: int = 0


class AnswerText:
    """Splitter of an answer into thought, text and tool calls while it comes."""

    def __init__(self, plan: Plan) -> None:
        self._thought = ThoughtSplitter(plan.text, plan.may_think)
        self._had_thought = False
        self._form, self._names = plan.tools, plan.tool_names
        self._held = ""  # may be the beginning of a call, or is one
        self._in_call = False
        self._may_call = True  # where a call has no mark: only blanks so far
        self._begun_thought = False
        self._most_calls = plan.most_calls
        self.calls: list[Call] = []
        self.ends_in_call = False

    def push(self, chunk: Chunk) -> Piece:
        guessed = self._split(self._thought.push(chunk.text[: chunk.n_guessed]))
        rest = self._split(self._thought.push(chunk.text[chunk.n_guessed :]))
        before = self._visible(guessed.content)
        after = self._visible(rest.content)
        return Piece(before + after, guessed.reasoning + rest.reasoning, len(before))

    def finish(self, is_cut: bool = False) -> Piece:
        """Return the text that was held back, without a call that was cut; set `calls`."""
        last = self._split(self._thought.finish())
        content = self._held + last.content
        if self._form is not None:
            content, calls = parse_calls(content, self._form, self._names, is_cut)
            self.calls = calls[: self._most_calls]
            shown = before_cut_call(content, self._form) if is_cut else content
            is_full = self._most_calls is not None and len(calls) >= self._most_calls
            self.ends_in_call, content = shown != content and not is_full, shown
        return Piece(content, last.reasoning)

    def _split(self, parts: Iterable[tuple[str, bool]]) -> Piece:
        """Return thought and text of `parts`, without the marks between them."""
        content = reasoning = ""
        for text, is_thought in parts:
            if is_thought:
                self._had_thought = True
                if not self._begun_thought:
                    text = text.lstrip().removeprefix(THINK) if THINK in text else text
                self._begun_thought = self._begun_thought or bool(text.strip())
                reasoning = (reasoning + text).removesuffix(END_THINK)
            else:
                content += text
        if self._had_thought and content:
            content = content.lstrip("\n")
            self._had_thought = not content  # blank lines after the thought may come in pieces
        return Piece(content, reasoning)

    def _visible(self, text: str) -> str:
        """Return the text that can be shown now, without what may be a call."""
        if self._form is None:
            return text
        self._held += text
        if self._in_call:
            return ""
        opening = self._form.opening
        if self._form is LLAMA3:
            start = self._held.lstrip()
            self._in_call = self._may_call and start.startswith(opening)
            self._may_call = self._may_call and not start
            keep = len(self._held) if self._in_call or self._may_call else 0
        else:
            at = self._held.find(opening)
            self._in_call = at >= 0
            keep = len(self._held) - at if self._in_call else overlap(self._held, opening)
        shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(shown) :]
        return shown


class Reply:
    """Base of the replies to a request; one that wants several answers has one for each."""

    kind = ""  # of the object, whole
    chunk_kind = ""
    prefix = ""  # of the id

    def __init__(
        self, head: Json, index: int, tokenizer: ChatTokenizer, job: Job, plan: Plan
    ) -> None:
        self.tokenizer, self.job = tokenizer, job
        self.request = plan.answers[index]
        self.text = AnswerText(plan)
        self._head, self._index = head, index

    @classmethod
    def each(
        cls, model: str, tokenizer: ChatTokenizer, jobs: Sequence[Job], plan: Plan
    ) -> list[Self]:
        """Return a reply for each answer of a request; they have one id."""
        name = f"{cls.prefix}-{uuid.uuid4().hex}"
        head = {"id": name, "created": int(time.time()), "model": model}
        return [cls(head, i, tokenizer, job, plan) for i, job in enumerate(jobs)]

    def envelope(self, kind: str, choices: list[Json]) -> Json:
        return {**self._head, "object": kind, "choices": choices}

    def choice(self, finish: str | None, logprobs: Json | None, **content: Any) -> Json:
        return {"index": self._index, **content, "logprobs": logprobs, "finish_reason": finish}

    @property
    def finish(self) -> str:
        if self.text.calls and not self.text.ends_in_call:
            return "tool_calls"
        return "length" if self.is_cut else "stop"

    @property
    def is_cut(self) -> bool:
        """Return whether the answer was cut off before its own end."""
        return self.job.stats.finish not in ("eos", "stop")

    @property
    def is_broken(self) -> bool:
        """Return whether the answer may end within a call: a stop string may be in one, too."""
        return self.job.stats.finish != "eos"

    def whole(self, chunks: list[Chunk]) -> Json:
        """Return the choice of a request that does not stream."""
        raise NotImplementedError

    def parts(self, chunk: Chunk, accepted: bool) -> Iterator[Json]:
        """Yield the events of one chunk; with `accepted` they count accepted draft tokens."""
        raise NotImplementedError

    def last_parts(self) -> Iterator[Json]:
        """Yield the events after the last chunk."""
        raise NotImplementedError

    def bare(self, token: int) -> Json:
        """Return a token as text and bytes; null where these are not known."""
        data = self.tokenizer.token_bytes(token)
        text = self.tokenizer.piece(token)
        return {"token": text, "bytes": None if data is None else list(data)}


def guessed(chunk: Chunk, n_characters: int) -> Json:
    """Return counts of a chunk: tokens, accepted draft tokens and their characters."""
    counts = {"tokens": len(chunk.tokens), "accepted": chunk.accepted, "characters": n_characters}
    return {"accepted": counts}


def whole_reply(replies: Sequence[Reply], answers: Iterable[list[Chunk]]) -> Json:
    """Return the reply to a request that does not stream, with the chunks of each answer."""
    choices = [reply.whole(chunks) for reply, chunks in zip(replies, answers, strict=True)]
    return {**replies[0].envelope(replies[0].kind, choices), "usage": usage(replies)}


def usage_event(replies: Sequence[Reply]) -> Json:
    """Return the last event of a stream, which has no choices."""
    return {**replies[0].envelope(replies[0].chunk_kind, []), "usage": usage(replies)}


def usage(replies: Sequence[Reply]) -> Json:
    """Return the tokens of a request; a prompt with several answers counts once."""
    n_new = sum(reply.job.stats.new_tokens for reply in replies)
    prompts = [reply.job.stats for reply in replies if reply.job.is_first]
    n_prompt = sum(stats.prompt_tokens for stats in prompts)
    n_cached = sum(stats.cached_tokens for stats in prompts)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_new,
        "total_tokens": n_prompt + n_new,
        "prompt_tokens_details": {"cached_tokens": n_cached},
        "speculation": speculation(together([reply.job.stats for reply in replies])),
        "seed": replies[0].request.params.seed,
    }


def together(each: Sequence[Stats]) -> Stats:
    """Return the statistics of answers that ran beside each other; rates are those of all.

    Rates count the tokens after an answer's first, so that the sum counts one first token only.
    """
    return Stats(
        new_tokens=1 + sum(max(0, stats.new_tokens - 1) for stats in each),
        passes=sum(stats.passes for stats in each),
        drafted=sum(stats.drafted for stats in each),
        path_lengths=[length for stats in each for length in stats.path_lengths],
        ttft=min(stats.ttft for stats in each),
        decode_seconds=max(stats.decode_seconds for stats in each),
    )


def speculation(stats: Stats) -> Json:
    """Return statistics of speculation for an answer."""
    return {
        "passes": stats.passes,
        "drafted_tokens": stats.drafted,
        "accepted_tokens": stats.accepted,
        "tau": round(stats.tau, 4),
        "accepted_per_position": [round(share, 4) for share in stats.acceptance_by_depth],
        "tokens_per_second": round(stats.tok_s, 2),
        "time_to_first_token": round(stats.ttft, 4),
    }


class ChatReply(Reply):
    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"
    _begun = False

    def whole(self, chunks: list[Chunk]) -> Json:
        pieces = [*(self.text.push(chunk) for chunk in chunks), self.text.finish(self.is_broken)]
        content = "".join(piece.content for piece in pieces)
        reasoning = "".join(piece.reasoning for piece in pieces)
        message: Json = {"role": "assistant", "content": content}
        if reasoning:
            message["reasoning_content"] = reasoning
        if self.text.calls:
            message |= {"content": content or None, "tool_calls": self._calls()}
        logprobs = self._logprobs([entry for chunk in chunks for entry in chunk.logprobs])
        return self.choice(self.finish, logprobs, message=message)

    def parts(self, chunk: Chunk, accepted: bool) -> Iterator[Json]:
        if not self._begun:  # apart: openai-js counts log-probabilities of the first event twice
            self._begun, role = True, {"role": "assistant", "content": ""}
            yield self.envelope(self.chunk_kind, [self.choice(None, None, delta=role)])
        piece = self.text.push(chunk)
        delta = self._delta(piece)
        if not delta and not chunk.logprobs and not accepted:
            return
        event = self.envelope(
            self.chunk_kind, [self.choice(None, self._logprobs(chunk.logprobs), delta=delta)]
        )
        yield event | (guessed(chunk, piece.n_guessed) if accepted else {})

    def last_parts(self) -> Iterator[Json]:
        delta = self._delta(self.text.finish(self.is_broken))
        if self.text.calls:
            delta["tool_calls"] = [{"index": i, **c} for i, c in enumerate(self._calls())]
        if delta:  # apart: openai's helper looks for calls that are complete before it adds any
            yield self.envelope(self.chunk_kind, [self.choice(None, None, delta=delta)])
        yield self.envelope(self.chunk_kind, [self.choice(self.finish, None, delta={})])

    def _delta(self, piece: Piece) -> Json:
        delta = {"content": piece.content, "reasoning_content": piece.reasoning}
        return {name: text for name, text in delta.items() if text}

    def _calls(self) -> list[Json]:
        return [
            {
                "id": f"call_{uuid.uuid4().hex[:24]}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in self.text.calls
        ]

    def _logprobs(self, entries: Iterable[TokenLogprob]) -> Json | None:
        if self.request.top_logprobs is None:
            return None
        return {
            "content": [
                {
                    **self.bare(entry.token),
                    "logprob": entry.logprob,
                    "top_logprobs": [{**self.bare(t), "logprob": p} for t, p in entry.top],
                }
                for entry in entries
            ],
            "refusal": None,
        }


class TextReply(Reply):
    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    _offset = 0  # characters of the text so far

    @cached_property
    def _stream(self) -> TextStream:
        return TextStream(self.tokenizer)

    def whole(self, chunks: list[Chunk]) -> Json:
        text = "".join(chunk.text for chunk in chunks)
        logprobs = self._logprobs([entry for chunk in chunks for entry in chunk.logprobs])
        return self.choice(self.finish, logprobs, text=text)

    def parts(self, chunk: Chunk, accepted: bool) -> Iterator[Json]:
        if not chunk.text and not chunk.logprobs and not accepted:
            return
        choice = self.choice(None, self._logprobs(chunk.logprobs), text=chunk.text)
        event = self.envelope(self.kind, [choice])
        yield event | (guessed(chunk, chunk.n_guessed) if accepted else {})

    def last_parts(self) -> Iterator[Json]:
        yield self.envelope(self.kind, [self.choice(self.finish, None, text="")])

    def _logprobs(self, entries: Iterable[TokenLogprob]) -> Json | None:
        if self.request.top_logprobs is None:
            return None
        columns: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for entry in entries:
            text = self._stream.push([entry.token])
            before = len(text) - len(self.tokenizer.piece(entry.token))  # held back until now
            columns["tokens"].append(self._name(entry.token))
            columns["token_logprobs"].append(entry.logprob)
            columns["top_logprobs"].append(self._by_name(entry.top))
            columns["text_offset"].append(self._offset + max(0, before))
            self._offset += len(text)
        return columns

    def _name(self, token: int) -> str:
        """Return a token's text; for a part of a character, its bytes in OpenAI's form."""
        text = self.tokenizer.piece(token)
        if "\ufffd" not in text:
            return text
        data = self.tokenizer.token_bytes(token)
        if data is None:
            return f"token_id:{token}"
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _by_name(self, top: Iterable[tuple[int, float]]) -> dict[str, float]:
        """Return the entries of tokens; where texts are equal, the less likely go by their ids."""
        by_name: dict[str, float] = {}
        for token, logprob in top:
            name = self._name(token)
            by_name[f"token_id:{token}" if name in by_name else name] = logprob
        return by_name


def sse(event: Json) -> str:
    """Return one server-sent event."""
    return f"data: {json.dumps(event, separators=(',', ':'))}\n\n"
