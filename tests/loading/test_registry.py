"""Models by name: pinned entries, the cache, local paths, and names that lead nowhere."""

from __future__ import annotations

import json

import pytest

from fasteagle.errors import FasteagleError
from fasteagle.loading import registry
from fasteagle.loading.entries import EAGLE2, EAGLE3
from helpers import REVISION, put_in_cache, save_tiny


@pytest.mark.parametrize("name", [n for n, e in registry.REGISTRY.items() if e.repo])
def test_registry_names_find_their_pinned_commit_in_the_cache(hub_cache, tiny_dir, name):
    entry = registry.REGISTRY[name]
    assert registry.local_path(name) is None
    pinned = entry.revision is not None
    revision = entry.revision or REVISION
    snapshot = put_in_cache(hub_cache, tiny_dir, entry.repo, revision, is_newest=not pinned)
    source = registry.resolve(name)
    assert source.path == snapshot and source.template == entry.template
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


def test_every_entry_is_pinned_and_described():
    for name, entry in registry.REGISTRY.items():
        assert entry.licence, name
        if entry.repo:
            assert entry.revision is None or len(entry.revision) == 40
            assert entry.download_bytes > entry.config.params
        for head in entry.heads:
            assert head.revision is None or len(head.revision) == 40
            assert head.draft_vocab_size <= entry.config.vocab_size
        if entry.wheel:
            assert len(entry.wheel.wheel_sha256) == len(entry.wheel.member_sha256) == 64


@pytest.mark.parametrize(
    ("name", "billions"),  # as the model cards say
    [
        ("smollm2-135m", "0.13"),
        ("llama2-7b", "6.74"),
        ("llama2-13b", "13.02"),
        ("llama2-70b", "68.98"),
        ("llama3-8b", "8.03"),
        ("vicuna-33b", "32.53"),
        ("qwen2-7b", "7.62"),
        ("qwen3-1.7b", "1.72"),
        ("qwen3-4b", "4.02"),
        ("qwen3-8b", "8.19"),
        ("qwen3-14b", "14.77"),
        ("qwen3-32b", "32.76"),
        ("llama3.1-8b", "8.03"),
        ("deepseek-r1-distill-8b", "8.03"),
        ("llama3.3-70b", "70.55"),
        ("mixtral-8x7b", "46.70"),
        ("qwen3-30b-a3b", "30.53"),
        ("qwen1.5-moe", "14.32"),
        ("olmoe-1b-7b", "6.92"),
        ("granite-3.1-1b-a400m", "1.38"),  # 1.33 and the LM head, which is not tied any more
        ("ernie-4.5-0.3b", "0.36"),
        ("ernie-4.5-21b-a3b", "21.83"),
    ],
)
def test_shapes_have_the_published_number_of_parameters(name, billions):
    assert f"{registry.preset(name).params / 1e9:.2f}" == billions


def test_the_default_draft_head_is_the_newest_algorithm():
    """EAGLE-3 is 1.8 times as fast as EAGLE-1 on vicuna-13b, say the authors of both."""
    several = {n: e.heads for n, e in registry.REGISTRY.items() if len(e.heads) > 1}
    both = {n: h for n, h in several.items() if len({head.algorithm for head in h}) > 1}
    assert set(both) == {"vicuna-13b", "llama3.1-8b"}
    for heads in both.values():
        assert [head.algorithm for head in heads] == [EAGLE3, EAGLE2]


def test_local_gguf_and_folder_paths_resolve(tmp_path):
    folder = save_tiny(tmp_path / "m")
    assert registry.resolve(str(folder)).path == folder
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    assert registry.resolve(str(tmp_path / "x.gguf")).path == tmp_path / "x.gguf"
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 3


def test_a_folder_with_one_gguf_file_is_that_file(tmp_path):
    """As `hf download` leaves it; a folder with weights of its own stays a folder."""
    for name in ("README.md", "config.json", "mmproj-f16.gguf", "x-Q4_0.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    assert registry.resolve(str(tmp_path)).path == tmp_path / "x-Q4_0.gguf"
    (tmp_path / "x-Q8_0.gguf").write_bytes(b"GGUF")
    with pytest.raises(FasteagleError) as caught:
        registry.resolve(str(tmp_path))
    assert str(caught.value) == (
        f"{tmp_path} holds 2 models, give one as --model: x-Q4_0.gguf, x-Q8_0.gguf"
    )
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert registry.resolve(str(tmp_path)).path == tmp_path
