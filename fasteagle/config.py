"""Architecture of a Llama-family model: one frozen dataclass, from HF or GGUF metadata.

Knows nothing about weights or torch, so that `fasteagle models` can do its arithmetic at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from fasteagle.config_fields import MOST_EXPERTS, MOST_LAYERS, MOST_WIDTH, Fields
from fasteagle.errors import FasteagleError

SCORES = ("softmax", "topk_softmax")  # of experts: over all, over the chosen ones
ANY_LENGTH = 2**31  # text length without a limit, where that of the files does not apply

SUPPORTED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "MixtralForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
    "OlmoeForCausalLM",
    "GraniteMoeForCausalLM",
    "GraniteMoeSharedForCausalLM",
)


@dataclasses.dataclass(frozen=True)
class Llama3RopeScaling:
    """Frequency-dependent stretch of the rotary base, as Llama-3.1 defines it."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_seq_len: int


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """Experts of a block, and how its router weights those it chooses for a row.

    A row takes the `top_k` experts of the highest router logits; on equal ones the lower id.
    """

    n_expert: int
    top_k: int
    ffn_dim: int  # hidden width of one expert
    score: str = "softmax"  # one of SCORES
    renormalize: bool = False  # weights of the chosen experts sum to 1
    scale: float = 1.0  # factor of the weights
    shared_ffn_dim: int = 0  # hidden width of the expert that every row takes; 0: none
    shared_gate: bool = False  # it is weighted by the sigmoid of a gate

    def __post_init__(self) -> None:
        assert 1 <= self.top_k <= self.n_expert, f"{self.top_k} experts: their reader checks it"
        assert self.score in SCORES, self.score

    def distinct_experts(self, rows: int) -> float:
        """Return how many experts `rows` rows take together, were each row's chosen at random."""
        return self.n_expert * (1 - (1 - self.top_k / self.n_expert) ** rows)

    @property
    def active_ffn_dim(self) -> int:
        """Hidden width of all experts that a row takes."""
        return self.top_k * self.ffn_dim + self.shared_ffn_dim


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of one target model."""

    dim: int
    n_layer: int
    n_head: int
    n_kv_head: int
    head_dim: int
    ffn_dim: int  # of blocks without experts, and of a draft head's block
    vocab_size: int
    max_seq_len: int  # the context the model was trained for
    norm_eps: float = 1e-5
    rope_base: float = 10000.0
    rope_scaling: Llama3RopeScaling | None = None
    rope_linear_factor: float = 1.0
    rope_freq_factors: tuple[float, ...] | None = (
        None  # per-frequency divisors, as GGUF stores them
    )
    tie_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    qk_norm_whole: bool = False  # one norm over all query heads and one over all KV heads
    moe: MoEConfig | None = None
    dense_blocks: tuple[int, ...] = ()  # blocks without experts, where others have them
    sliding_window: int | None = None  # number of keys that a row sees; None: all
    architecture: str = "LlamaForCausalLM"

    def __post_init__(self) -> None:
        for name in ("dim", "n_layer", "n_head", "n_kv_head", "head_dim", "ffn_dim", "vocab_size"):
            assert getattr(self, name) >= 1, f"{name} {getattr(self, name)}: its reader checks it"
        assert self.n_head % self.n_kv_head == 0, "query heads share KV heads evenly"
        assert self.head_dim % 2 == 0, "RoPE turns pairs"

    @property
    def qkv_dim(self) -> int:
        return (self.n_head + 2 * self.n_kv_head) * self.head_dim

    @property
    def linear_params(self) -> int:
        """Number of weights of all block linears, without embedding and LM head."""
        attention = self.dim * self.qkv_dim + self.n_head * self.head_dim * self.dim
        return self.n_layer * attention + 3 * self.dim * self._ffn_width(active=False)

    @property
    def active_linear_params(self) -> int:
        """Number of weights of the block linears that one row reads: its experts' only."""
        unused = self._ffn_width(active=False) - self._ffn_width(active=True)
        return self.linear_params - 3 * self.dim * unused

    def _ffn_width(self, active: bool) -> int:
        """Return the hidden width of all blocks together, of all experts or of a row's."""
        if self.moe is None:
            return self.n_layer * self.ffn_dim
        moe, n_dense = self.moe, len(self.dense_blocks)
        every = moe.n_expert * moe.ffn_dim + moe.shared_ffn_dim
        sparse = moe.active_ffn_dim if active else every
        return n_dense * self.ffn_dim + (self.n_layer - n_dense) * sparse

    @property
    def widest_ffn(self) -> int:
        """Hidden width of the widest MLP or expert."""
        if self.moe is None:
            return self.ffn_dim
        widths = self.moe.ffn_dim, self.moe.shared_ffn_dim
        return max(*widths, self.ffn_dim if self.dense_blocks else 0)

    @property
    def vocab_params(self) -> int:
        """Number of weights of the embedding, and of the LM head where it is not tied."""
        return self.vocab_size * self.dim * (1 if self.tie_embeddings else 2)

    @property
    def params(self) -> int:
        norms = self.n_layer * 2 * self.dim + self.dim
        norms += self.n_layer * 2 * self.head_dim if self.qk_norm else 0
        norms += self.n_layer * (self.n_head + self.n_kv_head) * self.head_dim * self.qk_norm_whole
        norms += self.n_layer * self.qkv_dim if self.qkv_bias else 0
        return self.linear_params + self.vocab_params + norms + self.router_params

    @property
    def router_params(self) -> int:
        """Number of weights of all routers and of the gates of shared experts."""
        if self.moe is None:
            return 0
        rows = self.moe.n_expert + self.moe.shared_gate
        return (self.n_layer - len(self.dense_blocks)) * rows * self.dim

    def has_experts(self, block: int) -> bool:
        """Return whether block number `block` has experts instead of one MLP."""
        return self.moe is not None and block not in self.dense_blocks

    def kv_bytes(self, seq_len: int, element_bytes: int = 2) -> int:
        """Return the size in bytes of a KV cache of `seq_len` positions."""
        return 2 * self.n_layer * self.n_kv_head * self.head_dim * seq_len * element_bytes


@dataclasses.dataclass(frozen=True)
class Multipliers:
    """Constants of a Granite model; loading multiplies the weights by them, see `multipliers`."""

    embedding: float
    attention: float  # of the scores, in place of 1 / sqrt(head_dim)
    residual: float
    logits: float  # logits are divided by it


def draft_block(config: ModelConfig) -> ModelConfig:
    """Return the config of a draft head's block: the model's widths, no option of its family.

    It is dense whatever the model is.
    """
    return dataclasses.replace(
        config,
        n_layer=1,
        qkv_bias=False,
        qk_norm=False,
        qk_norm_whole=False,
        moe=None,
        dense_blocks=(),
        tie_embeddings=False,
        rope_scaling=None,
        rope_freq_factors=None,
        rope_linear_factor=1.0,
        sliding_window=None,
    )


@dataclasses.dataclass(frozen=True)
class Eagle3Config:
    """Settings of an EAGLE-3 draft head besides its block; the defaults are the paper's."""

    aux_layers: tuple[int, ...]  # target blocks whose input the draft head reads, ascending
    target_dim: int
    own_embedding: bool = False
    own_lm_head: bool = True
    norm_before_residual: bool = False  # the residual stream begins with the normed feature
    aux_norm: str = "none"  # before fc: "none", "all" as one vector, "each" by itself
    norm_output: bool = False  # the next feature is the one after the final norm


def default_aux_layers(n_layer: int) -> tuple[int, ...]:
    """Return the numbers of the blocks whose input the public EAGLE-3 code reads."""
    return 2, n_layer // 2, n_layer - 3


def checked_aux_layers(aux_layers: tuple[int, ...], n_layer: int) -> tuple[int, ...]:
    """Return `aux_layers`; raise `FasteagleError` unless they ascend among the model's blocks."""
    if list(aux_layers) != sorted(set(aux_layers)) or aux_layers[0] < 0 or aux_layers[-1] > n_layer:
        listed = ", ".join(str(layer) for layer in aux_layers)
        raise FasteagleError(
            f"auxiliary layers {listed} must ascend within 0 .. {n_layer}, the model's blocks: "
            "give --tap-layers"
        )
    return aux_layers


@dataclasses.dataclass(frozen=True)
class HeadConfig:
    """Shape of a draft head.

    `block` describes its one decoder block and vocabulary. `block.vocab_size` is the target's;
    `draft_vocab_size` is how many of its tokens can be drafted. Without `eagle3` it is an EAGLE-1/2
    head.
    """

    block: ModelConfig
    draft_vocab_size: int
    fc_bias: bool = True
    eagle3: Eagle3Config | None = None

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Target blocks whose input the draft head reads; none for EAGLE-1/2."""
        return () if self.eagle3 is None else self.eagle3.aux_layers

    @property
    def feature_dim(self) -> int:
        """Width of the target's features that the draft head reads for each token."""
        if self.eagle3 is None:
            return self.block.dim
        return len(self.aux_layers) * self.eagle3.target_dim

    @property
    def linear_params(self) -> int:
        """Number of weights of the linears, without embedding and LM head."""
        if self.eagle3 is None:
            return self.block.linear_params + 2 * self.block.dim**2
        entry = self.block.dim * self.block.qkv_dim  # the input of QKV has twice the width
        return self.block.linear_params + entry + self.feature_dim * self.block.dim

    @property
    def lm_head_params(self) -> int:
        """Number of weights of the draft head's own LM head; 0 where it uses the target's."""
        is_own = self.eagle3 is not None and self.eagle3.own_lm_head
        is_trimmed = self.draft_vocab_size < self.block.vocab_size
        return self.draft_vocab_size * self.block.dim if is_own or is_trimmed else 0


def head_from_hf(raw: Mapping[str, Any], source: str) -> HeadConfig:
    """Read the decoder layer of a draft head from its `config.json`.

    RoPE base is the head's own or 10000, never the target's; its context length and layer count
    are ignored (design of the public heads). Raises `FasteagleError`, as `Fields` words it.
    """
    fields = Fields(raw, source)
    rope, common = _common(fields, source, "vocab_size")
    block = ModelConfig(
        **common,
        n_layer=1,
        max_seq_len=ANY_LENGTH,
        rope_base=fields.number("rope_theta", rope.number("rope_theta", 10000.0)),
        qkv_bias=fields.flag("qkv_bias"),
    )
    size = block.vocab_size
    return HeadConfig(
        block,
        draft_vocab_size=fields.integer("draft_vocab_size", size, most=size),
        fc_bias=fields.flag("bias", True),
    )


def _common(fields: Fields, source: str, *required: str) -> tuple[Fields, dict[str, Any]]:
    """Return the RoPE part of a Hugging Face config, and what models and draft heads share.

    transformers 5 writes `rope_parameters`, older files `rope_scaling` and `rope_theta`.
    """
    fields.require("hidden_size", "num_attention_heads", "intermediate_size", *required)
    _refuse_unsupported(fields)
    has_parameters = not fields.part("rope_parameters").empty
    rope = fields.part("rope_parameters" if has_parameters else "rope_scaling")
    scaling, linear = _rope_scaling(rope, source)
    return rope, {
        **read_shape(fields, _HF_KEYS),
        "vocab_size": fields.width("vocab_size"),
        "norm_eps": fields.number("rms_norm_eps", 1e-6, most=1),
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
    rope, common = _common(fields, source, "num_hidden_layers", "vocab_size")
    n_layer = fields.integer("num_hidden_layers", most=MOST_LAYERS)
    if architecture in _EXPERT_WIDTHS:
        common |= _hf_experts(fields, architecture, n_layer)
    windowed = architecture in ("MistralForCausalLM", "MixtralForCausalLM")
    has_bias = architecture == "Qwen2MoeForCausalLM" and fields.flag("qkv_bias", True)
    return ModelConfig(
        **common,
        n_layer=n_layer,
        max_seq_len=fields.integer("max_position_embeddings", 2048),
        rope_base=rope.number("rope_theta", fields.number("rope_theta", 10000.0)),
        tie_embeddings=fields.flag("tie_word_embeddings"),
        qkv_bias=architecture == "Qwen2ForCausalLM" or has_bias,
        qk_norm=architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
        qk_norm_whole=architecture == "OlmoeForCausalLM",
        sliding_window=fields.integer("sliding_window")
        if windowed and "sliding_window" in fields
        else None,
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
    "Ernie4_5_MoeForCausalLM": "a bias of the router",
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
}


def _hf_experts(fields: Fields, architecture: str, n_layer: int) -> dict[str, Any]:
    """Return the fields of a mixture of experts; its files may count experts by either key."""
    count = "num_local_experts" if "num_local_experts" in fields else "num_experts"
    width = _EXPERT_WIDTHS[architecture]
    fields.require(count, "num_experts_per_tok", width)
    n_expert = fields.integer(count, most=MOST_EXPERTS)
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
        score="topk_softmax" if is_granite else "softmax",
        renormalize=is_mixtral or fields.flag("norm_topk_prob"),
        shared_ffn_dim=shared,
        shared_gate=gate,
    )
    step = fields.integer("decoder_sparse_step", 1, most=n_layer)
    dense = fields.integers("mlp_only_layers", most=n_layer - 1)
    blocks = tuple(i for i in range(n_layer) if i in dense or (i + 1) % step)
    if width == "intermediate_size":
        return {"moe": moe, "ffn_dim": dense_width(moe, fields.width("hidden_size"))}
    return {"moe": moe, "dense_blocks": blocks}


def dense_width(moe: MoEConfig, dim: int) -> int:
    """Return the FFN width for a draft head's block where the files tell none.

    An expert as wide as an MLP has that width, as in Mixtral's published heads; of narrower ones it
    is the width that a row takes.
    """
    return moe.ffn_dim if moe.ffn_dim >= dim else moe.top_k * moe.ffn_dim


_HF_KEYS = {
    "dim": "hidden_size",
    "n_head": "num_attention_heads",
    "n_kv_head": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn_dim": "intermediate_size",
}


def read_shape(fields: Fields, keys: Mapping[str, str]) -> dict[str, Any]:
    """Return the widths of a model's blocks by our names; `keys` has the file's names.

    The number of KV heads may be absent (then that of query heads), and head_dim too. Raises
    `FasteagleError` where the widths do not fit each other.
    """
    shape: dict[str, Any] = {n: fields.width(keys[n]) for n in ("dim", "n_head", "ffn_dim")}
    n_head = shape["n_head"]
    shape["n_kv_head"] = fields.width(keys["n_kv_head"], n_head)
    if n_head % shape["n_kv_head"]:
        raise fields.error(keys["n_kv_head"], f"a divisor of {keys['n_head']} ({n_head:,})")
    shape["head_dim"] = fields.width(keys["head_dim"], max(1, shape["dim"] // n_head))
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
    for key in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if fields.flag(key):
            raise fields.error(key, "false, the other is not supported")
    if not fields.part("quantization_config").empty:
        raise fields.error("quantization_config", "absent: use the unquantized checkpoint")


def _rope_scaling(rope: Fields, source: str) -> tuple[Llama3RopeScaling | None, float]:
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "default":
        return None, 1.0
    if kind == "linear":
        return None, rope.number("factor")
    if kind != "llama3":
        raise FasteagleError(
            f"{source}: RoPE scaling {kind!r} is not supported; supported: default, linear, llama3"
        )
    return read_llama3_scaling(rope, "original_max_position_embeddings"), 1.0


def read_llama3_scaling(rope: Fields, original: str) -> Llama3RopeScaling:
    """Read Llama-3.1's RoPE scaling; `original` is the file's key of `original_max_seq_len`."""
    low = rope.number("low_freq_factor")
    if rope.number("high_freq_factor") <= low:
        raise rope.error("high_freq_factor", f"above low_freq_factor ({low:g})")
    return Llama3RopeScaling(
        factor=rope.number("factor"),
        low_freq_factor=low,
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_seq_len=rope.integer(original),
    )


_GGUF_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",  # with experts: Mixtral
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",  # a shared expert included
}
_GGUF_UNSUPPORTED = {  # why models that one may expect to run do not
    "deepseek2": "latent attention",
    "glm4moe": "groups of experts",
    "gpt-oss": "attention sinks, experts with biases",
    "granitehybrid": "state-space layers",
    "jamba": "state-space layers",
    "llama4": "blocks without RoPE",
    "qwen3next": "linear attention",
}
_GGUF_EXPERTS = {  # whether the weights of the chosen experts sum to 1, as llama.cpp has it
    "llama": True,
    "qwen2moe": False,
    "qwen3moe": True,
    "olmoe": False,
    "granitemoe": True,
}
_SOFTMAX = 1  # llama.cpp's number of a router's function


_GGUF_KEYS = {
    "dim": "embedding_length",
    "n_head": "attention.head_count",
    "n_kv_head": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "ffn_dim": "feed_forward_length",
}


def from_gguf(
    metadata: Mapping[str, Any],
    *,
    vocab_size: int,
    tied: bool,
    rope_freq_factors: tuple[float, ...] | None,
    source: str,
) -> ModelConfig:
    """Read GGUF metadata: plain Python values by key."""
    fields = Fields(metadata, source)
    kind = fields.text("general.architecture", "(none)")
    if kind not in _GGUF_ARCHITECTURES:
        reason = _GGUF_UNSUPPORTED.get(kind)
        raise FasteagleError(
            f"{source}: GGUF architecture {kind!r} is not supported"
            f"{f' ({reason})' if reason else ''}; supported: {', '.join(_GGUF_ARCHITECTURES)}"
        )

    scaling = fields.text(f"{kind}.rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise FasteagleError(f"{source}: GGUF RoPE scaling {scaling!r} is not supported")
    required = ("dim", "n_head", "ffn_dim")
    fields.require(
        *(f"{kind}.{_GGUF_KEYS[name]}" for name in required),
        f"{kind}.block_count",
        f"{kind}.context_length",
        f"{kind}.attention.layer_norm_rms_epsilon",
    )
    shape = read_shape(fields, {name: f"{kind}.{key}" for name, key in _GGUF_KEYS.items()})
    n_factors = shape["head_dim"] // 2
    if rope_freq_factors is not None and len(rope_freq_factors) != n_factors:
        raise FasteagleError(
            f"{source}: rope_freqs.weight has {len(rope_freq_factors):,} values, half of the head "
            f"is {n_factors:,}: fetch it again"
        )
    window = f"{kind}.attention.sliding_window"  # 0: none
    linear = scaling == "linear"
    architecture = _GGUF_ARCHITECTURES[kind]
    has_experts = fields.integer(f"{kind}.expert_count", 0, least=0) > 0
    if has_experts and kind not in _GGUF_EXPERTS:
        raise FasteagleError(f"{source}: GGUF architecture {kind!r} with experts is not supported")
    if has_experts or (kind in _GGUF_EXPERTS and kind != "llama"):
        shape |= _gguf_experts(fields, kind)
        architecture = "MixtralForCausalLM" if kind == "llama" else architecture
    return ModelConfig(
        **shape,
        n_layer=fields.integer(f"{kind}.block_count", most=MOST_LAYERS),
        vocab_size=vocab_size,
        max_seq_len=fields.integer(f"{kind}.context_length"),
        norm_eps=fields.number(f"{kind}.attention.layer_norm_rms_epsilon", most=1),
        rope_base=fields.number(f"{kind}.rope.freq_base", 10000.0),
        rope_linear_factor=fields.number(f"{kind}.rope.scaling.factor", 1.0) if linear else 1.0,
        rope_freq_factors=rope_freq_factors,
        tie_embeddings=tied,
        qkv_bias=kind in ("qwen2", "qwen2moe"),
        qk_norm=kind in ("qwen3", "qwen3moe"),
        qk_norm_whole=kind == "olmoe",
        sliding_window=fields.integer(window, 0, least=0) or None,
        architecture=architecture,
    )


def _gguf_experts(fields: Fields, kind: str) -> dict[str, Any]:
    """Return the fields of a mixture of experts; what files leave out is llama.cpp's constant."""
    count, used = f"{kind}.expert_count", f"{kind}.expert_used_count"
    fields.require(count, used)
    n_expert = fields.integer(count, most=MOST_EXPERTS)
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
        score="topk_softmax" if kind == "granitemoe" else "softmax",
        renormalize=fields.flag(f"{kind}.expert_weights_norm", _GGUF_EXPERTS[kind]),
        scale=fields.number(f"{kind}.expert_weights_scale", 1.0),
        shared_ffn_dim=fields.integer(shared, 0, least=0, most=MOST_WIDTH),
        shared_gate=kind == "qwen2moe",
    )
    if own in fields:
        return {"moe": moe}
    return {"moe": moe, "ffn_dim": dense_width(moe, fields.width(f"{kind}.embedding_length"))}


def multipliers_from_gguf(metadata: Mapping[str, Any], source: str) -> Multipliers | None:
    """Read the multipliers of a Granite model's GGUF metadata; None for other models."""
    fields = Fields(metadata, source)
    if fields.text("general.architecture", "") != "granitemoe":
        return None
    keys = ("embedding_scale", "attention.scale", "residual_scale", "logit_scale")
    embedding, attention, residual, logits = (f"granitemoe.{key}" for key in keys)
    fields.require(embedding, attention, residual, logits)
    return Multipliers(
        embedding=fields.number(embedding),
        attention=fields.number(attention),
        residual=fields.number(residual),
        logits=fields.number(logits),
    )
