"""Attention in our CPU kernels against plain torch, on every path that this CPU can run."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from fasteagle.compile.int8_cache import SPARE, dense_rows, quantized_rows
from fasteagle.quant.cpu_linear import pack
from fasteagle.quant.cpu_tensors import BlockTensors
from fasteagle.quant.packed import int8
from rounding import rounded_activations

D, G, GROUP, SLOTS = 64, 2, 3, 1216  # model dim, KV heads, queries of each, slots of the caches
H, EPS = G * GROUP, 1e-5
NOTHING = torch.empty(0)


def packed(N: int, K: int, size: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A random weight as the kernels read it, and its values."""
    values = torch.randint(-127, 128, (N, K), generator=generator)
    weight = int8(values, torch.full((N, 1), size / 127))
    return pack(weight), weight.dequantize().double()


def random_mask(T: int, slots: Tensor, generator: torch.Generator) -> Tensor:
    """Each row sees all slots before `slots`, its own, and some of those of earlier rows."""
    mask = torch.arange(SLOTS).expand(T, -1) < slots[0]
    mask[:, slots] = torch.rand(T, T, generator=generator).tril(-1) > 0.5
    mask[torch.arange(T), slots] = True
    return mask


def block_of(qkv: Tensor, out: Tensor) -> BlockTensors:
    """A block whose MLP adds nothing."""
    generator = torch.Generator()
    return BlockTensors(*[NOTHING] * len(BlockTensors._fields))._replace(
        attention_norm=torch.ones(D),
        qkv=qkv,
        out=out,
        mlp_norm=torch.ones(D),
        gate_up=packed(64, D, 0.0, generator)[0],
        down=packed(D, 32, 0.0, generator)[0],
    )


def run(
    ops, x: Tensor, slots: Tensor, seen: tuple, caches: list[Tensor], block, window=0, entry=None
) -> Tensor:
    """Rows x [T, D] after the block, without rotation; `seen` is a mask, or a tree."""
    E = caches[0].shape[2] - (SPARE if caches[0].dtype == torch.int8 else 0)
    turns = torch.ones(len(x), E), torch.zeros(len(x), E)
    return ops.blocks(x, *turns, slots, *seen, window, caches, list(block), H, EPS, entry)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("E", [16, 32, 48, 80, 128])
def test_attention_is_that_of_plain_torch(ops, E, dtype):
    """A block whose MLP adds nothing, over caches of some lengths: one row, and a tree of six."""
    generator = torch.Generator().manual_seed(E)
    qkv, qkv_rows = packed((H + 2 * G) * E, D, 0.5, generator)
    out, out_rows = packed(D, H * E, 1.0, generator)
    block = block_of(qkv, out)
    limit = 1e-3
    if dtype == torch.bfloat16:  # a key or value may round to the next one of 8 bits of mantissa
        limit = 0.015 if ops.isa() == 5 else 0.005  # there queries and weights are rounded too
    for length, T in itertools.product((0, 1, 2, 63, 64, 130, 1100), (1, 6)):
        caches = [torch.randn(G, SLOTS, E, generator=generator).to(dtype) for _ in range(2)]
        x = torch.randn(T, D, generator=generator)
        slots, seen = torch.arange(length, length + T), length + T
        mask = random_mask(T, slots, generator)

        normed = x * (x.square().mean(1, keepdim=True) + EPS).rsqrt()
        rows = (rounded_activations(normed) @ qkv_rows.T).unflatten(1, (-1, E)).transpose(0, 1)
        q, k, v = rows.split([H, G, G])
        keys, values = (
            torch.cat((cache[:, :length], new.to(dtype)), 1)
            for cache, new in zip(caches, (k, v), strict=True)
        )
        scores = q @ keys.double().repeat_interleave(GROUP, 0).mT / math.sqrt(E)
        weights = scores.masked_fill(~mask[:, :seen], -math.inf).softmax(-1)
        attended = weights @ values.double().repeat_interleave(GROUP, 0)
        attended = attended.transpose(0, 1).flatten(1).float()
        expected = rounded_activations(attended) @ out_rows.T

        for cache in caches:
            cache[:, length:] = math.nan  # the block writes T of them
        y = run(ops, x, slots, (mask, None, None, None), caches, block)
        assert (y - x - expected).norm() < limit * expected.norm(), (length, T)
        for cache, each in zip(caches, (keys, values), strict=True):
            assert torch.allclose(cache[:, :seen].double(), each.double(), rtol=0.01, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("E", [16, 32, 128])
def test_a_row_has_the_same_bits_alone_by_mask_and_by_tree(ops, E, dtype):
    """With weights of very different sizes, whose sums depend on their order."""
    generator = torch.Generator().manual_seed(E)
    qkv, out = (
        packed(N, K, size, generator)[0]
        for N, K, size in (((H + 2 * G) * E, D, 2.0), (D, H * E, 1.0))
    )
    T, block = 5, block_of(qkv, out)
    depths = torch.arange(T)
    paths = depths.int().expand(T, -1).contiguous()
    for length in (*range(1, 140, 6), 1100):
        caches = [torch.randn(G, SLOTS, E, generator=generator) for _ in range(2)]
        caches = [quantized_rows(c) if dtype == torch.int8 else c.to(dtype) for c in caches]
        x = torch.randn(T, D, generator=generator)
        slots = length + depths
        mask = torch.arange(SLOTS) <= slots[:, None]
        together = run(ops, x, slots, (mask, None, None, None), caches, block)
        as_tree = None, torch.tensor(length), paths, depths
        assert torch.equal(run(ops, x, slots, as_tree, caches, block), together), length
        for t in range(T):
            one = slice(t, t + 1)
            y = run(ops, x[one], slots[one], (mask[one], None, None, None), caches, block)
            assert torch.equal(y, together[one]), (length, t)


@pytest.mark.parametrize("E", [16, 48, 80, 128])
def test_rows_in_8_bits_are_written_and_read_as_their_values(ops, E):
    """The bits of the reference, and those of a bf16 cache that holds the converted values."""
    generator = torch.Generator().manual_seed(E)
    qkv, out = (packed(N, K, 0.5, generator)[0] for N, K in (((H + 2 * G) * E, D), (D, H * E)))
    block, T = block_of(qkv, out), 6
    for length in (1, 2, 63, 64, 131, 1100):
        caches = [quantized_rows(torch.randn(G, SLOTS, E, generator=generator)) for _ in range(2)]
        dense = [dense_rows(cache, torch.bfloat16) for cache in caches]
        x, slots = torch.randn(T, D, generator=generator), torch.arange(length, length + T)
        # What a pass writes is rounded: rows see others only, some of them apart.
        mask = random_mask(T, slots, generator)
        mask[:, slots], mask[::2, length // 3] = False, length < 3
        seen = mask, None, None, None
        y = [run(ops, x, slots, seen, own, block) for own in (caches, dense)]
        assert torch.equal(*y), length
        for cache, each in zip(caches, dense, strict=True):
            assert torch.equal(cache[:, slots], quantized_rows(each[:, slots])), length


def test_a_row_that_is_not_finite_is_so_in_8_bits(ops):
    generator = torch.Generator().manual_seed(0)
    E, T = 16, 3
    qkv, out = (packed(N, K, 0.5, generator)[0] for N, K in (((H + 2 * G) * E, D), (D, H * E)))
    caches = [torch.zeros(G, SLOTS, E + SPARE, dtype=torch.int8) for _ in range(2)]
    x, slots = torch.randn(T, D, generator=generator), torch.arange(T)
    x[1, 5] = math.nan
    mask = torch.arange(SLOTS) <= slots[:, None]
    y = run(ops, x, slots, (mask, None, None, None), caches, block_of(qkv, out))
    assert y.isnan().any(1).tolist() == [False, True, True]
    for cache in caches:
        assert dense_rows(cache[:, :T], torch.float32).isnan().all(2).any(0).tolist() == [0, 1, 0]


@pytest.mark.parametrize("window", [1, 3, 8])
def test_a_tree_sees_the_keys_of_its_window(ops, window):
    """As by a mask: windows that end in the text before the tree, at its root, and in the tree."""
    generator = torch.Generator().manual_seed(window)
    E, T = 16, 5
    qkv, out = (packed(N, K, 0.5, generator)[0] for N, K in (((H + 2 * G) * E, D), (D, H * E)))
    block, depths = block_of(qkv, out), torch.arange(T)
    paths = depths.int().expand(T, -1).contiguous()
    for length in range(12):
        caches = [torch.randn(G, SLOTS, E, generator=generator) for _ in range(2)]
        x = torch.randn(T, D, generator=generator)
        slots, keys = length + depths, torch.arange(SLOTS)
        mask = (keys <= slots[:, None]) & (keys > slots[:, None] - window)
        by_mask = run(ops, x, slots, (mask, None, None, None), caches, block)
        tree = None, torch.tensor(length), paths, depths
        assert torch.equal(run(ops, x, slots, tree, caches, block, window), by_mask), length


def test_each_row_of_a_long_pass_reads_its_own_entry(ops):
    """The block of an EAGLE-3 head reads other rows than those it adds to."""
    generator = torch.Generator().manual_seed(0)
    E, T = 16, 40
    qkv, out = (packed(N, K, 0.5, generator)[0] for N, K in (((H + 2 * G) * E, 2 * D), (D, H * E)))
    caches = [torch.zeros(G, SLOTS, E) for _ in range(2)]
    x, entry = (torch.randn(T, n, generator=generator) for n in (D, 2 * D))
    slots, block = torch.arange(T), block_of(qkv, out)
    mask = torch.arange(SLOTS) <= slots[:, None]
    together = run(ops, x, slots, (mask, None, None, None), caches, block, entry=entry)
    for t in range(T):
        one, own = slice(t, t + 1), (mask[t : t + 1], None, None, None)
        y = run(ops, x[one], slots[one], own, caches, block, entry=entry[one])
        assert torch.equal(y, together[one]), t
