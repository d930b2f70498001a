"""Drawing tokens from target logits, reproducibly and without state.

A token is `argmax(processed logits + Gumbel noise)`. The noise is a hash of (seed, position, token
id), so a draw depends on nothing else: not on the device, not on how many rows are drawn at once,
not on whether the row was reached by plain or by speculative decoding.

Shapes: T rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fasteagle.options import SamplingParams

NEG_INF = float("-inf")
BAD_ROW = -1  # what `draw` yields for a row whose logits are not finite


def draw(
    logits: Tensor,
    positions: Tensor,
    params: SamplingParams,
    seen: Tensor | None = None,
    depths: Tensor | None = None,
) -> Tensor:
    """One token per row [T] from logits [T, V]; `BAD_ROW` where a row has no finite maximum.

    `positions` [P] are the positions of the tokens being drawn; row t draws at number `depths[t]`
    of them, or at number t. `seen` [T, V] (bool) marks the tokens that the repetition penalty
    applies to; None where it is off.
    """
    scores = process_logits(logits.float(), params, seen)
    if not params.greedy:
        # A NaN or +inf logit must stay visible: only finite scores and -inf take noise.
        tokens = torch.arange(logits.shape[-1], device=logits.device)
        noise = gumbel_noise(params.seed, positions, tokens)
        scores = scores + (noise if depths is None else noise[depths])
    best, drawn = scores.max(dim=-1)
    return torch.where(best.isfinite(), drawn, BAD_ROW)


def process_logits(logits: Tensor, params: SamplingParams, seen: Tensor | None = None) -> Tensor:
    """Apply, in the order of transformers: penalty, temperature, top-k, top-p, min-p. [T, V]."""
    if params.repetition_penalty != 1 and seen is not None:
        p = params.repetition_penalty
        logits = torch.where(seen, torch.where(logits < 0, logits * p, logits / p), logits)
    if params.greedy:
        return logits
    logits = logits / params.temperature
    if 0 < params.top_k < logits.shape[-1]:
        kth = logits.topk(params.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, NEG_INF)
    if params.top_p < 1:
        probs = logits.softmax(-1)
        logits = logits.masked_fill(probs < top_p_threshold(probs, params.top_p), NEG_INF)
    if params.min_p > 0:
        probs = logits.softmax(-1)
        logits = logits.masked_fill(probs < params.min_p * probs.amax(-1, True), NEG_INF)
    return logits


def top_p_threshold(probs: Tensor, top_p: float, n_likely: int = 256) -> Tensor:
    """Smallest probability [T, 1] that the nucleus of mass `top_p` keeps; ties are kept together.

    A token stays if the mass of strictly likelier tokens is below `top_p`. Nearly always the
    `n_likely` likeliest decide; on the CPU the search among all is left out where they do.
    """
    likely = probs.topk(min(n_likely, probs.shape[-1]), dim=-1).values  # descending
    mass = likely.cumsum(-1)
    # The last one kept is the first at which the mass reaches top_p.
    last = (mass < top_p).sum(-1, keepdim=True)
    found = last < likely.shape[-1]
    among_likely = likely.gather(1, last.clamp(max=likely.shape[-1] - 1))
    if probs.device.type == "cpu" and found.all():
        return among_likely
    # Row by row, so that no row's answer depends on which others are drawn with it.
    return torch.where(found, among_likely, _search_threshold(probs, top_p))


def _search_threshold(probs: Tensor, top_p: float) -> Tensor:
    """The threshold among all tokens, without a sort.

    The mass above it falls as it rises, and non-negative floats sort like their bit patterns, so
    that 31 halvings of the pattern find it exactly.
    """
    low = torch.full_like(probs[:, :1], -1, dtype=torch.int32)  # here the mass is still >= top_p
    high = probs.amax(-1, keepdim=True).view(torch.int32)  # here it is 0
    for _ in range(31):
        middle = low + (high - low) // 2
        mass = torch.where(probs > middle.clamp(min=0).view(torch.float32), probs, 0).sum(-1, True)
        inside = (mass < top_p) & (middle >= 0)
        high, low = torch.where(inside, middle, high), torch.where(inside, low, middle)
    return high.view(torch.float32)


def gumbel_noise(seed: int, positions: Tensor, tokens: Tensor) -> Tensor:
    """Standard Gumbel noise [T, V] in fp32, a pure function of (seed, position, token id).

    `positions` [T], `tokens` [V]: the token ids to make noise for.

    With a 32-bit hash h, `v = (h + 0.5) 2^-32` and `g = -log(-log1p(-v))`: the upper tail, which
    decides a maximum over a large vocabulary, keeps all 32 bits (a 24-bit uniform would clip it).
    """
    first = _mix(_low32(positions) ^ _signed(seed))
    second = _mix(first ^ _mix(_low32(positions) + _signed((seed >> 32) + 0x9E3779B9)))
    hashed = _mix(_mix(_low32(tokens) + first.unsqueeze(1)) ^ second.unsqueeze(1))
    # fp32 rounds the last few v to 1, whose noise would be -inf and would win over nothing.
    unsigned = hashed.long() & 0xFFFFFFFF
    v = ((unsigned.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-v))


def _mix(x: Tensor) -> Tensor:
    """Bijective 32-bit mixer (constants: C. Wellons' `lowbias32` search).

    On int32, whose products wrap around; its right shifts bring sign bits in, masked off here.
    """
    x = (x ^ ((x >> 16) & 0xFFFF)) * _signed(0x7FEB352D)
    x = (x ^ ((x >> 15) & 0x1FFFF)) * _signed(0x846CA68B)
    return x ^ ((x >> 16) & 0xFFFF)


def _low32(x: Tensor) -> Tensor:
    return x.to(torch.int32)


def _signed(n: int) -> int:
    """The int32 with the low 32 bits of n."""
    return ((n & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000
