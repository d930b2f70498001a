"""Linears timed alone: the same work as in a decoder block, checked, their kernels compiled."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import bench_kernels
from fasteagle.bench import linear_cases
from fasteagle.errors import FasteagleError
from fasteagle.quant import interleaved

CPU = torch.device("cpu")
ODD = 160, 96  # neither whole blocks nor whole tiles


@pytest.mark.parametrize("kernel", linear_cases.OURS)
def test_cases_of_our_formats_are_right(kernel):
    K = 96 if "g32" in kernel or kernel == "int8" else 128  # groups are whole
    accumulate = "fp16" if kernel == "int4-g64" else "fp32"
    case = linear_cases.make_case(kernel, 160, K, accumulate)
    x = case.rows(5, CPU)
    assert x.shape == (5, 128) and not x[:, K:].any(), "whole tiles"
    assert case.check(x).shape == (5, 160)
    weights = [call.keywords["weight"] for call in case.calls]
    places = {weight.words.data_ptr() for weight in weights}
    assert len(places) == len(case.calls) >= 2, "copies, not all in the cache"
    assert weights[0].offsets == kernel.endswith("offsets")
    assert {call.keywords["accumulate"] for call in case.calls} == {accumulate} == {case.accumulate}
    assert case.n_bytes == weights[0].words.nbytes + weights[0].params.nbytes


def test_bytes_of_a_dense_weight():
    case = linear_cases.make_case(linear_cases.DENSE, *ODD, "fp32")
    assert {call.keywords["weight"].nbytes for call in case.calls} == {case.n_bytes}


def test_a_wrong_result_is_not_timed(monkeypatch):
    def wrong(x, weight, accumulate):
        y = interleaved.linear(x[:, : weight.K], weight, accumulate=accumulate)
        y[1, 3] += 0.01 * y.abs().max()
        return y

    monkeypatch.setattr(linear_cases, "reference_product", wrong)
    with pytest.raises(FasteagleError, match=r"2 rows by \[160, 96\] are wrong: error .*, limit"):
        bench_kernels.measure("int4-g32", *ODD, [2], "fp32", 1, "cpu")


def test_partial_sums_are_checked_by_their_sum():
    """[S, M, Np]: what lies past the first outputs is not looked at."""
    case = linear_cases.make_case("int4-g32", *ODD, "fp32")
    x = case.rows(3, CPU)
    whole = case.check(x)
    parts = torch.stack([whole - 1, torch.ones_like(whole)])
    parts = torch.nn.functional.pad(parts, (0, 96), value=torch.nan)
    assert dataclasses.replace(case, calls=[lambda x: parts]).check(x) is parts
    with pytest.raises(FasteagleError, match="are wrong"):
        dataclasses.replace(case, calls=[lambda x: parts[:1]]).check(x)
    parts[0, 0, 0] = torch.nan
    with pytest.raises(FasteagleError, match="error nan"):
        dataclasses.replace(case, calls=[lambda x: parts]).check(x)
