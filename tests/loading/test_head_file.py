"""Draft head files: ours, the published layouts, and what does not fit."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.errors import FasteagleError
from fasteagle.loading.heads.read import load_head, load_official_state
from fasteagle.loading.heads.tables import official_state
from fasteagle.loading.heads.write import save_head
from fasteagle.tree import TreeShape
from helpers import (
    empty_state,
    official_files,
    pairs,
    propose,
    random_head,
    random_target,
    tiny_config,
)


def test_saved_head_loads_back_and_drafts_the_same(tmp_path):
    target = random_target(tiny_config())
    ids = torch.arange(0, 60, 2)
    head = random_head(target, ids)
    save_head(tmp_path, head, {"tau": 2.5}, torch.float32)
    loaded, header = load_head(tmp_path, target.config)
    assert header == {"tau": 2.5} and loaded.config.draft_vocab_size == 30
    loaded.borrow(target, 512)
    assert torch.equal(loaded.target_ids(), ids)
    trees = []
    for drafter in (EagleDrafter(h, TreeShape(), 256) for h in (head, loaded)):
        trees.append(propose(drafter, empty_state(target), pairs(range(5), torch.ones(5, 32)), 1))
    assert trees[0].tokens.equal(trees[1].tokens)


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_published_layouts_load(tmp_path, pickled, bias):
    target = random_target(tiny_config(rope_base=500000.0))
    head = random_head(target)
    official_files(tmp_path, head, pickled, bias)
    loaded, header = load_head(tmp_path, target.config)
    assert header is None
    assert loaded.config.block.rope_base == 10000.0  # never the target's
    assert loaded.config.block.n_layer == 1 and loaded.config.block.norm_eps == 1e-6
    assert (loaded.fc.bias is not None) == bias
    assert torch.equal(loaded.block.attention.qkv.weight, head.block.attention.qkv.weight)
    assert torch.equal(loaded.block.mlp.gate_up.weight, head.block.mlp.gate_up.weight)


def test_heads_that_do_not_fit(tmp_path):
    target = random_target(tiny_config())
    official_files(tmp_path, random_head(target), pickled=False, bias=True)
    with pytest.raises(
        FasteagleError, match=r"for a vocabulary of 60, the model has 61: .*no-spec"
    ):
        load_head(tmp_path, tiny_config(vocab_size=61))
    with pytest.raises(FasteagleError, match=r"for a width of 32, the model has 64"):
        load_head(tmp_path, tiny_config(dim=64))
    state = load_file(tmp_path / "model.safetensors")
    del state["fc.weight"]
    state["layers.0.input_layernorm.weight"] = torch.ones(32)
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(FasteagleError, match="missing fc.weight; unknown layers.0.input_layernorm"):
        load_head(tmp_path, target.config)
    (tmp_path / "model.safetensors").write_bytes(b"12")
    with pytest.raises(FasteagleError, match="damaged or truncated"):
        load_head(tmp_path, target.config)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FasteagleError, match=r"no model\.safetensors and no pytorch_model\.bin"):
        load_head(tmp_path, target.config)


def test_vocabulary_maps_that_are_not(tmp_path):
    target = random_target(tiny_config())
    head = random_head(target, torch.arange(0, 60, 2))
    head.d2t[3] = 99
    save_head(tmp_path, head, {}, torch.float32)
    with pytest.raises(FasteagleError, match="ascending ids"):
        load_head(tmp_path, target.config)


def test_loading_refuses_what_it_cannot_place():
    head = random_head(random_target(tiny_config()))
    state = official_state(head)
    with pytest.raises(FasteagleError, match=r"fc\.weight is \(3, 3\), expected \(32, 64\)"):
        load_official_state(head, {**state, "fc.weight": torch.ones(3, 3)}, "x")
