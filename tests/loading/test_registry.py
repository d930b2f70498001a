"""Models by name: pinned entries, the cache, local paths, and names that lead nowhere."""

from __future__ import annotations

import pytest

from fasteagle.errors import FasteagleError
from fasteagle.loading import registry
from hub_cache import REVISION, put_in_cache


@pytest.mark.parametrize("name", ["vicuna-7b", "qwen2-7b"])
def test_registry_names_find_their_pinned_commit_in_the_cache(hub_cache, tiny_dir, name):
    entry = registry.REGISTRY[name]
    assert registry.local_path(name) is None
    pinned = entry.revision is not None
    revision = entry.revision or REVISION
    snapshot = put_in_cache(hub_cache, tiny_dir, entry.repo, revision, is_newest=not pinned)
    assert registry.resolve(name) == snapshot
    assert registry.local_path(name) == snapshot


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smolm2-135m", r"unknown model 'smolm2-135m'; did you mean 'smollm2-135m'"),
        ("lama2-7b", "did you mean 'llama2-7b'"),
        ("zzz", "`fasteagle models` lists"),
        ("missing.gguf", "no such file"),
        ("./nowhere", "no such file"),
        ("llama2-70b", "shape without weights here: .*--load-format dummy"),
    ],
)
def test_names_that_lead_nowhere(name, message):
    with pytest.raises(FasteagleError, match=message):
        registry.resolve(name)


@pytest.mark.parametrize(
    ("name", "billions"),  # as the model cards say
    [
        ("smollm2-135m", "0.13"),
        ("llama2-70b", "68.98"),
        ("qwen2-7b", "7.62"),
        ("qwen3-8b", "8.19"),
        ("mixtral-8x7b", "46.70"),
        ("qwen1.5-moe", "14.32"),
        ("granite-3.1-1b-a400m", "1.38"),  # 1.33 and the LM head, which is not tied any more
        ("ernie-4.5-21b-a3b", "21.83"),
    ],
)
def test_shapes_have_the_published_number_of_parameters(name, billions):
    assert f"{registry.preset(name).params / 1e9:.2f}" == billions


def test_a_download_may_hold_a_tied_embedding_twice():
    config = registry.preset("smollm2-135m")
    assert config.tie_embeddings
    twice = config.params + config.vocab_size * config.dim
    assert registry.REGISTRY["smollm2-135m"].download_bytes == 2 * twice


def test_a_folder_with_one_gguf_file_is_that_file(tmp_path):
    """As `hf download` leaves it; a folder with weights of its own stays a folder."""
    for name in ("README.md", "config.json", "mmproj-f16.gguf", "x-Q4_0.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    assert registry.resolve(str(tmp_path)) == tmp_path / "x-Q4_0.gguf"
    (tmp_path / "x-Q8_0.gguf").write_bytes(b"GGUF")
    with pytest.raises(FasteagleError) as caught:
        registry.resolve(str(tmp_path))
    assert str(caught.value) == (
        f"{tmp_path} holds 2 models, give one as --model: x-Q4_0.gguf, x-Q8_0.gguf"
    )
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert registry.resolve(str(tmp_path)) == tmp_path


def test_an_unknown_shape_is_refused_with_similar_names():
    with pytest.raises(FasteagleError, match="unknown preset 'llama2-7'; did you mean 'llama2-7b"):
        registry.preset("llama2-7")


def test_a_path_may_begin_with_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert registry.resolve("~/m.gguf") == tmp_path / "m.gguf"
