"""A device that replays its steps, on the CPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fasteagle.compile.graphs import CapturedRunner
from fasteagle.decoding.backend import Backend


class NoHostReads(TorchDispatchMode):
    """Refuses what makes the host wait for a value or a size, and so forbids a capture."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        masks = args[1] if name in ("index", "index_put", "index_put_") else ()
        if name in self.WAITING or any(m is not None and m.dtype == torch.bool for m in masks):
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        return func(*args, **(kwargs or {}))


class FakeGraphs:
    """Stands for a device with graphs: keeps steps and runs them again; may refuse."""

    warm_ups = 2  # runs of a step before it is captured

    def __init__(self) -> None:
        self.captured = 0
        self.failing = False
        self.watching: Callable[[], AbstractContextManager] = NoHostReads

    def capture(self, step, restore):
        for _ in range(self.warm_ups):
            with self.watching(), mock.patch("fasteagle.sampling._may_look", lambda x: False):
                step()
            restore()
        if self.failing:
            raise RuntimeError("operation not permitted\nmore about it")
        self.captured += 1
        return step

    def place(self, result):
        return FakePlace()

    def synchronize(self) -> None:
        pass

    def milliseconds(self, replay) -> float:
        replay()
        return 1.0


class Allocating(TorchDispatchMode):
    """Notes the tensors whose memory operations allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.made = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        before = {id_of(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for made in tree_leaves(out):
            if isinstance(made, torch.Tensor) and id_of(made) not in before:
                self.made.add(made)
        return out


def id_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class PooledGraphs(FakeGraphs):
    """Graphs that overwrite what later ones of their pool have allocated, as they may on CUDA.

    Memory that a graph frees in its capture is given to the graphs that are captured after it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.watching = nullcontext
        self.allocated: list[Allocating] = []
        self.overwritten = 0

    def capture(self, step, restore):
        super().capture(step, restore)
        own, number = Allocating(), len(self.allocated)
        self.allocated.append(own)

        def replay() -> None:
            for later in self.allocated[number + 1 :]:
                for tensor in later.made:
                    tensor.fill_(True if tensor.dtype == torch.bool else -1)
                    self.overwritten += 1
            own.made.clear()
            with own:
                step()

        return replay


class FakePlace:
    """A copy made at once, which another cycle does not change."""

    def fill(self, result) -> None:
        self._copy = result.tolist()

    def read(self) -> list[int]:
        return self._copy


class CountingRunner(CapturedRunner):
    """A captured runner that counts what it replays."""

    def __init__(self, backend, state, graphs) -> None:
        super().__init__(backend, state, graphs)
        self.graphs = graphs
        self.graphs.watching = self._watching
        self.replays = 0

    def _watching(self) -> AbstractContextManager:
        return nullcontext() if self.compiled else NoHostReads()  # where nothing compiled runs

    def launch(self, spec, drafter, processor=None) -> None:
        key = self._key(spec, drafter, processor is not None)
        self.replays += self._replays.get(key) is not None
        super().launch(spec, drafter, processor)


class ReplayingBackend(Backend):
    """A backend whose engines replay, as those of CUDA do."""

    def runner(self, state) -> CountingRunner:
        return CountingRunner(self, state, FakeGraphs())
