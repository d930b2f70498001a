"""A dense model written as a mixture of its copies: the same model, whichever a row takes."""

from __future__ import annotations

import json

import pytest
import torch

import moeify
from fasteagle.loading.checkpoint import load_model, open_checkpoint
from gguf_files import write_gguf
from helpers import invoke, logits_of, make_hf_model, save_tiny


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
def test_copies_are_the_dense_model_whatever_is_taken(tmp_path, family):
    dense = save_tiny(tmp_path / "dense", family)
    data = write_answers(tmp_path / "data.jsonl", 64)
    arguments = [tmp_path / "moe", "--model", dense, "--experts", 4, "--data", data]
    done = invoke(*arguments, main=moeify.main)
    assert done.exit_code == 0, done.output
    moe = open_checkpoint(tmp_path / "moe")
    assert (moe.config.moe.n_expert, moe.config.moe.top_k, moe.config.moe.ffn_dim) == (4, 2, 96)
    expected = computed(dense)
    assert (computed(tmp_path / "moe") - expected).abs().max() < 1e-4
    model = load_model(moe, dtype=torch.float32, device="cpu", max_seq_len=9)
    for block in model.blocks:
        used = block.mlp.route(torch.randn(2000, 64))[0].flatten().bincount(minlength=4)
        assert (used > 200).all(), used
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "moe")
    assert type(theirs).__name__ == "MixtralForCausalLM"
    assert (theirs(torch.arange(5, 45)[None]).logits[0] - expected).abs().max() < 1e-4


@torch.no_grad()
def test_routers_are_made_from_the_inputs_of_each_block(tmp_path):
    """Those that the model computes for a window, whatever stands in the windows before it."""
    dense = open_checkpoint(save_tiny(tmp_path / "dense", "llama2"))
    model = load_model(dense, dtype=torch.float32, device="cpu", max_seq_len=64)
    config = moeify.moe_config(model.config, 4, 2)
    text = torch.randint(3, 100, (2, 64), generator=torch.Generator().manual_seed(0))
    layers = moeify.fit(model, config, text)
    inputs = []
    for block in model.blocks:
        block.mlp_norm.register_forward_hook(lambda _module, _args, x: inputs.append(x))
    for window in text:
        logits_of(model, window)
    n = len(layers)
    for i, (block, layer) in enumerate(zip(model.blocks, layers, strict=True)):
        alone = moeify.copied(block.mlp, torch.cat((inputs[i], inputs[n + i])), config.moe)
        assert torch.equal(layer.router.weight, alone.router.weight)


@pytest.mark.parametrize(("table", "blocks"), [("Q8_0", "Q4_1"), ("F32", "F32")])
def test_copies_of_a_gguf_file_have_its_bits(tmp_path, table, blocks):
    def kind(name):
        return table if "embed" in name else blocks

    write_gguf(tmp_path / "dense.gguf", make_hf_model("smollm2"), kind)
    source = open_checkpoint(tmp_path / "dense.gguf")
    config = moeify.moe_config(source.config, 2, 1)
    model = load_model(source, dtype=torch.float32, device="cpu", max_seq_len=64)
    text = torch.randint(3, 100, (4, 64), generator=torch.Generator().manual_seed(0))
    tensors = moeify.all_tensors(source, config, moeify.fit(model, config, text))
    moeify.write_gguf(tmp_path / "moe.gguf", tmp_path / "dense.gguf", config, tensors, blocks)
    read = open_checkpoint(tmp_path / "moe.gguf")
    assert read.config == config
    for name, tensor in tensors.items():
        assert torch.equal(read.load(name), tensor), name
    for name in source.names():
        for e in range(2):
            theirs = name.replace(".mlp.", f".mlp.experts.{e}.")
            assert torch.equal(read.load(theirs), source.load(name)), name
    expected = computed(tmp_path / "dense.gguf")
    assert (computed(tmp_path / "moe.gguf") - expected).abs().max() < 1e-4


def test_what_cannot_be_made_is_one_line(tmp_path):
    dense = str(save_tiny(tmp_path / "dense", "qwen2"))
    llama = str(save_tiny(tmp_path / "llama", "llama2"))
    data = str(write_answers(tmp_path / "data.jsonl", 8))
    for arguments, message in (
        (["--model", dense], "only Llama models"),
        (["--model", llama], "has 512 tokens, routers need 4,096: give"),
        (["--model", llama, "--experts", "2", "--top-k", "3"], "top-k 3 is more than there are"),
        (["--model", llama, "--gguf", str(tmp_path / "x.gguf")], "leave it out"),
    ):
        done = invoke(tmp_path / "o", "--data", data, *arguments, main=moeify.main)
        assert done.exit_code == 2 and message in done.output, done.output
