"""Quantized modules, made from a checkpoint's packed weights or from dense linears."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fasteagle.errors import FasteagleError
from fasteagle.loading.tensors import Checkpoint, load_floats, weight_bytes
from fasteagle.model import EagleHead, MoE
from fasteagle.quant.cpu_linear import NativeLinear, in_huge_pages
from fasteagle.quant.cuda_linear import InterleavedLinear
from fasteagle.quant.linear import Permuted, QuantizedLMHead, SideBySide, make_linear
from fasteagle.quant.packed import PackedWeight, stack, stack_one_by_one
from fasteagle.quant.params import int8_groups, quantize_weight
from fasteagle.quant.scheme import GROUP_SIZES, METHODS, Scheme

HEAD_ROWS = 8192  # rows of an LM head that are quantized at once


class Linears:
    """Quantized modules for `checkpoint.load_model`, made from a checkpoint's weights."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device | str,
        dtype: torch.dtype,
        native: bool = False,
    ) -> None:
        assert checkpoint.scheme is not None, "the linears of other checkpoints are dense"
        self.checkpoint, self.scheme = checkpoint, checkpoint.scheme
        self.device, self.dtype, self.native = device, dtype, native

    def _made(self, weight: PackedWeight, bias: Tensor | None) -> nn.Module:
        return make_linear(weight, bias, self.device, self.dtype, self.native)

    def weight_bytes(self) -> int:
        """Return the bytes of the weights on the device."""
        return weight_bytes(self.checkpoint, self.scheme)

    def linear(self, names: Sequence[str], bias: Tensor | None) -> nn.Module | None:
        """Return one module for the stacked weights `names`, None where they are not packed.

        Where some have 4 bits and some 8, as in a Q4_K_M file, the first become 8 bits in the
        groups of the others: it costs them at most about amax / 254 of a group (`int8_groups`)
        and 0.44 bytes per weight, and the product stays one call.
        """
        if ".mlp.experts." in names[0]:
            return self._experts(names)
        weights = [self.checkpoint.packed(name) for name in names]
        parts = [weight for weight in weights if weight is not None]
        if not parts:
            return None
        if len(parts) < len(weights):
            raise FasteagleError(
                f"{', '.join(names)} make one product, but only some are quantized: "
                "use the unquantized checkpoint"
            )
        parts = _in_same_bits(parts)
        orders = [self.checkpoint.columns(name) for name in names]
        if all(_same(order, orders[0]) for order in orders):
            made = self._made(stack(parts), bias)
            return made if orders[0] is None else Permuted(made, orders[0].to(self.device))
        biases = [None] * len(parts) if bias is None else bias.split([p.shape[0] for p in parts])
        made_each = []
        for part, own_bias, order in zip(parts, biases, orders, strict=True):
            one = self._made(part, own_bias)
            made_each.append(one if order is None else Permuted(one, order.to(self.device)))
        return SideBySide(made_each)

    def _experts(self, names: Sequence[str]) -> nn.Module | None:
        """Return one module for the experts of a block, None where they are not packed."""
        if self.checkpoint.packed(names[0]) is None:
            return None
        n_rows = sum(self.checkpoint.shape(name)[0] for name in names)
        weight = stack_one_by_one((self._expert(name) for name in names), n_rows)
        if weight is None:
            weight = stack(_in_same_bits([self._expert(name) for name in names]))
        return self._made(weight, None)

    def _expert(self, name: str) -> PackedWeight:
        weight = self.checkpoint.packed(name)
        if weight is None or self.checkpoint.columns(name) is not None:
            what = "not quantized as the others are" if weight is None else "in act-order"
            raise FasteagleError(
                f"{name} is {what}: experts run as one product, use the unquantized checkpoint"
            )
        return weight

    def lm_head(self) -> nn.Module | None:
        """Return the LM head in `scheme.head_bits`, None where it stays in 16 bits."""
        bits = self.scheme.head_bits
        tied = self.checkpoint.config.tie_embeddings
        name = "model.embed_tokens.weight" if tied else "lm_head.weight"
        own = self.checkpoint.packed(name)
        # Only our kernels have groups at 8 bits, and a tied table may be asked for in other bits.
        if own is not None and (not tied or (self.native and own.bits == bits)):
            made, order = QuantizedLMHead(self._made(own, None)), self.checkpoint.columns(name)
            return made if order is None else Permuted(made, order.to(self.device))
        if bits == 16:
            return None
        table = load_floats(self.checkpoint, name)
        scheme = head_scheme(self.scheme)
        # On the device, and in parts: in fp32 the table of 128k tokens would take gigabytes.
        parts = [quantize_weight(rows.to(self.device), scheme) for rows in table.split(HEAD_ROWS)]
        return QuantizedLMHead(self._made(stack(parts), None))


def head_scheme(scheme: Scheme) -> Scheme:
    """Return the scheme of an LM head in `scheme.head_bits`: 8 bits per row, 4 by min-max."""
    return Scheme(8) if scheme.head_bits == 8 else Scheme(4, scheme.group_size or 32, "minmax")


def quantize_(module: nn.Module, scheme: Scheme, native: bool = False) -> nn.Module:
    """Replace every `nn.Linear` inside `module` by a quantized one, in place, but no router.

    Raises `FasteagleError` where a group does not divide a linear's inputs.
    """
    for name, child in list(module.named_children()):
        if isinstance(module, MoE) and name in ("router", "shared_gate"):
            continue
        if isinstance(child, nn.Linear):
            setattr(module, name, quantize_linear(child, scheme, native))
        else:
            quantize_(child, scheme, native)
    return module


def quantize_head_(head: EagleHead, scheme: Scheme, native: bool = False) -> None:
    """Quantize a draft head after `borrow`: its linears, `fc` included, and its LM head rows.

    A trimmed LM head becomes 8 bits, or 4 like the target's; a full one is the target's module.
    `native`: the linears run by our CPU kernels, as the target's do.
    """
    head.fc = quantize_linear(head.fc, scheme, native)
    quantize_(head.block, scheme, native)
    own: list[nn.Module] = [head.fc, *head.block.modules()]
    if isinstance(head.lm_head, nn.Linear) and scheme.head_bits != 16:
        made = quantize_linear(head.lm_head, head_scheme(scheme), native)
        own.append(made)
        # Logits in fp32 by fp32 accumulation: in bf16 many are equal, and their ids rank them.
        head.use_lm_head(QuantizedLMHead(made) if isinstance(made, InterleavedLinear) else made)
    if native:
        in_huge_pages(own)


def fitting_scheme(scheme: Scheme, n_inputs: int) -> Scheme:
    """Return `scheme` for one linear: groups that divide its inputs, no calibration data."""
    group = scheme.group_size
    if group and n_inputs % group:
        group = next((g for g in GROUP_SIZES if n_inputs % g == 0), group)
    method = scheme.method if scheme.method in METHODS else "minmax"
    return Scheme(scheme.bits, group, method)


def quantize_linear(linear: nn.Linear, scheme: Scheme, native: bool = False) -> nn.Module:
    """Return the quantized form of a dense linear, in groups that divide its inputs."""
    weight = linear.weight.detach()
    packed = quantize_weight(weight, fitting_scheme(scheme, weight.shape[1]))
    bias = None if linear.bias is None else linear.bias.detach()
    return make_linear(packed, bias, weight.device, weight.dtype, native)


def has_native(target: nn.Module) -> bool:
    """Return whether a model has linears of our CPU kernels."""
    return any(isinstance(module, NativeLinear) for module in target.modules())


def _in_same_bits(parts: list[PackedWeight]) -> list[PackedWeight]:
    """Return `parts`, all of them in 8 bits if any has 8."""
    groups = [part.group_size for part in parts if part.bits == 8]
    if len(groups) in (0, len(parts)):
        return parts
    return [p if p.bits == 8 else int8_groups(p.dequantize(), groups[0]) for p in parts]


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
