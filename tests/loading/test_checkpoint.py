"""Loading: every file layout we read, and one clear line for each way a file can be wrong."""

from __future__ import annotations

import json
import os
import shutil
import zipfile

import pytest
import torch
from safetensors.torch import load_file, save_file

from fasteagle.errors import FasteagleError
from fasteagle.loading.checkpoint import load_model, open_checkpoint
from fasteagle.loading.names import expected_shapes
from fasteagle.loading.quantize import with_scheme
from fasteagle.loading.tensors import DummyCheckpoint, save_tensors
from helpers import change_tensors, edit_json, make_hf_model, tiny_config


def load(path, dtype=torch.float32, max_seq_len=64):
    return load_model(open_checkpoint(path), dtype=dtype, device="cpu", max_seq_len=max_seq_len)


@pytest.fixture
def folder(tiny_dir, tmp_path):
    """A copy of the tiny model that a test may damage."""
    return shutil.copytree(tiny_dir, tmp_path / "model")


def weights_of(path) -> dict[str, torch.Tensor]:
    return load(path).state_dict()


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_sharded_safetensors_equal_a_single_file(tiny_dir, tmp_path):
    model = make_hf_model("llama3")
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 2
    assert_same(weights_of(tmp_path), weights_of(tiny_dir))
    shards[1].unlink()
    with pytest.raises(FasteagleError, match=f"are missing: {shards[1].name}: fetch"):
        load(tmp_path)


@pytest.mark.parametrize("n_shards", [1, 2])
def test_torch_bin_files(folder, tiny_dir, n_shards):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    if n_shards == 1:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        weight_map = {}
        for i in range(2):
            part = names[i::2]
            file = f"pytorch_model-0000{i + 1}-of-00002.bin"
            torch.save({name: tensors[name] for name in part}, folder / file)
            weight_map |= dict.fromkeys(part, file)
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert_same(weights_of(folder), weights_of(tiny_dir))
    (damaged, *_) = folder.glob("*.bin")
    damaged.write_bytes(damaged.read_bytes()[:5000])
    with pytest.raises(FasteagleError, match=damaged.name):
        load(folder)
    for path in folder.glob("*.bin*"):
        path.unlink()
    with pytest.raises(FasteagleError, match=r"no \*\.safetensors"):
        open_checkpoint(folder)


@pytest.mark.parametrize("ending", ["safetensors", "bin"])
def test_two_versions_of_weights_are_not_mixed(folder, ending):
    """Without an index nothing says which of them is the model."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save = save_file if ending == "safetensors" else torch.save
    for name in ("pytorch_model-a", "pytorch_model-b"):
        save(tensors, folder / f"{name}.{ending}")
    message = rf"is there twice, in \S+-a\.{ending} and in \S+-b\.{ending}: keep one version"
    with pytest.raises(FasteagleError, match=message):
        open_checkpoint(folder)


def test_an_old_index_beside_a_single_file_is_not_read(folder, tiny_dir):
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_same(weights_of(folder), weights_of(tiny_dir))


def test_other_users_may_read_the_files_that_are_written(tmp_path):
    mask = os.umask(0o022)
    try:
        save_tensors({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    finally:
        os.umask(mask)
    assert (tmp_path / "a.safetensors").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("keep", [4, 20_000, None], ids=str)
def test_damaged_safetensors(folder, keep):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:8] + b"\xff" * 32 + data[40:] if keep is None else data[:keep])
    with pytest.raises(FasteagleError, match=r"model\.safetensors: damaged or truncated"):
        load(folder)


@pytest.mark.parametrize(("dtype", "bits"), [("F4", 4), ("F6_E2M3", 6)])
def test_values_below_a_byte_are_refused(folder, dtype, bits):
    data = torch.zeros(64 * bits // 8, dtype=torch.uint8).numpy().tobytes()
    entry = {"dtype": dtype, "shape": [64], "data_offsets": [0, len(data)]}
    header = json.dumps({NORM: entry}).encode()
    whole = len(header).to_bytes(8, "little") + header + data
    (folder / "model.safetensors").write_bytes(whole)
    with pytest.raises(FasteagleError, match=f"which torch has no type for: {NORM}"):
        open_checkpoint(folder)


UP_PROJ, NORM = "model.layers.1.mlp.up_proj.weight", "model.norm.weight"
EXTRA = "model.layers.0.mlp.extra.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda tensors: (tensors.pop(UP_PROJ), tensors.pop(NORM)),
            ["2 wrong tensors", ": fetch them again", f"missing {UP_PROJ}", f"missing {NORM}"],
        ),
        (
            lambda tensors: tensors.update({NORM: torch.ones(63), EXTRA: torch.ones(3)}),
            [f"{NORM} is (63,), expected (64,)", f"unknown {EXTRA}"],
        ),
    ],
    ids=["missing", "misshapen and unknown"],
)
def test_wrong_tensors_are_listed(folder, change, said):
    change_tensors(folder, change)
    with pytest.raises(FasteagleError) as caught:
        load(folder)
    assert all(part in str(caught.value) for part in said)


def test_missing_tensors_of_granite_are_listed(tmp_path):
    """Its LM head is a tensor of its own here, also where the file has none."""
    make_hf_model("granitemoe", tie_word_embeddings=True).save_pretrained(tmp_path)
    name = "model.embed_tokens.weight"
    change_tensors(tmp_path, lambda tensors: tensors.pop(name))
    with pytest.raises(FasteagleError, match=f"wrong tensors: .*missing {name}"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("quant", [None, "int8"])
def test_integers_are_no_weights(folder, quant):
    change_tensors(folder, lambda tensors: tensors.update({UP_PROJ: tensors[UP_PROJ].int()}))
    with pytest.raises(FasteagleError, match=f"{UP_PROJ} holds int32 values"):
        checkpoint = with_scheme(open_checkpoint(folder), quant)
        load_model(checkpoint, dtype=torch.float32, device="cpu", max_seq_len=64)


def test_old_files_with_rope_buffers_load(folder, tiny_dir):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_tensors(folder, lambda tensors: tensors.update({name: torch.ones(8)}))
    assert_same(weights_of(folder), weights_of(tiny_dir))


def test_dummy_weights_fit_the_shape_and_repeat():
    config = tiny_config(qkv_bias=True)
    first, second = DummyCheckpoint(config), DummyCheckpoint(config)
    assert first.names() == set(expected_shapes(config))
    name = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(first.load(name), second.load(name))
    model = load_model(first, dtype=torch.float32, device="cpu", max_seq_len=16)
    assert sum(p.numel() for p in model.parameters()) == config.params


@pytest.mark.parametrize("same", [True, False])
def test_a_tied_model_with_an_lm_head_of_its_own(folder, tiny_dir, same):
    """transformers does not tie it either where the values differ."""
    head = load_file(tiny_dir / "model.safetensors")["lm_head.weight"]
    edit_json(folder / "config.json", tie_word_embeddings=True)
    if same:
        embedding = load_file(tiny_dir / "model.safetensors")["model.embed_tokens.weight"]
        change_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": embedding}))
    model = load(folder)
    if not same:  # in its last row alone
        embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
        other = embedding.clone()
        other[-1] += 1
        last = shutil.copytree(folder, folder.parent / "last")
        change_tensors(last, lambda tensors: tensors.update({"lm_head.weight": other}))
        assert not open_checkpoint(last).config.tie_embeddings
    assert open_checkpoint(folder).config.tie_embeddings == same
    assert torch.equal(model.lm_head.weight, model.embedding.weight if same else head.float())


@pytest.mark.parametrize(("old", "factor"), [({}, 2.0), ({"type": "linear", "factor": 4.0}, 4.0)])
def test_of_two_rope_fields_the_older_counts(folder, old, factor):
    """As in transformers."""
    new = {"rope_type": "linear", "factor": 2.0}
    edit_json(folder / "config.json", rope_parameters=new, rope_scaling=old)
    assert open_checkpoint(folder).config.rope_linear_factor == factor


def test_of_two_original_lengths_the_outer_counts(folder):
    """As in transformers."""
    edit_json(folder / "config.json", original_max_position_embeddings=16)
    assert open_checkpoint(folder).config.rope_scaling.original_max_seq_len == 16


def test_torch_bin_with_compressed_parts(folder):
    """torch maps the file, and would take compressed bytes for values."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "stored")
    with (
        zipfile.ZipFile(folder / "stored") as stored,
        zipfile.ZipFile(folder / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for part in stored.infolist():
            packed.writestr(part.filename, stored.read(part))
    with pytest.raises(
        FasteagleError,
        match="bin: not a weights-only torch file .its parts are compressed, .*safetensors",
    ):
        load(folder)
