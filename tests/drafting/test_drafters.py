"""Draft heads and trees: the public implementation's outputs, files, shapes, and odd inputs."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fasteagle.config import head_from_hf
from fasteagle.drafters import EagleDrafter, NgramDrafter, StaticTreeDrafter, check_paths
from fasteagle.errors import FasteagleError
from fasteagle.loading.head_file import load_head, load_official_state, official_state, save_head
from fasteagle.model import KVCache, Transformer, causal_mask
from fasteagle.tree import PAPER_TREE, DraftTree, Pool, TreeShape, ancestor_mask, rerank
from fasteagle.verify import PAD, accept, seen_rows
from helpers import official_files, random_head, random_target, tiny_config

ASSETS = Path(__file__).parents[1] / "assets" / "golden"


# The reference implementation's own numbers.


class Golden:
    """One folder of recorded inputs and outputs."""

    def __init__(self, folder: Path) -> None:
        self.settings = json.loads((folder / "golden.json").read_text())
        self.t = load_file(folder / "golden.safetensors")
        config = head_from_hf(json.loads((folder / "config.json").read_text()), str(folder))
        target = Transformer(tiny_config(dim=config.block.dim, vocab_size=config.block.vocab_size))
        target.embedding.weight = torch.nn.Parameter(self.t["target.embed_tokens.weight"], False)
        target.lm_head.weight = torch.nn.Parameter(self.t["target.lm_head.weight"], False)
        self.head, _ = load_head(folder, target.config)
        self.head.requires_grad_(False)
        self.head.borrow(target, 512)


def golden_folders(config) -> list[Path]:
    roots = [ASSETS]
    if config.getoption("--golden"):
        roots.append(Path(config.getoption("--golden")))
    found = []
    for root in roots:
        found += (
            [root]
            if (root / "golden.json").exists()
            else sorted(path.parent for path in root.glob("*/golden.json"))
        )
    return found


def pytest_generate_tests(metafunc) -> None:
    if "golden" in metafunc.fixturenames:
        folders = golden_folders(metafunc.config)
        metafunc.parametrize("golden", folders, ids=[f.name for f in folders], indirect=True)


@pytest.fixture
def golden(request) -> Golden:
    kind = json.loads((request.param / "golden.json").read_text())["kind"]
    if kind != "eagle1":
        pytest.skip(f"kind {kind!r}: only eagle1 heads are built so far")
    return Golden(request.param)


@torch.no_grad()
def test_golden_hidden_states_and_logits(golden):
    tokens, features = golden.t["in.input_ids"][0, 1:], golden.t["in.features"][0]
    n = len(tokens)
    rows = torch.arange(n)
    cache = KVCache(golden.head.config.block, 256, torch.float32, "cpu")
    mask = causal_mask(0, n, 256, None, "cpu")
    logits, hidden = golden.head(tokens, features, rows, rows, mask, cache)
    assert (hidden - golden.t["out.draft_hidden"][0]).abs().max() < 1e-4
    assert (logits - golden.t["out.draft_logits"][0]).abs().max() < 1e-4


@torch.no_grad()
def test_golden_trees(golden):
    s = golden.settings
    shape = TreeShape(depth=s["depth"] + 1, topk=s["top_k"], nodes=s["total_tokens"] - 1)
    drafter = EagleDrafter(golden.head, shape, 256)
    first, second = golden.t["in.input_ids"][0], golden.t["in.input_ids_2"][0]
    drafter.extend(first[1:], golden.t["in.features"][0], len(first) - 1)
    assert_tree(drafter.propose(first[-1:], []), golden.t, "out.tree1", len(first) - 1)
    # Three more positions; padded, as the engine's are.
    new = second[len(first) :]
    features = torch.cat((golden.t["in.features_2"][0], torch.randn(2, features_dim(golden))))
    drafter.extend(torch.cat((new, new.new_zeros(2))), features, len(new))
    assert_tree(drafter.propose(second[-1:], []), golden.t, "out.tree2", len(second) - 1)


def features_dim(golden) -> int:
    return golden.t["in.features"].shape[-1]


def assert_tree(tree: DraftTree, t, name: str, seq_len: int) -> None:
    mask, depths = ancestor_mask(tree.parents, tree.valid)
    assert tree.tokens.tolist() == t[f"{name}.draft_tokens"][0].tolist()
    assert mask.int().tolist() == t[f"{name}.tree_mask"][0, 0].int().tolist()
    positions = t[f"{name}.tree_position_ids"]
    offset = 0 if positions.min() == 0 else seq_len
    assert (depths + offset).tolist() == positions.tolist()


# Trees


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


def test_padding_rows_see_themselves_only():
    valid = torch.tensor([True, True, False, False])
    mask, _ = ancestor_mask(torch.tensor([0, 0, 1, 2]), valid)
    assert mask.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]


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
        kept = [int(token) - 100 for token in tree.tokens[1:]]
        assert kept == sorted(kept) and tree.tokens[0] == 7
        for row, j in enumerate(kept, 1):
            above = int(tree.parents[row])
            assert above < row
            assert (int(tree.tokens[above]) - 100 if above else -1) == int(parents[j])
        best = scores.sort(descending=True).values[:15].sum()
        assert scores[kept].sum() == pytest.approx(float(best))


def test_paper_tree_has_its_level_sizes():
    check_paths(PAPER_TREE, 10)
    assert [sum(len(p) == d for p in PAPER_TREE) for d in range(1, 7)] == [4, 8, 8, 3, 2, 0]


@torch.no_grad()
def test_static_tree_is_the_ranked_children_of_each_node():
    """Against a walk that runs the head on every path separately."""
    target = random_target(tiny_config())
    head = random_head(target)
    drafter = StaticTreeDrafter(head, 256)
    tokens, features = torch.arange(3, 12), torch.randn(9, 32)
    drafter.extend(tokens, features, 9)
    tree = drafter.propose(torch.tensor([11]), [])
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


def test_width_beyond_the_draft_vocabulary():
    head = random_head(random_target(tiny_config()), torch.arange(0, 60, 20))
    with pytest.raises(FasteagleError, match="tree-topk 4 .* draft vocabulary of 3"):
        EagleDrafter(head, TreeShape(3, 4, 7), 256)


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


# Accepting


def test_accept_follows_the_drawn_tokens():
    """Every tree of up to four rows, every drawing over three tokens, against a plain walk."""
    for parents in ([0, 0, 0, 1], [0, 0, 1, 2], [0, 0, 0, 0], [0, 0, 1, 1]):
        tokens = [2, 0, 1, 2] if parents != [0, 0, 1, 1] else [2, 0, 0, 1]
        tree = DraftTree(torch.tensor(tokens), torch.tensor(parents), torch.ones(4).bool())
        mask, depths = ancestor_mask(tree.parents, tree.valid)
        for drawn in itertools.product(range(3), repeat=4):
            got = accept(torch.tensor(drawn), tree, mask, depths, 3)
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
    mask, depths = ancestor_mask(tree.parents, tree.valid)
    got = accept(torch.tensor([6, 0, 0]), tree, mask, depths, 2)
    assert got.emitted.tolist() == [6, 0, PAD]


def test_penalty_sees_each_rows_own_ancestors():
    tree = DraftTree(torch.tensor([5, 6, 7, 8]), torch.tensor([0, 0, 0, 1]), torch.ones(4).bool())
    mask, _ = ancestor_mask(tree.parents, tree.valid)
    seen = torch.zeros(1, 10, dtype=torch.bool)
    seen[0, 1] = True
    rows = [set(row.nonzero()[:, 0].tolist()) for row in seen_rows(seen, tree, mask)]
    assert rows == [{1, 5}, {1, 5, 6}, {1, 5, 7}, {1, 5, 6, 8}]
    assert seen.sum() == 1


# N-grams


def test_lookup_finds_the_latest_longest_match():
    drafter = NgramDrafter(depth=3)
    assert list(drafter.lookup([1, 2, 3, 9, 2, 3, 8, 7, 2, 3])) == [8, 7, 2]
    assert list(drafter.lookup([1, 2, 3, 9, 5, 3, 8, 7, 2, 3])) == [9, 5, 3]
    assert list(drafter.lookup([4, 5, 4])) == [5, 4]
    assert list(drafter.lookup([1, 2, 3])) == [] and list(drafter.lookup([1])) == []
    tree = drafter.propose(torch.tensor([4]), [4, 5, 4])
    assert tree.tokens.tolist() == [4, 5, 4, 0]
    assert tree.valid.tolist() == [True, True, True, False]
    assert tree.parents.tolist() == [0, 0, 1, 2]


# Files


def test_saved_head_loads_back_and_drafts_the_same(tmp_path):
    target = random_target(tiny_config())
    ids = torch.arange(0, 60, 2)
    head = random_head(target, ids)
    save_head(tmp_path, head, {"tau": 2.5}, torch.float32)
    loaded, header = load_head(tmp_path, target.config)
    assert header == {"tau": 2.5} and loaded.config.draft_vocab_size == 30
    loaded.borrow(target, 512)
    assert torch.equal(loaded.target_ids(), ids)
    a, b = (EagleDrafter(h, TreeShape(), 256) for h in (head, loaded))
    for drafter in (a, b):
        drafter.extend(torch.arange(5), torch.ones(5, 32), 5)
    assert a.propose(torch.tensor([1]), []).tokens.equal(b.propose(torch.tensor([1]), []).tokens)


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_published_layouts_load(tmp_path, pickled, bias):
    target = random_target(tiny_config(rope_base=500000.0))
    head = random_head(target)
    official_files(tmp_path, head, pickled, bias)
    loaded, header = load_head(tmp_path, target.config)
    assert header is None
    assert loaded.config.block.rope_base == 10000.0  # never the target's
    assert loaded.config.block.n_layer == 1 and loaded.config.block.norm_eps == 1e-6
    assert (loaded.fc.bias is not None) == bias
    assert torch.equal(loaded.block.attention.qkv.weight, head.block.attention.qkv.weight)
    assert torch.equal(loaded.block.mlp.gate_up.weight, head.block.mlp.gate_up.weight)


def test_heads_that_do_not_fit(tmp_path):
    target = random_target(tiny_config())
    official_files(tmp_path, random_head(target), pickled=False, bias=True)
    with pytest.raises(
        FasteagleError, match=r"for a vocabulary of 60, the model has 61: .*no-spec"
    ):
        load_head(tmp_path, tiny_config(vocab_size=61))
    with pytest.raises(FasteagleError, match=r"for a width of 32, the model has 64"):
        load_head(tmp_path, tiny_config(dim=64))
    state = load_file(tmp_path / "model.safetensors")
    del state["fc.weight"]
    state["layers.0.input_layernorm.weight"] = torch.ones(32)
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(FasteagleError, match="missing fc.weight; unknown layers.0.input_layernorm"):
        load_head(tmp_path, target.config)
    (tmp_path / "model.safetensors").write_bytes(b"12")
    with pytest.raises(FasteagleError, match="damaged or truncated"):
        load_head(tmp_path, target.config)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FasteagleError, match=r"no model\.safetensors and no pytorch_model\.bin"):
        load_head(tmp_path, target.config)


def test_vocabulary_maps_that_are_not(tmp_path):
    target = random_target(tiny_config())
    head = random_head(target, torch.arange(0, 60, 2))
    head.d2t[3] = 99
    save_head(tmp_path, head, {}, torch.float32)
    with pytest.raises(FasteagleError, match="ascending ids"):
        load_head(tmp_path, target.config)


def test_loading_refuses_what_it_cannot_place():
    head = random_head(random_target(tiny_config()))
    state = official_state(head)
    with pytest.raises(FasteagleError, match=r"fc\.weight is \(3, 3\), expected \(32, 64\)"):
        load_official_state(head, {**state, "fc.weight": torch.ones(3, 3)}, "x")
