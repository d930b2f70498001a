"""A rival for targets without a smaller relative: their own first blocks as the draft model."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from fasteagle.drafting.draft_model import ModelDrafter
from fasteagle.generate import Engine
from fasteagle.model import Transformer
from fasteagle.shapes import TreeShape
from fasteagle.uninitialized import Uninitialized

EXIT_SHAPE = TreeShape(3, 1, 3)
SHARE = 3  # one block of so many


def first_blocks(model: Transformer, n_blocks: int) -> Transformer:
    """A model of the first `n_blocks` of another one; all weights are shared, and how it runs."""
    with torch.device("meta"), Uninitialized():
        small = Transformer(dataclasses.replace(model.config, n_layer=n_blocks))
    small.blocks = nn.ModuleList(list(model.blocks)[:n_blocks])
    small.embedding, small.norm, small.lm_head = model.embedding, model.norm, model.lm_head
    small.register_buffer("rope_cos", model.rope_cos, persistent=False)
    small.register_buffer("rope_sin", model.rope_sin, persistent=False)
    small.run_blocks, small.visible_keys = model.run_blocks, model.visible_keys
    small.cache_dtype, small.cache_spare = model.cache_dtype, model.cache_spare
    return small.eval()


def early_exit_drafter(engine: Engine) -> ModelDrafter:
    """Drafts with a third of the target."""
    config = engine.model.config
    model = first_blocks(engine.model, max(1, config.n_layer // SHARE))
    return ModelDrafter(model, EXIT_SHAPE, engine.max_seq_len, config.vocab_size, name="early-exit")
