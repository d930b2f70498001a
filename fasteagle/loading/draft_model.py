"""Open a smaller model that drafts for a larger one, and refuse models that cannot draft."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from fasteagle.drafting.draft_model import ModelDrafter
from fasteagle.errors import FasteagleError
from fasteagle.generate import Engine
from fasteagle.loading.open import OpenedModel, PreparedModel, open_model
from fasteagle.loading.tokenizer import ChatTokenizer
from fasteagle.options import DraftOptions, RuntimeOptions
from fasteagle.shapes import TreeShape


def open_draft_model(
    draft: DraftOptions, target: OpenedModel, runtime: RuntimeOptions, notify: Callable[[str], None]
) -> PreparedModel | None:
    """Open the draft model that `draft` names, without its weights; None where it names none.

    Raises `FasteagleError` for a model with another tokenizer; `notify` warns of one that is
    larger than its target.
    """
    if draft.draft_model is None:
        return None
    others = {
        "--head": draft.head,
        "--tree FILE": draft.tree_file,
        "--lookup": draft.lookup or None,
        "--lookup-depth": draft.lookup_depth,
    }
    if given := [flag for flag, value in others.items() if value is not None]:
        raise FasteagleError(f"--draft-model drafts by itself: drop {' and '.join(given)}")
    opened = open_model(draft.draft_model, notify)
    require_same_tokens(opened.name, opened.tokenizer, target.name, target.tokenizer)
    ours, theirs = opened.checkpoint.config.params, target.checkpoint.config.params
    if ours >= theirs:
        notify(
            f"warning: draft model {opened.name} has {ours / 1e6:,.0f} million parameters, "
            f"{target.name} has {theirs / 1e6:,.0f}: guessing will cost more than it saves: use a "
            "smaller one"
        )
    options = runtime.at(draft.draft_precision)
    max_seq_len = runtime.seq_len_for(target.checkpoint.config.max_seq_len, target.name)
    return opened.prepared(dataclasses.replace(options, max_seq_len=max_seq_len), notify)


def require_same_tokens(
    draft: str, drafts: ChatTokenizer, target: str, targets: ChatTokenizer
) -> None:
    """Raise `FasteagleError` with the first token id that differs between the tokenizers."""
    mine, other = drafts.vocabulary(), targets.vocabulary()
    for token in sorted(mine.keys() | other.keys()):
        if mine.get(token) != other.get(token):
            ours, theirs = (
                "missing" if text is None else repr(text)
                for text in (mine.get(token), other.get(token))
            )
            raise FasteagleError(
                f"draft model {draft} has another tokenizer than {target}: token {token} is {ours} "
                f"in it, {theirs} in {target}: use a model of the same family"
            )


def model_drafter(
    prepared: PreparedModel, engine: Engine, draft: DraftOptions, notify: Callable[[str], None]
) -> ModelDrafter:
    """Load the draft model beside its target; `notify` gets one line that names it.

    Raises `FasteagleError` where it does not fit into memory.
    """
    try:
        target = prepared.engine().target
    except FasteagleError as error:
        raise FasteagleError(f"draft model {prepared.name}, beside its target: {error}") from error
    target.model.requires_grad_(False)
    shape = draft.tree_shape(quantized_on_cpu=False)
    assert isinstance(shape, TreeShape), "only a fused drafter has another shape"
    notify(f"draft model {prepared}, {shape.nodes} nodes")
    vocab_size = engine.model.config.vocab_size
    return ModelDrafter(target, shape, engine.max_seq_len, vocab_size, draft.noise)
