"""Tiny models whose linears are packed as for CUDA, and the same weights dense in fp32."""

from __future__ import annotations

import copy
import dataclasses

import torch
from torch import nn

from fasteagle.compile.cuda_backend import CudaBackend
from fasteagle.compile.int8_cache import quantized_rows
from fasteagle.config import ModelConfig, MoEConfig
from fasteagle.model import EagleHead, KVCache, Target, Transformer
from fasteagle.quant.cuda_linear import InterleavedLinear
from fasteagle.quant.linear import QuantizedLMHead
from fasteagle.quant.params import quantize_weight
from fasteagle.quant.scheme import Scheme
from fasteagle.tree import TreeView, ancestor_mask, tree_paths
from helpers import random_target, tiny_config
from tree_problems import random_parents

SHAPE = dict(dim=128, n_head=4, n_kv_head=2, head_dim=32, ffn_dim=192)
CONFIGS = {
    "gqa": SHAPE,
    "mha": SHAPE | dict(n_kv_head=4),
    "window": SHAPE | dict(sliding_window=7),
    "qwen2": SHAPE | dict(qkv_bias=True),
    "qwen3": SHAPE | dict(qk_norm=True),
    "wide heads": SHAPE | dict(head_dim=80, qk_norm=True),
    "experts": SHAPE | dict(moe=MoEConfig(5, 2, 64, renormalize=True), dense_blocks=(0,)),
    "shared expert": SHAPE
    | dict(qk_norm=True, moe=MoEConfig(6, 3, 64, shared_ffn_dim=128, shared_gate=True)),
}
INT4 = Scheme(4, 64)
SEQ_LEN = 70


def pack_(module: nn.Module, scheme: Scheme, accumulate: str = "fp32") -> nn.Module:
    """Replace every `nn.Linear` inside by the linear of CUDA, which runs its reference on a CPU."""
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear) and name not in ("router", "shared_gate"):
            packed = quantize_weight(child.weight.detach().float(), scheme)
            setattr(module, name, InterleavedLinear(packed, child.bias, accumulate))
        else:
            pack_(child, scheme, accumulate)
    return module


def pack_lm_head_(model: Transformer) -> None:
    packed = quantize_weight(model.lm_head.weight.float(), Scheme(8))
    model.lm_head = QuantizedLMHead(InterleavedLinear(packed, None))


def dense_(module: nn.Module) -> nn.Module:
    """The same weights in ordinary linears and fp32."""
    for name, child in list(module.named_children()):
        if isinstance(child, InterleavedLinear):
            linear = nn.Linear(child.in_features, child.out_features, child.bias is not None)
            linear.weight.data = child.rows(torch.arange(child.out_features))
            if child.bias is not None:
                linear.bias.data = child.bias.float()
            setattr(module, name, linear.requires_grad_(False))
        else:
            dense_(child)
    return module.float()


def packed_target(
    name: str = "gqa", scheme: Scheme = INT4, accumulate: str = "fp32", **changes
) -> tuple[Transformer, Transformer]:
    """A target in fp16 with packed blocks, and its dense twin."""
    target = random_target(tiny_config(**CONFIGS[name] | changes))
    generator = torch.Generator().manual_seed(3)
    for parameter in target.parameters():
        if parameter.ndim == 1:  # biases and norms that matter
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
        else:
            parameter.data *= 0.3
    pack_(target.blocks, scheme, accumulate)
    target.half().init_rope(512, "cpu")
    dense = dense_(copy.deepcopy(target))
    dense.init_rope(512, "cpu")
    return target, dense


def packed_head(head: EagleHead, scheme: Scheme = INT4) -> tuple[EagleHead, EagleHead]:
    pack_(head, scheme)
    dense = dense_(copy.deepcopy(head))
    return head.half(), dense


def view_of(T: int, window: int | None, seq_len: int = SEQ_LEN, spread: int = 4) -> TreeView:
    """A random tree of T rows after `seq_len` positions."""
    tree_mask, depths = ancestor_mask(random_parents(T, 5, spread), torch.ones(T).bool())
    paths = tree_paths(tree_mask, depths, T - 1)
    return TreeView(torch.tensor(seq_len), paths, depths, window)


def filled(target: Target, dtype: torch.dtype) -> KVCache:
    """A cache with random keys and values at the first `SEQ_LEN` positions."""
    int8 = target.cache_dtype == torch.int8
    cache = dataclasses.replace(target, cache_dtype=torch.int8 if int8 else dtype).new_cache(256)
    generator = torch.Generator().manual_seed(2)
    size = *cache.rows.shape[:2], SEQ_LEN, target.config.head_dim
    rows = torch.randn(size, generator=generator).half()
    rows = quantized_rows(rows) if int8 else rows
    cache.rows[:, :, :SEQ_LEN] = rows.to(target.weight.device)
    return cache


def passed(
    target: Target, T: int, dtype: torch.dtype = torch.float16
) -> tuple[torch.Tensor, KVCache]:
    """Residual stream after the blocks for the first T rows of a tree of 9, and the cache."""
    device, model = target.weight.device, target.model
    view, cache = view_of(9, model.config.sliding_window), filled(target, dtype)
    seq_len, paths, depths = (t.to(device) for t in (view.seq_len, view.paths[:T], view.depths[:T]))
    view = TreeView(seq_len, paths, depths, view.window)
    positions, slots = seq_len + depths, seq_len + torch.arange(T, device=device)
    streams: list[torch.Tensor] = []

    def keep(norm: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        if norm is model.norm:
            streams.append(x)
        return target.ops.norm(norm, x)

    recording = dataclasses.replace(target, ops=target.ops._replace(norm=keep))
    recording.encode(torch.arange(T, device=device) * 5, positions, slots, view, cache)
    return streams[0], cache


class KernelBackend(CudaBackend):
    """Runs kernels wherever the model is, eagerly: on a CPU those of a card that is interpreted."""

    def __init__(self, model: Transformer, kv: str = "auto") -> None:
        super().__init__(model, kv, replays=False)

    def _has_kernel(self, config: ModelConfig, weight: torch.Tensor) -> bool:
        return True


def fused_target(model: Transformer, kv: str = "auto") -> Target:
    """The target of a model whose blocks all fit the fused kernels."""
    backend = KernelBackend(model, kv)
    assert not backend.leaves_blocks
    return backend.target
