"""Benchmarks of shapes without weights: a random draft head, and a tau that the user supplies.

A cycle takes as long with random weights as with real ones, but a random head's proposals are
rejected. So cycle times are measured, tok/s is computed from the supplied tau, and everything
computed from it is labelled simulated.
"""

from __future__ import annotations

import dataclasses

import torch

from fasteagle.bench.options import BenchOptions
from fasteagle.bench.row_spec import check_tau
from fasteagle.config import HeadConfig
from fasteagle.drafting.base import Drafter
from fasteagle.errors import FasteagleError
from fasteagle.generate import Engine
from fasteagle.loading.heads.find import head_shape
from fasteagle.loading.make_drafter import tree_drafter
from fasteagle.loading.open import OpenedModel
from fasteagle.loading.source import has_native, quantize_head_
from fasteagle.loading.tensors import Checkpoint
from fasteagle.model import EagleHead, make_head
from fasteagle.options import DraftOptions, RuntimeOptions


def check_simulated(
    options: BenchOptions, runtime: RuntimeOptions, dummy: OpenedModel | None
) -> None:
    """Raise `FasteagleError` unless every eagle row could reach `simulate_tau`.

    `dummy` is the model where its weights are random.
    """
    tau = options.simulate_tau
    if tau is None:
        return
    flag = f"simulate-tau {tau:g}"
    if dummy is None:
        raise FasteagleError(f"{flag} is for random weights: add --load-format dummy, or drop it")
    drafting = [row for row in options.specs if row.has_head]
    if not drafting:
        raise FasteagleError(f"{flag} needs a row that drafts with a head: add eagle to --rows")
    for precision in options.precisions:
        quantized_on_cpu = dummy.quantized_on_cpu(runtime.at(precision))
        for row in drafting:
            tree = row.planned_tree(options.draft, quantized_on_cpu)
            assert tree is not None, "eagle rows draft"
            check_tau(tau, row, tree)


def dummy_drafter(
    name: str, engine: Engine, checkpoint: Checkpoint, draft: DraftOptions
) -> Drafter:
    """Return a drafter with random weights in the shape of the draft head of model `name`.

    They are stored like the target's; values do not affect the speed, so min-max is enough.
    """
    head = _random_head(head_shape(name, engine.model.config), engine.dtype, engine.device)
    head.borrow(engine.model, engine.max_seq_len)
    scheme = checkpoint.scheme
    if scheme is not None:
        minmax = dataclasses.replace(scheme, method="minmax")
        quantize_head_(head, minmax, has_native(engine.model))
    quantized_on_cpu = scheme is not None and engine.on_cpu
    return tree_drafter(head, draft, quantized_on_cpu)


def _random_head(config: HeadConfig, dtype: torch.dtype, device: torch.device) -> EagleHead:
    """Return a draft head of random weights on `device`, from a fixed seed."""
    with torch.device("meta"):
        head = make_head(config)
    head.to(dtype).to_empty(device=device).requires_grad_(False)
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in head.named_parameters():
        if parameter.ndim == 2:
            parameter.normal_(std=0.02, generator=generator)
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    head.d2t.zero_()  # the first ids of the vocabulary
    return head.eval()
