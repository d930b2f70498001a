"""The stages of a calibration: what is tried on a head, and what of it is kept."""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fasteagle.errors import note
from fasteagle.generate import Engine
from fasteagle.loading.head_file import load_head, save_head
from fasteagle.model import EagleHead
from fasteagle.prompts import Conversation
from fasteagle.quant.scheme import Scheme
from fasteagle.training import calibrate
from fasteagle.training.calibration import Calibration
from fasteagle.training.data import FeatureStore, SomeOf
from fasteagle.training.held_out import evaluate
from fasteagle.training.report import Candidate, ready_head

FEWEST_STEPS = 20  # of a training run that is worth its start


class Stages:
    """All stages over the quantized target and its features."""

    def __init__(
        self, run: Calibration, engine: Engine, store: FeatureStore, held_out: list[int]
    ) -> None:
        self._run, self._engine, self._store, self._held_out = run, engine, store, held_out

    def run(self, conversations: Sequence[Conversation], shown: list[int]) -> list[Candidate]:
        """Every stage on the best head so far; each is judged with quantized weights.

        `shown` are the conversations whose unquantized features are there.
        """
        run, engine, store, held_out = self._run, self._engine, self._store, self._held_out
        held_ids = set(held_out)
        training = [c for i, c in enumerate(conversations) if i not in held_ids]
        found: list[Candidate] = []

        def judge(name: str, head: EagleHead) -> EagleHead:
            best = [c for c in found if c.kept][-1] if found else None
            as_run = calibrate.as_quantized(head, run.head_scheme)
            held = evaluate(ready_head(as_run, engine, None).float(), engine.model, store, held_out)
            gained = None if best is None else calibrate.gain(best.held, held)
            kept = gained is None or gained.is_sure
            found.append(Candidate(name, head, held, kept, gained))
            note(found[-1].line())
            return head if best is None or kept else best.head

        best = judge("i, as it was", run.head)
        if calibrate.can_fold(best) and shown:
            full = FeatureStore(run.work.folder / "full-features")
            n = len(held_out)
            whole = SomeOf(full, range(n, n + len(shown)))
            mapped = calibrate.fold_feature_map(best, whole, SomeOf(store, shown))
            best = judge("ii, feature map", mapped)
        if best.config.draft_vocab_size < run.config.vocab_size:
            best = judge(
                "iii, vocabulary", calibrate.rebuilt_vocabulary(best, training, engine.model)
            )
        for name, scheme in (("iv, distilled", None), ("v, quantized", run.head_scheme)):
            trained = self.distill(name, scheme, best)
            if trained is None:
                note(f"{name}: left out, the time is up")
            else:
                best = judge(name, trained)
        return found

    def distill(self, name: str, scheme: Scheme | None, head: EagleHead) -> EagleHead | None:
        """A training run of the given steps, or of half the time that is left.

        Of all of it where half is too short; None where that is, too.
        """
        run = self._run
        folder = run.work.folder / name.replace(", ", "-")
        finished = folder / "head"
        if (finished / "config.json").exists():
            return load_head(finished, run.config)[0]
        n_steps = run.options.steps or run.work.result(name)
        share = self.share(scheme)
        if n_steps is None:
            seconds = self.step_seconds(head, scheme)
            share = self.share(scheme)
            if share < FEWEST_STEPS * seconds:  # one run rather than none
                share = run.left
            n_steps = int(share / seconds)
            if n_steps < FEWEST_STEPS:
                return None
            run.work.record(name, n_steps)
        last = [time.perf_counter()]
        until = run.work.seconds + 1.1 * share

        def enough() -> bool:
            return run.options.steps is None and run.work.seconds > until

        def tick(step: int, loss: float) -> None:
            if time.perf_counter() - last[0] > 20:
                last[0] = time.perf_counter()
                note(f"{name}: step {step:,} of {n_steps:,}, loss {loss:.4f}")

        def report(entry: dict[str, Any]) -> None:
            note(
                f"{name}: step {entry['step']:,}, 0-alpha {entry['alphas'][0]:.3f}, "
                f"tau {entry['tau']:.2f}"
            )

        options = calibrate.training_options(n_steps, run.algorithm)
        trained = calibrate.distilled(
            ready_head(head, self._engine, None),
            self._engine.model,
            self._store,
            self._held_out,
            options,
            folder / "run",
            run.identity,
            scheme,
            report,
            tick,
            save_every=25,
            enough=enough,
        )
        save_head(finished, trained, {}, torch.float32)
        return load_head(finished, run.config)[0]

    def share(self, scheme: Scheme | None) -> float:
        """Seconds for the next training run: the last one gets all that is left."""
        return self._run.left if scheme is not None else self._run.left / 2

    def step_seconds(self, head: EagleHead, scheme: Scheme | None) -> float:
        """Seconds per training step here, evaluations included, measured on a few steps."""
        times: list[float] = [time.perf_counter()]
        with tempfile.TemporaryDirectory() as name:
            calibrate.distilled(
                ready_head(head, self._engine, None),
                self._engine.model,
                self._store,
                self._held_out[:4],
                calibrate.training_options(6, self._run.algorithm),
                Path(name),
                "",
                scheme,
                lambda entry: None,
                lambda step, loss: times.append(time.perf_counter()),
                save_every=1000,
            )
        steps = [b - a for a, b in itertools.pairwise(times[1:])]
        return 1.3 * statistics.mean(steps)
