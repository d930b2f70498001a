"""Weights of other tools: every format packed by plain loops, and read back exactly."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fasteagle.errors import FasteagleError
from fasteagle.loading.checkpoint import check_complete, load_model, open_checkpoint
from fasteagle.loading.imported import QuantizedFolder
from fasteagle.loading.layouts import CompressedTensorsLayout
from fasteagle.loading.names import expected_shapes
from fasteagle.loading.source import Linears
from fasteagle.loading.tensors import WeightsFolder
from fasteagle.quant import cpu_build
from fasteagle.quant.formats import WAY_OUT
from helpers import change_tensors, edit_json
from quantized_folders import (
    CASES,
    CONFIG,
    GROUP,
    LINEARS,
    Q_PROJ,
    awq_settings,
    compressed_parts,
    compressed_settings,
    gptq_parts,
    gptq_settings,
    make,
    plain_tensors,
    write_case,
)


def open_folder(folder: Path) -> QuantizedFolder:
    return QuantizedFolder(folder, json.loads((folder / "config.json").read_text()))


@pytest.mark.parametrize("case", CASES)
def test_every_format_is_read_exactly(case, tmp_path):
    oracles = write_case(tmp_path, case)
    opened = open_folder(tmp_path)
    assert opened.names() == set(expected_shapes(opened.config))
    check_complete(opened, "folder")
    for name, oracle in oracles.items():
        weight, columns = opened.packed(name), opened.columns(name)
        q, expected = torch.from_numpy(oracle.q), oracle.weight()
        assert opened.shape(name) == q.shape and torch.equal(opened.load(name), expected)
        start = opened.start(name, q.shape[1] + 1)
        assert torch.equal(start, expected[:8])  # two rows, rounded up to those of a word
        assert opened.start(name, q.numel()).shape == q.shape
        assert (columns is not None) == case.endswith("act-order")
        if columns is not None:
            groups = torch.from_numpy(oracle.groups)[columns]
            assert torch.equal(groups, groups.sort().values)
            for group in range(len(oracle.groups) // GROUP):  # stable: rising within a group
                assert columns[groups == group].diff().min() > 0
            q, expected = q[:, columns], expected[:, columns]
        assert torch.equal(weight.values().long(), q - 128 if oracle.bits == 8 else q)
        assert weight.scales.dtype == oracle.scales.dtype
        assert torch.equal(weight.scales, oracle.scales)
        if oracle.bits == 4:
            assert torch.equal(weight.zeros.long(), torch.from_numpy(oracle.zeros))
        assert torch.equal(weight.dequantize(), expected)
    group = 0 if case in ("gptq-row", "compressed-channel") else GROUP
    scheme = opened.scheme
    assert (scheme.bits, scheme.group_size) == (8 if "8bit" in case else 4, group)
    assert (scheme.method, scheme.head_bits) == ("own", 16)


@pytest.mark.parametrize("order", [None, False, "weight", "static", True, "group", "dynamic"])
def test_compressed_weights_in_act_order_need_their_groups(order):
    layout = CompressedTensorsLayout({"config_groups": {"0": {"weights": {"actorder": order}}}})
    assert ("weight_g_idx" in layout.required) == (order in (True, "group", "dynamic"))


@pytest.mark.parametrize("case", ["gptq-act-order", "awq", "compressed-8bit"])
def test_fingerprint_and_loaded_model_equal_the_dense_one(case, tmp_path):
    oracles = write_case(tmp_path / "packed", case)
    dense = plain_tensors() | {name: oracle.weight() for name, oracle in oracles.items()}
    save_file(dense, tmp_path / "model.safetensors")
    opened = open_folder(tmp_path / "packed")
    plain = WeightsFolder(tmp_path, opened.config)
    assert opened.fingerprint == plain.fingerprint
    a, b = (
        load_model(c, dtype=torch.float32, device="cpu", max_seq_len=16).state_dict()
        for c in (opened, plain)
    )
    assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


# Refusals.


@pytest.mark.parametrize(
    ("settings", "words_expected"),
    [
        ({"quant_method": "exl2", "bits": 4.0}, "'exl2' weights"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "'bitsandbytes' weights"),
        ({"quant_method": "brand-new"}, "'brand-new'"),
        ({"bits": 4}, "'unknown'"),
        (gptq_settings(bits=3), "3-bit GPTQ"),
        (gptq_settings(checkpoint_format="marlin"), "GPTQ weights in marlin layout"),
        (gptq_settings(is_marlin_format=True), "GPTQ weights in marlin layout"),
        (gptq_settings(format="bitblas"), "GPTQ weights in bitblas layout"),
        (gptq_settings(dynamic={"+:.*down.*": {"bits": 8}}), "dynamic"),
        (awq_settings(version="GEMV"), "AWQ weights in gemv layout"),
        (awq_settings(backend="llm-awq"), "AWQ weights in llm-awq layout"),
        (awq_settings(bits=3), "3-bit AWQ"),
        (compressed_settings(format="float-quantized"), "compressed-tensors float-quantized"),
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
        QuantizedFolder(tmp_path, {**CONFIG, "quantization_config": settings})
    message = str(caught.value)
    assert message.startswith(f"{tmp_path}: ")
    assert words_expected in message
    assert message.endswith(WAY_OUT)
    assert "\n" not in message


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (compressed_settings(config_groups={"a": ["Linear"]}), 'a is ["Linear"]: must be a'),
        (compressed_settings({"num_bits": "4"}), 'weights.num_bits is "4": must be an integer'),
        (gptq_settings(bits=[4]), "bits is [4]: must be an integer"),
        (gptq_settings(group_size="x"), 'group_size is "x": must be an integer'),
        (gptq_settings(dynamic=5), "dynamic is 5: must be a JSON object"),
    ],
)
def test_settings_of_a_wrong_type(settings, message, tmp_path):
    with pytest.raises(FasteagleError) as caught:
        QuantizedFolder(tmp_path, {**CONFIG, "quantization_config": settings})
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
    assert torch.equal(QuantizedFolder(tmp_path, raw).load(f"{Q_PROJ}.weight"), weight)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    opened = open_checkpoint(tmp_path)  # what every command opens a folder by
    assert torch.equal(opened.load(f"{Q_PROJ}.weight"), weight)


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


@pytest.mark.parametrize(
    ("case", "tied"), [("gptq", True), ("gptq-act-order", False), ("compressed-act-order", True)]
)
def test_a_packed_lm_head(tmp_path, case, tied):
    cpu_build.load()
    write_case(tmp_path, case)
    zeros = (1, 16) if case.startswith("gptq") else (0, 15)
    oracle = make(64, 128, zeros=zeros, seed=99, act_order=case.endswith("act-order"))
    parts = gptq_parts(oracle) if zeros[0] else compressed_parts(oracle, g_idx=True)
    name = "model.embed_tokens" if tied else "lm_head"

    def change(tensors):
        del tensors["lm_head.weight"]
        tensors.pop(f"{name}.weight", None)
        tensors |= {f"{name}.{part}": value for part, value in parts.items()}

    change_tensors(tmp_path, change)
    edit_json(tmp_path / "config.json", tie_word_embeddings=tied)
    opened = open_folder(tmp_path)
    check_complete(opened, "folder")
    assert torch.equal(opened.load(f"{name}.weight"), oracle.weight())
    assert opened.scheme.head_bits == (16 if tied else 4)
    x, index = torch.randn(3, 128), torch.tensor([5, 63])
    expected = x @ oracle.weight().T
    checkpoint = opened.run_in(dataclasses.replace(opened.scheme, head_bits=4))
    for native, tolerance in ((False, 1e-5), (True, 0.02)):  # activations in 8 bits
        lm_head = Linears(checkpoint, "cpu", torch.float32, native).lm_head()
        if not tied or native:
            assert (lm_head(x) - expected).norm() < tolerance * expected.norm()
            assert torch.allclose(lm_head.rows(index), oracle.weight()[index])


# Damage.


def drop(part):
    return lambda t: t.pop(f"{Q_PROJ}.{part}")


def put(part, value):
    def change(tensors):
        key = f"{Q_PROJ}.{part}"
        tensors[key] = value(tensors[key]) if callable(value) else value

    return change


def unpacked(zero):
    return lambda t: t.new_full((8 * len(t), t.shape[1]), zero).char()


@pytest.mark.parametrize(
    ("case", "change", "expected"),
    [
        ("gptq", drop("scales"), "missing .*q_proj.scales"),
        ("awq", drop("qzeros"), "missing .*q_proj.qzeros"),
        ("compressed", drop("weight_shape"), "missing .*q_proj.weight_shape"),
        ("compressed", drop("weight_zero_point"), "missing .*q_proj.weight_zero_point"),
        ("compressed-act-order", drop("weight_g_idx"), "missing .*q_proj.weight_g_idx"),
        ("gptq-act-order", drop("g_idx"), "missing .*q_proj.g_idx"),
        ("gptq", put("scales", lambda t: t[:, :64]), "shapes do not fit"),
        ("gptq", put("scales", lambda t: t[:, :0]), "shapes do not fit"),
        ("gptq", put("scales", lambda t: t[0]), "shapes do not fit"),
        ("gptq", put("qzeros", lambda t: t[:2]), "shapes do not fit"),
        ("gptq", put("qzeros", lambda t: t[:, :12]), "3-bit GPTQ"),
        ("gptq", put("qzeros", lambda t: t[:, :13]), "shapes do not fit"),
        ("gptq", put("qzeros", lambda t: t[:, :4]), "shapes do not fit"),
        ("gptq", put("qweight", lambda t: t[:8]), "is 4-bit g16, where config.json says 4-bit g32"),
        ("gptq", put("qweight", lambda t: t.long()), r"qweight words of torch\.int64"),
        ("gptq", put("scales", lambda t: t.to(torch.int16)), r"scales of torch\.int16"),
        ("gptq", put("g_idx", lambda t: t[:64]), r"g_idx \(64,\) does not put 128"),
        ("gptq", put("g_idx", lambda t: t[None]), r"g_idx \(1, 128\) does not put 128"),
        ("gptq", put("g_idx", lambda t: t.clamp(max=2)), "g_idx .* does not put 128"),
        ("gptq-8bit", put("qzeros", lambda t: t + 1), "asymmetric 8-bit GPTQ"),
        ("awq", put("scales", lambda t: t.T.contiguous()), "shapes do not fit"),
        ("awq", put("qweight", lambda t: t[:, :8]), "shapes do not fit"),
        ("awq", put("qzeros", lambda t: t[:, :8]), "shapes do not fit"),
        ("compressed", put("weight_shape", torch.tensor([128, 96])), "shapes do not fit"),
        ("compressed", put("weight_shape", torch.tensor([128])), r"int64 \(1,\): must be two int"),
        ("compressed", put("weight_shape", lambda t: t[None]), r"int64 \(1, 2\): must be two int"),
        ("compressed", put("weight_shape", lambda t: t * float("nan")), "float32 .*: must be two"),
        ("compressed", put("weight_scale", lambda t: t[:, :3]), "shapes do not fit"),
        ("compressed", put("weight_scale", lambda t: t[:64]), "shapes do not fit"),
        ("compressed", put("weight_scale", lambda t: t[:, :2]), "is 4-bit g64, where"),
        ("compressed", put("weight_zero_point", lambda t: t[:8]), "weight_zero_point is torch.int"),
        ("compressed", put("weight_zero_point", unpacked(-9)), "weight_zero_point is beyond 4 b"),
        ("compressed", put("weight_zero_point", unpacked(9)), "weight_zero_point is beyond 4 b"),
        ("compressed", put("weight_packed", lambda t: t.long()), r"_packed words of torch\.i"),
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
    if "g_idx" in expected and case == "gptq":
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
    with pytest.raises(FasteagleError, match="no \\*.safetensors and no pytorch_model"):
        QuantizedFolder(tmp_path, raw)
    save_file(plain_tensors(), tmp_path / "model.safetensors")
    with pytest.raises(FasteagleError, match=r"there is no \*\.qweight"):
        QuantizedFolder(tmp_path, raw)
    with pytest.raises(FasteagleError, match="not a JSON object"):
        QuantizedFolder(tmp_path, {**CONFIG, "quantization_config": ["gptq"]})


def test_zeros_are_required_where_no_group_is_symmetric():
    """Which of two groups a weight belongs to is told by patterns of names, which are not read."""
    settings = compressed_settings()
    assert "weight_zero_point" in CompressedTensorsLayout(settings).required
    symmetric = compressed_settings({"symmetric": True})["config_groups"]["group_0"]
    settings["config_groups"]["group_1"] = symmetric
    assert "weight_zero_point" not in CompressedTensorsLayout(settings).required
