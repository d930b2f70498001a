"""Weights, rows and parts that do not fit our CPU products: refused, not read."""

from __future__ import annotations

import pytest
import torch

from fasteagle.quant import cpu_build
from fasteagle.quant.cpu_linear import HEADER, pack
from test_cpu_kernels import packed_weight, rows_of


def test_rows_and_bias_may_lie_apart_only_where_they_are_copied(ops):
    memory = pack(packed_weight(32, 64, 32, "q4_1"))
    apart = rows_of(3, 128)[:, ::2]
    y = ops.linear(apart.contiguous(), memory, None, 32)
    assert torch.equal(ops.linear(apart, memory, None, 32), y)
    with pytest.raises(RuntimeError, match="bias is"):
        ops.linear(apart, memory, torch.zeros(64)[::2], 32)
    with pytest.raises(RuntimeError, match="not a packed weight"):
        ops.linear(apart, memory.repeat(2)[::2], None, 32)


# Outputs, and the first of them, of a weight of 48 outputs.
WRONG_PARTS = [(0, 0), (-16, 0), (8, 0), (16, 8), (16, -16), (16, 48), (64, 0)]


@pytest.mark.parametrize(("n", "first"), WRONG_PARTS)
def test_a_part_of_the_outputs_is_whole_blocks(ops, n, first):
    memory = pack(packed_weight(48, 64, 32, "q4_1"))
    with pytest.raises(RuntimeError, match="n is 48, or whole blocks"):
        ops.linear(torch.zeros(2, 64), memory, None, n, first)


def test_a_part_of_the_outputs_takes_no_bias(ops):
    memory = pack(packed_weight(48, 64, 32, "q4_1"))
    with pytest.raises(RuntimeError, match="n is 48, or whole blocks"):
        ops.linear(torch.zeros(2, 64), memory, torch.zeros(48), 16, 16)


# A kind of weight, and what its header says besides.
WRONG_HEADERS = [
    ("q4_1", {"magic": 0}),
    ("q4_1", {"K": 0}),
    ("q4_1", {"group_blocks": 0}),  # a division by zero ends the process
    ("q4_1", {"bits": 8}),
    ("int8", {"bits": 2}),
    ("q4_1", {"kind": 0}),
    ("q4_1", {"kind": 3}),
    ("int8", {"kind": 1}),
    ("q4_1", {"wide": 1}),
    ("q4_1", {"scales_at": 0}),
    ("q4_1", {"scales_at": 640}),
    ("q4_1", {"second_at": 448}),
    ("q4_1", {"second_at": 577}),
    ("int8", {"scales_at": 1025}),
    # Sums that overflow.
    ("q4_1", {"K": 2**31 - 1}),
    ("q4_1", {"N": 64, "stride": 2**62 + 320}),
    ("q4_1", {"scales_at": 2**63 - 1}),
    ("q4_1", {"second_at": 2**63 - 1}),
]
FIELDS = ["magic", "N", "K", "bits", "group_blocks", "wide", "kind", "base"]
FIELDS += ["stride", "scales_at", "second_at"]


@pytest.mark.parametrize(("kind", "changes"), WRONG_HEADERS, ids=str)
def test_a_header_that_does_not_fit_is_refused(ops, kind, changes):
    memory = pack(packed_weight(32, 64, 32, kind))
    header = dict(zip(FIELDS, HEADER.unpack(bytes(memory[: HEADER.size])), strict=True))
    assert changes.items() - header.items()
    new = HEADER.pack(*(header | changes).values())
    memory[: HEADER.size] = torch.frombuffer(bytearray(new), dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="not a packed weight"):
        ops.linear(torch.zeros(2, 64), memory, None, 32)


def test_a_weight_without_outputs_is_refused(ops):
    memory = pack(packed_weight(32, 64, 32, "q4_1"))[: HEADER.size]
    memory[4:8] = 0
    with pytest.raises(RuntimeError, match="not a packed weight"):
        ops.linear(torch.zeros(2, 64), memory, None, 0)


@pytest.mark.parametrize("wrong", ["short", "width", "length", "bias"])
def test_a_wrong_weight_is_refused(wrong):
    cpu_build.load()
    memory = pack(packed_weight(32, 64, 32, "q4_1"))
    x, bias = torch.zeros(2, 96 if wrong == "width" else 64), None
    if wrong == "short":
        memory = memory[:10]
    elif wrong == "length":
        memory = memory[:-64]
    elif wrong == "bias":
        bias = torch.zeros(5)
    with pytest.raises(RuntimeError, match="bias is" if wrong == "bias" else "weight|x is"):
        torch.ops.fasteagle_cpu.linear(x, memory.contiguous(), bias, 32)
