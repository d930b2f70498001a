"""Weights of Granite models with the multipliers of their config inside, so that no pass has any.

embedding * m       the embedding, and then a tied LM head is a table of its own
attention           the query rows: scores are divided by sqrt(head_dim) in every model
residual            the last linears of attention and MLP
logits / m          the final norm, so that features are the LM head's input in every model
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from fasteagle.config import Multipliers
from fasteagle.loading.tensors import Checkpoint
from fasteagle.loading.wrapped import WrappedCheckpoint
from fasteagle.quant.packed import PackedWeight

_EMBEDDING, _LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"


class MultipliedCheckpoint(WrappedCheckpoint):
    """Checkpoint whose tensors are those of `inner`, multiplied in fp32.

    Packed weights have their scales and offsets multiplied, which is as exact.
    """

    def __init__(self, inner: Checkpoint, multipliers: Multipliers) -> None:
        super().__init__(inner)
        self.multipliers = multipliers
        self.config = dataclasses.replace(inner.config, tie_embeddings=False)

    def names(self) -> set[str]:
        names = self.inner.names()
        return {name for name in names | {_LM_HEAD} if self._stored(name) in names}

    def shape(self, name: str) -> tuple[int, ...]:
        return self.inner.shape(self._stored(name))

    def load(self, name: str) -> Tensor:
        return self._multiplied(name, self.inner.load(self._stored(name)))

    def start(self, name: str, n: int) -> Tensor:
        return self._multiplied(name, self.inner.start(self._stored(name), n))

    def bits(self, name: str) -> int | None:
        return self.inner.bits(self._stored(name))

    def columns(self, name: str) -> Tensor | None:
        return self.inner.columns(self._stored(name))

    def packed(self, name: str) -> PackedWeight | None:
        weight, factor = self.inner.packed(self._stored(name)), self._factor(name)
        if weight is None or factor == 1:
            return weight
        offsets = None if weight.offsets is None else weight.offsets.float() * factor
        return dataclasses.replace(weight, scales=weight.scales.float() * factor, offsets=offsets)

    def _multiplied(self, name: str, tensor: Tensor) -> Tensor:
        factor = self._factor(name)
        return tensor.float() * factor if factor != 1 and tensor.is_floating_point() else tensor

    def _stored(self, name: str) -> str:
        """Return the name of the tensor of `inner`: a tied LM head is its embedding."""
        return _EMBEDDING if name == _LM_HEAD and self.inner.config.tie_embeddings else name

    def _factor(self, name: str) -> float:
        m = self.multipliers
        if name == _EMBEDDING:
            return m.embedding
        if name == "model.norm.weight":
            return 1 / m.logits
        if name.endswith("q_proj.weight"):
            return m.attention * self.config.head_dim**0.5
        return m.residual if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
