"""GGUF files written with the `gguf` package: values, names, row order, and damage."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants

from fasteagle.errors import FasteagleError
from fasteagle.loading import gguf as gguf_file
from fasteagle.loading.checkpoint import load_model, open_checkpoint
from fasteagle.loading.gguf import GGUFFile, hf_name
from fasteagle.model import KVCache, causal_mask
from helpers import TINY_VOCAB, make_hf_model

GGUF_NAMES = {hf: gguf for gguf, hf in gguf_file._GLOBAL_NAMES.items()}


def gguf_name(name: str) -> str:
    if name in GGUF_NAMES:
        return GGUF_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    short = next(g for g, hf in gguf_file._BLOCK_NAMES.items() if hf == rest)
    return f"blk.{layer}.{short}"


def permute(weight: np.ndarray, n_head: int) -> np.ndarray:
    """llama.cpp's row order for interleaved RoPE, written out row by row."""
    head_dim = weight.shape[0] // n_head
    order = [
        h * head_dim + i // 2 + (i % 2) * (head_dim // 2)
        for h in range(n_head)
        for i in range(head_dim)
    ]
    return weight[order]


def write_gguf(path, model, kind="F32", architecture="llama", extra=None, drop=()):
    """Write a transformers model as GGUF; matrices in `kind`, vectors in F32."""
    config = model.config
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
    for key, value in (extra or {}).items():
        writer.add_string(key, value) if isinstance(value, str) else writer.add_uint32(key, value)
    stored = {}
    for name, tensor in model.state_dict().items():
        if name in drop or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        data = tensor.float().numpy()
        if data.ndim == 2:
            quantized = quants.quantize(data, GGMLQuantizationType[kind])
            stored[name] = quants.dequantize(quantized, GGMLQuantizationType[kind])
        else:
            stored[name] = data
        if architecture == "llama" and name.endswith("q_proj.weight"):
            data = permute(data, config.num_attention_heads)
        if architecture == "llama" and name.endswith("k_proj.weight"):
            data = permute(data, config.num_key_value_heads)
        qtype = GGMLQuantizationType[kind if data.ndim == 2 else "F32"]
        writer.add_tensor(gguf_name(name), quants.quantize(data, qtype), raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_every_supported_type_dequantizes_exactly(tmp_path, kind):
    stored = write_gguf(tmp_path / "m.gguf", make_hf_model("llama2"), kind)
    file = GGUFFile(tmp_path / "m.gguf")
    assert file.names() == set(stored)
    for name, expected in stored.items():
        assert torch.equal(file.load(name), torch.from_numpy(np.array(expected))), name


@pytest.mark.parametrize(
    ("family", "architecture"),
    [("llama2", "llama"), ("smollm2", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3")],
)
@torch.no_grad()
def test_logits_equal_those_of_the_model_that_was_written(tmp_path, family, architecture):
    hf = make_hf_model(family)
    write_gguf(tmp_path / "m.gguf", hf, architecture=architecture)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    model = load_model(checkpoint, dtype=torch.float32, device="cpu", max_seq_len=64)
    tokens = torch.arange(5, 45)
    rows = torch.arange(40)
    cache = KVCache(model.config, 256, torch.float32, "cpu")
    logits = model(tokens, rows, rows, causal_mask(0, 40, 256, None, "cpu"), cache).logits
    assert (logits - hf(tokens[None]).logits[0]).abs().max() < 1e-4


def test_config_is_read_from_the_metadata(tmp_path):
    write_gguf(tmp_path / "m.gguf", make_hf_model("qwen3"), architecture="qwen3")
    config = GGUFFile(tmp_path / "m.gguf").config
    assert (config.dim, config.n_layer, config.n_head, config.n_kv_head) == (64, 3, 4, 2)
    assert (config.head_dim, config.ffn_dim, config.vocab_size) == (32, 96, TINY_VOCAB)
    assert config.qk_norm and not config.qkv_bias and not config.tie_embeddings


def test_rope_freq_factors_divide_the_frequencies(tmp_path):
    """Llama-3.1 files carry the stretch as a tensor; it must equal the config's formula."""
    from fasteagle.config import Llama3RopeScaling, ModelConfig
    from fasteagle.model import rope_table

    shape = dict(
        dim=64,
        n_layer=1,
        n_head=4,
        n_kv_head=4,
        head_dim=16,
        ffn_dim=8,
        vocab_size=9,
        max_seq_len=256,
        rope_base=500000.0,
    )
    scaled = ModelConfig(**shape, rope_scaling=Llama3RopeScaling(8.0, 1.0, 4.0, 64))
    plain, stretched = rope_table(ModelConfig(**shape), 2), rope_table(scaled, 2)
    angle = [torch.atan2(sin[1, :8], cos[1, :8]) for cos, sin in (plain, stretched)]
    factors = tuple((angle[0] / angle[1]).tolist())
    by_tensor = ModelConfig(**shape, rope_freq_factors=factors)
    for a, b in zip(rope_table(by_tensor, 100), rope_table(scaled, 100), strict=True):
        assert torch.allclose(a, b, atol=1e-4)


def test_second_reading_uses_the_index(tmp_path, monkeypatch):
    write_gguf(tmp_path / "m.gguf", make_hf_model("llama2"))
    first = GGUFFile(tmp_path / "m.gguf")
    monkeypatch.setattr(gguf_file, "_read_index", lambda path: pytest.fail("read again"))
    second = GGUFFile(tmp_path / "m.gguf")
    assert second.tensors == first.tensors and second.config == first.config


def test_a_changed_file_is_read_again(tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf(path, make_hf_model("llama2"))
    assert GGUFFile(path).config.n_layer == 3
    write_gguf(path, make_hf_model("llama2", num_hidden_layers=2))
    assert GGUFFile(path).config.n_layer == 2


@pytest.mark.parametrize("keep", [2, 30, 500, 0.5, 0.999])
def test_truncated_file(tmp_path, keep):
    path = tmp_path / "m.gguf"
    write_gguf(path, make_hf_model("llama2"))
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    with pytest.raises(FasteagleError, match=r"m\.gguf"):
        GGUFFile(path)


def test_file_truncated_after_it_was_indexed(tmp_path, monkeypatch):
    path = tmp_path / "m.gguf"
    write_gguf(path, make_hf_model("llama2"))
    index = gguf_file._read_index(path)
    path.write_bytes(path.read_bytes()[:-100])
    monkeypatch.setattr(gguf_file, "_cached_index", lambda path: index)
    with pytest.raises(FasteagleError, match="truncated: .* ends at byte"):
        GGUFFile(path)


def test_something_else_entirely(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04 a zip file")
    with pytest.raises(FasteagleError, match="not a GGUF file"):
        GGUFFile(path)


def test_corrupt_counts(tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf(path, make_hf_model("llama2"))
    data = bytearray(path.read_bytes())
    data[8:16] = b"\xff" * 8  # number of tensors
    path.write_bytes(data)
    with pytest.raises(FasteagleError, match="damaged or truncated GGUF"):
        GGUFFile(path)


def test_unsupported_type_is_named(tmp_path):
    path = tmp_path / "m.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_tensor(
        "token_embd.weight", np.zeros((4, 54), np.uint8), raw_dtype=GGMLQuantizationType.TQ1_0
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(FasteagleError, match=r"type TQ1_0; supported: F32"):
        GGUFFile(path)


def test_unsupported_architecture_and_missing_metadata(tmp_path):
    model = make_hf_model("llama2")
    write_gguf(tmp_path / "a.gguf", model, architecture="gemma")
    with pytest.raises(FasteagleError, match="architecture 'gemma' is not supported"):
        GGUFFile(tmp_path / "a.gguf")
    writer = GGUFWriter(tmp_path / "b.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.zeros((4, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(FasteagleError, match=r"lacks llama\.attention\.head_count"):
        GGUFFile(tmp_path / "b.gguf")


def test_missing_tensor_is_listed_under_its_hugging_face_name(tmp_path):
    name = "model.layers.2.mlp.down_proj.weight"
    write_gguf(tmp_path / "m.gguf", make_hf_model("llama2"), drop=(name,))
    with pytest.raises(FasteagleError, match=f"missing {name}"):
        load_model(GGUFFile(tmp_path / "m.gguf"), dtype=torch.float32, device="cpu", max_seq_len=64)


def test_names_round_trip():
    for name in ("model.embed_tokens.weight", "model.layers.12.self_attn.o_proj.weight"):
        assert hf_name(gguf_name(name)) == name
    assert hf_name("blk.0.something.weight") == "blk.0.something.weight"
