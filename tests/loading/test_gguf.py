"""GGUF files written with the `gguf` package: values, names, row order, and damage."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter

from fasteagle.config import MoEConfig
from fasteagle.errors import FasteagleError
from fasteagle.loading.checkpoint import load_model, open_checkpoint
from fasteagle.loading.gguf import GGUFFile, _matrices, check_types, rope_factors
from fasteagle.loading.gguf_index import GGUFTensor, read_index
from fasteagle.loading.names import parts_of
from gguf_files import finish, write_gguf
from helpers import logits_of, make_hf_model, tiny_config


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_every_supported_type_dequantizes_exactly(tmp_path, kind):
    stored = write_gguf(tmp_path / "m.gguf", make_hf_model("llama2"), kind)
    file = open_checkpoint(tmp_path / "m.gguf")
    assert file.names() == set(stored)
    assert (file.own_scheme is None) == (kind in ("F32", "F16", "BF16"))
    for name, expected in stored.items():
        assert torch.equal(file.load(name), torch.from_numpy(np.array(expected))), name


ARCHITECTURES = dict.fromkeys(("llama2", "smollm2", "mixtral"), "llama")
ARCHITECTURES |= {"granitemoeshared": "granitemoe", "ernie": "ernie4_5", "erniemoe": "ernie4_5-moe"}
FAMILIES = (*ARCHITECTURES, "qwen2", "qwen3", "qwen2moe", "qwen3moe", "olmoe", "granitemoe")


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_logits_equal_those_of_the_model_that_was_written(tmp_path, family):
    hf, extra, architecture = make_hf_model(family), {}, ARCHITECTURES.get(family, family)
    if architecture == "granitemoe":  # llama.cpp does not ask: its weights sum to 1
        extra = {"granitemoe.expert_weights_norm": False}
    write_gguf(tmp_path / "m.gguf", hf, architecture=architecture, extra=extra)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    model = load_model(checkpoint, dtype=torch.float32, device="cpu", max_seq_len=64)
    tokens = torch.arange(5, 45)
    assert (logits_of(model, tokens) - hf(tokens[None]).logits[0]).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("extra", "factor"),
    [
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, 4.0),
        ({"rope.scaling.factor": 4.0}, 4.0),  # linear is llama.cpp's default
        ({"rope.scale_linear": 4.0}, 4.0),  # the former key
        ({"rope.scaling.factor": 0.0}, 1.0),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, 1.0),
        ({"rope.dimension_count": 16}, 1.0),
    ],
    ids=str,
)
def test_rope_is_scaled_as_llama_cpp_does(tmp_path, extra, factor):
    path = tmp_path / "m.gguf"
    named = {f"llama.{key}": value for key, value in extra.items()}
    write_gguf(path, make_hf_model("llama2"), extra=named)
    assert GGUFFile(path).config.rope_linear_factor == factor


def test_the_index_is_what_the_gguf_package_reads(tmp_path):
    """Arrays of every kind are skipped to the right byte."""
    arrays = {"a.u8": [1, 2], "a.f64": [0.5] * 9, "a.bool": [True], "a.text": ["x", "", "yz"] * 3}
    write_gguf(tmp_path / "m.gguf", make_hf_model("qwen3"), "Q8_0", "qwen3", extra=arrays)
    index, reader = read_index(tmp_path / "m.gguf"), GGUFReader(tmp_path / "m.gguf")
    assert {k: v for k, v in index.fields.items() if k not in arrays} == {
        k: field.contents()
        for k, field in reader.fields.items()
        if k not in arrays and not k.startswith("GGUF.")
    }
    assert {k: index.fields[k] for k in arrays} == {k: v[:8] for k, v in arrays.items()}
    assert index.tensors == {
        t.name: GGUFTensor(
            t.tensor_type.name, tuple(t.shape.tolist()[::-1]), int(t.data_offset), int(t.n_bytes)
        )
        for t in reader.tensors
    }


def test_tensors_begin_where_the_alignment_says(tmp_path, monkeypatch):
    init = GGUFWriter.__init__

    def aligned(self, *args):
        init(self, *args)
        self.add_custom_alignment(4096)

    monkeypatch.setattr(GGUFWriter, "__init__", aligned)
    write_gguf(tmp_path / "m.gguf", make_hf_model("llama2"))
    reader = GGUFReader(tmp_path / "m.gguf")
    places = {t.name: int(t.data_offset) for t in reader.tensors}
    tensors = read_index(tmp_path / "m.gguf").tensors
    assert {name: tensor.offset for name, tensor in tensors.items()} == places
    assert all(place % 4096 == 0 for place in places.values())


def test_a_text_of_metadata_may_hold_a_part_of_a_character(good, tmp_path):
    """As vocabularies do."""
    at = good.index(b"b.text") + len(b"b.text") + 4 + 8
    (tmp_path / "m.gguf").write_bytes(good[:at] + b"\xc3" + good[at + 1 :])
    assert read_index(tmp_path / "m.gguf").fields["b.text"] == "\ufffd"


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "good.gguf"
    extra = {"a.text": ["x", "y"] * 4, "b.text": "z", "general.alignment": 32}
    write_gguf(path, make_hf_model("llama2"), extra=extra)
    return path.read_bytes()


def after(key: bytes, offset: int = 0):
    """The place `offset` bytes after the only `key` of the file."""
    return lambda data: data.index(key) + len(key) + offset


# What is written where into a good file, and what the line says after its name.
DAMAGE = [
    (0, b"PK\x03\x04", "not a GGUF file (it does not start with 'GGUF')"),
    (4, b"\x01\0\0\0", "GGUF version 1, this fasteagle reads 2 and 3"),
    (4, b"\0\0\0\x03", "GGUF version 50331648, this fasteagle reads 2 and 3 (little-endian)"),
    (8, b"\0\0\0\0\0\x01\0\0", "ends at byte SIZE, which is too short for 1,099,511,627,776 t"),
    (16, b"\xff" * 8, "ends at byte SIZE, which is too short for 18,446,744,073,709,551,615 met"),
    (after(b"llama.block_count"), b"\x63", "damaged: llama.block_count of type 99 in its index"),
    (after(b"llama.block_count"), b"\x05\0\0\0\xff\xff\xff\xff", "llama.block_count is -1: mus"),
    (after(b"rms_epsilon", 4), b"\0\0\xc0\x7f", "llama.attention.layer_norm_rms_epsilon is NaN: "),
    (after(b"a.text"), b"\x09\0\0\0\x09", "damaged: a.text of type 9 in its index"),
    (after(b"a.text", 8), b"\xff" * 8, "ends at byte SIZE, which is too short for 18,446,744"),
    (after(b"a.text", 16 + 36), b"\xff" * 8, "ends at byte SIZE, within its index: damaged"),
    (after(b"general.alignment", 4), b"\0", "damaged: general.alignment 0 in its index"),
    (after(b"general.alignment", 4), b"\7", "damaged: blk.0.attn_q.weight at 66,560 instead of"),
    (after(b"blk.0.attn_q.weight", 24), b"\0" * 8, "damaged: blk.0.attn_q.weight at 0 instead of"),
    (after(b"b.text", -6), b"a", "damaged: a name that is there twice"),
    (after(b"token_embd.weight"), b"\0", "damaged: token_embd.weight with 0 dimensions in its"),
    (after(b"token_embd.weight"), b"\x05", "damaged: token_embd.weight with 5 dimensions in its"),
    (after(b"token_embd.weight", 4), b"\0" * 8, "damaged: token_embd.weight of shape (260, 0)"),
    (after(b"token_embd.weight", 20), b"\x63", "tensor token_embd.weight has type 99, which this"),
    (after(b"token_embd.weight", 20), b"\x1a", "tensor model.embed_tokens.weight has type I32; s"),
    (after(b"token_embd.weight", 30), b"\1", "damaged: token_embd.weight at 281,474,976,710,656"),
    (after(b"a.text", -1), b"\xff", "damaged: a text that is not UTF-8 in its index before byte"),
    (after(b"blk.0.attn_q.weight", -8), b"k", "damaged: a name that is there twice"),
]


@pytest.mark.parametrize(("place", "written", "message"), DAMAGE)
def test_damaged_file(good, tmp_path, place, written, message):
    at = place(good) if callable(place) else place
    path = tmp_path / "m.gguf"
    path.write_bytes(good[:at] + written + good[at + len(written) :])
    with pytest.raises(FasteagleError) as caught:
        GGUFFile(path)
    assert str(caught.value).startswith(f"{path}: {message.replace('SIZE', f'{len(good):,}')}")


@pytest.mark.parametrize("keep", [2, 30, 500, 0.5, 0.999, -1])
def test_truncated_file(good, tmp_path, keep):
    """Past the index, the message says how long the file must be."""
    path = tmp_path / "m.gguf"
    path.write_bytes(good[: int(keep * len(good)) if isinstance(keep, float) else keep])
    size = path.stat().st_size
    message = f"ends at byte {size:,}, its index needs {len(good):,}: fetch it again"
    if size < 1000:
        message = "not a GGUF file" if size < 4 else f"ends at byte {size}, w"
    with pytest.raises(FasteagleError) as caught:
        GGUFFile(path)
    assert str(caught.value).startswith(f"{path}: {message}")


def test_files_that_cannot_run(tmp_path):
    path, model = tmp_path / "m.gguf", make_hf_model("llama2")
    write_gguf(path, model, architecture="gemma")
    with pytest.raises(FasteagleError, match="architecture 'gemma' is not supported"):
        GGUFFile(path)
    write_gguf(path, model, architecture="gpt-oss")
    with pytest.raises(FasteagleError, match=r"'gpt-oss' is not supported \(attention sinks"):
        GGUFFile(path)
    write_gguf(path, model, architecture="qwen3", extra={"qwen3.expert_count": 8})
    with pytest.raises(FasteagleError, match="'qwen3' with experts is not supported: choose"):
        GGUFFile(path)
    for extra, message in (
        ({"llama.rope.dimension_count": 8}, "dimension_count is 8: must be 16, RoPE on a part"),
        ({"llama.rope.scaling.attn_factor": 2.0}, r"attn_factor is 2\.0: must be 1, others are"),
    ):
        write_gguf(path, model, extra=extra)
        with pytest.raises(FasteagleError, match=message):
            GGUFFile(path)
    for data, kind, message in (
        (np.zeros((4, 8), np.float32), None, r"llama\.embedding_length is missing"),
        (np.zeros((4, 54), np.uint8), GGMLQuantizationType.TQ1_0, r"TQ1_0; supported: F32"),
    ):
        writer = GGUFWriter(path, "llama")
        writer.add_tensor("token_embd.weight", data, raw_dtype=kind)
        finish(writer)
        with pytest.raises(FasteagleError, match=message):
            GGUFFile(path)
    name = "model.layers.2.mlp.down_proj.weight"  # its Hugging Face name
    write_gguf(path, model, drop=(name,))
    with pytest.raises(FasteagleError, match=f"missing {name}"):
        open_checkpoint(path)
    write_gguf(path, model, drop=("model.embed_tokens.weight",))
    with pytest.raises(FasteagleError, match=r"m\.gguf: missing tensor token_embd\.weight$"):
        open_checkpoint(path)
    for n in (0, 1):  # not split
        write_gguf(path, model, extra={"split.count": n})
        assert GGUFFile(path).config.dim == 64
    for n in (2, 3):
        write_gguf(path, model, extra={"split.count": n})
        with pytest.raises(FasteagleError, match=rf"one of {n} parts: llama-gguf-split --merge"):
            GGUFFile(path)


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_rope_factors_that_divide_by_nothing_are_refused(tmp_path, value):
    data = np.array([1.0, value], np.float32).view(np.uint8)
    tensor = GGUFTensor("F32", (2,), 0, data.nbytes)
    with pytest.raises(FasteagleError, match=r"rope_freqs.weight is not above 0: fetch it again"):
        rope_factors(tmp_path / "m.gguf", data, tensor)


def test_a_vector_in_blocks_is_refused(tmp_path):
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    norm = np.zeros(34, np.uint8)  # 32 values as Q8_0
    writer.add_tensor("output_norm.weight", norm, raw_dtype=GGMLQuantizationType.Q8_0)
    finish(writer)
    index = read_index(tmp_path / "m.gguf")
    with pytest.raises(FasteagleError, match=r"type Q8_0; supported: F32, F16, BF16$"):
        check_types(tmp_path / "m.gguf", index.tensors)


@pytest.mark.parametrize(
    ("layer", "n_expert", "listed"),
    [("1", 4, 4), ("1", 5, 1), ("1", 1024, 1), ("1", 10**10, 1), ("2", 4, 1), ("01", 4, 1)],
)
def test_no_more_experts_are_listed_than_the_config_says(layer, n_expert, listed):
    """A file of 50 KB may name 500 blocks of 1,024 experts without any values."""
    config = tiny_config(moe=MoEConfig(n_expert=4, top_k=2, ffn_dim=16))
    block = f"model.layers.{layer}.mlp.experts"
    many = GGUFTensor("F16", (n_expert, 1, 1), 0, 2 * n_expert)
    name = f"{block}.up_proj.weight"
    matrices = _matrices(config, name, many)
    assert len(matrices) == listed and (listed > 1 or list(matrices) == [name])
    parts = list(parts_of(config, f"{block}.down_proj", (n_expert, 2, 4)))
    assert len(parts) == listed and (listed > 1 or parts == [(f"{block}.down_proj", ())])


def test_two_tensors_of_one_name_are_refused(tmp_path):
    model = make_hf_model("llama3")
    extra = np.zeros(64, np.float32)
    add = GGUFWriter.add_tensor

    def with_another(self, key, tensor, **more):
        add(self, key, tensor, **more)
        if key == "output_norm.weight":
            add(self, "model.norm.weight", extra)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GGUFWriter, "add_tensor", with_another)
        write_gguf(tmp_path / "m.gguf", model)
    with pytest.raises(FasteagleError, match=r"two tensors are model\.norm\.weight"):
        GGUFFile(tmp_path / "m.gguf")
