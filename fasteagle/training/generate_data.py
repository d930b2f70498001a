"""What `fasteagle generate-data` does: a model answers, and its answers become training text."""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, Protocol

from fasteagle.errors import FasteagleError, note
from fasteagle.loading.open import OpenedModel, PreparedModel, open_for
from fasteagle.loading.tensors import fingerprint
from fasteagle.loading.text import user_prefix
from fasteagle.options import RuntimeOptions
from fasteagle.paths import require_writable
from fasteagle.training.data_file import DataFile
from fasteagle.training.dialogues import Conversations, Conversing, Dialogue, in_order
from fasteagle.training.filters import Excluded
from fasteagle.training.local_model import LocalModel
from fasteagle.training.options import DataOptions
from fasteagle.training.served_model import ServedModel

REPORT_SECONDS = 10.0
HOPELESS = 200  # conversations dropped one after the other


class Model(Protocol):
    """Whoever answers."""

    def hold(self, started: Iterator[tuple[int, Conversing]]) -> Iterator[tuple[int, Dialogue]]:
        """The conversations, by number, as they end."""


def generate_data(
    model: str, runtime: RuntimeOptions, options: DataOptions, api_key: str | None
) -> None:
    """Let `model`, or a server that has it, answer; append what is kept to `options.out`."""
    if options.base_url is not None and runtime != RuntimeOptions():
        raise FasteagleError(
            "the server runs the model: with --base-url leave out --device, --int4 and what else "
            "says how to run it"
        )
    excluded = Excluded.of_files(options.exclude)
    conversations = Conversations(options, excluded)
    require_writable(options.out)
    opened = open_for(model, runtime)
    if options.self_written:
        user_prefix(opened.tokenizer)  # refuses a template without one
    prepared = None if options.base_url else opened.prepared(runtime)
    settings = _settings(opened, prepared, options, conversations, excluded)
    data = DataFile(options.out, settings)
    try:
        run = _Run(options, conversations, data)
        if run.is_done:
            note(f"nothing to do: {options.out} holds what was asked for")
            return
        run.hold(_answering(model, opened, prepared, options, api_key))
    finally:
        data.close()


def _answering(
    model: str,
    opened: OpenedModel,
    prepared: PreparedModel | None,
    options: DataOptions,
    api_key: str | None,
) -> Model:
    """The server that was named, or the model, loaded now."""
    if options.base_url is not None:
        name = options.served_model or model
        return ServedModel(options.base_url, name, opened.tokenizer, options.batch, api_key)
    assert prepared is not None, "made where no server is named"
    start = time.perf_counter()
    engine = prepared.engine()
    note(f"{prepared}, loaded in {time.perf_counter() - start:.1f} s")
    return LocalModel(engine, opened.tokenizer, options.batch)


def _settings(
    opened: OpenedModel,
    prepared: PreparedModel | None,
    options: DataOptions,
    conversations: Conversations,
    excluded: Excluded,
) -> dict[str, Any]:
    """What changes the text, but for how much of it is asked for."""
    source = "prompts" if options.prompts else "seeds" if options.seeds else "self"
    scheme = prepared.scheme.name if prepared and prepared.scheme else "dense"
    found = {
        "model": opened.name,
        "fingerprint": fingerprint(opened.checkpoint)[:16],
        "precision": f"{scheme} {prepared.dtype_name}" if prepared else "the server's",
        "served_model": options.served_model,
        "source": f"{source} {conversations.identity()}",
        "exclude": excluded.identity(),
        "temperature": list(options.temperatures),
        "top_p": options.top_p,
        "max_new_tokens": options.max_new_tokens,
        "seed": options.seed,
        "drop_cut": options.drop_cut,
    }
    if prepared is not None:
        # Left out where they are as ever: files begun before there was a choice go on.
        usual, asked = RuntimeOptions(), prepared.options
        found |= {
            name: getattr(asked, name)
            for name in ("kv", "lm_head")
            if getattr(asked, name) != getattr(usual, name)
        }
    return json.loads(json.dumps(found))


class _Run:
    """One run: holds the conversations that are not done, writes, counts and reports."""

    def __init__(self, options: DataOptions, conversations: Conversations, data: DataFile) -> None:
        self._options, self._conversations, self._data = options, conversations, data
        self._dropped: Counter[str] = Counter()
        self._in_a_row = 0
        self._begun = self._reported = time.perf_counter()
        self._tokens_before = data.tokens
        if data.next_number:
            note(f"going on in {options.out} at conversation {data.next_number + 1:,}")

    @property
    def is_done(self) -> bool:
        tokens, count = self._options.tokens, self._conversations.count
        enough = tokens is not None and self._data.tokens >= tokens
        return enough or (count is not None and self._data.next_number >= count)

    def hold(self, model: Model) -> None:
        """Raises `FasteagleError` where nothing that the model writes is kept."""
        first, count = self._data.next_number, self._conversations.count
        numbers = itertools.count(first) if count is None else iter(range(first, count))
        started = ((number, self._conversations.start(number)) for number in numbers)
        for number, dialogue in in_order(model.hold(started), first):
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
        reasons = self._reasons()
        note(
            f"{data.conversations:,} conversations | {data.tokens:,} tokens of answers | "
            f"{rate:,.0f} tok/s | dropped {self._dropped.total():,}"
            + (f" ({reasons})" if reasons else "")
        )

    def _reasons(self) -> str:
        return ", ".join(f"{n:,} {reason}" for reason, n in self._dropped.most_common())
