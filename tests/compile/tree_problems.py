"""Random trees over random keys as arguments of tree attention, and the result in plain PyTorch."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fasteagle.compile.int8_cache import quantized_rows
from fasteagle.compile.tree_attention import TreeView
from fasteagle.tree import ancestor_mask, tree_paths

NAN = float("nan")
TOLERANCE = {torch.float16: (2e-3, 1e-3), torch.bfloat16: (1.6e-2, 8e-3)}  # relative, absolute


class Problem(NamedTuple):
    """Arguments of `attend` for a tree of T rows after `seq_len` committed positions."""

    q: Tensor  # [G, group * T, E]
    k: Tensor  # [G, S, E]
    v: Tensor
    view: TreeView

    @property
    def group(self) -> int:
        return self.q.shape[1] // len(self.view.depths)

    @property
    def unused(self) -> float:
        """Value of all slots that no row may see; as bytes it makes scales of 8-bit rows NaN."""
        return NAN if self.k.is_floating_point() else -1

    def in_8_bits(self) -> Problem:
        k, v = (quantized_rows(torch.nan_to_num(rows)) for rows in (self.k, self.v))
        return self._replace(k=k, v=v)

    def run(self, function) -> Tensor:
        """Result [G, group, T, E] of a function with the op's arguments."""
        return function(self.q, self.k, self.v, *self.view).unflatten(1, (self.group, -1))

    def to(self, device: str) -> Problem:
        view = TreeView(*(t.to(device) for t in self.view[:3]), self.view.window)
        return Problem(self.q.to(device), self.k.to(device), self.v.to(device), view)

    def row(self, j: int) -> Problem:
        """Row j in plain decoding: its ancestors committed, nothing else in the cache."""
        seq_len, depth = int(self.view.seq_len), int(self.view.depths[j])
        path = self.view.paths[j, : depth + 1].long()
        source = torch.cat((torch.arange(seq_len), seq_len + path.cpu())).to(path.device)
        k, v = torch.full_like(self.k, self.unused), torch.full_like(self.v, self.unused)
        k[:, : len(source)], v[:, : len(source)] = self.k[:, source], self.v[:, source]
        q = self.q.unflatten(1, (self.group, -1))[:, :, j]
        zero = torch.zeros(1, dtype=torch.int64, device=k.device)
        view = TreeView(self.view.seq_len + depth, zero.int()[None], zero, self.view.window)
        return Problem(q, k, v, view)

    def rows(self, order: Tensor) -> Problem:
        """A tree of these rows alone, in this order; with a row come its ancestors."""
        seq_len = int(self.view.seq_len)
        k, v = self.k.clone(), self.v.clone()
        k[:, seq_len:], v[:, seq_len:] = self.unused, self.unused
        k[:, seq_len : seq_len + len(order)] = self.k[:, seq_len + order]
        v[:, seq_len : seq_len + len(order)] = self.v[:, seq_len + order]
        q = self.q.unflatten(1, (self.group, -1))[:, :, order].flatten(1, 2)
        renamed = torch.full((len(self.view.depths),), -1, dtype=torch.int32, device=k.device)
        renamed[order] = torch.arange(len(order), dtype=torch.int32, device=k.device)
        paths = renamed[self.view.paths[order].long() % len(renamed)]
        return Problem(q, k, v, self.view._replace(paths=paths, depths=self.view.depths[order]))


def by_kernels(q: Tensor, k: Tensor, v: Tensor, *view) -> Tensor:
    """The kernels with the op's arguments: on a CPU the op itself takes the reference."""
    from fasteagle.compile.kernels import tree_kernels  # needs Triton

    return tree_kernels.tree_attention(q, k, v, TreeView(*view))


def random_parents(T: int, seed: int, spread: int = 4) -> Tensor:
    """A tree of T rows, each the child of one of the `spread` rows before it; 1 makes a chain."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randint(1, spread + 1, (T,), generator=generator)
    return (torch.arange(T) - steps).clamp(min=0)


def problem(
    T: int,
    seq_len: int,
    *,
    E: int = 64,
    group: int = 1,
    G: int = 1,
    spread: int = 4,
    dtype: torch.dtype = torch.float16,
    window: int | None = None,
    n_slots: int | None = None,
) -> Problem:
    """A random tree over random keys. Slots after it hold NaN, the table's rest nonsense."""
    generator = torch.Generator().manual_seed(1000 * seq_len + T)
    n_slots = n_slots or seq_len + T + 5

    def normal(rows: int) -> Tensor:
        return torch.randn(G, rows, E, generator=generator).to(dtype)

    q, k, v = normal(group * T), normal(n_slots), normal(n_slots)
    k[:, seq_len + T :], v[:, seq_len + T :] = NAN, NAN
    parents = random_parents(T, seq_len, spread)
    tree_mask, depths = ancestor_mask(parents, torch.ones(T, dtype=torch.bool))
    P = int(depths.max()) + 2
    paths = tree_paths(tree_mask, depths, P - 1)
    paths[torch.arange(P) > depths[:, None]] = 10**6
    return Problem(q, k, v, TreeView(torch.tensor(seq_len), paths, depths, window))


def assert_close(result: Tensor, expected: Tensor) -> None:
    rtol, atol = TOLERANCE[result.dtype]
    torch.testing.assert_close(result, expected, rtol=rtol, atol=atol)


def sdpa(p: Problem) -> Tensor:
    """Return the result in fp32, [G, group, T, E]."""
    S, T = p.k.shape[1], len(p.view.depths)
    k, v = (torch.nan_to_num(cache).float()[:, None] for cache in (p.k, p.v))
    q = p.q.float().unflatten(1, (p.group, T))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=p.view.mask(S)).to(p.v.dtype)
