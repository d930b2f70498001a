"""Folders of quantized weights: every field of the model's config, and the sizes of shards."""

from __future__ import annotations

import json

import pytest
import torch

from fasteagle.config import Llama3RopeScaling, ModelConfig, MoEConfig
from fasteagle.errors import FasteagleError
from fasteagle.loading import stored
from fasteagle.loading.stored import StoredFolder
from fasteagle.loading.tensors import DummyCheckpoint
from fasteagle.quant.scheme import Scheme
from helpers import edit_json, tiny_config

SHARED = dict(shared_ffn_dim=24, shared_gate=True)
MOE = MoEConfig(4, 2, 16, renormalize=True, scale=2.5, choice_bias=True, **SHARED)


def saved(folder, config: ModelConfig, n_norms: int = 1) -> StoredFolder:
    """A folder with this config; its tensors are no model's."""
    norms = [(f"norm{i}", torch.ones(32)) for i in range(n_norms)]
    stored.save(folder, DummyCheckpoint(config), Scheme(8), "of these weights", norms)
    return StoredFolder(folder)


@pytest.mark.parametrize(
    "options",
    [
        {"rope_scaling": Llama3RopeScaling(8.0, 1.0, 4.0, 64), "rope_base": 5e5},
        {"rope_linear_factor": 2.0, "norm_eps": 1e-6},
        {"rope_freq_factors": (1.0, 2.0, 3.0, 4.5)},
        {"tie_embeddings": True, "sliding_window": 7, "architecture": "MistralForCausalLM"},
        {"qkv_bias": True, "qk_norm": True},
        {"qk_norm_whole": True, "moe": MOE, "dense_blocks": (1,)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_a_config_is_read_back_as_it_was_written(tmp_path, options):
    config = tiny_config(**options)
    folder = saved(tmp_path, config)
    assert folder.config == config
    assert folder.source_fingerprint == "of these weights"


def test_a_full_shard_is_written_and_a_new_one_begun(tmp_path, monkeypatch):
    monkeypatch.setattr(stored, "SHARD_BYTES", 2 * 32 * 4)  # two norms in fp32
    folder = saved(tmp_path, tiny_config(), n_norms=5)
    places = json.loads((tmp_path / stored.INDEX).read_text())["weight_map"]
    names = [f"model-0000{n}.safetensors" for n in (1, 1, 2, 2, 3)]
    assert [places[f"norm{i}"] for i in range(5)] == names
    assert len(folder.files) == 3 and len(folder.names()) == 5


@pytest.mark.parametrize("version", [0, 2])
def test_a_folder_of_another_version_is_not_read(tmp_path, version):
    saved(tmp_path, tiny_config())
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"format": 1', f'"format": {version}'))
    with pytest.raises(stored.FasteagleError) as caught:
        StoredFolder(tmp_path)
    wrong = "must be an integer" if version < 1 else "format 2, this fasteagle reads 1"
    assert wrong in str(caught.value)


def test_experts_of_an_older_folder_are_refused(tmp_path):
    """Its other key would be read as if the weights of experts were not normed."""
    saved(tmp_path, tiny_config(moe=MOE))
    raw = json.loads((tmp_path / "config.json").read_text())["model"]
    edit_json(tmp_path / "config.json", model=raw | {"moe": raw["moe"] | {"score": "softmax"}})
    with pytest.raises(FasteagleError, match="moe.score is .*: must be absent: quantize"):
        StoredFolder(tmp_path)
