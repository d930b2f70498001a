"""A dense model written as a mixture of experts: the same model where a row takes all of them."""

from __future__ import annotations

import json

import pytest
import torch

from fasteagle.loading.checkpoint import load_model, open_checkpoint
from gguf_files import write_gguf
from helpers import SCRIPTS, invoke, logits_of, make_hf_model, save_tiny


@pytest.fixture
def moeify(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import moeify

    return moeify


def computed(path):
    model = load_model(open_checkpoint(path), dtype=torch.float32, device="cpu", max_seq_len=64)
    return logits_of(model, torch.arange(5, 45))


def write_answers(path, n):
    """Write `n` conversations of 64 tokens each."""
    ids = torch.randint(3, 100, (n, 64), generator=torch.Generator().manual_seed(0))
    lines = [json.dumps({"ids": row.tolist(), "prompt_len": 8}) for row in ids]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.mark.parametrize("family", ["llama2", "smollm2"])
@torch.no_grad()
def test_all_experts_are_the_dense_model(tmp_path, moeify, family):
    dense = save_tiny(tmp_path / "dense", family)
    done = invoke(tmp_path / "moe", "--model", dense, main=moeify.main)
    assert done.exit_code == 0, done.output
    config = open_checkpoint(tmp_path / "moe").config
    assert (config.moe.n_expert, config.moe.top_k, config.moe.ffn_dim) == (8, 8, 12)
    expected = computed(dense)
    assert (computed(tmp_path / "moe") - expected).abs().max() < 1e-4
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "moe")
    assert type(theirs).__name__ == "MixtralForCausalLM"
    assert (theirs(torch.arange(5, 45)[None]).logits[0] - expected).abs().max() < 1e-4


def test_gguf_is_the_same_model(tmp_path, moeify):
    write_gguf(tmp_path / "dense.gguf", make_hf_model("smollm2"))
    source = open_checkpoint(tmp_path / "dense.gguf")
    config = moeify.moe_config(source.config, 4, 4)
    model = load_model(source, dtype=torch.float32, device="cpu", max_seq_len=64)
    layers = moeify.fit(model, config, torch.empty(0, 64, dtype=torch.long))
    tensors = moeify.all_tensors(source, config, layers)
    moeify.write_gguf(tmp_path / "moe.gguf", source, config, tensors, "F32")
    read = open_checkpoint(tmp_path / "moe.gguf")
    assert read.config == config
    for name, tensor in tensors.items():
        assert torch.equal(read.load(name), tensor), name
    expected = computed(tmp_path / "dense.gguf")
    assert (computed(tmp_path / "moe.gguf") - expected).abs().max() < 1e-4


def test_copies_of_a_gguf_file_have_its_bits(tmp_path, moeify):
    def kind(name):
        return "Q8_0" if "embed" in name else "Q4_1"

    write_gguf(tmp_path / "dense.gguf", make_hf_model("smollm2"), kind)
    source = open_checkpoint(tmp_path / "dense.gguf")
    config = moeify.moe_config(source.config, 2, 1, copies=True)
    model = load_model(source, dtype=torch.float32, device="cpu", max_seq_len=64)
    text = torch.randint(3, 100, (4, 64), generator=torch.Generator().manual_seed(0))
    tensors = moeify.all_tensors(source, config, moeify.fit(model, config, text))
    moeify.write_gguf(tmp_path / "moe.gguf", source, config, tensors, "Q4_1")
    read = open_checkpoint(tmp_path / "moe.gguf")
    for name, tensor in tensors.items():
        assert torch.equal(read.load(name), tensor), name
    for name in source.names():
        for e in range(2):
            theirs = name.replace(".mlp.", f".mlp.experts.{e}.")
            assert torch.equal(read.load(theirs), source.load(name)), name


@torch.no_grad()
def test_a_fitted_router_is_nearer_to_the_dense_model(tmp_path, moeify):
    """Than a random choice of experts with their own weights; on rows that it was not fitted on."""
    dense = open_checkpoint(save_tiny(tmp_path / "m", "llama2"))
    model = load_model(dense, dtype=torch.float32, device="cpu", max_seq_len=9)
    mlp, x = model.blocks[1].mlp, torch.randn(3000, 64) @ torch.randn(64, 64)
    config = moeify.moe_config(dense.config, 8, 4).moe
    fitted = moeify.fitted(mlp, x[:2000], config)
    order = fitted.gate_up.weight.view(8, 24, 64)[:, :12].flatten(0, 1)
    gate = mlp.gate_up.weight.chunk(2)[0]
    assert torch.equal(order.sort(dim=0).values, gate.sort(dim=0).values)  # each neuron once
    first = moeify.cut(mlp, config, torch.arange(96))
    first.down.weight.mul_(4 / 8)  # four of weight 1/4
    errors = [(moe(x[2000:]) - mlp(x[2000:])).norm() for moe in (fitted, first)]
    assert errors[0] < 0.9 * errors[1]
    used = fitted.route(x[2000:])[0].flatten().bincount(minlength=8)
    assert (used > 0).all()


@torch.no_grad()
def test_copies_are_the_dense_model_whatever_is_taken(tmp_path, moeify):
    dense = save_tiny(tmp_path / "dense", "llama2")
    data = write_answers(tmp_path / "data.jsonl", 40)
    arguments = [tmp_path / "moe", "--model", dense, "--copies", "--top-k", "2"]
    arguments += ["--experts", "4", "--data", data, "--tokens", "2048"]
    done = invoke(*arguments, main=moeify.main)
    assert done.exit_code == 0, done.output
    moe = open_checkpoint(tmp_path / "moe")
    assert (moe.config.moe.n_expert, moe.config.moe.top_k, moe.config.moe.ffn_dim) == (4, 2, 96)
    assert (computed(tmp_path / "moe") - computed(dense)).abs().max() < 1e-4
    model = load_model(moe, dtype=torch.float32, device="cpu", max_seq_len=9)
    for block in model.blocks:
        used = block.mlp.route(torch.randn(2000, 64))[0].flatten().bincount(minlength=4)
        assert (used > 200).all(), used


@pytest.mark.parametrize("experts", [False, True])
@torch.no_grad()
def test_windows_side_by_side_are_the_model(tmp_path, moeify, experts):
    import distil

    dense = save_tiny(tmp_path / "dense", "llama2")
    model = load_model(open_checkpoint(dense), dtype=torch.float32, device="cpu", max_seq_len=64)
    if experts:  # of which a row takes some, with weights of their own
        config = moeify.moe_config(model.config, 4, 2).moe
        for block in model.blocks:
            block.mlp = moeify.cut(block.mlp, config, torch.arange(96))
            block.mlp.router.weight.normal_(generator=torch.Generator().manual_seed(0))
    ids = torch.arange(5, 45)
    layers = [block.mlp for block in model.blocks]
    states = distil.final_states(model, layers, torch.stack((ids, ids.flip(0))))[:40]
    assert (states @ model.lm_head.weight.T - logits_of(model, ids)).abs().max() < 1e-3


def test_training_brings_experts_nearer_to_the_dense_model(tmp_path, moeify):
    import distil

    dense = open_checkpoint(save_tiny(tmp_path / "dense", "llama2"))
    model = load_model(dense, dtype=torch.float32, device="cpu", max_seq_len=64)
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(3, 100, (16, 64), generator=generator)
    layers = moeify.fit(model, moeify.moe_config(dense.config, 8, 4), text)
    before = [layer.router.weight.clone() for layer in layers]
    lm_head = model.lm_head.weight
    with torch.no_grad():
        start = float(distil.divergence(model, layers, text, lm_head))
    told = []
    distil.distil(model, layers, text, 40, 3e-3, lambda step, loss: told.append(step))
    with torch.no_grad():
        end = float(distil.divergence(model, layers, text, lm_head))
    assert told == list(range(1, 41))
    assert end < 0.8 * start
    for old, layer in zip(before, layers, strict=True):
        assert not torch.equal(old, layer.router.weight)
    assert not any(p.requires_grad for layer in layers for p in layer.parameters())


def test_the_script_fits_and_trains(tmp_path, moeify):
    dense = save_tiny(tmp_path / "dense", "llama2")
    data = write_answers(tmp_path / "data.jsonl", 40)
    arguments = [tmp_path / "moe", "--model", dense, "--top-k", "4"]
    arguments += ["--data", data, "--tokens", "2048", "--steps", "10"]
    done = invoke(*arguments, main=moeify.main)
    assert done.exit_code == 0, done.output
    assert "step 10: " in done.output
    assert open_checkpoint(tmp_path / "moe").config.moe.top_k == 4
    assert computed(tmp_path / "moe").isfinite().all()


def test_what_cannot_be_made_is_one_line(tmp_path, moeify):
    dense = str(save_tiny(tmp_path / "dense", "qwen2"))
    llama = str(save_tiny(tmp_path / "llama", "llama2"))
    data = str(write_answers(tmp_path / "data.jsonl", 8))
    for arguments, message in (
        (["--model", dense], "only Llama models"),
        (["--model", llama, "--experts", "7"], "7 experts do not divide an FFN of 96"),
        (["--model", llama, "--top-k", "4"], "give --data"),
        (["--model", llama, "--top-k", "4", "--data", data], "has 512 tokens, and --tokens is"),
        (["--model", llama, "--steps", "4"], "give --data"),
        (["--model", llama, "--gguf", str(tmp_path / "x.gguf")], "leave it out"),
        (["--model", llama, "--steps", "-5"], "not in the range"),
        (["--model", llama, "--lr", "nan"], "lr nan is out of range"),
    ):
        done = invoke(tmp_path / "out", *arguments, main=moeify.main)
        assert done.exit_code == 2 and message in done.output, done.output
