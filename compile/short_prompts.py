"""Captured passes over the few rows of a short prompt, or of the end of a longer one.

Kernel by kernel, the host launches such a pass in 30 ms where its kernels take 5 (7B on an H200).

Shapes: T rows of a prompt's part, D model dim, R auxiliary layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fasteagle.compile.cuda_pass import at_least, send
from fasteagle.compile.split_cycles import SharedRuns
from fasteagle.decoding.backend import Backend
from fasteagle.decoding.launch import Capture
from fasteagle.state import DecodeState
from fasteagle.tree import TreeView

ROWS = (16, 32, 64)  # of a pass, padding included


class Part(NamedTuple):
    """Part of a prompt: its token ids, and the number of cached rows before it."""

    ids: Sequence[int]
    begin: int


class Shape(NamedTuple):
    """Constants of a pass; all else is read on the device."""

    rows: int
    aux_layers: tuple[int, ...]


Encoded = tuple[Tensor, Tensor | None]  # see `Target.encode`


class ShortPass:
    """Pass over up to a number of rows; those past a part's last one repeat its token.

    They write to slots past the text, which nothing reads.
    """

    def __init__(self, backend: Backend, state: DecodeState, shape: Shape) -> None:
        n, self._aux_layers = shape
        self._target, self._cache = backend.target, state.cache
        self._inputs = torch.zeros(1, n + 1, dtype=torch.int64, device=state.root.device)
        self._tokens, begin = self._inputs[0, :n], self._inputs[0, n]
        self._view = TreeView.of_chain(begin, n, self._target.config.sliding_window)

    def load(self, part: Part) -> None:
        """Let the next run have this part."""
        padding = [part.ids[-1]] * (len(self._tokens) - len(part.ids))
        send([[*part.ids, *padding, part.begin]], self._inputs)

    def compute(self) -> Encoded:
        """Run the pass over the part that is loaded; return the result of all its rows."""
        rows = self._view.seq_len + self._view.depths
        own = self._tokens, rows, rows, self._view
        return self._target.encode(*own, self._cache, self._aux_layers)


class ShortPasses:
    """Passes over parts of up to the last of `ROWS`, captured once for each number of rows."""

    def __init__(self, backend: Backend, state: DecodeState, capture: Capture) -> None:
        """Let passes run by `backend` over the cache of `state`; `capture` captures a step."""
        self._runs: SharedRuns[Shape, Part, Encoded] = SharedRuns(
            lambda shape, part: ShortPass(backend, state, shape)
        )
        self._capture = capture

    def __call__(self, ids: Sequence[int], begin: int, aux_layers: tuple[int, ...]) -> Encoded:
        """Return features [T, D] and auxiliary states [T, R D] of `ids` after `begin` rows.

        A row has the bits of any pass of up to 64 rows.
        """
        shape = Shape(at_least(len(ids), ROWS), aux_layers)
        normed, aux_states = self._runs(shape, Part(ids, begin), self._capture)
        T = len(ids)
        return normed[:T].clone(), None if aux_states is None else aux_states[:T].clone()
