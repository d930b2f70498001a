"""Weights that are changed when they are read, so that all models compute alike.

Models here turn value i of a head with value i + E/2. Where files have the two side by side, the
rows of queries and keys are put into the order of halves (`rope_order`): scores of attention stay
what they are. The multipliers of a Granite model's config are put into its weights:

embedding * m       the embedding, and then a tied LM head is a table of its own
attention           the query rows: scores are divided by sqrt(head_dim) in every model
residual            the last linears of attention and MLP
logits / m          the final norm, so that features are the LM head's input in every model
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from fasteagle.config import Multipliers
from fasteagle.loading.tensors import Checkpoint
from fasteagle.quant.packed import PackedWeight
from fasteagle.quant.scheme import Scheme

_EMBEDDING, _LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"


class ChangedCheckpoint(Checkpoint):
    """Checkpoint with the tensors of `inner`, reordered where `halved`, multiplied in fp32.

    Packed weights have their scales and offsets multiplied, which is as exact.
    """

    def __init__(
        self, inner: Checkpoint, multipliers: Multipliers | None = None, halved: bool = False
    ) -> None:
        self.inner, self.config = inner, inner.config
        self.files, self.scheme = inner.files, inner.scheme
        self.multipliers = multipliers
        if multipliers is not None:
            self.config = dataclasses.replace(inner.config, tie_embeddings=False)
        heads = {"q_proj": inner.config.n_head, "k_proj": inner.config.n_kv_head}
        self._heads = heads if halved else {}

    @property
    def own_scheme(self) -> Scheme | None:
        return self.inner.own_scheme

    @property
    def widened(self) -> list[str]:
        return self.inner.widened

    def names(self) -> set[str]:
        names = self.inner.names()
        return {name for name in names | {_LM_HEAD} if self._stored(name) in names}

    def shape(self, name: str) -> tuple[int, ...]:
        return self.inner.shape(self._stored(name))

    def load(self, name: str) -> Tensor:
        order, tensor = self._order(name), self.inner.load(self._stored(name))
        return self._multiplied(name, tensor if order is None else tensor[order])

    def start(self, name: str, n: int) -> Tensor:
        order, head_dim = self._order(name), self.config.head_dim
        if order is not None:  # of whole attention heads
            n = max(n, self.shape(name)[1] * head_dim)
        tensor = self.inner.start(self._stored(name), n)
        if order is not None:
            tensor = tensor[order[: len(tensor) // head_dim * head_dim]]
        return self._multiplied(name, tensor)

    def bits(self, name: str) -> int | None:
        return self.inner.bits(self._stored(name))

    def columns(self, name: str) -> Tensor | None:
        return self.inner.columns(self._stored(name))

    def packed(self, name: str) -> PackedWeight | None:
        weight, order = self.inner.packed(self._stored(name)), self._order(name)
        factor = self._factor(name)
        if weight is not None and order is not None:
            weight = weight.rows(order)
        if weight is None or factor == 1:
            return weight
        offsets = None if weight.offsets is None else weight.offsets.float() * factor
        return dataclasses.replace(weight, scales=weight.scales.float() * factor, offsets=offsets)

    def _stored(self, name: str) -> str:
        """Return the name of the tensor of `inner`: a tied LM head is its embedding."""
        tied = self.inner.config.tie_embeddings and not self.config.tie_embeddings
        return _EMBEDDING if name == _LM_HEAD and tied else name

    def _order(self, name: str) -> Tensor | None:
        """Return the order of a weight's rows, None where it stays."""
        n_head = self._heads.get(name.removesuffix(".weight").rpartition(".")[2])
        if n_head is None or self.shape(name)[0] % (2 * n_head):  # refused later for its shape
            return None
        return rope_order(self.shape(name)[0], n_head)

    def _multiplied(self, name: str, tensor: Tensor) -> Tensor:
        factor = self._factor(name)
        return tensor.float() * factor if factor != 1 and tensor.is_floating_point() else tensor

    def _factor(self, name: str) -> float:
        m = self.multipliers
        if m is None:
            return 1.0
        if name == _EMBEDDING:
            return m.embedding
        if name == "model.norm.weight":
            return 1 / m.logits
        if name.endswith("q_proj.weight"):
            return m.attention * self.config.head_dim**0.5
        return m.residual if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0


def rope_order(n_rows: int, n_head: int) -> Tensor:
    """Return the order [n_rows] in which rows in pairs are rows in halves."""
    paired = torch.arange(n_rows).view(n_head, n_rows // n_head // 2, 2)
    return paired.transpose(1, 2).reshape(n_rows)
