"""Cache of keys and values of earlier conversations, so that follow-up questions compute little.

An engine has one sequence. Before it switches to another one, its rows are copied into this cache;
the sequence that shares most with the new prompt is copied back, from here or from an engine that
has it now. The least recently used one is dropped when the limit is reached.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from fasteagle.decoding.context import FEW_TOKENS, common_prefix
from fasteagle.generate import Engine


@dataclasses.dataclass
class _Sequence:
    """Sequence: its tokens, what the drafter knows of them, its rows of every cache."""

    tokens: list[int]
    shown: int
    kept: list[Tensor]  # see `Context`
    reusable: int  # of the tokens
    drafter: object
    rows: list[Tensor]  # [2 L, G, n, E] each: the target's, then the drafter's own

    @classmethod
    def of(cls, engine: Engine, most: int) -> _Sequence:
        """Return up to `most` first tokens of the engine's sequence, with views of its rows."""
        slots = [cache.n_slots for cache in engine.caches]  # few where the drafter is a new one
        n = min(most, len(engine.cached), *slots)
        rows = [cache.rows[:, :, :n] for cache in engine.caches]
        kept, missing = [], max(0, n - engine.shown)
        for features in engine.kept:
            kept.append(features[:missing])
            missing -= len(kept[-1])
        own = engine.shown, kept, min(n, engine.reusable), engine.origin
        return cls(engine.cached[:n], *own, rows)

    @property
    def n_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.kept, *self.rows))


class PrefixCache:
    """Sequences of up to `limit` bytes on `device`; the one used last is at the end."""

    def __init__(self, limit: int, device: torch.device | str = "cpu") -> None:
        self.limit, self.device = limit, device
        self._stored: list[_Sequence] = []

    @property
    def n_bytes(self) -> int:
        """Number of bytes in use."""
        return sum(entry.n_bytes for entry in self._stored)

    def clear(self) -> None:
        """Drop all sequences."""
        self._stored.clear()

    @torch.no_grad()
    def turn_to(self, engine: Engine, prompt: Sequence[int], others: Sequence[Engine] = ()) -> None:
        """Give the engine the sequence that shares most with `prompt`; store its present one.

        `others` are engines with sequences of their own, whose beginnings may be copied; `engine`
        may be one of them.
        """
        shared = common_prefix(engine.cached, prompt)
        longest, n_copied, most = None, 0, min(shared, engine.reusable) + FEW_TOKENS
        for entry in [*self._stored, *(_Sequence.of(other, len(prompt)) for other in others)]:
            # A drafter that has not seen those tokens would need them computed again.
            reusable = entry.reusable if entry.drafter is engine.origin else 0
            n = common_prefix(entry.tokens, prompt)
            if min(n, reusable) > most:
                longest, n_copied, most = entry, n, min(n, reusable)
        if len(engine.cached) > shared + FEW_TOKENS:
            self._keep(engine)
        if longest is not None:
            rows = [rows[:, :, :n_copied] for rows in longest.rows]
            kept = [features.to(engine.device) for features in longest.kept]
            engine.take(longest.tokens[:n_copied], longest.shown, kept, rows)
            if any(other is longest for other in self._stored):  # else of an engine, or dropped
                self._stored = [*(one for one in self._stored if one is not longest), longest]

    def _keep(self, engine: Engine) -> None:
        """Store the engine's sequence, or as much of its beginning as the limit allows."""
        own = _Sequence.of(engine, self.limit // engine.slot_bytes)
        while own.n_bytes > self.limit:  # with features
            own = _Sequence.of(engine, len(own.tokens) * self.limit // own.n_bytes)
        tokens = own.tokens
        if (n := len(tokens)) <= FEW_TOKENS:
            return
        for entry in self._stored:
            holds = entry.reusable >= own.reusable and common_prefix(entry.tokens, tokens) == n
            if entry.drafter is own.drafter and holds:
                self._stored = [*(k for k in self._stored if k is not entry), entry]
                return
        # Stored beginnings of this sequence are part of it.
        self._stored = [
            one
            for one in self._stored
            if common_prefix(one.tokens, tokens) < len(one.tokens) or one.reusable > own.reusable
        ]
        while self.n_bytes + own.n_bytes > self.limit:
            self._stored.pop(0)
        own.kept = [features.to(self.device, copy=True) for features in own.kept]
        own.rows = [rows.to(self.device, copy=True) for rows in own.rows]
        self._stored.append(own)
