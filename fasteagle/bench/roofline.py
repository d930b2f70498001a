"""The speed limit of a device: milliseconds of a pass from bytes and FLOPs. Needs no torch.

Every part of a pass (block linears, LM head, attention) takes the longer of reading its weights or
cached keys and values once, and computing. Nothing else is counted: no launches, no small kernels,
no reading of activations. So predictions are limits, and measured times lie above them.

This is also the only place with data-sheet values.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

from fasteagle.bench.row_spec import RowSpec
from fasteagle.config import HeadConfig, ModelConfig
from fasteagle.errors import FasteagleError
from fasteagle.quant.scheme import Scheme, is_scheme_name, parse_scheme
from fasteagle.shapes import AnyShape, FusedShape

THIS = "this"  # the device name that means: measure this machine


@dataclasses.dataclass(frozen=True)
class Device:
    """Speeds of a device: dense tensor-core rates, without the sparsity data sheets advertise."""

    name: str
    gb_s: float  # memory bandwidth, 1e9 bytes/s
    memory_gb: float
    tflops: float  # 16-bit products, fp32 accumulation
    tflops_fp16: float  # the same with fp16 accumulation
    tflops_fp32: float


DEVICES = {
    "3090": Device("RTX 3090", 936, 24, 71, 142, 35.6),
    "3090ti": Device("RTX 3090 Ti", 1008, 24, 80, 160, 40),
    "4090": Device("RTX 4090", 1008, 24, 165, 330, 82.6),
    "h100": Device("H100", 3350, 80, 989, 989, 67),
    "h200": Device("H200", 4800, 141, 989, 989, 67),
}

# Devices with similar names but different memory: not in the table.
_OTHER_VARIANTS = re.compile(r"Laptop|Max-Q|PCIe|NVL|MIG|\bD\b")


def device_named(name: str) -> Device:
    """The device called `name`, in any case. Raises `FasteagleError` that lists the known ones."""
    key = name.lower().replace(" ", "").removeprefix("rtx")
    if key not in DEVICES:
        raise FasteagleError(
            f"device {name!r} is unknown: use {', '.join(DEVICES)}, "
            f"or {THIS!r} to measure this machine"
        )
    return DEVICES[key]


def device_reported_as(full_name: str) -> Device | None:
    """The data sheet for a driver's device name such as `NVIDIA GeForce RTX 3090`."""
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
        """`element_bytes` are those of the compute dtype; a None scheme is dense."""
        if scheme is None:
            return Storage(element_bytes, element_bytes, element_bytes)
        return Storage(scheme.linear_bytes, scheme.head_bytes, element_bytes)

    def pass_bytes(self, config: ModelConfig) -> int:
        """Weight bytes that every pass reads; the embedding's one row per token is not counted."""
        table = config.vocab_size * config.dim
        return int(config.linear_params * self.linear_bytes + table * self.head_bytes)

    def model_bytes(self, config: ModelConfig) -> int:
        """Weight bytes in memory; a tied embedding is kept apart from an LM head below 16 bits."""
        shared = config.tie_embeddings and self.head_bytes >= 2
        table = 0 if shared else config.vocab_size * config.dim
        return self.pass_bytes(config) + table * self.element_bytes


ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


def storage_named(name: str, config: ModelConfig, head_bits: int = 8) -> Storage:
    """What a precision of the benchmark costs: bf16, fp16, fp32, int8, int4 or a scheme.

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
class Time:
    """Seconds of reading, of computing, and the sum of the longer of the two over the parts."""

    memory: float = 0.0
    compute: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: Time) -> Time:
        return Time(
            self.memory + other.memory, self.compute + other.compute, self.seconds + other.seconds
        )

    @property
    def ms(self) -> float:
        return 1e3 * self.seconds

    @property
    def bound(self) -> str:
        return "memory" if self.memory >= self.compute else "compute"


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Times of one model on one device, with `context` positions in the cache."""

    device: Device
    config: ModelConfig
    storage: Storage
    context: int = 0
    fp16_accumulate: bool = False

    def verify(self, rows: int) -> Time:
        """A target pass over `rows` rows; one row is a plain pass."""
        config, storage = self.config, self.storage
        return (
            self._product(config.linear_params, storage.linear_bytes, rows)
            + self._product(config.vocab_size * config.dim, storage.head_bytes, rows)
            + self._attention(config, rows)
        )

    def draft(self, head: HeadConfig, tree: AnyShape) -> Time:
        """All passes of the draft head in a cycle, its linears stored like the target's.

        One extends by the committed positions, padded to D + 1 rows, with logits for the last; then
        a pass over the frontier for each level but the first.
        """
        frontier = tree.topk or -(-tree.nodes // tree.depth)  # static trees: about evenly
        total = self._head_pass(head, tree.depth + 1, 1)
        levels = tree.levels if isinstance(tree, FusedShape) else tree.depth
        for _ in range(levels - 1):
            total += self._head_pass(head, frontier, frontier)
        return total

    def memory_bytes(self, head: HeadConfig | None) -> int:
        """Weights, the draft head's if there is one, and the cache of `context` positions."""
        need = self.storage.model_bytes(self.config)
        need += self.config.kv_bytes(self.context, self.storage.element_bytes)
        if head is not None:
            need += int(head.linear_params * self.storage.linear_bytes)
            need += int(head.lm_head_params * self.storage.head_bytes)
            need += head.block.kv_bytes(self.context, self.storage.element_bytes)
        return need

    def _head_pass(self, head: HeadConfig, rows: int, logits: int) -> Time:
        table = head.draft_vocab_size * head.block.dim
        return (
            self._product(head.linear_params, self.storage.linear_bytes, rows)
            + self._product(table, self.storage.head_bytes, logits)
            + self._attention(head.block, rows)
        )

    def _product(self, weights: int, bytes_per_weight: float, rows: int) -> Time:
        return self._part(weights * bytes_per_weight, 2.0 * weights * rows)

    def _attention(self, config: ModelConfig, rows: int) -> Time:
        flops = 4.0 * config.n_layer * config.n_head * config.head_dim * self.context * rows
        return self._part(config.kv_bytes(self.context, self.storage.element_bytes), flops)

    def _part(self, n_bytes: float, flops: float) -> Time:
        memory = n_bytes / (self.device.gb_s * 1e9)
        compute = flops / (self._tflops * 1e12)
        return Time(memory, compute, max(memory, compute))

    @property
    def _tflops(self) -> float:
        if self.storage.element_bytes > 2:
            return self.device.tflops_fp32
        return self.device.tflops_fp16 if self.fp16_accumulate else self.device.tflops


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the benchmark to predict. `rows` are those of its target pass."""

    row: RowSpec
    precision: str
    storage: Storage
    tree: AnyShape | None
    tau: float
    context: int
    rows: int = 1


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Limits of one row. `draft` is None for rows without a draft head."""

    case: Case
    plain: Time
    verify: Time
    draft: Time | None
    memory_gb: float

    @property
    def seconds(self) -> float:
        """Of a cycle."""
        return self.verify.seconds + (self.draft.seconds if self.draft else 0.0)

    @property
    def tok_s(self) -> float:
        return self.case.tau / self.seconds

    @property
    def bound(self) -> str:
        return (self.verify + (self.draft or Time())).bound


def predict(
    cases: Iterable[Case],
    device: Device,
    config: ModelConfig,
    head: HeadConfig,
    fp16_accumulate: bool = False,
) -> list[Prediction]:
    """The limits of every case; `head` is the shape of the draft head that eagle rows use."""
    found = []
    for case in cases:
        model = Roofline(device, config, case.storage, case.context, fp16_accumulate)
        tree = case.tree if case.row.has_head else None
        draft = None if tree is None else model.draft(head, tree)
        memory_gb = model.memory_bytes(None if tree is None else head) / 1e9
        found.append(Prediction(case, model.verify(1), model.verify(case.rows), draft, memory_gb))
    return found
