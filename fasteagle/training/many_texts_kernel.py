"""Attention of one row of each of many texts, over the slots that the text has filled.

Shapes: B texts, G KV heads, E head dim, S cache slots of a text.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

KEYS = 64  # of a step
ROWS = 16  # least rows of a product on tensor cores


@triton.jit
def prefixes_kernel(  # type: ignore[no-untyped-def]
    q_at, k_at, v_at, last_at, out_at, scale, B, G, S, group, ROWS: tl.constexpr, E: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    b, g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, column = tl.arange(0, ROWS), tl.arange(0, E)
    places = ((g * group + row[:, None]) * B + b) * E + column[None, :]
    is_row = (row < group)[:, None]
    q = tl.load(q_at + places, mask=is_row, other=0.0)
    last = tl.load(last_at + b)
    begin = (b * G + g) * S
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    y = tl.zeros([ROWS, E], tl.float32)
    for first in range(0, last + 1, KEYS):
        slot = first + tl.arange(0, KEYS)
        is_seen = slot <= last
        offsets = (begin + slot[:, None]) * E + column[None, :]
        k = tl.load(k_at + offsets, mask=is_seen[:, None], other=0.0)
        v = tl.load(v_at + offsets, mask=is_seen[:, None], other=0.0)
        scores = tl.where(is_seen[None, :], tl.dot(q, tl.trans(k)) * scale, float("-inf"))
        top = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp(scores - top[:, None])
        shrunk = tl.exp(best - top)
        total = total * shrunk + tl.sum(weights, 1)
        y = y * shrunk[:, None] + tl.dot(weights.to(v.dtype), v)
        best = top
    y = y / total[:, None]
    tl.store(out_at + places, y.to(out_at.dtype.element_ty), mask=is_row)


def attend_prefixes(q: Tensor, k_cache: Tensor, v_cache: Tensor, last: Tensor) -> Tensor:
    """Return `many_texts.attend` [G, group * B, E] for E that is a power of two, 16 or more."""
    B, G, S, E = k_cache.shape
    q, out, group = q.contiguous(), torch.empty_like(q), q.shape[1] // B
    rows = max(ROWS, triton.next_power_of_2(group))
    prefixes_kernel[(B, G)](
        q, k_cache, v_cache, last, out, 1 / math.sqrt(E), B, G, S, group, rows, E, KEYS,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out
