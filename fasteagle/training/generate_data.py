"""`fasteagle generate-data`: a model answers, and its answers become training text."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from fasteagle.errors import FasteagleError, counted, note
from fasteagle.loading.open import PreparedModel, Runtime, open_model
from fasteagle.loading.tensors import Checkpoint
from fasteagle.options import RuntimeOptions
from fasteagle.training.data_file import DataFile
from fasteagle.training.dialogues import Answerer, Conversations, Dialogue, hold
from fasteagle.training.local_model import LocalModel, user_prefix
from fasteagle.training.options import DataOptions
from fasteagle.training.served_model import ServedModel

REPORT_SECONDS = 10.0
HOPELESS = 200  # conversations dropped one after the other


def generate_data(
    model: str, runtime: RuntimeOptions, options: DataOptions, api_key: str | None
) -> None:
    """Let `model`, or a server that has it, answer; append good answers to `options.out`."""
    if options.base_url is not None and runtime != RuntimeOptions():
        raise FasteagleError(
            "the server runs the model: with --base-url leave out --device, --int4 and what else "
            "says how to run it"
        )
    conversations = Conversations(options)
    opened = open_model(model, runtime)
    opened.check(runtime)
    tokenizer = opened.tokenizer
    if options.self_written:
        user_prefix(tokenizer)  # refuses a template without one
    prepared = None if options.base_url else opened.prepared(runtime)

    def answerer() -> Answerer:
        if options.base_url is not None:
            name = options.served_model or model
            return ServedModel(options.base_url, name, tokenizer, api_key)
        assert prepared is not None, "made where no server is named"
        start = time.perf_counter()
        engine = prepared.engine()
        note(f"{prepared}, loaded in {time.perf_counter() - start:.1f} s")
        return LocalModel(engine, tokenizer, options.batch)

    settings = _settings(opened.name, opened.checkpoint, options, conversations)
    with contextlib.closing(DataFile(options.out, settings | _precision(prepared))) as data:
        _Run(options, conversations, data).hold(answerer)


def write_text(
    runtime: Runtime, options: DataOptions, is_enough: Callable[[int], bool] = lambda n: False
) -> None:
    """Let a loaded model write `options.out`, from where an earlier call stopped.

    Ends sooner once `is_enough(number of conversations)`.
    """
    conversations = Conversations(options)
    settings = _settings(runtime.name, runtime.checkpoint, options, conversations)
    with contextlib.closing(DataFile(options.out, settings)) as data:
        _Run(options, conversations, data, is_enough).hold(
            lambda: LocalModel(runtime.engine, runtime.tokenizer, options.batch)
        )


def _settings(
    name: str, checkpoint: Checkpoint, options: DataOptions, conversations: Conversations
) -> dict[str, Any]:
    """Return the settings that change the text, but for its amount and the model's precision."""
    source = "prompts" if options.prompts else "seeds" if options.seeds else "self"
    return {
        "model": name,
        "fingerprint": checkpoint.fingerprint[:16],
        "served_model": options.served_model,
        "source": f"{source} {conversations.identity()}",
        "exclude": conversations.excluded.identity(),
        "temperature": list(options.temperatures),
        "top_p": options.top_p,
        "max_new_tokens": options.max_new_tokens,
        "seed": options.seed,
        "drop_cut": options.drop_cut,
    }


def _precision(prepared: PreparedModel | None) -> dict[str, Any]:
    """Return the settings of how the model computes; None stands for a server's model."""
    if prepared is None:
        return {"precision": "the server's"}
    scheme = prepared.scheme.name if prepared.scheme else "dense"
    options = prepared.options
    return {
        "precision": f"{scheme} {prepared.dtype_name}",
        "kv": options.kv,
        "lm_head": options.lm_head,
    }


class _Run:
    """One run: holds the conversations that are not done, writes, counts and reports."""

    def __init__(
        self,
        options: DataOptions,
        conversations: Conversations,
        data: DataFile,
        is_enough: Callable[[int], bool] = lambda n: False,
    ) -> None:
        self._options, self._conversations, self._data = options, conversations, data
        self._is_enough = is_enough
        self._dropped: Counter[str] = Counter()
        self._in_a_row = 0
        self._begun = self._reported = time.perf_counter()
        self._tokens_before = data.tokens

    @property
    def is_done(self) -> bool:
        tokens, count = self._options.tokens, self._conversations.count
        enough = tokens is not None and self._data.tokens >= tokens
        enough = enough or self._is_enough(self._data.conversations)
        return enough or (count is not None and self._data.next_number >= count)

    def hold(self, answerer: Callable[[], Answerer]) -> None:
        """Hold the conversations that are not done with the model that `answerer` returns.

        Raises `FasteagleError` where all answers are dropped.
        """
        if self.is_done:
            note(f"nothing to do: {self._options.out} is complete")
            return
        first, count = self._data.next_number, self._conversations.count
        if first:
            note(f"going on in {self._options.out} at conversation {first + 1:,}")
        numbers = itertools.count(first) if count is None else range(first, count)
        dialogues = hold(map(self._conversations.start, numbers), answerer(), self._options.batch)
        for number, dialogue in enumerate(dialogues, first):
            self._write(number, dialogue)
            if time.perf_counter() - self._reported > REPORT_SECONDS:
                self._report()
            if self.is_done:
                break
        self._report()

    def _write(self, number: int, dialogue: Dialogue) -> None:
        dropped = dialogue.dropped
        is_new = self._options.prompts is None and dialogue.answers
        if is_new and self._data.has_prompt(dialogue.answers[0][0].prompt):
            dialogue, dropped = Dialogue([]), "asked before"
        self._data.append(number, dialogue)
        if dropped is not None:
            self._dropped[dropped] += 1
        self._in_a_row = 0 if dialogue.answers else self._in_a_row + 1
        if self._in_a_row >= HOPELESS:
            raise FasteagleError(
                f"the last {HOPELESS} conversations were all dropped ({self._reasons()}): "
                "change --temperature, --max-new-tokens or the source"
            )

    def _report(self) -> None:
        self._reported = time.perf_counter()
        data = self._data
        rate = (data.tokens - self._tokens_before) / (self._reported - self._begun)
        reasons = f" ({self._reasons()})" if self._dropped else ""
        note(
            f"{counted(data.conversations, 'conversation')} | "
            f"{counted(data.tokens, 'token')} of answers | {rate:,.0f} tok/s | "
            f"dropped {self._dropped.total():,}{reasons}"
        )

    def _reasons(self) -> str:
        return ", ".join(f"{n:,} {reason}" for reason, n in self._dropped.most_common())
