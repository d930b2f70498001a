"""The table of acceptance: its classes, and streams of known acceptance that it converges to."""

from __future__ import annotations

import random

import pytest
import torch

from fasteagle.drafting.acceptance import (
    ALL,
    ALL_OF_MANY,
    DEPTH_TERMS,
    MEMORY,
    ONE_OF_SEVERAL,
    ONLY,
    OTHERS,
    PRIOR_TOKENS,
    SAME,
    SHAPE,
    SOME,
    UNASKED,
    AcceptanceTable,
    Candidates,
    candidates_of,
    prior,
)
from fasteagle.drafting.lookup import NOTHING, Matches

X = NOTHING


def matches(*rows, sizes=None):
    return Matches(torch.tensor(rows), torch.tensor(sizes or [3] * len(rows)))


def at_root(value):
    return torch.full((1,), value)


def test_equal_beginnings_are_one_node_led_by_the_longest_match():
    found = candidates_of(matches([5, 6, 7], [5, 6, 8], [5, 9, X], [4, 6, 7], sizes=[9, 4, 2, 1]))
    assert found.leads.tolist() == [
        [True, True, True],
        [False, False, True],
        [False, True, False],
        [True, True, True],  # the same tokens below another parent are other nodes
    ]
    assert found.agreement.tolist() == [
        [SOME, SOME, ONE_OF_SEVERAL],
        [SOME, SOME, ONE_OF_SEVERAL],
        [SOME, ONE_OF_SEVERAL, found.agreement[2, 2]],
        [ONE_OF_SEVERAL, ONLY, ONLY],
    ]
    # Tokens that agree have the class of their longest match: 8 and more, 4 and 5, 2, 1.
    assert found.sizes[found.leads].tolist() == [5, 5, 5, 3, 1, 0, 0, 0]
    assert found.depths.tolist() == [0, 1, 2]


@pytest.mark.parametrize(("n", "expected"), [(1, ONLY), (2, ALL), (3, ALL), (4, ALL_OF_MANY)])
def test_places_that_all_agree(n, expected):
    found = candidates_of(matches(*[[5, 6]] * n, [X, X], sizes=[2] * n + [0]))
    assert found.agreement[0].tolist() == [expected] * 2
    assert found.leads.tolist() == [[True, True]] + [[False, False]] * n


def test_no_place_proposes_nothing():
    assert not candidates_of(matches([X, X], [X, X], sizes=[0, 0])).leads.any()


def test_the_prior_rises_with_what_speaks_for_a_token():
    table = prior().view(SHAPE)
    assert table.min() > 0.001 and table.max() < 0.999
    assert (table.diff(dim=0) > 0).all()  # the longer the match
    assert (table.diff(dim=2) > 0).all()  # the more was right above it
    assert (table[:, ONE_OF_SEVERAL] < table[:, SOME]).all()
    assert (table[:, SOME] < table[:, ALL]).all() and (table[:, ALL] < table[:, ALL_OF_MANY]).all()
    assert (table[..., OTHERS] < table[..., UNASKED]).all()
    assert (table[..., UNASKED] < table[..., SAME]).all()


def test_every_cell_has_a_place_of_its_own():
    table = AcceptanceTable(1, 1, "cpu")
    grid = torch.cartesian_prod(*(torch.arange(n) for n in SHAPE)).T
    sizes, agreement, depths, head = (column.unsqueeze(0) for column in grid)
    tokens = torch.zeros_like(sizes)
    cells = table.cells(
        Candidates(tokens, tokens.bool(), tokens, sizes, agreement, depths[0]), head
    )
    assert cells.flatten().tolist() == list(range(prior().numel()))
    assert torch.allclose(table.log_probabilities(cells[0]).exp(), prior())


class Stream:
    """Proposals below a root, and texts in which they are right as often as `rates` say."""

    def __init__(self, rates, places=1, seed=0):
        self.rates, self.draw = rates, random.Random(seed)
        self.table = AcceptanceTable(places, len(rates), "cpu")
        self.text = torch.zeros(64, dtype=torch.long)

    def step(self, proposal=None):
        """Propose, then commit the accepted tokens and one that is another."""
        rows = proposal or [[10 + i for i in range(len(self.rates))]]
        found = candidates_of(matches(*rows, sizes=[3] * len(rows)))
        cells = self.table.cells(found, torch.zeros_like(found.sizes))
        self.text[5] = 9
        self.table.keep(found, cells, at_root(9), torch.tensor(5))
        accepted = 0
        while accepted < len(self.rates) and self.draw.random() < self.rates[accepted]:
            accepted += 1
        true = [*rows[0][:accepted], 3]
        self.text[6 : 6 + len(true)] = torch.tensor(true)
        self.table.learn(self.text, torch.tensor(5 + len(true)))
        return cells[0]

    def estimate(self, cells):
        return self.table.log_probabilities(cells).exp().tolist()


@pytest.mark.parametrize(
    "rates", [(0.9, 0.9, 0.9), (0.1, 0.9, 0.5), (0.5, 0.2, 0.8), (0.99, 0.99, 0.01)], ids=str
)
def test_streams_of_known_acceptance_are_learned(rates):
    errors = []
    for seed in range(4):
        stream = Stream(rates, seed=seed)
        for _ in range(700):
            cells = stream.step()
        errors += [e - rate for e, rate in zip(stream.estimate(cells), rates, strict=True)]
    assert max(map(abs, errors)) < 0.16  # 128 tokens: a standard deviation of at most 0.032 each
    assert abs(sum(errors) / len(errors)) < 0.05


def test_a_change_is_followed():
    stream = Stream((0.9,))
    for _ in range(300):
        cells = stream.step()
    assert stream.estimate(cells)[0] > 0.8
    stream.rates = (0.1,)
    for _ in range(400):
        stream.step()
    assert stream.estimate(cells)[0] < 0.25


def test_the_prior_gives_way_in_a_few_dozen_tokens():
    stream = Stream((0.0,))
    before = stream.estimate(stream.step())[0]
    for _ in range(40):
        cells = stream.step()
    assert stream.estimate(cells)[0] < before / 4
    assert stream.table.tried.max() <= MEMORY and stream.table.tried.min() == PRIOR_TOKENS


def test_a_token_below_a_wrong_one_is_not_counted():
    stream = Stream((0.0, 0.5, 0.5))
    for _ in range(20):
        cells = stream.step()
    counted = stream.table.tried[cells]
    assert counted[0] == PRIOR_TOKENS + 20 and (counted[1:] == PRIOR_TOKENS).all()


def learned(rows, truth, known=None, root=9, seen_root=9):
    """Cells [P, R] that one proposal below slot 5 counted as tried, and as right."""
    table = AcceptanceTable(len(rows), len(rows[0]), "cpu")
    found = candidates_of(matches(*rows))
    cells = torch.arange(found.tokens.numel()).view(found.tokens.shape)  # one for each candidate
    table.keep(found, cells, at_root(root), torch.tensor(5))
    text = torch.full((32,), 99)
    text[5] = seen_root
    text[6 : 6 + len(truth)] = torch.tensor(truth)
    before = [tensor.clone() for tensor in (table.tried, table.right)]
    table.learn(text, torch.tensor(5 + (len(truth) if known is None else known)))
    table.learn(text, torch.tensor(5 + len(truth)))  # counts nothing a second time
    after = (table.tried - before[0], table.right - before[1])
    return [n[cells].round().int().tolist() for n in after]


def test_what_was_not_verified_is_judged_by_the_text():
    """Both branches below a right token, the wrong one and the right one."""
    tried, right = learned([[5, 6, 7], [5, 8, 1], [4, 8, 1]], [5, 8, 2])
    assert tried == [[1, 1, 0], [0, 1, 1], [1, 0, 0]]
    assert right == [[1, 0, 0], [0, 1, 0], [0, 0, 0]]


def test_tokens_behind_the_known_text_are_not_counted():
    assert learned([[5, 6, 7]], [5, 6, 7], known=2) == [[[1, 1, 0]], [[1, 1, 0]]]
    assert learned([[5, 6, 7]], [5, 6, 7], known=0) == [[[0, 0, 0]], [[0, 0, 0]]]


def test_another_text_teaches_nothing():
    assert learned([[5, 6]], [5, 6], seen_root=8) == [[[0, 0]], [[0, 0]]]


def test_a_shorter_proposal_forgets_the_longer_one_before():
    table = AcceptanceTable(1, 3, "cpu")
    text = torch.tensor([9, 5, 6, 7])
    for rows in ([[5, 6, 7]], [[5]]):
        found = candidates_of(matches(*rows))
        table.keep(found, torch.zeros_like(found.tokens), at_root(9), torch.tensor(0))
    table.learn(text, torch.tensor(3))
    assert table.tried[0] == PRIOR_TOKENS + 1


def test_deep_tokens_share_the_last_class():
    found = candidates_of(matches(list(range(40))))
    assert found.depths[[0, 1, 2, 3, 4, 5, 8, 39]].tolist() == [0, 1, 2, 3, 3, 4, 5, 5]
    assert int(found.depths.max()) == len(DEPTH_TERMS) - 1
