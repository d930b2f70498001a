"""Rows of queries and keys whose RoPE turns adjacent values, in the order of halves.

Models here turn value i of a head with value i + E/2. Where files have the two side by side, their
rows are put into that order when they are read: scores of attention stay what they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fasteagle.loading.tensors import Checkpoint
from fasteagle.loading.wrapped import WrappedCheckpoint
from fasteagle.quant.packed import PackedWeight


def rope_order(n_rows: int, n_head: int) -> Tensor:
    """Return the order [n_rows] in which rows in pairs are rows in halves."""
    paired = torch.arange(n_rows).view(n_head, n_rows // n_head // 2, 2)
    return paired.transpose(1, 2).reshape(n_rows)


class HalvedCheckpoint(WrappedCheckpoint):
    """Checkpoint whose query and key rows are those of `inner`, in halves instead of pairs."""

    def __init__(self, inner: Checkpoint) -> None:
        super().__init__(inner)
        self._heads = {"q_proj": inner.config.n_head, "k_proj": inner.config.n_kv_head}

    def load(self, name: str) -> Tensor:
        order, tensor = self._order(name), super().load(name)
        return tensor if order is None else tensor[order]

    def start(self, name: str, n: int) -> Tensor:
        order = self._order(name)
        if order is None:
            return super().start(name, n)
        first_head = self.shape(name)[1] * self.config.head_dim
        tensor = super().start(name, max(n, first_head))
        return tensor[order[: len(tensor) // self.config.head_dim * self.config.head_dim]]

    def packed(self, name: str) -> PackedWeight | None:
        order, weight = self._order(name), super().packed(name)
        return weight if order is None or weight is None else weight.rows(order)

    def _order(self, name: str) -> Tensor | None:
        n_head = self._heads.get(name.removesuffix(".weight").rpartition(".")[2])
        if n_head is None or self.shape(name)[0] % (2 * n_head):  # refused later for its shape
            return None
        return rope_order(self.shape(name)[0], n_head)
