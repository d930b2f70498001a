"""Tiny random targets whose blocks run in our CPU kernels."""

from __future__ import annotations

import torch

from fasteagle.compile.cpu_backend import CpuBackend, runs_on_cpu
from fasteagle.config import MoEConfig
from fasteagle.loading.source import has_native, quantize_, quantize_linear
from fasteagle.model import Transformer
from fasteagle.quant.linear import QuantizedLMHead
from fasteagle.quant.scheme import Scheme
from helpers import random_target

SHAPE = dict(dim=64, n_head=4, n_kv_head=2, head_dim=16, ffn_dim=96)
MIXTRAL = SHAPE | dict(moe=MoEConfig(n_expert=8, top_k=2, ffn_dim=64, renormalize=True))
CONFIGS = {
    "gqa": SHAPE,
    "mha": SHAPE | dict(n_kv_head=4),
    "window": SHAPE | dict(sliding_window=7),
    "long window": SHAPE | dict(sliding_window=90),
    "qwen2": SHAPE | dict(qkv_bias=True),
    "qwen3": SHAPE | dict(qk_norm=True, head_dim=32),
    "wide heads": SHAPE | dict(head_dim=80, n_head=2, n_kv_head=1),
    "mixtral": MIXTRAL,
    "qwen2 moe": SHAPE
    | dict(qkv_bias=True, moe=MoEConfig(5, 3, 32, shared_ffn_dim=96, shared_gate=True)),
    "olmoe": SHAPE | dict(n_kv_head=4, qk_norm_whole=True, moe=MoEConfig(7, 4, 32)),
    "granite moe": SHAPE
    | dict(
        dense_blocks=(0,),
        qk_norm_whole=True,
        moe=MoEConfig(6, 6, 32, score="topk_softmax", scale=1.5, shared_ffn_dim=32),
    ),
}


def native_target(config, bits: int = 4, dtype: torch.dtype = torch.float32) -> Transformer:
    target = random_target(config).to(dtype)
    target.init_rope(512, "cpu")  # in fp32, as checkpoints are loaded
    for block in target.blocks:
        if config.qkv_bias:
            block.attention.qkv.bias.data.normal_()
        for name, parameter in block.attention.named_parameters():
            if "norm" in name:
                parameter.data.uniform_(0.5, 2)
    scheme = Scheme(bits, 32 if bits == 4 else 0)
    quantize_(target.blocks, scheme, native=True)
    target.lm_head = QuantizedLMHead(quantize_linear(target.lm_head, Scheme(8), native=True))
    assert runs_on_cpu(target) and has_native(target)
    return target


def native_backend(config, bits: int = 4, dtype: torch.dtype = torch.float32) -> CpuBackend:
    return CpuBackend(native_target(config, bits, dtype))
