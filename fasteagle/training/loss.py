"""Batches of features, the unrolled pass of a draft head, and its loss.

EAGLE-1: loss and noise are the paper's (section 4.2) by default: SmoothL1 between predicted and
true feature, plus a tenth of the cross-entropy between the two distributions over the draft
vocabulary, on answer tokens. EAGLE-3: that cross-entropy alone. In place of the cross-entropy an LK
loss trains the acceptance rate itself. With self-fed steps the head also learns from its own
features: at step s a row sees true features up to s positions ago and its own predictions after
that.

Shapes: B conversations, L positions, D model dim, F feature dim, V draft vocabulary, M rows that
count.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fasteagle.device import pick_dtype
from fasteagle.model import EagleHead, apply_rope, causal_mask
from fasteagle.training.data import Features
from fasteagle.training.options import TrainOptions

MOST_SEEDS = 1 << 63  # of a generator
TINY = 1e-30  # least acceptance rate that has a logarithm


@dataclasses.dataclass
class Batch:
    """Right-padded conversations; row j pairs feature j with token j + 1."""

    tokens: Tensor  # [B, L]
    features: Tensor  # [B, L, F] feature j
    targets: Tensor  # [B, L, D] what the target's LM head reads at j + 1
    first: Tensor  # [B] first row whose prediction counts, on the CPU: nothing waits for a card
    last: Tensor  # [B] one past the last such row, also there
    numbers: list[int]  # of the conversations

    def counts(self, steps: int) -> Tensor:
        """Return the number of rows that count after 0 .. `steps` - 1 self-fed steps."""
        return torch.stack([self.counted(step).sum() for step in range(steps)])

    def noisy(self, options: TrainOptions, step: int) -> Tensor:
        """Return fp32 features plus the noise of a training step, drawn for each conversation."""
        features = self.features.float()
        if options.noise:
            for b, (number, last) in enumerate(zip(self.numbers, self.last.tolist(), strict=True)):
                seed = ((options.seed * 7919 + step) * 1_000_003 + number) % MOST_SEEDS
                generator = torch.Generator(features.device).manual_seed(seed)
                rows = features[b, : last + 1]
                noise = torch.rand(rows.shape, generator=generator, device=rows.device)
                rows += (2 * noise - 1) * options.noise
        return features

    def counted(self, step: int) -> Tensor:
        """Return on the CPU the rows [B, L] that count after `step` self-fed steps."""
        rows = torch.arange(self.tokens.shape[1])
        return (rows >= self.first[:, None] + step) & (rows < self.last[:, None])


def make_batch(store: Features, chosen: list[int], device: torch.device) -> Batch:
    """Pad conversations to the longest of them.

    Where the store holds no auxiliary hidden states, a draft head reads what the LM head reads.
    """
    parts = [store.conversation(i) for i in chosen]
    dim = parts[0][1].shape[1] // (store.n_aux + 1)
    read = slice(0, store.n_aux * dim) if store.n_aux else slice(None)
    rows = (
        [ids[1:] for ids, _ in parts],
        [values[:-1, read] for _, values in parts],
        [values[1:, -dim:] for _, values in parts],
    )
    # Drafting begins once the first answer token is the root: its pair is row prompt_len - 1. What
    # would follow the conversation's last token does not count.
    conversations = [store.conversations[i] for i in chosen]
    first = torch.tensor([c.prompt_len - 1 for c in conversations])
    last = torch.tensor([len(c.ids) - 2 for c in conversations])
    tokens, features, targets = (pad_sequence(part, batch_first=True).to(device) for part in rows)
    return Batch(tokens, features, targets, first, last, chosen)


def batches(store: Features, indices: list[int], options: TrainOptions) -> Iterator[list[int]]:
    """Yield batches of about `batch_tokens` tokens without end, of similar length, by the seed."""
    lengths = store.lengths
    for epoch in itertools.count():
        generator = torch.Generator().manual_seed((options.seed * 1_000_003 + epoch) % MOST_SEEDS)
        jitter = torch.rand(len(indices), generator=generator).tolist()
        blurred = [lengths[i] + 60 * j for i, j in zip(indices, jitter, strict=True)]
        order = sorted(range(len(indices)), key=lambda i: blurred[i])
        groups: list[list[int]] = [[]]
        for i in order:
            longest = lengths[indices[i]]  # ascending, except for the jitter
            if groups[-1] and (len(groups[-1]) + 1) * longest > options.batch_tokens:
                groups.append([])
            groups[-1].append(indices[i])
        for g in torch.randperm(len(groups), generator=generator).tolist():
            yield groups[g]


def unroll(head: EagleHead, embeds: Tensor, features: Tensor, steps: int) -> list[Tensor]:
    """Compute what the LM head reads [B, L, D] after 1 .. `steps` steps, as drafting would.

    `features` [B, L, F] are the target's. At step s, row j reads its own prediction of the step
    before, and attends to the true rows up to j - s and to the self-fed rows that lead to it.
    """
    attention, block = head.block.attention, head.block
    B, L, _ = embeds.shape
    cos, sin = (t[:L].unsqueeze(1) for t in (head.rope_cos, head.rope_sin))
    heads = (attention.n_head, attention.n_kv_head, attention.n_kv_head)
    group = attention.n_head // attention.n_kv_head
    window = head.config.block.sliding_window
    keys: list[Tensor] = []
    values: list[Tensor] = []
    outputs: list[Tensor] = []
    features = head.read(features.to(embeds.dtype)).to(embeds.dtype)
    for step in range(steps):
        x, entry = head.enter(embeds, features)
        entry = block.attention_norm(x) if entry is None else entry
        qkv = attention.qkv(entry).view(B, L, -1, attention.head_dim)
        q, k, v = qkv.split(heads, dim=2)  # [B, L, heads, E]
        q = apply_rope(attention.q_norm(q), cos, sin).transpose(1, 2)
        k = apply_rope(attention.k_norm(k), cos, sin).transpose(1, 2)
        keys.append(k.repeat_interleave(group, dim=1))
        values.append(v.transpose(1, 2).repeat_interleave(group, dim=1))
        y = _unrolled_attention(q, keys, values, step, window)
        x = x + attention.out(y.transpose(1, 2).reshape(B, L, -1))
        x = x + block.mlp(block.mlp_norm(x))
        output, own = head.leave(x, embeds.dtype)
        outputs.append(output)
        features = _down(own, 1)  # row j reads what row j - 1 predicted
    return outputs


def _unrolled_attention(
    q: Tensor, keys: list[Tensor], values: list[Tensor], step: int, window: int | None
) -> Tensor:
    """Return attention [B, H, L, E] of step `step` over the true rows and the self-fed diagonal."""
    L, E = q.shape[-2:]
    if step == 0:
        seen = None if window is None or window >= L else causal_mask(0, L, L, window, q.device)
        is_causal = seen is None
        return F.scaled_dot_product_attention(q, keys[0], values[0], seen, is_causal=is_causal)
    scale = 1 / math.sqrt(E)
    hidden = torch.ones(L, L, dtype=torch.bool, device=q.device).triu(1 - step)
    if window is not None:
        hidden |= ~causal_mask(0, L, L, window, q.device)
    scores = ((q @ keys[0].transpose(-1, -2)).float() * scale).masked_fill(hidden, -math.inf)
    # The row that led here at step r lies step - r positions before.
    extras = [
        (q * _down(keys[r], step - r)).sum(-1, keepdim=True).float() * scale
        for r in range(1, step + 1)
    ]
    weights = torch.cat((scores, *extras), dim=-1).softmax(-1).to(q.dtype)
    y = weights[..., :L] @ values[0]
    for r in range(1, step + 1):
        y = y + weights[..., L + r - 1, None] * _down(values[r], step - r)
    return y


def _down(x: Tensor, n: int) -> Tensor:
    """Shift rows (dim -2) down by n, zeros above."""
    n = min(n, x.shape[-2])
    return F.pad(x[..., : x.shape[-2] - n, :], (0, 0, n, 0)) if n else x


def token_losses(logits: Tensor, wanted: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Return the losses [M] of draft logits [M, V], and their gradients [M, V].

    `wanted` [M, V] are the target's probabilities p, q those of the logits. `paper` is the
    cross-entropy CE. The others are of arXiv 2602.23881: alpha = sum min(p, q) is the probability
    that a drawn draft token is accepted, TV = 1 - alpha the total variation. `lk` is -log alpha,
    whose gradient is that of TV over alpha, so that it does not vanish where alpha is small;
    `mixed` is w CE + (1 - w) TV with w = exp(-3 alpha), a constant to the gradient.
    """
    log_q = logits - logits.logsumexp(-1, keepdim=True)
    q = log_q.exp()
    cross_entropy, to_target = -(wanted * log_q).sum(-1), q - wanted
    if kind == "paper":
        return cross_entropy, to_target
    alpha = torch.minimum(wanted, q).sum(-1, keepdim=True).clamp(min=TINY)
    scarce = q * (q < wanted)  # only these tokens are accepted more often when q grows
    of_tv = q * scarce.sum(-1, keepdim=True) - scarce
    if kind == "lk":
        return -alpha[:, 0].log(), of_tv / alpha
    w = torch.exp(-3 * alpha)
    loss = w * cross_entropy.unsqueeze(-1) + (1 - w) * (1 - alpha)
    return loss[:, 0], w * to_target + (1 - w) * of_tv


class TokenLoss(torch.autograd.Function):
    """Mean of `token_losses` of predicted @ own.T for softmax(targets @ rows.T).

    Holds a part of the logits at a time: the gradients are computed in the forward pass, on a CPU
    while all are in cache.
    """

    CHUNK, CHUNK_VALUES = 256, 1 << 26  # least rows of a part; values of its logits on a GPU

    @staticmethod
    def forward(
        ctx: Any,
        predicted: Tensor,
        targets: Tensor,
        rows: Tensor,
        own: Tensor | None = None,
        kind: str = "paper",
    ) -> Tensor:
        """Return the scalar loss of predicted [M, D] for targets [M, D] and rows [V, D].

        `own` [V, D] are the rows of a draft head with an LM head of its own; None: `rows`.
        """
        drafting = rows if own is None else own.to(rows.dtype)
        exact = torch.promote_types(rows.dtype, torch.float32)
        total = predicted.new_zeros((), dtype=exact)
        gradient = torch.empty_like(predicted, dtype=exact)
        on_rows = None if own is None else torch.zeros_like(own, dtype=exact)
        chunk = TokenLoss.CHUNK
        if predicted.device.type != "cpu":  # small parts would wait for their launches
            chunk = max(chunk, TokenLoss.CHUNK_VALUES // len(rows))
        for begin in range(0, len(predicted), chunk):
            part = slice(begin, begin + chunk)
            wanted = (targets[part].to(rows.dtype) @ rows.T).to(exact).softmax(-1)
            outputs = predicted[part].to(rows.dtype)
            losses, on_logits = token_losses((outputs @ drafting.T).to(exact), wanted, kind)
            total += losses.sum()
            on_logits = on_logits.to(rows.dtype)
            gradient[part] = (on_logits @ drafting).to(exact)
            if on_rows is not None:
                on_rows += (on_logits.T @ outputs).to(exact)
        n = len(predicted)
        ctx.save_for_backward(gradient / n, None if on_rows is None else on_rows / n)
        ctx.dtype = predicted.dtype
        return total / n

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, Tensor | None, None]:
        gradient, on_rows = ctx.saved_tensors
        own = None if on_rows is None else on_rows * grad
        return (gradient * grad).to(ctx.dtype), None, None, own, None


def head_loss(
    head: EagleHead,
    lm_rows: Tensor,
    batch: Batch,
    options: TrainOptions,
    step: int,
    counts: Tensor | None = None,
) -> Tensor:
    """Return the training loss of a batch; `lm_rows` [V, D] are the target's LM head rows.

    They have the dtype that the products shall have. `step` is that of the run. `counts` are the
    rows of the whole batch that count where this is one part of it: the losses of the parts add up.
    """
    own = None if head.own_lm_head is None else head.own_lm_head.weight
    assert isinstance(own, Tensor | None), "an LM head that is trained is dense"
    counts = batch.counts(options.n_steps_ahead) if counts is None else counts
    features = batch.noisy(options, step)
    embeds = head.embedding.weight.detach()[batch.tokens].float()  # its own is not trained
    total = lm_rows.new_zeros((), dtype=torch.float32)
    weight_sum = 0.0
    ahead = unroll(head, embeds, features, options.n_steps_ahead)
    for n, (predicted, count) in enumerate(zip(ahead, counts.tolist(), strict=True)):
        if count == 0:
            break  # every answer of the batch is shorter
        weight = options.self_fed_decay**n
        weight_sum += weight
        counted = batch.counted(n)
        if not counted.any():
            continue
        p, t = predicted[counted], batch.targets[counted]  # [M, D]
        loss = options.ce_weight * TokenLoss.apply(p, t, lm_rows, own, options.loss)
        if options.feature_weight:
            loss = loss + options.feature_weight * F.smooth_l1_loss(p.float(), t.float())
        total = total + weight * len(p) / count * loss
    return total / max(weight_sum, 1e-9)


def compute_dtype(device: torch.device) -> torch.dtype:
    """Return bf16 where the hardware has products in it, else fp32."""
    return torch.float32 if pick_dtype("auto", device) == "fp32" else torch.bfloat16


def autocast(device: torch.device) -> torch.autocast:
    enabled = compute_dtype(device) == torch.bfloat16
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled)
