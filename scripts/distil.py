"""Training of a mixture's experts to predict what the dense model predicts; for `moeify.py`.

Windows of the text run side by side, attention within each, so that a batch is one product a
linear. Embedding, attention, norms and LM head are the dense model's and stay as they are; experts
and routers learn from the KL divergence of its next token to theirs, over the frequent tokens.
Shapes: B windows of W tokens, D model dim, X experts, k of a row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fasteagle.model import Block, MoE, Transformer, apply_rope
from fasteagle.prompts import Conversation

WINDOW = 512  # tokens of text that a row may see
BATCH = 2  # windows of a step
WARMUP = 10  # steps
FREQUENT = 8192  # tokens whose probabilities are compared


def windows(conversations: Sequence[Conversation]) -> Tensor:
    """Return the text of conversations, one after the other, as windows [N, W]."""
    ids = torch.tensor([token for conversation in conversations for token in conversation.ids])
    return ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW)


def attention(model: Transformer, block: Block, x: Tensor) -> Tensor:
    """Return what a block's attention adds to states x [B, W, D]."""
    layer = block.attention
    n_windows, width, _ = x.shape
    heads = (layer.n_head, layer.n_kv_head, layer.n_kv_head)
    qkv = layer.qkv(block.attention_norm(x)).view(n_windows, width, -1, layer.head_dim)
    cos, sin = (table[:width].unsqueeze(1) for table in (model.rope_cos, model.rope_sin))
    q, k, v = qkv.split(heads, dim=2)
    q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return layer.out(y.transpose(1, 2).flatten(2))


def experts(layer: MoE, x: Tensor) -> Tensor:
    """Return `layer(x)` for rows x [T, D], in operations that have gradients."""
    n_expert, width, dim = layer.config.n_expert, layer.config.ffn_dim, x.shape[1]
    ids, weights = layer.route(x)
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    rows = order // layer.config.top_k
    counts = flat.bincount(minlength=n_expert).tolist()
    gate_up = layer.gate_up.weight.view(n_expert, 2 * width, dim)
    down = layer.down.weight.view(n_expert, dim, width)
    parts = zip(
        x[rows].split(counts),
        weights.flatten()[order].unsqueeze(1).split(counts),
        gate_up.unbind(),
        down.unbind(),
        strict=True,
    )
    out = [(F.silu(g) * u * w) @ d.T for g, u, w, d in map(_halves, parts)]
    return torch.zeros_like(x).index_add(0, rows, torch.cat(out))


def _halves(part: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return gate and up of an expert's rows, the rows' weights, and its down projection."""
    x, weights, gate_up, down = part
    gate, up = (x @ gate_up.T).chunk(2, dim=-1)
    return gate, up, weights, down


def final_states(model: Transformer, layers: Sequence[nn.Module], ids: Tensor) -> Tensor:
    """Return the normed states [B * W, D] behind all blocks, with `layers` for their MLPs."""
    x = model.embedding(ids).float()
    for block, layer in zip(model.blocks, layers, strict=True):
        x = x + attention(model, block, x)
        rows = block.mlp_norm(x).flatten(0, 1)
        x = x + (experts(layer, rows) if isinstance(layer, MoE) else layer(rows)).view_as(x)
    return model.norm(x).flatten(0, 1)


def divergence(
    model: Transformer, layers: Sequence[nn.Module], ids: Tensor, lm_head: Tensor
) -> Tensor:
    """Return the mean KL divergence in nats a token of `model` to the same with other `layers`.

    `lm_head` has the rows of the tokens that count.
    """
    with torch.no_grad():
        dense = final_states(model, [block.mlp for block in model.blocks], ids)
        wanted = F.log_softmax(dense @ lm_head.T, dim=-1)
    found = F.log_softmax(final_states(model, layers, ids) @ lm_head.T, dim=-1)
    return F.kl_div(found, wanted, reduction="batchmean", log_target=True)


def distil(
    model: Transformer,
    layers: Sequence[MoE],
    text: Tensor,
    steps: int,
    lr: float,
    tell: Callable[[int, float], None],
) -> None:
    """Train `layers` in place for `steps` of `BATCH` windows of `text` [N, W], in random order.

    The learning rate grows in `WARMUP` steps and falls to zero in the second half.
    `tell` gets each step's number and divergence.
    """
    counts = text.flatten().bincount(minlength=model.config.vocab_size)
    lm_head = model.lm_head.weight[counts.argsort(descending=True, stable=True)[:FREQUENT]]
    parameters = [p for layer in layers for p in layer.requires_grad_(True).parameters()]
    optimizer = torch.optim.Adam(parameters, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(0)
    passes = -(-steps * BATCH // len(text))
    order = torch.cat([torch.randperm(len(text), generator=generator) for _ in range(passes)])
    for step in range(steps):
        rate = lr * min((step + 1) / WARMUP, 1, 2 * (1 - step / steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = divergence(model, layers, text[order[step * BATCH :][:BATCH]], lm_head)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        tell(step + 1, loss.item())
    for layer in layers:
        layer.requires_grad_(False)
