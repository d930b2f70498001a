"""Accepting: the path that the drawn tokens choose, padding, tokens each row has seen."""

from __future__ import annotations

import itertools

import torch

from fasteagle.multi_round import multi_round
from fasteagle.sampling import BAD_ROW
from fasteagle.tree import DraftTree, Proposal
from fasteagle.verify import PAD, accept, seen_rows


def test_accept_follows_the_drawn_tokens():
    """Every tree of up to four rows, every drawing over three tokens, against a plain walk."""
    for parents in ([0, 0, 0, 1], [0, 0, 1, 2], [0, 0, 0, 0], [0, 0, 1, 1]):
        tokens = [2, 0, 1, 2] if parents != [0, 0, 1, 1] else [2, 0, 0, 1]
        tree = DraftTree(torch.tensor(tokens), torch.tensor(parents), torch.ones(4).bool())
        proposal = Proposal.of(tree)
        for drawn in itertools.product(range(3), repeat=4):
            got = accept(torch.tensor(drawn), proposal, 3)
            at, path = 0, [0]
            while True:
                below = [j for j in range(1, 4) if parents[j] == at and tokens[j] == drawn[at]]
                if not below:
                    break
                at = below[0]
                path.append(at)
            assert got.count == len(path)
            assert got.rows[: len(path)].tolist() == path
            expected = [drawn[j] for j in path]
            assert got.emitted.tolist() == expected + [PAD] * (4 - len(path))


def test_padding_is_never_accepted():
    valid = torch.tensor([True, True, False])
    tree = DraftTree(torch.tensor([5, 6, 0]), torch.tensor([0, 0, 1]), valid)
    got = accept(torch.tensor([6, 0, 0]), Proposal.of(tree), 2)
    assert got.emitted.tolist() == [6, 0, PAD]


def test_multi_round_emits_the_targets_distribution():
    """Chi-square of first tokens below two sampled children; a wrong residual would shift them."""
    p, q = torch.tensor([[0.1, 0.2, 0.3, 0.4]] * 3), torch.tensor([[0.4, 0.3, 0.2, 0.1]] * 3)
    generator, n = torch.Generator().manual_seed(0), 4000
    counts = torch.zeros(4)
    for seed in range(n):
        children = torch.multinomial(q[0], 2, generator=generator)
        tokens = torch.cat((torch.tensor([0]), children))
        tree = DraftTree(tokens, torch.tensor([0, 0, 0]), torch.ones(3).bool())
        counts[multi_round(p, q, tree, 1, seed, 7).emitted[0]] += 1
    assert ((counts - p[0] * n) ** 2 / (p[0] * n)).sum() < 16.27  # 99.9 % point of 3 degrees


def test_multi_round_ends_a_path_where_the_target_has_no_probabilities():
    p, q = torch.full((2, 4), 0.25), torch.full((2, 4), 0.25)
    p[1] = float("nan")
    tree = DraftTree(torch.tensor([0, 2]), torch.tensor([0, 0]), torch.ones(2).bool())
    assert multi_round(p, q, tree, 1, 3, 7).emitted.tolist() == [2, BAD_ROW]
    assert multi_round(p.flip(0), q, tree, 1, 3, 7).emitted.tolist() == [BAD_ROW, PAD]


def test_penalty_sees_each_rows_own_ancestors():
    tree = DraftTree(torch.tensor([5, 6, 7, 8]), torch.tensor([0, 0, 0, 1]), torch.ones(4).bool())
    seen = torch.zeros(1, 10, dtype=torch.bool)
    seen[0, 1] = True
    rows = [set(row.nonzero()[:, 0].tolist()) for row in seen_rows(seen, Proposal.of(tree))]
    assert rows == [{1, 5}, {1, 5, 6}, {1, 5, 7}, {1, 5, 6, 8}]
    assert seen.sum() == 1
