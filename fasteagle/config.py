"""Architecture of a Llama-family model and of its draft head, as frozen dataclasses.

Read from files by `config_hf` and `config_gguf`. Knows nothing about weights or torch, so that
`fasteagle models` can do its arithmetic at once.
"""

from __future__ import annotations

import dataclasses

from fasteagle.errors import FasteagleError

ANY_LENGTH = 2**31  # text length without a limit, where that of the files does not apply


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

    A row takes the `top_k` experts of the highest router logits, with `choice_bias` those of the
    highest sum of probability and bias; on equal ones the lower id.
    """

    n_expert: int
    top_k: int
    ffn_dim: int  # hidden width of one expert
    renormalize: bool = False  # weights sum to 1: a softmax of the chosen experts' logits
    scale: float = 1.0  # factor of the weights
    shared_ffn_dim: int = 0  # hidden width of the expert that every row takes; 0: none
    shared_gate: bool = False  # it is weighted by the sigmoid of a gate
    choice_bias: bool = False  # a bias decides with the probabilities which experts are chosen

    def __post_init__(self) -> None:
        assert 1 <= self.top_k <= self.n_expert, f"{self.top_k} experts: their reader checks it"

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
    rope_freq_factors: tuple[float, ...] | None = None  # divisors, as GGUF stores them
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
        """Number of weights of all routers, their biases and the gates of shared experts."""
        if self.moe is None:
            return 0
        rows = self.moe.n_expert + self.moe.shared_gate
        biases = self.moe.n_expert * self.moe.choice_bias
        return (self.n_layer - len(self.dense_blocks)) * (rows * self.dim + biases)

    def has_experts(self, block: int) -> bool:
        """Return whether block number `block` has experts instead of one MLP."""
        return self.moe is not None and block not in self.dense_blocks

    def kv_bytes(self, seq_len: int, element_bytes: int = 2) -> int:
        """Return the size in bytes of a KV cache of `seq_len` positions."""
        return 2 * self.n_layer * self.n_kv_head * self.head_dim * seq_len * element_bytes


@dataclasses.dataclass(frozen=True)
class Multipliers:
    """Constants of a Granite model; loading multiplies the weights by them, see `changed`."""

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
    head, with `mtp` a layer for multi-token prediction that was trained with the target.
    """

    block: ModelConfig
    draft_vocab_size: int
    fc_bias: bool = True
    eagle3: Eagle3Config | None = None
    mtp: bool = False

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Target blocks whose input the draft head reads; none but for EAGLE-3."""
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


def mtp_layer(config: ModelConfig) -> HeadConfig:
    """Return the shape of a target's layer for multi-token prediction: a block like its dense ones.

    It drafts every token of the target.
    """
    block = dataclasses.replace(
        config, n_layer=1, moe=None, dense_blocks=(), tie_embeddings=False, max_seq_len=ANY_LENGTH
    )
    return HeadConfig(block, config.vocab_size, fc_bias=False, mtp=True)


def dense_width(moe: MoEConfig, dim: int) -> int:
    """Return the FFN width for a draft head's block where the files tell none.

    An expert as wide as an MLP has that width, as in Mixtral's published heads; of narrower ones it
    is the width that a row takes.
    """
    return moe.ffn_dim if moe.ffn_dim >= dim else moe.top_k * moe.ffn_dim
