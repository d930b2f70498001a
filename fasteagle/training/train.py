"""Training an EAGLE-1/2 draft head on the target's features.

Loss, noise and optimizer are the paper's (section 4.2) by default: SmoothL1 between predicted and
true feature, plus a tenth of the cross-entropy between the two distributions over the draft
vocabulary, on answer tokens. With `unroll` > 1 the head also learns from its own features: at step
s a row sees true features up to s positions ago and its own predictions after that.

Shapes: B conversations, L positions, D model dim, V draft vocabulary, M rows that count.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fasteagle.config import HeadConfig
from fasteagle.errors import FasteagleError
from fasteagle.model import EagleHead, Transformer, apply_rope
from fasteagle.paths import replacing
from fasteagle.training.data import Features
from fasteagle.training.options import TrainOptions


@dataclasses.dataclass
class Batch:
    """Right-padded conversations. Row j pairs feature j with token j + 1."""

    tokens: Tensor  # [B, L] token j + 1
    features: Tensor  # [B, L, D] feature j
    targets: Tensor  # [B, L, D] feature j + 1
    first: Tensor  # [B] first row whose prediction counts
    last: Tensor  # [B] one past the last such row

    def counted(self, step: int) -> Tensor:
        """Rows [B, L] whose prediction counts after `step` self-fed steps."""
        rows = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return (rows >= self.first[:, None] + step) & (rows < self.last[:, None])


def make_batch(store: Features, chosen: list[int], device: torch.device) -> Batch:
    """Pad conversations to the longest of them."""
    parts = [store.conversation(i) for i in chosen]
    length = max(len(ids) for ids, _ in parts) - 1
    dim = parts[0][1].shape[1]
    tokens = torch.zeros(len(parts), length, dtype=torch.long)
    features = torch.zeros(len(parts), length, dim, dtype=torch.bfloat16)
    targets = torch.zeros_like(features)
    for b, (ids, values) in enumerate(parts):
        n = len(ids) - 1
        tokens[b, :n] = ids[1:]
        features[b, :n], targets[b, :n] = values[:-1], values[1:]
    # Drafting begins once the first answer token is the root: its pair is row prompt_len - 1. What
    # would follow the conversation's last token does not count.
    first = torch.tensor([store.prompt_lens[i] - 1 for i in chosen])
    last = torch.tensor([store.lengths[i] - 2 for i in chosen])
    return Batch(*(t.to(device) for t in (tokens, features, targets, first, last)))


def batches(store: Features, indices: list[int], options: TrainOptions) -> Iterator[list[int]]:
    """Endless batches of about `batch_tokens` tokens of like length, the same for the same seed."""
    for epoch in range(1 << 30):
        generator = torch.Generator().manual_seed(options.seed * 1_000_003 + epoch)
        jitter = torch.rand(len(indices), generator=generator).tolist()
        blurred = [store.lengths[i] + 60 * j for i, j in zip(indices, jitter, strict=True)]
        order = sorted(range(len(indices)), key=lambda i: blurred[i])
        groups: list[list[int]] = [[]]
        for i in order:
            longest = store.lengths[indices[i]]  # ascending, but for the jitter
            if groups[-1] and (len(groups[-1]) + 1) * longest > options.batch_tokens:
                groups.append([])
            groups[-1].append(indices[i])
        for g in torch.randperm(len(groups), generator=generator).tolist():
            yield groups[g]


def unroll(head: EagleHead, embeds: Tensor, features: Tensor, steps: int) -> list[Tensor]:
    """Predicted next features [B, L, D] after 1 .. `steps` steps, as drafting would compute them.

    At step s, row j reads its own prediction of the step before, and attends to the true rows up
    to j - s and to the self-fed rows that lead to it.
    """
    attention, block = head.block.attention, head.block
    B, L, _ = embeds.shape
    cos, sin = (t[:L].unsqueeze(1) for t in (head.rope_cos, head.rope_sin))
    heads = (attention.n_head, attention.n_kv_head, attention.n_kv_head)
    group = attention.n_head // attention.n_kv_head
    keys: list[Tensor] = []
    values: list[Tensor] = []
    outputs: list[Tensor] = []
    for step in range(steps):
        x = head.fc(torch.cat((embeds, features.to(embeds.dtype)), dim=-1))
        qkv = attention.qkv(x).view(B, L, -1, attention.head_dim)
        q, k, v = qkv.split(heads, dim=2)  # [B, L, heads, E]
        q = apply_rope(q, cos, sin).transpose(1, 2)
        keys.append(apply_rope(k, cos, sin).transpose(1, 2).repeat_interleave(group, dim=1))
        values.append(v.transpose(1, 2).repeat_interleave(group, dim=1))
        y = _unrolled_attention(q, keys, values, step)
        x = x + attention.out(y.transpose(1, 2).reshape(B, L, -1))
        x = x + block.mlp(block.mlp_norm(x))
        outputs.append(x)
        features = _down(x, 1)  # row j reads what row j - 1 predicted
    return outputs


def _unrolled_attention(q: Tensor, keys: list[Tensor], values: list[Tensor], step: int) -> Tensor:
    """Attention [B, H, L, E] of step `step` over the true rows and the self-fed diagonal."""
    if step == 0:
        return F.scaled_dot_product_attention(q, keys[0], values[0], is_causal=True)
    L, E = q.shape[-2:]
    scale = 1 / math.sqrt(E)
    hidden = torch.ones(L, L, dtype=torch.bool, device=q.device).triu(1 - step)
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
    return F.pad(x[..., : x.shape[-2] - n, :], (0, 0, n, 0)) if n else x


class SoftCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy between softmax(targets @ rows.T) and predicted @ rows.T.

    Never holds more than `CHUNK` rows of logits: the gradient, which is the difference of the two
    distributions times the rows, is computed on the way forward while both are in cache.
    """

    CHUNK = 256

    @staticmethod
    def forward(ctx: Any, predicted: Tensor, targets: Tensor, rows: Tensor) -> Tensor:
        """predicted [M, D], targets [M, D], rows [V, D] -> scalar."""
        total = predicted.new_zeros((), dtype=torch.float32)
        gradient = torch.empty_like(predicted, dtype=torch.float32)
        for begin in range(0, len(predicted), SoftCrossEntropy.CHUNK):
            part = slice(begin, begin + SoftCrossEntropy.CHUNK)
            wanted = (targets[part].to(rows.dtype) @ rows.T).float().softmax(-1)
            logits = (predicted[part].to(rows.dtype) @ rows.T).float()
            norm = logits.logsumexp(-1, keepdim=True)
            total += (norm[:, 0] - (wanted * logits).sum(-1)).sum()
            difference = logits.sub_(norm).exp_().sub_(wanted)
            gradient[part] = (difference.to(rows.dtype) @ rows).float()
        ctx.save_for_backward(gradient / len(predicted))
        ctx.dtype = predicted.dtype
        return total / len(predicted)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return (gradient * grad).to(ctx.dtype), None, None


def head_loss(
    head: EagleHead,
    lm_rows: Tensor,
    embedding: Tensor,
    batch: Batch,
    options: TrainOptions,
    generator: torch.Generator,
) -> Tensor:
    """The training loss of a batch; `lm_rows` [V, D] are the LM head's rows of the vocabulary."""
    noise = torch.rand(batch.features.shape, generator=generator, device=batch.features.device)
    features = batch.features.float() + (2 * noise - 1) * options.noise
    embeds = embedding[batch.tokens]
    total = lm_rows.new_zeros((), dtype=torch.float32)
    weight_sum = 0.0
    for step, predicted in enumerate(unroll(head, embeds, features, options.unroll)):
        counted = batch.counted(step)
        if not counted.any():
            break  # every answer of the batch is shorter than the unroll
        p, t = predicted[counted], batch.targets[counted]  # [M, D]
        cross_entropy = SoftCrossEntropy.apply(p, t, lm_rows)
        feature_loss = F.smooth_l1_loss(p.float(), t.float())
        weight = options.unroll_decay**step
        total = total + weight * (
            options.feature_weight * feature_loss + options.ce_weight * cross_entropy
        )
        weight_sum += weight
    return total / max(weight_sum, 1e-9)


RANKS = 4  # of a node's children whose acceptance is counted


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """Quality on text not trained on: acceptance by depth of a chain, greedy."""

    alphas: tuple[float, ...]  # n-alpha: acceptance of token n + 1 given that n were accepted
    tau: float  # tokens per target pass of a chain as deep as `alphas` is long, bonus included
    rows: int
    counts: tuple[tuple[int, int], ...] = ()  # (rows, drafted tokens accepted) by conversation
    ranks: tuple[tuple[float, ...], ...] = ()  # how often the child of rank 0, 1, ... was right

    def as_dict(self) -> dict[str, Any]:
        return {
            "alphas": [round(a, 4) for a in self.alphas],
            "tau": round(self.tau, 4),
            "ranks": [[round(p, 4) for p in level] for level in self.ranks],
        }


@torch.no_grad()
def evaluate(
    head: EagleHead, target: Transformer, store: Features, indices: list[int], depth: int = 5
) -> HeldOut:
    """Chain drafting simulated from every answer position of the held-out text.

    Exact for text the target wrote greedily: the tokens fed are then those it would accept.
    """
    device = head.fc.weight.device
    ids = head.target_ids()
    lm_rows = target.head_rows(ids)
    n_ranks = min(RANKS, len(ids))
    hits = torch.zeros(depth, n_ranks, dtype=torch.double)
    accepted = torch.zeros(depth, dtype=torch.double)
    tried = torch.zeros(depth, dtype=torch.double)
    counts = []
    for i in indices:
        before = int(tried[0]), int(accepted.sum())
        batch = make_batch(store, [i], device)
        embeds = target.embedding.weight[batch.tokens]
        with _autocast(device):
            outputs = unroll(head, embeds, batch.features, depth)
        best = target.lm_head(batch.targets[0].to(lm_rows.dtype)).argmax(-1)
        alive = torch.ones_like(best, dtype=torch.bool)
        for step, predicted in enumerate(outputs):
            drafted = ids[(predicted[0].to(lm_rows.dtype) @ lm_rows.T).topk(n_ranks).indices]
            counted = batch.counted(step)[0]
            alive = (torch.cat((alive.new_zeros(1), alive[:-1])) if step else alive) & counted
            tried[step] += alive.sum().cpu()
            right = (drafted == best.unsqueeze(1)) & alive.unsqueeze(1)
            hits[step] += right.sum(0).cpu()
            alive = right[:, 0]
            accepted[step] += alive.sum().cpu()
        counts.append((int(tried[0]) - before[0], int(accepted.sum()) - before[1]))
    alphas = tuple((accepted / tried.clamp(min=1)).tolist())
    tau = 1 + sum(math.prod(alphas[: n + 1]) for n in range(depth))
    ranks = tuple(map(tuple, (hits / tried.clamp(min=1).unsqueeze(1)).tolist()))
    return HeldOut(alphas, tau, int(tried[0]), tuple(counts), ranks)


def _autocast(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, dtype=torch.bfloat16)


def new_head(target: Transformer, draft_ids: Tensor, options: TrainOptions) -> EagleHead:
    """A head that begins as the identity on the feature.

    Copying the target's last block diverges; small random attention and MLP train.
    """
    c = target.config
    block = dataclasses.replace(
        c,
        n_layer=1,
        qkv_bias=False,
        qk_norm=False,
        tie_embeddings=False,
        rope_scaling=None,
        rope_freq_factors=None,
        rope_linear_factor=1.0,
        sliding_window=None,
    )
    head = EagleHead(HeadConfig(block, len(draft_ids), fc_bias=True))
    generator = torch.Generator().manual_seed(options.seed)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, options.init_scale, generator=generator)
        head.fc.bias.zero_()
        head.fc.weight[:, c.dim :] += torch.eye(c.dim)
        for linear in (head.block.attention.out, head.block.mlp.down):
            linear.weight.mul_(0.1)
        head.d2t.copy_(draft_ids - torch.arange(len(draft_ids)))
    return head


class Trainer:
    """One training run in one folder; `run` continues exactly where a killed run stopped."""

    def __init__(
        self,
        head: EagleHead,
        target: Transformer,
        store: Features,
        held_out: list[int],
        loss_ids: Tensor,
        options: TrainOptions,
        folder: Path,
        identity: str = "",
    ) -> None:
        self.head, self.target, self.store, self.options = head, target, store, options
        self.held_out = held_out
        self.training = sorted(set(range(len(store))) - set(held_out))
        self.folder = folder
        # What must not change between the parts of a run, besides the options.
        text = json.dumps([identity, held_out, head.target_ids().tolist(), loss_ids.tolist()])
        self.identity = hashlib.sha256(text.encode()).hexdigest()
        self.step = 0
        self.history: list[dict[str, Any]] = []
        device = target.norm.weight.device
        head.float().to(device)
        longest = max(store.lengths)
        head.borrow(target, longest + 1)  # RoPE; the trainer reads the target's tensors itself
        head.float()
        self._lm_rows = target.head_rows(loss_ids)
        self.optimizer = torch.optim.AdamW(
            [p for p in head.parameters() if p.requires_grad],
            lr=options.lr,
            betas=(options.beta1, options.beta2),
            weight_decay=options.weight_decay,
        )

    def resume(self) -> bool:
        """Load the last checkpoint, if there is one. Raises `FasteagleError` on other options."""
        path = self.folder / "state.pt"
        if not path.exists():
            return False
        state = torch.load(path, weights_only=True)
        saved, mine = state["options"], json.loads(json.dumps(dataclasses.asdict(self.options)))
        changed = [f"{k} {saved.get(k)} -> {mine[k]}" for k in mine if saved.get(k) != mine[k]]
        if changed:
            raise FasteagleError(
                f"{self.folder} was begun with other options ({', '.join(changed)}): "
                "give the same ones, or another --out"
            )
        if state["identity"] != self.identity:
            raise FasteagleError(
                f"{self.folder} was begun with another model or other text: give the same --model, "
                "--data, --prompts, --max-len, --held-out and --init, or another --out"
            )
        self.head.load_state_dict(state["head"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.history = state["step"], state["history"]
        return True

    def save(self) -> None:
        """Write everything `resume` needs; the old checkpoint stays until the new one is whole."""
        self.folder.mkdir(parents=True, exist_ok=True)
        state = {
            "head": self.head.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "history": self.history,
            "identity": self.identity,
            "options": json.loads(json.dumps(dataclasses.asdict(self.options))),
        }
        with replacing(self.folder / "state.pt") as temporary:
            torch.save(state, temporary)

    def run(
        self,
        report: Callable[[dict[str, Any]], None],
        every: int = 200,
        save_every: int = 50,
        patience: int | None = None,
        tick: Callable[[int, float], None] = lambda step, loss: None,
    ) -> None:
        """Train to `options.steps`, or until `patience` evaluations brought no better 0-alpha.

        `tick` hears the number and the loss of every step, `report` every evaluation.
        """
        device = self.head.fc.weight.device
        schedule = batches(self.store, self.training, self.options)
        for _ in range(self.step):
            next(schedule)
        begun, tokens, losses = time.perf_counter(), 0, []
        while self.step < self.options.steps:
            batch = make_batch(self.store, next(schedule), device)
            losses.append(self._update(batch))
            tokens += int(batch.counted(0).sum())
            self.step += 1
            tick(self.step, losses[-1])
            last = self.step == self.options.steps
            if self.step % every == 0 or last:
                held = evaluate(self.head, self.target, self.store, self.held_out)
                entry = {
                    "step": self.step,
                    "loss": round(sum(losses) / len(losses), 5),
                    "tok_s": round(tokens / (time.perf_counter() - begun)),
                    **held.as_dict(),
                }
                self.history.append(entry)
                report(entry)
                begun, tokens, losses = time.perf_counter(), 0, []
            if self.step % save_every == 0 or last:
                self.save()
            if patience and self._stalled(patience):
                return

    def _update(self, batch: Batch) -> float:
        device = self.head.fc.weight.device
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.lr_at(self.step)
        generator = torch.Generator(device).manual_seed(self.options.seed * 7919 + self.step)
        with _autocast(device):
            loss = head_loss(
                self.head,
                self._lm_rows,
                self.target.embedding.weight,
                batch,
                self.options,
                generator,
            )
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), self.options.clip)
        self.optimizer.step()
        return loss.item()

    def _stalled(self, patience: int) -> bool:
        scores = [entry["alphas"][0] for entry in self.history]
        return len(scores) > patience and max(scores[-patience:]) <= max(scores[:-patience])
