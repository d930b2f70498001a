"""Passes over several sequences by the kernels as compiled, in our interpreter of PTX."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import triton
from torch import Tensor

from fasteagle import batch
from fasteagle.batch import Batch
from fasteagle.compile.cuda_draft import CudaDraft
from fasteagle.compile.cuda_pass import CudaPass, Member, shared_caches
from fasteagle.compile.graphs import CapturedRunner
from fasteagle.compile.int8_cache import quantized_rows
from fasteagle.compile.kernels import block_kernels, sequence_kernels, tree_kernels
from fasteagle.compile.precompile import collecting
from fasteagle.generate import Engine
from fasteagle.options import SamplingParams
from fasteagle.sampling import SamplingMode
from fasteagle.tree import TreeView, relations
from helpers import finished, generated, rest_slow
from interleaved_models import KernelBackend
from ptx.memory import Fault
from replaying import PooledGraphs
from test_interpreted_cycles import FUSED, PROMPT, TREE, made
from tree_problems import random_parents

HALF, BF16 = torch.float16, torch.bfloat16
TREES = [(5, 70, 4), (1, 0, 1), (9, 130, 2)]  # rows, committed positions, spread


class One(NamedTuple):
    """A sequence: what a pass reads of it, and its new queries, keys and values."""

    member: Member
    parts: Tensor  # [S, T, Np]


def one(T: int, seq_len: int, spread: int, *, G: int, group: int, E: int, int8: bool, dtype) -> One:
    """A random tree over random keys; slots past the text hold NaN, in 8 bits as their scales."""
    generator = torch.Generator().manual_seed(100 * seq_len + T)
    rows = torch.randn(4, G, 256, E, generator=generator).to(dtype)
    rows = quantized_rows(rows) if int8 else rows
    rows[:, :, seq_len:] = -1 if int8 else float("nan")
    parents = random_parents(T, seq_len, spread)
    _, depths, paths = relations(parents, torch.ones(T).bool())
    tokens = torch.randint(0, 1000, (T,), generator=generator)
    parts = torch.randn(2, T, (group + 2) * G * E, generator=generator)
    return One(Member(torch.tensor(seq_len), tokens, depths, paths, rows), parts)


def gathered(members: list[Member], M: int, B: int, group: int, block: int):
    table = torch.zeros(B, 9, dtype=torch.long)
    table[: len(members)] = torch.tensor([member.numbers() for member in members])
    n_blocks = sequence_kernels.n_blocks(M, B, group, block)
    sequences = sequence_kernels.empty(table, M, 64, n_blocks)
    sequence_kernels.gather(sequences, group, block)
    return sequences


def angles(positions: Tensor, E: int) -> tuple[Tensor, Tensor]:
    turns = positions[:, None, None] * torch.linspace(0.1, 2, E // 2).repeat(2)
    return turns.cos(), turns.sin()


def attention(parts, n_head, E, dtype, slots, positions, k, v, view, fused: bool) -> Tensor:
    new = tree_kernels.Unrotated(parts, None, *angles(positions, E), slots, n_head, dtype)
    if fused:
        return tree_kernels.rope_attention(new, k, v, view, HALF)
    q = block_kernels.rope(new, k, v)
    return tree_kernels.tree_attention(q, k, v, view, HALF)


def alone(own: One, n_head: int, E: int, dtype, window, fused: bool, plane: int) -> Tensor:
    seq_len, _, depths, paths, rows = own.member
    slots = seq_len + torch.arange(len(depths))
    view = TreeView(seq_len, paths, depths, window)
    k, v = rows[plane], rows[plane + 1]
    return attention(own.parts, n_head, E, dtype, slots, seq_len + depths, k, v, view, fused)


def together(some: list[One], M: int, B: int, sequences, n_head, E, dtype, window, fused, plane):
    parts = torch.zeros(2, M, some[0].parts.shape[2])
    sizes = [len(own.member.depths) for own in some]
    parts[:, : sum(sizes)] = torch.cat([own.parts for own in some], 1)
    rows = some[0].member.rows
    group = n_head // rows.shape[1]
    cache = shared_caches(rows, 256, sequences, block_of(M, B, group))
    view = TreeView(sequences.seq_lens, sequences.paths, sequences.depths, window)
    own = sequences.slots, sequences.positions, *cache.layers[plane // 2]
    return attention(parts, n_head, E, dtype, *own, view, fused)


def block_of(M: int, B: int, group: int) -> int:
    return tree_kernels.row_block(-(-M // B) * group)


# KV heads, group, E, int8, dtype, window, whether the first kernel rotates, trees, rows, sequences
CASES = [
    (2, 3, 32, False, HALF, None, True, TREES, 16, 4),
    (1, 1, 64, True, HALF, None, True, TREES, 16, 4),
    (2, 4, 40, False, BF16, 30, False, TREES, 16, 4),
    (1, 2, 32, True, BF16, 30, False, TREES[:2], 8, 2),
    (1, 7, 24, False, HALF, 5, True, [(1, n, 1) for n in (0, 1, 63, 64, 100)], 8, 8),
    (1, 4, 128, False, BF16, None, True, [(30, 64, 3), (2, 5, 1)], 32, 2),
]


@pytest.mark.parametrize(
    ("G", "group", "E", "int8", "dtype", "window", "fused", "trees", "M", "B", "card"),
    rest_slow([(*case, (90, 86)[i % 2]) for i, case in enumerate(CASES)]),
    indirect=["card"],
)
def test_rows_have_the_bits_of_their_sequence_alone(
    G, group, E, int8, dtype, window, fused, trees, M, B, kernels_on_cpu
):
    """Results, and keys and values in both planes; nothing else of a cache is touched."""
    n_head, plane = G * group, 2
    some = [one(*tree, G=G, group=group, E=E, int8=int8, dtype=dtype) for tree in trees]
    before = [own.member.rows.clone() for own in some]
    expected = [alone(own, n_head, E, dtype, window, fused, plane) for own in some]
    written = [own.member.rows.clone() for own in some]
    for own, rows in zip(some, before, strict=True):
        own.member.rows.copy_(rows)
    sequences = gathered([own.member for own in some], M, B, group, block_of(M, B, group))
    y = together(some, M, B, sequences, n_head, E, dtype, window, fused, plane)
    sizes = [tree[0] for tree in trees]
    for result, wanted in zip(y[: sum(sizes)].split(sizes), expected, strict=True):
        assert wanted.isfinite().all() and torch.equal(result, wanted)
    assert not y[sum(sizes) :].any()
    for own, rows, old in zip(some, written, before, strict=True):
        assert torch.equal(own.member.rows.view(torch.uint8), rows.view(torch.uint8))
        assert not torch.equal(rows.view(torch.uint8), old.view(torch.uint8))


SIZES = [(5, 1, 9), (16,), (1, 1), (3, 2, 1, 1, 4, 2, 1, 2)]


@pytest.mark.parametrize(("sizes",), rest_slow([(sizes,) for sizes in SIZES], 2))
def test_rows_and_blocks_of_a_pass(sizes, kernels_on_cpu):
    """Each row is that of its sequence, padding is of none, and each query row is in one block."""
    group, block, M, B = 20, 16, 16, 8 if len(sizes) > 4 else 4
    shape = dict(G=1, group=group, E=16, int8=False, dtype=HALF)
    some = [one(T, 10 * i, 2, **shape) for i, T in enumerate(sizes)]
    sequences = gathered([own.member for own in some], M, B, group, block)
    start = 0
    for i, own in enumerate(some):
        seq_len, tokens, depths, paths, _ = own.member
        T = len(tokens)
        rows = slice(start, start + T)
        assert sequences.seq_lens[i] == seq_len and (sequences.members[rows] == i).all()
        assert torch.equal(sequences.tokens[rows], tokens)
        assert torch.equal(sequences.depths[rows], depths)
        assert torch.equal(sequences.positions[rows], seq_len + depths)
        assert torch.equal(sequences.slots[rows], seq_len + torch.arange(T))
        assert torch.equal(sequences.paths[rows, :T], paths) and not sequences.paths[rows, T:].any()
        firsts = range(0, group * T, block)
        blocks = [row for row in sequences.blocks.tolist() if row[0] == i]
        assert blocks == [[i, start, T, first] for first in firsts]
        start += T
    assert (sequences.members[start:] == -1).all() and not sequences.seq_lens[len(some) :].any()
    for rows in (sequences.tokens, sequences.positions, sequences.slots, sequences.depths):
        assert not rows[start:].any()


@pytest.mark.parametrize("fused", [True, False])
def test_rows_of_no_sequence_read_no_cache(fused, kernels_on_cpu):
    """Kernels are launched so, to be compiled: the table has no address yet."""
    own = one(3, 70, 2, G=1, group=2, E=32, int8=False, dtype=HALF)
    before = own.member.rows.clone()
    table = torch.zeros(2, 9, dtype=torch.long)
    block = block_of(4, 2, 2)
    sequences = sequence_kernels.empty(table, 4, 64, sequence_kernels.n_blocks(4, 2, 2, block))
    y = together([own], 4, 2, sequences, 2, 32, HALF, None, fused, 0)
    assert not y.any()
    assert torch.equal(own.member.rows.view(torch.uint8), before.view(torch.uint8))


# drafting, shape, KV cache, target, temperature of each text, whether cycles are replayed
BATCHES = [
    ("eagle1", TREE, "auto", "gqa", (0, 0), True),
    ("eagle3", FUSED, "int8", "window", (0.7, 0.8, 0), True),
    ("eagle3", TREE, "auto", "shared expert", (0, 0.8, 0), False),
    (None, None, "auto", "qwen3", (0, 0.8), True),
]


class Replayed(KernelBackend):
    """Cycles and passes are replayed, as far as the fake of graphs does it."""

    _replays = True

    def runner(self, state):
        graphs = PooledGraphs()
        graphs.warm_ups = 1
        return CapturedRunner(self, state, graphs)


@pytest.mark.parametrize(
    ("algorithm", "shape", "kv", "name", "temperatures", "replayed"), rest_slow(BATCHES, 0), ids=str
)
@pytest.mark.usefixtures("products_by_torch")
def test_texts_and_caches_are_those_written_alone(
    algorithm, shape, kv, name, temperatures, replayed, kernels_on_cpu, monkeypatch
):
    """Greedy or drawn; passes and runs of the draft head are shared.

    Keys, values and trees are equal bit for bit to those of a text alone.
    """
    n_jobs = len(temperatures)
    backend, drafter = made(algorithm or "eagle1", shape or TREE, kv, name)
    backend = Replayed(backend.target.model, kv) if replayed else backend
    model = backend.target.model

    def engine():
        return Engine(model, 128, drafter=drafter() if algorithm else None, backend=backend)

    texts = [(PROMPT[:20], 6 if n_jobs > 2 else 4), (PROMPT[:9], 4), (PROMPT[3:5], 3)]
    jobs = [
        (prompt, SamplingParams(temperature, seed=3 + i), n)
        for i, ((prompt, n), temperature) in enumerate(zip(texts, temperatures, strict=False))
    ]
    expected = []
    for prompt, params, n in jobs:
        own = engine()
        text = generated(own, n, prompt, params)
        expected.append((text, own.cache.rows[:, :, : len(own.cached)].clone()))
    shared, drafted = [], []
    run, draft = CudaPass._run, CudaDraft.__call__
    monkeypatch.setattr(CudaPass, "_run", lambda *args: shared.append(len(args[1])) or run(*args))

    def compared(self, states, launches, capture=None):
        pools = draft(self, states, launches, capture)
        drafted.append(len(pools))
        for i, pool in pools.items():
            spec, drafter, _ = launches[i]
            together = backend.select(pool, states[i], drafter, spec)
            alone = backend.pieces.draft(states[i], drafter, spec)
            assert torch.equal(together.tree.tokens, alone.tree.tokens)
            assert torch.equal(together.tree.parents, alone.tree.parents)
        return pools

    monkeypatch.setattr(CudaDraft, "__call__", compared)
    # Prompts are computed one after the other, however long passes take here.
    ticks = itertools.count()
    monkeypatch.setattr(batch, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    several = Batch(engine(), 3)
    first, missed = several.engines[0], []
    with collecting() as ahead, mock.patch.object(type(kernels_on_cpu), "launch"):
        backend.launch_shared(first.state, first.drafter, first._specs(SamplingMode()))

    def note_missed(*, key, fn, **rest) -> None:
        missed.extend({(fn.name, key)} - ahead.keys())

    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", note_missed)
    caches = [None] * n_jobs
    for i, (prompt, _, n) in enumerate(jobs):
        start = lambda own, i=i: jobs_of(own, *jobs[i], caches, i)  # noqa: E731
        several.begin(i, prompt, len(prompt) + n, start)
    texts = finished(several)
    for text, cache, (wanted, rows) in zip(texts.values(), caches, expected, strict=True):
        assert text == wanted and torch.equal(cache.view(torch.uint8), rows.view(torch.uint8))
    assert max(shared) == n_jobs and backend.shares_passes
    # Greedy texts and drawn ones draft apart.
    alike = max(sum(t > 0 for t in temperatures), sum(t == 0 for t in temperatures))
    assert not algorithm or max(drafted) == alike
    assert not missed, "what is shared was compiled ahead, the rest alone"
    if replayed:
        assert all(engine.runner.error is None for engine in several.engines)


def jobs_of(engine: Engine, prompt, params, n, caches, i):
    """An answer, whose keys and values are kept at its end."""
    yield from engine.generate(prompt, params, n)
    caches[i] = engine.cache.rows[:, :, : len(engine.cached)].clone()


def neighbour(table: Tensor, fields: list[int]) -> Tensor:
    table[:2, fields] = table[:2, fields].flip(0)
    return table


FAULTS = {
    "cache of the neighbour": lambda s: neighbour(s.table, [6]),
    "keys one plane too far": lambda s: s.table[:, 6].add_(s.table[:, 7]),
    "rows of the neighbour": lambda s: s.members.copy_(1 - s.members.clamp(0, 1)),
    "length of the neighbour": lambda s: s.seq_lens[:2].copy_(s.seq_lens[:2].flip(0).clone()),
    "blocks of the neighbour": lambda s: s.blocks[:, 0].copy_(1 - s.blocks[:, 0].clamp(0, 1)),
    "paths of another row": lambda s: s.paths.copy_(s.paths.roll(1, 0)),
}


@pytest.mark.parametrize("name", rest_slow(list(FAULTS), 2))
def test_a_planted_fault_is_seen(name, kernels_on_cpu):
    """Results differ, or a kernel touches what it must not."""
    n_head, E, M, B, group = 2, 32, 16, 2, 2
    some = [
        one(*t, G=1, group=group, E=E, int8=False, dtype=HALF) for t in ((5, 70, 4), (6, 90, 2))
    ]
    stored = [own.member.rows.clone() for own in some]
    expected = torch.cat([alone(own, n_head, E, HALF, None, True, 0) for own in some])
    for broken in (False, True):
        for own, rows in zip(some, stored, strict=True):
            own.member.rows.copy_(rows)
        sequences = gathered([own.member for own in some], M, B, group, block_of(M, B, group))
        if broken:
            FAULTS[name](sequences)
        try:
            y = together(some, M, B, sequences, n_head, E, HALF, None, True, 0)
            equal = torch.equal(y[: len(expected)], expected)
        except Fault:
            equal = False
        assert equal is not broken
