"""Counts what host code would launch: our kernels are replaced by ones that only say their name."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from fasteagle.compile import cuda_blocks, cuda_head
from fasteagle.compile.int8_cache import SPARE
from fasteagle.compile.kernels import block_kernels, draft_kernels, tree_kernels
from fasteagle.config import ModelConfig
from fasteagle.quant import kernels
from fasteagle.tree import TreeView

MODULES = (kernels, block_kernels, tree_kernels, draft_kernels)
GROUP = 128
META = torch.device("meta")


@contextlib.contextmanager
def counting(settings: list[tuple[str, dict[str, object]]] | None = None) -> Iterator[Counter[str]]:
    """Launches by kernel; what each was compiled for, constants and warps, goes to `settings`."""
    found: Counter[str] = Counter()
    listed = [] if settings is None else settings

    class Kernel:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid):
            assert all(size >= 1 for size in grid)

            def launch(*args: object, **options: object) -> None:
                found.update([self.name])
                listed.append((self.name, options))

            return launch

    with contextlib.ExitStack() as stack:
        for module in MODULES:
            for name in [name for name in vars(module) if name.endswith("_kernel")]:
                stack.enter_context(mock.patch.object(module, name, Kernel(name)))
        yield found


def block_launches(
    config: ModelConfig,
    T: int,
    n_blocks: int = 1,
    int8: bool = False,
    settings: list[tuple[str, dict[str, object]]] | None = None,
) -> Counter[str]:
    """Launches of int4 blocks over a tree of T rows; tensors are only shapes (device "meta")."""
    rows, view, caches, tensors, formats = _given(config, T, n_blocks, int8)
    x = torch.empty(T, config.dim, device=META)
    with counting(settings) as found:
        cuda_blocks.launch_blocks(x, rows, view, caches, tensors, formats, 1e-5, "fp16")
    return found


def head_launches(config: ModelConfig, T: int) -> Counter[str]:
    """Launches of an EAGLE-1/2 draft head's step over T rows, without its LM head."""
    rows, view, caches, tensors, formats = _given(config, T, 1)
    D = config.dim
    fc = [*_packed(D, 2 * D), torch.empty(D, device=META)]
    x = torch.empty(T, 2 * D, dtype=torch.float16, device=META)
    weights = tensors, formats, 1e-5, "fp16"
    fc_format = [2 * D, 4, GROUP, 0]
    with counting() as found:
        cuda_head.launch_head(
            x, None, rows, view, caches, weights, fc, fc_format, None, True, torch.bfloat16
        )
    return found


def _packed(N: int, K: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Planes and params of an int4 weight."""
    return (
        torch.empty(K // 4, N, dtype=torch.int16, device=META),
        torch.empty(K // GROUP, N, dtype=torch.int32, device=META),
    )


def _given(config: ModelConfig, T: int, n_blocks: int, int8: bool = False) -> tuple[Any, ...]:
    """What the launches are given: rows, view, caches, tensors, formats."""
    D, E, G, F = config.dim, config.head_dim, config.n_kv_head, config.ffn_dim
    shapes = [(config.qkv_dim, D), (D, config.n_head * E), (2 * F, D), (D, F)]
    qkv, out, gate_up, down = (_packed(N, K) for N, K in shapes)
    scale = torch.empty(D, dtype=torch.bfloat16, device=META)
    none = torch.empty(0, device=META)
    norm = torch.empty(E, device=META) if config.qk_norm else none
    tensors = [scale, *qkv, none, norm, norm, *out, scale, *gate_up, *down]
    formats = [number for _, K in shapes for number in (K, 4, GROUP, 0)]
    cache = torch.empty(G, 4096, E, dtype=torch.bfloat16, device=META)
    if int8:
        cache = torch.empty(G, 4096, E + SPARE, dtype=torch.int8, device=META)
    rope = torch.empty(T, 1, E, device=META)
    rows = torch.empty(T, dtype=torch.long, device=META)
    paths = torch.empty(T, T, dtype=torch.int32, device=META)
    view = TreeView(torch.empty((), dtype=torch.long, device=META), paths, rows)
    caches = [cache] * (2 * n_blocks)
    return (rope, rope, rows), view, caches, tensors * n_blocks, formats * n_blocks
