"""Acceptance: the path of a draft tree that the target accepts, and the token after it.

Sample-and-match: at every row the target samples its own next token, by the stateless sampling of
plain decoding; the path from the root along sampled tokens is accepted. The proposal is a function
of the context alone, so the emitted tokens are exactly those that plain decoding would emit.

Shapes: T tree rows, V vocabulary, D deepest level.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fasteagle.tree import Proposal

PAD = -2  # fills the emitted tokens after the last one


class Accepted(NamedTuple):
    """Accepted path, root first, padded to D + 1 rows with the root's row."""

    rows: Tensor  # [D + 1] tree rows
    emitted: Tensor  # [D + 1] the target's samples: accepted tokens, bonus token, PAD
    count: Tensor  # [] emitted tokens, 1 .. D + 1


def accept(drawn: Tensor, proposal: Proposal, depth: int) -> Accepted:
    """Accept the path from the root along children that carry their parent's sampled token.

    `drawn` [T] are the target's own tokens after each row, `depth` is the deepest level D.
    """
    tree, tree_mask, depths = proposal[:3]
    T = drawn.shape[0]
    row = torch.arange(T, device=drawn.device)
    matches = (tree.valid & (tree.tokens == drawn[tree.parents])) | (row == 0)
    alive = ~(tree_mask & ~matches.unsqueeze(0)).any(-1)
    # Siblings differ, so the rows in `alive` form one path, which ends at the deepest of them.
    # One-element indices, because a graph cannot index by a scalar on the device.
    last = torch.where(alive, depths, -1).argmax(0, keepdim=True)
    on_path = tree_mask.index_select(0, last)[0]
    level = torch.where(on_path, depths, depth + 1)  # rows off the path go to a spare entry
    rows = row.new_zeros(depth + 2).scatter(0, level, row)[: depth + 1]
    count = depths.index_select(0, last)[0] + 1
    inside = torch.arange(depth + 1, device=drawn.device) < count
    return Accepted(rows, torch.where(inside, drawn[rows], PAD), count)


def seen_rows(seen: Tensor, proposal: Proposal) -> Tensor:
    """Return the tokens [T, V] under repetition penalty at each row: committed, and ancestors."""
    tokens = proposal.tree.tokens
    ids = torch.where(proposal.tree_mask, tokens.unsqueeze(0), tokens[0])
    return seen.expand(len(tokens), -1).scatter(1, ids, True)
