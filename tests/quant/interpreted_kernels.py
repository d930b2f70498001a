"""The Triton kernels on the CPU. `test_kernels.py` runs this file with TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import torch

from fasteagle.quant import kernels, planes
from kernel_cases import FORMATS, SHAPES, random_rows, random_weight, relative_error, tolerance

assert kernels.INTERPRETED, "run me with TRITON_INTERPRET=1"

EVERY_M = [(M, "fp32") for M in (1, 7, 16, 33)] + [(33, "fp16")]


@pytest.mark.parametrize(("M", "accumulate"), EVERY_M)
@pytest.mark.parametrize("name", FORMATS)
def test_whole_numbers_come_out_exact(name, M, accumulate):
    weight = random_weight(name, *SHAPES[name], whole=True)
    x = random_rows(M, weight.shape[1], whole=True)
    y = kernels.linear(x, planes.pack_planes(weight), accumulate=accumulate)
    assert torch.equal(y, x.float() @ weight.dequantize().T)


@pytest.mark.parametrize("accumulate", ["fp32", "fp16"])
@pytest.mark.parametrize("name", FORMATS)
def test_results(name, accumulate, M=7):
    weight = random_weight(name, *SHAPES[name])
    x = random_rows(M, weight.shape[1])
    y = kernels.linear(x, planes.pack_planes(weight), accumulate=accumulate)
    assert y.shape == (M, weight.shape[0])
    assert y.dtype == torch.float32
    assert relative_error(y, x, weight) < tolerance(name, accumulate)


@pytest.mark.parametrize("accumulate", ["fp32", "fp16"])
@pytest.mark.parametrize("name", FORMATS)
def test_rows_do_not_depend_on_their_number(name, accumulate):
    weight = planes.pack_planes(random_weight(name, *SHAPES[name]))
    x = random_rows(16, weight.K)
    full = kernels.linear(x, weight, accumulate=accumulate)
    for M in (1, 7):
        assert torch.equal(kernels.linear(x[:M], weight, accumulate=accumulate), full[:M])


@pytest.mark.parametrize("name", FORMATS)
def test_many_rows_through_a_dequantized_copy(name):
    weight = random_weight(name, *SHAPES[name])
    x = random_rows(kernels.MAX_ROWS + 1, weight.shape[1])
    y = kernels.linear(x, planes.pack_planes(weight))
    assert relative_error(y, x, weight) < 2e-4  # its weights are rounded to fp16


def test_a_massive_activation_stays_within_fp16():
    """LLaMA's down projection sees single inputs beyond 1,000; a sum in fp16 must survive them."""
    weight = random_weight("g128", 128, 128)
    x = random_rows(1, 128)
    x[:, 3:7] = 2500.0
    y = kernels.linear(x, planes.pack_planes(weight), accumulate="fp16")
    assert relative_error(y, x, weight) < tolerance("g128", "fp16")


def test_no_rows():
    weight = planes.pack_planes(random_weight("g32", 33, 96))
    assert kernels.linear(torch.empty(0, 96).half(), weight).shape == (0, 33)
