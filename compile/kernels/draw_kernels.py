"""Triton kernels that sample a token for each row, in two launches.

Reference in torch: `sampling.draw`, whose noise this is.

Shapes: T rows, V vocabulary, C chunks of a row.
"""

# mypy: disallow-untyped-defs=False
# (what Triton compiles has no Python types)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from fasteagle.sampling import BAD_ROW

CHUNK = 2048  # logits per program
OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}
ONE_WARP = OPTIONS | {"num_warps": 1}


def draw(
    logits: Tensor, positions: Tensor, seed: Tensor, temperature: Tensor, noisy: bool, scaled: bool
) -> Tensor:
    """Return the token of each row [T] of logits [T, V]; `BAD_ROW` without a finite maximum.

    With `noisy` row t takes the noise of its position [T] and of `seed` (0-d); with `scaled` its
    logits are divided by `temperature` (0-d) before.
    """
    T, V = logits.shape
    C = triton.cdiv(V, CHUNK)
    best = torch.empty(T, C, dtype=torch.float32, device=logits.device)
    ids = torch.empty(T, C, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(T, dtype=torch.int64, device=logits.device)
    draw_kernel[(T, C)](
        logits,
        positions,
        seed,
        temperature,
        best,
        ids,
        V,
        logits.stride(0),
        NOISY=noisy,
        SCALED=scaled,
        CHUNK=CHUNK,
        **OPTIONS,
    )
    last_kernel[(T,)](
        best, ids, tokens, C, C_PAD=triton.next_power_of_2(C), BAD_ROW=BAD_ROW, **ONE_WARP
    )
    return tokens


@triton.jit
def _mix(x):
    """Mix 32 bits bijectively; see `sampling._mix`."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _noise(seed, position, tokens):
    """Return Gumbel noise in fp32; see `sampling.gumbel_noise`."""
    place = position.to(tl.uint32)
    first = _mix(place ^ seed.to(tl.uint32))
    second = _mix(first ^ _mix(place + ((seed >> 32) + 0x9E3779B9).to(tl.uint32)))
    hashed = _mix(_mix(tokens.to(tl.uint32) + first) ^ second)
    v = (hashed.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    v = tl.minimum(v, 0.9999999403953552)  # 1 - 2^-24: at 1 the noise would be -inf
    return -libdevice.log(-libdevice.log1p(-v))


@triton.jit
def draw_kernel(
    logits_ptr,
    positions_ptr,
    seed_ptr,
    temperature_ptr,
    best_ptr,
    ids_ptr,
    V,
    stride,
    NOISY: tl.constexpr,
    SCALED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Compute the best token of a chunk of a row, the first one of equals; NaN counts as inf."""
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    v = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + row * stride + v, mask=v < V, other=float("-inf")).to(tl.float32)
    if SCALED:
        x = tl.div_rn(x, tl.load(temperature_ptr))
    if NOISY:
        x += _noise(tl.load(seed_ptr), tl.load(positions_ptr + row), v)
    x = tl.where(x == x, x, float("inf"))
    at = row * tl.num_programs(1) + chunk
    tl.store(best_ptr + at, tl.max(x, 0))
    tl.store(ids_ptr + at, chunk * CHUNK + tl.argmax(x, 0, tie_break_left=True))


@triton.jit
def last_kernel(best_ptr, ids_ptr, tokens_ptr, C, C_PAD: tl.constexpr, BAD_ROW: tl.constexpr):
    """Take the best of a row's chunks, which ascend in id."""
    row = tl.program_id(0)
    c = tl.arange(0, C_PAD)
    x = tl.load(best_ptr + row * C + c, mask=c < C, other=float("-inf"))
    peak = tl.max(x, 0)
    token = tl.load(ids_ptr + row * C + tl.argmax(x, 0, tie_break_left=True))
    bad = (peak == float("inf")) | (peak == float("-inf"))
    tl.store(tokens_ptr + row, tl.where(bad, BAD_ROW, token).to(tl.int64))
