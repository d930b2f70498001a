"""One tree from two sources: planted duplicates, ties and padding, against merging over lists."""

from __future__ import annotations

import random

import pytest
import torch

from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.drafting.lookup import NOTHING, Corpus, Lookup
from fasteagle.errors import FasteagleError
from fasteagle.options import SamplingParams
from fasteagle.sampling import SamplingMode
from fasteagle.shapes import MAX_DEPTH, FusedShape, GatedChain, TreeShape, shape_of
from fasteagle.state import CycleSpec
from fasteagle.tree import HEAD, LOOKUP, Pool, ancestor_mask, fuse, rerank
from helpers import (
    eagle3_of,
    empty_state,
    fused_drafter,
    pairs,
    random_head,
    random_target,
    tiny_config,
)

X = NOTHING
BOTH = HEAD + LOOKUP
ROOT = torch.tensor([50])


def as_paths(tree):
    """Valid nodes as paths of tokens, with who proposed them."""
    paths = {0: ()}
    source_of = {}
    for row in range(1, len(tree.tokens)):
        if tree.valid[row]:
            parent = int(tree.parents[row])
            assert parent in paths and parent < row, "a node without its parent"
            paths[row] = (*paths[parent], int(tree.tokens[row]))
            assert paths[row] not in source_of, "a node twice"
            source_of[paths[row]] = int(tree.sources[row])
        else:
            assert int(tree.tokens[row]) == int(tree.parents[row]) == 0
    return source_of


# A pool of two levels, k = 2: 1 and 2 below the root, 3 and 4 below 1, 3 and 5 below 2.
POOL = Pool(
    torch.tensor([1, 2, 3, 4, 3, 5]),
    torch.tensor([-0.5, -1.0, -1.0, -2.0, -1.5, -3.0]),
    torch.tensor([-1, -1, 0, 0, 1, 1]),
)


def fused(tokens, logp, pool=POOL, k=2, levels=2):
    tokens = torch.tensor(tokens)
    return fuse(pool, k, levels, tokens, torch.as_tensor(logp).expand(tokens.shape))


def test_the_same_token_under_the_same_parent_is_one_node():
    expected = dict.fromkeys([(2,), (1, 4), (2, 3), (2, 5)], HEAD)
    expected |= {(1,): BOTH, (1, 3): BOTH, (1, 3, 7): LOOKUP}
    assert as_paths(rerank(fused([1, 3, 7], -0.1), ROOT, 9)) == expected
    assert as_paths(rerank(fused([3, 3, 3], -0.1), ROOT, 9)) == {
        **dict.fromkeys([(1,), (2,), (1, 3), (1, 4), (2, 3), (2, 5)], HEAD),
        **dict.fromkeys([(3,), (3, 3), (3, 3, 3)], LOOKUP),
    }


def test_a_place_that_found_nothing_adds_nothing():
    both = fused([X, X], float("-inf"))
    assert torch.equal(both.scores[:6], POOL.scores)
    tree = rerank(both, ROOT, 8)
    assert len(as_paths(tree)) == 6 and tree.valid.tolist() == [True] * 7 + [False] * 2


@pytest.mark.parametrize("R", [1, 2])  # a level past the chain, and none
def test_a_score_that_rounding_makes_positive_is_certain(R):
    """Log-probabilities of a draft head that is certain may be just above 0."""
    pool = Pool(torch.tensor([1, 2]), torch.tensor([1e-7, 2e-7]), torch.tensor([-1, 0]))
    both = fuse(pool, 1, 2, torch.full((R,), 9), torch.full((R,), -1.0))
    assert both.scores[:2].tolist() == [0, 0]


def test_ties_keep_parents_before_children():
    """Certain tokens score like their parents, on both sides and across them."""
    pool = POOL._replace(scores=torch.zeros(6))
    for chain, n_nodes in (([2, 3, 7], 7), ([8, 9, 10], 9)):
        for n in range(1, 9):
            assert len(as_paths(rerank(fused(chain, 0.0, pool), ROOT, n))) == min(n, n_nodes)


def test_trees_of_more_nodes_than_both_sources_yield_are_refused():
    head = random_head(random_target(tiny_config()))
    drafter = fused_drafter(head, FusedShape(2, 2, 5, 4))
    assert drafter.resized(6 + MAX_DEPTH).shape.reach == MAX_DEPTH
    with pytest.raises(FasteagleError, match="its trees have at most 69 nodes"):
        drafter.resized(7 + MAX_DEPTH)


def test_the_lookup_alone():
    none = torch.zeros(0, dtype=torch.long)
    both = fused([7, 8, X], [-0.5, -0.5, float("-inf")], Pool(none, none.float(), none), 1, 0)
    tree = rerank(both, ROOT, 3)
    assert as_paths(tree) == dict.fromkeys([(7,), (7, 8)], LOOKUP)
    assert int(tree.valid.sum()) == 3


def by_lists(pool, row, logp):
    """Scores by path: each token's probability is the highest that anybody gives it."""
    own, below, paths = {}, {}, []
    for token, score, parent in zip(*(t.tolist() for t in pool[:3]), strict=True):
        path = (*(paths[parent] if parent >= 0 else ()), token)
        paths.append(path)
        own[path] = min(0.0, score - (pool.scores[parent].item() if parent >= 0 else 0.0))
    for level, token in enumerate(row):
        if token != X:
            path = tuple(row[: level + 1])
            own[path] = max(own.get(path, -1e9), logp[level])
    for path in sorted(own, key=len):
        below[path] = own[path] + below.get(path[:-1], 0.0)
    return below


@pytest.mark.parametrize(("k", "levels", "R"), [(3, 3, 6), (2, 4, 3), (1, 3, 5), (4, 1, 2)])
def test_random_pools_against_merging_over_lists(k, levels, R):
    torch.manual_seed(0)
    draw = random.Random(0)
    for _ in range(100):
        pool = random_pool(draw, k, levels)
        end = draw.choice([R, R, 2, 0])
        row = [draw.randrange(5) for _ in range(end)] + [X] * (R - end)
        logp = torch.where(torch.tensor(row) == X, float("-inf"), -torch.rand(R))
        both = fused(row, logp, pool, k, levels)
        expected = by_lists(pool, row, logp.tolist())
        n = len(expected)
        assert set(as_paths(rerank(both, ROOT, len(both.scores)))) == set(expected)
        # The best of any number are the best by the lists: the sum of their scores says so.
        ranked = sorted(expected.values(), reverse=True)
        for size in (1, n // 2, n):
            best = as_paths(rerank(both, ROOT, size))
            total = sum(expected[path] for path in best)
            assert len(best) == size and total == pytest.approx(sum(ranked[:size]), abs=1e-4)


def random_pool(draw, k, levels):
    """Return a pool of an EAGLE tree: k distinct children of k nodes of the level above."""
    tokens, scores, parents = [], [], []
    frontier = [-1]
    for _ in range(levels):
        begin = len(tokens)
        for parent in frontier:
            for token in draw.sample(range(5), k):
                above = scores[parent] if parent >= 0 else 0.0
                tokens.append(token)
                scores.append(above - draw.random() * draw.choice([0, 1]))
                parents.append(parent)
        frontier = draw.sample(range(begin, len(tokens)), k)
    return Pool(torch.tensor(tokens), torch.tensor(scores), torch.tensor(parents))


# The drafter


@pytest.fixture(scope="module", params=["eagle1", "eagle3"])
def head(request, target):
    return random_head(target, eagle3=eagle3_of(request.param, target.config))


def begun(target, drafter, text):
    """Return a state after `text`, and the draft head's prediction there."""
    state = empty_state(target)
    state.text[: len(text)] = torch.tensor(text)
    state.seq_len.fill_(len(text) - 1)
    state.root.fill_(text[-1])
    state.sampling.load(SamplingParams())
    drafter.reserve(len(text))
    torch.manual_seed(3)
    dim = drafter.head.config.feature_dim
    seen = pairs(text[1:], torch.randn(len(text) - 1, dim))
    return state, drafter.extend(seen, state.seq_len)


@torch.no_grad()
def test_without_a_repetition_the_tree_is_eagles(target, head):
    text = list(range(3, 20))
    eagle, both = (
        EagleDrafter(head, TreeShape(3, 3, 8)),
        fused_drafter(head, FusedShape(3, 3, 8, 8)),
    )
    trees = []
    for drafter in (eagle, both):
        state, prediction = begun(target, drafter, text)
        spec = CycleSpec(drafter.shape, 4, SamplingMode())
        trees.append(drafter.propose(prediction, state, spec))
    assert trees[0].tokens.tolist() == trees[1].tokens.tolist()
    assert trees[0].parents.tolist() == trees[1].parents.tolist()


@torch.no_grad()
def test_a_long_repetition_is_copied_below_eagles_leaves(target, head):
    drafter = fused_drafter(head, FusedShape(2, 2, 10, 8))
    text = [*range(3, 30), *range(3, 13)]
    state, prediction = begun(target, drafter, text)
    tree = drafter.propose(prediction, state, CycleSpec(drafter.shape, 3, SamplingMode()))
    paths = as_paths(tree)
    assert tuple(range(13, 21)) in paths  # all eight
    _, depths = ancestor_mask(tree.parents, tree.valid)
    assert depths.max() == 8 == drafter.shape.depth


@torch.no_grad()
def test_what_followed_teaches_the_table(target, head):
    drafter = fused_drafter(head, FusedShape(0, 1, 8, 8))
    text = [*range(3, 30), *range(3, 13)]
    state, _ = begun(target, drafter, text)
    spec = CycleSpec(drafter.shape, 1, SamplingMode())
    before = [tensor.clone() for tensor in drafter.advanced]
    drafter.propose(None, state, spec)
    assert torch.equal(drafter.lookup.table, before[0])
    state.text[len(text) : len(text) + 3] = torch.tensor([13, 14, 40])  # the third is wrong
    state.seq_len.add_(3)
    state.root.fill_(40)
    drafter.propose(None, state, spec)
    learned = (drafter.lookup.table - before[0]).sum((1, 2))
    assert learned.tolist() == pytest.approx([3, 2])
    apart = drafter.apart()
    apart.lookup.table.zero_()
    assert drafter.lookup.table[0].min() > 0 and apart.head is drafter.head


@torch.no_grad()
def test_a_corpus_is_looked_up_too(target, head):
    corpus = Corpus([[40, 41, 42, 43, 44, 45, 46]], "cpu")
    drafter = fused_drafter(head, FusedShape(2, 2, 10, 8), lookup=Lookup(corpus=corpus))
    state, prediction = begun(target, drafter, [1, 2, 40, 41, 42])
    tree = drafter.propose(prediction, state, CycleSpec(drafter.shape, 3, SamplingMode()))
    assert (43, 44, 45, 46) in as_paths(tree)


# Shapes


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((3, 3, 40, 8), "tree-nodes 40 is more than the 29 candidates"),
        ((3, 3, 2, 8), "cannot hold a path"),
        ((3, 0, 8, 8), "tree-topk 0"),
        ((3, 3, 8, 0), "lookup-depth 0"),
        ((3, 3, 8, 64), "lookup-depth 64"),
        ((0, 1, 9, 8), "tree-nodes 9"),
    ],
)
def test_sizes_that_do_not_go_together(sizes, message):
    with pytest.raises(FasteagleError, match=message):
        FusedShape(*sizes)


def test_the_longest_path_of_a_shape():
    assert [FusedShape(*s).depth for s in ((3, 3, 8, 8), (3, 3, 5, 8), (4, 2, 8, 2))] == [8, 5, 4]
    made = FusedShape(3, 2, 9, 16)
    assert shape_of(levels=3, topk=2, nodes=9, reach=16) == made and made.rows == 10
    assert str(made) == "3, 2, 9 + 16"


def test_other_numbers_of_nodes(head):
    deep, both = TreeShape(12, 1, 12), FusedShape(12, 1, 14, 8)
    assert EagleDrafter(head, deep).resized(12).shape == deep
    assert fused_drafter(head, both).resized(16).shape == FusedShape(12, 1, 16, 8)
    assert EagleDrafter(head, deep, noise="none").resized(12).noise == "none"
    drafter = fused_drafter(head, FusedShape(3, 3, 8, 8))
    chains = fused_drafter(head, GatedChain(16))
    for nodes in (1, 2, 8, 16, 30, 60):
        assert drafter.resized(nodes).shape.nodes == nodes
        assert chains.resized(nodes).shape.nodes == nodes
    assert chains.shape == GatedChain(16) and chains.resized(31).shape == GatedChain(31)
    assert chains.resized(32).shape == FusedShape(8, 1, 32, 24)
    for nodes in (0, 500):
        with pytest.raises(FasteagleError):
            chains.resized(nodes)
