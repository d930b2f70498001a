"""The draft head at work: its KV cache, what it has seen, and one level of a tree.

Shapes: W rows of the draft head in one step, D model dim, S draft cache slots, V draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fasteagle.model import EagleHead, KVCache, causal_mask
from fasteagle.options import SamplingParams
from fasteagle.sampling import gumbel_noise


class HeadState:
    """The draft head with its KV cache, and what it predicts after the last position seen."""

    def __init__(self, head: EagleHead, max_seq_len: int, tree_rows: int) -> None:
        self.head, self.max_seq_len = head, max_seq_len
        weight = head.block.mlp_norm.weight
        self.on_cpu = weight.device.type == "cpu"
        n_slots = 1 if self.on_cpu else max_seq_len + tree_rows
        self.cache = KVCache(head.config.block, n_slots, weight.dtype, weight.device)
        self.length = 0
        self._tree_rows = tree_rows
        self.shared_seq_len: Tensor | None = None  # 0-d, of cycles that nothing on the host steers
        self._target_ids = head.target_ids()
        self.logits = weight.new_empty(1, head.config.draft_vocab_size)  # [1, V]
        self.feature = weight.new_empty(1, head.config.block.dim)  # [1, D]

    def rewind(self, length: int) -> None:
        self.length = min(self.length, length)

    def make_room(self, tree_rows: int) -> None:
        """Keep `tree_rows` slots free behind the text. Loses nothing that was kept."""
        self._tree_rows = max(tree_rows, self._tree_rows)
        if not self.on_cpu:
            self.cache.resize(self.max_seq_len + self._tree_rows)

    def to_target(self, ids: Tensor | slice) -> Tensor:
        return self._target_ids[ids]

    def ranking_logits(
        self, logits: Tensor, level: int, params: SamplingParams, noise: str
    ) -> Tensor:
        """What children are ranked by, [W, V]: logits, or with the noise the target will draw with.

        At level `level` the target picks argmax(its logits / T + g); g is known here already. The
        softmax of the draft's own sum then estimates how likely each child is that argmax.
        """
        if params.greedy or noise == "none":
            return logits
        position = (self.seq_len + level).unsqueeze(0)
        gumbel = gumbel_noise(params.seed, position, self._target_ids)
        return logits.float() / params.temperature + gumbel

    def extend(self, tokens: Tensor, features: Tensor, count: int) -> None:
        """Run true pairs through the head; see `Drafter.extend`."""
        self.reserve(self.length + tokens.shape[0] + self._tree_rows)
        last = torch.tensor([count - 1], device=tokens.device)
        self.logits, self.feature = head_extend(
            self.head, self.cache, tokens, features, self.seq_len, last
        )
        self.length += count

    def step(
        self, tokens: Tensor, features: Tensor, level: int, tree_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One level of the tree; see `head_step`."""
        return head_step(self.head, self.cache, tokens, features, self.seq_len, level, tree_mask)

    @property
    def seq_len(self) -> Tensor:
        """`length` on the device, 0-d."""
        if self.shared_seq_len is not None:
            return self.shared_seq_len
        return torch.tensor(self.length, device=self._target_ids.device)

    def reserve(self, n_slots: int) -> None:
        """Make room in a cache that grows with the text; on CUDA it has its full size."""
        if self.on_cpu:
            self.cache.resize(n_slots)


def head_extend(
    head: EagleHead, cache: KVCache, tokens: Tensor, features: Tensor, seq_len: Tensor, last: Tensor
) -> tuple[Tensor, Tensor]:
    """Run W true pairs at `seq_len` (0-d) and behind; logits [1, V], feature [1, D] of row `last`.

    Rows behind `last` [1] are padding: what they write is overwritten before it is read.
    """
    W = tokens.shape[0]
    rows = seq_len + torch.arange(W, device=tokens.device)
    mask = causal_mask(seq_len, W, cache.n_slots, None, tokens.device)
    return head(tokens, features, rows, rows, mask, cache, last)


def head_step(
    head: EagleHead,
    cache: KVCache,
    tokens: Tensor,
    features: Tensor,
    seq_len: Tensor,
    level: int,
    tree_mask: Tensor,
) -> tuple[Tensor, Tensor]:
    """One level of the tree: logits [W, V] and features [W, D] of nodes `tokens` [W].

    `seq_len` (0-d): true pairs in the cache; `tree_mask` [W, written + W]: which of the tree's
    rows so far each node sees. All nodes of a level share a position, as in the public
    implementation.
    """
    W, device = tokens.shape[0], tokens.device
    tree_rows = tree_mask.shape[1]
    columns = seq_len + torch.arange(tree_rows, device=device)
    positions = torch.zeros_like(tokens) + seq_len + level
    mask = (torch.arange(cache.n_slots, device=device) < seq_len).expand(W, -1)
    mask = mask.index_copy(1, columns, tree_mask)
    return head(tokens, features, positions, columns[tree_rows - W :], mask, cache)
