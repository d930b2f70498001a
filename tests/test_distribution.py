"""The distribution of drawn text, with speculation, against exact probabilities."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fasteagle.decoding.stats import Stats
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.drafting.static_tree import StaticTreeDrafter
from fasteagle.generate import Engine
from fasteagle.options import SamplingParams
from fasteagle.sampling import SamplingMode, process_logits
from fasteagle.shapes import TreeShape
from helpers import drawing, random_head, random_target, tiny_config

SHALLOW = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0))


OTHER_KINDS = ("no noise", "static", "multi-round", "chain m-r")


@pytest.mark.parametrize(
    "kind", ["shared noise", *(pytest.param(k, marks=pytest.mark.slow) for k in OTHER_KINDS)]
)
def test_distribution_two_tokens_deep(kind):
    """Chi-square of two emitted tokens against exact probabilities, with speculation.

    The prompt's own next token is fixed, so that both come out of draft cycles.
    """
    small = random_target(tiny_config(vocab_size=4), seed=4)
    small.lm_head.weight.mul_(0.3)
    head = random_head(small, seed=5)
    drafter = {
        "shared noise": lambda: EagleDrafter(head, TreeShape(2, 3, 6)),
        "no noise": lambda: EagleDrafter(head, TreeShape(2, 3, 6), noise="none"),
        "static": lambda: StaticTreeDrafter(head, SHALLOW),
        "multi-round": lambda: StaticTreeDrafter(head, SHALLOW, sampled=True),
        "chain m-r": lambda: StaticTreeDrafter(head, ((0,), (0, 0)), sampled=True),
    }[kind]()
    params = SamplingParams(1.0, top_p=0.97)
    prompt, n = [1, 2, 3], 800
    first = exact_probabilities(small, prompt, params)
    expected = (
        torch.stack(
            [p * exact_probabilities(small, [*prompt, t], params) for t, p in enumerate(first)]
        ).flatten()
        * n
    )
    engine = Engine(small, 512, drafter=drafter)
    counts = torch.zeros(16, dtype=torch.double)
    accepted = 0
    for seed in range(n):
        drawn = dataclasses.replace(params, seed=seed)
        a, b = two_drafted_tokens(engine, prompt, drawn)
        counts[a * 4 + b] += 1
        accepted += engine.stats.accepted
    assert n / 4 < accepted < 2 * n
    assert (counts[expected == 0] == 0).all()
    likely = expected > 0
    chi2 = ((counts - expected)[likely] ** 2 / expected[likely]).sum()
    assert chi2 < 37.7  # 99.9 % point of 15 degrees of freedom


@torch.no_grad()
def two_drafted_tokens(engine, prompt, params) -> list[int]:
    """The two tokens after `prompt`, its last token being the root of the first draft cycle."""
    engine.restart()
    engine.stats = Stats()
    feature, *_ = engine.prefill(prompt[:-1])
    engine.state.load(prompt, feature, params)
    drawn = []
    for new in engine._cycles(prompt[-1], SamplingMode.of(params, 4), 3):
        drawn += new
        if len(drawn) >= 2:
            return drawn[:2]


@torch.no_grad()
def exact_probabilities(model, prompt, params) -> torch.Tensor:
    features, *_ = Engine(model, 512).prefill(prompt)
    logits = model.lm_head(features).float()
    return process_logits(logits, *drawing(params, 4)).softmax(-1)[0].double()
