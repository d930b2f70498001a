"""Linears timed alone: the same work as in a decoder block, checked, their kernels compiled."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch

from fasteagle.bench import linear_cases
from fasteagle.errors import FasteagleError
from fasteagle.quant import interleaved
from fasteagle.quant.interleaved import layout_for
from fasteagle.quant.tiling import Card, split_k
from helpers import SCRIPTS, Driver

CPU = torch.device("cpu")
SPLIT = 256, 2048  # a shape whose products are split along K
ODD = 160, 96  # neither whole blocks nor whole tiles


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import bench_kernels

    return bench_kernels


def test_a_timed_product_is_the_one_launch_that_is_predicted(monkeypatch):
    """Blocks leave the sums over splits to the next kernel, and so does the prediction."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from fasteagle.quant import kernels

    launches = []

    class Kernel:
        def __init__(self, name):
            self.name = name

        def __getitem__(self, grid):
            return lambda *args, **options: launches.append(self.name)

    for name in ("interleaved_kernel", "sum_kernel", "dequantize_kernel"):
        monkeypatch.setattr(kernels, name, Kernel(name))
    assert split_k(layout_for(4, 128, SPLIT[1]), *SPLIT, Card.like_3090(82)) > 1
    weight = interleaved.pack(linear_cases.random_weight("int4-g128", *SPLIT))
    parts = linear_cases.block_product(torch.zeros(16, SPLIT[1]).half(), weight, "fp16")
    assert launches == ["interleaved_kernel"] and parts.shape[0] > 1
    launches.clear()
    linear_cases.block_product(torch.zeros(65, SPLIT[1]).half(), weight, "fp16")
    assert launches == ["dequantize_kernel"], "more rows than the kernels take"


@pytest.mark.parametrize("kernel", linear_cases.OURS)
def test_cases_of_our_formats_are_right(kernel):
    K = 96 if "g32" in kernel or kernel == "int8" else 128  # groups are whole
    case = linear_cases.make_case(kernel, 160, K, "fp32")
    x = case.rows(5, CPU)
    assert x.shape == (5, 128) and not x[:, K:].any(), "whole tiles"
    assert case.check(x).shape == (5, 160)
    assert len(case.calls) >= 2


def test_a_wrong_result_is_not_timed(bench, monkeypatch):
    def wrong(x, weight, accumulate):
        y = interleaved.linear(x[:, : weight.K], weight, accumulate=accumulate)
        y[1, 3] += 0.01 * y.abs().max()
        return y

    monkeypatch.setattr(linear_cases, "reference_product", wrong)
    with pytest.raises(FasteagleError, match=r"2 rows by \[160, 96\] are wrong: error .*, limit"):
        bench.measure("int4-g32", *ODD, [2], "fp32", 1, "cpu")


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


def test_bytes_are_those_of_the_weight_and_both_sides(bench, monkeypatch):
    """Parts of a sum are no bytes of the product."""
    monkeypatch.setattr(bench, "_time_on_cpu", lambda call, x: 1.0)
    ((rows, us, gb_s),) = bench.measure("int8", 256, 128, [4], "fp32", 1, "cpu")
    weight = 256 * 128 + 4 * 256
    assert (rows, us, gb_s) == (4, 1.0, pytest.approx((weight + 2 * 4 * 128 + 4 * 4 * 256) / 1e3))


@pytest.fixture
def card(monkeypatch, tmp_path):
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    from triton.runtime.driver import driver

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr(driver, "_active", Driver(98))
    return triton.knobs.runtime


def test_what_is_timed_is_compiled_before(card, monkeypatch, tmp_path):
    """The launches of a case miss nothing, and its variants are compiled several at a time."""
    workers = []
    compile_all = linear_cases.compile_all
    monkeypatch.setattr(
        linear_cases, "compile_all", lambda *args: workers.append(args[2]) or compile_all(*args)
    )
    weight = interleaved.pack(linear_cases.random_weight("int4-g128", *SPLIT))
    inputs = [torch.zeros(rows, SPLIT[1]).half() for rows in (1, 32)]
    calls = [lambda x: linear_cases.block_product(x, weight, "fp16")]
    case = linear_cases.Case(calls, 1, torch.float16, *SPLIT, SPLIT[1], reference=torch.zeros(1, 1))

    def missed():
        """Return the kernels that the products would have to compile."""
        missing = []
        with monkeypatch.context() as patched:
            patched.setattr(card, "jit_cache_hook", lambda **key: missing.append(key) or True)
            for x in inputs:
                with contextlib.suppress(Exception):  # there is no card to launch on
                    calls[0](x)
        return missing

    assert len(missed()) == 2
    case.compile_for(inputs)
    assert workers and workers[0] >= 1
    assert list((tmp_path / "triton").rglob("*.cubin")) and not missed()


def test_our_kernels_are_predicted_and_others_are_not(bench):
    card = Card.like_3090(82)
    us = bench.predicted_us("int4-g128", 22016, 4096, 16, "fp16", card)
    assert 50 < us < 80, "47.9 MB at 936 GB/s are 51 us"
    assert bench.predicted_us("int8", 22016, 4096, 16, "fp16", card) > 1.5 * us
    assert bench.predicted_us("int4-g32", 22016, 4096, 16, "fp16", card) > us
    assert bench.predicted_us("fp16", 4096, 4096, 1, "fp32", card) is None
