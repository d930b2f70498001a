"""One calibration of a draft head: its models, its time, its text and features."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fasteagle.compile.blocks import compile_now
from fasteagle.device import available_bytes, pick_dtype
from fasteagle.errors import FasteagleError, note
from fasteagle.generate import Engine
from fasteagle.loading.find_head import LoadedHead
from fasteagle.loading.open import OpenedModel, PreparedModel
from fasteagle.loading.text import write_conversations
from fasteagle.prompts import Conversation, read_conversations
from fasteagle.training.calibrate import peak_bytes
from fasteagle.training.data import compute_features
from fasteagle.training.held_out import evaluate
from fasteagle.training.options import CalibrateOptions
from fasteagle.training.report import draft_with, ready_head
from fasteagle.training.work import Work

MAP_TOKENS = 16_384  # of unquantized features, for the least-squares map
TEXT_SHARE = 0.45  # of the time
MIN_CONVERSATIONS = 24
ANSWER_TOKENS = 256


class Calibration:
    """One calibration: both checkpoints, the draft head, and the options."""

    def __init__(
        self,
        opened: OpenedModel,
        prepared: PreparedModel,
        options: CalibrateOptions,
        head: LoadedHead,
        identity: str,
        out: Path,
        begun: float,
    ) -> None:
        assert prepared.scheme is not None, "`calibrate_head` asks for one"
        self.opened, self.prepared, self.scheme = opened, prepared, prepared.scheme
        self.options, self.identity = options, identity
        self.name, self.config = opened.name, opened.checkpoint.config
        self.origin, self.head = head.origin, head.head
        self.tap_layers = self.head.config.tap_layers
        self.algorithm = "eagle3" if self.tap_layers else "eagle1"
        self.head_scheme = dataclasses.replace(self.scheme, method="minmax")
        # Weights that run in the files' own bits have no unquantized version to compare with.
        self.has_unquantized = self.scheme.method != "own"
        self.engine_seconds = 0.0  # to load and compile a target, as measured
        self.announce()
        self.work = Work(
            out.with_name(out.name + ".calibrating"), self.key(), options.resume, begun
        )
        self._warned = False

    def key(self) -> dict[str, Any]:
        """What must not change between the parts of a run."""
        return {
            "model": self.identity,
            "scheme": self.scheme.name,
            "head": self.origin,
            "tap_layers": list(self.options.tap_layers or ()),
            "data": str(self.options.data),
            "tokens": self.options.tokens,
            "minutes": self.options.minutes,
            "steps": self.options.steps,
        }

    def announce(self) -> None:
        length = self.prepared.options.seq_len_for(self.config.max_seq_len, self.name)
        peak = peak_bytes(self.config, self.head.config, self.scheme, length)
        device = self.prepared.device
        free = available_bytes(device)
        note(
            f"calibrating {self.origin} to {self.name} at {self.scheme.name}: at most "
            f"{self.options.minutes:g} minutes, about {peak / 2**30:.1f} GiB"
        )
        if free is not None and peak > free:
            raise FasteagleError(
                f"calibration needs {peak / 2**30:.1f} GiB, {free / 2**30:.1f} GiB free on "
                f"{device}: use --device cpu, a smaller --max-seq-len, or a smaller model"
            )

    def engine(self, quantized: bool = True) -> Engine:
        """The quantized target, or the unquantized one."""
        prepared = self.prepared
        if not quantized:
            dense = pick_dtype("auto", prepared.device)
            options = dataclasses.replace(prepared.options, quant=None, dtype=dense)
            prepared = self.opened.prepared(options)
        begin = time.perf_counter()
        engine = prepared.engine()
        compile_now(engine)
        self.engine_seconds = time.perf_counter() - begin
        return engine

    @property
    def reserve(self) -> float:
        """Seconds that the comparison of speeds will take: four engines to compile, and answers."""
        return 4 * self.engine_seconds

    @property
    def left(self) -> float:
        """Seconds until that comparison must begin."""
        return self.work.left(self.options.minutes, self.reserve)

    # Text and features

    def text(self, engine: Engine) -> list[Conversation]:
        """The quantized target's own conversations, or those of --data."""
        path = self.options.data
        if path is None:
            path = self.work.folder / "text.jsonl"
        if self.options.data is None and not self.work.result("text"):
            begun = self.work.seconds
            draft_with(engine, self.head, self.head_scheme)
            # Compiling with a draft head takes longer, and the comparison at the end does it too.
            self.engine_seconds = max(self.engine_seconds, self.work.seconds - begun)
            said, begin = [0.0], self.work.seconds

            def progress(done: int, total: int) -> None:
                if not said[0]:
                    text = (self.work.seconds - begin) * MIN_CONVERSATIONS
                    self.warn_of_less_time_than_it_takes(begin + text)
                if time.perf_counter() - said[0] > 15:
                    said[0] = time.perf_counter()
                    minutes = self.work.seconds / 60
                    note(f"written {done:,} of {total:,} tokens, {minutes:.1f} minutes")

            limit = self.work.seconds + TEXT_SHARE * self.left
            write_conversations(
                engine,
                self.opened.tokenizer,
                path,
                self.options.tokens,
                ANSWER_TOKENS,
                progress,
                lambda n: n >= MIN_CONVERSATIONS and self.work.seconds > limit,
                fewest=MIN_CONVERSATIONS,
            )
            self.work.record("text", True)
            engine.use(None)
        found = read_conversations(path, self.config.vocab_size, engine.max_seq_len)
        if len(found) < MIN_CONVERSATIONS:
            raise FasteagleError(
                f"{len(found)} conversations are too few to calibrate on: give "
                f"{MIN_CONVERSATIONS} or more, or a larger --tokens or --minutes"
            )
        return found

    def warn_of_less_time_than_it_takes(self, seconds: float) -> None:
        """A line, once, if `seconds` and the comparison at the end are more than was given."""
        least = (seconds + self.reserve) / 60
        if least > self.options.minutes and not self._warned:
            self._warned = True
            note(f"the least that calibration needs takes about {least:.0f} minutes here")

    def unquantized(self, conversations: Sequence[Conversation], n_held: int) -> None:
        """Stage i on the unquantized target, whose features stay on disk for stage ii."""
        engine = self.engine(quantized=False)
        folder = self.work.folder / "full-features"
        store = compute_features(engine, conversations, folder, tap_layers=self.tap_layers)
        head = ready_head(self.head, engine, None).float()
        held = evaluate(head, engine.model, store, list(range(n_held)))
        self.work.record("unquantized", held.as_dict())
        note(f"i, unquantized target: tau {held.tau:.3f}")

    def for_map(
        self, engine: Engine, conversations: Sequence[Conversation], held_out: list[int]
    ) -> list[int]:
        """Conversations for the least-squares map: the first ones that are not held out.

        None where the unquantized target would take a third of the time that is left.
        """
        if not self.has_unquantized:
            return []
        begin, first = time.perf_counter(), conversations[0].ids
        engine.features(first)
        rate = (time.perf_counter() - begin) / len(first)
        needed = 2 * self.engine_seconds + 1.5 * rate * MAP_TOKENS
        if self.work.result("unquantized") is None and needed > self.left / 3:
            note("i, ii: left out, the unquantized target takes too long for the time that is left")
            return []
        found, total = [], 0
        for i in sorted(set(range(len(conversations))) - set(held_out)):
            if total >= MAP_TOKENS:
                break
            found.append(i)
            total += len(conversations[i].ids)
        return found
