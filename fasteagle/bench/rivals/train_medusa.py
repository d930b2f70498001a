"""Training of Medusa's heads on conversations that draft heads are trained on, too.

Shapes: D model dim, V vocabulary, K heads, B positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fasteagle.bench.rivals.medusa import HEADS, RANKS, MedusaHeads, Ranks, targets_of
from fasteagle.errors import FasteagleError, note
from fasteagle.generate import Engine
from fasteagle.prompts import Conversation

DECAY = 0.8  # of the weight from head to head (paper, section 2.2.1)
HELD_OUT = 10  # one conversation of so many measures the ranks


def read_positions(
    engine: Engine, conversations: Sequence[Conversation], most: int
) -> tuple[Tensor, Tensor]:
    """Return features [B, D] of at most `most` positions, and the tokens [K, B] after them."""
    features, tokens = [], []
    total = 0
    for conversation in conversations:
        positions, ahead = targets_of(conversation.ids, conversation.prompt_len)
        if len(positions) and total < most:
            read = engine.features(conversation.ids)
            features.append(read[positions.to(read.device)].float().cpu())
            tokens.append(ahead)
            total += len(positions)
    if not features:
        raise FasteagleError(f"no answer is longer than {HEADS + 1} tokens: give more text")
    return torch.cat(features)[:most], torch.cat(tokens, dim=1)[:, :most]


def train_medusa(
    engine: Engine,
    conversations: Sequence[Conversation],
    *,
    positions: int,
    epochs: int,
    lr: float,
    batch: int = 256,
) -> tuple[MedusaHeads, Ranks]:
    """Fit Medusa's heads by cross-entropy, the target frozen; rank them on held-out text."""
    held_out = conversations[::HELD_OUT]
    rest = [c for i, c in enumerate(conversations) if i % HELD_OUT]
    features, tokens = read_positions(engine, rest or held_out, positions)
    measured_on = read_positions(engine, held_out, positions)
    model = engine.model
    lm_rows = model.head_rows(torch.arange(model.config.vocab_size, device=engine.device))
    lm_rows = lm_rows.float().cpu()
    heads = MedusaHeads(features.shape[1])
    optimizer = torch.optim.AdamW(heads.parameters(), lr=lr, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(0)
    steps = epochs * -(-len(features) // batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for epoch in range(epochs):
        total = 0.0
        for chosen in torch.randperm(len(features), generator=generator).split(batch):
            loss = _loss(heads, features[chosen], tokens[:, chosen], lm_rows)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += float(loss.detach()) * len(chosen)
        note(f"epoch {epoch + 1} of {epochs}: loss {total / len(features):.3f}")
    return heads.eval(), measure_ranks(heads, *measured_on, lm_rows)


def _loss(heads: MedusaHeads, features: Tensor, tokens: Tensor, lm_rows: Tensor) -> Tensor:
    total = features.new_zeros(())
    for head, (read, wanted) in enumerate(zip(heads(features), tokens, strict=True)):
        total = total + DECAY**head * F.cross_entropy(read @ lm_rows.T, wanted)
    return total


@torch.no_grad()
def measure_ranks(heads: MedusaHeads, features: Tensor, tokens: Tensor, lm_rows: Tensor) -> Ranks:
    """Return how often each Medusa head's best tokens are right [K][RANKS]."""
    counts = torch.zeros(HEADS, RANKS)
    for rows, wanted in zip(features.split(256), tokens.split(256, dim=1), strict=True):
        best = (heads(rows) @ lm_rows.T).topk(RANKS, dim=-1).indices  # [K, B, RANKS]
        counts += (best == wanted.unsqueeze(-1)).sum(1)
    return tuple(tuple(row) for row in (counts / features.shape[0]).tolist())
