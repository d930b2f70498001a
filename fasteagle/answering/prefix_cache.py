"""Cache of keys and values of earlier conversations, so that follow-up questions compute little.

The engine has one sequence. Before it switches to another one, its rows are copied into this cache;
the stored sequence that shares most with the new prompt is copied back. The least recently used one
is dropped when the limit is reached.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from fasteagle.decoding.context import common_prefix
from fasteagle.generate import Engine
from fasteagle.model import KVCache

FEW_TOKENS = 32  # computing so many again costs no more than storing them


@dataclasses.dataclass
class _Kept:
    """Stored sequence: its tokens, how many the drafter has seen, its rows of every cache."""

    tokens: list[int]
    shown: int
    drafter: object
    rows: list[Tensor]  # [2 L, G, n, E] each: the target's, then the drafter's own

    @property
    def n_bytes(self) -> int:
        return sum(rows.numel() * rows.element_size() for rows in self.rows)


class PrefixCache:
    """Sequences of up to `limit` bytes on `device`; the one used last is at the end."""

    def __init__(self, limit: int, device: torch.device | str = "cpu") -> None:
        self.limit, self.device = limit, device
        self._kept: list[_Kept] = []

    @property
    def n_bytes(self) -> int:
        """Number of bytes in use."""
        return sum(entry.n_bytes for entry in self._kept)

    @torch.no_grad()
    def turn_to(self, engine: Engine, prompt: Sequence[int]) -> None:
        """Give the engine the sequence that shares most with `prompt`; store its present one."""
        if not self.limit:
            return
        shared = common_prefix(engine.cached, prompt)
        longest, most = None, shared + FEW_TOKENS
        for entry in self._kept:
            n = common_prefix(entry.tokens, prompt)
            # A drafter that has not seen those tokens would need them computed again.
            n = n if entry.drafter is engine.drafter else 0
            if n > most:
                longest, most = entry, n
        if len(engine.cached) > shared + FEW_TOKENS:
            self._keep(engine)
        if longest is not None:
            self._bring_back(engine, longest)

    def clear(self) -> None:
        self._kept.clear()

    def _keep(self, engine: Engine) -> None:
        """Store the engine's sequence, or as much of its beginning as the limit allows."""
        of_one = sum(cache.rows[:, :, :1].nbytes for cache in _caches(engine))
        n = min(len(engine.cached), self.limit // of_one)
        if n <= FEW_TOKENS:
            return
        tokens = engine.cached[:n]
        for entry in self._kept:
            if entry.drafter is engine.drafter and common_prefix(entry.tokens, tokens) == n:
                self._kept = [*(k for k in self._kept if k is not entry), entry]
                return
        # Stored beginnings of this sequence are part of it.
        self._kept = [
            entry for entry in self._kept if common_prefix(entry.tokens, tokens) < len(entry.tokens)
        ]
        while self.n_bytes + n * of_one > self.limit:
            self._kept.pop(0)
        rows = [cache.rows[:, :, :n].to(self.device, copy=True) for cache in _caches(engine)]
        self._kept.append(_Kept(tokens, min(engine.shown, n), engine.drafter, rows))

    def _bring_back(self, engine: Engine, entry: _Kept) -> None:
        engine.restart()
        n = len(entry.tokens)
        engine.reserve(n)
        for cache, rows in zip(_caches(engine), entry.rows, strict=True):
            cache.rows[:, :, :n].copy_(rows)
        engine.cached[:] = entry.tokens
        engine.shown = entry.shown
        if any(other is entry for other in self._kept):  # else dropped for lack of room
            self._kept = [*(other for other in self._kept if other is not entry), entry]


def _caches(engine: Engine) -> list[KVCache]:
    return [engine.cache, *(engine.drafter.caches if engine.drafter is not None else ())]
