"""Bytes, FLOPs and launches of a cycle, and the limits of speed that follow; needs no torch.

A pass is a list of parts. The limit of a part is the longer of reading its weights or cached keys
and values once, and of computing: measured times lie above. `cycle_terms` predicts the same parts
from the kernels' own tiling. This is also the only place with data-sheet values.

Shapes: N outputs, K inputs.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

from fasteagle.config import HeadConfig, ModelConfig
from fasteagle.errors import FasteagleError
from fasteagle.quant.scheme import Scheme, is_scheme_name, parse_scheme
from fasteagle.shapes import AnyShape, FusedShape

THIS = "this"  # the device name that means: measure this machine
ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
# Launches of a captured cycle beside products and attention.
BLOCK_SMALL = 2  # norms of a block
PASS_SMALL = 4  # before and after the blocks
LEVEL_SMALL = 7  # of a drafted level: norms, the tree's order, ranking
DRAFT_SMALL = 5  # of a tree
FINISH_SMALL = 7  # accept and commit


@dataclasses.dataclass(frozen=True)
class Device:
    """Speeds of a device: dense tensor-core rates, without the sparsity data sheets advertise."""

    name: str
    gb_s: float  # memory bandwidth, 1e9 bytes/s
    tflops: float  # 16-bit products, fp32 accumulation
    tflops_fp16: float  # the same with fp16 accumulation
    tflops_fp32: float


DEVICES = {
    "3090": Device("RTX 3090", 936, 71, 142, 35.6),
    "3090ti": Device("RTX 3090 Ti", 1008, 80, 160, 40),
    "4090": Device("RTX 4090", 1008, 165, 330, 82.6),
    "h100": Device("H100", 3350, 989, 989, 67),
    "h200": Device("H200", 4800, 989, 989, 67),
}

# Devices with similar names but different memory: not in the table.
_OTHER_VARIANTS = re.compile(r"Laptop|Max-Q|PCIe|NVL|MIG|\bD\b")


def device_named(name: str) -> Device:
    """Return the device called `name`, in any case; raise `FasteagleError` with known names."""
    key = name.lower().replace(" ", "").removeprefix("rtx")
    if key not in DEVICES:
        raise FasteagleError(
            f"device {name!r} is unknown: use {', '.join(DEVICES)}, "
            f"or {THIS!r} to measure this machine"
        )
    return DEVICES[key]


def device_reported_as(full_name: str) -> Device | None:
    """Return the data sheet for a driver's device name such as `NVIDIA GeForce RTX 3090`."""
    if _OTHER_VARIANTS.search(full_name):
        return None
    longest_first = sorted(DEVICES.values(), key=lambda d: -len(d.name))
    return next((d for d in longest_first if re.search(rf"\b{d.name}\b", full_name)), None)


@dataclasses.dataclass(frozen=True)
class Storage:
    """Bytes per weight of block linears and LM head, and of every cached key or value."""

    linear_bytes: float
    head_bytes: float
    element_bytes: int = 2

    @staticmethod
    def of(scheme: Scheme | None, element_bytes: int = 2) -> Storage:
        """Return the bytes that a scheme takes; without one weights have `element_bytes` too."""
        if scheme is None:
            return Storage(element_bytes, element_bytes, element_bytes)
        return Storage(scheme.linear_bytes, scheme.head_bytes, element_bytes)

    def pass_bytes(self, config: ModelConfig) -> int:
        """Weight bytes that every pass reads; the embedding's one row per token is not counted."""
        table = config.vocab_size * config.dim
        return int(config.linear_params * self.linear_bytes + table * self.head_bytes)


def storage_named(name: str, config: ModelConfig, head_bits: int = 8) -> Storage:
    """Return the bytes of a precision: bf16, fp16, fp32, int8, int4 or a scheme by name.

    "int4" takes the widest groups that fit the model. Raises `FasteagleError` for other names.
    """
    if name in ELEMENT_BYTES:
        return Storage.of(None, ELEMENT_BYTES[name])
    scheme = name.removesuffix("-torchao").removesuffix("-own")  # neither changes the bytes
    if not is_scheme_name(scheme):
        known = ", ".join(ELEMENT_BYTES)
        raise FasteagleError(
            f"unknown precision {name!r}: use {known}, int8, int4, a scheme like int4-g64-hqq"
        )
    return Storage.of(parse_scheme(scheme, config, head_bits))


@dataclasses.dataclass(frozen=True)
class Part:
    """Work of one kind in a cycle; N, K and rows of a product are those of each launch."""

    name: str
    launches: int
    n_bytes: float = 0.0
    flops: float = 0.0
    N: int = 0
    K: int = 0
    rows: int = 0
    block: ModelConfig | None = None  # whose attention it is


def target_parts(config: ModelConfig, storage: Storage, rows: int, context: int) -> list[Part]:
    """Return the parts of a target pass over `rows` rows."""
    n = config.n_layer
    return [
        *_block_parts("linears of the blocks", config, storage, rows),
        _product("LM head", config.vocab_size, config.dim, rows, 1, storage.head_bytes),
        _attention("tree attention", config, storage, rows, context),
        Part("norms, rest of the pass", n * BLOCK_SMALL + PASS_SMALL),
    ]


def draft_parts(head: HeadConfig, storage: Storage, tree: AnyShape, context: int) -> list[Part]:
    """Return the parts of drafting: a pass of the draft head for every level.

    The first extends by the committed positions, padded to D + 1 rows, with logits for the last.
    """
    frontier = tree.topk or -(-tree.nodes // tree.depth)  # static trees: about evenly
    levels = tree.levels if isinstance(tree, FusedShape) else tree.depth
    block, parts = head.block, []
    name, lm_head = "draft head", ("draft LM head", head.draft_vocab_size, block.dim)
    for level in range(max(1, levels)):
        rows, logits = (frontier, frontier) if level else (tree.depth + 1, 1)
        if head.eagle3 is None:
            parts.append(_product(name, block.dim, 2 * block.dim, rows, 1, storage.linear_bytes))
        elif level == 0:  # later levels read the head's own output
            width = head.feature_dim
            parts.append(_product(name, block.dim, width, rows, 1, storage.linear_bytes))
        parts += _block_parts(name, block, storage, rows, wide=head.eagle3 is not None)
        parts.append(_attention(name, block, storage, rows, context))
        parts.append(_product(*lm_head, logits, 1, storage.head_bytes))
    return [*parts, Part("rest of drafting", levels * LEVEL_SMALL + DRAFT_SMALL)]


def _block_parts(
    name: str, config: ModelConfig, storage: Storage, rows: int, wide: bool = False
) -> list[Part]:
    """Return the linears of all blocks: q/k/v and gate/up are one product each."""
    D, F = config.dim, config.ffn_dim
    shapes = (
        (config.qkv_dim, 2 * D if wide else D),
        (D, config.n_head * config.head_dim),
        (2 * F, D),
        (D, F),
    )
    n, size = config.n_layer, storage.linear_bytes
    return [_product(name, N, K, rows, n, size) for N, K in shapes]


def _product(name: str, N: int, K: int, rows: int, launches: int, weight_bytes: float) -> Part:
    weights = launches * N * K
    return Part(name, launches, weights * weight_bytes, 2.0 * weights * rows, N, K, rows)


def _attention(name: str, config: ModelConfig, storage: Storage, rows: int, context: int) -> Part:
    """Return the attention of all blocks, two launches each: splits of the keys, and their sum."""
    flops = 4.0 * config.n_layer * config.n_head * config.head_dim * context * rows
    n_bytes = config.kv_bytes(context, storage.element_bytes)
    return Part(name, 2 * config.n_layer, n_bytes, flops, rows=rows, block=config)


def limit(
    parts: Iterable[Part], device: Device, element_bytes: int = 2, fp16: bool = False
) -> tuple[float, str]:
    """Return milliseconds of `parts` at a device's speeds, and what bounds most of them.

    16-bit products accumulate in fp16 where `fp16` says so.
    """
    rate = device.tflops_fp16 if fp16 else device.tflops
    if element_bytes > 2:
        rate = device.tflops_fp32
    times = [(part.n_bytes / device.gb_s / 1e6, part.flops / rate / 1e9) for part in parts]
    memory, compute = (sum(column) for column in zip(*times, strict=True))
    return sum(map(max, times)), "memory" if memory >= compute else "compute"
