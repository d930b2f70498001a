"""Which drafter options make, what a person is told of it, and what is refused."""

from __future__ import annotations

import copy
import shutil

import pytest
import torch

from fasteagle.decoding.backend import Backend
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.drafting.ngram import NgramDrafter
from fasteagle.drafting.static_tree import StaticTreeDrafter
from fasteagle.errors import FasteagleError
from fasteagle.generate import Engine
from fasteagle.loading import make_drafter as drafters
from fasteagle.loading import open as opening
from fasteagle.loading.heads.write import save_head
from fasteagle.loading.make_drafter import Drafting
from fasteagle.options import DraftOptions, SamplingParams
from fasteagle.paths import cache_dir
from fasteagle.shapes import GatedChain, TreeShape, read_tree
from head_folders import DIALECTS, head_for, write_folder
from helpers import drafting_of, eagle3_of, generated, invoke, random_head
from hub_cache import forbid


@pytest.fixture
def head_dir(head_dirs, tmp_path):
    """A draft head that a test may change."""
    return shutil.copytree(head_dirs / "eagle1", tmp_path / "head")


def drafter_for(model, checkpoint, backend="eager", **options):
    said = []
    engine = Engine(model, 512)
    engine.backend.name = backend
    drafter = drafting_of(DraftOptions(**options), model.config).drafter(
        "tiny", engine, checkpoint, said.append
    )
    return drafter, said


def test_without_a_head_the_context_is_searched(model, checkpoint):
    drafter, said = drafter_for(model, checkpoint)
    assert isinstance(drafter, NgramDrafter)
    assert said == ["no draft head for this model: guessing from the context (n-grams) instead"]
    _, (again, warning) = drafter_for(model, checkpoint, tree_nodes=5)
    assert again == said[0] and "the --tree options do nothing without a draft head" in warning
    assert drafter_for(model, checkpoint, lookup_depth=24)[0].shape == TreeShape(24, 1, 24)
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
        ({"lookup_depth": 24}, EagleDrafter, 25),
        ({"drafter": "fused"}, EagleDrafter, 9),
        ({"drafter": "fused", "lookup_depth": 24, "tree_nodes": 5}, EagleDrafter, 6),
    ],
)
def test_every_kind_of_drafter(model, checkpoint, head_dir, options, kind, rows):
    drafter, said = drafter_for(model, checkpoint, head=str(head_dir), **options)
    assert isinstance(drafter, kind) and (rows is None or drafter.shape.rows == rows)
    fused = "lookup_depth" in options or options.get("drafter") == "fused"
    assert (drafter.lookup is not None) == (drafter.name == "fused") == fused
    assert len(said) == 1 and said[0].startswith(f"draft head {head_dir}: {drafter.name}")


@pytest.mark.parametrize(
    ("options", "name"),
    [({}, "fused"), ({"tree_depth": 2}, "eagle"), ({"drafter": "eagle"}, "eagle")],
)
def test_a_lookup_joins_the_tree_where_it_costs_nothing(
    model, checkpoint, head_dir, monkeypatch, options, name
):
    monkeypatch.setattr(Backend, "merges_lookup", True)
    drafter, _ = drafter_for(model, checkpoint, head=str(head_dir), **options)
    assert drafter.name == name and (drafter.tuning is not None) == ("tree_depth" not in options)


def test_a_head_for_another_model_or_other_weights(model, checkpoint, tmp_path):
    """Told where its files say it."""
    own = random_head(model, rope_scaling=None, rope_base=10000.0)
    save_head(tmp_path / "h", own, {"target_fingerprint": "0" * 64}, torch.float32)
    _, lines = drafter_for(model, checkpoint, head=str(tmp_path / "h"))
    assert lines[0].startswith("warning: the draft head was trained for other weights")
    assert "fasteagle train-head" in lines[0]
    head = head_for(model, "speculators / vLLM EAGLE-3")
    write_folder(tmp_path, *DIALECTS["speculators / vLLM EAGLE-3"](head))
    engine = Engine(model, 512)

    def said(name: str) -> str:
        lines: list[str] = []
        options = DraftOptions(head=str(tmp_path), tap_layers=(1, 2, 3))
        drafting_of(options, model.config).drafter(name, engine, checkpoint, lines.append)
        return lines[0]

    assert said("tiny").startswith("warning: the draft head says it was made for owner/Some-Model")
    assert said("/models/some-model").startswith("draft head: not calibrated to these weights")


def test_no_token_beyond_the_targets_vocabulary_is_quoted(model, checkpoint):
    known = model.config.vocab_size
    drafting = Drafting(DraftOptions(drafter="ngram"), documents=[[5, 6, known, 7]])
    drafter = drafting.drafter("tiny", Engine(model, 512), checkpoint, lambda line: None)
    assert int(drafter.lookup.corpus.tokens.max()) == 7


@pytest.mark.parametrize(("reach", "most"), [(None, 16), (1, 1), (31, 31), (32, 31), (63, 31)])
def test_chains_on_cpus_copy_as_far_as_asked(monkeypatch, model, checkpoint, reach, most):
    monkeypatch.setattr(drafters, "can_draft", lambda head: True)
    head = random_head(model)
    options = DraftOptions(lookup_depth=reach)
    drafter = drafters.tree_drafter(head, options, True, native=True)
    assert drafter.lookup is not None and drafter.shape == GatedChain(most)
    ngram, _ = drafter_for(model, checkpoint, "cpu", drafter="ngram", lookup_depth=reach)
    assert ngram.shape == drafter.shape and ngram.tuning is not None
    assert ("chain" in ngram.tuning.path.stem) and ("chain31" in ngram.tuning.path.stem) == (
        most == 31
    )


def test_costs_are_kept_for_one_head_one_kind_of_shape_and_one_corpus(
    model, checkpoint, head_dir, tmp_path
):
    """EAGLE-1, another of it, EAGLE-3, GGUF, a corpus, chains and n-grams: a file for each."""
    engine = Engine(model, 512)
    more = {"rope_scaling": None, "rope_base": 10000.0}
    save_head(tmp_path / "other", random_head(model, seed=5, **more), {"tau": 2.0}, torch.float32)
    eagle3 = random_head(model, eagle3=eagle3_of("eagle3", model.config), **more)
    save_head(tmp_path / "eagle3", eagle3, {}, torch.float32)

    def tuning(folder=head_dir, documents=(), engine=engine, **options):
        options = DraftOptions(**{"head": str(folder), **options})
        drafting = drafting_of(options, checkpoint.config, documents=documents)
        return drafting.drafter("x", engine, checkpoint, lambda line: None).tuning

    text = [[5, 6, 7, 8] * 9]
    made = [
        tuning(),
        tuning(tmp_path / "other"),
        tuning(tmp_path / "eagle3"),
        tuning(drafter="fused"),
        tuning(documents=text, drafter="fused"),
        tuning(drafter="ngram", head=None),
        tuning(documents=text, drafter="ngram", head=None),
        tuning(engine=Engine(copy.deepcopy(model).bfloat16(), 512)),
    ]
    assert len({t.path for t in made}) == len(made)
    assert tuning() == made[0] and len({t.head for t in made}) == 4  # one without a head
    assert [t.corpus for t in made] == [False, False, False, False, True, False, True, False]


def test_a_head_that_cannot_be_fetched_is_no_reason_not_to_answer(
    checkpoint, model, hub_cache, monkeypatch
):
    forbid(monkeypatch, ConnectionError("offline"))
    said = []
    engine = Engine(model, 512)
    drafter = Drafting(DraftOptions()).drafter("vicuna-7b", engine, checkpoint, said.append)
    assert isinstance(drafter, NgramDrafter)
    assert "cannot fetch yuhuili/EAGLE-Vicuna-7B-v1.3" in said[0] and "n-grams" in said[1]
    with pytest.raises(FasteagleError, match="cannot fetch"):
        Drafting(DraftOptions("eagle")).drafter("vicuna-7b", engine, checkpoint, said.append)


def test_a_damaged_calibrated_head_is_no_reason_not_to_answer(checkpoint, model):
    folder = cache_dir() / "heads" / checkpoint.fingerprint
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    said, engine = [], Engine(model, 512)
    drafter = Drafting(DraftOptions()).drafter("x", engine, checkpoint, said.append)
    assert isinstance(drafter, NgramDrafter) and str(folder) in said[0]
    for options in (DraftOptions("eagle"), DraftOptions(tap_layers=(1, 2))):
        with pytest.raises(FasteagleError):
            Drafting(options).drafter("x", engine, checkpoint, said.append)


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
    options = {"head": str(head_dir), "drafter": "eagle-static", "tree_file": str(path)}
    for text, rows in (("[[0], [2]]", 3), ("[[1]]", 2)):
        path.write_text(text)
        assert drafter_for(model, checkpoint, **options)[0].shape.rows == rows
        with pytest.raises(FasteagleError, match="skips a rank"):
            drafter_for(model, checkpoint, **options, verify="multi-round")


def test_greedy_after_multi_round_is_greedy(model, checkpoint, head_dir):
    """The sampled children of an answer must not decide the next, greedy one."""
    drafter, _ = drafter_for(
        model, checkpoint, head=str(head_dir), drafter="eagle-static", verify="multi-round"
    )
    engine = Engine(model, 512, drafter=drafter)

    generated(engine, params=SamplingParams(1.0, seed=3))
    assert generated(engine) == generated(Engine(model, 512))


# The command line


@pytest.mark.parametrize("temperature", [0, 1])
def test_speculation_changes_no_byte_of_an_answer(chat, head_dir, temperature):
    base = f"--max-new-tokens 30 --precision fp32 --seed 5 --temperature {temperature}".split()
    expected = chat(*base, "--no-spec").stdout
    (head_dir / "notes.txt").write_text("a text that may be quoted")
    for drafter in ("eagle", "fused", "eagle-static", "auto"):
        lookup = ("--lookup", head_dir / "notes.txt") if drafter == "auto" else ()
        result = chat(*base, "--head", head_dir, "--drafter", drafter, *lookup)
        assert result.exit_code == 0, result.stderr
        assert result.stdout == expected, drafter
        assert "accepted" in result.stderr and "ms verify" in result.stderr
        assert (": fused, " in result.stderr) == (drafter in ("fused", "auto"))
    multi_round = ("--drafter", "eagle-static", "--verify", "multi-round")
    other = chat(*base, "--head", head_dir, *multi_round)
    assert other.exit_code == 0 and (other.stdout == expected) == (temperature == 0)


def test_a_head_is_refused_before_the_target_is_loaded(tiny_dir, head_dir, monkeypatch):
    monkeypatch.setattr(opening, "load_model", lambda *a, **k: pytest.fail("the target loaded"))
    (head_dir / "model.safetensors").write_bytes(b"12")
    for command in (["chat", "-p", "x"], ["tune"]):
        result = invoke(*command, "--model", tiny_dir, "--head", head_dir)
        assert result.exit_code == 2 and "damaged or truncated" in result.stderr


def test_files_that_fill_the_memory_are_named(model, checkpoint, monkeypatch):
    def fill(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(Drafting, "_drafter", fill)
    for drafter, said in (
        ("ngram", r"while loading files,? .*: give fewer to --lookup$"),
        ("eagle", r"while loading the draft head,? .*: choose a smaller model, or guess from the"),
    ):
        with pytest.raises(FasteagleError, match=said):
            drafter_for(model, checkpoint, drafter=drafter)
