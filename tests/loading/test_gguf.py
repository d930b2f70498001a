"""GGUF files written with the `gguf` package: values, names, row order, and damage."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, quants

from fasteagle.errors import FasteagleError
from fasteagle.loading.checkpoint import load_model, open_checkpoint
from fasteagle.loading.gguf import GGUFFile, hf_name
from fasteagle.loading.gguf_index import GGUFTensor, read_index
from fasteagle.loading.open import OpenedModel
from fasteagle.loading.quantize import with_scheme, write_folder
from fasteagle.loading.source import Linears
from fasteagle.loading.stored import StoredFolder
from fasteagle.loading.tensors import weight_bytes
from fasteagle.loading.tokenizer import DummyTokenizer
from fasteagle.model import KVCache, causal_mask
from fasteagle.options import RuntimeOptions
from fasteagle.quant.gguf_blocks import GGUF_4_BITS, GGUF_BLOCKS, from_gguf_blocks
from fasteagle.quant.linear import QuantizedLMHead
from fasteagle.quant.scheme import Scheme
from gguf_files import PLACES, gguf_name, random_rows, write_gguf
from helpers import TINY_VOCAB, make_hf_model


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


def test_a_changed_file_is_read_again(tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf(path, make_hf_model("llama2"))
    assert GGUFFile(path).config.n_layer == 3
    write_gguf(path, make_hf_model("llama2", num_hidden_layers=2))
    assert GGUFFile(path).config.n_layer == 2


def test_the_index_is_what_the_gguf_package_reads(tmp_path):
    """Arrays of every kind are skipped to the right byte."""
    arrays = {
        "a.u8": [1, 2, 3],
        "a.f64": [0.5] * 9,
        "a.bool": [True],
        "a.text": ["x", "", "yz"] * 3,
    }
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


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "good.gguf"
    write_gguf(path, make_hf_model("llama2"), extra={"a.text": ["x", "y"] * 4})
    return path.read_bytes()


def after(key: bytes, offset: int = 0):
    """The place `offset` bytes behind the only `key` of the file."""
    return lambda data: data.index(key) + len(key) + offset


# What is written where into a good file, and what the line says behind its name.
DAMAGE = [
    (0, b"PK\x03\x04", "not a GGUF file (it does not start with 'GGUF')"),
    (4, b"\x01\0\0\0", "GGUF version 1, this fasteagle reads 2 and 3"),
    (4, b"\0\0\0\x03", "GGUF version 50331648, this fasteagle reads 2 and 3 (little-endian)"),
    (8, b"\0\0\0\0\0\x01\0\0", "ends at byte SIZE, which is too short for 1,099,511,627,776 t"),
    (16, b"\xff" * 8, "ends at byte SIZE, which is too short for 18,446,744,073,709,551,615 met"),
    (24, b"\xff" * 8, "ends at byte SIZE, within its index: damaged or truncated, fetch it again"),
    (after(b"llama.block_count"), b"\x63", "damaged: llama.block_count of type 99 in its index"),
    (
        after(b"llama.block_count"),
        b"\x05\0\0\0\xff\xff\xff\xff",
        "llama.block_count is -1: must be",
    ),
    (
        after(b"llama.block_count"),
        b"\x06",
        "llama.block_count is 4.203895392974451e-45: must be an",
    ),
    (
        after(b"rms_epsilon", 4),
        b"\0\0\xc0\x7f",
        "llama.attention.layer_norm_rms_epsilon is NaN: must",
    ),
    (after(b"a.text"), b"\x09\0\0\0\x09", "damaged: a.text of type 9 in its index"),
    (
        after(b"a.text", 8),
        b"\xff" * 8,
        "ends at byte SIZE, which is too short for 18,446,744,073,7",
    ),
    (after(b"a.text", 16 + 36), b"\xff" * 8, "ends at byte SIZE, within its index: damaged"),
    (
        after(b"token_embd.weight"),
        b"\x05",
        "damaged: token_embd.weight with 5 dimensions in its index",
    ),
    (after(b"token_embd.weight", 4), b"\0" * 8, "damaged: token_embd.weight of shape (260, 0)"),
    (after(b"token_embd.weight", 10), b"\1", "ends at byte SIZE, its index needs "),
    (
        after(b"token_embd.weight", 20),
        b"\x63",
        "tensor token_embd.weight has type 99, which this fasteagle",
    ),
    (
        after(b"token_embd.weight", 20),
        b"\x18",
        "tensor model.embed_tokens.weight has type I8; supported: F32",
    ),
    (after(b"token_embd.weight", 30), b"\1", "ends at byte SIZE, its index needs "),
    (after(b"a.text", -1), b"\xff", "damaged: a text that is not UTF-8 in its index before byte"),
    (after(b"blk.0.attn_q.weight", -8), b"k", "damaged: a name that is there twice"),
    (after(b"blk.0.attn_q.weight", 4), b"\0" * 8, "damaged: blk.0.attn_q.weight of shape (64, 0)"),
]


@pytest.mark.parametrize(("place", "written", "message"), DAMAGE)
def test_damaged_file(good, tmp_path, place, written, message):
    at = place(good) if callable(place) else place
    path = tmp_path / "m.gguf"
    path.write_bytes(good[:at] + written + good[at + len(written) :])
    with pytest.raises(FasteagleError) as caught:
        GGUFFile(path)
    assert str(caught.value).startswith(f"{path}: {message.replace('SIZE', f'{len(good):,}')}")


@pytest.mark.parametrize("keep", [2, 30, 500, 0.5, 0.999])
def test_truncated_file(good, tmp_path, keep):
    """Past the index, the message says how long the file must be."""
    path = tmp_path / "m.gguf"
    size = int(keep * len(good)) if isinstance(keep, float) else keep
    path.write_bytes(good[:size])
    message = f"ends at byte {size:,}, its index needs {len(good):,}: fetch it again"
    if size < 1000:
        message = "not a GGUF file" if size < 4 else f"ends at byte {size}, w"
    with pytest.raises(FasteagleError) as caught:
        GGUFFile(path)
    assert str(caught.value).startswith(f"{path}: {message}")


def test_part_of_a_split_file(tmp_path):
    write_gguf(tmp_path / "m.gguf", make_hf_model("llama2"), extra={"split.count": 3})
    with pytest.raises(FasteagleError, match=r"one of 3 parts: llama-gguf-split --merge"):
        GGUFFile(tmp_path / "m.gguf")


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
    with pytest.raises(FasteagleError, match=r"lacks .*llama\.attention\.head_count"):
        GGUFFile(tmp_path / "b.gguf")


def test_missing_tensor_is_listed_under_its_hugging_face_name(tmp_path):
    name = "model.layers.2.mlp.down_proj.weight"
    write_gguf(tmp_path / "m.gguf", make_hf_model("llama2"), drop=(name,))
    with pytest.raises(FasteagleError, match=f"missing {name}"):
        open_checkpoint(tmp_path / "m.gguf")


def test_names_round_trip():
    for name in ("model.embed_tokens.weight", "model.layers.12.self_attn.o_proj.weight"):
        assert hf_name(gguf_name(name)) == name
    assert hf_name("blk.0.something.weight") == "blk.0.something.weight"


# K-quants and others that become 4 or 8 bits.


def error_bound(kind, rows):
    """What `from_gguf_blocks` may change in each weight [N, K]."""
    qtype = GGMLQuantizationType[kind]
    values = quants.dequantize(rows, qtype)
    if kind != "Q4_K":
        amax = abs(values).reshape(len(rows), -1, 32).max(-1).repeat(32, axis=-1)
        return amax / 254 * (1 + 2**-10) + 2**-25
    blocks = rows.reshape(len(rows), -1, 144).copy()
    blocks[..., 2:4] = 0  # dmin
    positive = quants.dequantize(blocks.reshape(len(rows), -1), qtype)  # d * sc * q
    return 2**-11 * (abs(positive) + abs(positive - values)) + 1e-7 * abs(positive)


@pytest.mark.parametrize("kind", sorted(GGUF_BLOCKS))
@pytest.mark.parametrize("spread", [0.06, 1e-4, 30.0])
def test_packed_values_are_near_those_of_the_file(kind, spread):
    if kind in PLACES:
        rows = random_rows(kind, (37, 512), spread)
    else:
        data = spread * np.random.default_rng(1).normal(size=(37, 512)).astype(np.float32)
        rows = quants.quantize(data, GGMLQuantizationType[kind])
    expected = quants.dequantize(rows, GGMLQuantizationType[kind])
    weight = from_gguf_blocks(torch.from_numpy(rows), kind)
    assert (weight.bits, weight.group_size) == (4 if kind in GGUF_4_BITS else 8, 32)
    assert weight.shape == (37, 512) and weight.scales.dtype == torch.float16
    error = abs(weight.dequantize().numpy() - expected)
    exact = kind in ("Q4_0", "Q4_1", "Q8_0")
    assert (error <= (0 if exact else error_bound(kind, rows))).all()
    assert exact or error.max() > 0


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
def test_blocks_of_unusual_size(kind):
    """Zero, subnormal and the largest d: nothing is cut off, and nothing becomes infinite."""
    rows = random_rows(kind, (4, 256))
    at = PLACES[kind][0]
    for row, d in zip(rows, (0.0, 6e-8, 6e-7, 65504.0), strict=True):
        row[at : at + 2] = np.array([d], np.float16).view(np.uint8)
    expected = quants.dequantize(rows, GGMLQuantizationType[kind])
    for n in range(4):
        found = from_gguf_blocks(torch.from_numpy(rows[n : n + 1]), kind).dequantize().numpy()
        assert (abs(found - expected[n]) <= error_bound(kind, rows[n : n + 1]) * 1.001).all(), n


def q4_k_m(name):
    """The types of llama.cpp's Q4_K_M, by and large: 6 bits in the LM head, some v and down."""
    if "embed_tokens" in name or "lm_head" in name:
        return "Q6_K"
    more = name.startswith(("model.layers.0.", "model.layers.2."))
    return "Q6_K" if more and ("v_proj" in name or "down_proj" in name) else "Q4_K"


def wide_model(family="llama2", **overrides):
    """256 columns and more: K-quants have blocks of 256."""
    shape = dict(hidden_size=256, intermediate_size=512, num_key_value_heads=2)
    shape |= dict(head_dim=64, initializer_range=0.06)  # spread like `random_rows`
    return make_hf_model(family, **shape | overrides)


def logits_of(model):
    tokens, rows = torch.arange(5, 45), torch.arange(40)
    cache = model.new_cache(256)
    mask = causal_mask(0, 40, 256, None, "cpu")
    return model(tokens, rows, rows, mask, cache).logits


def opened(path):
    return OpenedModel("m", GGUFFile(path), DummyTokenizer(TINY_VOCAB))


MIXES = {
    "Q4_K_M": q4_k_m,
    "Q5_K_M": lambda name: "Q6_K" if "v_proj" in name else "Q5_K",
    "Q3_K_M": lambda name: "Q5_K" if "v_proj" in name else "Q3_K",
    "Q2_K": lambda name: "Q4_K" if "v_proj" in name else "Q2_K",
    "IQ4_XS": "IQ4_XS",
    "IQ4_NL and Q5_1": lambda name: "Q5_1" if "down_proj" in name else "IQ4_NL",
    "Q4_0 and Q5_0": lambda name: "Q5_0" if "k_proj" in name else "Q4_0",
    "Q4_0 and Q4_K": lambda name: "Q4_0" if "k_proj" in name else "Q4_K",
}


@pytest.mark.parametrize("mix", MIXES)
@torch.no_grad()
def test_mixed_files_run_by_default_in_whole_native_blocks(tmp_path, mix):
    stored = write_gguf(tmp_path / "m.gguf", wide_model(), MIXES[mix])
    said: list[str] = []
    prepared = opened(tmp_path / "m.gguf").prepared(RuntimeOptions(device="cpu"), said.append)
    converted = [kind for kind in ("IQ4_NL", "IQ4_XS", "Q2_K", "Q3_K") if kind in mix]
    assert [line.split(" weights")[0] for line in said] == converted
    engine = prepared.engine()
    model = engine.target
    assert engine.backend.name == "cpu" and isinstance(model.model.lm_head, QuantizedLMHead)
    file = GGUFFile(tmp_path / "m.gguf")
    for name, expected in stored.items():
        assert torch.equal(file.load(name), torch.from_numpy(np.array(expected))), name
        if "_proj" in name:
            weight = file.packed(name).dequantize()
            assert (weight - file.load(name)).abs().max() < 0.01 * file.load(name).abs().max()
    dense = load_model(file, dtype=torch.float32, device="cpu", max_seq_len=64)
    expected, found = logits_of(dense), logits_of(model)
    assert (found - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize(
    ("family", "architecture"), [("smollm2", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3")]
)
@pytest.mark.parametrize("cpu_kernels", ["native", "aten"])
@torch.no_grad()
def test_q4_k_m_of_every_family(tmp_path, family, architecture, cpu_kernels):
    """Tied LM heads, biases and row orders; without our kernels as well."""
    write_gguf(tmp_path / "m.gguf", wide_model(family), q4_k_m, architecture)
    for lm_head in ("int8", "keep"):
        options = RuntimeOptions(
            device="cpu", quant="int4", lm_head=lm_head, cpu_kernels=cpu_kernels
        )
        prepared = opened(tmp_path / "m.gguf").prepared(options)
        assert prepared.scheme.method == "own" and prepared.scheme.bits == 4
        engine = prepared.engine()
        model = engine.target
        assert (engine.backend.name == "cpu") == (cpu_kernels == "native")
        dense = load_model(prepared.checkpoint, dtype=torch.float32, device="cpu", max_seq_len=64)
        expected, found = logits_of(dense), logits_of(model)
    assert (found - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize(
    ("kinds", "bits"),
    [
        ("Q4_K", 4),
        (q4_k_m, 4),
        (MIXES["Q4_0 and Q4_K"], 4),
        ("Q6_K", 8),
        (MIXES["Q5_K_M"], 8),
        (MIXES["Q3_K_M"], 8),
        (lambda name: "F16" if "v_proj" in name else "Q4_K", None),
        ("F16", None),
    ],
)
def test_own_scheme(tmp_path, kinds, bits):
    write_gguf(tmp_path / "m.gguf", wide_model(), kinds)
    own = GGUFFile(tmp_path / "m.gguf").own_scheme
    assert own == (None if bits is None else Scheme(bits, 32, "own"))


def test_bytes_of_a_mixed_file_are_those_of_its_products(tmp_path):
    write_gguf(tmp_path / "m.gguf", wide_model(), MIXES["Q2_K"])
    checkpoint = with_scheme(GGUFFile(tmp_path / "m.gguf"), "int4")
    linear = checkpoint.config.linear_params
    head = checkpoint.config.vocab_size * 256
    # v_proj has 4 bits, and shares its product with q_proj and k_proj, which have 8.
    assert weight_bytes(checkpoint, checkpoint.scheme) == pytest.approx(1.0625 * linear + 3 * head)
    linears = Linears(checkpoint, "cpu", torch.float32, native=True)
    made = linears.linear([f"model.layers.0.self_attn.{n}_proj.weight" for n in "qkv"], None)
    assert made.packed[12] == 8  # in its header
    assert linears.weight_bytes() == weight_bytes(checkpoint, checkpoint.scheme)


@torch.no_grad()
def test_a_written_folder_keeps_the_mix(tmp_path):
    write_gguf(tmp_path / "m.gguf", wide_model(), q4_k_m)
    checkpoint = with_scheme(GGUFFile(tmp_path / "m.gguf"), "int4")
    (tmp_path / "out").mkdir()
    write_folder(tmp_path / "out", checkpoint, checkpoint.scheme)
    folder = StoredFolder(tmp_path / "out")
    for name in (n for n in checkpoint.names() if "_proj" in n):
        assert folder.bits(name) == checkpoint.bits(name)
        assert torch.equal(folder.load(name), checkpoint.packed(name).dequantize()), name
    assert weight_bytes(folder, folder.scheme) == weight_bytes(checkpoint, folder.scheme)


def test_rows_of_no_whole_blocks_in_a_file(tmp_path):
    """250 columns instead of 256 in the header of a Q6_K tensor."""
    path = tmp_path / "m.gguf"
    write_gguf(path, wide_model(), q4_k_m)
    name = b"blk.0.attn_v.weight"
    data = bytearray(path.read_bytes())
    at = data.index(name) + len(name) + 4  # behind the number of dimensions
    assert int.from_bytes(data[at : at + 8], "little") == 256
    path.write_bytes(data[:at] + (250).to_bytes(8, "little") + data[at + 8 :])
    with pytest.raises(FasteagleError, match=r"^[^\n]*m\.gguf: [^\n]*$"):
        GGUFFile(path)
