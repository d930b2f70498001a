"""Medusa (Cai et al. 2024, arXiv 2401.10774), a rival: heads that each predict a token further on.

Head j reads the feature that the target's LM head has read to choose the root, and predicts the
j-th token after the root. The tree is static: nodes are the ranks of each head's tokens, the
likeliest combinations by what was accepted on held-out text. As in Medusa-1 the target is frozen;
unlike there its LM head is shared by all heads, which makes them small.

Shapes: D model dim, V vocabulary, K heads, B positions.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from fasteagle.drafting.draft_head import RankingDrafter
from fasteagle.drafting.static_tree import check_paths
from fasteagle.errors import FasteagleError
from fasteagle.model import KVCache, Transformer
from fasteagle.shapes import AnyShape, Paths, StaticShape
from fasteagle.state import Committed, CycleSpec, DecodeState
from fasteagle.tree import DraftTree

HEADS, NODES, RANKS = 4, 15, 8
MEDUSA_SHAPE = StaticShape(HEADS, None, NODES)
HEADER = "fasteagle_medusa"


class MedusaHeads(nn.Module):
    """Medusa heads, each a residual block `f + silu(W f + b)`; zero weights predict the root."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(dim, dim) for _ in range(HEADS))
        for block in self.blocks:
            nn.init.zeros_(block.weight)
            nn.init.zeros_(block.bias)

    def forward(self, features: Tensor) -> Tensor:
        """Return the LM head's input for each Medusa head [K, B, D], from features [B, D]."""
        return torch.stack([features + F.silu(block(features)) for block in self.blocks])


Ranks = tuple[tuple[float, ...], ...]  # [head][rank]: how often that token is right


def likeliest_paths(ranks: Ranks, nodes: int) -> Paths:
    """Return the `nodes` combinations of ranks with the highest products of their shares."""
    likeliest: list[tuple[int, ...]] = []
    pending: list[tuple[float, tuple[int, ...]]]
    pending = [(-share, (rank,)) for rank, share in enumerate(ranks[0])]
    heapq.heapify(pending)
    while pending and len(likeliest) < nodes:
        share, path = heapq.heappop(pending)
        likeliest.append(path)
        if len(path) < len(ranks):
            for rank, own in enumerate(ranks[len(path)]):
                heapq.heappush(pending, (share * own, (*path, rank)))
    return tuple(likeliest)


class MedusaDrafter(RankingDrafter):
    """Drafter of the best tokens of all Medusa heads at once, in one fixed tree."""

    name, noise = "medusa", "shared"
    reads_features = True

    def __init__(self, heads: MedusaHeads, ranks: Ranks, target: Transformer) -> None:
        paths = likeliest_paths(ranks, NODES)
        check_paths(paths, target.config.vocab_size)
        self.shape: AnyShape = MEDUSA_SHAPE
        weight = target.norm.weight
        self.heads = heads.to(weight.device, weight.dtype).requires_grad_(False)
        self.target = target
        order = sorted(paths, key=lambda path: (len(path), path))
        row_of = {(): 0, **{path: row for row, path in enumerate(order, 1)}}
        columns = (
            [0] + [row_of[path[:-1]] for path in order],
            [len(path) - 1 for path in order],
            [path[-1] for path in order],
        )
        self._parents, self._levels, self._ranks = (
            torch.tensor(column, device=weight.device) for column in columns
        )
        self.target_ids = torch.arange(target.config.vocab_size, device=weight.device)

    @property
    def caches(self) -> list[KVCache]:
        return []

    def extend(self, new: Committed, seq_len: Tensor) -> Tensor:
        """Return the feature [1, D] of the last committed position, which is all that is read."""
        return new.features.index_select(0, new.count - 1)

    def propose(self, prediction: Tensor, state: DecodeState, spec: CycleSpec) -> DraftTree:
        logits = self.target.lm_head(self.heads(prediction)[:, 0])  # [K, V]
        ranked = [
            self.ranking_logits(row, state.seq_len, level, spec.kind, state.sampling).flatten()
            for level, row in enumerate(logits.split(1), 1)
        ]
        best = torch.stack(ranked).topk(RANKS, dim=-1).indices  # [K, RANKS]
        rows = torch.cat((state.root, best[self._levels, self._ranks]))
        return DraftTree(rows, self._parents, torch.ones_like(rows).bool())


def save_medusa(path: Path, heads: MedusaHeads, ranks: Ranks) -> None:
    """Write Medusa heads, and how often each rank of each was right on held-out text."""
    save_file(heads.state_dict(), path, {HEADER: json.dumps({"ranks": ranks})})


def load_medusa(path: Path, dim: int) -> tuple[MedusaHeads, Ranks]:
    """Read Medusa heads; raise `FasteagleError` unless they fit a target of `dim`."""
    try:
        with safe_open(path, framework="pt") as file:
            raw = json.loads((file.metadata() or {})[HEADER])["ranks"]
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        ranks = tuple(tuple(float(share) for share in row) for row in raw)
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise FasteagleError(
            f"medusa file {path} is none that scripts/train_medusa.py wrote ({error})"
        ) from error
    heads = MedusaHeads(dim)
    wanted = {name: tensor.shape for name, tensor in heads.state_dict().items()}
    if {name: tensor.shape for name, tensor in state.items()} != wanted:
        raise FasteagleError(f"medusa file {path}: not {HEADS} heads of a target of width {dim}")
    if [len(row) for row in ranks] != [RANKS] * HEADS:
        raise FasteagleError(f"medusa file {path}: not {RANKS} ranks of each of {HEADS} heads")
    heads.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    return heads.eval(), ranks


def targets_of(ids: Sequence[int], prompt_len: int) -> tuple[Tensor, Tensor]:
    """Return positions [B] of an answer whose features are read, and the tokens [K, B] further on.

    The feature of position i has chosen token i + 1; head j predicts token i + 1 + j.
    """
    begin = max(0, prompt_len - 1)
    positions = torch.arange(begin, max(begin, len(ids) - 1 - HEADS))
    text = torch.tensor(ids)
    ahead = torch.arange(2, HEADS + 2).unsqueeze(1)
    return positions, text[positions + ahead]
