"""Tiny random targets whose blocks run in our CPU kernels, with trees and states for them."""

from __future__ import annotations

import torch

from fasteagle.compile.cpu_backend import CpuBackend, runs_on_cpu
from fasteagle.config import MoEConfig
from fasteagle.loading.source import has_native, quantize_, quantize_head_, quantize_linear
from fasteagle.model import EagleHead, KVCache, Transformer
from fasteagle.quant.linear import QuantizedLMHead
from fasteagle.quant.scheme import Scheme
from fasteagle.state import DecodeState
from fasteagle.tree import DraftTree
from helpers import eagle3_of, random_head, random_target

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
        moe=MoEConfig(6, 6, 32, renormalize=True, scale=1.5, shared_ffn_dim=32),
    ),
    "ernie moe": SHAPE
    | dict(
        dense_blocks=(0,),
        moe=MoEConfig(9, 3, 32, renormalize=True, shared_ffn_dim=64, choice_bias=True),
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


def native_head(
    target: Transformer, algorithm: str = "eagle1", bits: int = 8, **changes
) -> EagleHead:
    """A random draft head in the layout of our kernels, whose own LM head has 8 bits."""
    eagle3, options = eagle3_of(algorithm, target.config), {"rope_base": 10000.0} | changes
    head = random_head(target, eagle3=eagle3, mtp=algorithm == "mtp", **options)
    quantize_head_(head, Scheme(bits, 32 if bits == 4 else 0, head_bits=8), native=True)
    return head


def random_tree(T: int, V: int, generator: torch.Generator, chain: bool = False) -> DraftTree:
    """The last rows are padding now and then."""
    parents = torch.zeros(T, dtype=torch.long)
    for j in range(1, T):
        parents[j] = j - 1 if chain else torch.randint(0, j, (1,), generator=generator)
    valid = torch.arange(T) < T - int(torch.randint(0, min(T, 3), (1,), generator=generator))
    tokens = torch.where(valid, torch.randint(0, V, (T,), generator=generator), 0)
    parents = torch.where(valid, parents, 0)
    return DraftTree(tokens, parents, valid)


def state_of(target, seq_len: int, dtype=torch.float32, aux_layers=()) -> DecodeState:
    cache = KVCache(target.config, 256, dtype, "cpu")
    g = torch.Generator().manual_seed(seq_len)
    cache.rows.copy_(torch.randn(cache.rows.shape, generator=g))
    state = DecodeState(target, cache, 200)
    state.read_aux_layers(aux_layers, target.config.dim)
    state.seq_len.fill_(seq_len)
    return state
