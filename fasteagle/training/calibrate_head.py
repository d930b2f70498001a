"""What `fasteagle calibrate-head` does: text, features, stages, a head directory, a report.

Only one target is in memory at a time: the quantized one writes the text, the unquantized one
writes its features to disk, and the quantized one is loaded again for everything else. All files
are in a work folder next to the head, from which an interrupted run continues.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fasteagle.device import available_bytes
from fasteagle.errors import FasteagleError, note
from fasteagle.generate import Engine
from fasteagle.loading.find_head import FoundHead, find_head
from fasteagle.loading.head_file import load_head, save_head
from fasteagle.loading.open import OpenedModel, PreparedModel, compile_now, open_model
from fasteagle.loading.tensors import fingerprint
from fasteagle.loading.text import write_conversations
from fasteagle.model import EagleHead
from fasteagle.options import RuntimeOptions
from fasteagle.paths import cache_dir, write_atomic
from fasteagle.prompts import Conversation, read_conversations
from fasteagle.quant.scheme import Scheme
from fasteagle.training import calibrate
from fasteagle.training.calibrate import peak_bytes
from fasteagle.training.data import FeatureStore, SomeOf, choose_held_out, compute_features
from fasteagle.training.held_out import evaluate
from fasteagle.training.options import CalibrateOptions
from fasteagle.training.report import Candidate, Speeds, draft_with, ready_head, record, show
from fasteagle.training.work import Work

MAP_TOKENS = 16_384  # of unquantized features, for the least-squares map
TEXT_SHARE = 0.45  # of the time
MIN_CONVERSATIONS = 24


def calibrate_head(model: str, runtime: RuntimeOptions, options: CalibrateOptions) -> None:
    """Fit the head of `model` to its quantized weights and write it where chat finds it."""
    opened = open_model(model)
    if runtime.quant is None and opened.checkpoint.own_scheme is None:
        runtime = dataclasses.replace(runtime, quant="int4-g64")
    prepared = opened.prepared(runtime)
    identity = fingerprint(prepared.checkpoint)
    found = find_head(options.head, opened.name, identity)
    if found is None:
        raise FasteagleError(
            f"no draft head for {opened.name} to calibrate: give one with --head, or train one "
            "with `fasteagle train-head`"
        )
    out = options.out or cache_dir() / "heads" / identity
    run = _Run(opened, prepared, options, found, identity)
    run.announce()
    work = Work(out.with_name(out.name + ".calibrating"), run.key(), options.resume)
    run.calibrate(work, out)
    shutil.rmtree(work.folder)


class _Run:
    """One calibration: both checkpoints, the draft head, and the options."""

    def __init__(
        self,
        opened: OpenedModel,
        prepared: PreparedModel,
        options: CalibrateOptions,
        found: FoundHead,
        identity: str,
    ) -> None:
        assert prepared.scheme is not None, "`calibrate_head` asks for one"
        self.opened, self.prepared, self.scheme = opened, prepared, prepared.scheme
        self.options, self.found, self.identity = options, found, identity
        self.name, self.config = opened.name, opened.checkpoint.config
        self.head = load_head(found.path, self.config, options.tap_layers)[0]
        self.head_scheme = dataclasses.replace(self.scheme, method="minmax")

    def key(self) -> dict[str, Any]:
        """What must not change between the parts of a run."""
        return {
            "model": self.identity,
            "scheme": self.scheme.name,
            "head": self.found.origin,
            "tap_layers": list(self.options.tap_layers or ()),
            "data": str(self.options.data),
            "tokens": self.options.tokens,
            "minutes": self.options.minutes,
            "steps": self.options.steps,
        }

    def announce(self) -> None:
        length = min(self.config.max_seq_len, RuntimeOptions.DEFAULT_MAX_SEQ_LEN)
        peak = peak_bytes(self.config, self.head.config, self.scheme, length)
        device = self.prepared.device
        free = available_bytes(device)
        note(
            f"calibrating {self.found.origin} to {self.name} at {self.scheme.name}: at most "
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
            prepared = self.opened.prepared(dataclasses.replace(prepared.options, quant=None))
        engine = prepared.engine()
        compile_now(engine)
        return engine

    def calibrate(self, work: Work, out: Path) -> None:
        """Run all stages; write the head and the report to `out`."""
        engine = self.engine()
        conversations = self.text(engine, work)
        held_out = choose_held_out(conversations, max(8, len(conversations) // 8))
        # A checkpoint stored quantized has no unquantized version to compare with.
        shown = (
            []
            if self.prepared.checkpoint is self.opened.checkpoint
            else self.for_map(conversations, held_out)
        )
        if shown and work.result("unquantized") is None:
            engine.model.to("meta")  # one target at a time
            del engine
            gc.collect()
            self.unquantized(work, [conversations[i] for i in held_out + shown], len(held_out))
            engine = self.engine()
        store = compute_features(engine, conversations, work.folder / "quantized-features")
        candidates = self.stages(work, engine, store, conversations, held_out, shown)
        best = [c for c in candidates if c.kept][-1]
        held = [conversations[i] for i in held_out]
        speeds = Speeds(engine, candidates, held, self.head_scheme)
        quantized = speeds.quantized_is_faster(best.name)
        minutes = work.seconds / 60
        show(candidates, work.result("unquantized"), speeds, best, minutes)
        header = {
            "algorithm": "eagle1",
            "target": self.name,
            "target_fingerprint": self.identity,
            "scheme": self.scheme.name,
            "group_size": self.scheme.group_size or None,
            "head_scheme": self.head_scheme.name if quantized else "bf16",
            "draft_vocab_size": best.head.config.draft_vocab_size,
            "training_tokens": sum(len(c.ids) for c in conversations),
            **best.held.as_dict(),
        }
        report = {
            "header": header,
            "head": self.found.origin,
            "written": best.name,
            "unquantized": work.result("unquantized"),
            "minutes": round(minutes, 1),
            **record(candidates, speeds),
        }
        save_head(out, best.head, header, torch.bfloat16)
        write_atomic(out / "calibration.json", (json.dumps(report, indent=1) + "\n").encode())
        note(f"head written to {out}")

    # Text and features

    def text(self, engine: Engine, work: Work) -> list[Conversation]:
        """The quantized target's own conversations, or those of --data."""
        path = self.options.data
        if path is None:
            path = work.folder / "text.jsonl"
        if self.options.data is None and not work.result("text"):
            draft_with(engine, self.head, self.head_scheme)
            said = [0.0]

            def progress(done: int, total: int) -> None:
                if time.perf_counter() - said[0] > 15 or done == total:
                    said[0] = time.perf_counter()
                    note(f"written {done:,} of {total:,} tokens, {work.seconds / 60:.1f} minutes")

            limit = work.seconds + TEXT_SHARE * 60 * self.options.minutes
            write_conversations(
                engine,
                self.opened.tokenizer,
                path,
                self.options.tokens,
                256,
                progress,
                lambda n: n >= MIN_CONVERSATIONS and work.seconds > limit,
            )
            work.record("text", True)
            engine.use(None)
        found = read_conversations(path, self.config.vocab_size, engine.max_seq_len)
        if len(found) < MIN_CONVERSATIONS:
            raise FasteagleError(
                f"{len(found)} conversations are too few to calibrate on: give "
                f"{MIN_CONVERSATIONS} or more, or a larger --tokens or --minutes"
            )
        return found

    def unquantized(self, work: Work, conversations: Sequence[Conversation], n_held: int) -> None:
        """Stage i on the unquantized target, whose features stay on disk for stage ii."""
        engine = self.engine(quantized=False)
        store = compute_features(engine, conversations, work.folder / "full-features")
        head = ready_head(self.head, engine, None).float()
        held = evaluate(head, engine.model, store, list(range(n_held)))
        work.record("unquantized", held.as_dict())
        note(f"i, unquantized target: tau {held.tau:.3f}")

    def for_map(self, conversations: Sequence[Conversation], held_out: list[int]) -> list[int]:
        """Conversations for the least-squares map: the first ones that are not held out."""
        found, total = [], 0
        for i in sorted(set(range(len(conversations))) - set(held_out)):
            if total >= MAP_TOKENS:
                break
            found.append(i)
            total += len(conversations[i].ids)
        return found

    # The stages

    def stages(
        self,
        work: Work,
        engine: Engine,
        store: FeatureStore,
        conversations: Sequence[Conversation],
        held_out: list[int],
        shown: list[int],
    ) -> list[Candidate]:
        """Run every stage on the best head so far; judge each with quantized weights."""
        held_ids = set(held_out)
        training = [c for i, c in enumerate(conversations) if i not in held_ids]
        found: list[Candidate] = []

        def judge(name: str, head: EagleHead) -> EagleHead:
            best = [c for c in found if c.kept][-1] if found else None
            as_run = calibrate.as_quantized(head, self.head_scheme)
            held = evaluate(ready_head(as_run, engine, None).float(), engine.model, store, held_out)
            gained = None if best is None else calibrate.gain(best.held, held)
            kept = gained is None or gained.is_sure
            found.append(Candidate(name, head, held, kept, gained))
            note(found[-1].line())
            return head if best is None or kept else best.head

        best = judge("i, as it was", self.head)
        if best.config.fc_bias and shown:
            full = FeatureStore(work.folder / "full-features")
            n = len(held_out)
            whole = SomeOf(full, range(n, n + len(shown)))
            mapped = calibrate.fold_feature_map(best, whole, SomeOf(store, shown))
            best = judge("ii, feature map", mapped)
        if best.config.draft_vocab_size < self.config.vocab_size:
            best = judge("iii, vocabulary", calibrate.rebuilt_vocabulary(best, training))
        for name, scheme in (("iv, distilled", None), ("v, quantized", self.head_scheme)):
            trained = self.distill(name, scheme, best, work, engine, store, held_out)
            if trained is None:
                note(f"{name}: left out, the time is up")
            else:
                best = judge(name, trained)
        return found

    def distill(
        self,
        name: str,
        scheme: Scheme | None,
        head: EagleHead,
        work: Work,
        engine: Engine,
        store: FeatureStore,
        held_out: list[int],
    ) -> EagleHead | None:
        """A training run of the given steps, or of half the time that is left.

        None where that is too short.
        """
        folder = work.folder / name.replace(", ", "-")
        finished = folder / "head"
        if (finished / "config.json").exists():
            return load_head(finished, self.config)[0]
        n_steps = self.options.steps or work.result(name)
        if n_steps is None:
            left = 60 * self.options.minutes * 0.92 - work.seconds
            share = left if scheme is not None else left / 2
            n_steps = int(share / self.step_seconds(head, scheme, engine, store, held_out))
            if n_steps < 20:
                return None
            work.record(name, n_steps)
        last = [time.perf_counter()]

        def tick(step: int, loss: float) -> None:
            if time.perf_counter() - last[0] > 20:
                last[0] = time.perf_counter()
                note(f"{name}: step {step:,} of {n_steps:,}, loss {loss:.4f}")

        def report(entry: dict[str, Any]) -> None:
            note(
                f"{name}: step {entry['step']:,}, 0-alpha {entry['alphas'][0]:.3f}, "
                f"tau {entry['tau']:.2f}"
            )

        options = calibrate.training_options(n_steps)
        trained = calibrate.distilled(
            ready_head(head, engine, None),
            engine.model,
            store,
            held_out,
            options,
            folder / "run",
            self.identity,
            scheme,
            report,
            tick,
            save_every=25,
        )
        save_head(finished, trained, {}, torch.float32)
        return load_head(finished, self.config)[0]

    def step_seconds(
        self,
        head: EagleHead,
        scheme: Scheme | None,
        engine: Engine,
        store: FeatureStore,
        held_out: list[int],
    ) -> float:
        """Seconds per training step here, evaluations included, measured on a few steps."""
        times: list[float] = [time.perf_counter()]
        with tempfile.TemporaryDirectory() as name:
            calibrate.distilled(
                ready_head(head, engine, None),
                engine.model,
                store,
                held_out[:4],
                calibrate.training_options(6),
                Path(name),
                "",
                scheme,
                lambda entry: None,
                lambda step, loss: times.append(time.perf_counter()),
                save_every=1000,
            )
        steps = [b - a for a, b in itertools.pairwise(times[1:])]
        return 1.3 * statistics.mean(steps)
