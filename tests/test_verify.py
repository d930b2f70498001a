"""Accepting: the path that the drawn tokens choose, padding, tokens each row has seen."""

from __future__ import annotations

import itertools

import torch

from fasteagle.decoding.cycle import EAGER
from fasteagle.generate import Engine
from fasteagle.multi_round import accept_sampled, multi_round
from fasteagle.options import SamplingParams
from fasteagle.sampling import BAD_ROW, SamplingMode
from fasteagle.shapes import MAX_DEPTH, FusedShape, GatedChain, TreeShape
from fasteagle.state import CycleSpec
from fasteagle.tree import DraftTree, Proposal
from fasteagle.verify import PAD, accept, seen_rows
from helpers import empty_state, fused_drafter, generated, random_head, random_target, tiny_config
from test_speculative import PROMPT, Fake, oracle


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
    """Chi-square of tokens below sampled children; a wrong residual would shift them.

    Two children of the root, one below the first of them, and padding there that is none.
    """
    p = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.4, 0.1, 0.3, 0.2], *[[0.25] * 4] * 3])
    q = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.4, 0.1, 0.4], *[[0.25] * 4] * 3])
    parents, valid = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([True, True, True, True, False])
    generator, n = torch.Generator().manual_seed(0), 4000
    counts = torch.zeros(2, 4)
    for seed in range(n):
        children = torch.multinomial(q[0], 2, generator=generator)
        below = torch.multinomial(q[1], 1, generator=generator)
        tokens = torch.cat((torch.tensor([0]), children, below, torch.tensor([0])))
        got = multi_round(p, q, DraftTree(tokens, parents, valid), 2, seed, 7)
        assert got.count == (got.emitted != PAD).sum()
        counts[0, got.emitted[0]] += 1
        if got.rows[1] == 1:
            counts[1, got.emitted[1]] += 1
    for seen, expected in zip(counts, p, strict=False):
        expected = expected * seen.sum()
        assert ((seen - expected) ** 2 / expected).sum() < 16.27  # 99.9 % of 3 degrees


def test_multi_round_draws_anew_for_each_seed_and_position():
    """The numbers of a generator follow from 32 bits of its seed only."""
    p, tree = torch.full((1, 2**20), 2.0**-20), DraftTree(*torch.zeros(3, 1, dtype=torch.long))
    drawn = [
        int(multi_round(p, p, tree, 0, seed, at).emitted[0])
        for seed, at in ((5, 7), (5, 8), (5, 7 + 2**12), (6, 7), (5 + 2**32, 7), (5 + 2**20, 6))
    ]
    assert len(set(drawn)) == len(drawn)


def test_multi_round_after_all_that_the_draft_head_may_draw():
    """A second child that the draft head could not have drawn is accepted like any other."""
    p, q = torch.tensor([[0.0, 1.0]] * 3), torch.tensor([[1.0, 0.0]] * 3)
    tree = DraftTree(torch.tensor([0, 0, 1]), torch.tensor([0, 0, 0]), torch.ones(3).bool())
    assert multi_round(p, q, tree, 1, 3, 7).emitted.tolist() == [1, 1]


def test_multi_round_penalizes_tokens_that_were_seen():
    """All but one token of the text were seen before; after that one all are equal."""
    state = empty_state(random_target(tiny_config()))
    state.sampling.load(params := SamplingParams(1.0, repetition_penalty=100.0))
    state.seen.fill_(True)[0, 9] = False
    kind = SamplingMode.of(params, V := state.seen.shape[1])
    tree = DraftTree(torch.tensor([5]), torch.tensor([0]), torch.tensor([True]), torch.zeros(1, V))
    spec = CycleSpec(None, 0, kind)
    got = accept_sampled(state, spec, Proposal.of(tree), torch.full((1, V), 50.0))
    assert got.emitted.tolist() == [9]


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


def test_what_a_cycle_does_for_a_tree_of_its_shape():
    shapes = None, TreeShape(2, 1, 2), GatedChain(3), TreeShape(2, 2, 4), FusedShape(1, 2, 4, 3)
    specs = [CycleSpec(shape, 1, SamplingMode()) for shape in (*shapes, FusedShape(0, 0, 4, 4))]
    assert [spec.in_place for spec in specs] == [False, True, True, False, False, False]
    assert [spec.extends for spec in specs] == [False, True, True, True, True, False]


def test_one_pair_is_pending_where_an_answer_begins_and_after_a_long_pause():
    state = empty_state(random_target(tiny_config()))
    state.tokens[:3] = torch.tensor([4, 5, 6])
    state.features[:3] = torch.arange(3.0).unsqueeze(1)
    state.count.fill_(3)
    state.keep_last_pair(3)
    tokens, features, count = state.committed(1)
    assert (int(tokens), float(features[0, 0]), int(count)) == (6, 2.0, 1)
    state.count.fill_(3)
    state.load([7, 8, 9], torch.full_like(features, 5.0), SamplingParams())
    tokens, features, count = state.committed(1)
    assert (int(tokens), float(features[0, 0]), int(count)) == (9, 5.0, 1)


def test_a_lookup_alone_leaves_pairs_pending():
    target, shape = random_target(tiny_config()), FusedShape(0, 0, 4, 4)
    drafter = fused_drafter(random_head(target), shape)
    proposal = EAGER.draft(empty_state(target), drafter, CycleSpec(shape, 1, SamplingMode()))
    assert proposal.extended is False


def test_the_longest_path_can_be_accepted_whole(target):
    truth = PROMPT + generated(Engine(target, 512), 80)
    engine = Engine(target, 512, drafter=Fake(oracle(truth, MAX_DEPTH), MAX_DEPTH + 1, MAX_DEPTH))
    assert generated(engine, MAX_DEPTH + 2) == truth[len(PROMPT) :][: MAX_DEPTH + 2]
    assert engine.stats.path_lengths == [MAX_DEPTH] and engine.stats.drafted == MAX_DEPTH


def test_what_a_cycle_changes_is_what_is_restored(target):
    """Captures run a cycle more often than it counts; text past the root is not read."""
    params = SamplingParams(repetition_penalty=1.5)
    truth = PROMPT + generated(Engine(target, 512), params=params)
    engine = Engine(target, 512, drafter=Fake(oracle(truth, 5), 6, 5))
    answer, state = engine.generate(PROMPT, params, 30), engine.state
    next(answer)
    tensors = {name: t for name, t in vars(state).items() if isinstance(t, torch.Tensor)}
    before = {name: t.clone() for name, t in tensors.items()}
    next(answer)
    changed = {name for name, t in tensors.items() if not torch.equal(t, before[name])}
    restored = {name for name, t in tensors.items() if any(t is one for one in state.advanced)}
    assert changed == {"text", *restored}
