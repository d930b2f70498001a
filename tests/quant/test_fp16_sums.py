"""What sums in fp16 cost the default model, by an emulation of the kernel in its own order."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fasteagle.loading.checkpoint import load_model
from fasteagle.loading.open import open_model
from fasteagle.loading.source import Linears
from fasteagle.options import DEFAULT_MODEL, RuntimeOptions
from fasteagle.quant import interleaved
from fasteagle.quant.cuda_linear import in_half_range
from fasteagle.quant.packed import PackedWeight
from helpers import logits_of

MMA = 16  # columns that one instruction adds up, rounding once
TEXT = "A rainbow is light that drops of water bend by its colour, the red less than the blue. "


class Emulated(nn.Module):
    """`interleaved_kernel` for a 4-bit weight with offsets: fp16 within a tile, else fp32."""

    def __init__(self, packed: PackedWeight, accumulate: str) -> None:
        super().__init__()
        weight = interleaved.pack(packed)
        assert weight.offsets, "the default model's file has offsets"
        self.tile, self.accumulate = weight.layout.tile, accumulate
        self.weight = interleaved.dequantize(weight).half()  # one rounding, as by the kernel's fma

    def forward(self, x: Tensor) -> Tensor:
        half, scale = in_half_range(x, self.accumulate)
        y = torch.zeros(x.shape[0], self.weight.shape[0])
        for begin in range(0, x.shape[1], self.tile):
            y += self._tile(half, begin)
        return y if scale is None else y * scale

    def _tile(self, half: Tensor, begin: int) -> Tensor:
        part = torch.zeros(half.shape[0], self.weight.shape[0])
        for at in range(begin, begin + self.tile, MMA):
            part = part + half[:, at : at + MMA].float() @ self.weight[:, at : at + MMA].float().T
            part = part.half().float() if self.accumulate == "fp16" else part
        return part


class EmulatedLinears(Linears):
    """The model's packed linears, emulated; its LM head stays as it is."""

    accumulate = "fp32"

    def _made(self, weight: PackedWeight, bias: Tensor | None) -> nn.Module:
        assert bias is None, "Llama's linears have none"
        return Emulated(weight, self.accumulate)

    def lm_head(self) -> None:
        return None


def log_probabilities(checkpoint, tokens: Tensor, accumulate: str | None) -> Tensor:
    linears = None
    if accumulate is not None:
        linears = EmulatedLinears(checkpoint, "cpu", torch.float32)
        linears.accumulate = accumulate
    model = load_model(
        checkpoint, dtype=torch.float32, device="cpu", max_seq_len=256, quantized=linears
    )
    return F.log_softmax(logits_of(model, tokens), -1)


@pytest.mark.slow
@pytest.mark.real_model
@torch.no_grad()
def test_kl_of_the_default_model():
    opened = open_model(DEFAULT_MODEL)
    tokens = torch.tensor(opened.tokenizer.encode(TEXT * 4))[:80]
    dense = opened.prepared(RuntimeOptions(dtype="fp32", device="cpu")).checkpoint
    packed = opened.prepared(RuntimeOptions(quant="int4", device="cpu")).checkpoint
    exact = log_probabilities(dense, tokens, None)
    kl = {}
    for accumulate in ("fp32", "fp16"):
        quantized = log_probabilities(packed, tokens, accumulate)
        kl[accumulate] = float((exact.exp() * (exact - quantized)).sum(-1).mean())
    print(f"\nKL to fp32, nats per token: {kl}")
    assert 0 < kl["fp32"] < 2e-5
    assert kl["fp32"] < kl["fp16"] < 5e-5
