"""Drafters: trees of the public implementation, static trees, and shapes that do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from fasteagle.config_hf import head_from_hf
from fasteagle.drafting.base import START_HEAD_GAIN, Drafter
from fasteagle.drafting.company import Company
from fasteagle.drafting.draft_head import Prediction, RankingDrafter
from fasteagle.drafting.draft_model import ModelDrafter
from fasteagle.drafting.eagle import EagleDrafter, expand
from fasteagle.drafting.policy import Outcome
from fasteagle.drafting.static_tree import StaticTreeDrafter, check_paths
from fasteagle.drafting.thresholds import Thresholds
from fasteagle.errors import FasteagleError
from fasteagle.model import KEY_BLOCK, KVCache, Target, Transformer, causal_mask
from fasteagle.options import SamplingParams
from fasteagle.sampling import SamplingMode, gumbel_noise
from fasteagle.shapes import PAPER_TREE, TreeShape
from fasteagle.state import Committed
from fasteagle.tree import DraftTree, ancestor_mask
from head_files import load_head
from helpers import (
    eagle3_of,
    empty_state,
    pairs,
    propose,
    random_head,
    random_target,
    spec_of,
    tiny_config,
)
from simulated_machine import CHAIN, SLOW, policy_of

ASSETS = Path(__file__).parents[1] / "assets" / "golden"


# The reference implementation's own numbers.


class Golden:
    """One folder of recorded inputs and outputs."""

    def __init__(self, folder: Path) -> None:
        self.settings = json.loads((folder / "golden.json").read_text())
        self.t = load_file(folder / "golden.safetensors")
        config = head_from_hf(json.loads((folder / "config.json").read_text()), str(folder))
        shape = {"dim": config.block.dim, "vocab_size": config.block.vocab_size, "n_layer": 8}
        target = Transformer(tiny_config(**shape))
        target.embedding.weight = torch.nn.Parameter(self.t["target.embed_tokens.weight"], False)
        target.lm_head.weight = torch.nn.Parameter(self.t["target.lm_head.weight"], False)
        self.target = target
        self.head, _ = load_head(folder, target.config)
        self.head.requires_grad_(False)
        self.head.borrow(target, 512)


def golden_folders(config) -> list[Path]:
    roots = [ASSETS]
    if config.getoption("--golden"):
        roots.append(Path(config.getoption("--golden")))
    folders = []
    for root in roots:
        folders += (
            [root]
            if (root / "golden.json").exists()
            else sorted(path.parent for path in root.glob("*/golden.json"))
        )
    return folders


def pytest_generate_tests(metafunc) -> None:
    if "golden" in metafunc.fixturenames:
        folders = golden_folders(metafunc.config)
        metafunc.parametrize("golden", folders, ids=[f.name for f in folders], indirect=True)


@pytest.fixture
def golden(request) -> Golden:
    return Golden(request.param)


@torch.no_grad()
def test_golden_hidden_states_and_logits(golden):
    tokens, features = golden.t["in.input_ids"][0, 1:], golden.t["in.features"][0]
    n = len(tokens)
    rows = torch.arange(n)
    cache = KVCache(golden.head.config.block, 256, torch.float32, "cpu")
    mask = causal_mask(0, n, 256, None, "cpu")
    logits, hidden = golden.head(tokens, golden.head.read(features), rows, rows, mask, cache)
    assert (hidden - golden.t["out.draft_hidden"][0]).abs().max() < 1e-4
    assert (logits - golden.t["out.draft_logits"][0]).abs().max() < 1e-4


@torch.no_grad()
def test_golden_trees(golden):
    s = golden.settings
    shape = TreeShape(depth=s["depth"] + 1, topk=s["top_k"], nodes=s["total_tokens"] - 1)
    drafter, state = EagleDrafter(golden.head, shape), empty_state(golden.target, 256)
    first, second = golden.t["in.input_ids"][0], golden.t["in.input_ids_2"][0]
    tree = propose(drafter, state, pairs(first[1:], golden.t["in.features"][0]), int(first[-1]))
    assert_tree(tree, golden.t, "out.tree1", len(first) - 1)
    # Three more positions; padded, as the engine's are.
    new = second[len(first) :]
    features = torch.cat((golden.t["in.features_2"][0], torch.randn(2, features_dim(golden))))
    padded = pairs(torch.cat((new, new.new_zeros(2))), features, len(new))
    tree = propose(drafter, state, padded, int(second[-1]))
    assert_tree(tree, golden.t, "out.tree2", len(second) - 1)


def features_dim(golden) -> int:
    return golden.t["in.features"].shape[-1]


def assert_tree(tree: DraftTree, t, name: str, seq_len: int) -> None:
    mask, depths = ancestor_mask(tree.parents, tree.valid)
    assert tree.tokens.tolist() == t[f"{name}.draft_tokens"][0].tolist()
    assert mask.int().tolist() == t[f"{name}.tree_mask"][0, 0].int().tolist()
    positions = t[f"{name}.tree_position_ids"]
    offset = 0 if positions.min() == 0 else seq_len
    assert (depths + offset).tolist() == positions.tolist()


@pytest.mark.parametrize("algorithm", ["eagle1", "eagle3", "mtp"])
def test_pairs_that_are_shown_leave_what_extending_leaves_and_compute_no_logits(algorithm):
    target = random_target(tiny_config(qk_norm=True))
    eagle3 = eagle3_of(algorithm, target.config)
    head = random_head(target, eagle3=eagle3, mtp=algorithm == "mtp")
    first, second = torch.randint(0, 60, (5,)), torch.randint(0, 60, (3,))
    features = torch.randn(8, head.config.feature_dim)
    caches = []
    for shows in (False, True):
        drafter = EagleDrafter(head, TreeShape(2, 2, 3))
        drafter.reserve(64)
        for new, n in ((pairs(first, features[:5]), 5), (pairs(second, features[5:]), 8)):
            if shows:
                with mock.patch.object(head, "_lm_head", ()):
                    drafter.show(new, torch.tensor(n))
            else:
                drafter.extend(new, torch.tensor(n))
        caches.append(drafter.cache.rows[:, :, :8])
    assert torch.equal(*caches) and caches[0].any(-1).all()


class Indifferent(RankingDrafter):
    """Draft head to which all tokens are equally likely: only the target's noise ranks them."""

    noise, target_ids = "shared", torch.arange(60)

    def step(self, tokens, features, seq_len, level, paths, first):
        return torch.zeros(len(tokens), 60), features


@pytest.mark.parametrize("k", [1, 3])
def test_each_level_is_ranked_by_the_noise_of_its_own_position(k):
    """The target adds the noise of position `seq_len + d` where it draws the token of depth d."""
    state, kind = empty_state(random_target(tiny_config())), SamplingMode(greedy=False)
    state.seq_len.fill_(20)
    state.sampling.load(SamplingParams(1.0, seed=7))
    prediction = Prediction(torch.zeros(1, 60), torch.zeros(1, 4))
    pool = expand(Indifferent(), prediction, state, kind, 4, k)
    noise = gumbel_noise(state.sampling.seed, 20 + torch.arange(1, 5), torch.arange(60))
    best = noise.topk(k, dim=1).indices.tolist()
    assert pool.tokens[0, :k].tolist() == best[0]
    for level in range(1, 4):
        begin = k + (level - 1) * k * k
        assert pool.tokens[0, begin : begin + k * k].tolist() == best[level] * k


def test_paper_tree_has_its_level_sizes():
    check_paths(PAPER_TREE, 10)
    assert [sum(len(p) == d for p in PAPER_TREE) for d in range(1, 7)] == [4, 8, 8, 3, 2, 0]


@torch.no_grad()
def test_static_tree_is_the_ranked_children_of_each_node():
    """Against a walk that runs the head on every path separately."""
    target = random_target(tiny_config())
    head = random_head(target)
    drafter = StaticTreeDrafter(head)
    tokens, features = torch.arange(3, 12), torch.randn(9, 32)
    tree = propose(drafter, empty_state(target), pairs(tokens, features), 11)
    _, depths = ancestor_mask(tree.parents, tree.valid)
    assert len(tree.tokens) == 26 and depths.max() == 5
    order = sorted(PAPER_TREE, key=lambda p: (len(p), p))
    for path, row in zip(order, range(1, 26), strict=True):
        assert int(tree.tokens[row]) == walk(head, tokens, features, path)
    siblings = [(int(p), int(t)) for p, t in zip(tree.parents[1:], tree.tokens[1:], strict=True)]
    assert len(set(siblings)) == 25


def walk(head, tokens, features, path) -> int:
    """The token of a node: run its path as a chain in a cache of its own."""
    cache = KVCache(head.config.block, 256, torch.float32, "cpu")
    rows = torch.arange(len(tokens))
    mask = causal_mask(0, len(tokens), 256, None, "cpu")
    logits, out = head(tokens, features, rows, rows, mask, cache)
    logits, feature, at = logits[-1], out[-1:], len(tokens)
    for rank in path:
        token = head.target_ids()[logits.topk(rank + 1).indices[rank]]
        row = torch.tensor([at])
        logits, feature = head(
            token[None], feature, row, row, causal_mask(at, 1, 256, None, "cpu"), cache
        )
        logits, at = logits[0], at + 1
    return int(token)


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([], "at least one"),
        ([(0,), (0,)], "only once"),
        ([(0,), (1, 0)], r"\[1, 0\] has no parent"),
        ([(99,)], "rank 99"),
    ],
)
def test_paths_that_are_no_tree(paths, message):
    with pytest.raises(FasteagleError, match=message):
        check_paths(paths, 60)


def test_width_beyond_the_draft_vocabulary():
    head = random_head(random_target(tiny_config()), torch.arange(0, 60, 20))
    with pytest.raises(FasteagleError, match="tree-topk 4 .* draft vocabulary of 3"):
        EagleDrafter(head, TreeShape(3, 4, 7))
    assert EagleDrafter(head, TreeShape(3, 3, 7)).name == "eagle"
    with pytest.raises(FasteagleError, match="rank 3 is outside the draft vocabulary"):
        StaticTreeDrafter(head)


@torch.no_grad()
def test_a_tree_has_room_after_any_text():
    """Caches have whole blocks of rows; here the text ends a few rows before one."""
    target = random_target(tiny_config())
    head, state = random_head(target), empty_state(target)
    state.seq_len.fill_(KEY_BLOCK - 8)
    for drafter in (
        EagleDrafter(head, TreeShape(6, 10, 59)),
        StaticTreeDrafter(head),
        ModelDrafter(Target(target), TreeShape(4, 4, 20), 60),
    ):
        drafter.reserve(KEY_BLOCK - 8)
        prediction = Prediction(torch.randn(1, 60), torch.randn(1, 32))
        assert drafter.propose(prediction, state, spec_of(drafter.shape)).valid.all()
    n, shape = KEY_BLOCK - 5, TreeShape(6, 1, 6)
    padded = Committed(torch.zeros(7).long(), torch.randn(7, 32), torch.tensor([1]))
    for chain in (EagleDrafter(head, shape), ModelDrafter(Target(target), shape, 60)):
        chain.reserve(n)
        assert chain.extend(padded, torch.tensor(n)).logits.isfinite().all()


def test_decisions_are_fixed_or_those_of_the_policy_or_of_the_company():
    drafter, policy, company = Drafter(), policy_of(SLOW), Company()
    drafter.shape = TreeShape()

    def decisions(of):
        return of.thresholds, of.lookup_threshold, of.head_gain

    assert decisions(drafter) == (Thresholds(), Thresholds().verify[0], START_HEAD_GAIN)
    assert drafter.shapes() == [drafter.next_shape()] == [TreeShape()]
    drafter.policy = policy
    assert decisions(drafter) == decisions(policy) != decisions(company)
    assert drafter.shapes() == [drafter.next_shape()] == [CHAIN]
    drafter.learn(CHAIN, Outcome(1, 0, 2, True))
    assert policy.used.total() == 1
    drafter.company = company  # which plans nothing before it follows a policy
    assert decisions(drafter) == decisions(company) and drafter.next_shape() is None
    drafter.learn(None, Outcome(1))
    assert policy.used.total() == 1 and company._accepted == 1
