"""Keys and values in 8 bits: one scale for each KV head and token, after its values.

A row [E] of the cache becomes E int8 values and the fp32 scale, in E + 16 bytes: with rows of
another length the kernels could not load 16 bytes at once.

Shapes: T rows of a pass, G KV heads, group query heads of each, E head dim, S cache slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fasteagle import model
from fasteagle.config import ModelConfig

SPARE = 16  # bytes after the values of a row; the first four are its scale
_SCALE = 4
# Scale per unit of the largest value. It is a factor, because torch divides by a number differently
# on CUDA and on a CPU, and rows that the kernels write must have the bits of rows written here.
UNIT = 1 / 127


def quantized_rows(rows: Tensor) -> Tensor:
    """Return rows [..., E] as int8 [..., E + SPARE]: values rounded to nearest, at most 127."""
    scales = rows.abs().amax(-1, keepdim=True).float() * UNIT
    values = (rows.float() / scales.clamp(min=1e-30)).round().to(torch.int8)
    made = values.new_zeros(*values.shape[:-1], values.shape[-1] + SPARE)
    made[..., : values.shape[-1]] = values
    made[..., values.shape[-1] : values.shape[-1] + _SCALE] = scales.view(torch.int8)
    return made


def dense_rows(cache: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the rows [..., E] in `dtype`; a cache that is not int8 is returned unchanged."""
    if cache.dtype != torch.int8:
        return cache
    E = cache.shape[-1] - SPARE
    scales = cache[..., E : E + _SCALE].contiguous().view(torch.float32)
    return (cache[..., :E].float() * scales).to(dtype)


def write(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Write rows [G, T, E] into an int8 cache [G, S, E + SPARE], like `model.write`."""
    cache.index_copy_(1, slots, quantized_rows(rows))


def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, mask: Tensor) -> Tensor:
    """Compute `model.attend` over int8 caches or dense ones."""
    k, v = (dense_rows(cache[:, : mask.shape[1]], q.dtype) for cache in (k_cache, v_cache))
    return model.attend(q, k, v, mask)


OPS = model.Ops(attend=attend, write=write)


def core_target(target: model.Transformer, kv: str) -> model.Target:
    """Return a target as the core runs it, over caches in the format that `--kv` names."""
    if kv != "int8":
        return model.Target(target)
    return model.Target(target, OPS, torch.int8, SPARE, core_ops=OPS)


def cache_bytes(config: ModelConfig, n_slots: int, element_bytes: int, kv: str) -> int:
    """Return the bytes of a KV cache in the format that `--kv` names."""
    if kv != "int8":
        return config.kv_bytes(n_slots, element_bytes)
    return config.kv_bytes(n_slots, 1) * (config.head_dim + SPARE) // config.head_dim
