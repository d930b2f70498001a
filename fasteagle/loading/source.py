"""From a checkpoint and what a person asked for (`--int4`) to one whose linears are quantized.

A quantized source is a checkpoint that also has `scheme` and `packed(name)`. Some come so (GGUF,
GPTQ, AWQ, our own folders); others are quantized once into the user cache and then read from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fasteagle.config import ModelConfig
from fasteagle.errors import FasteagleError
from fasteagle.loading.checkpoint import Checkpoint, DummyCheckpoint
from fasteagle.model import EagleHead
from fasteagle.quant.linear import Permuted, QuantizedLMHead, SideBySide, make_linear
from fasteagle.quant.packed import PackedWeight, stack
from fasteagle.quant.params import quantize_weight
from fasteagle.quant.scheme import GROUP_SIZES, Scheme


class QuantizedSource(Checkpoint, Protocol):
    """A checkpoint whose block linears are packed."""

    scheme: Scheme

    def packed(self, name: str) -> PackedWeight | None:
        """The packed weight of that name, None where it is stored in full."""

    def columns(self, name: str) -> Tensor | None:
        """Order [K] in which that weight wants its inputs (act-order), None for the usual."""


def is_block_linear(name: str) -> bool:
    return name.startswith("model.layers.") and name.endswith("_proj.weight")


def own_packed(checkpoint: Checkpoint, name: str) -> PackedWeight | None:
    """What the checkpoint itself holds packed under that name."""
    packed = getattr(checkpoint, "packed", None)
    return None if packed is None else packed(name)


def own_scheme(checkpoint: Checkpoint, head_bits: int = 8) -> Scheme | None:
    """The scheme of a checkpoint that comes quantized, None for the others.

    A GGUF file may mix formats: it counts as 4 bits if every block linear has 4.
    """
    declared = getattr(checkpoint, "scheme", None)
    if declared is not None:
        return declared
    kinds = getattr(checkpoint, "kinds", None)
    if kinds is None:
        return None
    linears = {kind for name, kind in kinds().items() if is_block_linear(name)}
    return Scheme(4, 32, "own", head_bits) if linears <= {"Q4_0", "Q4_1"} else None


class OwnSource:
    """A checkpoint run in its own 4 bits: the same weights, and so the same fingerprint."""

    def __init__(self, checkpoint: Any, scheme: Scheme) -> None:
        self._checkpoint, self.scheme = checkpoint, scheme
        self.config: ModelConfig = checkpoint.config
        for name in ("names", "shape", "load", "start", "packed"):
            setattr(self, name, getattr(checkpoint, name))
        self.columns = getattr(checkpoint, "columns", lambda name: None)

    names: Callable[[], set[str]]
    shape: Callable[[str], tuple[int, ...]]
    load: Callable[[str], Tensor]
    start: Callable[[str, int], Tensor]
    packed: Callable[[str], PackedWeight | None]


class DummySource(DummyCheckpoint):
    """Random packed weights of a model's shape, for benchmarks: made as they are stored."""

    def __init__(self, config: ModelConfig, scheme: Scheme) -> None:
        super().__init__(config)
        self.scheme = scheme

    def packed(self, name: str) -> PackedWeight | None:
        if not is_block_linear(name):
            return None
        N, K = self.shape(name)
        G = K // (self.scheme.group_size or K)
        step = torch.full((N, G), 0.02 / (4 if self.scheme.bits == 4 else 64))
        if self.scheme.bits == 8:
            q = torch.randint(-127, 128, (N, K), dtype=torch.int8)
            return PackedWeight(8, K // G, q, step.bfloat16())
        q = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8)
        return PackedWeight(4, K // G, q, step.bfloat16(), torch.full((N, G), 8, dtype=torch.uint8))

    def columns(self, name: str) -> Tensor | None:
        return None


class Linears:
    """Makes the quantized modules of a model as `checkpoint.load_model` asks for them."""

    def __init__(
        self, source: QuantizedSource, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        self.source, self.device, self.dtype = source, device, dtype

    def weight_bytes(self) -> int:
        """What the weights take on the device."""
        return self.source.scheme.model_bytes(self.source.config)

    def linear(self, names: Sequence[str], bias: Tensor | None) -> nn.Module | None:
        """One module for the weights `names` above each other; None where they are not packed."""
        weights = [self.source.packed(name) for name in names]
        parts = [weight for weight in weights if weight is not None]
        if not parts:
            return None
        if len(parts) < len(weights):
            raise FasteagleError(
                f"{', '.join(names)} make one product, but only some are quantized: "
                "use the unquantized checkpoint"
            )
        orders = [self.source.columns(name) for name in names]
        if all(_same(order, orders[0]) for order in orders):
            made = make_linear(stack(parts), bias, self.device, self.dtype)
            return made if orders[0] is None else Permuted(made, orders[0].to(self.device))
        biases = [None] * len(parts) if bias is None else bias.split([p.shape[0] for p in parts])
        made_each = []
        for part, own_bias, order in zip(parts, biases, orders, strict=True):
            one = make_linear(part, own_bias, self.device, self.dtype)
            made_each.append(one if order is None else Permuted(one, order.to(self.device)))
        return SideBySide(made_each)

    def lm_head(self) -> nn.Module | None:
        """The LM head in `scheme.head_bits`; None where it stays in 16 bits."""
        bits = self.source.scheme.head_bits
        tied = self.source.config.tie_embeddings
        name = "model.embed_tokens.weight" if tied else "lm_head.weight"
        own = None if tied else self.source.packed(name)
        if own is not None:
            return QuantizedLMHead(make_linear(own, None, self.device, self.dtype))
        if bits == 16:
            return None
        weight = quantize_weight(self.source.load(name), head_scheme(self.source.scheme))
        return QuantizedLMHead(make_linear(weight, None, self.device, self.dtype))


def head_scheme(scheme: Scheme) -> Scheme:
    """How an LM head of `scheme.head_bits` is quantized: 8 bits one scale a row, 4 by min-max."""
    return Scheme(8) if scheme.head_bits == 8 else Scheme(4, scheme.group_size or 32, "minmax")


def quantize_(module: nn.Module, scheme: Scheme) -> nn.Module:
    """Replace every `nn.Linear` inside `module` by a quantized one, in place.

    Raises `FasteagleError` where a group does not divide a linear's inputs.
    """
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear):
            setattr(module, name, quantize_linear(child, scheme))
        else:
            quantize_(child, scheme)
    return module


def quantize_head_(head: EagleHead, scheme: Scheme) -> None:
    """Quantize a draft head that has borrowed its LM head: its linears, `fc` too, and its rows.

    Rows of its own become 8 bits, or 4 with the target's; a whole LM head is the target's already.
    """
    quantize_(head, scheme)
    if isinstance(head.lm_head, nn.Linear) and scheme.head_bits != 16:
        head.use_lm_head(quantize_linear(head.lm_head, head_scheme(scheme)))


def fitting_scheme(scheme: Scheme, n_inputs: int) -> Scheme:
    """`scheme` for one linear by itself: in groups that divide its inputs, values without data."""
    group = scheme.group_size
    if group and n_inputs % group:
        group = next((g for g in GROUP_SIZES if n_inputs % g == 0), group)
    method = "minmax" if scheme.method in ("own", "gptq") else scheme.method
    return Scheme(scheme.bits, group, method)


def quantize_linear(linear: nn.Linear, scheme: Scheme) -> nn.Module:
    """A quantized linear in place of a dense one, in groups its inputs allow."""
    weight = linear.weight.detach()
    packed = quantize_weight(weight, fitting_scheme(scheme, weight.shape[1]))
    bias = None if linear.bias is None else linear.bias.detach()
    return make_linear(packed, bias, weight.device, weight.dtype)


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
