"""GPTQ over all blocks of a checkpoint: each linear sees what the quantized ones before it make.

Inputs are those of the model quantized so far, on text the target wrote. One block is in memory at
a time. How one weight is quantized is the business of `quant.gptq`.

Shapes: K input columns of a linear, L tokens of a text, D model dim.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from fasteagle.errors import FasteagleError
from fasteagle.loading.checkpoint import fill_block
from fasteagle.loading.tensors import Checkpoint, block_linears
from fasteagle.model import Block, KVCache, Transformer, causal_mask
from fasteagle.quant.gptq import gptq_weight
from fasteagle.quant.packed import PackedWeight
from fasteagle.quant.scheme import Scheme

MIN_TOKENS = 512


@torch.no_grad()
def gptq_weights(
    checkpoint: Checkpoint,
    texts: Sequence[list[int]],
    scheme: Scheme,
    device: torch.device | str = "cpu",
    tick: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, PackedWeight]:
    """Every block linear of the model, by name. Raises `FasteagleError` for too little text."""
    n_tokens = sum(len(ids) for ids in texts)
    if n_tokens < MIN_TOKENS:
        raise FasteagleError(
            f"calibration text of {n_tokens:,} tokens is too short for GPTQ: give {MIN_TOKENS:,} "
            "or more with --data"
        )
    config = checkpoint.config
    with torch.device("meta"):
        model = Transformer(config)
    model.init_rope(max(len(ids) for ids in texts), device)
    embedding = checkpoint.load("model.embed_tokens.weight").to(device).float()
    streams = [embedding[torch.tensor(ids, device=device)] for ids in texts]  # [L, D] each
    found: dict[str, PackedWeight] = {}
    for i in range(config.n_layer):
        with torch.device("meta"):
            block = Block(config)
        fill_block(block, i, checkpoint, device, torch.float32)
        # In forward order: each linear sees the outputs of the quantized linears before it.
        for part, names in block_linears(i).items():
            linear = block.get_submodule(part)
            assert isinstance(linear, nn.Linear)
            hessian = _hessian(model, block, linear, streams)
            weight = gptq_weight(linear.weight, hessian, scheme.group_size)
            linear.weight = nn.Parameter(weight.dequantize(), requires_grad=False)
            sizes = [checkpoint.shape(name)[0] for name in names]
            starts = [sum(sizes[:j]) for j in range(len(sizes))]
            for name, start, size in zip(names, starts, sizes, strict=True):
                found[name] = weight.rows(slice(start, start + size)).to("cpu")
        streams = [_run(model, block, x) for x in streams]
        tick(i + 1, config.n_layer)
    return found


def _run(model: Transformer, block: Block, x: Tensor) -> Tensor:
    """The block on one text [L, D]."""
    L, device = len(x), x.device
    cache = KVCache(dataclasses.replace(model.config, n_layer=1), L, torch.float32, device)
    rows = torch.arange(L, device=device)
    mask = causal_mask(0, L, cache.n_slots, model.config.sliding_window, device)
    cos, sin = model.rope_cos[:L].unsqueeze(1), model.rope_sin[:L].unsqueeze(1)
    return block(x, cos, sin, rows, mask, *cache.layers[0])


def _hessian(
    model: Transformer, block: Block, linear: nn.Linear, streams: Sequence[Tensor]
) -> Tensor:
    """Sum of x x^T over all inputs of `linear`, [K, K]."""
    total = torch.zeros(linear.in_features, linear.in_features, device=streams[0].device)

    def see(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        total.addmm_(inputs[0].T, inputs[0])

    hook = linear.register_forward_pre_hook(see)
    for x in streams:
        _run(model, block, x)
    hook.remove()
    return total
