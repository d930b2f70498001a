"""The tree attention kernels as compiled, in our interpreter of PTX.

The problems' caches hold NaN wherever nothing was written.
"""

from __future__ import annotations

import pytest
import torch

from fasteagle.compile.cuda_blocks import rotates
from fasteagle.compile.int8_cache import dense_rows, quantized_rows
from fasteagle.compile.kernels import block_kernels, tree_kernels
from fasteagle.compile.tree_attention import tree_attention
from fasteagle.model import apply_rope
from helpers import rest_slow
from tree_problems import NAN, Problem, assert_close, by_kernels, problem, sdpa

pytestmark = pytest.mark.usefixtures("card")
slow = pytest.mark.slow

HALF, BF16 = torch.float16, torch.bfloat16


def run(p: Problem) -> torch.Tensor:
    return p.run(by_kernels)


# T, seq_len, E, group, dtype, window, spread (1: a chain)
CASES = [
    (7, 700, 80, 8, HALF, None, 1),
    (7, 738, 64, 3, BF16, 100, 4),  # the root sees one key of the first block
    (1, 256, 64, 8, HALF, None, 4),
    (1, 0, 64, 1, HALF, None, 4),
    (1, 1, 128, 3, BF16, None, 4),
    (7, 0, 64, 3, BF16, None, 4),
    (7, 63, 128, 1, HALF, None, 4),
    (16, 1, 64, 3, HALF, None, 1),
    (16, 64, 96, 1, BF16, None, 4),
    (16, 255, 64, 8, HALF, None, 9),
    (33, 256, 128, 3, BF16, None, 2),
    (33, 63, 40, 1, HALF, None, 1),
    (64, 230, 64, 1, HALF, None, 1),
    (64, 63, 32, 1, BF16, None, 9),
    (7, 700, 64, 3, HALF, 1, 4),
    (16, 256, 64, 1, HALF, 64, 1),
    (33, 300, 64, 1, HALF, 257, 2),
    (7, 20, 32, 12, HALF, 1000, 4),
    (7, 100, 256, 20, HALF, 90, 2),
]


@pytest.mark.parametrize(
    ("T", "seq_len", "E", "group", "dtype", "window", "spread"), rest_slow(CASES, 3)
)
def test_results(T, seq_len, E, group, dtype, window, spread):
    shape = dict(E=E, group=group, G=2 if T < 16 else 1)
    p = problem(T, seq_len, **shape, spread=spread, dtype=dtype, window=window)
    result = run(p)
    assert_close(result, sdpa(p))
    assert_close(result, p.run(tree_attention))


TREES = [
    (10, 61, 3, BF16, None, 4),
    (10, 0, 1, HALF, None, 4),
    (9, 250, 1, HALF, None, 1),
    (9, 256, 8, HALF, None, 4),
    (9, 250, 12, HALF, None, 1),
    (6, 700, 6, HALF, None, 3),
    (9, 250, 3, HALF, 70, 1),
    (9, 120, 3, BF16, 5, 2),
    (6, 700, 1, HALF, 300, 2),
    # The last rows are in a new split, their window before it.
    (64, 200, 2, HALF, None, 1),
    (64, 200, 2, HALF, 30, 1),
]


ON_CARDS = [(*tree, i % 2 == 1, 86 if i % 3 else 90) for i, tree in enumerate(TREES)]


@pytest.mark.parametrize(
    ("T", "seq_len", "group", "dtype", "window", "spread", "int8", "card"),
    rest_slow(ON_CARDS, 2),
    indirect=["card"],
)
def test_rows_have_the_bits_of_plain_decoding(T, seq_len, group, dtype, window, spread, int8):
    p = problem(T, seq_len, group=group, dtype=dtype, window=window, spread=spread)
    p = p.in_8_bits() if int8 else p
    whole = run(p)
    for j in (0, T // 3, T // 2, T - 1):
        assert torch.equal(run(p.row(j))[:, :, 0], whole[:, :, j]), j


@slow
@pytest.mark.parametrize(("T", "window"), [(64, None), (33, 60)])
def test_rows_do_not_depend_on_their_number(T, window):
    p = problem(T, 250, E=32, spread=6, window=window)
    whole = run(p)
    for T in (8, 16, 32) if window is None else (16,):
        assert torch.equal(run(p.rows(torch.arange(T))), whole[:, :, :T]), T


@slow
def test_rows_do_not_depend_on_their_order():
    p = problem(16, 120, group=3, spread=6)
    order = p.view.depths.sort(stable=True).indices
    order = torch.cat([order[p.view.depths[order] == d].flip(0) for d in p.view.depths.unique()])
    assert order.tolist() != list(range(16))
    assert torch.equal(run(p.rows(order)), run(p)[:, :, order])


@slow
@pytest.mark.parametrize("seq_len", [0, 250])
def test_other_branches_are_not_read(seq_len):
    """Not even multiplied by zero."""
    p = problem(12, seq_len, group=3)
    whole = run(p)
    for j in (5, 11):
        hidden = torch.arange(12)[~p.view.mask(seq_len + 12)[j, seq_len:]]
        k, v = p.k.clone(), p.v.clone()
        k[:, seq_len + hidden], v[:, seq_len + hidden] = NAN, NAN
        assert torch.equal(run(p._replace(k=k, v=v))[:, :, j], whole[:, :, j]), j


@slow
def test_blocks_before_every_window_are_not_read():
    p = problem(7, 700, group=1, window=100)
    whole = run(p)
    first = (700 - 100 + 1) // 64 * 64
    p.k[:, :first], p.v[:, :first] = NAN, NAN
    assert torch.equal(run(p), whole)


@slow
def test_strided_caches_and_a_seq_len_in_32_bits():
    p = problem(7, 130, group=3, G=2)
    view = p.view._replace(seq_len=p.view.seq_len.int(), depths=p.view.depths.int())
    view = view._replace(paths=view.paths.T.contiguous().T)
    strided = Problem(p.q, torch.stack((p.k, p.v), dim=2)[:, :, 0], p.v, view)
    assert not strided.k.is_contiguous()
    assert torch.equal(run(strided), run(p))


@slow
def test_scores_far_apart():
    """The first keys outweigh all later ones, then the last key all before it."""
    p = problem(5, 300, group=2)
    for at in (3, 304):
        k = p.k.clone()
        k[:, at] *= 100
        spread = p._replace(k=k)
        assert_close(run(spread), sdpa(spread))


@slow
@pytest.mark.parametrize(("E", "group", "window"), [(64, 3, None), (80, 1, 20), (128, 4, None)])
def test_a_cache_in_8_bits_gives_the_results_of_what_it_holds(E, group, window):
    """Not their bits: the compiler gives a thread four neighbours, and sums keys in that order."""
    for seq_len, dtype in ((0, HALF), (63, BF16), (300, HALF)):
        p = problem(7, seq_len, E=E, group=group, G=2, dtype=dtype, window=window).in_8_bits()
        dense = p._replace(k=dense_rows(p.k, dtype), v=dense_rows(p.v, dtype))
        assert_close(run(p), sdpa(dense))


# T, seq_len, E, group, G, partial sums, what is added to RoPE, dtype, window, 8-bit cache
ROTATED = [
    (7, 70, 32, 1, 3, 2, "bias", HALF, None, True),
    (7, 70, 32, 1, 3, 2, "bias, norms", HALF, None, False),
    (1, 0, 64, 1, 2, 1, "", HALF, None, False),
    (1, 200, 128, 4, 1, 3, "norms", BF16, None, True),
    (16, 64, 64, 3, 2, 2, "", HALF, None, True),
    (33, 129, 40, 1, 2, 4, "bias", BF16, None, False),
    (20, 300, 24, 7, 1, 1, "", HALF, 100, True),
    (64, 63, 32, 1, 1, 2, "", HALF, 30, False),
    (5, 130, 128, 8, 1, 2, "norms", HALF, None, False),
    (2, 9, 16, 1, 2, 1, "norms", BF16, None, False),
]


@pytest.mark.parametrize(
    ("T", "seq_len", "E", "group", "G", "n_parts", "more", "dtype", "window", "int8"),
    rest_slow(ROTATED),
)
def test_rope_in_the_first_kernel(T, seq_len, E, group, G, n_parts, more, dtype, window, int8):
    """The bits of RoPE in a launch of its own: of the result, and of keys and values.

    Queries, keys and values that the core makes of the same sums are near.
    """
    p = problem(T, seq_len, E=E, group=group, G=G, dtype=dtype, window=window)
    generator = torch.Generator().manual_seed(T)
    Np = (group + 2) * G * E + 8
    parts = torch.randn(n_parts, T, Np, generator=generator)
    bias = torch.randn(Np, generator=generator).to(dtype) if "bias" in more else None
    norms: list[torch.Tensor | None] = [None, None]
    if "norms" in more:
        norms = [(1 + torch.rand(E, generator=generator)).to(dtype) for _ in range(2)]
    angles = (10 * torch.rand(T, 1, E // 2, generator=generator)).repeat(1, 1, 2)
    slots = seq_len + torch.arange(T)
    rows = angles.cos(), angles.sin(), slots
    results = []
    new = tree_kernels.Unrotated(parts, bias, *rows, G * group, dtype, *norms, 1e-6)
    assert rotates(E, "norms" in more)
    for fused in (False, True):
        k, v = (quantized_rows(t.nan_to_num()) if int8 else t.clone() for t in (p.k, p.v))
        v = torch.stack((v, v), 2)[:, :, 0]  # of other strides than keys
        if fused:
            y = tree_kernels.rope_attention(new, k, v, p.view, HALF)
        else:
            q = block_kernels.rope(new, k, v)
            y = tree_kernels.tree_attention(q, k, v, p.view, HALF)
        results.append((y, k, v))
    assert results[0][0].isfinite().all()
    written = dense_rows(results[0][1], dtype)[:, seq_len : seq_len + T]
    heads = (parts.sum(0) + (0 if bias is None else bias.float()))[:, : Np - 8]
    keys = heads.view(T, -1, E)[:, G * group : -G]
    if norms[1] is not None:
        keys = torch.nn.functional.rms_norm(keys, (E,), norms[1].float(), 1e-6)
    expected = apply_rope(keys, *rows[:2]).transpose(0, 1)
    assert torch.allclose(written.float(), expected, atol=0.05, rtol=0.02)
    for result, expected in zip(*results, strict=True):
        assert torch.equal(result.view(torch.int16), expected.view(torch.int16))


@slow
@pytest.mark.parametrize("E", [24, 64, 128])
def test_rows_written_in_8_bits_are_those_of_the_model(E):
    """By either kernel: `int8_cache.quantized_rows` of the values, scales and halves rounded."""
    G, T = 2, 9
    p = problem(T, 40, E=E, G=G, dtype=HALF)
    generator = torch.Generator().manual_seed(E)
    parts = torch.randn(1, T, 3 * G * E, generator=generator)
    parts[0, 3, -E:] = 0  # a row of nothing: its scale is 0
    parts[0, 4, -E:] = torch.arange(E) - E / 2 + 0.5  # halves of units
    parts[0, 4, -E] = 127.0
    angles = torch.zeros(T, 1, E)
    rows = angles.cos(), angles.sin(), 40 + torch.arange(T)
    expected = quantized_rows(parts[0].half().view(T, 3, G, E).permute(1, 2, 0, 3)[1:])
    new = tree_kernels.Unrotated(parts, None, *rows, G, HALF)
    for fused in (False, True):
        k, v = (quantized_rows(torch.zeros_like(t)) for t in (p.k, p.v))
        if fused:
            tree_kernels.rope_attention(new, k, v, p.view, HALF)
        else:
            block_kernels.rope(new, k, v)
        for result, rows_expected in zip((k, v), expected, strict=True):
            assert torch.equal(result[:, 40 : 40 + T], rows_expected), fused
            assert not result[:, :40].any() and not result[:, 40 + T :].any()
