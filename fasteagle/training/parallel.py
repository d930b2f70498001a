"""Training by several processes at once (`torchrun`): each takes a share of every batch.

Gradients and counts are summed, so that the result is that of one process, but for rounding.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
LONGEST_WAIT = datetime.timedelta(days=7)  # the others wait while the first one writes text


class Ranks:
    """Processes of a run; one alone needs no process group."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    @property
    def is_first(self) -> bool:
        """Return whether this process writes files and prints progress."""
        return self.rank == 0

    def share(self, parts: list[T]) -> list[T]:
        """Return this process' share of a batch or other work; may be empty."""
        return parts[self.rank :: self.size]

    def sum_(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by its sum over all processes."""
        if self.size > 1:
            for tensor in tensors:
                dist.all_reduce(tensor)

    @contextlib.contextmanager
    def first_alone(self) -> Iterator[None]:
        """Let the first process go through, then all others."""
        if not self.is_first:
            self.wait()
        yield
        if self.is_first:
            self.wait()

    def wait(self) -> None:
        """Wait until all processes are here."""
        if self.size > 1:
            dist.barrier()


ALONE = Ranks()


def join() -> Ranks:
    """Return the processes that `torchrun` has started, else this one alone."""
    if not dist.is_torchelastic_launched():
        return ALONE
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=LONGEST_WAIT)
    return Ranks(dist.get_rank(), dist.get_world_size())


def local_device() -> str | None:
    """Return the GPU of this process among those that `torchrun` has started; None without one."""
    if "LOCAL_RANK" not in os.environ or not torch.cuda.is_available():
        return None
    return f"cuda:{os.environ['LOCAL_RANK']}"
