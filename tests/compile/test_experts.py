"""Number of experts that rows of a text take together."""

from __future__ import annotations

import pytest
import torch

from fasteagle.cli.tune import print_experts
from fasteagle.compile.experts import distinct_experts
from fasteagle.config import MoEConfig
from fasteagle.model import Target
from helpers import random_target, tiny_config

CONFIG = MoEConfig(n_expert=8, top_k=2, ffn_dim=16, renormalize=True)


def test_rows_that_choose_independently():
    assert CONFIG.distinct_experts(1) == pytest.approx(2)
    assert CONFIG.distinct_experts(2) == pytest.approx(3.5)
    assert CONFIG.distinct_experts(1000) == pytest.approx(8)


def test_experts_are_counted_by_the_cores_router(capsys):
    shape = dict(n_layer=3, moe=CONFIG, dense_blocks=(1,))
    target = random_target(tiny_config(**shape))
    text = torch.randint(60, (64,), generator=torch.Generator().manual_seed(0)).tolist()
    counts = distinct_experts(Target(target), text)
    assert list(counts) == [1, 2, 4, 8, 16, 32] and counts[1] == 2
    assert sorted(counts.values()) == list(counts.values()) and 4 < counts[16] <= 8
    few = distinct_experts(Target(target), text[:4])
    assert list(few) == [1, 2, 4]
    assert distinct_experts(Target(target), text[:5]) == few, "the last row is no window"
    windowed = random_target(tiny_config(**shape, sliding_window=2))
    assert distinct_experts(Target(windowed), text) != counts, "the same weights"
    for block in (target.blocks[0], target.blocks[2]):
        assert not block.mlp._forward_pre_hooks
        block.mlp.router.weight.zero_()
    assert set(distinct_experts(Target(target), text).values()) == {2.0}
    print_experts(CONFIG, counts)
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[:3] == ["2", f"{counts[2]:.1f}", "3.5"] for line in lines)
