"""`fasteagle train-head`: text, features, training, a head directory."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fasteagle.compile.blocks import compile_now
from fasteagle.config import ModelConfig
from fasteagle.errors import FasteagleError, counted, note
from fasteagle.loading.heads.read import open_head, with_vocabulary
from fasteagle.loading.heads.write import save_head
from fasteagle.loading.open import OpenedModel, Runtime, open_model
from fasteagle.loading.tensors import files_digest
from fasteagle.model import EagleHead, Transformer
from fasteagle.option_fields import require_unset
from fasteagle.options import RuntimeOptions
from fasteagle.paths import (
    cache_dir,
    mark_used,
    only_writer,
    remove_unused,
    require_no_model,
    require_no_pipe,
    require_writable,
    write_json,
)
from fasteagle.prompts import Conversation, read_conversations, read_questions
from fasteagle.training.data import (
    Features,
    cached_features,
    choose_held_out,
    frequent_tokens,
    live_features,
    shards_of,
    store_key,
    without,
)
from fasteagle.training.data_file import note_other_writer
from fasteagle.training.generate_data import write_text
from fasteagle.training.options import DataOptions, TrainOptions, TrainRun
from fasteagle.training.parallel import Ranks, join, local_device
from fasteagle.training.train import Trainer, head_header, new_head

NEW_DRAFT_VOCAB = 16384  # of a head that begins from nothing


def train_head(
    model: str, runtime_options: RuntimeOptions, run: TrainRun, options: TrainOptions
) -> None:
    """Train a draft head for `model`, alone or with other processes; write it to `run.out`."""
    _check_place(run)
    if options.algorithm != "eagle1" and not options.borrow_lm_head:  # all of its rows are trained
        require_unset(options, ["loss_vocab_size"], "with an LM head of the head's own")
    if run.init is not None:
        require_unset(options, ["init_scale"], "with --init")
    ranks = join()
    with only_writer(run.out) if ranks.is_first else contextlib.nullcontext():
        _train_head(model, runtime_options, run, options, ranks)


def _train_head(
    model: str, runtime_options: RuntimeOptions, run: TrainRun, options: TrainOptions, ranks: Ranks
) -> None:
    """Train a draft head in `run.out`, which no other run writes meanwhile."""
    device = local_device()
    if device is not None and runtime_options.device == "auto":
        runtime_options = dataclasses.replace(runtime_options, device=device)
    opened = open_model(model, runtime_options)
    opened.check(runtime_options)
    size = options.draft_vocab_size
    check_trainable(opened.checkpoint.config, runtime_options, "draft-vocab-size", size)
    init = init_head(opened.checkpoint.config, run.init, options)
    data = _data(opened, runtime_options, run)
    runtime = opened.loaded(runtime_options)
    with ranks.first_alone():  # writes text, which the others then find
        conversations = _conversations(runtime, run, data)
    aux_layers = options.aux_layers_of(runtime.checkpoint.config.n_layer)
    scheme = runtime.checkpoint.scheme
    precision = "dense" if scheme is None else scheme.name
    computed = (
        f"{runtime.checkpoint.fingerprint} {precision} {runtime.engine.dtype} {runtime_options.kv}"
    )
    text = store_key(conversations, computed, aux_layers)
    store = _features(runtime, conversations, run, aux_layers, text, ranks)
    held_out = choose_held_out(conversations, run.held_out)
    training = without(conversations, held_out)
    target = runtime.engine.model
    head, loss_ids = head_to_train(target, training, init, options)
    origin = f"{text} {None if run.init is None else files_digest(run.init)}"
    trainer = Trainer(head, target, store, held_out, loss_ids, options, run.out, origin, ranks)
    resumed = run.resume and trainer.resume()
    if run.resume and ranks.is_first:
        where = f"continuing at step {trainer.step:,}"
        note(where if resumed else f"nothing to continue in {run.out}: training begins at step 0")
    trainer.run(run.every, patience=run.patience)
    if ranks.is_first:
        write_head(trainer, runtime, ["fasteagle", *sys.argv[1:]])
    ranks.wait()


def _check_place(run: TrainRun) -> None:
    """Raise `FasteagleError` where `run.out` holds a run that this one does not continue."""
    state = run.out / "state.pt"
    if state.exists() and not run.resume:
        raise FasteagleError(
            f"{run.out} holds an unfinished run: continue it with --resume, or give another --out"
        )
    if not state.exists():
        require_no_model(run.out)
    require_writable(state)


def check_trainable(
    config: ModelConfig, runtime: RuntimeOptions, option: str, draft_vocab: int | None
) -> None:
    """Raise `FasteagleError` for weights and sizes that no draft head is trained for.

    `option` names the size of the draft vocabulary.
    """
    if runtime.backend == "torchao":
        raise FasteagleError(
            "a head is trained on weights that fasteagle quantizes: leave -torchao out"
        )
    if draft_vocab is not None and draft_vocab > config.vocab_size:
        raise FasteagleError(
            f"{option} {draft_vocab:,} is more than the model's {config.vocab_size:,} tokens: give "
            "fewer"
        )


def _data(
    opened: OpenedModel, runtime_options: RuntimeOptions, run: TrainRun
) -> list[Conversation]:
    """Return the text in --data; raise `FasteagleError` for errors seen before loading."""
    if not run.data and run.prompts is None:
        raise FasteagleError("nothing to train on: give --data, or --prompts to be answered now")
    config = opened.checkpoint.config
    if run.prompts is not None:
        require_no_pipe(run.prompts)  # it is read again when the model answers
        read_questions(run.prompts)
    for path in run.data:
        note_other_writer(path, opened.name, opened.checkpoint.fingerprint)
    max_len = min(run.max_len, runtime_options.seq_len_for(config.max_seq_len, opened.name))
    data = [c for path in run.data for c in read_conversations(path, config.vocab_size, max_len)]
    if run.prompts is None:
        _require_enough(data, run.held_out)
    return data


def _require_enough(conversations: list[Conversation], held_out: int) -> None:
    if len(conversations) <= held_out:
        raise FasteagleError(
            f"{counted(len(conversations), 'conversation')}, too few to hold {held_out} out: "
            "give more text, or a smaller --held-out"
        )


def _conversations(runtime: Runtime, run: TrainRun, data: list[Conversation]) -> list[Conversation]:
    """Return all text of the run, with the target's answers to --prompts, written now.

    Raises `FasteagleError` if it is too little.
    """
    conversations = data
    if run.prompts is not None:
        out, n = run.out / "text.jsonl", run.answer_tokens
        write_text(runtime, DataOptions(prompts=run.prompts, out=out, max_new_tokens=n))
        max_len = min(run.max_len, runtime.engine.max_seq_len)
        vocab_size = runtime.checkpoint.config.vocab_size
        conversations = data + read_conversations(out, vocab_size, max_len)
        _require_enough(conversations, run.held_out)
    return conversations


def init_head(config: ModelConfig, path: Path | None, options: TrainOptions) -> EagleHead | None:
    """Return the draft head in --init; raise `FasteagleError` if it is of another kind."""
    aux_layers = options.aux_layers_of(config.n_layer)
    if path is None:
        return None
    head = open_head(path).head(config, options.tap_layers)
    borrows = bool(aux_layers) and head.own_lm_head is None
    own = head.config.eagle3
    norms = own is not None and own.aux_norm == "each" and own.norm_output
    same = head.config.aux_layers == aux_layers and norms == (options.algorithm == "eagle3.1")
    if same and borrows == options.borrow_lm_head:
        if options.window is not None:
            block = dataclasses.replace(head.config.block, sliding_window=options.window)
            head.config = dataclasses.replace(head.config, block=block)
        return head
    option = "its --algorithm and its --tap-layers"
    if same:
        option = "--borrow-lm-head" if borrows else "no --borrow-lm-head"
    raise FasteagleError(f"{path}: the head is of another kind: give {option}")


def head_to_train(
    target: Transformer,
    training: Sequence[Conversation],
    init: EagleHead | None,
    options: TrainOptions,
) -> tuple[EagleHead, Tensor]:
    """Return the draft head before its training, and the target ids of its loss, ascending."""
    size = options.draft_vocab_size
    if init is None:
        size = size or min(NEW_DRAFT_VOCAB, target.config.vocab_size)
        head = new_head(target, frequent_tokens(training, size), options)
    else:
        head = with_draft_vocab(init, training, target, size)
    draft_ids = head.target_ids().cpu()
    loss_size = min(options.loss_vocab_size, len(draft_ids))
    if head.own_lm_head is not None:
        loss_size = len(draft_ids)  # all of its rows are trained
    return head, frequent_tokens(training, loss_size, among=draft_ids)


def with_draft_vocab(
    head: EagleHead, training: Sequence[Conversation], target: Transformer, size: int | None
) -> EagleHead:
    """Return the draft head with the `size` most frequent tokens of `training`; None: unchanged.

    Where the text has fewer distinct tokens, the old draft vocabulary supplies the others.
    """
    if size is None:
        return head
    ids = frequent_tokens(training, size, head.target_ids().tolist())
    return with_vocabulary(head, ids, target.head_rows)


def _features(
    runtime: Runtime,
    conversations: Sequence[Conversation],
    run: TrainRun,
    aux_layers: tuple[int, ...],
    key: str,
    ranks: Ranks,
) -> Features:
    """Return the target's features: live, from the user cache, or computed into it now."""
    engine, folder = runtime.engine, cache_dir() / "features" / key
    if run.features == "live":
        compile_now(engine)
        return live_features(engine, conversations, aux_layers)
    if not all((folder / name).exists() for name in shards_of(conversations)):
        if ranks.is_first:
            remove_unused(folder, note)  # first: it makes room
        compile_now(engine)
    store = cached_features(engine, conversations, folder, aux_layers, ranks)
    mark_used(folder)
    return store


def write_head(
    trainer: Trainer, target: Runtime | OpenedModel, command: Sequence[str], **more: Any
) -> None:
    """Write the draft head, its header and the training curve; delete the optimizer's state.

    `more` goes into the record of the run.
    """
    out, held = trainer.folder, trainer.history[-1]  # a run ends with an evaluation
    header = head_header(trainer.head, target, trainer.training_tokens, held)
    header |= {"steps": trainer.step, "recipe": trainer.options.recipe}
    save_head(out, trainer.head, header, torch.bfloat16)
    record = {
        "header": header,
        "options": dataclasses.asdict(trainer.options),
        "command": " ".join(command),
        **more,
        "history": trainer.history,
    }
    write_json(out / "training.json", record)
    (out / "state.pt").unlink(missing_ok=True)
    note(f"head written to {out}: 0-alpha {held['alphas'][0]:.3f}, chain tau {held['tau']:.2f}")
