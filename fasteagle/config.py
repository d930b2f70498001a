"""Architecture of a Llama-family model: one frozen dataclass, from HF or GGUF metadata.

Knows nothing about weights or torch, so that `fasteagle models` can do its arithmetic at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from fasteagle.errors import FasteagleError

SUPPORTED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)


@dataclasses.dataclass(frozen=True)
class Llama3RopeScaling:
    """Frequency-dependent stretch of the rotary base, as Llama-3.1 defines it."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_seq_len: int


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of one target model."""

    dim: int
    n_layer: int
    n_head: int
    n_kv_head: int
    head_dim: int
    ffn_dim: int
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
    sliding_window: int | None = None  # keys further back than this are not seen
    architecture: str = "LlamaForCausalLM"

    def __post_init__(self) -> None:
        for name in ("dim", "n_layer", "n_head", "n_kv_head", "head_dim", "ffn_dim", "vocab_size"):
            if getattr(self, name) < 1:
                raise FasteagleError(f"model config: {name} is {getattr(self, name)}, must be >= 1")
        if self.n_head % self.n_kv_head:
            raise FasteagleError(
                f"model config: {self.n_head} heads do not divide into {self.n_kv_head} KV heads"
            )
        if self.head_dim % 2:
            raise FasteagleError(f"model config: head_dim {self.head_dim} is odd, RoPE needs pairs")

    @property
    def qkv_dim(self) -> int:
        return (self.n_head + 2 * self.n_kv_head) * self.head_dim

    @property
    def linear_params(self) -> int:
        """Weights of all block linears, without embedding and LM head."""
        attention = self.dim * self.qkv_dim + self.n_head * self.head_dim * self.dim
        return self.n_layer * (attention + 3 * self.dim * self.ffn_dim)

    @property
    def vocab_params(self) -> int:
        """Weights of the embedding, and of the LM head where it is not tied."""
        return self.vocab_size * self.dim * (1 if self.tie_embeddings else 2)

    @property
    def params(self) -> int:
        norms = self.n_layer * 2 * self.dim + self.dim
        norms += self.n_layer * 2 * self.head_dim if self.qk_norm else 0
        norms += self.n_layer * self.qkv_dim if self.qkv_bias else 0
        return self.linear_params + self.vocab_params + norms

    def kv_bytes(self, seq_len: int, element_bytes: int = 2) -> int:
        """Bytes of a KV cache of `seq_len` positions."""
        return 2 * self.n_layer * self.n_kv_head * self.head_dim * seq_len * element_bytes


@dataclasses.dataclass(frozen=True)
class Eagle3Config:
    """What an EAGLE-3 head has beside its block; the defaults are the paper's."""

    tap_layers: tuple[int, ...]  # target blocks whose input it reads, ascending
    target_dim: int
    own_embedding: bool = False
    own_lm_head: bool = True
    norm_before_residual: bool = False  # the residual stream begins with the normed feature
    tap_norm: str = "none"  # before fc: "none", "all" taps as one vector, "each" by itself
    norm_output: bool = False  # the next feature is the one after the final norm


def default_taps(n_layer: int) -> tuple[int, ...]:
    """Blocks whose input the public EAGLE-3 code reads."""
    return 2, n_layer // 2, n_layer - 3


def parse_taps(text: str, n_layer: int) -> tuple[int, ...]:
    """Block numbers `2,15,27`. Raises `FasteagleError` for what the model does not have."""
    try:
        taps = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise FasteagleError(f"taps {text!r}: must be block numbers such as 2,15,27") from None
    return checked_taps(taps, n_layer)


def checked_taps(taps: tuple[int, ...], n_layer: int) -> tuple[int, ...]:
    """`taps`. Raises `FasteagleError` unless they ascend among the model's blocks."""
    if list(taps) != sorted(set(taps)) or taps[0] < 0 or taps[-1] > n_layer:
        listed = ", ".join(str(tap) for tap in taps)
        raise FasteagleError(f"taps {listed} must ascend within 0 .. {n_layer}, the model's blocks")
    return taps


@dataclasses.dataclass(frozen=True)
class HeadConfig:
    """Shape of a draft head. `block` describes its one decoder block and vocabulary.

    `block.vocab_size` is the target's; `draft_vocab_size` is how many of its tokens can be drafted.
    Without `eagle3` it is an EAGLE-1/2 head.
    """

    block: ModelConfig
    draft_vocab_size: int
    fc_bias: bool = True
    eagle3: Eagle3Config | None = None
    shifted: bool = True  # a row's token is the one after its feature; else only good to compare

    @property
    def feature_dim(self) -> int:
        """Width of what it reads of the target, for each token."""
        if self.eagle3 is None:
            return self.block.dim
        return len(self.eagle3.tap_layers) * self.eagle3.target_dim

    @property
    def linear_params(self) -> int:
        """Weights of its linears, without embedding and LM head."""
        if self.eagle3 is None:
            return self.block.linear_params + 2 * self.block.dim**2
        entry = self.block.dim * self.block.qkv_dim  # QKV reads twice the width
        return self.block.linear_params + entry + self.feature_dim * self.block.dim

    @property
    def lm_head_params(self) -> int:
        """Weights of an LM head of its own, 0 where it uses the target's."""
        is_own = self.eagle3 is not None and self.eagle3.own_lm_head
        is_trimmed = self.draft_vocab_size < self.block.vocab_size
        return self.draft_vocab_size * self.block.dim if is_own or is_trimmed else 0


def head_from_hf(raw: Mapping[str, Any], source: str) -> HeadConfig:
    """Read the decoder layer of a published or own draft head, as its `config.json` has it.

    RoPE base is the head's own or 10000, never the target's; its context length and layer count
    are ignored (design of the public heads). Raises `FasteagleError` for missing keys.
    """
    needed = ("hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
    missing = [key for key in needed if key not in raw]
    if missing:
        raise FasteagleError(f"{source}: config.json of the draft head lacks {', '.join(missing)}")
    _refuse_unsupported(raw, source)
    n_head = raw["num_attention_heads"]
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    scaling, linear = _rope_scaling(rope, source)
    block = ModelConfig(
        dim=raw["hidden_size"],
        n_layer=1,
        n_head=n_head,
        n_kv_head=raw.get("num_key_value_heads") or n_head,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // n_head,
        ffn_dim=raw["intermediate_size"],
        vocab_size=raw["vocab_size"],
        max_seq_len=2**31,
        norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope_base=raw.get("rope_theta") or rope.get("rope_theta") or 10000.0,
        rope_scaling=scaling,
        rope_linear_factor=linear,
        qkv_bias=bool(raw.get("qkv_bias", False)),
    )
    return HeadConfig(
        block,
        draft_vocab_size=raw.get("draft_vocab_size") or raw["vocab_size"],
        fc_bias=bool(raw.get("bias", True)),
    )


def from_hf(raw: Mapping[str, Any], source: str) -> ModelConfig:
    """Read a Hugging Face `config.json`. Raises `FasteagleError` for what we cannot run exactly."""
    architecture = (raw.get("architectures") or ["(none)"])[0]
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise FasteagleError(
            f"{source}: architecture {architecture!r} is not supported; "
            f"supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    missing = [
        key
        for key in (
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "intermediate_size",
            "vocab_size",
        )
        if key not in raw
    ]
    if missing:
        raise FasteagleError(f"{source}: config.json lacks {', '.join(missing)}")
    _refuse_unsupported(raw, source)
    n_head = raw["num_attention_heads"]
    # transformers 5 writes `rope_parameters`, older files `rope_scaling` and `rope_theta`.
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    scaling, linear = _rope_scaling(rope, source)
    return ModelConfig(
        dim=raw["hidden_size"],
        n_layer=raw["num_hidden_layers"],
        n_head=n_head,
        n_kv_head=raw.get("num_key_value_heads") or n_head,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // n_head,
        ffn_dim=raw["intermediate_size"],
        vocab_size=raw["vocab_size"],
        max_seq_len=raw.get("max_position_embeddings") or 2048,
        norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope_base=rope.get("rope_theta") or raw.get("rope_theta") or 10000.0,
        rope_scaling=scaling,
        rope_linear_factor=linear,
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=architecture == "Qwen2ForCausalLM",
        qk_norm=architecture == "Qwen3ForCausalLM",
        sliding_window=raw.get("sliding_window") if architecture == "MistralForCausalLM" else None,
        architecture=architecture,
    )


def _refuse_unsupported(raw: Mapping[str, Any], source: str) -> None:
    """Fields whose non-default values would change the arithmetic in a way we do not implement."""
    if raw.get("hidden_act", "silu") != "silu":
        raise FasteagleError(
            f"{source}: hidden_act {raw['hidden_act']!r} is not supported; only silu"
        )
    for key in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if raw.get(key):
            raise FasteagleError(f"{source}: {key}=true is not supported")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise FasteagleError(
            f"{source}: weights are already quantized ({method}); use the unquantized checkpoint"
        )


def _rope_scaling(rope: Mapping[str, Any], source: str) -> tuple[Llama3RopeScaling | None, float]:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None, 1.0
    if kind == "linear":
        return None, float(rope["factor"])
    if kind == "llama3":
        return (
            Llama3RopeScaling(
                factor=rope["factor"],
                low_freq_factor=rope["low_freq_factor"],
                high_freq_factor=rope["high_freq_factor"],
                original_max_seq_len=rope["original_max_position_embeddings"],
            ),
            1.0,
        )
    raise FasteagleError(
        f"{source}: RoPE scaling {kind!r} is not supported; supported: default, linear, llama3"
    )


_GGUF_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def from_gguf(
    fields: Mapping[str, Any],
    *,
    vocab_size: int,
    tied: bool,
    rope_freq_factors: tuple[float, ...] | None,
    source: str,
) -> ModelConfig:
    """Read GGUF metadata, given as plain Python values by key."""
    kind = fields.get("general.architecture", "(none)")
    if kind not in _GGUF_ARCHITECTURES:
        raise FasteagleError(
            f"{source}: GGUF architecture {kind!r} is not supported; "
            f"supported: {', '.join(_GGUF_ARCHITECTURES)}"
        )

    def need(key: str) -> Any:
        if f"{kind}.{key}" not in fields:
            raise FasteagleError(f"{source}: GGUF metadata lacks {kind}.{key}")
        return fields[f"{kind}.{key}"]

    scaling = fields.get(f"{kind}.rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise FasteagleError(f"{source}: GGUF RoPE scaling {scaling!r} is not supported")
    if fields.get(f"{kind}.expert_count"):
        raise FasteagleError(f"{source}: mixture-of-experts models are not supported")
    n_head = need("attention.head_count")
    dim = need("embedding_length")
    return ModelConfig(
        dim=dim,
        n_layer=need("block_count"),
        n_head=n_head,
        n_kv_head=fields.get(f"{kind}.attention.head_count_kv", n_head),
        head_dim=fields.get(f"{kind}.attention.key_length", dim // n_head),
        ffn_dim=need("feed_forward_length"),
        vocab_size=vocab_size,
        max_seq_len=need("context_length"),
        norm_eps=need("attention.layer_norm_rms_epsilon"),
        rope_base=fields.get(f"{kind}.rope.freq_base", 10000.0),
        rope_linear_factor=float(fields.get(f"{kind}.rope.scaling.factor", 1.0))
        if scaling == "linear"
        else 1.0,
        rope_freq_factors=rope_freq_factors,
        tie_embeddings=tied,
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
        sliding_window=fields.get(f"{kind}.attention.sliding_window"),
        architecture=_GGUF_ARCHITECTURES[kind],
    )
