"""Weight formats of other tools, word by word.

The words are written out by hand, so that packer and importer cannot share a mistake.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fasteagle.errors import FasteagleError
from fasteagle.quant.formats import from_awq, from_compressed_tensors, from_gptq, gptq_zero_offset
from quantized_folders import awq_parts, compressed_parts, gptq_parts, make, word_rows


def test_a_gptq_word():
    qweight = torch.tensor([[0x76543210], [0x01234567]], dtype=torch.int32).repeat(1, 8)
    qzeros = torch.tensor([[0x76543210]], dtype=torch.int32)
    weight, columns = from_gptq(qweight, qzeros, torch.ones(1, 8), zero_offset=1)
    assert weight.values()[5].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 7, 6, 5, 4, 3, 2, 1, 0]
    assert weight.zeros.flatten().tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert columns is None


@pytest.mark.parametrize("K", [8, 16])
@pytest.mark.parametrize("N", [8, 16])
def test_weights_of_one_word_either_way(N, K):
    oracle = make(N, K, group=K, zeros=(1, 15))
    parts = gptq_parts(oracle)
    assert torch.equal(from_gptq(**parts, zero_offset=1).dequantize(), oracle.weight())
    assert torch.equal(from_awq(**awq_parts(oracle)).dequantize(), oracle.weight())
    parts = compressed_parts(oracle)
    weight, _ = from_compressed_tensors(
        parts["weight_packed"], oracle.scales, (N, K), parts["weight_zero_point"]
    )
    assert torch.equal(weight.dequantize(), oracle.weight())


@pytest.mark.parametrize(("zero_offset", "zero"), [(1, 16), (0, 15)])
def test_a_stored_zero_of_fifteen_does_not_wrap(zero_offset, zero):
    qweight, qzeros = torch.zeros(4, 8, dtype=torch.int32), torch.tensor([[-1]], dtype=torch.int32)
    weight, _ = from_gptq(qweight, qzeros, torch.ones(1, 8), zero_offset=zero_offset)
    assert weight.zeros.flatten().tolist() == [zero] * 8
    assert weight.dequantize().unique().tolist() == [-zero]


def test_an_awq_word():
    qweight = torch.tensor([[0x75316420]] * 4, dtype=torch.int32)
    qzeros = torch.tensor([[0x00000010]], dtype=torch.int32)  # the second nibble: column 2
    weight = from_awq(qweight, qzeros, torch.ones(1, 8))
    assert weight.values().tolist() == [[n] * 4 for n in range(8)]
    assert weight.zeros.flatten().tolist() == [0, 0, 1, 0, 0, 0, 0, 0]


def test_a_compressed_tensors_word():
    packed = torch.tensor([[0x76543210]], dtype=torch.int32)
    weight, _ = from_compressed_tensors(packed, torch.ones(1, 1), (1, 8))
    assert weight.dequantize().tolist() == [[-8, -7, -6, -5, -4, -3, -2, -1]]


def test_compressed_tensors_padding_is_cut():
    oracle = make(12, 36, group=12)
    parts = compressed_parts(oracle)
    assert parts["weight_packed"].shape == (12, 5)
    assert parts["weight_zero_point"].shape == (2, 3)
    weight, _ = from_compressed_tensors(
        parts["weight_packed"], parts["weight_scale"], (12, 36), parts["weight_zero_point"]
    )
    assert torch.equal(weight.dequantize(), oracle.weight())


def test_compressed_tensors_unused_g_idx():
    oracle = make(8, 64)
    parts = compressed_parts(oracle)
    unused = torch.full((64,), -1, dtype=torch.int32)
    weight, columns = from_compressed_tensors(
        parts["weight_packed"], oracle.scales, (8, 64), parts["weight_zero_point"], unused
    )
    assert columns is None
    assert torch.equal(weight.dequantize(), oracle.weight())


def test_compressed_tensors_of_an_odd_number_of_columns():
    """Two of them share a byte here."""
    with pytest.raises(FasteagleError, match="shapes do not fit each other: weight_packed"):
        from_compressed_tensors(torch.zeros(1, 2, dtype=torch.int32), torch.ones(1, 9), (1, 9))


@pytest.mark.parametrize(
    ("stored", "v2", "sym", "offset"),
    [
        ([8, 8, 8], False, True, 0),  # v2 labelled gptq
        ([7, 7, 7], True, True, 1),  # the other way round
        ([7, 7, 7], False, True, 1),
        ([8, 8, 8], True, True, 0),
        ([8, 8, 8], False, False, 1),  # asymmetric: the label decides
        ([7, 7, 7], True, False, 0),
        ([8, 7, 8], False, True, 1),
        ([8, 7, 8], True, True, 0),
    ],
)
def test_gptq_zero_offset(stored, v2, sym, offset):
    qzeros = word_rows(np.array(stored).repeat(8)[None], 4)
    assert gptq_zero_offset(qzeros, bits=4, v2=v2, sym=sym) == offset


@pytest.mark.parametrize(("stored", "offset"), [(128, 0), (127, 1), (200, 1)])
def test_gptq_zero_offset_of_8_bits(stored, offset):
    qzeros = word_rows(np.full((2, 8), stored), 8)
    assert gptq_zero_offset(qzeros, bits=8, v2=False, sym=True) == offset


def test_zero_points_of_8_bits_stored_plainly():
    """The middle of the range is symmetric, and imported; any other is refused by its name."""
    packed, scales = torch.zeros(4, 8, dtype=torch.int32), torch.ones(4, 1)
    zeros = torch.zeros(4, 1, dtype=torch.int8)
    weight, _ = from_compressed_tensors(packed, scales, (4, 32), zeros)
    assert weight.bits == 8 and weight.dequantize().unique().tolist() == [-128]
    with pytest.raises(FasteagleError, match="asymmetric 8-bit compressed-tensors"):
        from_compressed_tensors(packed, scales, (4, 32), zeros + 1)
