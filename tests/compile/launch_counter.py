"""Counts what host code would launch: our kernels are replaced by ones that only say their name."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from unittest import mock

import torch

from fasteagle.compile import block_kernels, cuda_blocks, draft_kernels, tree_kernels
from fasteagle.config import ModelConfig
from fasteagle.quant import kernels
from fasteagle.tree import TreeView

MODULES = (kernels, block_kernels, tree_kernels, draft_kernels)
GROUP = 128


@contextlib.contextmanager
def counting() -> Iterator[Counter[str]]:
    found: Counter[str] = Counter()

    class Kernel:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid):
            assert all(size >= 1 for size in grid)
            return lambda *args, **options: found.update([self.name])

    with contextlib.ExitStack() as stack:
        for module in MODULES:
            for name in [name for name in vars(module) if name.endswith("_kernel")]:
                stack.enter_context(mock.patch.object(module, name, Kernel(name)))
        yield found


def block_launches(config: ModelConfig, T: int, n_blocks: int = 1) -> Counter[str]:
    """Launches of int4 blocks over a tree of T rows; tensors are only shapes (device "meta")."""
    meta = torch.device("meta")
    D, E, G, F = config.dim, config.head_dim, config.n_kv_head, config.ffn_dim
    shapes = [(config.qkv_dim, D), (D, config.n_head * E), (2 * F, D), (D, F)]
    pairs = [
        (
            torch.empty(K // 4, N, dtype=torch.int16, device=meta),
            torch.empty(K // GROUP, N, dtype=torch.int32, device=meta),
        )
        for N, K in shapes
    ]
    scale, none = torch.empty(D, device=meta), torch.empty(0, device=meta)
    norm = torch.empty(E, device=meta) if config.qk_norm else none
    qkv, out, gate_up, down = pairs
    tensors = [scale, *qkv, none, norm, norm, *out, scale, *gate_up, *down]
    formats = [number for _, K in shapes for number in (K, 4, GROUP, 0)]
    cache = torch.empty(G, 4096, E, dtype=torch.bfloat16, device=meta)
    rope = torch.empty(T, 1, E, device=meta)
    rows = torch.empty(T, dtype=torch.long, device=meta)
    paths = torch.empty(T, T, dtype=torch.int32, device=meta)
    view = TreeView(torch.empty((), dtype=torch.long, device=meta), paths, rows)
    with counting() as found:
        cuda_blocks.launch_blocks(
            torch.empty(T, D, device=meta),
            (rope, rope, rows),
            view,
            [cache] * (2 * n_blocks),
            tensors * n_blocks,
            formats * n_blocks,
            1e-5,
            "fp16",
            None,
        )
    return found
