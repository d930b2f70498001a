"""Checkpoint that passes on what another one holds; subclasses change some of it."""

from __future__ import annotations

from torch import Tensor

from fasteagle.loading.tensors import Checkpoint
from fasteagle.quant.packed import PackedWeight
from fasteagle.quant.scheme import Scheme


class WrappedCheckpoint(Checkpoint):
    """Checkpoint with the tensors of `inner`."""

    def __init__(self, inner: Checkpoint) -> None:
        self.inner, self.config = inner, inner.config
        self.files, self.scheme = inner.files, inner.scheme

    @property
    def own_scheme(self) -> Scheme | None:
        return self.inner.own_scheme if self.scheme is None else self.scheme

    @property
    def widened(self) -> list[str]:
        return self.inner.widened

    def names(self) -> set[str]:
        return self.inner.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.inner.shape(name)

    def load(self, name: str) -> Tensor:
        return self.inner.load(name)

    def start(self, name: str, n: int) -> Tensor:
        return self.inner.start(name, n)

    def bits(self, name: str) -> int | None:
        return self.inner.bits(name)

    def columns(self, name: str) -> Tensor | None:
        return self.inner.columns(name)

    def packed(self, name: str) -> PackedWeight | None:
        return self.inner.packed(name)
