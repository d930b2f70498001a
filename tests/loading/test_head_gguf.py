"""EAGLE-3 heads in GGUF files: read back by the gguf package and by us, and what is refused."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, quants

from fasteagle.config import Eagle3Config, HeadConfig, Llama3RopeScaling, Multipliers
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.errors import FasteagleError
from fasteagle.loading.changed import ChangedCheckpoint, rope_order
from fasteagle.loading.checkpoint import open_checkpoint
from fasteagle.loading.gguf_index import read_index
from fasteagle.loading.heads import gguf as gguf_head
from fasteagle.loading.heads.find import named_head
from fasteagle.loading.heads.gguf import NAMES, write_gguf_head
from fasteagle.loading.heads.read import open_head
from fasteagle.loading.heads.tables import official_state
from fasteagle.loading.heads.write import HeadTarget, export_head, save_head
from fasteagle.loading.tensors import DummyCheckpoint
from fasteagle.model import make_head, rope_table
from fasteagle.shapes import TreeShape
from gguf_files import finish
from head_files import load_head
from head_folders import AUX_LAYERS, DRAFT_IDS, head_for
from helpers import empty_state, invoke, pairs, propose, random_target, tiny_config

CONFIG = tiny_config(n_layer=8, rope_base=5e5)
KIND = "official EAGLE-3"


@pytest.fixture(scope="module")
def target():
    return random_target(CONFIG)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """The tokenizer of a target's GGUF file; weights do not matter."""
    path = tmp_path_factory.mktemp("target") / "target.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(60)])
    writer.add_token_types([1] * 60)
    writer.add_eos_token_id(59)
    kinds = {"vtype": GGUFValueType.ARRAY, "sub_type": GGUFValueType.UINT8}
    writer.add_key_value("tokenizer.ggml.precompiled_charsmap", [1, 2], **kinds)
    writer.add_tensor("x", np.zeros(4, np.float32))
    finish(writer)
    return path


def written(path, head, tokenizer, dtype=torch.bfloat16):
    """`head`, rounded to `dtype`, in a GGUF file; and its tensors."""
    state = {k: t if k == "d2t" else t.to(dtype) for k, t in official_state(head).items()}
    write(path, head, state, tokenizer)
    return state


def write(path, head, state, tokenizer, **more):
    block = dataclasses.replace(head.config.block, max_seq_len=512, **more)
    config = dataclasses.replace(head.config, block=block)
    write_gguf_head(path, config, state, tokenizer)


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({}, torch.bfloat16),
        ({"aux_layers": (0, 1, 2, 4, 5, 8), "norm_before_residual": True}, torch.float16),
        ({"aux_norm": "all", "own_embedding": True}, torch.float32),
    ],
)
def test_written_and_read_back_bit_for_bit(target, tokenizer, tmp_path, changes, dtype):
    head = head_for(target, KIND, **changes)
    state = written(tmp_path / "h.gguf", head, tokenizer, dtype)
    assert named_head(str(tmp_path / "h.gguf")).path == tmp_path / "h.gguf"
    source = open_head(tmp_path)  # the only GGUF file of a folder
    assert source.dialect == "llama.cpp GGUF EAGLE-3"
    assert source.state["fc.weight"].dtype == dtype
    loaded, header = load_head(tmp_path / "h.gguf", CONFIG)
    assert header is None and loaded.config.eagle3 == head.config.eagle3
    assert loaded.config.block.rope_base == 5e5
    tensors = official_state(loaded)
    assert tensors.keys() == state.keys()
    norms = [name for name in state if state[name].ndim == 1 and name != "d2t"]
    assert all(torch.equal(tensors[name], state[name].float()) for name in norms)
    assert all(torch.equal(tensors[n], state[n].to(tensors[n].dtype)) for n in state)
    loaded.borrow(target, 512)
    drafter = EagleDrafter(loaded, TreeShape(3, 2, 5))
    new = pairs(range(9), torch.randn(9, loaded.config.feature_dim))
    assert len(propose(drafter, empty_state(target), new, 1).tokens) == 6


def test_the_gguf_package_reads_what_llama_cpp_expects(target, tokenizer, tmp_path):
    head = head_for(target, KIND)
    state = written(tmp_path / "h.gguf", head, tokenizer)
    reader = GGUFReader(tmp_path / "h.gguf")
    said = {key: field.contents() for key, field in reader.fields.items()}
    assert (
        said.items()
        >= {
            "general.architecture": "eagle3",
            "eagle3.target_layers": list(AUX_LAYERS),
            "eagle3.target_hidden_size": 32,
            "eagle3.vocab_size": 60,
            "eagle3.norm_before_residual": False,
            "eagle3.block_count": 1,
            "eagle3.attention.head_count_kv": 2,
            "eagle3.rope.freq_base": 5e5,
            "tokenizer.ggml.tokens": [f"t{i}" for i in range(60)],
            "tokenizer.ggml.eos_token_id": 59,
        }.items()
    )
    kinds = {"eagle3.target_layers": GGUFValueType.INT32}
    kinds["tokenizer.ggml.precompiled_charsmap"] = GGUFValueType.UINT8
    assert all(reader.fields[key].types[-1] == kind for key, kind in kinds.items())
    tensors = {t.name: t for t in reader.tensors}
    assert tensors["d2t"].tensor_type == GGMLQuantizationType.I64
    assert tensors["d2t"].data.tolist() == DRAFT_IDS.tolist()  # absolute
    assert tensors["fc.weight"].shape.tolist() == [96, 32]
    assert tensors["fc.weight"].tensor_type == GGMLQuantizationType.BF16
    assert tensors["blk.0.attn_norm_2.weight"].tensor_type == GGMLQuantizationType.F32
    assert "token_embd.weight" not in tensors
    k = quants.dequantize(tensors["blk.0.attn_k.weight"].data, GGMLQuantizationType.BF16)
    halves = state["midlayer.self_attn.k_proj.weight"].float().numpy()
    assert np.array_equal(k[:4], halves[[0, 4, 1, 5]])  # rows of interleaved RoPE, heads of 8


def test_llama3_scaling_becomes_factors(target, tokenizer, tmp_path):
    head = head_for(target, KIND)
    scaled = tiny_config(n_layer=1, rope_scaling=Llama3RopeScaling(8.0, 1.0, 4.0, 64))
    object.__setattr__(head.config, "block", scaled)
    written(tmp_path / "h.gguf", head, tokenizer)
    loaded, _ = load_head(tmp_path / "h.gguf", CONFIG)
    save_head(tmp_path / "ours", loaded, {}, torch.bfloat16)
    again, _ = load_head(tmp_path / "ours", CONFIG)
    for read in (loaded, again):
        for a, b in zip(rope_table(read.config.block, 99), rope_table(scaled, 99), strict=True):
            assert torch.allclose(a, b, atol=1e-4)


def test_linear_scaling_is_written_and_read_back(target, tokenizer, tmp_path):
    head = head_for(target, KIND)
    state = official_state(head)
    write(tmp_path / "h.gguf", head, state, tokenizer, rope_linear_factor=2.0)
    said = read_index(tmp_path / "h.gguf").fields
    assert said["eagle3.rope.scaling.type"] == "linear"
    assert said["eagle3.rope.scaling.factor"] == 2.0
    assert load_head(tmp_path / "h.gguf", CONFIG)[0].config.block.rope_linear_factor == 2.0


def test_what_a_file_does_not_say(target, tokenizer, tmp_path, monkeypatch):
    """The vocabulary is the tokenizer's or the embedding's, the base of RoPE is 10,000."""
    for own in (False, True):
        path = tmp_path / f"{own}.gguf"
        written(path, head_for(target, KIND, own_embedding=own), tokenizer)
        index = read_index(path)
        absent = {"eagle3.vocab_size", "eagle3.rope.freq_base", "eagle3.context_length"}
        assert absent <= index.fields.keys()
        fields = {key: value for key, value in index.fields.items() if key not in absent}
        bare = dataclasses.replace(index, fields=fields)
        with monkeypatch.context() as patch:
            patch.setattr(gguf_head, "read_index", lambda path, bare=bare: bare)
            raw, _ = gguf_head.read_gguf_head(path)
        assert (raw["vocab_size"], raw["rope_theta"]) == (60, 10000.0)
        assert "max_position_embeddings" not in raw
        assert gguf_head.read_gguf_head(path)[0]["max_position_embeddings"] == 512


def test_quantized_tensors_and_names_of_forks(target, tmp_path):
    head = head_for(target, KIND)
    state = official_state(head)
    writer = GGUFWriter(tmp_path / "h.gguf", "eagle3")
    fields = {"embedding_length": 32, "feed_forward_length": 48, "vocab_size": 60}
    fields |= {"attention.head_count": 4, "attention.head_count_kv": 2}
    for key, value in fields.items():
        writer.add_uint32(f"eagle3.{key}", value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_array("eagle3.extract_layers", list(AUX_LAYERS))
    for name, official in NAMES.items():
        if official not in state:
            continue
        values = state[official]
        if name.startswith(("blk.0.attn_q", "blk.0.attn_k")):
            values = values[rope_order(len(values), len(values) // 8).argsort()]
        values = values.numpy()
        name = name.replace("attn_norm_2", "hidden_norm")
        if name in ("fc.weight", "blk.0.attn_k.weight"):
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(name, quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.add_tensor("d2t.weight", state["d2t"].int().numpy())
    finish(writer)
    loaded, _ = load_head(tmp_path / "h.gguf", CONFIG)
    assert loaded.config.block.rope_base == 1e4  # not said
    for name, tensor in official_state(loaded).items():
        far = (tensor - state[name]).abs().max()
        q8 = name in ("fc.weight", "midlayer.self_attn.k_proj.weight")
        assert (0 < far < 0.02) if q8 else far == 0, name


BAD_FIELDS = [
    ("attention.head_count", 0, "eagle3.attention.head_count is 0: must be an integer from 1"),
    ("embedding_length", None, "eagle3.embedding_length is missing: must be an integer"),
    ("target_layers", "2", "eagle3.target_layers is '2': must be a list of block numbers"),
    ("target_layers", None, "lacks eagle3.target_layers: convert the head again"),
    ("rope.scaling.type", "yarn", "GGUF RoPE scaling 'yarn' is not supported: choose another file"),
    ("rope.dimension_count", 4, "RoPE on a part of a head is not supported"),
    ("block_count", 2, "eagle3.block_count is 2: must be 1: choose another"),
    ("attention.key_length", 6, "RoPE on a part of a head is not supported"),
    ("norm_before_fc", True, "missing input_norm.weight: fetch it again"),
    ("target_hidden_size", 64, "the head is for a width of 64, the model has 32"),
    ("norm_before_residual", 1, "eagle3.norm_before_residual is 1: must be true or false"),
]


@pytest.mark.parametrize(("key", "value", "message"), BAD_FIELDS)
def test_metadata_that_is_wrong(target, tokenizer, tmp_path, monkeypatch, key, value, message):
    written(tmp_path / "h.gguf", head_for(target, KIND), tokenizer)
    index = read_index(tmp_path / "h.gguf")
    fields = index.fields | {f"eagle3.{key}": value}
    if value is None:
        del fields[f"eagle3.{key}"]
    changed = dataclasses.replace(index, fields=fields)
    monkeypatch.setattr(gguf_head, "read_index", lambda path: changed)
    with pytest.raises(FasteagleError, match=message) as caught:
        load_head(tmp_path / "h.gguf", CONFIG)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("d2t", np.zeros(30, np.float32), "d2t is F32 of shape .30,.: must be a list of I32 or"),
        ("d2t", np.zeros((30, 1), np.int64), "d2t is I64 of shape .30, 1.: must be a list"),
        ("blk.0.attn_q.weight", np.zeros((33, 64), np.float32), "q_proj.weight is .33, 64., expec"),
        ("fc.weight", np.zeros((32, 64), np.float32), "fc reads 64 values, 2 layers of 32, but"),
        (
            "rope_freqs.weight",
            np.ones(8, np.float16),
            "rope_freqs.weight has type F16; supported: F32",
        ),
        ("d2t.weight", np.zeros(30, np.int64), "two tensors are d2t"),
        ("d2t", np.arange(30)[::-1].copy(), "d2t does not list ascending ids below 60"),
        ("d2t", np.arange(20), r"lm_head.weight is \(30, 32\), expected \(20, 32\)"),
        ("d2t", None, r"lm_head.weight is \(30, 32\), expected \(60, 32\)"),
    ],
)
def test_tensors_that_are_wrong(target, tokenizer, tmp_path, monkeypatch, name, values, message):
    add = GGUFWriter.add_tensor

    def spoiled(self, key, tensor, **more):
        if key == "fc.weight" and name in ("rope_freqs.weight", "d2t.weight"):
            add(self, name, values)
        if key != name:
            add(self, key, tensor, **more)
        elif values is not None:
            add(self, key, values)

    monkeypatch.setattr(GGUFWriter, "add_tensor", spoiled)
    written(tmp_path / "h.gguf", head_for(target, KIND), tokenizer)
    with pytest.raises(FasteagleError, match=message):
        load_head(tmp_path / "h.gguf", CONFIG)


# The command


def test_export_with_the_tokenizer_of_a_file(target, tokenizer, tmp_path):
    head = head_for(target, KIND)
    save_head(tmp_path / "ours", head, {}, torch.bfloat16)
    files = (tmp_path / "ours", "--to", "gguf", "-o", tmp_path / "h.gguf")
    export = ("export-head", *files, "--tokenizer-from", tokenizer)
    result = invoke(*export)
    assert result.exit_code == 0, result.stderr
    loaded, _ = load_head(tmp_path / "h.gguf", CONFIG)
    ours, _ = load_head(tmp_path / "ours", CONFIG)
    expected = official_state(ours)
    assert all(torch.equal(t, expected[name]) for name, t in official_state(loaded).items())
    assert invoke(*export).exit_code == 2  # it is there already
    result = invoke("inspect-head", tmp_path / "h.gguf")
    assert result.exit_code == 0 and "EAGLE-3 head (llama.cpp GGUF EAGLE-3)" in result.stdout
    assert "the inputs of blocks 2, 4, 5; listed as such" in result.stdout


def test_the_tokenizer_of_a_target_whose_weights_are_changed(target, tokenizer, tmp_path):
    """As a Granite model's in a GGUF file are."""
    save_head(tmp_path / "ours", head_for(target, KIND), {}, torch.bfloat16)
    stored = DummyCheckpoint(CONFIG)
    stored.files = [tokenizer]
    changed = HeadTarget("granite", ChangedCheckpoint(stored, Multipliers(2.0, 0.1, 0.5, 4.0)))
    export_head(open_head(tmp_path / "ours"), "gguf", tmp_path / "h.gguf", target=changed)
    assert load_head(tmp_path / "h.gguf", CONFIG)[0].config.draft_vocab_size == len(DRAFT_IDS)


@pytest.mark.real_model
@pytest.mark.slow
def test_export_for_the_default_model(default_model_path, tmp_path):
    """Its GGUF file gives the tokenizer, and the rows of the LM head that the head lacks."""
    checkpoint = open_checkpoint(default_model_path)
    c = checkpoint.config
    own = Eagle3Config((2, 15, 27), target_dim=c.dim, own_lm_head=False)
    block = dataclasses.replace(c, n_layer=1, tie_embeddings=False)
    head = make_head(HeadConfig(block, 100, fc_bias=False, eagle3=own))
    head.d2t.copy_(torch.arange(0, 4900, 49) - torch.arange(100))
    save_head(tmp_path / "ours", head, {}, torch.bfloat16)
    out = tmp_path / "h.gguf"
    files = (tmp_path / "ours", "--to", "gguf", "-o", out, "--model", default_model_path)
    result = invoke("export-head", *files)
    assert result.exit_code == 0, result.stderr
    loaded, _ = load_head(out, c)
    rows = checkpoint.load("model.embed_tokens.weight")[head.target_ids()]
    assert torch.equal(loaded.own_lm_head.weight, rows.bfloat16().float())
    fields = {key: field.contents() for key, field in GGUFReader(out).fields.items()}
    theirs = {key: f.contents() for key, f in GGUFReader(default_model_path).fields.items()}
    tokenizer = [key for key in theirs if key.startswith("tokenizer.")]
    assert len(tokenizer) > 5 and all(fields[key] == theirs[key] for key in tokenizer)


def test_files_that_are_no_head(target, tokenizer, tmp_path):
    with pytest.raises(FasteagleError, match="architecture 'llama' is no draft head: give"):
        open_head(tokenizer)
    with pytest.raises(FasteagleError, match="no such file"):
        open_head(tmp_path / "nowhere.gguf")
    (tmp_path / "text.gguf").write_text("a text")
    with pytest.raises(FasteagleError, match="not a GGUF file"):
        open_head(tmp_path / "text.gguf")
    written(tmp_path / "h.gguf", head_for(target, KIND), tokenizer)
    whole = (tmp_path / "h.gguf").read_bytes()
    (tmp_path / "h.gguf").write_bytes(whole[: int(0.7 * len(whole))])
    with pytest.raises(FasteagleError, match=r"fetch it again"):
        open_head(tmp_path / "h.gguf")
    with pytest.raises(FasteagleError, match=r"config\.json"):
        open_head(tmp_path)  # which of its files is meant is not known
    with pytest.raises(FasteagleError, match="its tokenizer has 60 tokens, the model 61: give"):
        head = head_for(target, KIND)
        write(tmp_path / "o", head, official_state(head), tokenizer, vocab_size=61)
