"""Folders of quantized weights, what a checkpoint becomes under an option, and the engine on it."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from families import filled_config
from fasteagle import paths
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.drafting.ngram import NgramDrafter
from fasteagle.errors import FasteagleError
from fasteagle.generate import Engine
from fasteagle.loading import make_drafter as drafters
from fasteagle.loading import quantize, source, stored
from fasteagle.loading.checkpoint import load_model, open_checkpoint
from fasteagle.loading.heads.write import save_head
from fasteagle.loading.open import open_model
from fasteagle.loading.quantize import with_scheme
from fasteagle.loading.source import Linears, quantize_head_
from fasteagle.loading.stored import StoredFolder, save
from fasteagle.loading.tensors import DummyCheckpoint
from fasteagle.options import DraftOptions, RuntimeOptions
from fasteagle.quant.linear import Int4Linear, Int8Linear, QuantizedLMHead
from fasteagle.quant.params import quantize_weight
from fasteagle.quant.scheme import Scheme, parse_scheme
from fasteagle.shapes import TreeShape
from helpers import (
    Dequantized,
    change_tensors,
    drafting_of,
    edit_json,
    generated,
    invoke,
    random_head,
    save_tiny,
)

PROMPT = [5, 9, 200, 17, 33, 8, 120, 64]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("q") / "model", "llama3", intermediate_size=128)


def quantized_engine(path, quant, dtype=torch.float32, head_bits=8):
    checkpoint = with_scheme(open_checkpoint(path), quant, head_bits)
    linears = Linears(checkpoint, "cpu", dtype)
    model = load_model(checkpoint, dtype=dtype, device="cpu", max_seq_len=256, quantized=linears)
    return Engine(model, 256), checkpoint


@pytest.mark.parametrize("quant", ["int8", "int4-g32", "int4-g64-hqq", "int4"])
def test_written_folders_load_back_bit_equal(folder, tmp_path, quant):
    option = ["--precision", quant] if "-" in quant else [f"--{quant}"]
    out = tmp_path / "out"
    done = invoke("quantize", folder, *option, "-o", out)
    assert done.exit_code == 0, done.output
    stored, direct = open_checkpoint(out), with_scheme(open_checkpoint(folder), quant)
    assert isinstance(stored, StoredFolder) and stored.names() == direct.names()
    for name in stored.names():
        assert torch.equal(stored.load(name), direct.load(name)), name
        a, b = stored.packed(name), direct.packed(name)
        assert (a is None) == (b is None) == ("_proj" not in name)
        assert stored.shape(name) == tuple(stored.load(name).shape)
        assert torch.equal(
            stored.start(name, 100).flatten()[:100], stored.load(name).flatten()[:100]
        )
    assert stored.fingerprint == direct.fingerprint != open_checkpoint(folder).fingerprint
    chat = invoke("chat", "--model", out, "-p", "hello", "--max-new-tokens", 4, "--no-compile")
    assert chat.exit_code == 0 and "int" in chat.stderr, chat.output


def test_every_field_of_a_config_is_read_back(tmp_path):
    """A field that is not would change the model without an error, where it has no tensor."""
    checkpoint = SimpleNamespace(config=filled_config(), fingerprint="of these weights")
    save(tmp_path, checkpoint, Scheme(8), [("model.norm.weight", torch.ones(32))])
    folder = StoredFolder(tmp_path)
    assert (folder.config, folder.source_fingerprint) == tuple(vars(checkpoint).values())


def test_a_full_shard_is_written_and_a_new_one_begun(tmp_path, monkeypatch):
    monkeypatch.setattr(stored, "SHARD_BYTES", 2 * 32 * 4)  # two norms in fp32
    norms = [(f"norm{i}", torch.ones(32)) for i in range(5)]
    save(tmp_path, DummyCheckpoint(filled_config()), Scheme(8), norms)
    places = json.loads((tmp_path / stored.INDEX).read_text())["weight_map"]
    names = [f"model-0000{n}.safetensors" for n in (1, 1, 2, 2, 3)]
    assert [places[f"norm{i}"] for i in range(5)] == names
    folder = StoredFolder(tmp_path)
    assert len(folder.files) == 3 and len(folder.names()) == 5


@pytest.mark.parametrize("change", ["config", "weight", "nothing"])
def test_a_changed_model_is_quantized_again(folder, tmp_path, change):
    """Neither change shows in the fingerprint."""
    model = shutil.copytree(folder, tmp_path / "model")
    before = with_scheme(open_checkpoint(model), "int8")
    name = "model.layers.1.mlp.down_proj.weight"
    if change == "config":
        edit_json(model / "config.json", rope_theta=1234.0, max_position_embeddings=99)
    elif change == "weight":
        change_tensors(model, lambda tensors: tensors[name][40:].neg_())
    else:
        model = model.rename(tmp_path / "moved")
    said: list[str] = []
    source = open_checkpoint(model)
    after = with_scheme(source, "int8", 8, said.append)
    assert before.fingerprint == after.fingerprint and after.config == source.config
    assert (after.load(name) - source.load(name)).abs().max() < 0.01
    assert len(said) == (change != "nothing")


SHARD, CONFIG = "model-00001.safetensors", "config.json"
PART = "model.layers.0.self_attn.o_proj.weight."


def shortened(name, length):
    """Replace a file: who has the old one mapped keeps it."""

    def damage(folder):
        content = (folder / name).read_bytes()[:length]
        (folder / name).unlink()
        (folder / name).write_bytes(content)

    return damage


def lose_all(folder):
    for path in folder.iterdir():
        path.unlink()


def put(part, change):
    def damage(folder):
        tensors = {name: tensor.clone() for name, tensor in load_file(folder / SHARD).items()}
        changed = change(tensors.pop(PART + part))
        (folder / SHARD).unlink()
        save_file(tensors if changed is None else tensors | {PART + part: changed}, folder / SHARD)

    return damage


def said(place, **changes):
    """Change fields of a part of config.json."""

    def damage(folder):
        raw = json.loads((folder / CONFIG).read_text())
        edit_json(folder / CONFIG, **{place: raw[place] | changes})

    return damage


def packs_a_vector(folder):
    """Say that a norm is packed, which it is not."""
    raw = json.loads((folder / CONFIG).read_text())["quantization_config"]
    entry = next(iter(raw["packed"].values()))
    said("quantization_config", packed=raw["packed"] | {"model.norm": entry})(folder)


DAMAGE = [
    (lambda folder: (folder / SHARD).unlink(), "shards named by .* are missing"),
    (shortened(SHARD, 0), "damaged or truncated"),
    (shortened(SHARD, 5000), "damaged or truncated"),
    (shortened(CONFIG, 0), "cannot be read as JSON"),
    (lambda folder: (folder / "model.safetensors.index.json").unlink(), "file is missing: fetch"),
    (lose_all, "config.json"),
    (said("quantization_config", format=2), "quantized format 2, this fasteagle reads 1"),
    (said("quantization_config", format=0), "format is 0: must be an integer"),
    (said("quantization_config", scheme={}), "bits is missing"),
    (said("quantization_config", packed={PART[:-1]: {"bits": 4, "group_size": 64}}), "not fit"),
    (packs_a_vector, "does not fit its header"),
    (said("model", rope_freq_factors=[1.0, 2.0]), "rope_freq_factors is .* must be 8 numbers"),
    # Of an older folder, whose weights of experts would be read as not normed.
    (said("model", moe={"n_expert": 4, "score": "softmax"}), "moe.score is .*: must be absent: qu"),
    (put("q", lambda q: None), "names tensors that are not there: .*: quantize the"),
    (put("q", lambda q: q.to(torch.int16)), "q is torch.int16"),
    (put("scales", lambda scales: scales.to(torch.int32)), "scales is torch.int32"),
    (put("zeros", lambda zeros: zeros.float()), "zeros is torch.float32"),
    (put("zeros", lambda zeros: zeros + 9), "zeros are above 16"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_a_damaged_folder_is_refused_and_in_the_cache_repaired_once(folder, damage, message):
    first = with_scheme(open_checkpoint(folder), "int4-g32")
    damage(first.path)
    with pytest.raises(FasteagleError, match=message) as caught:
        open_checkpoint(first.path)
    assert str(first.path) in str(caught.value) and "\n" not in str(caught.value)
    lines: list[str] = []
    for head_bits in (8, 16):  # the second start does not quantize again
        again = with_scheme(open_checkpoint(folder), "int4-g32", head_bits, lines.append)
        assert again.fingerprint == first.fingerprint and again.scheme.head_bits == head_bits
    assert len(lines) == 2, lines
    assert lines[0].startswith("weights in the user cache are damaged and are made again (")
    assert lines[1] == "quantizing to int4-g32-minmax (once; kept in the user cache) ..."
    assert len(list(first.path.parent.iterdir())) == 1


def test_zero_points_are_16_at_most(folder):
    """GPTQ stores them less one, in four bits."""
    path = with_scheme(open_checkpoint(folder), "int4-g32").path
    put("zeros", lambda zeros: torch.full_like(zeros, 16))(path)
    assert (open_checkpoint(path).packed(PART[:-1]).zeros == 16).all()


def test_a_quantized_model_is_its_dequantized_twin(folder):
    """In fp32 the engine computes with exactly the stored values."""
    engine, checkpoint = quantized_engine(folder, "int4-g32", head_bits=16)
    dense = load_model(Dequantized(checkpoint), dtype=torch.float32, device="cpu", max_seq_len=256)
    assert generated(engine) == generated(Engine(dense, 256))
    full = load_model(open_checkpoint(folder), dtype=torch.float32, device="cpu", max_seq_len=256)
    assert (full.blocks[0].mlp.down.weight - dense.blocks[0].mlp.down.weight).abs().max() > 0.01


@pytest.mark.parametrize(("bits", "kind"), [(8, Int8Linear), (4, Int4Linear), (16, None)])
def test_what_runs_on_the_cpu(folder, bits, kind):
    engine, _ = quantized_engine(folder, "int4-g32", torch.bfloat16, bits)
    block = engine.model.blocks[1]
    for linear in (block.attention.qkv, block.attention.out, block.mlp.gate_up, block.mlp.down):
        assert isinstance(linear, Int4Linear)
    head = engine.model.lm_head
    assert type(head.linear) is kind if kind else not isinstance(head, QuantizedLMHead)
    exact, _ = quantized_engine(folder, "int4-g32", torch.float32, bits)
    with torch.no_grad():
        ours, theirs = engine.prefill(PROMPT)[0].float(), exact.prefill(PROMPT)[0]
    assert (ours - theirs).norm() < 0.1 * theirs.norm()


@pytest.mark.parametrize("quant", ["int8", "int4-g32"])
def test_speculation_changes_no_token_of_a_quantized_model(folder, quant):
    plain, _ = quantized_engine(folder, quant)
    expected = generated(plain)
    head = random_head(plain.model, rope_scaling=None, rope_base=10000.0)
    quantize_head_(head, Scheme(8))
    for drafter in (EagleDrafter(head, TreeShape(3, 4, 7)), NgramDrafter()):
        engine = Engine(plain.model, 256, drafter=drafter)
        assert generated(engine) == expected


def test_a_draft_head_is_quantized_as_its_target(folder, tmp_path, monkeypatch):
    engine, checkpoint = quantized_engine(folder, "int4-g32-hqq")
    head = random_head(engine.model, rope_scaling=None, rope_base=10000.0)
    save_head(tmp_path / "head", head, {}, torch.float32)
    methods = []
    monkeypatch.setattr(
        drafters, "quantize_head_", lambda head, scheme, native: methods.append(scheme.method)
    )
    options = DraftOptions("eagle", str(tmp_path / "head"))
    drafting_of(options, checkpoint.config).drafter("tiny", engine, checkpoint, lambda line: None)
    assert methods == ["hqq"]


def test_flags_that_contradict_the_checkpoint(folder, tmp_path):
    out = tmp_path / "out"
    assert invoke("quantize", folder, "--precision", "int4-g32", "-o", out).exit_code == 0
    for arguments, message in (
        (("chat", "--model", out, "--int8", "-p", "x"), "already (int4-g32-minmax), which"),
        (("quantize", out, "--int8", "-o", tmp_path / "b"), "): give an unquantized model"),
        (
            ("quantize", folder, "--precision", "int4-g32-lm4", "-o", tmp_path / "b"),
            "its precision is chosen when the model runs: leave -lm4 out",
        ),
    ):
        done = invoke(*arguments)
        assert done.exit_code == 2 and message in done.stderr, (arguments, done.stderr)
        assert done.stderr.count("\n") == 1
    sizes = ("--max-new-tokens", 2, "--no-compile")
    same = invoke("chat", "--model", out, "--int4", "-p", "x", *sizes)
    assert same.exit_code == 0, same.stderr
    stored = open_checkpoint(out)
    for name in ("int4-g32", stored.scheme.name):
        assert with_scheme(stored, name, 16).scheme == dataclasses.replace(
            stored.scheme, head_bits=16
        )


def test_a_disk_without_room(folder, monkeypatch):
    full = shutil._ntuple_diskusage(0, 0, 1000)
    monkeypatch.setattr(paths.shutil, "disk_usage", lambda path: full)
    with pytest.raises(FasteagleError, match="int4-g32-minmax weights needs .*XDG_CACHE_HOME"):
        with_scheme(open_checkpoint(folder), "int4-g32")
    result = invoke("quantize", folder, "--int8", "-o", folder.parent / "out")
    assert "some space, or choose another place" in result.stderr


def test_dummy_weights_take_the_kernel_that_real_ones_take(folder):
    """HQQ has float offsets, min-max integer zeros, and each has a kernel of its own."""
    config = open_checkpoint(folder).config
    name = "model.layers.0.mlp.up_proj.weight"
    kinds = {}
    for quant in ("int4-g32-hqq", "int4-g32"):
        real = quantize_weight(torch.randn(32, 64), parse_scheme(quant, config))
        dummy = with_scheme(DummyCheckpoint(config), quant).packed(name)
        assert dummy.tensors().keys() == real.tensors().keys()
        assert abs(float(dummy.dequantize().mean())) < 0.01
        kinds[quant] = dummy.offsets is None
    assert kinds == {"int4-g32-hqq": False, "int4-g32": True}


def test_values_are_chosen_on_the_device_one_weight_at_a_time(folder, monkeypatch):
    devices = []

    def watched(weight, scheme):
        devices.append(str(weight.device))
        return quantize_weight(torch.zeros(weight.shape), scheme)

    monkeypatch.setattr(quantize, "quantize_weight", watched)
    checkpoint = open_checkpoint(folder)
    scheme = parse_scheme("int4-g32", checkpoint.config)
    weights = dict(quantize.quantized_weights(checkpoint, scheme, "meta", print))
    assert set(devices) == {"meta"} and len(devices) == 7 * checkpoint.config.n_layer
    assert {str(w.device) for w in weights.values() if hasattr(w, "device")} == {"cpu"}


def test_an_lm_head_quantized_in_parts_is_the_same(folder, monkeypatch):
    def head(parts):
        monkeypatch.setattr(source, "HEAD_ROWS", parts)
        checkpoint = with_scheme(open_checkpoint(folder), "int4-g32")
        return source.Linears(checkpoint, "cpu", torch.float32).lm_head()

    x = torch.randn(3, open_checkpoint(folder).config.dim)
    assert torch.equal(head(8192)(x), head(7)(x))


def test_torchao_runs_beside_ours(folder, monkeypatch):
    options = RuntimeOptions(quant="int8", backend="torchao", max_seq_len=64)
    monkeypatch.setattr("fasteagle.errors.TELL_SECONDS", 0)
    lines: list[str] = []
    runtime = open_model(str(folder)).loaded(options, lines.append)
    n = len(runtime.engine.model.blocks)
    assert lines[0] == "torchao quantizes to int8 (at every start) ..."
    assert lines[1] == f"quantized 1 of {n} blocks ..."
    assert "torchao" in type(runtime.engine.model.blocks[0].mlp.down.weight).__module__
    assert len(generated(runtime.engine, 4)) == 4
    engine = open_model(str(folder)).prepared(RuntimeOptions(quant="int8", max_seq_len=64)).engine()
    with torch.no_grad():
        a, b = engine.prefill(PROMPT)[0].float(), runtime.engine.prefill(PROMPT)[0].float()
    assert (a - b).norm() < 0.1 * b.norm()


def test_what_nobody_has_used_for_a_month_is_removed(folder):
    used, unused = (with_scheme(open_checkpoint(folder), q).path for q in ("int8", "int4-g32"))
    for old in (used, unused):
        os.utime(old, (0, 0))
    said: list[str] = []
    with_scheme(open_checkpoint(folder), "int8", 8, said.append)
    new = with_scheme(open_checkpoint(folder), "int4-g32-hqq", 8, said.append).path
    assert set(used.parent.iterdir()) == {used, new}
    assert said[0] == f"removing {unused}: not used for 30 days" and len(said) == 2
