"""Sampling of tokens from the target's logits, reproducible and stateless.

A token is `argmax(processed logits + Gumbel noise)`. The noise is a hash of (seed, position, token
id), so it depends on nothing else: not on the device, not on how many rows are sampled at once,
not on whether plain or speculative decoding reached the row.

Shapes: T rows, V vocabulary.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from fasteagle.options import SamplingParams

NEG_INF = float("-inf")
TOP_K_SIZES = (64, 1024)  # variants of top-k; larger values sort the whole vocabulary
# Units of a weight of 1 in sums over the vocabulary. Sums of integers have no order: floats would
# be added up in one that depends on the device, on its compiler, and on the rows of a pass.
UNITS = 2.0**40
BAD_ROW = -1  # result of `draw` for a row whose logits are not finite


@dataclasses.dataclass(frozen=True)
class SamplingMode:
    """Active steps of sampling; their values are `SamplingTensors` on the device.

    One compiled or captured variant of the cycle serves all values of one mode.
    """

    greedy: bool = True
    top_k: int = 0  # the largest top-k of this mode; 0: off
    top_p: bool = False
    min_p: bool = False
    penalty: bool = False

    @classmethod
    def of(cls, params: SamplingParams, vocab_size: int) -> SamplingMode:
        penalty = params.repetition_penalty != 1
        if params.greedy:
            return cls(penalty=penalty)
        largest = 0
        if 0 < params.top_k < vocab_size:
            largest = next((n for n in TOP_K_SIZES if params.top_k <= n), vocab_size)
        return cls(
            False, min(largest, vocab_size), params.top_p < 1, params.min_p > 0, penalty=penalty
        )

    @property
    def filtered(self) -> bool:
        """Return whether tokens are excluded before one is sampled."""
        return self.top_k > 0 or self.top_p or self.min_p


class SamplingTensors:
    """Values of `SamplingParams` as 0-d tensors at fixed addresses."""

    def __init__(self, device: torch.device | str) -> None:
        self.seed = torch.zeros((), dtype=torch.long, device=device)
        self.top_k = torch.zeros((), dtype=torch.long, device=device)
        self.temperature = torch.zeros((), device=device)
        self.top_p = torch.zeros((), device=device)
        self.min_p = torch.zeros((), device=device)
        self.penalty = torch.zeros((), device=device)

    @classmethod
    def of(cls, params: SamplingParams, device: torch.device | str = "cpu") -> SamplingTensors:
        sampling = cls(device)
        sampling.load(params)
        return sampling

    def load(self, params: SamplingParams) -> None:
        self.seed.fill_(params.seed)
        self.top_k.fill_(params.top_k)
        self.temperature.fill_(params.temperature)
        self.top_p.fill_(params.top_p)
        self.min_p.fill_(params.min_p)
        self.penalty.fill_(params.repetition_penalty)


def draw(
    logits: Tensor,
    positions: Tensor,
    kind: SamplingMode,
    sampling: SamplingTensors,
    seen: Tensor | None = None,
    depths: Tensor | None = None,
) -> Tensor:
    """Sample one token per row [T] from logits [T, V]; `BAD_ROW` without a finite maximum.

    `positions` [P] are the positions of the sampled tokens; row t samples at number `depths[t]` of
    them, without `depths` at number t. `seen` [T, V] (bool) marks the tokens that the repetition
    penalty applies to; None where it is off.
    """
    scores = process_logits(logits.float(), kind, sampling, seen)
    if not kind.greedy:
        # A NaN or +inf logit must stay visible: only finite scores and -inf take noise.
        tokens = torch.arange(logits.shape[-1], device=logits.device)
        noise = gumbel_noise(sampling.seed, positions, tokens)
        scores = scores + (noise if depths is None else noise[depths])
    best, drawn = scores.max(dim=-1)
    return torch.where(best.isfinite(), drawn, BAD_ROW)


def process_logits(
    logits: Tensor, kind: SamplingMode, sampling: SamplingTensors, seen: Tensor | None = None
) -> Tensor:
    """Apply penalty, temperature, top-k, top-p, min-p to [T, V], in the order of transformers."""
    if kind.penalty and seen is not None:
        p = sampling.penalty
        logits = torch.where(seen, torch.where(logits < 0, logits * p, logits / p), logits)
    if kind.greedy:
        return logits
    logits = logits / sampling.temperature
    if kind.top_k:
        best = logits.topk(kind.top_k, dim=-1).values
        kth = best.index_select(-1, (sampling.top_k - 1).unsqueeze(0))
        logits = logits.masked_fill(logits < kth, NEG_INF)
    if kind.top_p:
        weights = _weights(logits)
        logits = logits.masked_fill(weights < top_p_threshold(weights, sampling.top_p), NEG_INF)
    if kind.min_p:
        logits = logits.masked_fill(_weights(logits) < sampling.min_p, NEG_INF)
    return logits


def _weights(logits: Tensor) -> Tensor:
    """Return the probabilities [T, V] over the largest one of their row."""
    return torch.exp(logits - logits.amax(-1, keepdim=True))


def top_p_threshold(weights: Tensor, top_p: Tensor, n_likely: int = 256) -> Tensor:
    """Return the smallest weight [T, 1] in the nucleus of a share `top_p` of all, ties included.

    Weights [T, V] are at most 1 and need no normalizer. A token stays if the mass of strictly
    likelier tokens is below that share. Nearly always the `n_likely` likeliest decide; then the CPU
    does not search among all tokens.
    """
    units = (weights * UNITS).long()
    share = (units.sum(-1, keepdim=True).double() * top_p.double()).ceil().long()
    if _may_look(weights):
        likely = weights.topk(min(n_likely, weights.shape[-1]), dim=-1).values  # descending
        mass = (likely * UNITS).long().cumsum(-1)
        # The last token of the nucleus is the first at which the mass reaches the share.
        last = (mass < share).sum(-1, keepdim=True)
        if (last < likely.shape[-1]).all():
            return likely.gather(1, last)
    return _search_threshold(weights, units, share)


def _may_look(x: Tensor) -> bool:
    """Return whether code may depend on values of `x`: not where it is compiled or captured."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def _search_threshold(weights: Tensor, units: Tensor, share: Tensor) -> Tensor:
    """Find the top-p threshold among all tokens, without a sort.

    The mass above a threshold falls as it rises, and non-negative floats sort like their bit
    patterns. So the pattern is found exactly from its highest digit down, each digit by the masses
    above all its values at once. Digits have four bits in compiled code, which stores no masked
    weights, and one bit elsewhere: for four these would take 15 times the memory.
    """
    pattern = torch.zeros_like(weights[:, :1], dtype=torch.int32)
    bits = 4 if torch.compiler.is_compiling() else 1
    for shift in range(28 if bits == 4 else 30, -1, -bits):
        n_digits = 1 << min(bits, 31 - shift)  # the sign is 0
        digits = torch.arange(1, n_digits, dtype=torch.int32, device=weights.device)
        below = pattern + (digits << shift) - 1  # the last pattern with a lower digit
        above = weights.unsqueeze(1) > below.view(torch.float32).unsqueeze(-1)  # [T, digits, V]
        mass = torch.where(above, units.unsqueeze(1), 0).sum(-1)
        digit = (mass >= share).sum(-1, keepdim=True).to(torch.int32)
        pattern = pattern + (digit << shift)
    return pattern.view(torch.float32)


def gumbel_noise(seed: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """Return standard Gumbel noise [T, V] in fp32, a pure function of seed, position, token id.

    `seed` is int64, 0-d or [T], `positions` are [T], `tokens` [V] are the token ids.

    With a 32-bit hash h, `v = (h + 0.5) 2^-32` and `g = -log(-log1p(-v))`: the upper tail, which
    decides a maximum over a large vocabulary, keeps all 32 bits (a 24-bit uniform would clip it).
    """
    first = _mix(_low32(positions) ^ _low32(seed))
    second = _mix(first ^ _mix(_low32(positions) + _low32((seed >> 32) + 0x9E3779B9)))
    hashed = _mix(_mix(_low32(tokens) + first.unsqueeze(1)) ^ second.unsqueeze(1))
    # fp32 rounds the last few v to 1, whose noise would be -inf and could never win.
    unsigned = hashed.long() & 0xFFFFFFFF
    v = ((unsigned.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-v))


def _mix(x: Tensor) -> Tensor:
    """Mix 32 bits bijectively (constants: C. Wellons' `lowbias32` search).

    x is int32, whose products wrap around; its right shifts bring in sign bits, masked off here.
    """
    x = (x ^ ((x >> 16) & 0xFFFF)) * _signed(0x7FEB352D)
    x = (x ^ ((x >> 15) & 0x1FFFF)) * _signed(0x846CA68B)
    return x ^ ((x >> 16) & 0xFFFF)


def _low32(x: Tensor) -> Tensor:
    return x.to(torch.int32)


def _signed(n: int) -> int:
    """Return the int32 with the low 32 bits of n."""
    return ((n & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000
