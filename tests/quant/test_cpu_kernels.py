"""Our CPU products against the weights they stand for, on every path that this CPU can run."""

from __future__ import annotations

import errno
import mmap
import os

import pytest
import torch
from torch import Tensor

from fasteagle.model import RMSNorm
from fasteagle.quant import cpu_build, cpu_linear
from fasteagle.quant.cpu_linear import (
    ALIGNMENT,
    NativeLinear,
    NativeNorm,
    fits,
    in_huge_pages,
    pack,
)
from fasteagle.quant.packed import PackedWeight, int4, int8
from helpers import output_of
from rounding import rounded_activations

KINDS = ["zeros", "gptq", "q4_1", "hqq", "wide", "wide offsets", "int8"]
KINDS += ["wide zeros", "wide int8"]


def packed_weight(N: int, K: int, group: int, kind: str) -> PackedWeight:
    """Random values with parameters as one source of weights has them."""
    generator = torch.Generator().manual_seed(N * K + group)

    def uniform(low: float, high: float) -> Tensor:
        return torch.rand(N, K // group, generator=generator) * (high - low) + low

    if kind.endswith("int8"):
        values = torch.randint(-128, 128, (N, K), generator=generator)
        scales = uniform(0.001, 0.01)
        return int8(values, scales if kind == "wide int8" else scales.bfloat16())
    values = torch.randint(0, 16, (N, K), generator=generator)
    zeros = torch.randint(0, 17, (N, K // group), generator=generator)
    if kind == "zeros":
        return int4(values, uniform(0.001, 0.1).bfloat16(), zeros=zeros)
    if kind == "gptq":
        return int4(values, uniform(0.001, 0.1).half(), zeros=zeros)
    if kind == "q4_1":
        return int4(values, uniform(0.001, 0.1).half(), offsets=uniform(-0.5, 0.1).half())
    if kind == "hqq":  # rounded as the value of q = 8
        scales, midpoints = uniform(0.001, 0.1).bfloat16(), uniform(-0.1, 0.1).bfloat16()
        return int4(values, scales, offsets=midpoints.float() - 8 * scales.float())
    scales = uniform(0.001, 0.1)
    if kind == "wide zeros":
        return int4(values, scales, zeros=zeros)
    scales = scales.half() if kind == "wide offsets" else scales
    return int4(values, scales, offsets=uniform(-0.5, 0.1))


def rows_of(n: int, K: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, K, generator=generator) * torch.rand(n, 1, generator=generator) * 4


PRODUCTS = [  # each kind of weight in each group, of whole blocks of outputs and of more
    (kind, *size, (16, 37)[(i + j) % 2])
    for i, kind in enumerate(KINDS)
    for j, size in enumerate([(32, 96), (64, 192), (128, 384), (32, 32)])
]


@pytest.mark.parametrize(("kind", "group", "K", "N"), [*PRODUCTS, ("int8", 40, 40, 37)])
def test_products_and_rows_are_those_of_the_weight(ops, kind, group, K, N):
    weight = packed_weight(N, K, group, kind)
    memory, dense = pack(weight), weight.dequantize()
    assert torch.allclose(ops.rows(memory, torch.arange(N), K), dense, rtol=1e-6, atol=1e-7)
    x = rows_of(33, K)
    x[::2, 32:64] *= 8  # 17 rows with 16 bits in one block, if there are others
    x[1::4, :32] *= 8
    exact = rounded_activations(x) @ dense.double().T
    y = ops.linear(x, memory, None, N)
    assert (y - exact).abs().max() < 3e-6 * (x.abs() @ dense.abs().T).max()
    for T in range(1, 33):
        assert torch.equal(ops.linear(x[:T], memory, None, N), y[:T]), T
    assert torch.equal(ops.linear(x[20:23], memory, None, N), y[20:23])
    bias = torch.linspace(-1, 1, N)
    assert torch.equal(ops.linear(x, memory, bias, N), y + bias)
    assert torch.equal(
        ops.linear(x.bfloat16(), memory, None, N)[:3],
        ops.linear(x.bfloat16().float(), memory, None, N)[:3],
    )


def test_an_offset_far_below_its_scale_is_kept(ops):
    """The value of q = 8, in place of it, would be rounded to 8,000."""
    weight = int4(torch.zeros(16, 32), torch.full((16, 1), 1e3), offsets=torch.full((16, 1), 1e-4))
    rows = ops.rows(pack(weight), torch.arange(16), 32)
    assert torch.equal(rows, weight.dequantize()) and rows.all()


@pytest.mark.parametrize("kind", ["q4_1", "int8"])
def test_the_largest_sums_do_not_saturate(ops, kind):
    weight = packed_weight(16, 128, 32, kind)
    for value in (0, 15) if kind == "q4_1" else (-128, -127, 127):
        filled = torch.full((16, 128), value)
        if kind == "int8":
            extreme = int8(filled, weight.scales)
        else:
            extreme = int4(filled, weight.scales, offsets=weight.offsets)
        for sign in (1.0, -1.0):
            x = torch.full((3, 128), 2.54 * sign)
            exact = rounded_activations(x) @ extreme.dequantize().double().T
            y = ops.linear(x, pack(extreme), None, 16)
            assert torch.allclose(y.double(), exact, rtol=1e-5, atol=1e-5)


def test_what_is_not_finite_stays_visible(ops):
    memory = pack(packed_weight(32, 64, 32, "q4_1"))
    x = rows_of(4, 64)
    clean = ops.linear(x, memory, None, 32)
    x[1, 5], x[2, 40] = float("nan"), float("-inf")
    y = ops.linear(x, memory, None, 32)
    assert y[1:3].isnan().all() and torch.equal(y[[0, 3]], clean[[0, 3]])
    assert torch.equal(ops.linear(torch.zeros(2, 64), memory, None, 32), torch.zeros(2, 32))
    x[1, 5], x[2, 40] = 1e32, 1e34  # more than an activation can be
    y = ops.linear(x, memory, None, 32)
    assert y[1].isfinite().all() and y[2].isnan().all()


def test_rows_that_are_not_finite_leave_others_alone(ops):
    """There is room for the rounding errors of half of all blocks: NaN is not a large value."""
    memory = pack(packed_weight(32, 256, 32, "q4_1"))
    x = rows_of(33, 256)
    clean = ops.linear(x, memory, None, 32)
    x[:31] = float("nan")
    y = ops.linear(x, memory, None, 32)
    assert y[:31].isnan().all() and torch.equal(y[31:], clean[31:])


def test_small_rows_are_as_exact_as_others_until_they_count_as_zeros(ops):
    memory = pack(packed_weight(32, 64, 32, "q4_1"))
    x = rows_of(4, 64)
    y = ops.linear(x, memory, None, 32)
    small = ops.linear(x * 2.0**-80, memory, None, 32) * 2.0**80
    assert torch.allclose(small, y, rtol=1e-6, atol=1e-6)
    assert not ops.linear(x * 2.0**-110, memory, None, 32).any()


@pytest.mark.parametrize("V", [1, 15, 64, 500, 1031])
def test_the_largest_is_that_of_torch(ops, V):
    x = rows_of(9, V)
    x[1] = x[1].round()  # ties: the first counts
    x[2] = float("-inf")
    x[3, V // 2] = float("nan")
    x[4, V // 3] = float("inf")
    x[5, V - 1] = float("-inf")
    x[6] = 2.5
    for rows in (x, x[:1], x[:, : (V + 1) // 2]):
        values, places = ops.maximum(rows)
        expected = rows.max(dim=-1)
        assert torch.equal(places, expected.indices)
        torch.testing.assert_close(values, expected.values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("V", [1, 32, 70, 1031])
def test_tokens_without_a_bit_are_forbidden(ops, V):
    """Words of all bits, of none and of some, the last one of fewer tokens than it has bits."""
    allowed, x = torch.rand(5, V) < 0.5, rows_of(5, V)
    allowed[0], allowed[1], allowed[2, : V // 2] = True, False, False
    bits = torch.nn.functional.pad(allowed, (0, -V % 32)).view(5, -1, 32).long()
    words = (bits << torch.arange(32)).sum(-1).to(torch.int32)
    expected = x.masked_fill(~allowed, float("-inf"))
    ops.forbid(x, words)
    assert torch.equal(x, expected)
    for wrong in (words[:4], words[:, 1:], words.long()):
        with pytest.raises(RuntimeError, match="a bit for each logit"):
            ops.forbid(x, wrong)
    with pytest.raises(RuntimeError, match="fp32 logits"):
        ops.forbid(x.double(), words)


@pytest.mark.parametrize("V", [1, 15, 64, 1031])
def test_the_likeliest_are_those_of_torch(ops, V):
    x = 9 * rows_of(1, V)[0]
    x[V // 2] = float("-inf") if V > 1 else 0.5
    x[V // 3] = x[0] if V > 9 else x[V // 3]  # of equal ones the first
    expected = x.double().log_softmax(-1)
    for token, n in ((0, 0), (V // 3, min(V, 5)), (V - 1, V)):
        own, ids, values = ops.likeliest(x, token, n)
        assert own == pytest.approx(float(expected[token]), abs=1e-5)
        assert torch.equal(ids, expected.sort(descending=True, stable=True).indices[:n])
        torch.testing.assert_close(values, expected[ids], rtol=0, atol=1e-5)
    for row, token, n in ((x, V, 1), (x, -1, 1), (x, 0, V + 1), (x, 0, -1)):
        with pytest.raises(RuntimeError, match="a token, and as many"):
            ops.likeliest(row, token, n)
    with pytest.raises(RuntimeError, match="finite logits"):
        ops.likeliest(x * float("nan"), 0, 1)


def test_logits_that_do_not_fit_are_refused(ops):
    x, words = torch.zeros(2, 64), torch.zeros(2, 2, dtype=torch.int32)
    apart = torch.zeros(2, 128)[:, ::2]
    for wrong in (x.view(2, 8, 8), x.double(), x[:, :0]):
        with pytest.raises(RuntimeError, match="fp32"):
            ops.maximum(wrong)
    for wrong in (x.view(2, 64, 1), x.double(), apart):
        with pytest.raises(RuntimeError, match="fp32 logits"):
            ops.forbid(wrong, words)
    with pytest.raises(RuntimeError, match="a bit for each logit"):
        ops.forbid(x, words.view(2, 2, 1))
    for wrong in (x, x[0].double(), apart[0]):
        with pytest.raises(RuntimeError, match="fp32 logits"):
            ops.likeliest(wrong, 0, 1)


def test_a_norm_is_that_of_the_model(ops):
    norm = RMSNorm(100, 1e-5)
    norm.weight.data.uniform_(0.5, 2)
    x = rows_of(9, 100)
    y = ops.norm(x, norm.weight.detach(), 1e-5)
    assert torch.allclose(y, norm(x).detach(), rtol=1e-5, atol=1e-6)
    for t in range(9):
        assert torch.equal(ops.norm(x[t : t + 1], norm.weight.detach(), 1e-5)[0], y[t])


def test_modules():
    cpu_build.load()
    weight = packed_weight(48, 64, 32, "q4_1")
    bias = torch.linspace(-1, 1, 48)
    module = NativeLinear(weight, bias)
    x = rows_of(3, 64)
    exact = rounded_activations(x) @ weight.dequantize().double().T + bias
    assert torch.allclose(module(x), exact.float(), rtol=1e-4, atol=1e-4)
    assert module(x.bfloat16()).dtype == torch.bfloat16
    assert module.exact(x.bfloat16()).dtype == torch.float32
    unbiased = NativeLinear(weight, None)
    for start, stop in ((16, 48), (0, 16), (3, 20), (16, 20)):
        part, expected = unbiased.rows_product(x, start, stop), unbiased(x)[:, start:stop]
        assert (part - expected).norm() < 0.01 * expected.norm()
        assert start % 16 or stop % 16 or torch.equal(part, expected)
    with pytest.raises(RuntimeError, match="n is 48, or whole blocks"):
        torch.ops.fasteagle_cpu.linear(x, unbiased.packed, None, 32, 32)
    unbiased.use_reference()  # in which activations are not rounded
    part, expected = unbiased.rows_product(x, 0, 16), x @ weight.dequantize()[:16].T
    torch.testing.assert_close(part, expected, rtol=1e-5, atol=1e-5)
    index = torch.tensor([[4, 47], [0, 4]])
    assert torch.allclose(module.rows(index), weight.dequantize()[index], atol=1e-7)
    held = sum(t.numel() * t.element_size() for t in module.buffers())
    assert held <= 48 * 64 * 0.625 + 64 + 48 * 4 + 128 * 3
    norm = RMSNorm(64, 0.5).bfloat16()  # the model's epsilon counts
    normed = NativeNorm(norm)(x)
    torch.testing.assert_close(normed, norm(x).bfloat16(), rtol=1e-2, atol=1e-3)
    assert not fits(int8(torch.zeros(4, 48, dtype=torch.int8), torch.ones(4, 3)))


def test_threads_of_other_people_obey_the_number_that_was_set():
    """OpenMP's own number in a new thread is that of all cores: two here."""
    code = """
import ctypes, threading, torch
from fasteagle.quant import cpu_build
cpu_build.load()
torch.set_num_threads(1)
counts = []
def work():
    before = threads()
    torch.ops.fasteagle_cpu.maximum(torch.zeros(4, 4096))
    counts.append(threads() - before)
def threads():
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("Threads"))
thread = threading.Thread(target=work)
thread.start()
thread.join()
assert counts == [0], counts
"""
    environment = os.environ | {"OMP_NUM_THREADS": "3"}
    environment.pop("MKL_NUM_THREADS", None)
    output_of(code, env=environment)


def linears():
    generator = torch.Generator().manual_seed(1)
    sizes = [(48, 64), (17, 32), (100, 96)]
    made = []
    for size in sizes:
        values = torch.randint(-128, 128, size, generator=generator)
        made.append(NativeLinear(int8(values, torch.ones(size[0], 1)), None))
    return made


def test_weights_stay_where_they_are_if_memory_for_a_copy_is_short(monkeypatch):
    def fails(*args, **kwargs):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(cpu_linear.mmap, "mmap", fails)
    moved = linears()
    places = [linear.packed.data_ptr() for linear in moved]
    in_huge_pages(moved)
    assert [linear.packed.data_ptr() for linear in moved] == places


@pytest.mark.parametrize("refused", [False, True])
def test_weights_moved_into_huge_pages_are_the_same(refused, monkeypatch):
    class Memory(mmap.mmap):
        def madvise(self, *how):
            assert how == (mmap.MADV_HUGEPAGE,)
            if refused:
                raise OSError(errno.EINVAL, "no huge pages")
            super().madvise(*how)

    monkeypatch.setattr(cpu_linear.mmap, "mmap", Memory)
    before, after = linears(), linears()
    in_huge_pages(after)
    ends = []
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old.packed, new.packed)
        assert new.packed.data_ptr() % ALIGNMENT == 0 and new.packed.is_contiguous()
        ends += [new.packed.data_ptr(), new.packed.data_ptr() + new.packed.numel()]
    assert ends == sorted(ends)  # one after the other, none in another
    assert ends[-1] - ends[0] < sum(old.packed.numel() + ALIGNMENT for old in before)
    cpu_build.load()
    x = torch.randn(3, 32)
    assert torch.equal(before[1](x), after[1](x))
