"""Experts in files: one by one, all of a block in one tensor, packed, and in our own folders."""

from __future__ import annotations

import copy
import dataclasses
import json
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file

from families import MOE_FAMILIES
from fasteagle.config import Multipliers
from fasteagle.config_fields import Fields
from fasteagle.config_gguf import from_gguf
from fasteagle.errors import FasteagleError
from fasteagle.loading.changed import ChangedCheckpoint
from fasteagle.loading.checkpoint import load_model, open_checkpoint
from fasteagle.loading.quantize import with_scheme
from fasteagle.loading.source import Linears
from fasteagle.loading.stored import StoredFolder
from fasteagle.loading.tensors import DummyCheckpoint, WeightsFolder
from fasteagle.model import MoE
from fasteagle.quant.scheme import Scheme
from gguf_files import write_gguf
from helpers import Dequantized, logits_of, make_hf_model, tiny_config
from quantized_folders import CASES, CONFIG, Oracle, make, plain_tensors

WIDE = {"mixtral": {"intermediate_size": 64}}  # int4 groups of 32 everywhere
QUANTS = "int4-g32", "int8"


def save(folder, family):
    make_hf_model(family, **WIDE.get(family, {})).save_pretrained(folder)
    return folder


def computed(checkpoint):
    linears = None if checkpoint.scheme is None else Linears(checkpoint, "cpu", torch.float32)
    model = load_model(
        checkpoint, dtype=torch.float32, device="cpu", max_seq_len=64, quantized=linears
    )
    return logits_of(model, torch.arange(5, 35))


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_experts_in_one_tensor_are_those_one_by_one(tmp_path, kind):
    """Newer files may hold [X, 2 F, D] without `.weight`."""
    save(tmp_path / "each", "qwen2moe")
    tensors = load_file(tmp_path / "each" / "model.safetensors")
    for i in range(3):
        p = f"model.layers.{i}.mlp.experts"
        each = [
            {n: tensors.pop(f"{p}.{e}.{n}_proj.weight") for n in ("gate", "up", "down")}
            for e in range(8)
        ]
        joined = [torch.cat((expert["gate"], expert["up"])) for expert in each]
        tensors[f"{p}.gate_up_proj"] = torch.stack(joined)
        tensors[f"{p}.down_proj"] = torch.stack([expert["down"] for expert in each])
    joined = tmp_path / "joined"
    joined.mkdir()
    (joined / "config.json").write_bytes((tmp_path / "each" / "config.json").read_bytes())
    if kind == "bin":
        torch.save(tensors, joined / "pytorch_model.bin")
    else:
        save_file(tensors, joined / "model.safetensors")
    expected, opened = open_checkpoint(tmp_path / "each"), open_checkpoint(joined)
    assert opened.names() == expected.names()
    for name in expected.names():
        assert opened.shape(name) == expected.shape(name)
        assert torch.equal(opened.load(name), expected.load(name)), name
    assert opened.fingerprint == expected.fingerprint


@torch.no_grad()
def test_some_blocks_are_dense(tmp_path):
    hf = make_hf_model("qwen3moe", decoder_sparse_step=2, mlp_only_layers=[2])
    hf.save_pretrained(tmp_path)
    opened = open_checkpoint(tmp_path)
    assert opened.config.dense_blocks == (0, 2)
    expected = hf(torch.arange(5, 35)[None]).logits[0]
    assert (computed(opened) - expected).abs().max() < 1e-4


@pytest.mark.parametrize(("number", "family"), list(enumerate(MOE_FAMILIES)))
def test_quantized_folders_hold_the_same_model(tmp_path, family, number):
    checkpoint, quant = open_checkpoint(save(tmp_path / "m", family)), QUANTS[number % 2]
    stored = with_scheme(checkpoint, quant)
    assert isinstance(stored, StoredFolder)
    assert stored.config == checkpoint.config
    name = "model.layers.1.mlp.experts.5.up_proj.weight"
    assert stored.bits(name) == int(quant[3])
    assert (stored.load(name) - checkpoint.load(name)).abs().max() < 0.2
    router = "model.layers.1.mlp.gate.weight"
    assert torch.equal(stored.load(router), checkpoint.load(router))
    bf16, linears = torch.bfloat16, Linears(stored, "cpu", torch.bfloat16)
    model = load_model(stored, dtype=bf16, device="cpu", max_seq_len=64, quantized=linears)
    moe = model.blocks[1].mlp
    assert isinstance(moe, MoE) and moe.router.weight.dtype == torch.float32
    # In fp32 the products are those of the stored values, whatever the router makes of them.
    exact = Dequantized(stored)
    assert torch.equal(
        computed(stored.run_in(dataclasses.replace(stored.scheme, head_bits=16))), computed(exact)
    )


def q4_k_m(name: str) -> str:
    return "Q6_K" if "down_proj" in name else "Q4_0"


@pytest.mark.parametrize(
    ("family", "architecture"),
    [("mixtral", "llama"), ("qwen2moe", "qwen2moe"), ("granitemoe", "granitemoe")],
)
def test_gguf_blocks_are_read_expert_by_expert(tmp_path, family, architecture):
    """Also where the blocks' scales are multiplied (Granite)."""
    sizes = {"hidden_size", "intermediate_size", "moe_intermediate_size"}
    sizes |= {"shared_expert_intermediate_size"}
    known = vars(make_hf_model(family).config).keys()
    hf = make_hf_model(family, **dict.fromkeys(sizes & known, 256))
    stored = write_gguf(tmp_path / "m.gguf", hf, q4_k_m, architecture)
    file = open_checkpoint(tmp_path / "m.gguf")
    assert (file.own_scheme.bits, file.own_scheme.method) == (4, "own")
    factor = hf.config.residual_multiplier if family == "granitemoe" else 1
    for what in ("gate", "up", "down"):
        expected = torch.from_numpy(stored[f"model.layers.1.mlp.experts.{what}_proj.weight"][3])
        name = f"model.layers.1.mlp.experts.3.{what}_proj.weight"
        expected = expected * (factor if what == "down" else 1)
        assert file.shape(name) == (256, 256)
        assert torch.equal(file.load(name), expected)
        assert (file.packed(name).dequantize() - expected).abs().max() < 0.01 * expected.abs().max()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("llama.expert_used_count", 9, r"llama.expert_used_count is 9: .* from 1 to 8"),
        ("llama.expert_gating_func", 2, r"llama.expert_gating_func is 2: must be 1 .softmax"),
    ],
)
def test_gguf_metadata_is_checked(tmp_path, key, value, message):
    write_gguf(tmp_path / "m.gguf", make_hf_model("mixtral"), extra={key: value})
    with pytest.raises(FasteagleError, match=message):
        open_checkpoint(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("kind", "more", "message"),
    [
        ("olmoe", {}, "olmoe.expert_count is missing"),
        ("llama", {"nextn_predict_layers": 2}, "nextn_predict_layers is 2: .* from 0 to 1"),
    ],
)
def test_gguf_metadata_without_experts_or_blocks(kind, more, message):
    sizes = {"embedding_length": 64, "attention.head_count": 4, "feed_forward_length": 32, **more}
    sizes |= {"block_count": 2, "attention.layer_norm_rms_epsilon": 1e-5}
    metadata = {"general.architecture": kind} | {f"{kind}.{key}": n for key, n in sizes.items()}
    with pytest.raises(FasteagleError, match=message):
        from_gguf(Fields(metadata, "m.gguf"), vocab_size=9, tied=True, rope_freq_factors=None)


@pytest.mark.parametrize("case", ["gptq", "awq", "compressed", "compressed-8bit"])
def test_packed_experts_of_other_tools_are_stacked(tmp_path, case):
    oracles = write_packed(tmp_path, case)
    opened = open_checkpoint(tmp_path)
    weight = Linears(opened, "cpu", torch.float32).linear(
        [f"model.layers.1.mlp.experts.{e}.down_proj.weight" for e in range(4)], None
    )
    expected = [oracles[f"model.layers.1.block_sparse_moe.experts.{e}.w2"] for e in range(4)]
    assert torch.equal(weight.weight, torch.cat([oracle.weight() for oracle in expected]))
    assert computed(opened).isfinite().all()


def test_experts_in_act_order_are_refused(tmp_path):
    write_packed(tmp_path, "gptq-act-order")
    with pytest.raises(FasteagleError, match=r"experts\.0\.gate_proj\.weight is in act-order: "):
        computed(open_checkpoint(tmp_path))


def write_packed(folder, case) -> dict[str, Oracle]:
    """A Mixtral of two blocks of four experts, as `case` packs it."""
    how, pack, settings = CASES[case]
    moe = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4}
    moe |= {"num_experts_per_tok": 2, "quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(CONFIG | moe))
    attention = {"q_proj": (128, 128), "k_proj": (64, 128), "v_proj": (64, 128)}
    shapes = {f"self_attn.{n}": s for n, s in (attention | {"o_proj": (128, 128)}).items()}
    for e in range(4):
        sizes = {"w1": (256, 128), "w3": (256, 128), "w2": (128, 256)}
        shapes |= {f"block_sparse_moe.experts.{e}.{n}": shape for n, shape in sizes.items()}
    tensors, oracles = plain_tensors(), {}
    for i in range(2):
        tensors[f"model.layers.{i}.block_sparse_moe.gate.weight"] = torch.randn(4, 128).half()
        for seed, (name, (N, K)) in enumerate(shapes.items()):
            prefix = f"model.layers.{i}.{name}"
            oracles[prefix] = oracle = make(N, K, seed=100 * i + seed, **how)
            tensors |= {f"{prefix}.{part}": t for part, t in pack(oracle).items()}
    save_file(tensors, folder / "model.safetensors")
    return oracles


@pytest.mark.parametrize("quant", [None, "int4-g32"])
def test_one_expert_at_a_time_is_in_memory(tmp_path, monkeypatch, quant):
    """While quantizing and while loading, beside the result."""
    checkpoint = open_checkpoint(save(tmp_path / "m", "qwen3moe"))
    experts, most = [], []

    def counted(method):
        def run(self, name, *rest):
            result = method(self, name, *rest)
            result = copy.copy(result)  # of a file that is mapped for good
            if name.endswith("_proj.weight") and ".experts." in name:
                experts.append(weakref.ref(result))
                most.append(sum(expert() is not None for expert in experts))
            return result

        return run

    with monkeypatch.context() as patch:
        patch.setattr(WeightsFolder, "load", counted(WeightsFolder.load))
        checkpoint = with_scheme(checkpoint, quant)
    if quant is not None:
        assert max(most) <= 2  # the new one, and the last until its name has another value
    most.clear()
    method = "load" if quant is None else "packed"
    monkeypatch.setattr(type(checkpoint), method, counted(getattr(type(checkpoint), method)))
    loaded = computed(checkpoint)
    assert len(most) >= 3 * 8 * 3 and max(most) <= 2
    assert loaded.isfinite().all()


class Tied(DummyCheckpoint):
    """An embedding that is packed, in act-order."""

    def bits(self, name):
        return 4 if name == "model.embed_tokens.weight" else None

    def columns(self, name):
        return torch.arange(32).flip(0) if name == "model.embed_tokens.weight" else None


def test_the_lm_head_of_a_tied_granite_is_stored_as_its_embedding():
    checkpoint = ChangedCheckpoint(
        Tied(tiny_config(tie_embeddings=True)), Multipliers(3.0, 0.15, 0.4, 2.5)
    )
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    assert checkpoint.bits(head) == checkpoint.bits(embedding) == 4
    assert torch.equal(checkpoint.columns(head), checkpoint.columns(embedding))
    assert checkpoint.bits("model.norm.weight") is checkpoint.columns("model.norm.weight") is None


@pytest.mark.parametrize("family", ["erniemoe", "qwen2moe"])
def test_what_routes_rows_stays_in_fp32(tmp_path, family):
    """Rounded to bf16, near scores would choose other experts."""
    checkpoint = open_checkpoint(save(tmp_path, family))
    model = load_model(checkpoint, dtype=torch.bfloat16, device="cpu", max_seq_len=64)
    mlp, p = model.blocks[2].mlp, "model.layers.2.mlp."
    gate = None if mlp.shared_gate is None else mlp.shared_gate.weight
    assert (mlp.choice_bias is None) != (gate is None)
    for tensor, name in (
        (mlp.router.weight, p + "gate.weight"),
        (mlp.choice_bias, p + "gate.e_score_correction_bias"),
        (gate, p + "shared_expert_gate.weight"),
    ):
        if tensor is not None:
            assert tensor.dtype == torch.float32
            assert torch.equal(tensor, checkpoint.load(name).float())


def test_packed_weights_of_granite_are_multiplied_with_their_offsets():
    inner = DummyCheckpoint(tiny_config(), Scheme(4, 8, "hqq"))
    multiplied = ChangedCheckpoint(inner, Multipliers(3.0, 0.15, 0.5, 2.5))
    name = "model.layers.1.self_attn.o_proj.weight"
    weight = inner.packed(name)
    assert weight.offsets is not None
    expected = weight.dequantize() * 0.5
    torch.testing.assert_close(multiplied.packed(name).dequantize(), expected)
