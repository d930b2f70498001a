"""GGUF types that become 4 or 8 bits: their values, and files that mix them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from fasteagle.errors import FasteagleError
from fasteagle.loading.checkpoint import load_model, open_checkpoint
from fasteagle.loading.gguf import GGUFFile
from fasteagle.loading.open import OpenedModel
from fasteagle.loading.quantize import with_scheme, write_folder
from fasteagle.loading.source import Linears
from fasteagle.loading.stored import StoredFolder
from fasteagle.loading.tensors import weight_bytes
from fasteagle.loading.tokenizer import dummy_tokenizer
from fasteagle.options import RuntimeOptions
from fasteagle.quant import gguf_blocks
from fasteagle.quant.gguf_blocks import GGUF_4_BITS, GGUF_BLOCKS, GGUF_WIDENED, from_gguf_blocks
from fasteagle.quant.linear import QuantizedLMHead
from fasteagle.quant.scheme import Scheme
from gguf_files import PLACES, random_rows, stored_rows, write_gguf
from helpers import TINY_VOCAB, logits_of, make_hf_model


def error_bound(kind, rows):
    """Return the most that `from_gguf_blocks` may change in each weight [N, K]."""
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


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
def test_blocks_of_unusual_size(kind):
    """Zero, subnormal and the largest d: nothing is cut off, and nothing becomes infinite."""
    exact = kind not in PLACES
    data = np.random.default_rng(1).normal(size=(4, 256)).astype(np.float32)
    rows = stored_rows(kind, data)
    at = 0 if exact else PLACES[kind][0]
    for row, d in zip(rows, (0.0, 6e-8, 6e-7, 65504.0), strict=True):
        row[at : at + 2] = np.array([d], np.float16).view(np.uint8)
    expected = quants.dequantize(rows, GGMLQuantizationType[kind])
    for n in range(4):
        values = from_gguf_blocks(torch.from_numpy(rows[n : n + 1]), kind).dequantize().numpy()
        bound = 0 if exact else error_bound(kind, rows[n : n + 1]) * 1.001
        assert (abs(values - expected[n]) <= bound).all(), n


@pytest.mark.parametrize("values", [1100, 100])
def test_a_weight_is_converted_in_parts(values, monkeypatch):
    """As many rows as have so many values, one at least."""
    rows = torch.from_numpy(random_rows("Q6_K", (5, 512), 0.06))
    expected = from_gguf_blocks(rows, "Q6_K")
    monkeypatch.setattr(gguf_blocks, "CONVERTED_VALUES", values)
    sizes, real = [], quants.dequantize
    monkeypatch.setattr(
        quants, "dequantize", lambda part, *kind: sizes.append(len(part)) or real(part, *kind)
    )
    weight = from_gguf_blocks(rows, "Q6_K")
    assert max(sizes) == max(1, values // 512)
    assert torch.equal(weight.q, expected.q) and torch.equal(weight.scales, expected.scales)


def test_types_that_grow_are_those_that_a_note_names():
    """To 34 bytes for 32 weights."""
    weights = {kind: 256 if "K" in kind or "XS" in kind else 32 for kind in GGUF_BLOCKS}
    growth = {kind: 34 / 32 * weights[kind] / size for kind, size in GGUF_BLOCKS.items()}
    converted = GGUF_BLOCKS.keys() - GGUF_4_BITS
    assert {kind for kind in converted if growth[kind] > 1.8} == GGUF_WIDENED


@pytest.mark.parametrize("kind", ["TQ1_0", "MXFP4", "IQ2_XS"])
def test_other_types_are_refused(kind):
    with pytest.raises(FasteagleError, match=f"^GGUF {kind} weights are not supported: use the "):
        from_gguf_blocks(torch.zeros(2, 144, dtype=torch.uint8), kind)


@pytest.mark.parametrize("shape", [(2, 19), (36,), (2, 1000)])
def test_rows_of_no_whole_blocks(shape):
    with pytest.raises(FasteagleError, match=r"^[^\n]*no rows of Q4_K blocks[^\n]*$"):
        from_gguf_blocks(torch.zeros(shape, dtype=torch.uint8), "Q4_K")


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


def opened(path):
    return OpenedModel("m", open_checkpoint(path), dummy_tokenizer(TINY_VOCAB))


EMBEDDING = "model.embed_tokens.weight"
MIXES = {
    "Q4_K_M": q4_k_m,
    "Q5_K_M": lambda name: "Q6_K" if "v_proj" in name else "Q5_K",
    "Q3_K_M": lambda name: "Q5_K" if "v_proj" in name else "Q3_K",
    "Q2_K": lambda name: "Q4_K" if "v_proj" in name else "Q2_K",
    "IQ4_NL and Q5_1": lambda name: "Q5_1" if "down_proj" in name else "IQ4_NL",
    "Q4_0 and Q5_0": lambda name: "Q5_0" if "k_proj" in name else "Q4_0",
    "Q4_0 and Q4_K": lambda name: "Q4_0" if "k_proj" in name else "Q4_K",
}


@pytest.mark.parametrize(
    ("mix", "bits", "family"),
    [("Q4_K_M", 4, "qwen2"), ("Q4_K_M", 4, "smollm2"), ("Q5_K_M", 8, "qwen3")]
    + [(mix, 8, "llama2") for mix in ("Q3_K_M", "IQ4_NL and Q5_1")]
    + [(mix, 4, "llama2") for mix in ("Q2_K", "Q4_0 and Q5_0", "Q4_0 and Q4_K")],
)
@torch.no_grad()
def test_mixed_files_run_by_default_in_whole_native_blocks(tmp_path, mix, bits, family):
    """Tied LM heads, biases and row orders as well."""
    architecture = family if "qwen" in family else "llama"
    stored = write_gguf(tmp_path / "m.gguf", wide_model(family), MIXES[mix], architecture)
    said: list[str] = []
    prepared = opened(tmp_path / "m.gguf").prepared(RuntimeOptions(device="cpu"), said.append)
    converted = [kind for kind in ("IQ4_NL", "IQ4_XS", "Q2_K", "Q3_K") if kind in mix]
    assert [line.split(" weights")[0] for line in said] == converted
    engine = prepared.engine()
    model = engine.target
    assert engine.backend.name == "cpu" and isinstance(model.model.lm_head, QuantizedLMHead)
    file = open_checkpoint(tmp_path / "m.gguf")
    assert file.own_scheme == Scheme(bits, 32, "own")
    # What is looked up is not rounded, but an LM head that is tied to it has the file's own bits.
    is_exact = GGUFFile(tmp_path / "m.gguf").tensors[EMBEDDING].kind in gguf_blocks.GGUF_EXACT
    assert (file.packed(EMBEDDING) is not None) == (is_exact or file.config.tie_embeddings)
    for name, expected in stored.items():
        assert torch.equal(file.load(name), torch.from_numpy(np.array(expected))), name
        if name.endswith("_proj.weight"):
            weight = file.packed(name).dequantize()
            assert (weight - file.load(name)).abs().max() < 0.01 * file.load(name).abs().max()
    dense = load_model(file, dtype=torch.float32, device="cpu", max_seq_len=64)
    expected, logits = (logits_of(m, torch.arange(5, 45)) for m in (dense, model))
    assert (logits - expected).norm() < 0.05 * expected.norm()


def test_bytes_of_a_mixed_file_are_those_of_its_products(tmp_path):
    write_gguf(tmp_path / "m.gguf", wide_model(), MIXES["Q2_K"])
    checkpoint = with_scheme(open_checkpoint(tmp_path / "m.gguf"), "int4")
    linear = checkpoint.config.linear_params
    head = checkpoint.config.vocab_size * 256
    # v_proj has 4 bits, and shares its product with q_proj and k_proj, which have 8.
    assert weight_bytes(checkpoint, checkpoint.scheme) == pytest.approx(1.0625 * linear + 3 * head)
    linears = Linears(checkpoint, "cpu", torch.float32, native=True)
    made = linears.linear([f"model.layers.0.self_attn.{n}_proj.weight" for n in "qkv"], None)
    assert made.packed[12] == 8  # in its header
    assert linears.weight_bytes() == weight_bytes(checkpoint, checkpoint.scheme)


@torch.no_grad()
def test_a_written_folder_keeps_the_mix_and_the_embedding(tmp_path):
    write_gguf(tmp_path / "m.gguf", wide_model(), q4_k_m)
    checkpoint = with_scheme(open_checkpoint(tmp_path / "m.gguf"), "int4")
    (tmp_path / "out").mkdir()
    write_folder(tmp_path / "out", checkpoint, checkpoint.scheme)
    folder = StoredFolder(tmp_path / "out")
    for name in (n for n in checkpoint.names() if "_proj" in n):
        assert folder.bits(name) == checkpoint.bits(name)
        assert torch.equal(folder.load(name), checkpoint.packed(name).dequantize()), name
    assert weight_bytes(folder, folder.scheme) == weight_bytes(checkpoint, folder.scheme)

    # 8 bits do not hold Q6_K exactly; the LM head runs in them from the file, too.
    assert torch.equal(folder.load(EMBEDDING), checkpoint.load(EMBEDDING))
    assert folder.bits("lm_head.weight") == 8


def test_rows_of_no_whole_blocks_in_a_file(tmp_path):
    """250 columns instead of 256 in the header of a Q6_K tensor."""
    path = tmp_path / "m.gguf"
    write_gguf(path, wide_model(), q4_k_m)
    name = b"blk.0.attn_v.weight"
    data = bytearray(path.read_bytes())
    at = data.index(name) + len(name) + 4  # after the number of dimensions
    assert int.from_bytes(data[at : at + 8], "little") == 256
    path.write_bytes(data[:at] + (250).to_bytes(8, "little") + data[at + 8 :])
    with pytest.raises(FasteagleError, match=r"^[^\n]*m\.gguf: [^\n]*$"):
        GGUFFile(path)
