"""Import GGUF's blocks of quantized weights as `PackedWeight`, in 4 or 8 bits, groups of 32.

These functions take tensors only; `loading.gguf` reads the file.

Shapes: N output rows, K input columns, G = K / 32 groups in a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fasteagle.errors import FasteagleError
from fasteagle.quant.formats import refused
from fasteagle.quant.packed import PackedWeight, int4, stack
from fasteagle.quant.params import int8_groups

GGUF_GROUP = 32
# Bytes of a block, which has 32 weights, or 256 in the types with K or XS in their name.
GGUF_BLOCKS = {
    "Q4_0": 18,
    "Q4_1": 20,
    "Q5_0": 22,
    "Q5_1": 24,
    "Q8_0": 34,
    "IQ4_NL": 18,
    "Q2_K": 84,
    "Q3_K": 110,
    "Q4_K": 144,
    "Q5_K": 176,
    "Q6_K": 210,
    "IQ4_XS": 136,
}
GGUF_EXACT = frozenset({"Q4_0", "Q4_1", "Q8_0"})  # bit-equal to `gguf.quants.dequantize`
GGUF_4_BITS = frozenset({"Q4_0", "Q4_1", "Q4_K"})  # other types become 8 bits
GGUF_WIDENED = frozenset({"Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS"})  # to twice their size and more
CONVERTED_VALUES = 1 << 20  # values dequantized at a time: an LM head in fp32 takes gigabytes


def from_gguf_blocks(raw: Tensor, kind: str) -> PackedWeight:
    """Import GGUF rows, uint8 [N, bytes of a row], with 4 bits for `GGUF_4_BITS`, else 8.

    Groups have 32 columns. Q4_0, Q4_1, Q8_0 keep every value in fp32 (`GGUF_EXACT`). Their block is
    fp16 d, for Q4_1 fp16 m, then 16 bytes with weights 0 .. 15 in their low and 16 .. 31 in their
    high nibbles, or 32 int8: `d * (q - 8)`, `d * q + m`, `d * q`. Q4_K keeps the stored values and
    rounds its parameters to fp16 (`_q4_k`). Values of the other types in `GGUF_BLOCKS` are rounded
    to 8 bits, by at most about amax / 254 of a group (`int8_groups`). Raises `FasteagleError` for
    types that are not in `GGUF_BLOCKS`.
    """
    if kind not in GGUF_BLOCKS:
        raise refused(f"GGUF {kind} weights")
    size = GGUF_BLOCKS[kind]
    if raw.ndim != 2 or raw.dtype != torch.uint8 or raw.shape[1] % size:
        raise FasteagleError(
            f"{raw.dtype} {tuple(raw.shape)} are no rows of {kind} blocks of {size} bytes; "
            "fetch the file again"
        )
    if kind == "Q4_K":
        return _q4_k(raw)
    if kind not in GGUF_EXACT:
        return _converted(raw, kind)
    blocks = raw.unflatten(1, (-1, size))  # [N, G, size]
    n_params = 2 if kind == "Q4_1" else 1
    params = blocks[..., : 2 * n_params].contiguous().view(torch.float16)
    scales = params[..., 0].contiguous()
    rest = blocks[..., 2 * n_params :]
    if kind == "Q8_0":
        return PackedWeight(8, GGUF_GROUP, rest.contiguous().view(torch.int8).flatten(1), scales)
    values = torch.cat((rest & 15, rest >> 4), dim=-1).flatten(1)
    if kind == "Q4_1":
        return int4(values, scales, offsets=params[..., 1].contiguous())
    return int4(values, scales, zeros=torch.full(scales.shape, 8))


def _q4_k(raw: Tensor) -> PackedWeight:
    """Import Q4_K rows: `d * sc * q - dmin * m`, blocks of 256 in groups of 32.

    A block is fp16 d and dmin, 12 bytes with the 6-bit sc and m of 8 groups, and 128 bytes: 32 of
    them hold one group in their low nibbles and the next one in their high nibbles. d * sc and
    dmin * m are rounded to fp16, by at most 2^-11 of each (subnormal products are exact: d is a
    multiple of 2^-24), so a weight by at most 2^-11 * (d * sc * q + dmin * m). Parameters
    beyond the range of fp16, which ordinary files do not have, stay fp32.
    """
    blocks = raw.unflatten(1, (-1, GGUF_BLOCKS["Q4_K"]))  # [N, K / 256, 144]
    d, dmin = blocks[..., :4].contiguous().view(torch.float16).float().split(1, dim=-1)
    a, b, c = blocks[..., 4:16].split(4, dim=-1)
    sc = torch.cat((a & 63, (c & 15) | ((a >> 2) & 48)), dim=-1)
    m = torch.cat((b & 63, (c >> 4) | ((b >> 2) & 48)), dim=-1)
    params = torch.stack(((d * sc).flatten(1), (-dmin * m).flatten(1)))  # [2, N, G]
    short = params.to(torch.float16)
    scales, offsets = short if bool(short.isfinite().all()) else params
    nibbles = blocks[..., 16:].unflatten(-1, (4, 1, 32))
    values = torch.cat((nibbles & 15, nibbles >> 4), dim=-2).flatten(1)
    return int4(values, scales, offsets=offsets)


def _converted(raw: Tensor, kind: str) -> PackedWeight:
    """Import rows of any type that the gguf package dequantizes, rounded by `int8_groups`."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType  # 0.2 s, for GGUF files only
    from gguf.quants import dequantize

    qtype = GGMLQuantizationType[kind]
    n_values, n_bytes = GGML_QUANT_SIZES[qtype]
    columns = raw.shape[1] // n_bytes * n_values
    parts = [
        int8_groups(torch.from_numpy(dequantize(rows.numpy(), qtype)), GGUF_GROUP)
        for rows in raw.split(max(1, CONVERTED_VALUES // columns))
    ]
    return stack(parts)
