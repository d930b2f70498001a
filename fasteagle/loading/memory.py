"""Memory that a model needs on a card, and the settings that fit. Needs no torch.

Counted: weights, draft head, both KV caches, the small caches that cycles are compiled with, the
largest weight dequantized for a prompt, the activations of a prompt's chunk with the keys and
values that it reads from 8 bits, or those of a tree, whose attention keeps a result for each split
of the text, and the memory of CUDA, its libraries and graphs (an estimate).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

from fasteagle.config import HeadConfig, ModelConfig
from fasteagle.errors import FasteagleError, size_of
from fasteagle.quant.scheme import BF16, INT8, Scheme, int4_for

CARDS = (8, 12, 16, 24, 32, 48, 80)  # GiB
CUDA_BYTES = 700 * 2**20  # context, cuBLAS workspaces, graphs: an estimate, not a measurement
CHUNK_ROWS = 1024  # tokens of a prompt's chunk on CUDA
TREE_SLOTS = 64 + 256  # cache slots past the context, rounding included
INT8_SPARE = 16  # bytes after a row of a KV cache in 8 bits
TRACED_SLOTS = 512  # of the caches that cycles are compiled with
TREE_ROWS = 32  # tokens of a target pass
SPLIT = 256  # positions, as `tree_kernels` cuts a text
SHORTEST = 1024  # tokens of context worth having


@dataclasses.dataclass(frozen=True)
class Setting:
    """Way to run a model: the scheme of its weights, its KV cache, its context in tokens."""

    scheme: Scheme
    kv: str
    context: int

    @property
    def precision(self) -> str:
        return "bf16" if self.scheme.bits == 16 else f"int{self.scheme.bits}"

    def __str__(self) -> str:
        return f"{self.precision}, kv int8" if self.kv == "int8" else self.precision

    @property
    def options(self) -> str:
        """Command-line options that choose this setting."""
        kv = " --kv int8" if self.kv == "int8" else ""
        return f"--precision {self.precision}{kv} --max-seq-len {self.context}"


def needed_bytes(
    config: ModelConfig, setting: Setting, head: HeadConfig | None = None, sequences: int = 1
) -> int:
    """Return the bytes of a card's memory that a model needs, with or without a draft head.

    Each of the sequences has KV caches for the whole context.
    """
    scheme, n_slots = setting.scheme, setting.context + TREE_SLOTS
    dense = scheme.bits == 16
    weights = 2 * config.params if dense else scheme.model_bytes(config)
    if head is not None:
        weights += scheme.draft_head_bytes(head)
    row = config.head_dim + INT8_SPARE if setting.kv == "int8" else 2 * config.head_dim
    all_slots = sequences * n_slots + TRACED_SLOTS
    cache = 2 * config.n_layer * config.n_kv_head * row * all_slots
    cache += 0 if head is None else head.block.kv_bytes(all_slots)
    scratch = 0 if dense else 2 * config.dim * max(2 * config.widest_ffn, config.qkv_dim)
    # fp32 results of gate and up, their halves in 16 bits, the residual stream twice in fp32.
    activations = CHUNK_ROWS * (2 * config.widest_ffn * 6 + config.dim * 8)
    if setting.kv == "int8":  # of one block: keys in 16 bits, values in fp32, scaled, in 16 bits
        activations += n_slots * config.n_kv_head * config.head_dim * 12
    # One [T, H, E] in fp32 for each split.
    parts = sequences * (n_slots // SPLIT) * TREE_ROWS * config.n_head * config.head_dim * 4
    return weights + cache + scratch + max(activations, parts) + CUDA_BYTES


def settings(config: ModelConfig, context: int) -> Iterator[Setting]:
    """Yield ways to run a model, the most exact first, then with less and less context."""
    schemes = [BF16, INT8]
    with contextlib.suppress(FasteagleError):  # no int4 where groups do not fit
        schemes.append(int4_for(config))
    yield from (Setting(scheme, "auto", context) for scheme in schemes)
    yield Setting(schemes[-1], "int8", context)
    while context > SHORTEST:
        context = max(SHORTEST, context // 2)
        yield Setting(schemes[-1], "int8", context)


def smaller_fit(
    config: ModelConfig,
    n_bytes: int,
    scheme: Scheme | None,
    kv: str,
    context: int,
    head: HeadConfig | None = None,
) -> str:
    """Return in words what to use with `n_bytes` of memory where this setting does not fit.

    The advice always needs less than the estimate for the setting that has failed.
    """
    failed = needed_bytes(config, Setting(scheme or BF16, kv, context), head)
    best = best_fit(config, min(n_bytes, failed - 1), context, head)
    if best is None:
        return "choose a smaller model"
    return f"use {best.options} ({size_of(needed_bytes(config, best, head))})"


def best_fit(
    config: ModelConfig, n_bytes: int, context: int, head: HeadConfig | None = None
) -> Setting | None:
    """Return the most exact setting that fits in `n_bytes`, None where none fits.

    `context` is the most tokens of context; a setting with fewer comes after all others.
    """
    fitting = (s for s in settings(config, context) if needed_bytes(config, s, head) <= n_bytes)
    return next(fitting, None)
