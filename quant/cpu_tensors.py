"""Lists of tensors that the CPU kernels take, with a name for each.

Fields and their order are those of the structs in `cpu/tensors.h`; a test compares them.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class BlockTensors(NamedTuple):
    """Weights of one block as the kernels read them; what it does not have is empty.

    With a router, `gate_up` and `down` hold all experts; `routing` is how many a row takes, whether
    their weights are renormalized, and a factor of the weights. `choice_bias` decides with the
    router's probabilities which experts a row takes.
    """

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor
    q_norm: Tensor
    k_norm: Tensor
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor
    router: Tensor
    choice_bias: Tensor
    routing: Tensor
    shared_gate_up: Tensor
    shared_down: Tensor
    shared_gate: Tensor


class TargetTensors(NamedTuple):
    """Weights and tables of a target around its blocks."""

    embedding: Tensor
    cos: Tensor
    sin: Tensor
    norm: Tensor
    lm_head: Tensor


class HeadTensors(NamedTuple):
    """Weights and tables of a draft head around its block.

    EAGLE-1 has `fc`, EAGLE-3 the three norms, a layer for multi-token prediction both. `reader`
    makes EAGLE-3's features of the target's states.
    """

    embedding: Tensor
    cos: Tensor
    sin: Tensor
    lm_head: Tensor
    fc: Tensor | None = None
    fc_bias: Tensor | None = None
    embedding_norm: Tensor | None = None
    feature_norm: Tensor | None = None
    norm: Tensor | None = None
    reader: Tensor | None = None
    reader_bias: Tensor | None = None


class State(NamedTuple):
    """State that one cycle leaves for the next; `rows` are the planes of the KV cache."""

    seq_len: Tensor
    root: Tensor
    count: Tensor
    tokens: Tensor
    features: Tensor
    text: Tensor
    result: Tensor
    rows: Tensor


class Tree(NamedTuple):
    """Rows of one verify pass."""

    tokens: Tensor
    parents: Tensor
    valid: Tensor
    sources: Tensor | None = None


class Sampling(NamedTuple):
    """Parameters of the sampling steps that are on; all None: greedy."""

    temperature: Tensor | None = None
    seed: Tensor | None = None
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None
    penalty: Tensor | None = None
    seen: Tensor | None = None


class CorpusIndex(NamedTuple):
    """Documents for lookup: their tokens, the sorted keys, and the position of each key's token."""

    tokens: Tensor
    keys: Tensor
    order: Tensor


class DraftTensors(NamedTuple):
    """Tensors that draft the chains of some cycles of a text.

    Of a lookup they are its table and last proposal; of a draft head its keys and values, and the
    temperature and seed of its noise, if it has any.
    """

    table: Tensor | None = None
    recent: Tensor | None = None
    keys: Tensor | None = None
    values: Tensor | None = None
    temperature: Tensor | None = None
    seed: Tensor | None = None
