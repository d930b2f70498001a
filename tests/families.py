"""Families of models as tiny shapes, in the settings of transformers."""

from __future__ import annotations

import dataclasses

from fasteagle.config import Llama3RopeScaling, ModelConfig, MoEConfig
from fasteagle.config_hf import ERNIE

TINY_VOCAB = 260  # 256 bytes and the special tokens

TINY_SHAPE = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=3)
TINY_SHAPE |= dict(num_attention_heads=4, vocab_size=TINY_VOCAB, max_position_embeddings=512)
TINY_SHAPE["initializer_range"] = 0.3  # far from uniform logits: argmax is not a coin toss

MIXTRAL = dict(num_local_experts=8, num_experts_per_tok=2)
QWEN = dict(num_experts=8, num_experts_per_tok=3)
OLMOE = QWEN | dict(intermediate_size=32, eos_token_id=TINY_VOCAB - 1)
QWEN3_MOE = QWEN | dict(moe_intermediate_size=32, norm_topk_prob=True, head_dim=32)
QWEN2_MOE = QWEN | dict(moe_intermediate_size=32, shared_expert_intermediate_size=64)
GRANITE_MOE = dict(num_local_experts=8, num_experts_per_tok=3, intermediate_size=32)
GRANITE_MOE |= dict(embedding_multiplier=3.0, attention_multiplier=0.15, residual_multiplier=0.4)
GRANITE_MOE |= dict(logits_scaling=2.5, tie_word_embeddings=True)
ERNIE_MOE = dict(moe_num_experts=8, moe_k=3, moe_intermediate_size=32, moe_num_shared_experts=2)
ERNIE_MOE |= dict(moe_layer_start_index=1, tie_word_embeddings=True)


def hf_class(family: str):
    """(transformers config class, model class, settings beyond the tiny shape) of a family."""
    import transformers as t

    gqa = {"num_key_value_heads": 2}
    llama3_rope = dict(rope_type="llama3", rope_theta=5e5, original_max_position_embeddings=64)
    llama3_rope |= dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
    linear_rope = dict(rope_type="linear", factor=2.0, rope_theta=10000.0)
    vicuna = {"rms_norm_eps": 1e-6, "rope_parameters": linear_rope}
    families = {
        "llama2": (t.LlamaConfig, t.LlamaForCausalLM, {}),
        "llama3": (t.LlamaConfig, t.LlamaForCausalLM, gqa | {"rope_parameters": llama3_rope}),
        "vicuna": (t.LlamaConfig, t.LlamaForCausalLM, vicuna),
        "mistral": (t.MistralConfig, t.MistralForCausalLM, gqa | {"sliding_window": 7}),
        "qwen2": (t.Qwen2Config, t.Qwen2ForCausalLM, gqa),
        "qwen3": (t.Qwen3Config, t.Qwen3ForCausalLM, gqa | {"head_dim": 32}),
        "mixtral": (t.MixtralConfig, t.MixtralForCausalLM, gqa | MIXTRAL),
        "qwen2moe": (t.Qwen2MoeConfig, t.Qwen2MoeForCausalLM, gqa | QWEN2_MOE),
        "qwen3moe": (t.Qwen3MoeConfig, t.Qwen3MoeForCausalLM, gqa | QWEN3_MOE),
        "olmoe": (t.OlmoeConfig, t.OlmoeForCausalLM, gqa | OLMOE),
        "granitemoe": (t.GraniteMoeConfig, t.GraniteMoeForCausalLM, gqa | GRANITE_MOE),
        "granitemoeshared": (
            t.GraniteMoeSharedConfig,
            t.GraniteMoeSharedForCausalLM,
            gqa | GRANITE_MOE | {"shared_intermediate_size": 64, "tie_word_embeddings": False},
        ),
        "ernie": (
            t.Ernie4_5Config,
            t.Ernie4_5ForCausalLM,
            gqa | {"head_dim": 16, "tie_word_embeddings": True},
        ),
        "erniemoe": (t.Ernie4_5_MoeConfig, t.Ernie4_5_MoeForCausalLM, gqa | ERNIE_MOE),
        "smollm2": (t.LlamaConfig, t.LlamaForCausalLM, gqa | {"tie_word_embeddings": True}),
    }
    return families[family]


MOE_FAMILIES = ("mixtral", "qwen2moe", "qwen3moe", "olmoe", "granitemoe")
MOE_FAMILIES += ("granitemoeshared", "erniemoe")
FAMILIES = ("llama2", "llama3", "vicuna", "mistral", "qwen2", "qwen3", "ernie", "smollm2")
FAMILIES += MOE_FAMILIES


def filled(kind, **values):
    """An object of a config class without one default value, so that a new field fails here."""
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    assert [name for name in defaults if values.get(name, defaults[name]) == defaults[name]] == []
    return kind(**values)


def filled_config() -> ModelConfig:
    """A config with every option there is: of all families, so no model's."""
    flags = dict.fromkeys(("renormalize", "shared_gate", "choice_bias"), True)
    moe = filled(MoEConfig, n_expert=4, top_k=2, ffn_dim=16, scale=2.5, shared_ffn_dim=8, **flags)
    widths = dict(dim=32, n_layer=3, n_head=4, n_kv_head=2, head_dim=8, ffn_dim=48, vocab_size=64)
    rope = dict(rope_base=5e5, rope_linear_factor=2.0, rope_freq_factors=(1.0, 2.0, 3.0, 4.0))
    rope["rope_scaling"] = Llama3RopeScaling(8.0, 1.0, 4.0, 64)
    flags = dict.fromkeys(("tie_embeddings", "qkv_bias", "qk_norm", "qk_norm_whole"), True)
    rest = dict(max_seq_len=99, norm_eps=1e-6, sliding_window=7, architecture=ERNIE)
    return filled(ModelConfig, **widths, **rope, **flags, **rest, moe=moe, dense_blocks=(1,))
