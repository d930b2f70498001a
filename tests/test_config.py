"""Arithmetic of shapes: weights of a model and of its draft head, and the blocks made of them."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import nn

from families import filled_config
from fasteagle.config import (
    ANY_LENGTH,
    HeadConfig,
    ModelConfig,
    MoEConfig,
    dense_width,
    draft_block,
    mtp_layer,
)
from fasteagle.loading.entries import REGISTRY
from fasteagle.loading.heads.find import head_shape
from fasteagle.loading.names import expected_shapes
from fasteagle.model import make_head
from helpers import tiny_config

MOE = MoEConfig(n_expert=4, top_k=2, ffn_dim=16)


@pytest.mark.parametrize("name", REGISTRY)
def test_a_model_has_as_many_parameters_as_its_tensors_have_values(name):
    """To the last bias and norm."""
    config = REGISTRY[name].config
    assert config.params == sum(map(math.prod, expected_shapes(config).values()))


@pytest.mark.parametrize("norm", ["qk_norm", "qk_norm_whole"])  # a model has one of them
def test_every_option_counts_in_the_number_of_parameters(norm):
    config = dataclasses.replace(filled_config(), **{norm: False})
    assert config.params == sum(map(math.prod, expected_shapes(config).values()))


@pytest.mark.parametrize("name", ["llama2-7b", "llama3-8b", "qwen3-8b", "qwen3-30b-a3b"])
def test_a_draft_head_has_as_many_weights_as_its_linears(name):
    shape = head_shape(name, REGISTRY[name].config)
    with torch.device("meta"):
        head = make_head(shape)
    linears = [module for module in head.modules() if isinstance(module, nn.Linear)]
    n_weights = sum(linear.weight.numel() for linear in linears)
    assert n_weights == shape.linear_params + shape.lm_head_params


def test_a_head_for_fewer_tokens_has_their_rows_of_the_lm_head():
    block = draft_block(tiny_config())
    assert HeadConfig(block, block.vocab_size).lm_head_params == 0, "the target's"
    assert HeadConfig(block, 20).lm_head_params == 20 * block.dim


def test_the_block_of_a_draft_head_has_no_option_of_the_family():
    model = filled_config()
    kept = ("dim", "n_head", "n_kv_head", "head_dim", "ffn_dim", "vocab_size", "max_seq_len")
    kept += ("norm_eps", "rope_base", "architecture")
    expected = ModelConfig(n_layer=1, **{name: getattr(model, name) for name in kept})
    assert draft_block(model) == expected


def test_a_layer_for_multi_token_prediction_keeps_the_options_of_its_model():
    """But for the experts: it is one dense block, for texts of any length."""
    options = {"qkv_bias": True, "sliding_window": 7, "rope_linear_factor": 2.0}
    model = tiny_config(**options, moe=MOE, dense_blocks=(1,), tie_embeddings=True)
    head = mtp_layer(model)
    assert head.block == tiny_config(**options, n_layer=1, max_seq_len=ANY_LENGTH)
    assert (head.draft_vocab_size, head.fc_bias, head.mtp) == (model.vocab_size, False, True)


@pytest.mark.parametrize(
    ("ffn_dim", "width"), [(16, 32), (31, 62), (32, 32), (64, 64)]
)  # of a model 32 wide, two of whose experts a row takes
def test_the_width_of_a_dense_block_in_place_of_experts(ffn_dim, width):
    assert dense_width(dataclasses.replace(MOE, ffn_dim=ffn_dim), dim=32) == width


@pytest.mark.parametrize(
    ("moe", "dense_blocks", "widest"),
    [
        (None, (), 48),
        (MOE, (), 16),
        (MOE, (1,), 48),
        (dataclasses.replace(MOE, shared_ffn_dim=64), (1,), 64),
    ],
)
def test_the_widest_mlp_is_that_of_a_dense_block_an_expert_or_the_shared_one(
    moe, dense_blocks, widest
):
    assert tiny_config(moe=moe, dense_blocks=dense_blocks).widest_ffn == widest
