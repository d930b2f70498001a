"""Finding a head, saying what it is, and what a person sees of speculation."""

from __future__ import annotations

import json
import shutil
from importlib import resources

import pytest
import torch
from click.testing import CliRunner

from fasteagle.cli import main as cli
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.drafting.fused import FusedDrafter
from fasteagle.drafting.ngram import NgramDrafter
from fasteagle.drafting.static_tree import StaticTreeDrafter
from fasteagle.errors import FasteagleError
from fasteagle.generate import Engine
from fasteagle.loading import make_drafter as drafters
from fasteagle.loading import open as opening
from fasteagle.loading import registry
from fasteagle.loading.checkpoint import load_model, open_checkpoint
from fasteagle.loading.entries import EAGLE3
from fasteagle.loading.heads.find import find_head
from fasteagle.loading.heads.read import with_vocabulary
from fasteagle.loading.heads.write import save_head
from fasteagle.loading.make_drafter import make_drafter
from fasteagle.loading.tensors import fingerprint
from fasteagle.options import DraftOptions, SamplingParams
from fasteagle.paths import cache_dir
from fasteagle.shapes import GatedChain, TreeShape, read_tree
from head_folders import DIALECTS, head_for, write_folder
from helpers import eagle3_of, forbid, official_files, put_in_cache, random_head, save_tiny


@pytest.fixture(scope="module")
def checkpoint(tiny_dir):
    return open_checkpoint(tiny_dir)


@pytest.fixture(scope="module")
def model(checkpoint):
    return load_model(checkpoint, dtype=torch.float32, device="cpu", max_seq_len=512)


@pytest.fixture(scope="module")
def head(model):
    return random_head(model, rope_scaling=None, rope_base=10000.0)


@pytest.fixture
def head_dir(head, checkpoint, tmp_path):
    header = {"target_fingerprint": fingerprint(checkpoint), "algorithm": "eagle1"}
    save_head(tmp_path / "head", head, header, torch.float32)
    return tmp_path / "head"


def drafter_for(model, checkpoint, backend="eager", **options):
    said = []
    engine = Engine(model, 512)
    engine.backend.name = backend
    drafter = make_drafter("tiny", engine, checkpoint, DraftOptions(**options), said.append)
    return drafter, said


# The search


def test_search_order(tmp_path, monkeypatch, hub_cache):
    identity, name = "ab" * 32, "vicuna-7b"
    shipped = tmp_path / "package"
    monkeypatch.setattr(resources, "files", lambda package: shipped)
    asked = tmp_path / "asked"
    asked.mkdir()
    repo = tmp_path / "repo"
    repo.mkdir()
    for folder in (repo,):
        (folder / "config.json").write_text("{}")
        (folder / "pytorch_model.bin").write_bytes(b"x")
    put_in_cache(hub_cache, repo, registry.REGISTRY[name].heads[0].repo, "1" * 40)
    assert find_head(None, "llama2-70b", identity) is None
    assert find_head(None, name, identity).origin == "yuhuili/EAGLE-Vicuna-7B-v1.3"
    other = shipped / "data" / "heads" / "some-model"
    other.mkdir(parents=True)
    (other / "config.json").write_text("{}")
    (shipped / "data" / "heads" / name).mkdir(parents=True)
    (shipped / "data" / "heads" / name / "config.json").write_text("{}")
    assert find_head(None, name, identity).origin == "shipped with fasteagle"
    calibrated = cache_dir() / "heads" / identity
    calibrated.mkdir(parents=True)
    (calibrated / "config.json").write_text("{}")
    assert find_head(None, name, identity).path == calibrated
    assert find_head(None, name, "cd" * 32).origin == "shipped with fasteagle"
    assert find_head(str(asked), name, identity).path == asked
    assert find_head(name, "another-model", identity).origin == "shipped with fasteagle"
    with pytest.raises(FasteagleError, match="no such folder"):
        find_head(str(tmp_path / "nowhere"), name, identity)


@pytest.mark.parametrize(
    ("name", "which"), [(n, i) for n, e in registry.REGISTRY.items() for i in range(len(e.heads))]
)
def test_published_heads_are_fetched_at_their_commit_not_the_newest(
    name, which, hub_cache, tmp_path
):
    """The first head of a model by itself, all by their name."""
    published = registry.REGISTRY[name].heads[which]
    folder = tmp_path / "head"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"x")
    commit = published.revision
    snapshot = put_in_cache(
        hub_cache, folder, published.repo, commit or "1" * 40, is_newest=commit is None
    )
    for head in (published.repo,) if which else (None, published.repo):
        files = find_head(head, name, "0" * 64)
        assert files is not None and (files.path, files.origin) == (snapshot, published.repo)


@pytest.mark.parametrize("name", ["llama2-7b", "llama3-8b", "vicuna-13b"])
def test_chat_by_name_finds_target_and_published_head(name, tmp_path, hub_cache):
    """A fake hub cache with a tiny target and a tiny head in the published layouts."""
    entry = registry.REGISTRY[name]
    published = entry.heads[0]
    target_dir = save_tiny(tmp_path / "target", num_hidden_layers=8)
    checkpoint = open_checkpoint(target_dir)
    model = load_model(checkpoint, dtype=torch.float32, device="cpu", max_seq_len=64)
    folder = tmp_path / "head"
    folder.mkdir()
    own = eagle3_of("eagle3" if published.algorithm == EAGLE3 else "eagle1", model.config)
    head = random_head(model, rope_scaling=None, rope_base=10000.0, eagle3=own)
    official_files(folder, head, pickled=True, bias=name == "llama2-7b")
    put_in_cache(hub_cache, target_dir, entry.repo, entry.revision)
    put_in_cache(hub_cache, folder, published.repo, published.revision or "2" * 40)
    arguments = [
        "chat",
        "--model",
        name,
        "-p",
        "hello",
        "--max-new-tokens",
        "9",
        "--precision",
        "fp32",
    ]
    result = CliRunner().invoke(cli.main, arguments)
    assert result.exit_code == 0, result.stderr
    assert f"draft head {published.repo}: eagle" in result.stderr
    assert "not calibrated" in result.stderr and "accepted" in result.stderr
    plain = CliRunner().invoke(cli.main, [*arguments, "--no-spec"])
    assert plain.stdout == result.stdout and "accepted" not in plain.stderr
    assert registry.local_path(name) is not None


def test_a_shipped_head_is_found_for_the_same_weights_under_another_name(
    tmp_path, monkeypatch, head, checkpoint
):
    identity = fingerprint(checkpoint)
    monkeypatch.setattr(resources, "files", lambda package: tmp_path)
    folder = tmp_path / "data" / "heads" / "famous-model"
    save_head(folder, head, {"target_fingerprint": identity}, torch.float32)
    found = find_head(None, str(tmp_path / "copy.gguf"), identity)
    assert found is not None and found.path == folder
    assert find_head(None, str(tmp_path / "copy.gguf"), "0" * 64) is None


def test_without_a_head_the_context_is_searched(model, checkpoint):
    drafter, said = drafter_for(model, checkpoint)
    assert isinstance(drafter, NgramDrafter)
    assert said == ["no draft head for this model: guessing from the context (n-grams) instead"]
    assert drafter_for(model, checkpoint, drafter="none") == (None, [])
    with pytest.raises(FasteagleError, match="no draft head for tiny: give one with --head"):
        drafter_for(model, checkpoint, drafter="eagle")


@pytest.mark.parametrize(
    ("options", "kind", "rows"),
    [
        ({}, EagleDrafter, None),
        ({"tree_depth": 2, "tree_topk": 3, "tree_nodes": 6}, EagleDrafter, 7),
        ({"drafter": "eagle-chain", "tree_depth": 4}, EagleDrafter, 5),
        ({"drafter": "eagle-static"}, StaticTreeDrafter, 26),
        ({"drafter": "eagle-chain", "verify": "multi-round"}, StaticTreeDrafter, None),
        ({"lookup_depth": 24}, FusedDrafter, 25),
        ({"drafter": "fused"}, FusedDrafter, 9),
        ({"drafter": "fused", "lookup_depth": 24, "tree_nodes": 5}, FusedDrafter, 6),
    ],
)
def test_every_kind_of_drafter(model, checkpoint, head_dir, options, kind, rows):
    drafter, said = drafter_for(model, checkpoint, head=str(head_dir), **options)
    assert isinstance(drafter, kind) and (rows is None or drafter.shape.rows == rows)
    assert len(said) == 1 and said[0].startswith(f"draft head {head_dir}: {drafter.name}")


def test_a_head_for_another_model_of_the_same_shape(model, checkpoint, tmp_path):
    """Told where its files say it."""
    head = head_for(model, "speculators / vLLM EAGLE-3")
    write_folder(tmp_path, *DIALECTS["speculators / vLLM EAGLE-3"](head))
    engine = Engine(model, 512)

    def said(name: str) -> str:
        lines: list[str] = []
        options = DraftOptions(head=str(tmp_path), tap_layers=(1, 2, 3))
        make_drafter(name, engine, checkpoint, options, lines.append)
        return lines[0]

    assert said("tiny").startswith("warning: the draft head says it was made for owner/Some-Model")
    assert said("/models/some-model").startswith("draft head: not calibrated to these weights")


def test_how_far_is_copied(model, checkpoint):
    assert drafter_for(model, checkpoint, lookup_depth=24)[0].shape == TreeShape(24, 1, 24)
    assert drafter_for(model, checkpoint, drafter="ngram", lookup_depth=3)[0].shape.depth == 3


@pytest.mark.parametrize("reach", [None, 1, 31])
def test_chains_on_cpus_copy_as_far_as_asked(monkeypatch, head, model, checkpoint, reach):
    monkeypatch.setattr(drafters, "can_draft", lambda head: True)
    options = DraftOptions(lookup_depth=reach)
    drafter = drafters.tree_drafter(head, options, 256, True, native=True)
    assert isinstance(drafter, FusedDrafter) and drafter.shape == GatedChain(reach or 16)
    found, _ = drafter_for(model, checkpoint, "cpu", drafter="ngram", lookup_depth=reach)
    assert found.shape == drafter.shape and found.tuning is not None
    assert ("chain" in found.tuning.path.stem) and ("chain31" in found.tuning.path.stem) == (
        reach == 31
    )
    with pytest.raises(FasteagleError, match="lookup-depth 32 is out of range for chains on CPUs"):
        drafters.tree_drafter(head, DraftOptions(lookup_depth=32), 256, True, native=True)


def test_no_chains_where_the_kernels_were_wrong(model):
    """The core, which then drafts, asserted that it got other shapes."""
    engine = Engine(model, 512)
    engine.backend.name = "cpu"
    assert drafters._drafts_chains(engine)
    engine.backend.leave("passes")
    assert not drafters._drafts_chains(engine)


def test_costs_are_kept_for_one_head_one_kind_of_shape_and_one_corpus(
    model, checkpoint, head_dir, tmp_path
):
    """EAGLE-1, another of it, EAGLE-3, GGUF, a corpus, chains and n-grams: a file for each."""
    engine = Engine(model, 512)
    more = {"rope_scaling": None, "rope_base": 10000.0}
    save_head(tmp_path / "other", random_head(model, seed=5, **more), {"tau": 2.0}, torch.float32)
    eagle3 = random_head(model, eagle3=eagle3_of("eagle3", model.config), **more)
    save_head(tmp_path / "eagle3", eagle3, {}, torch.float32)

    def tuning(folder=head_dir, documents=(), **options):
        asked = DraftOptions(**({"head": str(folder)} | options))
        said = lambda line: None  # noqa: E731
        return make_drafter("x", engine, checkpoint, asked, said, documents=documents).tuning

    text = [[5, 6, 7, 8] * 9]
    made = [
        tuning(),
        tuning(tmp_path / "other"),
        tuning(tmp_path / "eagle3"),
        tuning(drafter="fused"),
        tuning(documents=text, drafter="fused"),
        tuning(drafter="ngram", head=None),
        tuning(documents=text, drafter="ngram", head=None),
    ]
    assert len({t.path for t in made}) == len(made)
    assert tuning() == made[0] and len({t.head for t in made}) == 4  # one without a head
    assert [t.corpus for t in made] == [False, False, False, False, True, False, True]


def test_sizes_of_the_tree():
    """Given ones stay, the others follow the precision and fit them."""
    assert DraftOptions().tree_shape(False) == TreeShape(3, 3, 8)
    assert DraftOptions().tree_shape(True) == TreeShape(2, 3, 3)
    assert DraftOptions(tree_depth=6).tree_shape(False) == TreeShape(6, 3, 8)
    assert DraftOptions(tree_depth=6).tree_shape(True) == TreeShape(6, 3, 6)
    assert DraftOptions(tree_depth=1, tree_topk=2).tree_shape(False) == TreeShape(1, 2, 2)
    asked = DraftOptions(tree_depth=2, tree_topk=3, tree_nodes=12)
    assert asked.tree_shape(True) == TreeShape(2, 3, 12)


@pytest.mark.parametrize("algorithm", ["eagle1", "eagle3"])
def test_a_head_for_other_weights_warns_and_runs(model, checkpoint, tmp_path, algorithm):
    eagle3 = eagle3_of(algorithm, model.config)
    head = random_head(model, eagle3=eagle3, rope_scaling=None, rope_base=10000.0)
    save_head(tmp_path / "h", head, {"target_fingerprint": "0" * 64}, torch.float32)
    drafter, said = drafter_for(model, checkpoint, head=str(tmp_path / "h"))
    assert said[0].startswith("warning: the draft head was trained for other weights")
    assert "fasteagle train-head" in said[0] and isinstance(drafter, EagleDrafter)


def test_fingerprint_is_of_the_stored_values(tiny_dir, tmp_path):
    from safetensors.torch import load_file

    same = shutil.copytree(tiny_dir, tmp_path / "same")
    first = fingerprint(open_checkpoint(tiny_dir))
    assert fingerprint(open_checkpoint(same)) == first
    tensors = load_file(same / "model.safetensors")
    (same / "model.safetensors").unlink()
    torch.save(tensors, same / "pytorch_model.bin")
    assert fingerprint(open_checkpoint(same)) == first
    tensors["model.norm.weight"][3] += 1e-3
    torch.save(tensors, same / "pytorch_model.bin")
    assert fingerprint(open_checkpoint(same)) != first


def test_a_head_that_cannot_be_fetched_is_no_reason_not_to_answer(
    checkpoint, model, hub_cache, monkeypatch
):
    forbid(monkeypatch, ConnectionError("offline"))
    said = []
    engine = Engine(model, 512)
    drafter = make_drafter("vicuna-7b", engine, checkpoint, DraftOptions(), said.append)
    assert isinstance(drafter, NgramDrafter)
    assert "cannot fetch yuhuili/EAGLE-Vicuna-7B-v1.3" in said[0] and "n-grams" in said[1]
    with pytest.raises(FasteagleError, match="cannot fetch"):
        make_drafter("vicuna-7b", engine, checkpoint, DraftOptions(drafter="eagle"), said.append)


def test_vocabulary_can_be_changed_without_touching_the_weights(head):
    ids = torch.arange(0, 260, 5)
    changed = with_vocabulary(head, ids)
    assert torch.equal(changed.target_ids(), ids)
    assert torch.equal(changed.fc.weight, head.fc.weight)
    back = with_vocabulary(changed, torch.arange(260))
    assert back.config.draft_vocab_size == 260 and not back.d2t.any()


def test_tree_files(tmp_path, model, checkpoint, head_dir):
    path = tmp_path / "tree.json"
    path.write_text("[[0], [1], [0, 0]]")
    assert read_tree(path) == ((0,), (1,), (0, 0))
    drafter, _ = drafter_for(model, checkpoint, head=str(head_dir), tree_file=str(path))
    assert drafter.shape.rows == 4 and drafter.shape.depth == 2
    for text in ("[0]", "{}x", '[["a"]]', "[[1.5]]"):
        path.write_text(text)
        with pytest.raises(FasteagleError, match="tree file"):
            read_tree(path)
    with pytest.raises(FasteagleError, match="tree file .*nowhere"):
        read_tree(tmp_path / "nowhere")


def test_multi_round_needs_every_rank(tmp_path, model, checkpoint, head_dir):
    path = tmp_path / "tree.json"
    path.write_text("[[0], [2]]")
    options = {"head": str(head_dir), "drafter": "eagle-static", "tree_file": str(path)}
    assert drafter_for(model, checkpoint, **options)[0].shape.rows == 3
    with pytest.raises(FasteagleError, match="skips a rank"):
        drafter_for(model, checkpoint, **options, verify="multi-round")


def test_a_drafter_can_be_resized_and_back(model, checkpoint, head_dir):
    drafter, _ = drafter_for(model, checkpoint, head=str(head_dir), noise="none")
    small = drafter.resized(1)
    assert (small.shape.rows, small.shape.depth, small.noise) == (2, 1, "none")
    assert drafter.resized(8).shape.rows == 9 and drafter.shape.depth == 3
    with pytest.raises(FasteagleError, match="more than the"):
        drafter.resized(500)


def test_greedy_after_multi_round_is_greedy(model, checkpoint, head_dir):
    """The sampled children of an answer must not decide the next, greedy one."""
    drafter, _ = drafter_for(
        model, checkpoint, head=str(head_dir), drafter="eagle-static", verify="multi-round"
    )
    engine = Engine(model, 512, drafter=drafter)

    def answer(params, engine=engine):
        return [t for ids in engine.generate([5, 9, 40, 7], params, 25) for t in ids]

    answer(SamplingParams(1.0, seed=3))
    assert answer(SamplingParams()) == answer(SamplingParams(), Engine(model, 512))


# The command line


def chat(tiny_dir, *options):
    return CliRunner().invoke(
        cli.main, ["chat", "--model", str(tiny_dir), "-p", "hello", *map(str, options)]
    )


@pytest.mark.parametrize("temperature", [0, 1])
def test_speculation_changes_no_byte_of_an_answer(tiny_dir, head_dir, temperature):
    base = (
        "--max-new-tokens",
        30,
        "--precision",
        "fp32",
        "--seed",
        5,
        "--temperature",
        temperature,
    )
    expected = chat(tiny_dir, *base, "--no-spec").stdout
    for drafter in ("eagle", "fused", "eagle-static", "eagle-chain", "ngram"):
        result = chat(tiny_dir, *base, "--head", head_dir, "--drafter", drafter)
        assert result.exit_code == 0, result.stderr
        assert result.stdout == expected, drafter
        assert "accepted" in result.stderr and "ms verify" in result.stderr
    other = chat(
        tiny_dir, *base, "--head", head_dir, "--drafter", "eagle-static", "--verify", "multi-round"
    )
    assert other.exit_code == 0 and (other.stdout == expected) == (temperature == 0)


def test_files_to_look_up_make_the_tree_a_fused_one(tiny_dir, head_dir, tmp_path):
    (tmp_path / "notes.txt").write_text("a text that may be quoted")
    base = ("--max-new-tokens", 30, "--precision", "fp32", "--head", head_dir)
    result = chat(tiny_dir, *base, "--lookup", tmp_path / "notes.txt")
    assert result.exit_code == 0 and ": fused, " in result.stderr, result.stderr
    assert result.stdout == chat(tiny_dir, *base).stdout


def test_accepted_text_can_be_coloured(tiny_dir, head_dir):
    shown = chat(
        tiny_dir,
        "--head",
        head_dir,
        "--max-new-tokens",
        60,
        "--precision",
        "fp32",
        "--show-accepted",
        "--drafter",
        "ngram",
    )
    assert "\x1b[32m" in shown.stdout or "accepted 0/" in shown.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tree-depth", 0], "tree-depth 0"),
        (["--tree-nodes", 99], "more than the"),
        (["--tree-topk", 300, "--tree-nodes", 5], "draft vocabulary of 260"),
        (["--drafter", "eagel"], "drafter 'eagel' is unknown"),
        (["--draft-noise", "loud"], "draft-noise 'loud'"),
        (["--verify", "multi-round"], "add --drafter eagle-static"),
        (["--verify", "twice"], "verify 'twice'"),
        (["--tree", "/nowhere.json"], "tree file /nowhere.json"),
        (["--tree", "x.json", "--drafter", "ngram"], "drop --drafter ngram"),
        (["--lookup-depth", 5, "--drafter", "eagle"], "add --drafter fused"),
        (["--lookup-depth", 64, "--drafter", "fused"], "lookup-depth 64"),
    ],
)
def test_bad_tree_options_cost_one_line(tiny_dir, head_dir, monkeypatch, options, message):
    if "--tree-topk" not in options:  # the drafter itself refuses it
        monkeypatch.setattr(opening, "load_model", lambda *a, **k: pytest.fail("the target loaded"))
    result = chat(tiny_dir, "--head", head_dir, *options)
    assert result.exit_code == 2 and result.stdout == ""
    assert message in result.stderr.strip().splitlines()[-1]
    assert "Traceback" not in result.stderr


def test_a_head_that_does_not_fit_costs_one_line(tiny_dir, head_dir):
    raw = json.loads((head_dir / "config.json").read_text())
    (head_dir / "config.json").write_text(json.dumps({**raw, "vocab_size": 300}))
    result = chat(tiny_dir, "--head", head_dir)
    assert result.exit_code == 2 and "for a vocabulary of 300, the model has 260" in result.stderr
    result = chat(tiny_dir, "--head", "/nowhere/head")
    assert result.exit_code == 2 and "no such folder" in result.stderr


def test_a_head_is_refused_before_the_target_is_loaded(tiny_dir, head_dir, monkeypatch):
    monkeypatch.setattr(opening, "load_model", lambda *a, **k: pytest.fail("the target loaded"))
    (head_dir / "model.safetensors").write_bytes(b"12")
    for command in (["chat", "-p", "x"], ["tune"]):
        arguments = [*command, "--model", str(tiny_dir), "--head", str(head_dir)]
        result = CliRunner().invoke(cli.main, arguments)
        assert result.exit_code == 2 and "damaged or truncated" in result.stderr
