"""Training a draft head: a fresh one, the run that can be continued, its bar, the head's header.

The optimizer is the EAGLE-1 paper's (section 4.2) by default.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from fasteagle.config import Eagle3Config, HeadConfig, draft_block
from fasteagle.errors import FasteagleError, note
from fasteagle.loading.open import OpenedModel, Runtime
from fasteagle.loading.pickles import unpickled
from fasteagle.model import Eagle3Head, EagleHead, Transformer, make_head
from fasteagle.paths import replacing
from fasteagle.training.data import Features
from fasteagle.training.data_file import require_same
from fasteagle.training.held_out import HeldOut, evaluate
from fasteagle.training.loss import Batch, autocast, batches, compute_dtype, head_loss, make_batch
from fasteagle.training.options import TrainOptions
from fasteagle.training.parallel import ALONE, Ranks


def new_head(target: Transformer, draft_ids: Tensor, options: TrainOptions) -> EagleHead:
    """Return a new draft head that starts as the identity on the feature.

    For EAGLE-3 that is the last auxiliary hidden state; norm and LM head begin as the target's.
    A copy of the target's last block diverges; small random attention and MLP weights train.
    """
    c = target.config
    block = dataclasses.replace(draft_block(c), sliding_window=options.window)
    aux_layers = options.aux_layers_of(c.n_layer)
    eagle3 = None
    if aux_layers:
        normed = options.algorithm == "eagle3.1"
        eagle3 = Eagle3Config(
            aux_layers,
            c.dim,
            own_lm_head=not options.borrow_lm_head,
            aux_norm="each" if normed else "none",
            norm_output=normed,
        )
    config = HeadConfig(block, len(draft_ids), fc_bias=eagle3 is None, eagle3=eagle3)
    head = make_head(config)
    generator = torch.Generator().manual_seed(options.seed)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, options.init_scale, generator=generator)
        if head.fc.bias is not None:
            head.fc.bias.zero_()
        head.fc.weight[:, -c.dim :] += torch.eye(c.dim)
        for linear in (head.block.attention.out, head.block.mlp.down):
            linear.weight.mul_(0.1)
        head.d2t.copy_(draft_ids - torch.arange(len(draft_ids)))
        if isinstance(head, Eagle3Head):
            head.norm.weight.copy_(target.norm.weight)
        if head.own_lm_head is not None:
            ids = head.target_ids().to(target.norm.weight.device)
            head.own_lm_head.weight.copy_(target.head_rows(ids))
    return head


SAVE_SECONDS = 60.0  # most of a run's work that an interruption costs


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
        ranks: Ranks = ALONE,
    ) -> None:
        self.head, self.target, self.store, self.options = head, target, store, options
        self.ranks, self.held_out = ranks, held_out
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
        self._lm_rows = target.head_rows(loss_ids).to(compute_dtype(device))
        self.optimizer = torch.optim.AdamW(
            [p for p in head.parameters() if p.requires_grad],
            lr=options.lr,
            betas=(options.beta1, options.beta2),
            weight_decay=options.weight_decay,
        )

    @property
    def training_tokens(self) -> int:
        """Tokens of the text, without what is held out."""
        lengths = self.store.lengths
        return sum(lengths[i] for i in self.training)

    def resume(self) -> bool:
        """Load the last checkpoint, if there is one; raise `FasteagleError` on other options."""
        path, remedy = self.folder / "state.pt", "remove it, or give another --out"
        if not path.exists():
            return False
        own, state = self._state(), unpickled(path, fix=remedy)
        is_ours = isinstance(state, dict) and state.keys() == own.keys()
        if not is_ours or not all(isinstance(state[key], type(own[key])) for key in own):
            raise FasteagleError(f"{path} is no state of a training: {remedy}")
        require_same(self.folder, state["options"], own["options"])
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
        """Write everything `resume` needs; the old checkpoint is kept until the new one is done."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with replacing(self.folder / "state.pt") as temporary:
            torch.save(self._state(), temporary)

    def _state(self) -> dict[str, Any]:
        return {
            "head": self.head.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "history": self.history,
            "identity": self.identity,
            "options": json.loads(json.dumps(dataclasses.asdict(self.options))),
        }

    def run(self, every: int = 200, save_every: int = 50, patience: int | None = None) -> None:
        """Train to `options.steps`, or until 0-alpha did not improve for `patience` evaluations."""
        begun = saved = time.perf_counter()
        tokens, losses = 0, []
        with TrainingBar(self) as bar:
            for loss, n_rows in self._steps():
                losses.append(loss)
                tokens += n_rows
                bar.tick(self.step, loss)
                last = self.step == self.options.steps
                if self.step % every == 0 or last:
                    seconds = time.perf_counter() - begun
                    entry = {
                        "step": self.step,
                        "loss": round(sum(losses) / len(losses), 5),
                        "tok_s": round(tokens / seconds),
                        **self.evaluate().as_dict(),
                    }
                    self.history.append(entry)
                    if self.ranks.is_first:
                        bar.report(entry)
                    begun, tokens, losses = time.perf_counter(), 0, []
                is_due = self.step % save_every == 0 or time.perf_counter() - saved > SAVE_SECONDS
                if self.ranks.is_first and (is_due or last):
                    self.save()
                    saved = time.perf_counter()
                if patience and self._stalled(patience):
                    return

    def seconds_a_step(self) -> float:
        """Return the median time of a step, by all of them, the first ones aside.

        They train the draft head: it should be a copy.
        """
        times = [time.perf_counter() for _ in self._steps()]
        return statistics.median(b - a for a, b in itertools.pairwise(times[len(times) // 4 :]))

    def _steps(self) -> Iterator[tuple[float, int]]:
        """Train; yield the loss and the row count of each step once it is done."""
        device = self.head.fc.weight.device
        schedule = batches(self.store, self.training, self.options)
        for batch in itertools.islice(schedule, self.step, self.options.steps):
            share = self.ranks.share(batch)
            done = self._update(make_batch(self.store, share, device) if share else None)
            self.step += 1
            yield done

    def evaluate(self) -> HeldOut:
        """Measure the draft head on held-out conversations; all processes must take part."""
        return evaluate(self.head, self.target, self.store, self.held_out, ranks=self.ranks)

    def _update(self, batch: Batch | None) -> tuple[float, int]:
        """Train one step; return the loss and its row count; `batch` is None without a share."""
        device, options = self.head.fc.weight.device, self.options
        for group in self.optimizer.param_groups:
            group["lr"] = options.lr_at(self.step)
        self.optimizer.zero_grad(set_to_none=False)
        counts = torch.zeros(options.n_steps_ahead, dtype=torch.long)
        if batch is not None:
            counts += batch.counts(options.n_steps_ahead)
        self.ranks.sum_([counts])
        total = torch.zeros((), device=device)
        if batch is not None:
            with autocast(device):
                part = head_loss(self.head, self._lm_rows, batch, options, self.step, counts)
            if part.requires_grad:
                part.backward()
            total += part.detach()
        trained = [p for p in self.head.parameters() if p.requires_grad]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
        self.ranks.sum_([total, *gradients])
        for parameter, gradient in zip(trained, gradients, strict=True):
            parameter.grad = gradient
        norm = torch.nn.utils.clip_grad_norm_(trained, options.clip)
        loss = total.item()
        if not math.isfinite(loss) or not norm.isfinite():  # a step would spoil all weights
            raise FasteagleError(
                f"the loss is not finite at step {self.step + 1:,}: give a lower --lr and another "
                "--out"
            )
        self.optimizer.step()
        return loss, int(counts[0])

    def _stalled(self, patience: int) -> bool:
        scores = [entry["alphas"][0] for entry in self.history]
        return len(scores) > patience and max(scores[-patience:]) <= max(scores[:-patience])


class TrainingBar(Progress):
    """Progress bar with loss, held-out 0-alpha and tau; plain lines without a terminal."""

    def __init__(self, trainer: Trainer) -> None:
        console = Console(stderr=True, highlight=False)
        super().__init__(
            TextColumn("step {task.completed:,} of {task.total:,}"),
            BarColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[numbers]}"),
            console=console,
            disable=not (console.is_terminal and trainer.ranks.is_first),
        )
        steps = trainer.options.steps
        self._task = self.add_task("", total=steps, completed=trainer.step, numbers="")
        self._steps, self._loss, self._held = steps, 0.0, ""

    def tick(self, step: int, loss: float) -> None:
        self._loss = loss if not self._loss else 0.95 * self._loss + 0.05 * loss
        numbers = f"loss {self._loss:.4f}{self._held}"
        self.update(self._task, completed=step, numbers=numbers)

    def report(self, entry: dict[str, Any]) -> None:
        self._held = f" | 0-alpha {entry['alphas'][0]:.3f} | tau {entry['tau']:.2f}"
        alphas = " ".join(f"{alpha:.3f}" for alpha in entry["alphas"])
        line = (
            f"step {entry['step']:,} of {self._steps:,} | loss {entry['loss']:.4f} | "
            f"n-alpha {alphas} | tau {entry['tau']:.2f} | TV {entry['tv'][0]:.3f} | "
            f"{entry['tok_s']:,} tok/s"
        )
        tell = note if self.disable else self.console.out
        tell(line)  # by `note`, for who reads it may leave


def head_header(
    head: EagleHead, target: Runtime | OpenedModel, n_tokens: int, held: dict[str, Any]
) -> dict[str, Any]:
    """Return the header of a trained draft head's file; `held` is `HeldOut.as_dict`."""
    scheme = target.checkpoint.scheme
    eagle = "eagle3" if head.config.aux_layers else "eagle1"
    return {
        "algorithm": "mtp" if head.config.mtp else eagle,
        "target": target.name,
        "target_fingerprint": target.checkpoint.fingerprint,
        "scheme": None if scheme is None else scheme.name,
        "group_size": None if scheme is None else scheme.group_size or None,
        "draft_vocab_size": head.config.draft_vocab_size,
        "training_tokens": n_tokens,
        **{name: held[name] for name in ("alphas", "tau", "ranks")},
    }
