"""Configs read from the metadata of GGUF files. What they leave out is llama.cpp's constant."""

from __future__ import annotations

from typing import Any

from fasteagle.config import ModelConfig, MoEConfig, Multipliers, dense_width
from fasteagle.config_fields import MOST_LAYERS, MOST_WIDTH, Fields, most_experts
from fasteagle.config_hf import read_shape
from fasteagle.errors import FasteagleError

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",  # with experts: Mixtral
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",  # a shared expert included
    "ernie4_5": "Ernie4_5ForCausalLM",
    "ernie4_5-moe": "Ernie4_5_MoeForCausalLM",
}
_UNSUPPORTED = {  # why models that one may expect to run do not
    "deepseek2": "latent attention",
    "glm4moe": "groups of experts",
    "gpt-oss": "attention sinks, experts with biases",
    "granitehybrid": "state-space layers",
    "jamba": "state-space layers",
    "llama4": "blocks without RoPE",
    "qwen3next": "linear attention",
}
_EXPERTS = {  # whether the weights of the chosen experts sum to 1, as llama.cpp has it
    "llama": True,
    "qwen2moe": False,
    "qwen3moe": True,
    "olmoe": False,
    "granitemoe": True,
    "ernie4_5-moe": True,
}
_SOFTMAX = 1  # llama.cpp's number of a router's function


_KEYS = {
    "dim": "embedding_length",
    "n_head": "attention.head_count",
    "n_kv_head": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "ffn_dim": "feed_forward_length",
}


def _linear_factor(fields: Fields, kind: str) -> float:
    """Return the factor of linear RoPE scaling, by its key or the former one; 0 stands for 1."""
    keys = f"{kind}.rope.scaling.factor", f"{kind}.rope.scale_linear"
    key = next((key for key in keys if key in fields), None)
    return 1.0 if key is None or fields.raw[key] == 0 else fields.number(key)


def read_layer(
    fields: Fields, kind: str, rope_freq_factors: tuple[float, ...] | None
) -> dict[str, Any]:
    """Return what models and draft heads of architecture `kind` share: widths, epsilon, RoPE."""
    scaling = fields.text(f"{kind}.rope.scaling.type", "linear")  # llama.cpp's default
    if scaling not in ("none", "linear"):
        raise FasteagleError(
            f"{fields.source}: GGUF RoPE scaling {scaling!r} is not supported: choose another file"
        )
    factor = f"{kind}.rope.scaling.attn_factor"
    if fields.number(factor, 1.0) != 1:
        raise fields.error(factor, "1, others are not supported")
    shape = read_shape(fields, {name: f"{kind}.{key}" for name, key in _KEYS.items()})
    rotated = f"{kind}.rope.dimension_count"
    if fields.width(rotated, shape["head_dim"]) != shape["head_dim"]:
        must = f"{shape['head_dim']:,}, RoPE on a part of a head is not supported"
        raise fields.error(rotated, must)
    n_factors = shape["head_dim"] // 2
    if rope_freq_factors is not None and len(rope_freq_factors) != n_factors:
        raise FasteagleError(
            f"{fields.source}: rope_freqs.weight has {len(rope_freq_factors):,} values, half of "
            f"the head is {n_factors:,}: fetch it again"
        )
    return {
        **shape,
        "norm_eps": fields.number(f"{kind}.attention.layer_norm_rms_epsilon", most=1),
        "rope_base": fields.number(f"{kind}.rope.freq_base", 10000.0),
        "rope_linear_factor": _linear_factor(fields, kind) if scaling == "linear" else 1.0,
        "rope_freq_factors": rope_freq_factors,
    }


def from_gguf(
    fields: Fields, *, vocab_size: int, tied: bool, rope_freq_factors: tuple[float, ...] | None
) -> ModelConfig:
    """Read GGUF metadata: plain Python values by key."""
    kind = fields.text("general.architecture", "(none)")
    if kind not in _ARCHITECTURES:
        reason = _UNSUPPORTED.get(kind)
        raise FasteagleError(
            f"{fields.source}: GGUF architecture {kind!r} is not supported"
            f"{f' ({reason})' if reason else ''}; supported: {', '.join(_ARCHITECTURES)}"
        )
    shape = read_layer(fields, kind, rope_freq_factors)
    window = f"{kind}.attention.sliding_window"  # 0: none
    n_blocks = fields.integer(f"{kind}.block_count", most=MOST_LAYERS)
    n_layer = n_blocks - mtp_layers(fields, most=n_blocks - 1)
    architecture = _ARCHITECTURES[kind]
    has_experts = fields.integer(f"{kind}.expert_count", 0, least=0) > 0
    if has_experts and kind not in _EXPERTS:
        raise FasteagleError(
            f"{fields.source}: GGUF architecture {kind!r} with experts is not supported: choose "
            "another model"
        )
    if has_experts or (kind in _EXPERTS and kind != "llama"):
        shape |= _experts(fields, kind, n_layer)
        architecture = "MixtralForCausalLM" if kind == "llama" else architecture
    return ModelConfig(
        **shape,
        n_layer=n_layer,
        vocab_size=vocab_size,
        max_seq_len=fields.integer(f"{kind}.context_length"),
        tie_embeddings=tied,
        qkv_bias=kind in ("qwen2", "qwen2moe"),
        qk_norm=kind in ("qwen3", "qwen3moe"),
        qk_norm_whole=kind == "olmoe",
        sliding_window=fields.integer(window, 0, least=0) or None,
        architecture=architecture,
    )


def mtp_layers(fields: Fields, most: int = MOST_LAYERS) -> int:
    """Return how many of a file's last blocks are layers for multi-token prediction."""
    kind = fields.text("general.architecture", "")
    return fields.integer(f"{kind}.nextn_predict_layers", 0, least=0, most=most)


def _experts(fields: Fields, kind: str, n_layer: int) -> dict[str, Any]:
    """Return the fields of a mixture of experts; what files leave out is llama.cpp's constant."""
    count, used = f"{kind}.expert_count", f"{kind}.expert_used_count"
    n_expert = fields.integer(count, most=most_experts(n_layer))
    function = f"{kind}.expert_gating_func"
    if fields.integer(function, _SOFTMAX, least=0) != _SOFTMAX:
        raise fields.error(function, f"{_SOFTMAX} (softmax), others are not supported")
    own = f"{kind}.expert_feed_forward_length"
    ffn_dim = fields.width(own if own in fields else f"{kind}.feed_forward_length")
    shared = f"{kind}.expert_shared_feed_forward_length"
    moe = MoEConfig(
        n_expert=n_expert,
        top_k=fields.integer(used, most=n_expert),
        ffn_dim=ffn_dim,
        renormalize=kind == "granitemoe"
        or fields.flag(f"{kind}.expert_weights_norm", _EXPERTS[kind]),
        scale=fields.number(f"{kind}.expert_weights_scale", 1.0),
        shared_ffn_dim=fields.integer(shared, 0, least=0, most=MOST_WIDTH),
        shared_gate=kind == "qwen2moe",
        choice_bias=kind == "ernie4_5-moe",
    )
    first = fields.integer(f"{kind}.leading_dense_block_count", 0, least=0, most=n_layer)
    step = fields.integer(f"{kind}.interleave_moe_layer_step", 1, most=n_layer)
    dense = tuple(i for i in range(n_layer) if i < first or (i + 1) % step)
    if own in fields:
        return {"moe": moe, "dense_blocks": dense}
    return {"moe": moe, "ffn_dim": dense_width(moe, fields.width(f"{kind}.embedding_length"))}


def multipliers_from_gguf(fields: Fields) -> Multipliers | None:
    """Read the multipliers of a Granite model's GGUF metadata; None for other models."""
    if fields.text("general.architecture", "") != "granitemoe":
        return None
    return Multipliers(
        embedding=fields.number("granitemoe.embedding_scale"),
        attention=fields.number("granitemoe.attention.scale"),
        residual=fields.number("granitemoe.residual_scale"),
        logits=fields.number("granitemoe.logit_scale"),
    )
