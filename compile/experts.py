"""Number of different experts that adjacent rows of a text take in a layer.

A pass reads each expert once for all rows that take it. T rows that choose k of E independently
would take E (1 - (1 - k / E)^T) together; rows of one text have more in common.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fasteagle.model import MoE, Target, causal_mask

ROWS = (1, 2, 4, 8, 16, 32)


@torch.no_grad()
def distinct_experts(target: Target, text: Sequence[int]) -> dict[int, float]:
    """Return the mean number of experts in a layer that T adjacent rows of `text` take, by T.

    The core reads the text once, on a cache of its own. The model has experts, and the text tokens.
    """
    chosen: list[Tensor] = []  # [rows of the text, k] of each layer

    def watch(layer: MoE, inputs: tuple[Any, ...]) -> None:
        chosen.append(layer.route(inputs[0])[0])

    layers = [module for module in target.model.modules() if isinstance(module, MoE)]
    hooks = [layer.register_forward_pre_hook(watch) for layer in layers]
    try:
        core = Target(target.model)
        tokens = torch.tensor(text, device=target.weight.device)
        rows = torch.arange(len(text), device=tokens.device)
        cache = core.new_cache(len(text))
        window = target.config.sliding_window
        mask = causal_mask(0, len(text), cache.n_slots, window, tokens.device)
        core.encode(tokens, rows, rows, mask, cache)
    finally:
        for hook in hooks:
            hook.remove()
    return {T: _mean_distinct(chosen, T) for T in ROWS if len(text) >= T}


def _mean_distinct(chosen: list[Tensor], T: int) -> float:
    windows = (part for ids in chosen for part in ids.split(T) if len(part) == T)
    return statistics.fmean(len(part.unique()) for part in windows)
