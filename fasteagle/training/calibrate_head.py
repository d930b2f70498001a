"""`fasteagle calibrate-head`: fit a draft head to the quantized weights of its target.

The quantized target writes text; the head is measured on a part of it, trained on the target's
features of the rest, and measured again; the better one is written. All files are in a work folder
beside the head, from which an interrupted run goes on.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fasteagle.compile.blocks import compile_now
from fasteagle.device import short_of_memory, unless_short
from fasteagle.errors import FasteagleError, counted, note
from fasteagle.loading.heads.find import LoadedHead, find_head, named_head, own_layer
from fasteagle.loading.heads.write import save_head
from fasteagle.loading.open import OpenedModel, Runtime, open_model
from fasteagle.loading.tensors import read_json
from fasteagle.options import RuntimeOptions
from fasteagle.paths import (
    cache_dir,
    only_writer,
    require_no_model,
    require_no_pipe,
    require_writable,
    write_json,
)
from fasteagle.prompts import Conversation, read_conversations
from fasteagle.quant.scheme import Scheme
from fasteagle.training.data import cached_features, choose_held_out, store_key, without
from fasteagle.training.data_file import note_other_writer, require_same
from fasteagle.training.generate_data import write_text
from fasteagle.training.options import CalibrateOptions, DataOptions, TrainOptions
from fasteagle.training.train import Trainer, head_header
from fasteagle.training.train_head import check_trainable, with_draft_vocab

MIN_CONVERSATIONS = 24
ANSWER_TOKENS = 256
LEAST_TOKENS = MIN_CONVERSATIONS * ANSWER_TOKENS  # enough conversations, however long they are
TEXT_SHARE = 0.5  # of the time
FEWEST_STEPS = 20
PROBED_STEPS = 6
SAVE_EVERY = 25  # steps
SHORT_OF_MEMORY = "use --device cpu, a smaller --max-seq-len, or a smaller model"


def calibrate_head(model: str, runtime: RuntimeOptions, options: CalibrateOptions) -> None:
    """Fit the draft head of `model` to its quantized weights and write it where chat finds it."""
    begun = time.perf_counter()
    if runtime.quant is None and runtime.dtype != "auto":
        raise FasteagleError(
            f"precision {runtime.dtype} is not quantized, and heads are calibrated to quantized "
            "weights: give --int4, --int8 or a scheme"
        )
    opened = open_model(model, runtime)
    runtime = dataclasses.replace(runtime, quant=opened.quant_of(runtime) or "int4")
    _check_early(opened, runtime, options)
    head = None
    if options.head is not None:
        head = named_head(options.head).loaded(opened.checkpoint.config, options.tap_layers)
    prepared = opened.prepared(runtime)
    identity = prepared.checkpoint.fingerprint
    head = head or usual_head(opened, identity, options.tap_layers)
    scheme = prepared.scheme
    assert scheme is not None, "named above"
    is_timed = options.data is None or options.steps is None
    minutes = f": about {counted(options.minutes, 'minute')}" if is_timed else ""
    note(f"calibrating the draft head ({head.origin}) to {prepared.name} at {scheme.name}{minutes}")
    # "." and ".." have no name.
    out = Path(os.path.abspath(options.out or cache_dir() / "heads" / identity))
    if not out.name:
        raise FasteagleError(f"out {out} is no place for a head: name a folder in it")
    folder = out.with_name(out.name + ".calibrating")
    require_writable(folder / "state.json")
    with only_writer(folder):
        work = Work(folder, _key(identity, scheme, head, options), options.resume, begun)
        target = Runtime(opened.name, prepared.checkpoint, opened.tokenizer, prepared.engine())
        conversations = _text(target, options, work)
        unless_short(
            lambda: _calibrate(target, head, conversations, options, work, out),
            lambda: short_of_memory("calibrating", prepared.device, lambda free: SHORT_OF_MEMORY),
        )
        note(f"head written to {out}")
        shutil.rmtree(folder)


def _check_early(opened: OpenedModel, runtime: RuntimeOptions, options: CalibrateOptions) -> None:
    """Raise `FasteagleError` for all errors that can be known before weights are read."""
    config = opened.checkpoint.config
    check_trainable(config, runtime, "draft-vocab", options.draft_vocab)
    longest = runtime.seq_len_for(config.max_seq_len, opened.name)
    if options.data is not None:
        require_no_pipe(options.data)  # it is read again after the weights
        note_other_writer(options.data, opened.name, opened.checkpoint.fingerprint)
        _require_enough(read_conversations(options.data, config.vocab_size, longest))
    elif options.tokens < LEAST_TOKENS:
        raise FasteagleError(
            f"tokens {options.tokens:,} are too few for {MIN_CONVERSATIONS} conversations: use "
            f"{LEAST_TOKENS:,} or more"
        )
    if options.out is not None:
        if not (options.out / "calibration.json").exists():
            require_no_model(options.out)
        require_writable(options.out / "config.json")


def usual_head(
    opened: OpenedModel, identity: str, aux_layers: tuple[int, ...] | None = None
) -> LoadedHead:
    """Return the draft head that chat would use; raise `FasteagleError` where there is none."""
    place = find_head(opened.name, identity) or own_layer(opened.checkpoint, opened.path)
    if place is None:
        raise FasteagleError(
            f"no draft head is known for {opened.name}: give one with --head, or train one with "
            "`fasteagle train-head`"
        )
    return place.loaded(opened.checkpoint.config, aux_layers)


def training_options(n_steps: int, algorithm: str) -> TrainOptions:
    """Return options for short further training: low learning rate, self-fed features, no noise."""
    return TrainOptions(
        algorithm=algorithm,
        lr=1e-4,
        steps=n_steps,
        warmup=min(50, n_steps // 4 + 1),
        self_fed_steps=2,
        batch_tokens=2048,
        noise=0.0,
    )


def _key(
    identity: str, scheme: Scheme, head: LoadedHead, options: CalibrateOptions
) -> dict[str, Any]:
    """Return the values that must not change between the parts of a run."""
    return {
        "model": identity,
        "scheme": scheme.name,
        "head": head.origin,
        "head_digest": head.digest,
        "tap_layers": list(options.tap_layers or ()),
        "data": str(options.data),
        **{k: getattr(options, k) for k in ("tokens", "minutes", "steps", "draft_vocab")},
    }


def _text(target: Runtime, options: CalibrateOptions, work: Work) -> list[Conversation]:
    """Return the quantized target's own conversations, or those of --data."""
    path = options.data or work.folder / "text.jsonl"
    if options.data is None:
        limit = 60 * options.minutes * TEXT_SHARE
        data = DataOptions(
            self_written=True, tokens=options.tokens, max_new_tokens=ANSWER_TOKENS, out=path
        )

        def is_enough(n: int) -> bool:
            return n >= MIN_CONVERSATIONS and work.seconds > limit

        work.once("text", lambda: write_text(target, data, is_enough))
    config, longest = target.checkpoint.config, target.engine.max_seq_len
    conversations = read_conversations(path, config.vocab_size, longest)
    _require_enough(conversations)
    return conversations


def _require_enough(conversations: Sequence[Conversation]) -> None:
    if len(conversations) < MIN_CONVERSATIONS:
        raise FasteagleError(
            f"{counted(len(conversations), 'conversation')}, too few to calibrate on: give "
            f"{MIN_CONVERSATIONS} or more"
        )


def _calibrate(
    target: Runtime,
    head: LoadedHead,
    conversations: Sequence[Conversation],
    options: CalibrateOptions,
    work: Work,
    out: Path,
) -> None:
    """Measure, distil, measure; write the draft head with the higher tau on held-out text."""
    engine, aux_layers = target.engine, head.head.config.aux_layers
    key = store_key(conversations, target.checkpoint.fingerprint, aux_layers)
    compile_now(engine)
    store = cached_features(engine, conversations, work.folder / key, aux_layers=aux_layers)
    held_out = choose_held_out(conversations, max(8, len(conversations) // 8))
    training = without(conversations, held_out)
    first = with_draft_vocab(head.head, training, engine.model, options.draft_vocab)

    def student(n_steps: int) -> Trainer:
        """Return the training of a copy of `first` on the quantized target's features."""
        copied = copy.deepcopy(first).float().requires_grad_(True)
        train = training_options(n_steps, "eagle3" if aux_layers else "eagle1")
        ids = first.target_ids()
        run = work.folder / "run"
        return Trainer(copied, engine.model, store, held_out, ids, train, run, identity=key)

    before = student(1).evaluate()
    note(f"before: {before}")

    def steps_within() -> int:
        """Return the number of steps that fit into --minutes, by the time of a few of them."""
        seconds = student(PROBED_STEPS).seconds_a_step()
        left = 60 * options.minutes - work.seconds
        return max(FEWEST_STEPS, int(left / (1.3 * seconds)))  # evaluations take the 0.3

    n_steps = work.once("steps", lambda: options.steps or steps_within())
    trainer = student(n_steps)
    trainer.resume()
    trainer.run(max(1, n_steps // 8), SAVE_EVERY)
    after = trainer.evaluate()
    is_better = after.tau > before.tau
    note(f"distilled: {after}: {'kept' if is_better else 'not kept'}")
    better, held = (trainer.head, after) if is_better else (first, before)
    header = head_header(better, target, trainer.training_tokens, held.as_dict())
    report = {
        "header": header,
        "head": head.origin,
        "steps": n_steps,
        "minutes": round(work.seconds / 60, 1),
        "before": before.as_dict(),
        "distilled": {"kept": is_better, **after.as_dict()},
    }
    write_json(out / "calibration.json", report)  # first: a head without it is another run's
    save_head(out, better, header, torch.bfloat16)


class Work:
    """Folder of a run that may be cut off, with the results of its finished parts."""

    def __init__(self, folder: Path, key: dict[str, Any], resume: bool, begun: float) -> None:
        """Open the folder; `begun` is when this part of the run began, by `time.perf_counter`.

        Raises `FasteagleError` for a folder of another run, or without `resume`.
        """
        self.folder, self._path = folder, folder / "state.json"
        self._state: dict[str, Any] = {"key": key, "results": {}, "spent": 0.0}
        if self._path.exists():
            self._state = read_json(self._path)
            kinds: dict[str, Any] = {"key": dict, "results": dict, "spent": int | float}
            if not all(isinstance(self._state.get(name), kind) for name, kind in kinds.items()):
                raise FasteagleError(f"{self._path} is no state of a calibration: remove {folder}")
            if not resume:
                raise FasteagleError(
                    f"{folder} holds an unfinished calibration: continue it with --resume, or "
                    "remove it"
                )
            require_same(folder, self._state["key"], key)
        elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise FasteagleError(f"{folder} is no folder of a calibration: move it, or its files")
        folder.mkdir(parents=True, exist_ok=True)
        self._begun = begun - self._state["spent"]
        self._save()

    @property
    def seconds(self) -> float:
        """Time spent so far, over all parts of the run."""
        return time.perf_counter() - self._begun

    def once(self, name: str, compute: Callable[[], Any]) -> Any:
        """Return the result `name` of this run, computed now if no part of it has done so."""
        results = self._state["results"]
        if name not in results:
            results[name] = compute()
            self._save()
        return results[name]

    def _save(self) -> None:
        self._state["spent"] = self.seconds
        write_json(self._path, self._state)
