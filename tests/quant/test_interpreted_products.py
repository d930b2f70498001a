"""Products with packed weights by the kernels as compiled, in our interpreter of PTX.

One product of seven rows for each format is among the fast tests; most of the rest is slow.
"""

from __future__ import annotations

import pytest
import torch

from fasteagle.quant import interleaved, kernels, packed
from helpers import rest_slow
from kernel_cases import FORMATS, SHAPES, random_rows, random_weight, relative_error, tolerance
from ptx.operators import half_range

pytestmark = pytest.mark.usefixtures("card")
slow = pytest.mark.slow
# Each format with one kind of sums: of weights in groups of 32, 64, 128 and in 8 bits both kinds.
ONE_SUM = list(zip(FORMATS, 4 * ("fp16", "fp32"), strict=True))


@slow
@pytest.mark.parametrize(("name", "accumulate"), ONE_SUM)
def test_whole_numbers_come_out_exact(name, accumulate):
    M = 33 if accumulate == "fp16" else 16
    weight = random_weight(name, *SHAPES[name], whole=True)
    x = random_rows(M, weight.shape[1], whole=True)
    y = kernels.linear(x, interleaved.pack(weight), accumulate=accumulate)
    assert torch.equal(y, x.float() @ weight.dequantize().T)


@pytest.mark.parametrize("name", FORMATS)
def test_results(name, M=7):
    N, K = SHAPES[name]
    weight, x = random_weight(name, N, K), random_rows(M, K + 8)[:, :K]
    y = kernels.linear(x, interleaved.pack(weight), accumulate="fp32")
    assert y.shape == (M, weight.shape[0])
    assert y.dtype == torch.float32
    assert relative_error(y, x, weight) < tolerance(name, "fp32")


# Of the most rows that the kernels take, and of one block.
NUMBERS = [("g32", "fp16", kernels.MAX_ROWS), *((*kind, 16) for kind in ONE_SUM)]


@pytest.mark.parametrize(("name", "accumulate", "most"), rest_slow(NUMBERS))
def test_rows_do_not_depend_on_their_number(name, accumulate, most):
    weight = random_weight(name, *SHAPES[name])
    x, laid_out = random_rows(most, weight.shape[1]), interleaved.pack(weight)
    full = kernels.linear(x, laid_out, accumulate=accumulate)
    assert relative_error(full, x, weight) < tolerance(name, accumulate)
    for M in (1, 7):
        assert torch.equal(kernels.linear(x[:M], laid_out, accumulate=accumulate), full[:M])


@pytest.mark.parametrize("name", rest_slow(list(FORMATS)))
def test_many_rows_through_a_dequantized_copy(name):
    weight = random_weight(name, *SHAPES[name])
    x = random_rows(kernels.MAX_ROWS + 1, weight.shape[1])
    y = kernels.linear(x, interleaved.pack(weight))
    assert relative_error(y, x, weight) < 2e-4  # its weights are rounded to fp16


@pytest.mark.parametrize("bits", [4, 8])
def test_the_largest_sums_stay_within_fp16(bits):
    """Of 128 products: up to 65,504, the largest number of fp16."""
    ones = torch.ones(128, 1)
    if bits == 4:
        weight = packed.int4(torch.zeros(128, 128), ones.half(), zeros=16 * ones)
    else:
        weight = packed.int8(torch.full((128, 128), -127), ones)
    x = torch.full((1, 128), 511.75).half()
    y = kernels.linear(x, interleaved.pack(weight), accumulate="fp16")
    assert relative_error(y, x, weight) < tolerance("g128", "fp16")


def test_no_rows():
    weight = interleaved.pack(random_weight("g32", 33, 96))
    assert kernels.linear(torch.empty(0, 96).half(), weight).shape == (0, 33)


@slow
@pytest.mark.parametrize("card", [90], indirect=True)
@pytest.mark.parametrize(("name", "accumulate"), [ONE_SUM[i] for i in (0, 3, 5, 6)])
def test_on_hopper(card, name, accumulate):
    """The bits of a consumer card: the instructions differ, the order of sums does not."""
    weight = interleaved.pack(random_weight(name, *SHAPES[name]))
    x = random_rows(17, weight.K)
    y = kernels.linear(x, weight, accumulate=accumulate)
    card.capability = 86
    assert torch.equal(kernels.linear(x, weight, accumulate=accumulate), y)


@pytest.mark.parametrize(("name", "accumulate"), rest_slow(ONE_SUM))
def test_rows_whose_spans_have_scales(name, accumulate, M=7):
    """Inputs up to 100,000, beyond fp16's 65,504, and a NaN that must come out."""
    N, K = SHAPES[name][0], 192 if SHAPES[name][1] < 192 else SHAPES[name][1]
    weight = random_weight(name, N, K)
    x = random_rows(M, K).float()
    x[2] *= 3e4
    x[3, 70] = 1e5
    exponent = interleaved.LARGEST_EXPONENT[accumulate]
    half, scales = half_range(x, exponent)
    assert half.isfinite().all() and (scales > 1).any() and (scales == 1).any()
    laid_out = interleaved.pack(weight)
    padded = torch.nn.functional.pad(half, (0, laid_out.layout.padded(K) - K))
    spans = torch.nn.functional.pad(scales.T, (0, 0, 0, padded.shape[1] // 64 - scales.shape[1]))
    parts = kernels.partial_sums(padded, laid_out, accumulate, spans.contiguous())
    y = parts.sum(0)[:, :N]
    restored = (half.unflatten(1, (-1, 64)).float() * scales.unsqueeze(-1)).flatten(1)
    assert relative_error(y, restored, weight) < 2 * tolerance(name, accumulate)
    one = kernels.partial_sums(padded[:1], laid_out, accumulate, spans[:, :1].contiguous())
    assert torch.equal(one, parts[:, :1])
    padded[0, 0] = torch.nan
    y = kernels.partial_sums(padded, laid_out, accumulate, spans.contiguous()).sum(0)[:, :N]
    assert y[0].isnan().all() and y[1:].isfinite().all()


@pytest.mark.parametrize(
    ("name", "accumulate"), rest_slow([("g128", "fp16"), ("g32-offsets", "fp32"), ("int8", "fp16")])
)
def test_gated_products(name, accumulate, M=5):
    """Gate and up interleaved: their product comes out in fp16, large spans of it with a scale."""
    weight = random_weight(name, 256, 128)
    x = random_rows(M, 128)
    x[2] *= 300
    laid_out = interleaved.pack(weight)
    values, scales = kernels.gated(x, laid_out, accumulate)
    gate, up = kernels.linear(x, laid_out, accumulate=accumulate).unflatten(1, (-1, 2)).unbind(-1)
    expected, spans = half_range(
        torch.nn.functional.silu(gate) * up, interleaved.LARGEST_EXPONENT[accumulate]
    )
    torch.testing.assert_close(values, expected, rtol=2e-3, atol=1e-6)
    assert torch.equal(scales.T, spans) and (spans[2] > 1).any() and (spans == 1).any()
    assert torch.equal(kernels.gated(x[:1], laid_out, accumulate)[0], values[:1])
    split = interleaved.pack(random_weight("g128", 128, 2048))
    assert kernels.gated(random_rows(1, 2048), split, accumulate) is None
