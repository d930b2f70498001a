"""Llama-family decoder of one sequence, with a static KV cache.

Covers Llama-2/3, Vicuna, Mistral, Qwen2, Qwen3, SmolLM2, MiMo, Ernie and their mixtures of
experts. Knows nothing about quantization, compilation or text: `quant` and `compile` transform it
from outside.

Shapes: T rows in this pass, D model dim, H query heads, G KV heads, E head dim, F FFN dim,
V vocabulary, S cache slots, R auxiliary layers; in a mixture of experts X experts, k of them for
each row.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fasteagle.config import HeadConfig, ModelConfig, MoEConfig
from fasteagle.tree import TreeView
from fasteagle.uninitialized import Uninitialized

KEY_BLOCK = 256  # attention reads a prefix of the cache rounded up to this many keys
KEPT_SLOTS = 2 * KEY_BLOCK  # of a cache, for the answer after a prompt that is shorter


class Output(NamedTuple):
    """Result of one pass; `aux_states` is None unless the caller gave `aux_layers`."""

    logits: Tensor  # [T, V]
    features: Tensor  # [T, D], after the final norm: input of the LM head (and of EAGLE-1/2)
    aux_states: Tensor | None = None  # [T, R * D], fp32, residual stream entering `aux_layers`


class PromptView(NamedTuple):
    """Cache slots that the last rows of a text see: each those up to its own."""

    n_rows: int
    keys: Tensor  # [n] slots of the text, 0 .. n - 1

    def mask(self, n_slots: int) -> Tensor:
        """Return the mask of this view over its keys, rounded up as far as there are slots."""
        n = len(self.keys)
        n_keys = min(round_up(n, KEY_BLOCK), n_slots)
        return causal_mask(n - self.n_rows, self.n_rows, n_keys, None, self.keys.device)


Visible: TypeAlias = Tensor | TreeView | PromptView  # cache slots that each row of a pass sees
Layer: TypeAlias = tuple[Tensor, Tensor]  # keys and values [G, S, E] of a block


class Rows(NamedTuple):
    """Rows of a pass: their turns by RoPE, the cache slots they go to, and what they see."""

    cos: Tensor  # [T, 1, E]
    sin: Tensor  # [T, 1, E]
    slots: Tensor  # [T]
    visible: Visible


class KVCache:
    """Keys and values of every block in one tensor `rows` [2 L, G, S, E], even rows the keys.

    `layers` are its planes as (keys, values) [G, S, E] of each block. Attention reads all S slots:
    where nothing needs fixed addresses (CPU), S grows with the text in steps of `KEY_BLOCK` by
    `resize`, since oneDNN copies any batch that is not contiguous. Formats other than the model's
    own may have `spare` elements after each row; see `Target.new_cache`.
    """

    def __init__(
        self,
        config: ModelConfig,
        n_slots: int,
        dtype: torch.dtype,
        device: torch.device | str,
        spare: int = 0,
    ) -> None:
        n_slots = round_up(n_slots, KEY_BLOCK)
        shape = (2 * config.n_layer, config.n_kv_head, n_slots, config.head_dim + spare)
        self._use(torch.zeros(shape, dtype=dtype, device=device))

    def _use(self, rows: Tensor) -> None:
        # Through DLPack each plane has a storage object of its own over the same memory. Views of
        # one tensor would make AOTAutograd guard the overlap of all that a compiled pass writes.
        with torch.cuda.device_of(rows):  # DLPack hands out what is on the current device only
            planes = [torch.from_dlpack(plane) for plane in rows]
        self.layers = list(zip(planes[::2], planes[1::2], strict=True))
        self.rows = rows

    @property
    def n_slots(self) -> int:
        return self.rows.shape[2]

    def resize(self, n_slots: int, *, exactly: bool = False) -> None:
        """Make room for `n_slots` rounded up to `KEY_BLOCK`, keeping the rows that fit.

        Up to `KEPT_SLOTS` more stay, unless `exactly`: moving a cache takes as long as a pass.
        """
        n_slots = round_up(n_slots, KEY_BLOCK)
        if n_slots <= self.n_slots <= n_slots + (0 if exactly else KEPT_SLOTS):
            return
        n_rows = min(n_slots, self.n_slots)
        n_planes, G, _, E = self.rows.shape
        rows = self.rows.new_zeros(n_planes, G, n_slots, E)
        rows[:, :, :n_rows] = self.rows[:, :, :n_rows]
        self._use(rows)

    def clear(self) -> None:
        """Zero every row."""
        self.rows.zero_()

    def commit(self, start: Tensor, path: Tensor) -> None:
        """Copy slots `start + path` [n] to the n slots from `start` (0-d) on, in every block.

        Source and target slots may overlap: all are read before one is written.
        """
        target = start + torch.arange(len(path), device=path.device)
        self.rows[:, :, target] = self.rows[:, :, start + path]


class RMSNorm(nn.Module):
    """Root-mean-square norm that computes in fp32 and returns the dtype of its weight."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return (x32 * self.weight).to(self.weight.dtype)


class Cast(nn.Module):
    """Cast of the fp32 residual stream to the linears' dtype, where a block has no norm."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("like", torch.empty(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.like.dtype)


def write(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Write rows [G, T, E] into slots [T] of a cache [G, S, E]."""
    cache.index_copy_(1, slots, rows)


def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, mask: Tensor) -> Tensor:
    """Compute attention of q [G, group * T, E] over caches [G, S or more, E] under mask [T, S].

    Two plain products: SDPA with GQA and a mask is several times slower on CPU.
    """
    G, n_rows, E = q.shape
    T, S = mask.shape
    k_cache, v_cache = k_cache[:, :S], v_cache[:, :S]
    scores = (q @ k_cache.transpose(1, 2)).view(G, n_rows // T, T, S).float() / math.sqrt(E)
    weights = torch.softmax(scores.masked_fill(~mask, float("-inf")), -1).to(v_cache.dtype)
    return weights.view(G, n_rows, S) @ v_cache


def apply_norm(norm: nn.Module, x: Tensor) -> Tensor:
    """Return `norm(x)`."""
    normed: Tensor = norm(x)
    return normed


class Ops(NamedTuple):
    """Operations of a pass that a backend may replace; the defaults are the core's.

    `run_blocks` None is the function of that name. Where `views`, they take a `TreeView` and a
    `PromptView` besides a mask.
    """

    attend: Callable[[Tensor, Tensor, Tensor, Any], Tensor] = attend
    write: Callable[[Tensor, Tensor, Tensor], None] = write
    norm: Callable[[nn.Module, Tensor], Tensor] = apply_norm
    run_blocks: Callable[..., Tensor] | None = None
    views: bool = False


CORE = Ops()


class Attention(nn.Module):
    """Grouped-query attention over the cache; query, key and value come from one product."""

    def __init__(self, config: ModelConfig, entry_dim: int | None = None) -> None:
        super().__init__()
        self.n_head, self.n_kv_head = config.n_head, config.n_kv_head
        self.head_dim = config.head_dim
        self.qkv = nn.Linear(entry_dim or config.dim, config.qkv_dim, bias=config.qkv_bias)
        self.out = nn.Linear(config.n_head * config.head_dim, config.dim, bias=False)
        self.norm_whole = config.qk_norm_whole
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if config.qk_norm or config.qk_norm_whole:
            q_heads, k_heads = (self.n_head, self.n_kv_head) if self.norm_whole else (1, 1)
            self.q_norm = RMSNorm(q_heads * self.head_dim, config.norm_eps)
            self.k_norm = RMSNorm(k_heads * self.head_dim, config.norm_eps)

    def forward(self, x: Tensor, rows: Rows, layer: Layer, ops: Ops = CORE) -> Tensor:
        T, G, E = x.shape[0], self.n_kv_head, self.head_dim
        q = self.write(x, *rows[:3], layer, ops)
        q = q.view(T, G, self.n_head // G, E).permute(1, 2, 0, 3)
        y = ops.attend(q.reshape(G, -1, E), *layer, rows.visible)  # [G, group * T, E]
        y = y.view(G, -1, T, E).permute(2, 0, 1, 3)
        return self.out(y.reshape(T, self.n_head * E))

    def write(
        self, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, layer: Layer, ops: Ops = CORE
    ) -> Tensor:
        """Write the keys and values of x [T, D] into their slots; return its queries [T, H, E]."""
        T, G, E = x.shape[0], self.n_kv_head, self.head_dim
        q, k, v = self.qkv(x).view(T, -1, E).split((self.n_head, G, G), dim=1)  # [T, H or G, E]
        if self.norm_whole:
            q = ops.norm(self.q_norm, q.flatten(1)).view(T, -1, E)
            k = ops.norm(self.k_norm, k.flatten(1)).view(T, -1, E)
        else:
            q, k = ops.norm(self.q_norm, q), ops.norm(self.k_norm, k)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        for cache, new in zip(layer, (k, v), strict=True):
            ops.write(cache, slots, new.transpose(0, 1))
        return q


class MLP(nn.Module):
    """SwiGLU feed-forward layer; gate and up come from one product."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(dim, 2 * ffn_dim, bias=False)
        self.down = nn.Linear(ffn_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


def rows_product(linear: nn.Module, x: Tensor, start: int, stop: int) -> Tensor:
    """Return outputs `start .. stop` [T, stop - start] of a linear without bias, for x [T, D].

    Quantized linears have a method of this name.
    """
    if isinstance(linear, nn.Linear):
        return F.linear(x, linear.weight[start:stop])
    y: Tensor = linear.rows_product(x, start, stop)
    return y


class MoE(nn.Module):
    """Feed-forward layer in which a router chooses `top_k` of X experts for each row.

    The experts' weights are stacked along the outputs, so that whatever works on a linear works on
    them: expert e has the rows `2 F e` to `2 F (e + 1)` of `gate_up`, first gate, then up, and the
    rows `D e` to `D (e + 1)` of `down`. Router and gate are fp32 whatever the model is: a rounded
    logit would choose other experts.
    """

    def __init__(self, dim: int, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        n_expert, ffn_dim = config.n_expert, config.ffn_dim
        self.router = nn.Linear(dim, n_expert, bias=False)
        self.choice_bias = nn.Parameter(torch.zeros(n_expert)) if config.choice_bias else None
        self.gate_up = nn.Linear(dim, n_expert * 2 * ffn_dim, bias=False)
        self.down = nn.Linear(ffn_dim, n_expert * dim, bias=False)
        self.shared = MLP(dim, config.shared_ffn_dim) if config.shared_ffn_dim else None
        self.shared_gate = nn.Linear(dim, 1, bias=False) if config.shared_gate else None

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ids [T, k] of each row's experts, the best first, and their weights in fp32.

        The lower id of equal ones is chosen.
        """
        logits = F.linear(x.float(), self.router.weight.float())  # [T, X]
        ranks = logits
        if self.choice_bias is not None:
            ranks = logits.softmax(-1) + self.choice_bias.float()
        ids = ranks.sort(dim=-1, descending=True, stable=True).indices[:, : self.config.top_k]
        chosen = logits.gather(1, ids)
        if self.config.renormalize:
            weights = chosen.softmax(-1)
        else:
            weights = (chosen - logits.logsumexp(-1, keepdim=True)).exp()
        return ids, weights * self.config.scale

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output [T, D] in fp32.

        A row's sum goes in the order of expert ids, so that its bits depend on no other row.
        """
        ids, weights = self.route(x)
        y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in ids.unique().tolist():  # ascending
            rows, place = (ids == expert).nonzero(as_tuple=True)
            out = self.expert(x[rows], expert).float()
            y.index_add_(0, rows, out * weights[rows, place].unsqueeze(1))
        if self.shared is not None:
            shared = self.shared(x).float()
            if self.shared_gate is not None:
                shared = shared * F.linear(x.float(), self.shared_gate.weight.float()).sigmoid()
            y = y + shared
        return y

    def expert(self, x: Tensor, expert: int) -> Tensor:
        """Return the output [n, D] of one expert for rows x [n, D]."""
        n_gate_up, dim = 2 * self.config.ffn_dim, x.shape[1]
        both = rows_product(self.gate_up, x, expert * n_gate_up, (expert + 1) * n_gate_up)
        gate, up = both.chunk(2, dim=-1)
        return rows_product(self.down, F.silu(gate) * up, expert * dim, (expert + 1) * dim)


class Block(nn.Module):
    """Pre-norm decoder block: `x + attention`, then `x + mlp`.

    x, the residual stream, is fp32 whatever the weights are: in bf16 its rounding, repeated in
    every block, was the larger half of the features' error (default model: 2.7 % against 1.6 %).
    A draft head's attention may read an `entry` [T, entry_dim] of its own instead of the norm of x.
    """

    mlp: MLP | MoE

    def __init__(
        self,
        config: ModelConfig,
        input_norm: bool = True,
        entry_dim: int | None = None,
        number: int = 0,
    ) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps) if input_norm else Cast()
        self.attention = Attention(config, entry_dim)
        self.mlp_norm = RMSNorm(config.dim, config.norm_eps)
        if config.moe is not None and config.has_experts(number):
            self.mlp = MoE(config.dim, config.moe)
        else:
            self.mlp = MLP(config.dim, config.ffn_dim)

    def forward(
        self, x: Tensor, rows: Rows, layer: Layer, entry: Tensor | None = None, ops: Ops = CORE
    ) -> Tensor:
        entry = ops.norm(self.attention_norm, x) if entry is None else entry
        x = x + self.attention(entry, rows, layer, ops)
        return x + self.mlp(ops.norm(self.mlp_norm, x))


def run_blocks(
    blocks: Sequence[Block], layers: Sequence[Layer], x: Tensor, rows: Rows, ops: Ops = CORE
) -> Tensor:
    """Return the residual stream [T, D] after `blocks`, which write into their cache `layers`."""
    for block, layer in zip(blocks, layers, strict=True):
        x = block(x, rows, layer, None, ops)
    return x


def as_mask(visible: Visible, n_slots: int) -> Tensor:
    """Return `visible` as a mask over the first of `n_slots` slots, [T, n_slots or fewer]."""
    return visible if isinstance(visible, Tensor) else visible.mask(n_slots)


class LMHead(nn.Linear):
    """LM head with logits in fp32, the largest few exact; see `sharpen`. Costs 1 % of a pass."""

    def forward(self, x: Tensor) -> Tensor:
        logits = F.linear(x, self.weight)  # [T, V]
        return logits if logits.dtype == torch.float32 else sharpen(logits, x, self.rows)

    def rows(self, index: Tensor) -> Tensor:
        """Return rows [..., D] of the weight."""
        return self.weight[index]


def sharpen(logits: Tensor, x: Tensor, rows: Callable[[Tensor], Tensor], n_best: int = 8) -> Tensor:
    """Return 16-bit logits [T, V] in fp32, each row's `n_best` recomputed with fp32 products.

    In bf16 a logit near 25 moves in steps of 0.125, so that real differences become ties, which the
    lowest token id wins: 1.7 % of the default model's tokens differed from fp32, now 0.8 % do.
    """
    best = logits.topk(min(n_best, logits.shape[1])).indices
    exact = (rows(best).float() @ x.float().unsqueeze(-1)).squeeze(-1)
    return logits.float().scatter(1, best, exact)


class Transformer(nn.Module):
    """Target model, built on any device, `meta` included; `checkpoint` assigns the weights."""

    rope_cos: Tensor
    rope_sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config, number=i) for i in range(config.n_layer))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.lm_head = LMHead(config.dim, config.vocab_size, bias=False)

    def init_rope(self, max_seq_len: int, device: torch.device | str) -> None:
        """Tabulate RoPE for positions `0 .. max_seq_len - 1`, always in fp32."""
        cos, sin = rope_table(self.config, max_seq_len)
        self.register_buffer("rope_cos", cos.to(device), persistent=False)
        self.register_buffer("rope_sin", sin.to(device), persistent=False)

    def encode(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        visible: Visible,
        cache: KVCache,
        aux_layers: tuple[int, ...] = (),
        ops: Ops = CORE,
    ) -> tuple[Tensor, Tensor | None]:
        """Run blocks and final norm; return features [T, D], auxiliary states [T, R * D] or None.

        `positions` [T] feed RoPE only, `slots` [T] are the cache rows that are written, `visible`
        has the cache rows that each row sees, its own included: a mask (bool) over the first of
        them, or the view of a tree or of a prompt. `aux_layers` ascend.
        """
        visible = visible if ops.views else as_mask(visible, cache.n_slots)
        cos, sin = self.rope_cos[positions].unsqueeze(1), self.rope_sin[positions].unsqueeze(1)
        rows = Rows(cos, sin, slots, visible)
        x = self.embedding(tokens).float()
        aux_states: list[Tensor] = []
        blocks = list(self.blocks)
        begin = 0
        for end in (*aux_layers, len(blocks)):
            if begin < end:
                span = blocks[begin:end], cache.layers[begin:end], x, rows
                x = run_blocks(*span, ops) if ops.run_blocks is None else ops.run_blocks(*span)
            aux_states.append(x)
            begin = end
        aux_states.pop()  # the stream after the last block, which nobody reads
        return ops.norm(self.norm, x), torch.cat(aux_states, dim=-1) if aux_states else None

    def head_rows(self, index: Tensor) -> Tensor:
        """Return rows [n, D] of the LM head, if it is tied those before its quantization."""
        tied = self.config.tie_embeddings
        rows = self.embedding.weight[index] if tied else self.lm_head.rows(index)
        return rows.to(self.norm.weight.dtype)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        visible: Visible,
        cache: KVCache,
        aux_layers: tuple[int, ...] = (),
        ops: Ops = CORE,
    ) -> Output:
        """Run `encode`, then the LM head on every row."""
        features, aux_states = self.encode(
            tokens, positions, slots, visible, cache, aux_layers, ops
        )
        return Output(self.lm_head(features), features, aux_states)


@dataclasses.dataclass(frozen=True)
class Target:
    """Model as a backend runs it: by the backend's operations and cache format.

    `Target(model)` is the model itself, without any operation of a backend.
    """

    model: Transformer
    ops: Ops = CORE
    cache_dtype: torch.dtype | None = None  # None: the dtype of the weights
    cache_spare: int = 0
    rows_at_once: int | None = None  # most rows of a pass; more are no faster per row
    core_ops: Ops = CORE  # the core's own operations over such caches

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @property
    def weight(self) -> Tensor:
        """Weight of the final norm, in the dtype and on the device of all weights."""
        return self.model.norm.weight

    def new_cache(self, n_slots: int) -> KVCache:
        """Return a KV cache in the format that the blocks write and read."""
        dtype, device = self.cache_dtype or self.weight.dtype, self.weight.device
        return KVCache(self.config, n_slots, dtype, device, self.cache_spare)

    def lm_head(self, features: Tensor) -> Tensor:
        """Return the logits [T, V] of `features` [T, D]."""
        logits: Tensor = self.model.lm_head(features)
        return logits

    def encode(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        visible: Visible,
        cache: KVCache,
        aux_layers: tuple[int, ...] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """Run the blocks and the final norm, see `Transformer.encode`."""
        return self.model.encode(tokens, positions, slots, visible, cache, aux_layers, self.ops)

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        visible: Visible,
        cache: KVCache,
        aux_layers: tuple[int, ...] = (),
    ) -> Output:
        """Run a whole pass, see `Transformer.forward`."""
        output: Output = self.model(tokens, positions, slots, visible, cache, aux_layers, self.ops)
        return output


class EagleHead(nn.Module):
    """EAGLE-1/2 draft head: one block on (token embedding, feature) that predicts the next feature.

    `block(fc(cat(embedding(t_{i+1}), f_i)))` without input norm and final norm; the result goes
    straight into the target's LM head and is the next step's feature (paper, section 4.1). The
    embedding and the rows of the LM head are the target's: `borrow` takes both.

    A layer for multi-token prediction has norms before `fc`, in the block and after it, and the
    normed result is read as above (DeepSeek-V3 report, section 2.2).
    """

    rope_cos: Tensor
    rope_sin: Tensor
    d2t: Tensor  # [draft vocabulary] int64, target id of each draft id minus the draft id

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.own_embedding: nn.Embedding | None = None
        self.own_lm_head: nn.Module | None = None
        self._init_layers()

    def _init_layers(self) -> None:
        block, normed = self.config.block, self.config.mtp
        self.embedding_norm, self.feature_norm, self.norm = (
            RMSNorm(block.dim, block.norm_eps) if normed else nn.Identity() for _ in range(3)
        )
        self.fc = nn.Linear(2 * block.dim, block.dim, bias=self.config.fc_bias)
        self.block = Block(block, input_norm=normed)

    def borrow(self, target: Transformer, max_seq_len: int) -> None:
        """Share the target's embedding and LM head unless the head has its own; tabulate RoPE.

        RoPE positions go up to `max_seq_len + KEY_BLOCK`, since drafting goes past the text.
        """
        device, dtype = target.norm.weight.device, target.norm.weight.dtype
        self.to(device=device, dtype=dtype)
        self._drop_copy(target.embedding)
        # In tuples, as a borrowed module must not become a submodule, saved and moved with this.
        self._embedding = (self.own_embedding or target.embedding,)
        if self.own_lm_head is not None:
            self._lm_head = (self.own_lm_head,)
        elif self.config.draft_vocab_size == target.config.vocab_size:
            self._lm_head = (target.lm_head,)
        else:
            with Uninitialized():
                rows = nn.Linear(target.config.dim, len(self.d2t), bias=False, device="meta")
            weight = target.head_rows(self.target_ids())
            rows.weight = nn.Parameter(weight, requires_grad=False)
            self._lm_head = (rows,)
        cos, sin = rope_table(self.config.block, max_seq_len + KEY_BLOCK)
        self.register_buffer("rope_cos", cos.to(device), persistent=False)
        self.register_buffer("rope_sin", sin.to(device), persistent=False)

    def _drop_copy(self, embedding: nn.Embedding) -> None:
        """Drop an own embedding that equals the target's: it takes 1 GiB for a Llama-3 8B."""
        own, eagle3 = self.own_embedding, self.config.eagle3
        if own is None or eagle3 is None or not torch.equal(own.weight, embedding.weight):
            return
        self.own_embedding = None
        shared = dataclasses.replace(eagle3, own_embedding=False)
        self.config = dataclasses.replace(self.config, eagle3=shared)

    @property
    def embedding(self) -> nn.Embedding:
        """Embedding of the draft head, its own or the target's."""
        return self._embedding[0]

    @property
    def lm_head(self) -> nn.Module:
        """LM head of the draft logits: its own, the target's, or rows of the target's."""
        return self._lm_head[0]

    def use_lm_head(self, module: nn.Module) -> None:
        """Turn features into draft logits with `module` from now on."""
        self._lm_head = (module,)
        if self.own_lm_head is not None:
            self.own_lm_head = module

    def target_ids(self) -> Tensor:
        """Return the target id of every draft id, ascending."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def read(self, features: Tensor) -> Tensor:
        """Return the target's features [T, F] as features [T, D] for `forward`."""
        return features

    def enter(self, embeds: Tensor, features: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the residual stream [T, D] in fp32 and the block's entry; None: the stream."""
        # Some servers zero an MTP layer's embedding at position 0; only drafts depend on it.
        both = self.embedding_norm(embeds), self.feature_norm(features)
        return self.fc(torch.cat(both, dim=-1)).float(), None

    def leave(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the LM head's input and the next features from the block's output [T, D]."""
        features = self.norm(x).to(dtype)
        return features, features

    def show(
        self, tokens: Tensor, features: Tensor, positions: Tensor, slots: Tensor, cache: KVCache
    ) -> None:
        """Write the keys and values of pairs, as `forward` does, and compute nothing else."""
        cos, sin = self.rope_cos[positions].unsqueeze(1), self.rope_sin[positions].unsqueeze(1)
        x, entry = self.enter(self.embedding(tokens), features)
        entry = self.block.attention_norm(x) if entry is None else entry
        self.block.attention.write(entry, cos, sin, slots, cache.layers[0])

    def forward(
        self,
        tokens: Tensor,
        features: Tensor,
        positions: Tensor,
        slots: Tensor,
        visible: Visible,
        cache: KVCache,
        rows: Tensor | None = None,
        block: Callable[..., Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return draft logits [T, draft vocabulary] and next features [T, D] of `rows` or of all.

        `tokens` [T] are target ids, each one position after its `features` row [T, D]; `positions`
        [T] are those of the features. `slots` and `visible` are as in `Transformer.encode`. A
        backend may run the block by its own `block`, which takes `visible` as it is.
        """
        cos, sin = self.rope_cos[positions].unsqueeze(1), self.rope_sin[positions].unsqueeze(1)
        x, entry = self.enter(self.embedding(tokens), features)
        if block is None:  # over the slots of a plane: compiled code has a dynamic number of them
            block, visible = self.block, as_mask(visible, cache.layers[0][0].shape[1])
        x = block(x, Rows(cos, sin, slots, visible), cache.layers[0], entry)
        x = x if rows is None else x.index_select(0, rows)
        said, features = self.leave(x, features.dtype)
        return self.lm_head(said), features


class Eagle3Head(EagleHead):
    """EAGLE-3 draft head: reads the residual stream entering R blocks of the target.

    `g = fc(cat(aux_states))` [T, D]; the block's attention reads cat(norm(embedding), norm(g)), its
    residual stream begins with g. Logits are `lm_head(norm(x))` over its own draft vocabulary, and
    x before that norm is the next step's g (paper, section 3).
    """

    def _init_layers(self) -> None:
        block, own = self.config.block, self.config.eagle3
        assert own is not None, "the config of an EAGLE-3 head"
        dim, eps, n_aux = block.dim, block.norm_eps, len(own.aux_layers)
        wide = self.config.feature_dim
        norms = {"none": [], "all": [wide], "each": [own.target_dim] * n_aux}[own.aux_norm]
        self.aux_norms = nn.ModuleList(RMSNorm(width, eps) for width in norms)
        self.fc = nn.Linear(wide, dim, bias=self.config.fc_bias)
        self.embedding_norm, self.feature_norm = RMSNorm(dim, eps), RMSNorm(dim, eps)
        self.block = Block(block, input_norm=False, entry_dim=2 * dim)
        self.norm = RMSNorm(dim, eps)
        if own.own_embedding:
            self.own_embedding = nn.Embedding(block.vocab_size, dim)
        if own.own_lm_head:
            self.own_lm_head = nn.Linear(dim, self.config.draft_vocab_size, bias=False)

    def read(self, features: Tensor) -> Tensor:
        if self.aux_norms:
            parts = features.chunk(len(self.aux_norms), dim=-1)
            normed = [norm(part) for norm, part in zip(self.aux_norms, parts, strict=True)]
            features = torch.cat(normed, dim=-1)
        return self.fc(features)

    def enter(self, embeds: Tensor, features: Tensor) -> tuple[Tensor, Tensor | None]:
        assert self.config.eagle3 is not None, "see _init_layers"
        normed = self.feature_norm(features)
        entry = torch.cat((self.embedding_norm(embeds), normed), dim=-1)
        residual = normed if self.config.eagle3.norm_before_residual else features
        return residual.float().contiguous(), entry  # a tree's first level is one row, expanded

    def leave(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        assert self.config.eagle3 is not None, "see _init_layers"
        normed = self.norm(x)
        return normed, normed if self.config.eagle3.norm_output else x.to(dtype)


def make_head(config: HeadConfig) -> EagleHead:
    """Make an untrained draft head of the kind that `config` says."""
    return EagleHead(config) if config.eagle3 is None else Eagle3Head(config)


def rope_table(config: ModelConfig, max_seq_len: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [max_seq_len, E] in the split-halves layout of HF files."""
    angles = torch.outer(torch.arange(max_seq_len).float(), rope_frequencies(config)).repeat(1, 2)
    return angles.cos(), angles.sin()


def rope_frequencies(config: ModelConfig) -> Tensor:
    """Return radians per position [E / 2], with the scaling of the config."""
    E = config.head_dim
    inv_freq = config.rope_base ** (-torch.arange(0, E, 2, dtype=torch.int64).float() / E)
    inv_freq = inv_freq / config.rope_linear_factor
    if config.rope_freq_factors is not None:
        inv_freq = inv_freq / torch.tensor(config.rope_freq_factors)
    if config.rope_scaling is not None:
        s = config.rope_scaling
        # Llama-3.1: long wavelengths are stretched by `factor`, short ones kept, a ramp between.
        turns = s.original_max_seq_len * inv_freq / (2 * math.pi)
        keep = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
        keep = keep.clamp(0, 1)
        inv_freq = (1 - keep) * inv_freq / s.factor + keep * inv_freq
    return inv_freq


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [T, heads, E] by cos/sin [T, 1, E] in fp32."""
    x32 = x.float()
    first, second = x32.chunk(2, dim=-1)
    return (x32 * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


def causal_mask(
    start: Tensor | int, n_rows: int, n_keys: int, window: int | None, device: torch.device | str
) -> Tensor:
    """Return the causal mask [n_rows, n_keys] of rows at slots `start .. start + n_rows - 1`.

    With a sliding window of w, a row sees itself and the w - 1 keys before it.
    """
    row = start + torch.arange(n_rows, device=device).unsqueeze(1)
    key = torch.arange(n_keys, device=device).unsqueeze(0)
    mask = key <= row
    return mask if window is None else mask & (key > row - window)


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
