"""`fasteagle calibrate-head`: fit a draft head to the quantized weights of its target.

The quantized target writes text; the head is measured on a part of it, trained on the target's
features of the rest, and measured again; the better one is written. All files are in a work folder
beside the head, from which an interrupted run goes on.
"""

from __future__ import annotations

import copy
import dataclasses
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

from fasteagle.compile.blocks import compile_now
from fasteagle.config import HeadConfig, ModelConfig
from fasteagle.device import available_bytes
from fasteagle.errors import FasteagleError, note
from fasteagle.loading.heads.find import LoadedHead, find_head, named_head
from fasteagle.loading.heads.read import with_vocabulary
from fasteagle.loading.heads.write import save_head
from fasteagle.loading.open import OpenedModel, PreparedModel, Runtime, open_model
from fasteagle.loading.tensors import fingerprint
from fasteagle.model import KEY_BLOCK, EagleHead, Transformer
from fasteagle.options import RuntimeOptions
from fasteagle.paths import cache_dir, require_writable, write_atomic
from fasteagle.prompts import Conversation, read_conversations
from fasteagle.quant.scheme import Scheme
from fasteagle.training.data import (
    Features,
    choose_held_out,
    compute_features,
    frequent_tokens,
    store_key,
)
from fasteagle.training.generate_data import write_text
from fasteagle.training.held_out import HeldOut, evaluate, ready_head
from fasteagle.training.options import CalibrateOptions, DataOptions, TrainOptions
from fasteagle.training.train import Trainer
from fasteagle.training.work import Work

MIN_CONVERSATIONS = 24
ANSWER_TOKENS = 256
TEXT_SHARE = 0.5  # of the time
FEWEST_STEPS = 20
PROBED_STEPS = 6
TELL_SECONDS = 20.0


def calibrate_head(model: str, runtime: RuntimeOptions, options: CalibrateOptions) -> None:
    """Fit the draft head of `model` to its quantized weights and write it where chat finds it."""
    begun = time.perf_counter()
    opened = open_model(model, runtime)
    runtime = dataclasses.replace(runtime, quant=runtime.quant or opened.own_quant or "int4-g64")
    _check_early(opened, runtime, options)
    head = None
    if options.head is not None:
        head = named_head(options.head).loaded(opened.checkpoint.config, options.tap_layers)
    prepared = opened.prepared(runtime)
    identity = fingerprint(prepared.checkpoint)
    head = head or _known_head(opened, identity, options)
    _announce(prepared, head, options)
    out = options.out or cache_dir() / "heads" / identity
    folder = out.with_name(out.name + ".calibrating")
    work = Work(folder, _key(prepared, head, identity, options), options.resume, begun)
    target = Runtime(prepared.name, prepared.checkpoint, prepared.tokenizer, prepared.engine())
    conversations = _text(target, options, work)
    _write(out, _calibrated(target, head, identity, conversations, options, work))
    note(f"head written to {out}")
    shutil.rmtree(work.folder)


def _check_early(opened: OpenedModel, runtime: RuntimeOptions, options: CalibrateOptions) -> None:
    """Raise `FasteagleError` for all errors that can be known before weights are read."""
    if runtime.backend == "torchao":
        raise FasteagleError(
            "a head is calibrated to weights that fasteagle quantizes: leave out -torchao"
        )
    config = opened.checkpoint.config
    if options.draft_vocab is not None and options.draft_vocab > config.vocab_size:
        raise FasteagleError(
            f"draft-vocab {options.draft_vocab:,} is more than the model's {config.vocab_size:,} "
            "tokens: give fewer"
        )
    if options.data is not None:
        read_conversations(options.data, config.vocab_size, config.max_seq_len)
    if options.out is not None:
        require_writable(options.out / "config.json")


def _known_head(opened: OpenedModel, identity: str, options: CalibrateOptions) -> LoadedHead:
    """Return the draft head that chat would use; raise `FasteagleError` where there is none."""
    place = find_head(None, opened.name, identity)
    if place is None:
        raise FasteagleError(
            f"no draft head for {opened.name} to calibrate: give one with --head, or train one "
            "with `fasteagle train-head`"
        )
    return place.loaded(opened.checkpoint.config, options.tap_layers)


def _announce(prepared: PreparedModel, head: LoadedHead, options: CalibrateOptions) -> None:
    """Print what begins; raise `FasteagleError` where memory is short."""
    scheme, config = prepared.scheme, prepared.checkpoint.config
    assert scheme is not None, "`calibrate_head` names one"
    length = prepared.options.seq_len_for(config.max_seq_len, prepared.name)
    peak = peak_bytes(config, head.head.config, scheme, length)
    note(
        f"calibrating {head.origin} to {prepared.name} at {scheme.name}: about "
        f"{options.minutes:g} minutes, {peak / 2**30:.1f} GiB"
    )
    free = available_bytes(prepared.device)
    if free is not None and peak > free:
        raise FasteagleError(
            f"calibration needs {peak / 2**30:.1f} GiB, {free / 2**30:.1f} GiB free on "
            f"{prepared.device}: use --device cpu, a smaller --max-seq-len, or a smaller model"
        )


def peak_bytes(config: ModelConfig, head: HeadConfig, scheme: Scheme, seq_len: int) -> int:
    """Return the peak memory in bytes of a calibration: the quantized target, and training.

    Training holds the head in fp32 with its gradient and Adam's two moments, the LM head's rows of
    the draft vocabulary in 16 bits, and the activations of one batch.
    """
    rows = head.draft_vocab_size * config.dim * 2
    options = training_options(1)
    per_token = 4 * (12 * head.block.dim + 4 * head.block.ffn_dim) * options.n_steps_ahead
    training = 16 * head.linear_params + rows + options.batch_tokens * per_token
    return scheme.model_bytes(config) + config.kv_bytes(seq_len + KEY_BLOCK) + training


def training_options(n_steps: int, algorithm: str = "eagle1") -> TrainOptions:
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
    prepared: PreparedModel, head: LoadedHead, identity: str, options: CalibrateOptions
) -> dict[str, Any]:
    """Return the values that must not change between the parts of a run."""
    assert prepared.scheme is not None, "`calibrate_head` names one"
    return {
        "model": identity,
        "scheme": prepared.scheme.name,
        "head": head.origin,
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

        def write() -> bool:
            write_text(target, data, lambda n: n >= MIN_CONVERSATIONS and work.seconds > limit)
            return True

        work.once("text", write)
    config, longest = target.checkpoint.config, target.engine.max_seq_len
    conversations = read_conversations(path, config.vocab_size, longest)
    if len(conversations) < MIN_CONVERSATIONS:
        raise FasteagleError(
            f"{len(conversations)} conversations are too few to calibrate on: give "
            f"{MIN_CONVERSATIONS} or more, or a larger --tokens"
        )
    return conversations


@dataclasses.dataclass(frozen=True)
class Calibrated:
    """Better of two draft heads, its header, and the record of the run."""

    head: EagleHead
    header: dict[str, Any]
    report: dict[str, Any]


def _calibrated(
    target: Runtime,
    head: LoadedHead,
    identity: str,
    conversations: Sequence[Conversation],
    options: CalibrateOptions,
    work: Work,
) -> Calibrated:
    """Measure, distil, measure; return the draft head with the higher tau on held-out text."""
    engine, aux_layers = target.engine, head.head.config.aux_layers
    key = store_key(conversations, identity, aux_layers)
    compile_now(engine)
    store = compute_features(engine, conversations, work.folder / key, aux_layers=aux_layers)
    held_out = choose_held_out(conversations, max(8, len(conversations) // 8))
    training = [c for i, c in enumerate(conversations) if i not in set(held_out)]
    first = _with_draft_vocab(head.head, training, engine.model, options.draft_vocab)
    before = evaluate(ready_head(first, engine), engine.model, store, held_out)
    _tell("before", before)
    distilling = _Distilling(first, engine.model, store, held_out, f"{key} {head.origin}")
    n_steps = work.once("steps", lambda: options.steps or distilling.steps_within(options, work))
    distilled = distilling.run(n_steps, work)
    after = distilled.evaluate()
    is_better = after.tau > before.tau
    _tell("distilled", after, "kept" if is_better else "not kept")
    better, held = (distilled.head, after) if is_better else (first, before)
    scheme = target.checkpoint.scheme
    assert scheme is not None, "`calibrate_head` names one"
    header = {
        "algorithm": "eagle3" if aux_layers else "eagle1",
        "target": target.name,
        "target_fingerprint": identity,
        "scheme": scheme.name,
        "group_size": scheme.group_size or None,
        "draft_vocab_size": better.config.draft_vocab_size,
        "training_tokens": sum(len(c.ids) for c in conversations),
        **held.as_dict(),
    }
    report = {
        "header": header,
        "head": head.origin,
        "steps": n_steps,
        "minutes": round(work.seconds / 60, 1),
        "before": before.as_dict(),
        "distilled": {"kept": is_better, **after.as_dict()},
    }
    return Calibrated(better, header, report)


def _tell(stage: str, held: HeldOut, verdict: str = "") -> None:
    alphas = " ".join(f"{alpha:.3f}" for alpha in held.alphas)
    note(f"{stage}: tau {held.tau:.3f}, n-alpha {alphas}{verdict and f': {verdict}'}")


def _with_draft_vocab(
    head: EagleHead, training: Sequence[Conversation], target: Transformer, size: int | None
) -> EagleHead:
    """Return the draft head with the `size` most frequent tokens of `training`; None: unchanged.

    Where the text has fewer distinct tokens, the old draft vocabulary supplies the others.
    """
    if size is None:
        return head
    ids = frequent_tokens(training, size, head.target_ids().tolist())
    return with_vocabulary(head, ids, target.head_rows)


class _Distilling:
    """Training of a copy of a draft head on the features of the quantized target."""

    def __init__(
        self,
        head: EagleHead,
        target: Transformer,
        store: Features,
        held_out: list[int],
        identity: str,
    ) -> None:
        self._head, self._target, self._store = head, target, store
        self._held_out, self._identity = held_out, identity
        self._algorithm = "eagle3" if head.config.aux_layers else "eagle1"

    def run(self, n_steps: int, work: Work) -> Trainer:
        """Train for `n_steps`, going on where an earlier part of the run stopped."""
        trainer = self._trainer(n_steps, work.folder / "run", self._held_out)
        trainer.resume()
        last = time.perf_counter()

        def tick(step: int, loss: float) -> None:
            nonlocal last
            if time.perf_counter() - last > TELL_SECONDS:
                last = time.perf_counter()
                work.save()
                note(f"step {step:,} of {n_steps:,}, loss {loss:.4f}")

        def report(entry: dict[str, Any]) -> None:
            note(f"step {entry['step']:,} of {n_steps:,}, tau {entry['tau']:.2f}")

        trainer.run(report, every=max(1, n_steps // 8), save_every=25, tick=tick)
        return trainer

    def steps_within(self, options: CalibrateOptions, work: Work) -> int:
        """Return the number of steps that fit into --minutes, by the time of a few of them."""
        times: list[float] = []
        with tempfile.TemporaryDirectory() as folder:
            probe = self._trainer(PROBED_STEPS, Path(folder), self._held_out[:4])
            probe.run(lambda entry: None, tick=lambda *step: times.append(time.perf_counter()))
        seconds = statistics.mean(b - a for a, b in itertools.pairwise(times))
        left = 60 * options.minutes - work.seconds
        return max(FEWEST_STEPS, int(left / (1.3 * seconds)))  # evaluations take the 0.3

    def _trainer(self, n_steps: int, folder: Path, held_out: list[int]) -> Trainer:
        student = copy.deepcopy(self._head).float()
        student.requires_grad_(True)
        ids, options = student.target_ids(), training_options(n_steps, self._algorithm)
        store, identity = self._store, self._identity
        return Trainer(student, self._target, store, held_out, ids, options, folder, identity)


def _write(out: Path, calibrated: Calibrated) -> None:
    save_head(out, calibrated.head, calibrated.header, torch.bfloat16)
    report = json.dumps(calibrated.report, indent=1) + "\n"
    write_atomic(out / "calibration.json", report.encode())
