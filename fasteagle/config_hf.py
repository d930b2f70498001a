"""Configs read from the `config.json` of Hugging Face folders, models and draft heads.

A field that is out of range, or that needs arithmetic we do not have, is one line of error.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from fasteagle.config import (
    ANY_LENGTH,
    HeadConfig,
    Llama3RopeScaling,
    ModelConfig,
    MoEConfig,
    Multipliers,
    dense_width,
)
from fasteagle.config_fields import MOST_EXPERTS, MOST_LAYERS, MOST_WIDTH, Fields, most_experts
from fasteagle.errors import FasteagleError

DTYPES = ("auto", "bfloat16", "float16", "float32", "float64")  # and those of 8 bits
MIMO = "MiMoForCausalLM"  # Qwen2 with a layer for multi-token prediction
ERNIES = ERNIE, ERNIE_MOE = "Ernie4_5ForCausalLM", "Ernie4_5_MoeForCausalLM"
SUPPORTED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    MIMO,
    "Qwen3ForCausalLM",
    "MixtralForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
    "OlmoeForCausalLM",
    "GraniteMoeForCausalLM",
    "GraniteMoeSharedForCausalLM",
    ERNIE,
    ERNIE_MOE,
)


def head_from_hf(raw: Mapping[str, Any], source: str) -> HeadConfig:
    """Read the decoder layer of a draft head from its `config.json`.

    RoPE base is the head's own or 10000, never the target's; its context length and layer count
    are ignored (design of the public heads). Raises `FasteagleError`, as `Fields` words it.
    """
    fields = Fields(raw, source)
    rope, common = _common(fields)
    block = ModelConfig(
        **common,
        n_layer=1,
        max_seq_len=ANY_LENGTH,
        rope_base=fields.number("rope_theta", rope.number("rope_theta", 10000.0)),
        qkv_bias=fields.flag("qkv_bias"),
        rope_freq_factors=read_freq_factors(fields, common["head_dim"]),
    )
    if "sliding_attention" in fields.texts("layer_types"):
        block = dataclasses.replace(block, sliding_window=fields.integer("sliding_window"))
    size = block.vocab_size
    return HeadConfig(
        block,
        draft_vocab_size=fields.integer("draft_vocab_size", size, most=size),
        fc_bias=fields.flag("bias", True),
    )


# Values of transformers' classes where a file leaves a key out and they are not those of all.
_ERNIE_DEFAULTS = {
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "MistralForCausalLM": {"sliding_window": 4096},
    "Qwen3ForCausalLM": {"head_dim": 128},
    "MixtralForCausalLM": {"rope_theta": 1e6, "rms_norm_eps": 1e-5},
    "OlmoeForCausalLM": {"rms_norm_eps": 1e-5},
    ERNIE: _ERNIE_DEFAULTS | {"head_dim": 128},
    ERNIE_MOE: _ERNIE_DEFAULTS,
}


def _common(fields: Fields, own: Mapping[str, Any] | None = None) -> tuple[Fields, dict[str, Any]]:
    """Return the RoPE part of a Hugging Face config, and what models and draft heads share.

    transformers 5 writes `rope_parameters`, older files `rope_scaling` and `rope_theta`; where both
    are there, it takes the older. `own` are defaults of the architecture.
    """
    own = own or {}
    _refuse_unsupported(fields)
    is_old = not fields.part("rope_scaling").empty
    rope = fields.part("rope_scaling" if is_old else "rope_parameters")
    scaling, linear = _rope_scaling(fields, rope)
    return rope, {
        **read_shape(fields, _HF_KEYS, own.get("head_dim")),
        "vocab_size": fields.width("vocab_size"),
        "norm_eps": fields.number("rms_norm_eps", own.get("rms_norm_eps", 1e-6), most=1),
        "rope_scaling": scaling,
        "rope_linear_factor": linear,
    }


def from_hf(raw: Mapping[str, Any], source: str) -> ModelConfig:
    """Read a Hugging Face `config.json`; raise `FasteagleError` for what we cannot run exactly."""
    fields = Fields(raw, source)
    architecture = (fields.texts("architectures") or ["(none)"])[0]
    if architecture not in SUPPORTED_ARCHITECTURES:
        reason = _UNSUPPORTED.get(architecture)
        raise FasteagleError(
            f"{source}: architecture {architecture!r} is not supported"
            f"{f' ({reason})' if reason else ''}; "
            f"supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    own = _DEFAULTS.get(architecture, {})
    rope, common = _common(fields, own)
    n_layer = fields.integer("num_hidden_layers", most=MOST_LAYERS)
    if architecture in _EXPERT_WIDTHS:
        common |= _hf_experts(fields, architecture, n_layer)
    window = None
    if architecture in ("MistralForCausalLM", "MixtralForCausalLM"):
        wide = raw.get("sliding_window", own.get("sliding_window"))  # null: none
        window = None if wide is None else fields.integer("sliding_window", wide)
    has_bias = architecture == "Qwen2MoeForCausalLM" and fields.flag("qkv_bias", True)
    return ModelConfig(
        **common,
        n_layer=n_layer,
        max_seq_len=fields.integer(
            "max_position_embeddings", own.get("max_position_embeddings", 2048)
        ),
        rope_base=rope.number(
            "rope_theta", fields.number("rope_theta", own.get("rope_theta", 10000.0))
        ),
        tie_embeddings=fields.flag("tie_word_embeddings", own.get("tie_word_embeddings", False)),
        qkv_bias=architecture in ("Qwen2ForCausalLM", MIMO) or has_bias,
        qk_norm=architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
        qk_norm_whole=architecture == "OlmoeForCausalLM",
        sliding_window=window,
        architecture=architecture,
    )


def multipliers_from_hf(raw: Mapping[str, Any], source: str) -> Multipliers | None:
    """Read the multipliers of a Granite model's `config.json`; None for other models."""
    fields = Fields(raw, source)
    if not (fields.texts("architectures") or [""])[0].startswith("Granite"):
        return None
    return Multipliers(
        embedding=fields.number("embedding_multiplier", 1.0),
        attention=fields.number("attention_multiplier", 1.0),
        residual=fields.number("residual_multiplier", 1.0),
        logits=fields.number("logits_scaling", 1.0),
    )


_UNSUPPORTED = {  # why models that one may expect to run do not
    "DeepseekV2ForCausalLM": "latent attention",
    "DeepseekV3ForCausalLM": "latent attention",
    "Glm4MoeForCausalLM": "groups of experts",
    "GptOssForCausalLM": "attention sinks, experts with biases",
    "GraniteMoeHybridForCausalLM": "state-space layers",
    "JambaForCausalLM": "state-space layers",
    "Llama4ForCausalLM": "blocks without RoPE",
    "PhimoeForCausalLM": "sparse mixing of experts",
    "Qwen3NextForCausalLM": "linear attention",
}

_EXPERT_WIDTHS = {  # key of the hidden width of one expert
    "MixtralForCausalLM": "intermediate_size",
    "Qwen2MoeForCausalLM": "moe_intermediate_size",
    "Qwen3MoeForCausalLM": "moe_intermediate_size",
    "OlmoeForCausalLM": "intermediate_size",
    "GraniteMoeForCausalLM": "intermediate_size",
    "GraniteMoeSharedForCausalLM": "intermediate_size",
    ERNIE_MOE: "moe_intermediate_size",
}


def _hf_experts(fields: Fields, architecture: str, n_layer: int) -> dict[str, Any]:
    """Return the fields of a mixture of experts; its files may count experts by either key."""
    if architecture == ERNIE_MOE:
        return _ernie_experts(fields, n_layer)
    count = "num_local_experts" if "num_local_experts" in fields else "num_experts"
    width = _EXPERT_WIDTHS[architecture]
    n_expert = fields.integer(count, most=most_experts(n_layer))
    is_granite = architecture.startswith("Granite")
    is_mixtral = architecture == "MixtralForCausalLM"
    shared, gate = 0, architecture == "Qwen2MoeForCausalLM"
    if gate:
        shared = fields.width("shared_expert_intermediate_size")
    elif architecture == "GraniteMoeSharedForCausalLM":
        shared = fields.integer("shared_intermediate_size", 0, least=0, most=MOST_WIDTH)
    if "clip_qkv" in fields:
        raise fields.error("clip_qkv", "absent, clipped attention is not supported")
    moe = MoEConfig(
        n_expert=n_expert,
        top_k=fields.integer("num_experts_per_tok", most=n_expert),
        ffn_dim=fields.width(width),
        renormalize=is_mixtral or is_granite or fields.flag("norm_topk_prob"),
        shared_ffn_dim=shared,
        shared_gate=gate,
    )
    step = fields.integer("decoder_sparse_step", 1, most=n_layer)
    dense = fields.integers("mlp_only_layers", most=n_layer - 1)
    blocks = tuple(i for i in range(n_layer) if i in dense or (i + 1) % step)
    if width == "intermediate_size":
        return {"moe": moe, "ffn_dim": dense_width(moe, fields.width("hidden_size"))}
    return {"moe": moe, "dense_blocks": blocks}


def _ernie_experts(fields: Fields, n_layer: int) -> dict[str, Any]:
    """Return the fields of Ernie-4.5's experts, which some of its blocks have."""
    n_expert = fields.integer("moe_num_experts", most=most_experts(n_layer))
    width = "moe_intermediate_size"
    fields.number("moe_norm_min", 1e-12, most=1e-6)  # least sum of weights, which none has
    n_shared = fields.integer("moe_num_shared_experts", 2, least=0, most=MOST_EXPERTS)
    ffn_dim = fields.width(width)
    if n_shared * ffn_dim > MOST_WIDTH:
        raise fields.error("moe_num_shared_experts", f"{MOST_WIDTH // ffn_dim:,} at most")
    moe = MoEConfig(
        n_expert=n_expert,
        top_k=fields.integer("moe_k", most=n_expert),
        ffn_dim=ffn_dim,
        renormalize=True,
        shared_ffn_dim=n_shared * ffn_dim,
        choice_bias=fields.flag("moe_use_aux_free", True),
    )
    first = fields.integer("moe_layer_start_index", 1, least=0, most=MOST_LAYERS)
    last = fields.integer("moe_layer_end_index", -1, least=-1, most=MOST_LAYERS)
    last = n_layer - 1 if last == -1 else last
    step = fields.integer("moe_layer_interval", 1, most=MOST_LAYERS)
    dense = tuple(i for i in range(n_layer) if (i + 1) % step or not first <= i <= last)
    return {"moe": moe, "dense_blocks": dense}


_HF_KEYS = {
    "dim": "hidden_size",
    "n_head": "num_attention_heads",
    "n_kv_head": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn_dim": "intermediate_size",
}


def read_freq_factors(fields: Fields, head_dim: int) -> tuple[float, ...] | None:
    """Return the divisors of RoPE's frequencies, None where there are none."""
    factors = fields.numbers("rope_freq_factors")
    if factors and len(factors) != head_dim // 2:
        raise fields.error("rope_freq_factors", f"{head_dim // 2:,} numbers, half of head_dim")
    return factors or None


def read_shape(
    fields: Fields, keys: Mapping[str, str], head_dim: int | None = None
) -> dict[str, Any]:
    """Return the widths of a model's blocks by our names; `keys` has the file's names.

    The number of KV heads may be absent (then that of query heads), and head_dim too (then
    `head_dim`, or by the others). Raises `FasteagleError` where the widths do not fit each other.
    """
    shape: dict[str, Any] = {n: fields.width(keys[n]) for n in ("dim", "n_head", "ffn_dim")}
    n_head = shape["n_head"]
    shape["n_kv_head"] = fields.width(keys["n_kv_head"], n_head)
    if n_head % shape["n_kv_head"]:
        raise fields.error(keys["n_kv_head"], f"a divisor of {keys['n_head']} ({n_head:,})")
    shape["head_dim"] = fields.width(keys["head_dim"], head_dim or max(1, shape["dim"] // n_head))
    if shape["head_dim"] % 2:  # RoPE turns pairs
        if keys["head_dim"] in fields:
            raise fields.error(keys["head_dim"], "even")
        even = f"{keys['n_head']} ({n_head:,}) times an even number, or {keys['head_dim']} given"
        raise fields.error(keys["dim"], even)
    return shape


def _refuse_unsupported(fields: Fields) -> None:
    """Raise `FasteagleError` for a field whose value needs arithmetic that we do not implement."""
    if fields.text("hidden_act", "silu") != "silu":
        raise fields.error("hidden_act", '"silu", others are not supported')
    for key in ("dtype", "torch_dtype"):  # transformers looks it up where it reads the tokenizer
        name = fields.text(key, "auto").removeprefix("torch.")
        if name not in DTYPES and not name.startswith("float8_"):
            raise fields.error(key, " or ".join(json.dumps(known) for known in DTYPES))
    is_mimo = MIMO in fields.texts("architectures")  # it states the biases that Qwen2 has
    for key in ("attention_bias", "mlp_bias", "use_bias", "use_sliding_window"):
        if fields.flag(key) and not (is_mimo and key == "attention_bias"):
            raise fields.error(key, "false, the other is not supported")
    if not fields.part("quantization_config").empty:
        raise fields.error("quantization_config", "absent: use the unquantized checkpoint")


def _rope_scaling(fields: Fields, rope: Fields) -> tuple[Llama3RopeScaling | None, float]:
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "default":
        return None, 1.0
    if kind == "linear":
        return None, rope.number("factor")
    if kind != "llama3":
        raise FasteagleError(
            f"{fields.source}: RoPE scaling {kind!r} is not supported; supported: default, linear, "
            "llama3"
        )
    original = "original_max_position_embeddings"  # of two, transformers takes the outer one
    return read_llama3_scaling(rope, original, fields if original in fields else rope), 1.0


def read_llama3_scaling(rope: Fields, original: str, place: Fields) -> Llama3RopeScaling:
    """Read Llama-3.1's RoPE scaling; `place` has `original_max_seq_len` under `original`."""
    low = rope.number("low_freq_factor")
    if rope.number("high_freq_factor") <= low:
        raise rope.error("high_freq_factor", f"above low_freq_factor ({low:g})")
    return Llama3RopeScaling(
        factor=rope.number("factor"),
        low_freq_factor=low,
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_seq_len=place.integer(original),
    )
