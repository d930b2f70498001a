"""Decode cycle: extend, expand, rerank, verify, accept, commit.

It is one function over a `DecodeState`. The drafter makes the tree (EAGLE, n-gram lookup); a spec
without a shape is plain decoding, whose tree is only the root. The runner decides how it runs:
operation by operation, compiled, or replayed as a CUDA graph.

Nothing here reads a device value on the host, except processors of logits, which read the tree, and
the `accept` of a spec, where it is the paper's multi-round sampling.

Shapes: T tree rows, D longest path, F feature dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fasteagle.drafting.base import Drafter
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.logits import LogitsProcessor
from fasteagle.model import KVCache, Output, Target
from fasteagle.sampling import draw
from fasteagle.state import CycleSpec, DecodeState
from fasteagle.tree import LOOKUP, Pool, Proposal, Relations, TreeView, relations
from fasteagle.verify import PAD, Accepted, accept, seen_rows


class Pieces(NamedTuple):
    """Three parts of a cycle, each of which may be replaced by its compiled code."""

    draft: Callable[[DecodeState, Drafter | None, CycleSpec], Proposal]
    verify: Callable[[DecodeState, Target, Proposal], Output]
    finish: Callable[[DecodeState, CycleSpec, Proposal, Output], None]


def decode_cycle(
    state: DecodeState,
    target: Target,
    drafter: Drafter | None,
    spec: CycleSpec,
    pieces: Pieces | None = None,
    processor: LogitsProcessor | None = None,
    lap: Callable[[], None] = lambda: None,
) -> Proposal:
    """Advance `state` by one pass of the target: 1 to D + 1 new tokens, in `state.result`.

    `lap` is called before, between and after draft and verify. Returns the verified proposal.
    """
    pieces = pieces or EAGER
    lap()
    proposal = pieces.draft(state, drafter, spec)  # extend, expand, rerank
    lap()
    output = pieces.verify(state, target, proposal)
    lap()
    finish(state, spec, proposal, output, pieces, processor)  # accept, commit
    return proposal


def finish(
    state: DecodeState,
    spec: CycleSpec,
    proposal: Proposal,
    output: Output,
    pieces: Pieces,
    processor: LogitsProcessor | None,
) -> None:
    """Let `processor` change the logits, then accept and commit."""
    if processor is not None:
        output = output._replace(logits=processor(output.logits, proposal.tree))
    pieces.finish(state, spec, proposal, output)


def draft(
    state: DecodeState,
    drafter: Drafter | None,
    spec: CycleSpec,
    relate: Callable[[Tensor, Tensor], Relations] = relations,
) -> Proposal:
    """Show the drafter the new committed pairs, then let it propose the tree under the root.

    Where the draft head is not run, its prediction is None.
    """
    if spec.shape is None or drafter is None:
        return Proposal.of(state.root_alone(), relate=relate)
    prediction = None
    if spec.extends:
        prediction = drafter.extend(state.committed(spec.width), state.seq_len)
    tree = drafter.propose(prediction, state, spec)
    return Proposal.of(tree, spec.extends, relate)


def select(
    pool: Pool,
    state: DecodeState,
    drafter: Drafter | None,
    spec: CycleSpec,
    relate: Callable[[Tensor, Tensor], Relations] = relations,
) -> Proposal:
    """End `draft` with candidates of the draft head that were drafted beside other texts'."""
    assert isinstance(drafter, EagleDrafter), "only these select from candidates"
    return Proposal.of(drafter.select(pool, state, spec), spec.extends, relate)


def verify(state: DecodeState, target: Target, proposal: Proposal) -> Output:
    """Run the target over the tree's rows, after the committed tokens."""
    depths = proposal.depths
    view = TreeView(state.seq_len, proposal.paths, depths, target.config.sliding_window)
    slots = state.seq_len + torch.arange(len(depths), device=depths.device)
    positions = state.seq_len + depths
    return target(proposal.tree.tokens, positions, slots, view, state.cache, state.aux_layers)


def accept_and_commit(
    state: DecodeState,
    spec: CycleSpec,
    proposal: Proposal,
    output: Output,
    move_rows: Callable[[KVCache, Tensor, Tensor], None] = KVCache.commit,
    draw: Callable[..., Tensor] = draw,
) -> None:
    """Choose a path from the root, and commit it.

    Unless the spec chooses otherwise, it is the path along the target's own tokens at every row.
    """
    if spec.accept is not None:
        path = spec.accept(state, spec, proposal, output.logits)
    else:
        drawn = drawn_tokens(state, spec, proposal, output.logits, draw)
        path = accept(drawn, proposal, spec.depth)
    commit(state, spec, proposal, output, path, move_rows)


def drawn_tokens(
    state: DecodeState,
    spec: CycleSpec,
    proposal: Proposal,
    logits: Tensor,
    draw: Callable[..., Tensor] = draw,
) -> Tensor:
    """Return the target's own token after each row [T]; `draw` as in `sampling`."""
    depths = proposal.depths
    seen = seen_rows(state.seen, proposal) if spec.kind.penalty else None
    # Noise takes a millisecond for 16 levels, and a chain may be shorter than its shape.
    n_levels = len(depths) if spec.in_place else spec.depth + 1
    positions = state.seq_len + 1 + torch.arange(n_levels, device=depths.device)
    return draw(logits, positions, spec.kind, state.sampling, seen, depths)


def commit(
    state: DecodeState,
    spec: CycleSpec,
    proposal: Proposal,
    output: Output,
    path: Accepted,
    move_rows: Callable[[KVCache, Tensor, Tensor], None],
) -> None:
    """Commit the path: move its rows of the KV cache to the text's end, update the state."""
    levels = torch.arange(spec.depth + 1, device=path.rows.device)
    emitted = path.emitted.clamp(min=0)  # padding and bad rows become token 0, which is not read
    if spec.depth and not spec.in_place:
        move_rows(state.cache, state.seq_len, path.rows)
    state.text.index_copy_(0, state.seq_len + 1 + levels, emitted)
    if spec.kind.penalty:
        # Padding repeats the root, which is penalized in any case.
        inside = levels < path.count
        state.seen.index_fill_(1, torch.where(inside, emitted, state.root), True)
        state.seen.index_fill_(1, state.root, True)
    state.result.fill_(PAD)
    state.result[: spec.depth + 1] = path.emitted
    sources = proposal.tree.sources
    if sources is not None:  # the root has no source, and padding repeats the root
        state.result[-2] = (sources[path.rows] & LOOKUP > 0).sum()
    state.result[-1:] = proposal.tree.valid.sum() - 1
    if spec.width:
        # New pairs go after those not shown to the draft head yet; after a draft there are none.
        first = torch.zeros_like(state.count) if proposal.extended else state.count
        state.tokens.index_copy_(0, first + levels, emitted)
        read = output.features if output.aux_states is None else output.aux_states
        state.features.index_copy_(0, first + levels, read[path.rows].to(state.features.dtype))
        state.count.copy_(first + path.count)
    last = (path.count - 1).unsqueeze(0)
    state.root.copy_(emitted.index_select(0, last))
    state.seq_len.add_(path.count)


EAGER = Pieces(draft, verify, accept_and_commit)
