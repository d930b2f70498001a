"""Weight formats by name, and their size in bytes, without torch.

int8                 one scale per row        int4          the checkpoint's own, or HQQ
int8-g32             one per 32 weights       int4-g64      min-max, groups of 64
int4-g128-hqq        HQQ, groups of 128
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

from fasteagle.config import HeadConfig, ModelConfig
from fasteagle.errors import FasteagleError, shown
from fasteagle.options import RuntimeOptions

GROUP_SIZES = (128, 64, 32)
METHODS = ("minmax", "hqq")
EXAMPLES = "int4, int8, int4-g64, int4-g128-hqq"
_PATTERN = re.compile(r"int(?P<bits>\d{1,9})(-g(?P<group>\d{1,99}))?(-(?P<method>[a-z]+))?")


@dataclasses.dataclass(frozen=True)
class Scheme:
    """Format of block linears and of the LM head; embeddings and norms stay in 16 bits."""

    bits: int = 16
    group_size: int = 0  # 0: one scale per row
    method: str = "minmax"  # choice of values; "own": those of the checkpoint
    head_bits: int = 16  # bits of the LM head; 8: one scale per row, 4: groups as in the linears

    @property
    def name(self) -> str:
        if self.bits == 16:
            return "bf16"
        group = f"-g{self.group_size}" if self.group_size else ""
        method = f"-{self.method}" if self.bits == 4 or self.method == "own" else ""
        return f"int{self.bits}{group}{method}"

    @property
    def option(self) -> str:
        """Command-line option that selects this scheme."""
        if self.method == "own":
            return f"--int{self.bits}"
        return f"--precision {self.name}"

    @property
    def linear_bytes(self) -> float:
        """Bytes per weight of a block linear, parameters of the groups included."""
        if self.bits == 16:
            return 2.0
        return grouped_bytes(self.bits, self.group_size) if self.group_size else 1.0

    @property
    def head_bytes(self) -> float:
        """Bytes per weight of the LM head."""
        if self.head_bits == 4:  # in the groups of the linears, or of 32
            return grouped_bytes(4, self.group_size or 32)
        return self.linear_bytes if self.head_bits == self.bits else self.head_bits / 8

    def model_bytes(self, config: ModelConfig) -> int:
        """Return the weight bytes of a model, if every linear has `bits`; routers stay in fp32.

        A tied embedding is stored separately from an LM head below 16 bits. For files that mix
        bits, see `tensors.weight_bytes`.
        """
        table = config.vocab_size * config.dim
        embedding = 0 if config.tie_embeddings and self.head_bits == 16 else 2 * table
        linears = config.linear_params * self.linear_bytes + 4 * config.router_params
        return int(linears + table * self.head_bytes + embedding)

    def draft_head_bytes(self, head: HeadConfig) -> int:
        """Return the weight bytes of a draft head, which has the format of its target."""
        return int(head.linear_params * self.linear_bytes + head.lm_head_params * self.head_bytes)


def grouped_bytes(bits: int, group_size: int) -> float:
    """Return bytes per weight with a 16-bit scale per group, and a 16-bit zero too at 4 bits."""
    return bits / 8 + (4 if bits == 4 else 2) / group_size


BF16 = Scheme()
INT8 = Scheme(8, head_bits=8)  # one scale per row, which has thousands of weights


def parse_scheme(name: str, config: ModelConfig, head_bits: int = 8) -> Scheme:
    """Return the scheme `name` for a model of this shape; "int4" takes the widest fitting groups.

    Raises `FasteagleError` for unknown names, and for groups that do not divide the inputs of a
    linear.
    """
    if name == "int4":
        return int4_for(config, head_bits)
    bits, group, method = parts_of_name(name)
    widths = linear_inputs(config)
    if group and not _divides(group, widths):
        fitting = ", ".join(f"g{g}" for g in GROUP_SIZES if _divides(g, widths)) or "int8"
        raise FasteagleError(
            f"quantization {name!r}: groups of {group} do not divide the inputs of this model's "
            f"linears ({', '.join(map(str, widths))}): use {fitting}"
        )
    return Scheme(bits, group, method, head_bits)


def check_precision(name: str) -> None:
    """Raise `FasteagleError` for a precision that no model can have."""
    quant = RuntimeOptions().at(name).quant
    if quant not in (None, "int4"):
        parts_of_name(quant)


def parts_of_name(name: str) -> tuple[int, int, str]:
    """Return bits, group size and method of a scheme's name but "int4"; raise `FasteagleError`."""
    match = _PATTERN.fullmatch(name)
    if match is None:
        raise FasteagleError(f"quantization {shown(name)} is unknown: use for example {EXAMPLES}")
    bits, group = int(match["bits"]), int(match["group"] or 0)
    method = match["method"] or "minmax"
    if bits not in (4, 8):
        raise FasteagleError(f"quantization {name!r}: {bits} bits have no kernel: use int4 or int8")
    if bits == 4 and method == "gptq":
        raise FasteagleError(
            f"quantization {name!r} is gone: use {name.removesuffix('gptq')}hqq, or a checkpoint "
            "that another tool quantized with GPTQ"
        )
    if method not in METHODS or (bits == 8 and match["method"]):
        known = ", ".join(METHODS) if bits == 4 else "none for int8"
        raise FasteagleError(f"quantization {name!r}: method {method!r} is not one of: {known}")
    allowed = GROUP_SIZES if bits == 4 else (0, 32)
    if group not in allowed:
        sizes = ", ".join(f"g{g}" for g in allowed if g)
        raise FasteagleError(
            f"quantization {name!r}: group size {group} has no kernel: use {sizes}"
        )
    return bits, group, method


def int4_for(config: ModelConfig, head_bits: int = 8) -> Scheme:
    """Return the scheme of HQQ in the widest groups that this model's linears allow."""
    widths = linear_inputs(config)
    group = next((g for g in GROUP_SIZES if _divides(g, widths)), None)
    if group is None:
        raise FasteagleError(
            f"int4 needs groups of 32, which do not divide this model's widths {widths}: use --int8"
        )
    return Scheme(4, group, "hqq", head_bits)


def linear_inputs(config: ModelConfig) -> tuple[int, ...]:
    """Return the input widths of the block linears."""
    widths = {config.dim, config.n_head * config.head_dim}
    if config.moe is None or config.dense_blocks:
        widths.add(config.ffn_dim)
    if config.moe is not None:
        widths |= {config.moe.ffn_dim, config.moe.shared_ffn_dim} - {0}
    return tuple(sorted(widths))


def _divides(group: int, widths: Iterable[int]) -> bool:
    return all(width % group == 0 for width in widths)
