"""Kernels of tokens, candidates and trees, as compiled, in our interpreter of PTX."""

from __future__ import annotations

import pytest
import torch

from device_checks import check_draw, check_fuse, check_lookup, check_order, random_pool
from fasteagle.compile import cuda_ops
from fasteagle.compile.kernels import draft_kernels
from fasteagle.compile.precompile import collecting, run_trees
from fasteagle.drafting.base import DraftOps, top_children
from fasteagle.options import SamplingParams
from fasteagle.sampling import SamplingMode, draw
from fasteagle.shapes import FusedShape
from fasteagle.tree import chain, relations, rerank
from helpers import (
    captured_engine,
    drawing,
    fused_drafter,
    random_head,
    random_target,
    rest_slow,
    tiny_config,
)

UNFUSED = pytest.mark.filterwarnings("error:TRITON_DEFAULT_FP_FUSION")  # each kernel says which
pytestmark = [pytest.mark.usefixtures("kernels_on_cpu"), UNFUSED]


@pytest.mark.parametrize(("N", "n_tokens"), [(5000, 3), (600, 400), (2113, 100_000)])
def test_lookups_are_those_of_torch(kernels_on_cpu, N, n_tokens):
    check_lookup(N, n_tokens, "cpu")
    assert kernels_on_cpu.launches["look_up_kernel"] == 20


SHAPES = [(3, 3, 8), (10, 6, 8), (1, 4, 2), (4, 1, 5), (1, 0, 6), (2, 5, 63)]


@pytest.mark.parametrize(("k", "n_levels", "R"), rest_slow(SHAPES, 2))
def test_merged_candidates_are_those_of_torch(kernels_on_cpu, k, n_levels, R):
    check_fuse(k, n_levels, R, "cpu")
    assert kernels_on_cpu.launches["fuse_kernel"] == R + 1 + (n_levels > 0)


@pytest.mark.parametrize("V", rest_slow([5000, 64, 32001], 1))
def test_drawn_tokens_are_those_of_torch(kernels_on_cpu, V):
    check_draw(V, "cpu")
    assert kernels_on_cpu.launches["draw_kernel"] == 12


@pytest.mark.parametrize(("position", "token"), [(7176, 1914), (761_515, 1896)])
def test_noise_of_a_hash_that_rounds_to_one_and_of_zero(position, token):
    """It is finite: a grammar may leave this token alone."""
    logits = torch.full((1, 2000), float("-inf"))
    logits[0, token] = 0.0
    params = SamplingParams(1.0, seed=0)
    for by in (draw, cuda_ops.draw):
        drawn = by(logits, torch.tensor([position]), *drawing(params, 2000))
        assert drawn.tolist() == [token]


def test_penalized_scores_are_not_rounded_to_the_type_of_the_logits():
    logits, seen = torch.zeros(1, 64).bfloat16(), torch.zeros(1, 64).bool()
    logits[0, 3], logits[0, 9], seen[0, 9] = 6.1875, 8.0625, True  # 8.0625 / 1.3 = 6.202
    how = *drawing(SamplingParams(repetition_penalty=1.3), 64), seen
    for by in (draw, cuda_ops.draw):
        assert by(logits, torch.tensor([5]), *how).tolist() == [9]


def test_kernels_that_run_read_nothing_that_others_should_have_written(kernels_on_cpu):
    """Of two trees one may have a kernel that is compiled, after another one that is not."""
    target = random_target(tiny_config())
    engine = captured_engine(target, 256)
    engine.use(fused_drafter(random_head(target), FusedShape(4, 3, 8, 8)))
    ops = cuda_ops.top_children, cuda_ops.rerank, None, cuda_ops.look_up, cuda_ops.fuse
    engine.drafter.run_by(DraftOps(*ops))

    def run(shape):
        specs = [engine.spec(shape, SamplingMode())]
        run_trees(engine.drafter, specs, engine.state)

    run(FusedShape(4, 3, 8, 8))  # the card refuses to read what nobody has written
    with collecting() as variants:
        run(FusedShape(2, 7, 8, 8))
    assert {name for name, _ in variants} == {"fuse_kernel"}


@pytest.mark.parametrize(
    ("P", "N"),
    rest_slow(
        [(1, 1), (68, 15), (9, 20), (4, 4), (12, 5), (100, 63), (510, 59), (710, 8), (1030, 4)], 3
    ),
)
def test_rerank_and_relations(P, N):
    check_order(P, N, "cpu")


@pytest.mark.parametrize("T", rest_slow([2, 16, 1, 17, 64, 65], 2))
def test_relations_of_chains(T):
    row = torch.arange(T)
    for valid in (row >= 0, row <= T // 2, row != 1):
        made = chain(row, valid)
        seen = relations(made.parents, made.valid)
        for value, other in zip(seen, cuda_ops.relate(made.parents, made.valid), strict=True):
            assert torch.equal(value, other)


def test_candidates_of_no_score_at_all_are_none():
    """A draft head with broken features: its tree is padding, and no row comes after it."""
    pool = random_pool(30, 0)
    scores = pool.scores.clone()
    scores[5:] = float("nan")
    clean = pool._replace(scores=torch.where(scores.isnan(), float("-inf"), scores))
    root = torch.tensor([7])
    result = cuda_ops.rerank(pool._replace(scores=scores), root, 12)
    expected = rerank(clean, root, 12)
    assert torch.equal(result.tokens, expected.tokens) and torch.equal(result.valid, expected.valid)
    assert torch.equal(result.parents, expected.parents)


@pytest.mark.parametrize(
    ("W", "V", "k"), rest_slow([(4, 5000, 10), (1, 60, 4), (3, 2048, 1), (2, 40000, 3)])
)
def test_the_best_children(W, V, k):
    wider = 3 * torch.randn(W, V + 3, generator=torch.Generator().manual_seed(V))
    logits = wider[:, :V]
    logits[0] += 200
    logits[1:2] -= 200
    expected = top_children(logits, k)
    result = draft_kernels.top_children(logits, k)
    assert torch.equal(result[0], expected[0])
    torch.testing.assert_close(result[1], expected[1], rtol=1e-5, atol=1e-5)


def test_children_beside_what_is_no_number():
    """A draft head with broken features costs acceptance: ids that are none would end CUDA."""
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(1))
    clean = logits.clone()
    logits[0, [3, 2100, 4999]] = clean[0, [3, 2100, 4999]] = float("nan")
    clean[0, [3, 2100, 4999]] = float("-inf")
    logits[1] = float("nan")
    logits[2, 4990:] = float("inf")
    ids, _ = draft_kernels.top_children(logits, 4)
    assert torch.equal(ids[0], top_children(clean[:1], 4)[0][0])
    assert ids.min() >= 0 and ids.max() < 5000
    assert ids[2].tolist() == [4990, 4991, 4992, 4993]


def test_children_beside_a_chunk_that_is_masked():
    """As whole parts of a vocabulary may be."""
    logits = torch.randn(2, 5000, generator=torch.Generator().manual_seed(1))
    logits[0, 2048:4096] = float("-inf")
    logits[1, :4096] = float("-inf")
    expected, result = top_children(logits, 4), draft_kernels.top_children(logits, 4)
    assert torch.equal(result[0], expected[0])
    torch.testing.assert_close(result[1], expected[1], rtol=1e-5, atol=1e-5)


def test_of_equal_children_the_lowest_ids():
    logits = torch.zeros(2, 5000)
    logits[1, [4999, 2500, 2049]] = 1.0
    ids, logp = draft_kernels.top_children(logits, 4)
    assert ids.tolist() == [[0, 1, 2, 3], [2049, 2500, 4999, 0]]
    torch.testing.assert_close(logp[0].exp(), torch.full((4,), 1 / 5000))
