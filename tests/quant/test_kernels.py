"""The layout of the CUDA kernels, their custom op and, on a GPU, their results.

`test_interpreted_products.py` has results without one.
"""

from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import bench_kernels
from fasteagle.errors import FasteagleError
from fasteagle.quant import interleaved, kernels, packed, tiling
from helpers import invoke, output_of
from kernel_cases import FORMATS, SHAPES, random_rows, random_weight, relative_error, tolerance


@pytest.mark.parametrize("name", FORMATS)
def test_packing_comes_back(name):
    weight = random_weight(name, *SHAPES[name])
    laid_out = interleaved.pack(weight)
    assert torch.equal(interleaved.unpack_values(laid_out), weight.values())
    scales, second = interleaved.unpack_params(laid_out)
    assert torch.equal(scales, weight.scales.float())
    if weight.zeros is not None:
        assert torch.equal(second, weight.zeros.float())
    if weight.offsets is not None:
        midpoints = weight.offsets.float() + 8 * weight.scales.float()
        assert torch.equal(second, midpoints.half().float())
        torch.testing.assert_close(
            interleaved.dequantize(laid_out),
            weight.dequantize(),
            rtol=0,
            atol=2**-11 * midpoints.abs().max().item(),
        )
    else:
        assert torch.equal(interleaved.dequantize(laid_out), weight.dequantize())


TILES = [("g128", 256, 128), ("g64", 256, 128), ("g32", 96, 64)]
TILES += [("int8", 192, 64), ("int8", 256, 128), ("int8-g32", 256, 64)]


@pytest.mark.parametrize(("name", "K", "tile"), TILES)
def test_field_j_of_row_r_holds_column_r_of_plane_j(name, K, tile):
    weight = random_weight(name, 5, K)
    stored = interleaved.pack(weight).words.numpy().view(np.uint16)
    bits, values = weight.bits, weight.values().int().tolist()
    rows = tile * bits // 16
    for n in range(5):
        for k in range(K):
            j, r = divmod(k % tile, rows)
            word = int(stored[k // tile * rows + r, n])
            field = word >> (bits * j) & (2**bits - 1)
            assert field == (values[n][k] + 128 if bits == 8 else values[n][k]), (n, k)


def test_bytes_per_weight():
    def bytes_per_weight(name: str) -> float:
        return interleaved.pack(random_weight(name, 256, 256)).n_bytes / 256**2

    assert bytes_per_weight("g128") == 0.53125
    assert bytes_per_weight("g32-offsets") == 0.625
    assert bytes_per_weight("int8-g32") == 1.0625
    assert bytes_per_weight("int8") == 1 + 4 / 256


def test_offset_far_from_zero_keeps_small_weights():
    """q * scale + offset cancels to small weights; an offset in fp16 would move them by 3e-3."""
    scales, offsets = torch.full((1, 1), 1.0), torch.full((1, 1), -8.0019)
    weight = packed.int4(torch.full((1, 32), 8), scales, offsets=offsets)
    restored = interleaved.dequantize(interleaved.pack(weight))
    torch.testing.assert_close(restored, weight.dequantize(), rtol=1e-3, atol=0)


def test_refusals_name_the_fix():
    odd = packed.int4(torch.zeros(4, 96), torch.ones(4, 2), zeros=torch.zeros(4, 2))
    with pytest.raises(FasteagleError, match="4-bit groups of 48: use 32, 64 or 128"):
        interleaved.pack(odd)
    with pytest.raises(FasteagleError, match="8-bit groups of 64: use 32, or one scale a row"):
        interleaved.pack(packed.int8(torch.zeros(4, 128), torch.ones(4, 2)))
    for bad in (1e6, float("nan")):
        huge = packed.int4(torch.zeros(4, 32), torch.full((4, 1), bad), zeros=torch.zeros(4, 1))
        with pytest.raises(
            FasteagleError, match=re.escape(f"scale is {bad:.4g}, ") + ".* use int8"
        ):
            interleaved.pack(huge)
    low = packed.int4(torch.zeros(4, 32), torch.ones(4, 1), offsets=torch.full((4, 1), -1e6))
    with pytest.raises(FasteagleError, match=r"midpoint is 1e\+06, .* use int8"):
        interleaved.pack(low)


@pytest.mark.parametrize("name", ["g64", "g32-offsets", "int8"])
def test_op_computes_the_reference_on_cpu(name):
    weight = random_weight(name, *SHAPES[name])
    laid_out = interleaved.pack(weight)
    x = random_rows(3, weight.shape[1])
    y = interleaved.linear(x, laid_out)
    assert y.dtype == torch.float32
    assert relative_error(y, x, weight) < tolerance(name, "fp32")
    fields = [getattr(laid_out, field.name) for field in dataclasses.fields(laid_out)]
    torch.library.opcheck(interleaved.interleaved_linear, (x, *fields, "fp32"))


def test_op_in_a_full_graph_with_any_number_of_rows():
    weight = interleaved.pack(random_weight("g32-offsets", 33, 96))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x: torch.Tensor) -> torch.Tensor:
        return interleaved.linear(x * 2, weight).relu()

    for M, stance in ((2, "default"), (5, "fail_on_recompile")):
        x = random_rows(M, 96)
        torch._dynamo.mark_dynamic(x, 0)
        with torch.compiler.set_stance(stance):
            torch.testing.assert_close(step(x), interleaved.linear(x * 2, weight).relu())


def test_shapes_are_checked_while_tracing():
    weight = interleaved.pack(random_weight("g32", 33, 96))
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        right, wrong = (mode.from_tensor(random_rows(2, K)) for K in (96, 64))
        assert interleaved.linear(right, weight).shape == (2, 33)
        with pytest.raises(RuntimeError):
            interleaved.linear(wrong, weight)


def test_package_needs_no_triton():
    """And no compiler is loaded before it is needed: importing it takes longer than the rest."""
    code = """
        import sys
        sys.modules["triton"] = None
        import fasteagle.loading.open, torch
        print("torch._dynamo" in sys.modules)
        from fasteagle.compile import tree_attention
        from fasteagle.quant import packed, interleaved
        w = packed.int4(torch.ones(2, 32), torch.ones(2, 1), zeros=torch.zeros(2, 1))
        print(interleaved.linear(torch.ones(1, 32).half(), interleaved.pack(w)).tolist())
    """
    assert output_of(code) == "False\n[[32.0, 32.0]]\n"


SEVEN_B = {"qkv": (12288, 4096), "out": (4096, 4096), "gate_up": (22016, 4096)}
SEVEN_B |= {"down": (4096, 11008), "lm_head": (32000, 4096)}
CARD = tiling.BY_CAPABILITY[8, 6]


def test_cards_are_told_apart_by_their_architecture(monkeypatch):
    """And alike in every process: the split decides the order of sums."""
    cards = []
    for (major, minor), n_sm in (((8, 6), 82), ((9, 0), 132), ((10, 3), 160), ((8, 7), 16)):
        properties = SimpleNamespace(multi_processor_count=n_sm, major=major, minor=minor)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, p=properties: p)
        cards.append(kernels.card_of.__wrapped__(torch.device("cuda")))
    rtx_3090, h100, larger, orin = cards
    assert rtx_3090 == CARD == kernels.card_of(torch.device("cpu"))
    assert (h100.gb_s, h100.macs_fp16) == (3350, 1024)
    assert larger.macs_fp16 == h100.macs_fp16 and larger.gb_s == pytest.approx(3350 / 132 * 160)
    assert orin.n_sm == 16 and orin.macs_fp16 == CARD.macs_fp16


def test_splits_fill_the_card():
    """A narrow matrix alone would leave most of 82 multiprocessors idle."""
    for name, (N, K) in SEVEN_B.items():
        bits, group = (8, K) if name == "lm_head" else (4, 128)
        layout = interleaved.layout_for(bits, group, K)
        split = tiling.split_k(layout, N, K, CARD)
        assert split * -(-N // 128) >= 1.5 * 82, (N, K, split)
        assert K // 128 // split >= 4, "a program has a pipeline to fill"
        if name in ("qkv", "gate_up"):
            cut = tiling.tiling(layout, N, K, 16, CARD)
            assert -(-N // 128) * split <= 82 * cut.resident, "one wave"
    assert tiling.split_k(interleaved.layout_for(4, 128, 512), 256, 512, CARD) == 1
    # The product of gate and up comes out of the same launch.
    assert tiling.split_k(interleaved.layout_for(4, 128, 4096), 22016, 4096, CARD) == 1


def test_splits_on_hopper_are_the_fastest_of_those_timed():
    """On an H200 at 16 rows: docs/records/gpu.md."""
    fastest = {"qkv": 4, "out": 8, "gate_up": 3, "down": 8, "lm_head": 1}
    hopper = tiling.Card.of(132, (9, 0))
    for name, (N, K) in SEVEN_B.items():
        layout = interleaved.layout_for(*((8, K) if name == "lm_head" else (4, 128)), K)
        assert tiling.split_k(layout, N, K, hopper) == fastest[name], name


def test_only_the_weight_decides_the_split():
    layout = interleaved.layout_for(4, 128, 4096)
    cuts = [kernels.tiling(layout, 4096, 4096, rows, CARD) for rows in (1, 16, 17, 32, 33, 64)]
    assert len({cut.split for cut in cuts}) == 1
    for cut, rows in zip(cuts, (1, 16, 17, 32, 33, 64), strict=True):
        assert cut.block_m == 16 if rows <= 16 else cut.block_m in (16, 32)
        assert cut.block_m * (cut.n_blocks - 1) < rows <= cut.block_m * cut.n_blocks


@pytest.mark.parametrize(
    ("bits", "group", "K"), [(4, 128, 256), (4, 32, 256), (4, 64, 192), (8, 32, 256), (8, 256, 256)]
)
def test_buffers_of_the_programs_at_once_fit_a_multiprocessor(bits, group, K):
    """Two at least, for loads that do not wait for products, and no more than hide the latency."""
    layout = interleaved.layout_for(bits, group, K)
    for block_m in tiling.ROW_BLOCKS:
        cut = tiling.cut_rows(layout, 33, block_m, 1)
        assert cut.n_blocks == -(-33 // block_m)
        stage = tiling.weight_bytes(layout) + 2 * block_m * layout.tile
        used = tiling.OWN_BYTES + (cut.n_stages - 1) * stage
        assert cut.resident * used <= tiling.SHARED_BYTES and 3 <= cut.n_stages <= 4
        more = tiling.OWN_BYTES + cut.n_stages * stage
        assert cut.n_stages == 4 or cut.resident * more > tiling.SHARED_BYTES
        assert cut.resident == 3 or 3 * (tiling.OWN_BYTES + 2 * stage) > tiling.SHARED_BYTES


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device to measure")
def test_the_benchmark_says_in_one_line_what_it_needs():
    result = invoke(main=bench_kernels.main)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1 and "no CUDA device" in result.stderr
    for option, value in (("--rows", "8,0"), ("--kernels", "int3"), ("--linears", "gate")):
        result = invoke(option, value, main=bench_kernels.main)
        assert result.exit_code == 2 and value.split(",")[-1] in result.stderr, option


GPU_FORMATS = ("g128", "g64", "g32", "g128-offsets", "g32-offsets", "int8", "int8-g32")


@pytest.mark.gpu
@pytest.mark.parametrize("accumulate", ["fp32", "fp16"])
@pytest.mark.parametrize("name", GPU_FORMATS)
def test_results_on_the_device(name, accumulate):
    weight = random_weight(name, *SHAPES[name])
    laid_out = interleaved.pack(weight.to("cuda"))
    for M in (1, 7, 16, 33, 64, 70):
        x = random_rows(M, weight.shape[1])
        y = kernels.linear(x.cuda(), laid_out, accumulate=accumulate).cpu()
        limit = 3e-4 if M > kernels.MAX_ROWS else tolerance(name, accumulate)
        assert relative_error(y, x, weight) < limit, M


@pytest.mark.gpu
@pytest.mark.parametrize("accumulate", ["fp32", "fp16"])
@pytest.mark.parametrize("name", GPU_FORMATS)
def test_rows_on_the_device_do_not_depend_on_their_number(name, accumulate):
    """At 7B width, where K is split: what makes greedy speculation exact on a GPU."""
    laid_out = interleaved.pack(random_weight(name, 4096, 4096, device="cuda"))
    x = random_rows(64, 4096).cuda()
    full = kernels.linear(x, laid_out, accumulate=accumulate)
    for M in (1, 8, 16, 17, 32):
        part = kernels.linear(x[:M], laid_out, accumulate=accumulate)
        assert torch.equal(part, full[:M]), M


@pytest.mark.gpu
def test_op_on_the_device_in_a_full_graph():
    laid_out = interleaved.pack(random_weight("g128", 384, 1024, device="cuda"))
    x = random_rows(8, 1024).cuda()
    step = torch.compile(lambda x: interleaved.linear(x, laid_out) + 1, fullgraph=True)
    assert torch.equal(step(x), kernels.linear(x, laid_out) + 1)
