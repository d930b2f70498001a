"""Weights of other tools: every format packed here by plain loops, and read back exactly."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize as gguf_dequantize
from safetensors.torch import load_file, save_file

from fasteagle.errors import FasteagleError
from fasteagle.loading.checkpoint import check_complete, load_model, open_checkpoint
from fasteagle.loading.imported import QuantizedFolder, open_quantized
from fasteagle.loading.tensors import SafetensorsFolder, expected_shapes, fingerprint
from fasteagle.quant.formats import (
    WAY_OUT,
    from_awq,
    from_compressed_tensors,
    from_gptq,
    gptq_zero_offset,
)
from fasteagle.quant.gguf_blocks import from_gguf_blocks
from helpers import edit_json

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
}
GROUP = 32
LINEARS = {
    f"model.layers.{i}.{name}": shape
    for i in range(2)
    for name, shape in {
        "self_attn.q_proj": (128, 128),
        "self_attn.k_proj": (64, 128),
        "self_attn.v_proj": (64, 128),
        "self_attn.o_proj": (128, 128),
        "mlp.gate_proj": (256, 128),
        "mlp.up_proj": (256, 128),
        "mlp.down_proj": (128, 256),
    }.items()
}
Q_PROJ = "model.layers.0.self_attn.q_proj"


@dataclasses.dataclass
class Oracle:
    """A quantized weight spelled out: unsigned q [N, K], zeros [N, G], and each column's group."""

    bits: int
    q: np.ndarray
    scales: torch.Tensor  # [N, G]
    zeros: np.ndarray
    groups: np.ndarray  # [K]

    def weight(self) -> torch.Tensor:
        scales = self.scales.float().numpy()
        out = np.empty(self.q.shape, dtype=np.float32)
        for k, group in enumerate(self.groups):
            levels = (self.q[:, k] - self.zeros[:, group]).astype(np.float32)
            out[:, k] = levels * scales[:, group]
        return torch.from_numpy(out)


def make(
    N: int,
    K: int,
    *,
    bits: int = 4,
    group: int = GROUP,
    zeros: tuple[int, int] = (0, 15),
    act_order: bool = False,
    dtype: torch.dtype = torch.float16,
    seed: int = 0,
) -> Oracle:
    rng = np.random.default_rng((seed, N, K))
    G = K // group
    groups = np.arange(K) // group
    if act_order:
        rng.shuffle(groups)
    scales = torch.from_numpy(rng.uniform(0.001, 0.1, (N, G))).to(dtype)
    return Oracle(
        bits,
        rng.integers(0, 2**bits, (N, K)),
        scales,
        rng.integers(zeros[0], zeros[1] + 1, (N, G)),
        groups,
    )


def words(fields: list[int], bits: int, order: tuple[int, ...] | None = None) -> list[int]:
    """Fields into int32 words, the first in the lowest bits, or in the given order."""
    per_word = 32 // bits
    fields = fields + [0] * (-len(fields) % per_word)
    packed = []
    for start in range(0, len(fields), per_word):
        word = 0
        for i in range(per_word):
            field = int(fields[start + (order[i] if order else i)])
            assert 0 <= field < 2**bits
            word |= field << (bits * i)
        packed.append(word - 2**32 if word >= 2**31 else word)
    return packed


def word_rows(values: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Each row of `values` packed along itself."""
    rows = [words([int(v) for v in row], bits, order) for row in values]
    return torch.tensor(rows, dtype=torch.int32)


def gptq_parts(oracle: Oracle, less: int = 1, g_idx: bool = True) -> dict[str, torch.Tensor]:
    """`less` 1: zeros stored less one (v1), 0: as they are (v2)."""
    parts = {
        "qweight": word_rows(oracle.q, oracle.bits).T.contiguous(),
        "qzeros": word_rows(oracle.zeros.T - less, oracle.bits),
        "scales": oracle.scales.T.contiguous(),
    }
    if g_idx:
        parts["g_idx"] = torch.from_numpy(oracle.groups).to(torch.int32)
    return parts


AWQ_NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)


def awq_parts(oracle: Oracle) -> dict[str, torch.Tensor]:
    return {
        "qweight": word_rows(oracle.q.T, 4, AWQ_NIBBLES),
        "qzeros": word_rows(oracle.zeros.T, 4, AWQ_NIBBLES),
        "scales": oracle.scales.T.contiguous(),
    }


def compressed_parts(
    oracle: Oracle, zero_point: str | None = "packed", g_idx: bool = False
) -> dict[str, torch.Tensor]:
    midpoint = 2 ** (oracle.bits - 1)
    parts = {
        "weight_packed": word_rows(oracle.q, oracle.bits),
        "weight_scale": oracle.scales,
        "weight_shape": torch.tensor(oracle.q.shape),
    }
    if zero_point == "packed":
        parts["weight_zero_point"] = word_rows(oracle.zeros.T, oracle.bits).T.contiguous()
    elif zero_point == "int8":
        parts["weight_zero_point"] = torch.from_numpy(oracle.zeros - midpoint).to(torch.int8)
    if g_idx:
        parts["weight_g_idx"] = torch.from_numpy(oracle.groups).to(torch.int32)
    return parts


def gptq_settings(**changes) -> dict:
    base = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": False}
    return {**base, **changes}


def awq_settings(**changes) -> dict:
    base = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": GROUP,
        "zero_point": True,
        "version": "gemm",
    }
    return {**base, **changes}


def compressed_settings(weights: dict | None = None, group: dict | None = None, **changes) -> dict:
    scheme = {
        "num_bits": 4,
        "type": "int",
        "strategy": "group",
        "group_size": GROUP,
        "symmetric": False,
    }
    entry = {
        "targets": ["Linear"],
        "weights": {**scheme, **(weights or {})},
        "input_activations": None,
        "output_activations": None,
        **(group or {}),
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": entry},
        **changes,
    }


# How each case makes a weight, packs it, and describes itself in config.json.
CASES = {
    "gptq": ({"zeros": (1, 16)}, gptq_parts, gptq_settings()),
    "gptq-no-g_idx": (
        {"zeros": (1, 16)},
        lambda o: gptq_parts(o, g_idx=False),
        gptq_settings(checkpoint_format="gptq"),
    ),
    "gptq-v2": ({}, lambda o: gptq_parts(o, less=0), gptq_settings(checkpoint_format="gptq_v2")),
    "gptq-act-order": (
        {"zeros": (1, 16), "act_order": True},
        gptq_parts,
        gptq_settings(desc_act=True),
    ),
    "gptq-row": ({"zeros": (1, 16), "group": 0}, gptq_parts, gptq_settings(group_size=-1)),
    "gptq-8bit": ({"bits": 8, "zeros": (128, 128)}, gptq_parts, gptq_settings(bits=8, sym=True)),
    "gptq-mislabelled": (
        {"zeros": (8, 8)},
        lambda o: gptq_parts(o, less=0),
        gptq_settings(sym=True, checkpoint_format="gptq"),
    ),
    "awq": ({}, awq_parts, awq_settings()),
    "compressed": ({"dtype": torch.bfloat16}, compressed_parts, compressed_settings()),
    "compressed-int8-zeros": ({}, lambda o: compressed_parts(o, "int8"), compressed_settings()),
    "compressed-symmetric": (
        {"zeros": (8, 8)},
        lambda o: compressed_parts(o, None),
        compressed_settings({"symmetric": True}),
    ),
    "compressed-act-order": (
        {"act_order": True},
        lambda o: compressed_parts(o, g_idx=True),
        compressed_settings({"actorder": "group"}),
    ),
    "compressed-channel": (
        {"group": 0},
        compressed_parts,
        compressed_settings({"strategy": "channel", "group_size": None}),
    ),
    "compressed-8bit": (
        {"bits": 8, "zeros": (128, 128)},
        lambda o: compressed_parts(o, None),
        compressed_settings({"num_bits": 8, "symmetric": True}),
    ),
}


def plain_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    tensors = {
        "model.embed_tokens.weight": torch.randn(64, 128).half(),
        "lm_head.weight": torch.randn(64, 128).half(),
        "model.norm.weight": torch.rand(128).half(),
    }
    for i in range(2):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{i}.{norm}.weight"] = torch.rand(128).half()
    return tensors


def write_case(folder: Path, case: str) -> dict[str, Oracle]:
    """A whole folder in the format `case`; returns what it holds by weight name."""
    recipe, pack, settings = CASES[case]
    tensors, oracles = plain_tensors(), {}
    for seed, (linear, (N, K)) in enumerate(LINEARS.items()):
        oracle = make(N, K, seed=seed, **{**recipe, "group": recipe.get("group", GROUP) or K})
        oracles[f"{linear}.weight"] = oracle
        tensors |= {f"{linear}.{part}": value for part, value in pack(oracle).items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": settings}))
    return oracles


def open_folder(folder: Path) -> QuantizedFolder:
    return open_quantized(folder, json.loads((folder / "config.json").read_text()))


@pytest.fixture(scope="module", params=CASES)
def written(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("formats") / request.param
    return request.param, folder, write_case(folder, request.param)


def test_packed_values_scales_and_zeros_are_exact(written):
    case, folder, oracles = written
    opened = open_folder(folder)
    for name, oracle in oracles.items():
        weight, columns = opened.packed(name), opened.columns(name)
        q = torch.from_numpy(oracle.q)
        if case.endswith("act-order"):
            assert columns is not None
            groups = torch.from_numpy(oracle.groups)[columns]
            assert torch.equal(groups, groups.sort().values)
            for group in range(len(oracle.groups) // GROUP):  # stable: rising within a group
                assert columns[groups == group].diff().min() > 0
            q = q[:, columns]
        else:
            assert columns is None
        signed = q - 128 if oracle.bits == 8 else q
        assert torch.equal(weight.values().long(), signed)
        assert weight.scales.dtype == oracle.scales.dtype
        assert torch.equal(weight.scales, oracle.scales)
        if oracle.bits == 4:
            assert torch.equal(weight.zeros.long(), torch.from_numpy(oracle.zeros))
        expected = oracle.weight() if columns is None else oracle.weight()[:, columns]
        assert torch.equal(weight.dequantize(), expected)


def test_loads_as_a_checkpoint(written):
    case, folder, oracles = written
    opened = open_folder(folder)
    assert opened.names() == set(expected_shapes(opened.config))
    check_complete(opened, "folder")
    for name, oracle in oracles.items():
        assert opened.shape(name) == oracle.q.shape
        assert torch.equal(opened.load(name), oracle.weight())
    for name, tensor in plain_tensors().items():
        assert torch.equal(opened.load(name), tensor)
        assert opened.packed(name) is None
        assert opened.columns(name) is None
    group = 0 if case in ("gptq-row", "compressed-channel") else GROUP
    scheme = opened.scheme
    assert (scheme.bits, scheme.group_size) == (8 if "8bit" in case else 4, group)
    assert (scheme.method, scheme.head_bits) == ("own", 16)


def test_start_is_the_beginning_and_cheaper(written):
    _, folder, oracles = written
    opened = open_folder(folder)
    for name, oracle in oracles.items():
        N, K = oracle.q.shape
        start = opened.start(name, K + 1)
        assert start.shape == (8, K)  # two rows, rounded up to those of a word
        assert torch.equal(start, oracle.weight()[:8])
        assert opened.start(name, N * K).shape == (N, K)
    assert torch.equal(
        opened.start("model.norm.weight", 5), plain_tensors()["model.norm.weight"][:5]
    )


def test_fingerprint_and_loaded_model_equal_the_dense_one(written, tmp_path):
    _, folder, oracles = written
    dense = plain_tensors() | {name: oracle.weight() for name, oracle in oracles.items()}
    save_file(dense, tmp_path / "model.safetensors")
    opened = open_folder(folder)
    plain = SafetensorsFolder(tmp_path, opened.config)
    assert fingerprint(opened) == fingerprint(plain)
    a, b = (
        load_model(c, dtype=torch.float32, device="cpu", max_seq_len=16).state_dict()
        for c in (opened, plain)
    )
    assert a.keys() == b.keys()
    assert all(torch.equal(a[key], b[key]) for key in a)


# Words written out by hand, so that packer and importer cannot share a mistake.


def test_a_gptq_word():
    qweight = torch.tensor([[0x76543210], [0x01234567]], dtype=torch.int32).repeat(1, 8)
    qzeros = torch.tensor([[0x76543210]], dtype=torch.int32)
    weight, columns = from_gptq(qweight, qzeros, torch.ones(1, 8), zero_offset=1)
    assert weight.values()[5].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 7, 6, 5, 4, 3, 2, 1, 0]
    assert weight.zeros.flatten().tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert columns is None


@pytest.mark.parametrize("K", [8, 16])
@pytest.mark.parametrize("N", [8, 16])
def test_weights_of_one_word_either_way(N, K):
    oracle = make(N, K, group=K, zeros=(1, 15))
    parts = gptq_parts(oracle)
    assert torch.equal(from_gptq(**parts, zero_offset=1).dequantize(), oracle.weight())
    assert torch.equal(from_awq(**awq_parts(oracle)).dequantize(), oracle.weight())
    parts = compressed_parts(oracle)
    weight, _ = from_compressed_tensors(
        parts["weight_packed"], oracle.scales, (N, K), parts["weight_zero_point"]
    )
    assert torch.equal(weight.dequantize(), oracle.weight())


@pytest.mark.parametrize(("zero_offset", "zero"), [(1, 16), (0, 15)])
def test_a_stored_zero_of_fifteen_does_not_wrap(zero_offset, zero):
    qweight, qzeros = torch.zeros(4, 8, dtype=torch.int32), torch.tensor([[-1]], dtype=torch.int32)
    weight, _ = from_gptq(qweight, qzeros, torch.ones(1, 8), zero_offset=zero_offset)
    assert weight.zeros.flatten().tolist() == [zero] * 8
    assert weight.dequantize().unique().tolist() == [-zero]


def test_an_awq_word():
    qweight = torch.tensor([[0x75316420]] * 4, dtype=torch.int32)
    qzeros = torch.tensor([[0x00000010]], dtype=torch.int32)  # the second nibble: column 2
    weight = from_awq(qweight, qzeros, torch.ones(1, 8))
    assert weight.values().tolist() == [[n] * 4 for n in range(8)]
    assert weight.zeros.flatten().tolist() == [0, 0, 1, 0, 0, 0, 0, 0]


def test_a_compressed_tensors_word():
    packed = torch.tensor([[0x76543210]], dtype=torch.int32)
    weight, _ = from_compressed_tensors(packed, torch.ones(1, 1), (1, 8))
    assert weight.dequantize().tolist() == [[-8, -7, -6, -5, -4, -3, -2, -1]]


def test_compressed_tensors_padding_is_cut():
    oracle = make(12, 36, group=12)
    parts = compressed_parts(oracle)
    assert parts["weight_packed"].shape == (12, 5)
    assert parts["weight_zero_point"].shape == (2, 3)
    weight, _ = from_compressed_tensors(
        parts["weight_packed"], parts["weight_scale"], (12, 36), parts["weight_zero_point"]
    )
    assert torch.equal(weight.dequantize(), oracle.weight())


def test_compressed_tensors_unused_g_idx():
    oracle = make(8, 64)
    parts = compressed_parts(oracle)
    unused = torch.full((64,), -1, dtype=torch.int32)
    weight, columns = from_compressed_tensors(
        parts["weight_packed"], oracle.scales, (8, 64), parts["weight_zero_point"], unused
    )
    assert columns is None
    assert torch.equal(weight.dequantize(), oracle.weight())


@pytest.mark.parametrize(
    ("stored", "v2", "sym", "offset"),
    [
        ([8, 8, 8], False, True, 0),  # v2 labelled gptq
        ([7, 7, 7], True, True, 1),  # the other way round
        ([7, 7, 7], False, True, 1),
        ([8, 8, 8], True, True, 0),
        ([8, 8, 8], False, False, 1),  # asymmetric: the label decides
        ([7, 7, 7], True, False, 0),
        ([8, 7, 8], False, True, 1),
        ([8, 7, 8], True, True, 0),
    ],
)
def test_gptq_zero_offset(stored, v2, sym, offset):
    qzeros = word_rows(np.array(stored).repeat(8)[None], 4)
    assert gptq_zero_offset(qzeros, bits=4, v2=v2, sym=sym) == offset


@pytest.mark.parametrize(("stored", "offset"), [(128, 0), (127, 1), (200, 1)])
def test_gptq_zero_offset_of_8_bits(stored, offset):
    qzeros = word_rows(np.full((2, 8), stored), 8)
    assert gptq_zero_offset(qzeros, bits=8, v2=False, sym=True) == offset


# GGUF blocks.


def gguf_rows(kind: str, N: int, n_blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """(raw bytes [N, row bytes], q [N, K]) with fp16 parameters of every sort, packed by loops."""
    rng = np.random.default_rng(len(kind) + N)
    special = np.array([0.0, -0.0, 6e-8, -3e-5, 65504.0, -1.0], dtype=np.float16)
    low, high = (-128, 128) if kind == "Q8_0" else (0, 16)
    q = rng.integers(low, high, (N, n_blocks, 32))
    raw = bytearray()
    for n, block in np.ndindex(N, n_blocks):
        d = special[(n + block) % 6] if block % 2 else np.float16(rng.normal())
        raw += d.tobytes()
        if kind == "Q4_1":
            raw += np.float16(rng.normal()).tobytes()
        values = [int(v) for v in q[n, block]]
        if kind == "Q8_0":
            raw += bytes(v & 255 for v in values)
        else:
            raw += bytes(values[i] | values[i + 16] << 4 for i in range(16))
    return np.frombuffer(bytes(raw), dtype=np.uint8).reshape(N, -1).copy(), q.reshape(N, -1)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_gguf_blocks_are_bit_equal_to_gguf(kind):
    raw, q = gguf_rows(kind, 12, 6)
    weight = from_gguf_blocks(torch.from_numpy(raw), kind)
    assert (weight.group_size, weight.bits) == (32, 8 if kind == "Q8_0" else 4)
    assert torch.equal(weight.values().long(), torch.from_numpy(q))
    assert weight.scales.dtype == torch.float16
    expected = gguf_dequantize(raw, GGMLQuantizationType[kind])
    assert np.array_equal(weight.dequantize().numpy().view(np.int32), expected.view(np.int32))


@pytest.mark.parametrize("kind", ["TQ1_0", "MXFP4", "IQ2_XS"])
def test_other_gguf_types_are_refused(kind):
    with pytest.raises(FasteagleError, match=f"^GGUF {kind} weights are not supported: use the "):
        from_gguf_blocks(torch.zeros(2, 144, dtype=torch.uint8), kind)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q6_K", "IQ4_XS"])
@pytest.mark.parametrize("shape", [(2, 19), (36,), (2, 1000)])
def test_gguf_rows_of_no_whole_blocks(kind, shape):
    with pytest.raises(FasteagleError, match=rf"^[^\n]*no rows of {kind} blocks[^\n]*$"):
        from_gguf_blocks(torch.zeros(shape, dtype=torch.uint8), kind)


# Refusals.


@pytest.mark.parametrize(
    ("settings", "words_expected"),
    [
        ({"quant_method": "exl2", "bits": 4.0}, "EXL2"),
        ({"quant_method": "exl3"}, "EXL3"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes (NF4"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "bitsandbytes (NF4"),
        ({"quant_method": "hqq"}, "HQQ"),
        ({"quant_method": "aqlm"}, "AQLM"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "torchao"}, "torchao-serialized"),
        ({"quant_method": "auto-round"}, "AutoRound"),
        ({"quant_method": "marlin"}, "Marlin-serialized"),
        ({"quant_method": "brand-new"}, "'brand-new'"),
        ({"bits": 4}, "'unknown'"),
        (gptq_settings(bits=2), "2-bit GPTQ"),
        (gptq_settings(bits=3), "3-bit GPTQ"),
        (gptq_settings(checkpoint_format="marlin"), "GPTQ weights in marlin layout"),
        (gptq_settings(is_marlin_format=True), "GPTQ weights in marlin layout"),
        (gptq_settings(format="bitblas"), "GPTQ weights in bitblas layout"),
        (gptq_settings(dynamic={"+:.*down.*": {"bits": 8}}), "dynamic"),
        (awq_settings(version="GEMV"), "AWQ weights in gemv layout"),
        (awq_settings(version="gemv_fast"), "AWQ weights in gemv_fast layout"),
        (awq_settings(version="marlin"), "AWQ weights in marlin layout"),
        (awq_settings(backend="llm-awq"), "AWQ weights in llm-awq layout"),
        (awq_settings(bits=3), "3-bit AWQ"),
        (compressed_settings(format="float-quantized"), "compressed-tensors float-quantized"),
        (compressed_settings(format="marlin-24"), "compressed-tensors marlin-24"),
        (compressed_settings(group={"format": "nvfp4-pack-quantized"}), "nvfp4-pack-quantized"),
        (compressed_settings({"num_bits": 2}), "2-bit int"),
        (compressed_settings({"type": "float"}), "4-bit float"),
        (compressed_settings({"strategy": "tensor"}), "by tensor"),
        (compressed_settings(group={"input_activations": {"num_bits": 8}}), "activations"),
        (compressed_settings(group={"weights": None}), "without a scheme"),
        (compressed_settings(config_groups={}), "without a scheme"),
        (compressed_settings(kv_cache_scheme={"num_bits": 8}), "KV cache"),
        (compressed_settings(transform_config={"config_groups": {"u": {}}}), "rotations"),
        (compressed_settings(sparsity_config={"format": "sparse-24-bitmask"}), "sparse"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_formats_without_an_exact_import_are_refused_by_name(settings, words_expected, tmp_path):
    with pytest.raises(FasteagleError) as caught:
        open_quantized(tmp_path, {**CONFIG, "quantization_config": settings})
    message = str(caught.value)
    assert message.startswith(f"{tmp_path}: ")
    assert words_expected in message
    assert message.endswith(WAY_OUT)
    assert "\n" not in message


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            compressed_settings(config_groups={"W4A16": ["Linear"]}),
            'W4A16 is ["Linear"]: must be a',
        ),
        (compressed_settings({"num_bits": "4"}), 'weights.num_bits is "4": must be an integer'),
        (gptq_settings(bits=[4]), "bits is [4]: must be an integer"),
        (gptq_settings(group_size="x"), 'group_size is "x": must be an integer'),
        (gptq_settings(dynamic=5), "dynamic is 5: must be a JSON object"),
    ],
)
def test_settings_of_a_wrong_type(settings, message, tmp_path):
    with pytest.raises(FasteagleError) as caught:
        open_quantized(tmp_path, {**CONFIG, "quantization_config": settings})
    assert str(caught.value).startswith(f"{tmp_path}: quantization_config: ")
    assert message in str(caught.value)


def test_settings_that_change_nothing_are_accepted(tmp_path):
    write_case(tmp_path, "compressed-symmetric")
    same = compressed_settings(
        {"symmetric": True},
        {"format": "pack-quantized"},
        format="mixed-precision",
        sparsity_config={"format": "dense"},
        transform_config={},
        kv_cache_scheme=None,
    )
    edit_json(tmp_path / "config.json", quantization_config=same)
    open_folder(tmp_path)
    write_case(tmp_path, "gptq")
    same = gptq_settings(dynamic={"-:.*lm_head.*": {}}, format="gptq")
    edit_json(tmp_path / "config.json", quantization_config=same)
    open_folder(tmp_path)
    write_case(tmp_path, "awq")
    old = {"quant_method": "awq", "w_bit": 4, "q_group_size": GROUP, "version": "GEMM"}
    edit_json(tmp_path / "config.json", quantization_config=old)
    open_folder(tmp_path)


# quantize_config.json, biases, a packed LM head.


def test_quantize_config_json_fills_in(tmp_path):
    oracles = write_case(tmp_path, "gptq-v2")
    edit_json(tmp_path / "config.json", quantization_config=gptq_settings())
    beside = tmp_path / "quantize_config.json"
    beside.write_text(json.dumps({"checkpoint_format": "gptq_v2", "bits": 2}))
    weight = oracles[f"{Q_PROJ}.weight"].weight()
    assert torch.equal(open_folder(tmp_path).load(f"{Q_PROJ}.weight"), weight)
    beside.write_text(json.dumps(gptq_settings(checkpoint_format="gptq_v2")))
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["quantization_config"]  # older folders say it only beside
    assert torch.equal(open_quantized(tmp_path, raw).load(f"{Q_PROJ}.weight"), weight)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    found = open_checkpoint(tmp_path)  # what every command opens a folder by
    assert torch.equal(found.load(f"{Q_PROJ}.weight"), weight)


def change_tensors(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_zero_biases_of_linears_without_bias_are_dropped(tmp_path):
    write_case(tmp_path, "gptq")
    change_tensors(tmp_path, lambda t: t.update({f"{Q_PROJ}.bias": torch.zeros(128).half()}))
    check_complete(open_folder(tmp_path), "folder")
    change_tensors(tmp_path, lambda t: t[f"{Q_PROJ}.bias"].index_fill_(0, torch.tensor([7]), 0.5))
    with pytest.raises(FasteagleError, match=r"unknown .*q_proj\.bias"):
        check_complete(open_folder(tmp_path), "folder")


def test_zero_biases_that_the_model_has_are_kept(tmp_path):
    write_case(tmp_path, "gptq")
    edit_json(tmp_path / "config.json", architectures=["Qwen2ForCausalLM"])
    biases = {f"{n}.bias": torch.zeros(LINEARS[n][0]) for n in LINEARS if n[-6:-5] in "qkv"}
    assert len(biases) == 6
    change_tensors(tmp_path, lambda t: t.update(biases))
    opened = open_folder(tmp_path)
    check_complete(opened, "folder")
    assert biases.keys() <= opened.names()


def test_a_packed_lm_head(tmp_path):
    write_case(tmp_path, "gptq")
    oracle = make(64, 128, zeros=(1, 16), seed=99)

    def change(tensors):
        del tensors["lm_head.weight"]
        tensors |= {f"lm_head.{part}": value for part, value in gptq_parts(oracle).items()}

    change_tensors(tmp_path, change)
    opened = open_folder(tmp_path)
    check_complete(opened, "folder")
    assert torch.equal(opened.packed("lm_head.weight").dequantize(), oracle.weight())
    assert opened.scheme.head_bits == 4


# Damage.


def drop(part):
    return lambda t: t.pop(f"{Q_PROJ}.{part}")


def put(part, value):
    def change(tensors):
        key = f"{Q_PROJ}.{part}"
        tensors[key] = value(tensors[key]) if callable(value) else value

    return change


@pytest.mark.parametrize(
    ("case", "change", "expected"),
    [
        ("gptq", drop("scales"), "missing .*q_proj.scales"),
        ("gptq", drop("qweight"), "missing .*q_proj.qweight"),
        ("awq", drop("qzeros"), "missing .*q_proj.qzeros"),
        ("compressed", drop("weight_scale"), "missing .*q_proj.weight_scale"),
        ("compressed", drop("weight_shape"), "missing .*q_proj.weight_shape"),
        ("compressed", drop("weight_zero_point"), "missing .*q_proj.weight_zero_point"),
        ("compressed-act-order", drop("weight_g_idx"), "missing .*q_proj.weight_g_idx"),
        ("gptq-act-order", drop("g_idx"), "missing .*q_proj.g_idx"),
        ("gptq", put("scales", lambda t: t[:, :64]), "shapes do not fit"),
        ("gptq", put("scales", lambda t: t[0]), "shapes do not fit"),
        ("gptq", put("scales", lambda t: t[:0]), "shapes do not fit"),
        ("gptq", put("qzeros", lambda t: t[:2]), "shapes do not fit"),
        ("gptq", put("qzeros", lambda t: t[:, :12]), "3-bit GPTQ"),
        ("gptq", put("qweight", lambda t: t[:8]), "is 4-bit g16, where config.json says 4-bit g32"),
        ("gptq", put("qweight", lambda t: t[:15]), "is 4-bit g30, where"),
        ("gptq", put("qweight", lambda t: t.long()), r"qweight words of torch\.int64"),
        ("gptq", put("scales", lambda t: t.to(torch.int16)), r"scales of torch\.int16"),
        ("gptq", put("g_idx", lambda t: t[:64]), r"g_idx \(64,\) does not put 128"),
        ("gptq", put("g_idx", lambda t: t.clamp(max=2)), "g_idx .* does not put 128"),
        ("gptq-8bit", put("qzeros", lambda t: t + 1), "asymmetric 8-bit GPTQ"),
        ("awq", put("scales", lambda t: t.T.contiguous()), "shapes do not fit"),
        ("awq", put("qweight", lambda t: t[:100]), "4-bit g25"),
        ("awq", put("qweight", lambda t: t[:, :8]), "shapes do not fit"),
        ("awq", put("qzeros", lambda t: t[:, :8]), "shapes do not fit"),
        ("compressed", put("weight_shape", torch.tensor([128, 96])), "shapes do not fit"),
        ("compressed", put("weight_shape", torch.tensor([128])), "shapes do not fit"),
        ("compressed", put("weight_scale", lambda t: t[:, :3]), "shapes do not fit"),
        ("compressed", put("weight_scale", lambda t: t[:, :2]), "is 4-bit g64, where"),
        ("compressed", put("weight_zero_point", lambda t: t[:8]), "weight_zero_point is torch.int"),
        ("compressed", put("weight_packed", lambda t: t[:64]), "shapes do not fit"),
        ("compressed", put("weight", torch.zeros(128, 128)), "q_proj.weight is there unpacked"),
    ],
)
def test_damaged_folders(case, change, expected, tmp_path):
    write_case(tmp_path, case)

    def put_or_drop(tensors):
        tensors.setdefault(f"{Q_PROJ}.weight", torch.zeros(1))
        change(tensors)
        if tensors[f"{Q_PROJ}.weight"].shape == (1,):
            del tensors[f"{Q_PROJ}.weight"]
        tensors.update({key: value.contiguous() for key, value in tensors.items()})

    change_tensors(tmp_path, put_or_drop)
    with pytest.raises(FasteagleError, match=expected) as caught:
        open_folder(tmp_path).load(f"{Q_PROJ}.weight")
    message = str(caught.value)
    assert message.startswith(f"{tmp_path}: ")
    assert "q_proj" in message
    assert "\n" not in message


def test_damaged_g_idx_is_named_by_columns_too(tmp_path):
    write_case(tmp_path, "gptq")
    change_tensors(tmp_path, lambda t: t[f"{Q_PROJ}.g_idx"].clamp_(max=2))
    with pytest.raises(FasteagleError, match=r"q_proj\.weight: g_idx"):
        open_folder(tmp_path).columns(f"{Q_PROJ}.weight")


def test_config_that_contradicts_the_tensors(tmp_path):
    write_case(tmp_path, "gptq")
    for settings, said in ((gptq_settings(group_size=64), "g64"), (gptq_settings(bits=8), "8-bit")):
        edit_json(tmp_path / "config.json", quantization_config=settings)
        with pytest.raises(FasteagleError, match=f"4-bit g32, where config.json says .*{said}"):
            open_folder(tmp_path)


def test_blocks_of_two_kinds_are_refused(tmp_path):
    write_case(tmp_path, "compressed")
    other = make(128, 128, group=64, dtype=torch.bfloat16)

    def change(tensors):
        tensors |= {f"{Q_PROJ}.{part}": value for part, value in compressed_parts(other).items()}

    change_tensors(tmp_path, change)
    settings = compressed_settings()
    wider = compressed_settings({"group_size": 64})["config_groups"]["group_0"]
    settings["config_groups"]["group_1"] = wider
    edit_json(tmp_path / "config.json", quantization_config=settings)
    with pytest.raises(FasteagleError, match="blocks of 4-bit g32 and 4-bit g64 weights"):
        open_folder(tmp_path)


def test_folders_without_packed_tensors_or_files(tmp_path):
    raw = {**CONFIG, "quantization_config": gptq_settings()}
    with pytest.raises(FasteagleError, match="safetensors: none here"):
        open_quantized(tmp_path, raw)
    save_file(plain_tensors(), tmp_path / "model.safetensors")
    with pytest.raises(FasteagleError, match=r"there is no \*\.qweight"):
        open_quantized(tmp_path, raw)
    with pytest.raises(FasteagleError, match="not a JSON object"):
        open_quantized(tmp_path, {**CONFIG, "quantization_config": ["gptq"]})


def test_only_the_lm_head_packed_is_refused(tmp_path):
    oracle = make(64, 128, zeros=(1, 16))
    tensors = plain_tensors() | {f"lm_head.{p}": v for p, v in gptq_parts(oracle).items()}
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(FasteagleError, match="blocks without packed weights"):
        open_quantized(tmp_path, {**CONFIG, "quantization_config": gptq_settings()})
