"""A smaller model drafts: its proposals, its cache, and the text that stays the same."""

from __future__ import annotations

import pytest
import torch

from fasteagle.drafting.draft_model import ModelDrafter
from fasteagle.generate import Engine
from fasteagle.model import Target
from fasteagle.options import SamplingParams
from fasteagle.shapes import TreeShape
from fasteagle.tree import ancestor_mask
from helpers import (
    DRAWN,
    GREEDY,
    PROMPT,
    captured_engine,
    empty_state,
    generated,
    logits_of,
    pairs,
    propose,
    random_target,
    spec_of,
    tiny_config,
)


def smaller(**changes):
    changes = {"n_layer": 1, "dim": 16, "n_head": 2, "n_kv_head": 1, **changes}
    return random_target(tiny_config(**changes), seed=5)


def drafter_of(model, *sizes, noise="shared"):
    return ModelDrafter(Target(model), TreeShape(*sizes), 60, noise=noise)


MODELS = {
    "smaller": {},
    "another window": {"sliding_window": 6},
    "padded vocabulary": {"vocab_size": 70},
    "fewer tokens": {"vocab_size": 40},
}


@pytest.mark.parametrize(
    ("changes", "params"),
    [(changes, GREEDY) for changes in MODELS.values()] + [({}, params) for params in DRAWN[1:]],
    ids=str,
)
def test_the_tokens_of_plain_decoding(target, changes, params):
    expected = generated(Engine(target, 512), 20, params=params)
    for sizes in ((4, 1, 4), (3, 3, 8)):
        eager = Engine(target, 512, drafter=drafter_of(smaller(**changes), *sizes))
        assert generated(eager, 20, params=params) == expected
        replayed = captured_engine(target, 512)
        replayed.use(drafter_of(smaller(**changes), *sizes))
        assert generated(replayed, 20, params=params) == expected
        assert replayed.runner.error is None
        assert replayed.stats.path_lengths == eager.stats.path_lengths


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(0.9, seed=3)], ids=str)
def test_the_target_drafting_for_itself_is_always_right(target, params):
    """Its first token and every position are where they belong, in follow-ups as well."""
    engine = Engine(target, 512, drafter=drafter_of(target, 4, 1, 4))
    first = generated(engine, 51, params=params)
    assert engine.stats.passes == 10 and set(engine.stats.path_lengths) == {4}
    prompt = [*PROMPT, *first, 3, 4]
    second = generated(engine, 26, prompt, params)
    assert engine.stats.cached_tokens > 40 and engine.stats.passes == 5
    assert second == generated(Engine(target, 512), 26, prompt, params)
    generated(engine, 21, [7], params)  # a text of one token, which no pair shows
    assert engine.stats.passes == 4
    engine.use(None)
    generated(engine, 5, [7, 8, 9], params)
    engine.use(drafter_of(target, 4, 1, 4))
    generated(engine, 21, [7, 8, 9, 1], params)
    assert engine.stats.passes == 4


@pytest.mark.parametrize("window", [None, 4, 2])  # the last is shorter than the tree's paths
@torch.no_grad()
def test_a_tree_is_the_likeliest_children_of_each_node(target, window):
    """Against a pass over every path by itself."""
    model = smaller(sliding_window=window)
    drafter, state = drafter_of(model, 4, 2, 14), empty_state(target)
    text = [3, 8, 1, 40, 22]
    drafter.reserve(len(text))
    drafter.begin(text[0])
    tree = propose(drafter, state, pairs(text[1:], torch.zeros(4, 1)), text[-1])
    mask, depths = ancestor_mask(tree.parents, tree.valid)
    assert depths.max() == 4
    for row in range(1, 15):
        ancestors = [i for i in range(row) if mask[row, i]]
        path = [int(tree.tokens[i]) for i in ancestors[1:]]
        logits = logits_of(model, torch.tensor([*text, *path]))[-1]
        assert int(tree.tokens[row]) in logits.topk(2).indices.tolist()


@torch.no_grad()
def test_padding_of_the_pairs_changes_nothing(target):
    model = smaller()
    trees = []
    for padding in (0, 3):
        drafter, state = drafter_of(model, 3, 2, 8), empty_state(target)
        drafter.reserve(20)
        drafter.begin(3)
        tokens = torch.tensor([8, 1, 40, *[55] * padding])
        new = pairs(tokens, torch.zeros(len(tokens), 1), 3)
        state.seq_len.fill_(3)
        state.root.fill_(40)
        prediction = drafter.extend(new, state.seq_len)
        trees.append(drafter.propose(prediction, state, spec_of(drafter.shape)))
    assert torch.equal(trees[0].tokens, trees[1].tokens)


def test_it_is_run_apart_without_touching_its_cache(target):
    drafter = drafter_of(smaller(), 2, 1, 2)
    drafter.reserve(4)
    before = drafter.cache.rows.clone()
    drafter.apart().begin(7)
    assert torch.equal(drafter.cache.rows, before)
    drafter.begin(7)
    assert not torch.equal(drafter.cache.rows, before)


def test_other_numbers_of_nodes():
    chain = drafter_of(smaller(vocab_size=70), 4, 1, 4, noise="none")
    assert [chain.resized(n).shape for n in (1, 6)] == [TreeShape(1, 1, 1), TreeShape(6, 1, 6)]
    assert chain.resized(6).noise == "none" and len(chain.resized(6).target_ids) == 60
    assert drafter_of(smaller(), 3, 3, 8).resized(2).shape == TreeShape(2, 3, 2)
