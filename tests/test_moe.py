"""Mixture of experts: the layer and its config."""

from __future__ import annotations

import json

import pytest
import torch

from fasteagle.config import MoEConfig, draft_block
from fasteagle.config_hf import ERNIE_MOE, from_hf
from fasteagle.errors import FasteagleError
from fasteagle.model import MoE
from helpers import tiny_config


def random_moe(config: MoEConfig, dim: int = 16) -> MoE:
    torch.manual_seed(0)
    moe = MoE(dim, config).requires_grad_(False)
    for parameter in moe.parameters():
        parameter.normal_(0, 0.5)
    return moe


def by_definition(moe: MoE, x: torch.Tensor) -> torch.Tensor:
    """All experts of one row at a time, each from its own slice."""
    config, dim = moe.config, x.shape[1]
    gate_up = moe.gate_up.weight.view(config.n_expert, 2, config.ffn_dim, dim)
    down = moe.down.weight.view(config.n_expert, dim, config.ffn_dim)
    rows = []
    for row in x:
        logits = moe.router.weight @ row
        biased = logits.softmax(0) + moe.choice_bias if config.choice_bias else logits
        ids = biased.topk(config.top_k).indices
        weights = logits.softmax(0)[ids]
        weights = weights / weights.sum() if config.renormalize else weights
        y = torch.zeros(dim)
        for weight, e in zip(weights, ids, strict=True):
            hidden = torch.nn.functional.silu(gate_up[e, 0] @ row) * (gate_up[e, 1] @ row)
            y += config.scale * weight * (down[e] @ hidden)
        if moe.shared is not None:
            shared = moe.shared(row)
            y += shared * (moe.shared_gate.weight @ row).sigmoid() if moe.shared_gate else shared
        rows.append(y)
    return torch.stack(rows)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"renormalize": True, "scale": 2.5},
        {"shared_ffn_dim": 20},
        {"shared_ffn_dim": 20, "shared_gate": True},
        {"renormalize": True, "choice_bias": True},
        {"choice_bias": True},
    ],
)
def test_layer_is_the_weighted_sum_of_the_chosen_experts(options):
    moe = random_moe(MoEConfig(n_expert=6, top_k=2, ffn_dim=12, **options))
    x = torch.randn(9, 16)
    assert torch.allclose(moe(x), by_definition(moe, x), atol=1e-4)


def test_lower_id_wins_on_equal_logits():
    moe = random_moe(MoEConfig(n_expert=64, top_k=8, ffn_dim=4, renormalize=True))
    moe.router.weight.zero_()
    ids, weights = moe.route(torch.randn(5, 16))
    assert ids.tolist() == [list(range(8))] * 5
    assert weights.unique().tolist() == [0.125]


def test_a_16_bit_model_chooses_experts_in_fp32():
    """Logits of 64 and 64.1, which are equal in bf16: the lower id would win."""
    moe = random_moe(MoEConfig(n_expert=2, top_k=1, ffn_dim=4), dim=1).bfloat16()
    moe.router.weight.data = torch.tensor([[64.0], [64.1]])
    ids, weights = moe.route(torch.ones(1, 1, dtype=torch.bfloat16))
    assert ids.tolist() == [[1]] and weights.dtype == torch.float32


MIXTRAL = dict(architectures=["MixtralForCausalLM"], hidden_size=64, num_attention_heads=4)
MIXTRAL |= dict(num_hidden_layers=3, intermediate_size=96, vocab_size=100)
MIXTRAL |= dict(num_local_experts=8, num_experts_per_tok=2)
QWEN = MIXTRAL | dict(architectures=["Qwen3MoeForCausalLM"], moe_intermediate_size=32)
QWEN |= dict(num_local_experts=None, num_experts=8)
ERNIE = QWEN | {"architectures": [ERNIE_MOE], "moe_num_experts": 8, "moe_k": 2}


def test_blocks_without_experts_are_those_the_config_names():
    read = from_hf(QWEN | {"decoder_sparse_step": 2, "mlp_only_layers": [1]}, "c")
    assert read.dense_blocks == (0, 1, 2)
    read = from_hf(QWEN | {"mlp_only_layers": [2]}, "c")
    assert [read.has_experts(i) for i in range(3)] == [True, True, False]
    ernie = ERNIE | {"num_hidden_layers": 6}
    ends = {"moe_layer_start_index": 2, "moe_layer_end_index": 4}
    assert from_hf(ernie, "c").dense_blocks == (0,), "up to the last block"
    assert from_hf(ernie | ends, "c").dense_blocks == (0, 1, 5)
    assert from_hf(ernie | ends | {"moe_layer_interval": 2}, "c").dense_blocks == (0, 1, 2, 4, 5)


def test_a_granite_model_may_have_no_shared_expert():
    granite = MIXTRAL | {"architectures": ["GraniteMoeSharedForCausalLM"]}
    assert from_hf(granite, "c").moe.shared_ffn_dim == 0
    assert from_hf(granite | {"shared_intermediate_size": 48}, "c").moe.shared_ffn_dim == 48


@pytest.mark.parametrize("dtype", ["torch.bfloat16", "float8_e4m3fn"])
def test_dtypes_that_files_name(dtype):
    assert from_hf(MIXTRAL | {"torch_dtype": dtype}, "c") == from_hf(MIXTRAL, "c")


@pytest.mark.parametrize(
    ("raw", "match"),
    [
        (MIXTRAL | {"num_experts_per_tok": 9}, "num_experts_per_tok is 9: .* from 1 to 8"),
        (MIXTRAL | {"num_local_experts": 0}, "num_local_experts is 0"),
        (MIXTRAL | {"num_local_experts": 10**9}, "num_local_experts is 1000000000"),
        (
            MIXTRAL | {"num_local_experts": 1024, "num_hidden_layers": 1000},
            "num_local_experts is 1024: must be an integer from 1 to 131",
        ),
        (QWEN | {"moe_intermediate_size": -1}, "moe_intermediate_size is -1"),
        (QWEN | {"norm_topk_prob": "yes"}, 'norm_topk_prob is "yes"'),
        (QWEN | {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        (QWEN | {"mlp_only_layers": [3]}, "mlp_only_layers is .3.: .* from 0 to 2"),
        (MIXTRAL | {"architectures": ["OlmoeForCausalLM"], "clip_qkv": 8.0}, "clip_qkv is 8.0"),
        (ERNIE | {"moe_norm_min": 0.5}, "moe_norm_min is 0.5"),
        (
            ERNIE | {"moe_num_shared_experts": 1024, "moe_intermediate_size": 2048},
            "moe_num_shared_experts is 1024: must be 512 at most",
        ),
        ({"architectures": ["GptOssForCausalLM"]}, "'GptOssForCausalLM' is not supported .att"),
        ({"architectures": ["Qwen3NextForCausalLM"]}, "'Qwen3NextForCausalLM' .* .linear atten"),
    ],
)
def test_config_is_checked(raw, match):
    with pytest.raises(FasteagleError, match=match):
        from_hf(json.loads(json.dumps(raw)), "c.json")


def test_counts_of_weights():
    moe = MoEConfig(n_expert=8, top_k=2, ffn_dim=16, shared_ffn_dim=24, shared_gate=True)
    config = tiny_config(n_layer=3, moe=moe, dense_blocks=(1,))
    attention = 3 * (32 * 64 + 32 * 32)
    dense = 3 * 32 * 48
    assert config.linear_params == attention + dense + 2 * 3 * 32 * (8 * 16 + 24)
    assert config.active_linear_params == attention + dense + 2 * 3 * 32 * (2 * 16 + 24)
    assert config.router_params == 2 * 9 * 32


@pytest.mark.parametrize(
    ("raw", "width"), [(MIXTRAL, 96), (QWEN, 96), (MIXTRAL | {"intermediate_size": 32}, 64)]
)
def test_draft_heads_are_dense(raw, width):
    block = draft_block(from_hf(raw, "c"))
    assert block.moe is None
    assert block.ffn_dim == width
    assert not block.has_experts(0)
