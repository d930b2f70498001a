"""Decode cycles of several sequences at once, with one pass of the target over all of their rows.

Every sequence has its own state, drafter and variant of the cycle, so that its text is the one that
it gets alone; only products are shared. The parts are those of `cycle`.

Shapes: B sequences, T rows of one of them, G KV heads, E head dim.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasteagle.model import Ops, Output, Target, as_mask
from fasteagle.state import DecodeState
from fasteagle.tree import Proposal, TreeView


class Caches(NamedTuple):
    """Caches of several sequences, in place of a `KVCache`: keys and values of all, by block."""

    layers: Sequence[tuple[Any, Any]]  # what the operations of the pass take


def verify_together(
    states: Sequence[DecodeState], target: Target, proposals: Sequence[Proposal]
) -> list[Output]:
    """Run the target once over the rows of all proposals; return the output of each.

    All states read the same auxiliary layers. Slots, views and caches pass through the target as
    lists, one of each sequence, to the operations of `_shared`.
    """
    sizes = [len(proposal.depths) for proposal in proposals]
    pairs = list(zip(states, proposals, strict=True))
    window = target.config.sliding_window
    views = [TreeView(s.seq_len, p.paths, p.depths, window) for s, p in pairs]
    slots = [s.seq_len + torch.arange(len(p.depths), device=s.root.device) for s, p in pairs]
    layers = [
        (tuple(keys for keys, _ in layer), tuple(values for _, values in layer))
        for layer in zip(*(state.cache.layers for state in states), strict=True)
    ]
    output = dataclasses.replace(target, ops=_shared(target.ops, sizes))(
        torch.cat([p.tree.tokens for p in proposals]),
        torch.cat([s.seq_len + p.depths for s, p in pairs]),
        slots,
        views,
        Caches(layers),  # type: ignore[arg-type]
        states[0].aux_layers,
    )
    return split(output, sizes)


def split(output: Output, sizes: Sequence[int]) -> list[Output]:
    """Return the parts of an output, of `sizes` rows each."""
    logits, features = output.logits.split(sizes), output.features.split(sizes)
    if output.aux_states is None:
        return [Output(*rows) for rows in zip(logits, features, strict=True)]
    aux_states = output.aux_states.split(sizes)
    return [Output(*rows) for rows in zip(logits, features, aux_states, strict=True)]


def groups(
    sizes: Sequence[int], most: int, most_sequences: float = math.inf
) -> Iterator[tuple[int, int]]:
    """Yield ranges of sequences, at most so many, whose rows fit into a pass of `most`.

    A sequence of more rows is alone.
    """
    begin = rows = 0
    for i, size in enumerate(sizes):
        if i > begin and (rows + size > most or i - begin == most_sequences):
            yield begin, i
            begin, rows = i, 0
        rows += size
    yield begin, len(sizes)


def _shared(ops: Ops, sizes: list[int]) -> Ops:
    """Return `ops` over caches, slots and views of several sequences, with `sizes` rows each."""

    def write(caches: Any, slots: Any, rows: Tensor) -> None:
        for cache, own, part in zip(caches, slots, rows.split(sizes, 1), strict=True):
            ops.write(cache, own, part)

    def attend(q: Tensor, k_caches: Any, v_caches: Any, views: Any) -> Tensor:
        G, _, E = q.shape
        parts = q.view(G, -1, sum(sizes), E).split(sizes, 2)  # [G, group, T, E]
        out = []
        for part, k, v, view in zip(parts, k_caches, v_caches, views, strict=True):
            visible = view if ops.views else as_mask(view, k.shape[1])
            y = ops.attend(part.reshape(G, -1, E), k, v, visible)
            out.append(y.view(part.shape))
        return torch.cat(out, 2).reshape(q.shape)

    return ops._replace(write=write, attend=attend, run_blocks=None, views=True)
