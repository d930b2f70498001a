"""The stages of `calibrate-head`: ways to fit a draft head to a quantized target.

Each stage makes a new head from a head; `Gain.is_sure` decides whether it is kept.
Shapes: N tokens, D model dim.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fasteagle.config import HeadConfig, ModelConfig
from fasteagle.loading.head_file import with_vocabulary
from fasteagle.loading.source import fitting_scheme, head_scheme
from fasteagle.model import KEY_BLOCK, EagleHead, Transformer
from fasteagle.prompts import Conversation
from fasteagle.quant.params import quantize_weight
from fasteagle.quant.scheme import BF16, Scheme
from fasteagle.training.data import Features, frequent_tokens
from fasteagle.training.held_out import HeldOut
from fasteagle.training.options import TrainOptions
from fasteagle.training.train import Trainer

RIDGE = 1e-3  # of the features' mean square
RESAMPLES = 2000


@dataclasses.dataclass(frozen=True)
class Gain:
    """Gain in tau of one head over another on held-out text, with its 95 % interval."""

    tau: float
    low: float
    high: float

    @property
    def is_sure(self) -> bool:
        return self.low > 0


def gain(before: HeldOut, after: HeldOut) -> Gain:
    """Paired bootstrap over the held-out conversations."""
    assert len(before.counts) == len(after.counts)
    pairs = list(zip(before.counts, after.counts, strict=True))
    draw = random.Random(0)
    found = sorted(_difference(draw.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES))
    return Gain(_difference(pairs), found[RESAMPLES // 40], found[-RESAMPLES // 40 - 1])


def _difference(pairs: Sequence[tuple[tuple[int, int], tuple[int, int]]]) -> float:
    """Accepted tokens per pass: after minus before."""
    rates = []
    for side in (0, 1):
        rows = sum(pair[side][0] for pair in pairs)
        rates.append(sum(pair[side][1] for pair in pairs) / max(rows, 1))
    return rates[1] - rates[0]


@torch.no_grad()
def fold_feature_map(head: EagleHead, full: Features, quantized: Features) -> EagleHead:
    """Stage ii: the least-squares map from quantized to unquantized features, folded into `fc`.

    Both sources hold the features of the same conversations. A bias of `fc` takes the map's
    constant; without one the map has none.
    """
    D, bias = head.config.feature_dim, head.fc.bias
    moment = torch.zeros(D + 1, D + 1, dtype=torch.double)
    cross = torch.zeros(D + 1, D, dtype=torch.double)
    for i in range(len(full)):
        wanted, seen = (s.conversation(i)[1][:, :D].double() for s in (full, quantized))
        ones = torch.full((len(seen), 1), float(bias is not None), dtype=torch.double)
        seen = torch.cat((seen, ones), dim=1)
        moment += seen.T @ seen
        cross += seen.T @ wanted
    ridge = RIDGE * moment.diagonal()[:D].mean()
    penalty = torch.eye(D + 1, dtype=torch.double) * ridge
    penalty[D, D] = float(bias is None)
    # Regularize towards the identity: without evidence, features stay as they are.
    cross[:D] += torch.eye(D, dtype=torch.double) * ridge
    solved = torch.linalg.solve(moment + penalty, cross).float()  # [D + 1, D]
    mapped = copy.deepcopy(head)
    on_features = head.fc.weight[:, -D:].float().cpu()
    mapped.fc.weight[:, -D:] = (on_features @ solved[:D].T).to(mapped.fc.weight)
    if bias is not None:
        mapped.fc.bias += (on_features @ solved[D]).to(bias)
    return mapped


def can_fold(head: EagleHead) -> bool:
    """Whether a map of the features can be folded into `fc`: it must read them as they are."""
    eagle3 = head.config.eagle3
    return head.fc.bias is not None if eagle3 is None else eagle3.tap_norm == "none"


def rebuilt_vocabulary(
    head: EagleHead, conversations: Sequence[Conversation], target: Transformer
) -> EagleHead:
    """Stage iii: as many draft tokens as before, those most frequent in the target's own answers.

    If the text has too few distinct tokens, the old vocabulary supplies the others.
    """
    old = head.target_ids().tolist()
    return with_vocabulary(head, frequent_tokens(conversations, len(old), old), target.head_rows)


class FakeQuantized(nn.Module):
    """A weight with its quantized values; gradients pass straight through."""

    def __init__(self, scheme: Scheme) -> None:
        super().__init__()
        self.scheme = scheme

    def forward(self, weight: Tensor) -> Tensor:
        with torch.no_grad():
            change = quantize_weight(weight, self.scheme).dequantize() - weight
        return weight + change


def fake_quantize_(head: EagleHead, scheme: Scheme) -> None:
    """Make the head's linears compute with quantized weights while fp32 ones are trained."""
    for linear, own in _linears(head, scheme):
        parametrize.register_parametrization(linear, "weight", FakeQuantized(own))


def _linears(head: EagleHead, scheme: Scheme) -> list[tuple[nn.Linear, Scheme]]:
    """The head's linears and how each is quantized; see `quantize_head_`."""
    found = []
    for linear in head.modules():
        if linear is head.own_lm_head:
            if scheme.head_bits == 16:
                continue
            own = head_scheme(scheme)
        else:
            own = scheme
        if isinstance(linear, nn.Linear):
            found.append((linear, fitting_scheme(own, linear.in_features)))
    return found


@torch.no_grad()
def as_quantized(head: EagleHead, scheme: Scheme) -> EagleHead:
    """A copy whose linears hold their quantized values in full precision."""
    changed = copy.deepcopy(head)
    for linear, own in _linears(changed, scheme):
        linear.weight.copy_(quantize_weight(linear.weight, own).dequantize())
    return changed


def distilled(
    head: EagleHead,
    target: Transformer,
    store: Features,
    held_out: list[int],
    options: TrainOptions,
    folder: Path,
    identity: str,
    scheme: Scheme | None,
    report: Any,
    tick: Any,
    save_every: int,
    enough: Callable[[], bool] = lambda: False,
) -> EagleHead:
    """Stages iv and v: training on the quantized target's own answers, on self-fed steps too.

    With `scheme` the head's linears compute with quantized weights. Continues a run in `folder`.
    """
    student = copy.deepcopy(head).float()
    for parameter in student.parameters():
        parameter.requires_grad_(True)
    if scheme is not None:
        fake_quantize_(student, scheme)
    loss_ids = student.target_ids()
    trainer = Trainer(student, target, store, held_out, loss_ids, options, folder, identity)
    trainer.resume()
    every = max(1, options.steps // 8)
    trainer.run(report, every, save_every=save_every, tick=tick, enough=enough)
    for linear in student.modules():
        if isinstance(linear, nn.Linear) and parametrize.is_parametrized(linear):
            parametrize.remove_parametrizations(linear, "weight", leave_parametrized=False)
    return student


def training_options(n_steps: int, algorithm: str = "eagle1", seed: int = 0) -> TrainOptions:
    """For short further training of a good head: low learning rate, self-fed features, no noise."""
    return TrainOptions(
        algorithm=algorithm,
        lr=1e-4,
        steps=n_steps,
        warmup=min(50, n_steps // 4 + 1),
        self_fed_steps=2,
        batch_tokens=2048,
        noise=0.0,
        seed=seed,
    )


def peak_bytes(config: ModelConfig, head: HeadConfig, scheme: Scheme, seq_len: int) -> int:
    """Peak memory of a calibration: either target alone, or the quantized one plus training.

    Training holds the head in fp32 with its gradient and Adam's two moments, the LM head's rows of
    the draft vocabulary in 16 bits, and the activations of one batch.
    """
    cache = config.kv_bytes(seq_len + KEY_BLOCK)
    full = BF16.model_bytes(config) + cache
    rows = head.draft_vocab_size * config.dim * 2
    options = training_options(1)
    per_token = 4 * (12 * head.block.dim + 4 * head.block.ffn_dim) * options.n_steps_ahead
    training = 16 * head.linear_params + rows + options.batch_tokens * per_token
    return max(full, scheme.model_bytes(config) + cache + training)
