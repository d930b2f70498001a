"""Tiny random targets whose blocks run in our CPU kernels."""

from __future__ import annotations

import torch

from fasteagle.compile.cpu_backend import CpuBackend, runs_on_cpu
from fasteagle.loading.source import has_native, quantize_, quantize_linear
from fasteagle.model import Transformer
from fasteagle.quant.linear import QuantizedLMHead
from fasteagle.quant.scheme import Scheme
from helpers import random_target

SHAPE = dict(dim=64, n_head=4, n_kv_head=2, head_dim=16, ffn_dim=96)
CONFIGS = {
    "gqa": SHAPE,
    "mha": SHAPE | dict(n_kv_head=4),
    "window": SHAPE | dict(sliding_window=7),
    "long window": SHAPE | dict(sliding_window=90),
    "qwen2": SHAPE | dict(qkv_bias=True),
    "qwen3": SHAPE | dict(qk_norm=True, head_dim=32),
    "wide heads": SHAPE | dict(head_dim=80, n_head=2, n_kv_head=1),
}


def native_target(config, bits: int = 4, dtype: torch.dtype = torch.float32) -> Transformer:
    target = random_target(config).to(dtype)
    target.init_rope(512, "cpu")  # in fp32, as checkpoints are loaded
    for block in target.blocks:
        if config.qkv_bias:
            block.attention.qkv.bias.data.normal_()
    scheme = Scheme(bits, 32 if bits == 4 else 0)
    quantize_(target.blocks, scheme, native=True)
    target.lm_head = QuantizedLMHead(quantize_linear(target.lm_head, Scheme(8), native=True))
    assert runs_on_cpu(target) and has_native(target)
    return target


def native_backend(config, bits: int = 4, dtype: torch.dtype = torch.float32) -> CpuBackend:
    return CpuBackend(native_target(config, bits, dtype))
