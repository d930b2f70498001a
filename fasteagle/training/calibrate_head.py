"""What `fasteagle calibrate-head` does: text, features, stages, a head directory, a report.

Only one target is in memory at a time: the quantized one writes the text, the unquantized one
writes its features to disk, and the quantized one is loaded again for everything else. All files
are in a work folder next to the head, from which an interrupted run continues.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import shutil
import time
from pathlib import Path

import torch

from fasteagle.errors import FasteagleError, note
from fasteagle.loading.find_head import find_head, named_head
from fasteagle.loading.head_file import save_head
from fasteagle.loading.open import OpenedModel, open_for
from fasteagle.loading.tensors import fingerprint
from fasteagle.options import RuntimeOptions
from fasteagle.paths import cache_dir, require_writable, write_atomic
from fasteagle.prompts import read_conversations
from fasteagle.training.calibration import Calibration
from fasteagle.training.data import choose_held_out, compute_features
from fasteagle.training.options import CalibrateOptions
from fasteagle.training.report import Speeds, record, show
from fasteagle.training.stages import Stages


def calibrate_head(model: str, runtime: RuntimeOptions, options: CalibrateOptions) -> None:
    """Fit the head of `model` to its quantized weights and write it where chat finds it."""
    begun = time.perf_counter()
    opened = open_for(model, runtime)
    quant = runtime.quant or opened.own_quant or "int4-g64"
    runtime = dataclasses.replace(runtime, quant=quant)
    _check_early(opened, runtime, options)
    config, head = opened.checkpoint.config, None
    if options.head is not None:
        head = named_head(options.head).loaded(config, options.tap_layers)
    prepared = opened.prepared(runtime)
    identity = fingerprint(prepared.checkpoint)
    if head is None:
        found = find_head(None, opened.name, identity)
        if found is None:
            raise FasteagleError(
                f"no draft head for {opened.name} to calibrate: give one with --head, or train one "
                "with `fasteagle train-head`"
            )
        head = found.loaded(config, options.tap_layers)
    out = options.out or cache_dir() / "heads" / identity
    run = Calibration(opened, prepared, options, head, identity, out, begun)
    _calibrate(run, out)
    shutil.rmtree(run.work.folder)


def _check_early(opened: OpenedModel, runtime: RuntimeOptions, options: CalibrateOptions) -> None:
    """Raise `FasteagleError` for all that is wrong before weights are read."""
    if runtime.backend == "torchao":
        raise FasteagleError(
            "a head is calibrated to weights that fasteagle quantizes: leave out --quant-backend"
        )
    config = opened.checkpoint.config
    if options.data is not None:
        read_conversations(options.data, config.vocab_size, config.max_seq_len)
    if options.out is not None:
        require_writable(options.out / "config.json")


def _calibrate(run: Calibration, out: Path) -> None:
    """Run all stages; write the head and the report to `out`."""
    engine = run.engine()
    run.warn_of_less_time_than_it_takes(run.work.seconds)
    conversations = run.text(engine)
    held_out = choose_held_out(conversations, max(8, len(conversations) // 8))
    shown = run.for_map(engine, conversations, held_out)
    if shown and run.work.result("unquantized") is None:
        engine.model.to("meta")  # one target at a time
        del engine
        gc.collect()
        run.unquantized([conversations[i] for i in held_out + shown], len(held_out))
        engine = run.engine()
    folder = run.work.folder / "quantized-features"
    store = compute_features(engine, conversations, folder, tap_layers=run.tap_layers)
    candidates = Stages(run, engine, store, held_out).run(conversations, shown)
    best = [c for c in candidates if c.kept][-1]
    held = [conversations[i] for i in held_out]
    compared = [candidates[0], *([best] if best is not candidates[0] else [])]
    speeds = Speeds(engine, compared, held, run.head_scheme)
    quantized = speeds.quantized_is_faster(best.name)
    minutes = run.work.seconds / 60
    show(candidates, run.work.result("unquantized"), speeds, best, minutes)
    header = {
        "algorithm": run.algorithm,
        "target": run.name,
        "target_fingerprint": run.identity,
        "scheme": run.scheme.name,
        "group_size": run.scheme.group_size or None,
        "head_scheme": run.head_scheme.name if quantized else "bf16",
        "draft_vocab_size": best.head.config.draft_vocab_size,
        "training_tokens": sum(len(c.ids) for c in conversations),
        **best.held.as_dict(),
    }
    report = {
        "header": header,
        "head": run.origin,
        "written": best.name,
        "unquantized": run.work.result("unquantized"),
        "minutes": round(minutes, 1),
        **record(candidates, speeds),
    }
    save_head(out, best.head, header, torch.bfloat16)
    write_atomic(out / "calibration.json", (json.dumps(report, indent=1) + "\n").encode())
    note(f"head written to {out}")
