"""Quantized weights: the format, how values are chosen, and the CPU modules against it."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fasteagle.errors import FasteagleError
from fasteagle.loading import source
from fasteagle.loading.source import Linears, head_scheme, quantize_, quantize_head_
from fasteagle.model import EagleHead, rows_product
from fasteagle.quant import interleaved, packed
from fasteagle.quant import linear as linear_module
from fasteagle.quant.cuda_linear import InterleavedLinear, in_half_range
from fasteagle.quant.linear import (
    Int4Linear,
    Int8Linear,
    Permuted,
    QuantizedLMHead,
    SideBySide,
    make_linear,
)
from fasteagle.quant.packed import (
    PackedWeight,
    pack_nibbles,
    stack,
    stack_one_by_one,
    unpack_nibbles,
)
from fasteagle.quant.params import quantize_weight
from fasteagle.quant.scheme import Scheme
from helpers import raising, random_head, random_target, tiny_config

SCHEMES = [Scheme(8), Scheme(8, 32)]
SCHEMES += [Scheme(4, group, method) for method in ("minmax", "hqq") for group in (32, 64, 128)]


def weight(n=48, k=256, seed=0) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * 0.05


@pytest.mark.parametrize("sums", ["fp16", "fp32"])
def test_what_products_add_up_in_is_the_devices(monkeypatch, sums):
    """All but the LM head's, whose logits decide."""
    devices = []
    monkeypatch.setattr(linear_module, "accumulate_on", lambda d: devices.append(d) or sums)
    monkeypatch.setattr(PackedWeight, "to", lambda self, device: self)
    made = make_linear(quantize_weight(weight(), Scheme(4, 64)), None, "cuda:1", torch.bfloat16)
    assert isinstance(made, InterleavedLinear) and made.accumulate == sums
    assert devices == [torch.device("cuda", 1)]
    assert QuantizedLMHead(made).linear.accumulate == "fp32"


@pytest.mark.parametrize("scheme", [Scheme(8), Scheme(4, 32)], ids=["int8", "int4"])
@pytest.mark.parametrize("n", [192, 144])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_product_are_those_of_the_whole(scheme, n, dtype, monkeypatch):
    """As experts run, which are stacked along the outputs; blocks of 64 cost no others."""
    made = make_linear(quantize_weight(weight(n), scheme), None, "cpu", dtype)
    x = torch.randn(5, 256).to(dtype)
    whole = made(x)
    if n == 192:
        monkeypatch.setattr(type(made), "forward", raising(AssertionError("of all outputs")))
    for start in range(0, n, n // 3):
        part = rows_product(made, x, start, start + n // 3)
        assert torch.allclose(part, whole[:, start : start + n // 3], rtol=1e-5, atol=1e-6)


def test_nibbles_by_hand():
    values = torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)
    assert pack_nibbles(values).tolist() == [[0x21, 0x0F]]
    assert torch.equal(unpack_nibbles(pack_nibbles(values)), values)


def test_what_a_weight_means_by_hand():
    q = torch.tensor([[0, 3, 15, 8]])
    zeros = packed.int4(q, torch.tensor([[0.5, 2.0]]).half(), zeros=torch.tensor([[3, 16]]))
    assert zeros.dequantize().tolist() == [[-1.5, 0.0, -2.0, -16.0]]
    offsets = torch.tensor([[1.0, -1.0]])
    floats = packed.int4(q, torch.tensor([[0.5, 2.0]]), offsets=offsets)
    assert floats.dequantize().tolist() == [[1.0, 2.5, 29.0, 15.0]]
    eight = packed.int8(torch.tensor([[-128, 127]]), torch.tensor([[0.5]]))
    assert eight.dequantize().tolist() == [[-64.0, 63.5]]
    scales, b = zeros.affine()
    assert b.tolist() == [[-1.5, -32.0]] and scales.tolist() == [[0.5, 2.0]]


def test_stacking_keeps_every_value():
    a = quantize_weight(weight(seed=1), Scheme(4, 64))
    b = quantize_weight(weight(seed=2), Scheme(4, 64, "hqq"))
    c = dataclasses.replace(a, scales=(a.scales.float() * 1.001).half())  # not exact in bf16
    for parts in ((a, a), (a, b), (b, b), (a, c), (c, a)):
        whole = stack(parts)
        expected = torch.cat([part.dequantize() for part in parts])
        assert torch.allclose(whole.dequantize(), expected, rtol=1e-6, atol=1e-7)
        assert torch.equal(whole.values(), torch.cat([part.values() for part in parts]))
    index = torch.tensor([5, 0, 7])
    assert torch.equal(a.rows(index).dequantize(), a.dequantize()[index])


def test_of_weights_that_make_one_product_those_in_eight_bits_stay():
    four, eight = quantize_weight(weight(), Scheme(4, 64)), quantize_weight(weight(), Scheme(8, 32))
    widened, same = source._in_same_bits([four, eight])
    assert same is eight and (widened.bits, widened.group_size) == (8, 32)


@pytest.mark.parametrize(
    ("native", "head_bits", "is_own"), [(True, 8, True), (False, 8, False), (True, 4, False)]
)
def test_a_tied_table_in_the_bits_of_the_lm_head_is_not_rounded_again(
    monkeypatch, native, head_bits, is_own
):
    """Where kernels have its groups."""
    made, table = [], quantize_weight(weight(k=64), Scheme(8, 32))
    monkeypatch.setattr(source, "make_linear", lambda w, *more: made.append(w) or nn.Identity())
    checkpoint = SimpleNamespace(
        scheme=Scheme(8, 32, "own", head_bits),
        config=SimpleNamespace(tie_embeddings=True),
        packed=lambda name: table,
        columns=lambda name: None,
        load=lambda name: table.dequantize(),
    )
    Linears(checkpoint, "cpu", torch.bfloat16, native).lm_head()
    assert [weight is table for weight in made] == [is_own]


def test_a_product_of_which_only_a_part_is_quantized_is_refused():
    packed = {"a": quantize_weight(weight(), Scheme(8)), "b": None}
    checkpoint = SimpleNamespace(scheme=Scheme(8), packed=packed.get)
    with pytest.raises(FasteagleError, match="a, b make one product, but only some are quantized"):
        Linears(checkpoint, "cpu", torch.bfloat16).linear(["a", "b"], None)


def test_stacking_one_by_one_is_left_where_formats_differ():
    a, b = (quantize_weight(weight(seed=i), Scheme(4, 64)) for i in (1, 2))
    whole, expected = stack_one_by_one(iter((a, b)), 96), stack((a, b))
    assert all(map(torch.equal, whole.tensors().values(), expected.tensors().values()))
    for method, group, dtype in (("minmax", 32, None), ("hqq", 64, None), ("minmax", 64, "half")):
        other = quantize_weight(weight(), Scheme(4, group, method))
        if dtype:
            other = dataclasses.replace(other, scales=other.scales.half())
        assert stack_one_by_one(iter((a, other)), 96) is None


def test_group_sizes_that_do_not_divide():
    with pytest.raises(FasteagleError, match="64 does not divide the 96 inputs .*: use g32"):
        quantize_weight(weight(k=96), Scheme(4, 64))


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)
def test_errors_stay_within_half_a_step(scheme):
    w = weight()
    quantized = quantize_weight(w, scheme)
    step = quantized.scales.float().repeat_interleave(quantized.group_size, 1)
    error = (quantized.dequantize() - w).abs()
    if scheme.method == "hqq":  # it clips outliers on purpose
        assert (error <= 0.51 * step).float().mean() > 0.97
    else:
        assert (error <= 0.54 * step).all()  # scales are rounded to bf16
    assert quantized.scales.dtype == torch.bfloat16


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)
def test_groups_of_zeros_or_of_one_sign(scheme):
    w = weight(6, 128).abs() + 0.1
    w[1], w[2:4] = 0, -w[2:4]
    w[4:] *= 1e-9
    restored = quantize_weight(w, scheme).dequantize()
    assert restored.isfinite().all() and not restored[1].any()
    assert (restored[:4] - w[:4]).abs().max() < 0.05 * w.max() and restored[4:].abs().max() < 1e-4


def test_hqq_beats_min_max_where_weights_have_outliers():
    w = weight()
    w[::7, ::31] *= 8
    norms = {}
    for method in ("minmax", "hqq"):
        error = quantize_weight(w, Scheme(4, 64, method)).dequantize() - w
        norms[method] = error.abs().pow(0.7).mean()
    assert norms["hqq"] < norms["minmax"]


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)
@pytest.mark.parametrize(("n", "rows"), [(48, 1), (41, 33)])
def test_modules_multiply_what_is_stored(scheme, n, rows):
    quantized = quantize_weight(weight(n), scheme)
    x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(3)).bfloat16()
    bias = torch.linspace(-1, 1, n)
    exact = x.float() @ quantized.dequantize().T + bias
    module = make_linear(quantized, bias, "cpu", torch.bfloat16)
    assert (module(x).float() - exact).abs().max() < 0.02 * exact.abs().max()
    dense = make_linear(quantized, bias, "cpu", torch.float32)
    assert torch.allclose(dense(x.float()), exact, atol=1e-5)


@pytest.mark.parametrize("method", ["minmax", "hqq"])
@pytest.mark.parametrize(
    ("k", "group", "runs_in"),
    [(k, group, 256) for k, group in ((1024, 512), (1024, 1024), (256, 256))]
    + [(192, 96, 32), (96, 0, 32), (128, 16, None), (80, 0, None)],
)
def test_int4_in_groups_that_aten_has_not(method, k, group, runs_in):
    """Groups are split where that fits, else the weight is dense."""
    quantized = quantize_weight(weight(41, k), Scheme(4, group, method))
    module = make_linear(quantized, None, "cpu", torch.bfloat16)
    assert getattr(module, "group_size", None) == runs_in
    assert isinstance(module, nn.Linear if runs_in is None else Int4Linear)
    x = torch.randn(3, k).bfloat16()
    exact = x.float() @ quantized.dequantize().T
    assert (module(x).float() - exact).norm() < 0.02 * exact.norm()
    if runs_in is not None:
        assert torch.equal(quantized.in_groups_of(runs_in).dequantize(), quantized.dequantize())


@pytest.mark.parametrize(("k", "kind"), [(33, nn.Linear), (172, nn.Linear), (64, Int8Linear)])
def test_int8_of_widths_that_aten_has_not(k, kind):
    """ATen's product reads beyond the weight there."""
    quantized = quantize_weight(weight(3, k), Scheme(8))
    module = make_linear(quantized, None, "cpu", torch.bfloat16)
    assert isinstance(module, kind)
    x = torch.randn(5, k).bfloat16()
    exact = x.float() @ quantized.dequantize().T
    assert (module(x).float() - exact).norm() < 0.02 * exact.norm()
    head = QuantizedLMHead(module)
    exact = x.float() @ head.rows(torch.arange(3)).float().T
    assert head(x).dtype == torch.float32 and torch.allclose(head(x), exact, atol=1e-5)


def test_each_weight_is_held_once():
    """Bytes of a module's buffers: design's figures for int4, one byte a weight for int8."""
    limits = {Scheme(4, 32): 0.63, Scheme(4, 64): 0.57, Scheme(4, 128): 0.54, Scheme(8): 1.01}
    for scheme, most in limits.items():
        module = make_linear(quantize_weight(weight(), scheme), None, "cpu", torch.bfloat16)
        held = sum(t.numel() * t.element_size() for t in module.buffers())
        assert held / (48 * 256) <= most and not list(module.parameters())


def test_rows_of_a_module_are_those_of_the_weight():
    index = torch.tensor([40, 3, 3])
    for scheme, kind in ((Scheme(8), Int8Linear), (Scheme(4, 64), Int4Linear)):
        quantized = quantize_weight(weight(41), scheme)
        module = make_linear(quantized, None, "cpu", torch.bfloat16)
        assert isinstance(module, kind)
        expected = quantized.dequantize()[index]
        assert (module.rows(index).float() - expected).abs().max() < 0.005 * expected.abs().max()


def test_the_own_lm_head_of_a_draft_head_yields_fp32_on_cuda(monkeypatch):
    """As the target's: sums in fp32, and no logit rounded."""
    monkeypatch.setattr(
        source, "make_linear", lambda weight, bias, *_: InterleavedLinear(weight, bias, "fp16")
    )
    target = random_target(tiny_config(dim=64)).bfloat16()
    head = random_head(target, draft_ids=torch.arange(0, 60, 2))
    quantize_head_(head, Scheme(8, head_bits=8))
    assert isinstance(head.lm_head, QuantizedLMHead) and head.lm_head.linear.accumulate == "fp32"
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    logits, rows = head.lm_head(x), head.lm_head.rows(torch.arange(30))
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, x.float() @ rows.T, rtol=1e-5, atol=1e-5)
    assert head.fc.accumulate == "fp16"


@pytest.mark.parametrize("scheme", [Scheme(8), Scheme(4, 64)], ids=str)
def test_rows_of_the_linear_of_cuda_cost_no_others(scheme, monkeypatch):
    quantized = quantize_weight(weight(300), scheme)
    linear, sizes = InterleavedLinear(quantized, None), []
    dequantize = interleaved.dequantize
    monkeypatch.setattr(interleaved, "dequantize", lambda w: sizes.append(w.shape) or dequantize(w))
    expected = dequantize(interleaved.pack(quantized))
    for index in (torch.tensor([299, 3, 3]), torch.arange(300)):
        assert torch.equal(linear.rows(index), expected[index])
    assert sizes == [(3, 256), (300, 256)]


@pytest.mark.parametrize("scheme", [Scheme(8), Scheme(4, 64)], ids=str)
@pytest.mark.parametrize("unit", [None, 12])
def test_halves_that_alternate_change_no_result(scheme, unit):
    """Of all outputs, or of each expert's."""
    linear = InterleavedLinear(quantize_weight(weight(), scheme), torch.linspace(-1, 1, 48))
    x, index = torch.randn(3, 256), torch.tensor([47, 0, 5, 6, 7, 23, 24])
    expected, words = (linear.exact(x), linear.rows(index)), linear.words.clone()
    for _ in range(2):  # as for a target and for a drafter that shares its blocks
        linear.pair_halves(unit)
        assert not torch.equal(linear.words, words)
        assert torch.equal(linear.rows(index), expected[1])
        torch.testing.assert_close(linear.exact(x), expected[0])
    with pytest.raises(AssertionError, match="other units"):
        linear.pair_halves(6)


@pytest.mark.parametrize(("sums", "most"), [("fp32", 2.0**15), ("fp16", 2.0**9)])
def test_inputs_are_scaled_into_the_range_of_their_sums(sums, most):
    """By powers of two, and not at all where they are in it: small ones would lose digits."""
    x = torch.tensor([[1.0, -3.0], [-6e4, 768.0], [400.0, 2.0]])
    for rows in (x.half(), x, torch.cat((x, x * 2.0**80))):
        half, scale = in_half_range(rows, sums)
        if scale is None:
            assert sums == "fp32" and half is rows, "as it is, beyond half of the range too"
            continue
        assert half.dtype == torch.float16 and half.abs().max() < most
        assert torch.equal(half * scale, rows.float())
        assert scale[[0, 2]].eq(1).all() and scale[1] == (2 if sums == "fp32" else 128)


def test_quantized_logits_are_exact_where_it_matters():
    quantized = quantize_weight(weight(300) * 40, Scheme(8))
    head = QuantizedLMHead(make_linear(quantized, None, "cpu", torch.bfloat16))
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(4)).bfloat16() * 3
    exact, logits = x.float() @ quantized.dequantize().T, head(x)
    best = exact.topk(4).indices
    assert torch.allclose(logits.gather(1, best), exact.gather(1, best), rtol=1e-4)
    assert not torch.allclose(
        head.linear(x).float().gather(1, best), exact.gather(1, best), rtol=1e-4
    )


def test_inputs_in_another_order():
    quantized = quantize_weight(weight(), Scheme(4, 64))
    order = torch.randperm(256, generator=torch.Generator().manual_seed(5))
    x = torch.randn(3, 256)
    module = Permuted(make_linear(quantized, None, "cpu", torch.float32), order)
    assert torch.equal(module(x), x[:, order] @ quantized.dequantize().T)
    two = SideBySide([module, make_linear(quantized, None, "cpu", torch.float32)])
    assert torch.equal(two(x)[:, 48:], x @ quantized.dequantize().T)


def test_quantizing_in_place_reaches_every_linear():
    config = tiny_config(dim=64, n_head=4, head_dim=16, ffn_dim=96)
    target = random_target(config).bfloat16()
    quantize_(target.blocks, Scheme(4, 32))
    assert not [m for m in target.blocks.modules() if isinstance(m, nn.Linear)]
    head: EagleHead = random_head(target, torch.arange(0, 60, 2), rope_base=10000.0)
    head.borrow(target, 128)
    quantize_head_(head, Scheme(4, 128, head_bits=8))
    assert isinstance(head.fc, Int4Linear) and head.fc.group_size == 128
    assert head.block.mlp.gate_up.group_size == 64, "the widest that divides"
    assert head.block.mlp.down.group_size == 32  # 96 inputs
    assert isinstance(head.lm_head, Int8Linear) and isinstance(target.lm_head, nn.Linear)


def test_the_linear_of_cuda_keeps_large_inputs_and_logits_in_fp32():
    """On a CPU it runs its reference; fp16 ends at 65,504, bf16 does not."""
    dense = torch.randn(64, 128, generator=torch.Generator().manual_seed(1)) / 10
    packed = quantize_weight(dense, Scheme(8))
    for accumulate in ("fp32", "fp16"):
        linear = InterleavedLinear(packed, None, accumulate)
        x = torch.randn(3, 128, generator=torch.Generator().manual_seed(2)).bfloat16()
        x[1, 5] = 1e5
        expected = x.float() @ packed.dequantize().T
        y = linear(x)
        assert y.dtype == torch.bfloat16 and y.isfinite().all()
        torch.testing.assert_close(y.float(), expected, rtol=2e-2, atol=2e-2)
        assert torch.equal(linear(x[:1]), y[:1])
        x[0, 0] = torch.inf
        assert not linear(x)[0].isfinite().any() and linear(x)[2].isfinite().all()
    head = QuantizedLMHead(linear)
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(3)).bfloat16()
    logits = head(x)
    assert logits.dtype == torch.float32 and linear.accumulate == "fp32"
    torch.testing.assert_close(logits, x.float() @ packed.dequantize().T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("scheme", "head"),
    [
        (Scheme(4, 64, "hqq", head_bits=4), Scheme(4, 64)),
        (Scheme(8, head_bits=4), Scheme(4, 32)),
        (Scheme(4, 64, "hqq", head_bits=8), Scheme(8)),
    ],
)
def test_an_lm_head_of_four_bits_has_the_groups_of_the_linears(scheme, head):
    assert head_scheme(scheme) == head
