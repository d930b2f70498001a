"""Finding the draft head of a model: the order of places, and what each of them gives."""

from __future__ import annotations

import shutil
from importlib import resources
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fasteagle.errors import FasteagleError
from fasteagle.loading import registry
from fasteagle.loading.checkpoint import load_model, open_checkpoint
from fasteagle.loading.heads.find import find_head, may_find_head, named_head
from fasteagle.loading.heads.read import with_vocabulary
from fasteagle.loading.tensors import files_digest
from fasteagle.paths import cache_dir
from head_folders import DIALECTS, head_for, write_folder
from helpers import invoke, random_head, save_tiny
from hub_cache import put_in_cache


def empty_head(folder: Path) -> Path:
    """Write what is enough for the search to take `folder` for a draft head's."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    save_file({}, folder / "model.safetensors")
    return folder


def test_search_order(tmp_path, monkeypatch, hub_cache):
    identity, name = "ab" * 32, "vicuna-7b"
    shipped = tmp_path / "package"
    monkeypatch.setattr(resources, "files", lambda package: shipped)
    named = tmp_path / "named"
    named.mkdir()
    repo = empty_head(tmp_path / "repo")
    put_in_cache(hub_cache, repo, registry.REGISTRY[name].heads[0].repo, "1" * 40)
    assert find_head("llama2-70b", identity) is None
    assert find_head(name, identity).origin == "yuhuili/EAGLE-Vicuna-7B-v1.3"
    empty_head(shipped / "data" / "heads" / "some-model")
    assert find_head(name, identity).origin == "yuhuili/EAGLE-Vicuna-7B-v1.3"
    empty_head(shipped / "data" / "heads" / name)
    assert find_head(name, identity).origin == "shipped with fasteagle"
    calibrated = empty_head(cache_dir() / "heads" / identity)
    assert find_head(name, identity).path == calibrated
    assert find_head(name, "cd" * 32).origin == "shipped with fasteagle"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert named_head(str(named)).path == named_head("~/named").path == named
    assert named_head(name).origin == "shipped with fasteagle"
    (tmp_path / "text.txt").touch()
    for nowhere in ("nowhere", "text.txt"):
        with pytest.raises(FasteagleError, match="no such folder"):
            named_head(str(tmp_path / nowhere))
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir()
    assert named_head(name).path == Path(name), "a folder of a model's name"
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner" / "text").touch()
    for nowhere in ("owner/text", "./nowhere"):
        with pytest.raises(FasteagleError, match="no such folder"):
            named_head(nowhere)


@pytest.mark.parametrize(("name", "which"), [("vicuna-13b", 0), ("vicuna-13b", 1), ("qwen3-8b", 0)])
def test_published_heads_are_fetched_at_their_commit_not_the_newest(
    name, which, hub_cache, tmp_path
):
    """The first head of a model by itself, all by their name."""
    published = registry.REGISTRY[name].heads[which]
    folder = empty_head(tmp_path / "head")
    commit = published.revision
    snapshot = put_in_cache(
        hub_cache, folder, published.repo, commit or "1" * 40, is_newest=commit is None
    )
    for files in (named_head(published.repo), *(() if which else (find_head(name, "0" * 64),))):
        assert (files.path, files.origin) == (snapshot, published.repo)


def test_chat_by_name_finds_target_and_published_head(tmp_path, hub_cache):
    """A fake hub cache with a tiny target and a tiny head in the published layouts."""
    name = "vicuna-13b"
    entry = registry.REGISTRY[name]
    published = entry.heads[0]
    target_dir = save_tiny(tmp_path / "target", num_hidden_layers=8)
    checkpoint = open_checkpoint(target_dir)
    model = load_model(checkpoint, dtype=torch.float32, device="cpu", max_seq_len=64)
    head = head_for(model, "official EAGLE-3")
    folder = write_folder(tmp_path / "head", *DIALECTS["official EAGLE-3"](head), pickled=True)
    put_in_cache(hub_cache, target_dir, entry.repo, entry.revision)
    put_in_cache(hub_cache, folder, published.repo, published.revision or "2" * 40)
    arguments = f"chat --model {name} -p hello --max-new-tokens 9 --precision fp32".split()
    result = invoke(*arguments)
    assert result.exit_code == 0, result.stderr
    assert f"draft head {published.repo}: eagle" in result.stderr
    assert "not calibrated" in result.stderr and "accepted" in result.stderr
    plain = invoke(*arguments, "--no-spec")
    assert plain.stdout == result.stdout and "accepted" not in plain.stderr
    assert registry.local_path(name) is not None


def test_a_shipped_head_is_found_for_the_same_weights_under_another_name(
    tmp_path, monkeypatch, head_dirs, checkpoint
):
    identity = checkpoint.fingerprint
    monkeypatch.setattr(resources, "files", lambda package: tmp_path)
    folder = tmp_path / "data" / "heads" / "famous-model"
    shutil.copytree(head_dirs / "eagle1", folder)
    files = find_head(str(tmp_path / "copy.gguf"), identity)
    assert files is not None and files.path == folder
    assert find_head(str(tmp_path / "copy.gguf"), "0" * 64) is None


def test_fingerprint_is_of_the_stored_values(tiny_dir, tmp_path):
    from safetensors.torch import load_file

    same = shutil.copytree(tiny_dir, tmp_path / "same")
    first = open_checkpoint(tiny_dir).fingerprint
    assert open_checkpoint(same).fingerprint == first
    tensors = load_file(same / "model.safetensors")
    (same / "model.safetensors").unlink()
    torch.save(tensors, same / "pytorch_model.bin")
    assert open_checkpoint(same).fingerprint == first
    tensors["model.norm.weight"][3] += 1e-3
    torch.save(tensors, same / "pytorch_model.bin")
    assert open_checkpoint(same).fingerprint != first


def test_vocabulary_can_be_changed_without_touching_the_weights(model):
    head = random_head(model)
    ids = torch.arange(0, 260, 5)
    changed = with_vocabulary(head, ids)
    assert torch.equal(changed.target_ids(), ids)
    assert torch.equal(changed.fc.weight, head.fc.weight)
    back = with_vocabulary(changed, torch.arange(260))
    assert back.config.draft_vocab_size == 260 and not back.d2t.any()


def test_any_calibrated_head_may_be_that_of_the_quantized_weights(checkpoint):
    assert not may_find_head("some-model", checkpoint)
    empty_head(cache_dir() / "heads" / ("ab" * 32))
    assert may_find_head("some-model", checkpoint)


def test_the_digest_of_a_head_is_that_of_names_sizes_and_beginnings(tmp_path):
    digests = set()
    for name, size, end in (("a", 1 << 17, 0), ("a", 1 << 17, 1), ("a", 1 << 18, 0), ("b", 9, 0)):
        for file in tmp_path.iterdir():
            file.unlink()
        content = bytes(size - 1) + bytes([end])
        (tmp_path / f"{name}.safetensors").write_bytes(content)
        (tmp_path / "other.txt").write_bytes(content)
        digests.add(files_digest(tmp_path))
    assert len(digests) == 3
