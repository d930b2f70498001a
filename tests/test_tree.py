"""Trees: masks and depths from parents, the choice of the best nodes, shapes that cannot be."""

from __future__ import annotations

import pytest
import torch

from fasteagle.errors import FasteagleError
from fasteagle.shapes import TreeShape
from fasteagle.tree import Pool, TreeView, ancestor_mask, relations, rerank


def random_parents(n: int, seed: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.tensor([0] + [int(torch.randint(0, j, (1,), generator=g)) for j in range(1, n)])


@pytest.mark.parametrize("n", [1, 2, 3, 8, 26, 60])
def test_ancestor_mask_against_walking_up(n):
    for seed in range(5):
        parents = random_parents(n, seed)
        mask, depths = ancestor_mask(parents, torch.ones(n, dtype=torch.bool))
        for j in range(n):
            path, at = {j}, j
            while at:
                at = int(parents[at])
                path.add(at)
            assert set(mask[j].nonzero()[:, 0].tolist()) == path
            assert depths[j] == len(path) - 1


@pytest.mark.parametrize("window", [None, 1, 2, 4, 8])
def test_a_row_sees_the_last_keys_of_its_own_path(window):
    """The committed ones, its ancestors and itself."""
    seq_len, parents = 5, random_parents(12, 3)
    _, depths, paths = relations(parents, torch.ones(12, dtype=torch.bool))
    mask = TreeView(torch.tensor(seq_len), paths, depths, window).mask(20)
    for j, row in enumerate(mask):
        path = [j]
        while path[0]:
            path.insert(0, int(parents[path[0]]))
        slots = [*range(seq_len), *(seq_len + i for i in path)]
        assert row.nonzero()[:, 0].tolist() == slots[-(window or 20) :]


def test_padding_rows_see_themselves_only():
    valid = torch.tensor([True, True, False, False])
    mask, _ = ancestor_mask(torch.tensor([0, 0, 1, 2]), valid)
    assert mask.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    mask, _ = ancestor_mask(torch.tensor([0, 0, 1]), torch.tensor([True, False, True]))
    assert mask.int().tolist() == [[1, 0, 0], [0, 1, 0], [1, 0, 1]]


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_kept_nodes_are_closed_under_ancestors_whatever_ties(noise):
    """Scores in whole numbers: ties between parents and children everywhere."""
    g = torch.Generator().manual_seed(3)
    for _ in range(50):
        size = 40
        parents = random_parents(size + 1, int(torch.randint(0, 10**6, (1,), generator=g)))[1:] - 1
        scores = torch.zeros(size)
        for j in range(size):
            above = scores[parents[j]] if parents[j] >= 0 else 0.0
            step = (
                torch.randint(-1, 1, (1,), generator=g)[0] + noise * torch.randn(1, generator=g)[0]
            )
            scores[j] = min(above, above + step)
        pool = Pool(torch.arange(100, 140), scores, parents)
        tree = rerank(pool, torch.tensor([7]), 15)
        chosen = [int(token) - 100 for token in tree.tokens[1:]]
        assert chosen == sorted(chosen) and tree.tokens[0] == 7
        for row, j in enumerate(chosen, 1):
            above = int(tree.parents[row])
            assert above < row
            assert (int(tree.tokens[above]) - 100 if above else -1) == int(parents[j])
        best = scores.sort(descending=True).values[:15].sum()
        assert scores[chosen].sum() == pytest.approx(float(best))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": 0}, "tree-depth 0"),
        ({"topk": 0}, "tree-topk 0"),
        ({"nodes": 0}, "tree-nodes 0"),
        ({"depth": 2, "topk": 2, "nodes": 7}, "more than the 6 candidates"),
        ({"depth": 6, "topk": 4, "nodes": 5}, "cannot hold a path"),
    ],
)
def test_tree_shapes_that_cannot_be(options, message):
    with pytest.raises(FasteagleError, match=message):
        TreeShape(**options)
