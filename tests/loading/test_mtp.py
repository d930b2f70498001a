"""A model's own layer for multi-token prediction: read from its files, and what it drafts."""

from __future__ import annotations

import types

import pytest
import torch
from safetensors.torch import load_file, save_file

import head_quality
from fasteagle.bench.hf import hf_model
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.errors import FasteagleError
from fasteagle.loading.checkpoint import load_model, open_checkpoint
from fasteagle.loading.heads.tables import official_state
from fasteagle.loading.heads.write import save_head
from fasteagle.shapes import TreeShape
from gguf_files import write_gguf
from head_files import load_head
from helpers import (
    edit_json,
    empty_state,
    invoke,
    logits_of,
    make_hf_model,
    pairs,
    propose,
    random_head,
    save_tokenizer,
    write_random_text,
)

N_LAYER, D = 3, 64
NORMS = ("token_layernorm", "hidden_layernorm", "final_layernorm")
OWN = "model.mtp_layers.0."


@pytest.fixture(scope="module")
def qwen2():
    """A model whose last block is the layer's, and the tensors around that block."""
    model = make_hf_model("qwen2", num_hidden_layers=N_LAYER + 1)
    around = {f"{name}.weight": 1 + 0.2 * torch.randn(D) for name in NORMS}
    return model, around | {"input_proj.weight": 0.1 * torch.randn(D, 2 * D)}


def write_mimo(folder, qwen2, drop=None):
    """A folder as MiMo's, without the tensors whose names begin with `drop`."""
    model, around = qwen2
    model.config.save_pretrained(folder)
    save_tokenizer(folder)
    changes = {"num_nextn_predict_layers": 1, "attention_bias": True, "model_type": "mimo"}
    changes |= {"architectures": ["MiMoForCausalLM"], "num_hidden_layers": N_LAYER}
    changes |= {"layer_types": None, "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"}}
    edit_json(folder / "config.json", **changes)
    block = f"model.layers.{N_LAYER}."
    state = {name.replace(block, OWN): t for name, t in model.state_dict().items()}
    state |= {OWN + name: t for name, t in around.items()}
    tensors = {k: t for k, t in state.items() if drop is None or not k.startswith(drop)}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def mimo(qwen2, tmp_path_factory):
    return write_mimo(tmp_path_factory.mktemp("mimo"), qwen2)


ERNIE_NAMES = {
    f"model.layers.{N_LAYER}.": "model.mtp_block.0.",
    "token_layernorm.": "model.mtp_emb_norm.0.",
    "hidden_layernorm.": "model.mtp_hidden_norm.0.",
    "input_proj.": "model.mtp_linear_proj.0.",
}


@pytest.fixture(scope="module")
def ernie(tmp_path_factory):
    """A model as `qwen2`, whose blocks but the first and the layer's have experts, and its folder.

    In its file the projection reads the embedding first, and there is no norm of its own at the
    end.
    """
    shape = {"num_hidden_layers": N_LAYER + 1, "moe_layer_end_index": N_LAYER - 1}
    model, folder = make_hf_model("erniemoe", **shape), tmp_path_factory.mktemp("ernie")
    around = {f"{name}.weight": 1 + 0.2 * torch.randn(D) for name in NORMS[:2]}
    of_feature, of_embedding = (0.1 * torch.randn(D, 2 * D)).chunk(2, dim=1)
    around["input_proj.weight"] = torch.cat((of_embedding, of_feature), dim=1)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    edit_json(folder / "config.json", num_hidden_layers=N_LAYER, num_nextn_predict_layers=1)
    state = load_file(folder / "model.safetensors") | around
    for old, new in ERNIE_NAMES.items():
        state = {name.replace(old, new): tensor for name, tensor in state.items()}
    save_file(state, folder / "model.safetensors")
    around["input_proj.weight"] = torch.cat((of_feature, of_embedding), dim=1)
    around["final_layernorm.weight"] = model.model.norm.weight
    return (model, around), folder


@torch.no_grad()
def reference(qwen2, tokens, features):
    """Logits and normed output [T, .] of the layer over pairs, by transformers' own block."""
    model, around = qwen2

    def norm(x, name):
        variance = x.square().mean(-1, keepdim=True) + model.config.rms_norm_eps
        return x / variance.sqrt() * around[f"{name}_layernorm.weight"]

    embeds = model.model.embed_tokens(tokens)
    both = torch.cat((norm(features, "hidden"), norm(embeds, "token")), dim=-1)
    x = (both @ around["input_proj.weight"].T)[None]
    T = len(tokens)
    rope = model.model.rotary_emb(x, torch.arange(T)[None])
    mask = torch.full((T, T), -torch.inf).triu(1)[None, None]
    x = model.model.layers[N_LAYER](x, attention_mask=mask, position_embeddings=rope)
    out = norm((x[0] if isinstance(x, tuple) else x).view(T, D), "final")
    return model.lm_head(out), out


@pytest.mark.parametrize("family", ["mimo", "ernie"])
def test_it_drafts_what_a_reference_does(family, request):
    """Three tokens, each from the output of the one before."""
    if family == "mimo":
        model, folder = (request.getfixturevalue(name) for name in ("qwen2", "mimo"))
    else:
        model, folder = request.getfixturevalue("ernie")
    checkpoint = open_checkpoint(folder)
    target = load_model(checkpoint, dtype=torch.float32, device="cpu", max_seq_len=512)
    head, _ = load_head(folder, checkpoint.config)
    head.borrow(target, 512)
    drafter = EagleDrafter(head, TreeShape(3, 1, 3))
    g = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 256, (9,), generator=g)
    features = torch.randn(9, D, generator=g)
    expected = []
    for step in range(3):
        logits, out = reference(model, tokens, features)
        if step == 0:
            drafter.reserve(64)
            ours, feature = drafter.extend(pairs(tokens, features), torch.tensor(9))
            torch.testing.assert_close(ours[0], logits[-1], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(feature[0], out[-1], atol=1e-4, rtol=1e-4)
            first = tokens, features
        expected.append(int(logits[-1].argmax()))
        tokens = torch.cat((tokens, logits[-1:].argmax(-1)))
        features = torch.cat((features, out[-1:]))
    again = EagleDrafter(head, TreeShape(3, 1, 3))
    tree = propose(again, empty_state(target), pairs(*first), 5)
    assert tree.tokens.tolist() == [5, *expected]


@pytest.mark.parametrize(
    ("family", "precision", "kind"),
    [("mimo", "fp32", "eagle"), ("ernie", "int4-g32", "fused, chains")],
)
def test_a_chat_finds_it_and_says_the_same(family, precision, kind, request):
    folder = request.getfixturevalue(family)
    folder = folder if family == "mimo" else folder[1]
    chat = ("chat", "--model", folder, "-p", "hello", "--precision", precision)
    chat += ("--max-new-tokens", 30)
    drafted = invoke(*chat)
    assert drafted.exit_code == 0, drafted.stderr
    assert f"draft head the model's own layer: {kind}" in drafted.stderr, drafted.stderr
    assert "not calibrated" not in drafted.stderr
    assert drafted.stdout == invoke(*chat, "--no-spec").stdout
    named = invoke(*chat, "--head", folder)
    assert named.stdout == drafted.stdout and f"draft head {folder}: {kind}" in named.stderr


def test_a_quantized_folder_has_it_too(ernie, tmp_path):
    """In the model's own floats: it is quantized when it is loaded, as from the model's files."""
    folder = ernie[1]
    done = invoke("quantize", folder, "--precision", "int4-g32", "-o", tmp_path / "out")
    assert done.exit_code == 0, done.stderr
    config = open_checkpoint(folder).config
    expected, state = (official_state(load_head(f, config)[0]) for f in (folder, tmp_path / "out"))
    assert state.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in state.items())
    chat = ("chat", "--model", tmp_path / "out", "-p", "hello", "--max-new-tokens", 8)
    said = invoke(*chat, "--no-compile")
    assert "draft head the model's own layer: fused" in said.stderr, said.stderr


@pytest.mark.parametrize("drop", [OWN, f"{OWN}mlp."], ids=["whole", "a part"])
def test_a_folder_without_the_layer(qwen2, tmp_path, drop):
    """Runs without a draft head; half a layer is told."""
    folder = write_mimo(tmp_path, qwen2, drop)
    assert open_checkpoint(folder).config.qkv_bias
    result = invoke("chat", "--model", folder, "-p", "hello", "--max-new-tokens", 5)
    assert result.exit_code == 0 and "no draft head for this model" in result.stderr
    assert ("missing layers.0.mlp.gate_proj" in result.stderr) == (drop != OWN)
    if drop == OWN:
        with pytest.raises(FasteagleError, match="more than one decoder layer"):
            load_head(folder, open_checkpoint(folder).config)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.tensor(1.0), r"fc.weight is \(\), expected \(64, 128\)"),
        (torch.ones(64, 127), r"fc.weight is \(64, 127\), expected \(64, 128\)"),
        (None, "its layer for multi-token prediction has no weights"),
    ],
    ids=["no matrix", "narrow", "copies"],
)
def test_a_layer_of_wrong_tensors(mimo, tmp_path, weight, message):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((mimo / name).read_bytes())
    state = load_file(mimo / "model.safetensors")
    if weight is None:  # the target's alone, which are used in place of a copy
        state = {name: t for name, t in state.items() if not name.startswith(OWN)}
        state[OWN + "lm_head.weight"] = state["lm_head.weight"].clone()
    else:
        state[OWN + "input_proj.weight"] = weight
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(FasteagleError, match=message):
        load_head(tmp_path, open_checkpoint(mimo).config)


def test_inspect_head(mimo):
    report = invoke("inspect-head", mimo, "--model", mimo)
    assert report.exit_code == 0, report.output
    assert report.stdout.startswith(f"MTP head (a model's own files), fits {mimo}")
    assert "trained with the model whose files hold it" in report.stdout
    refused = invoke("export-head", mimo, "--to", "eagle", "-o", mimo / "out")
    assert refused.exit_code == 2 and "in the model's own files only" in refused.stderr


def test_nextn_tensors_of_a_gguf_file(qwen2, mimo, tmp_path):
    """Their projection reads the embedding first; copies of the target's tensors are not read."""
    model, around = qwen2
    state = model.state_dict()
    more = dict(around)
    of_feature, of_embedding = more.pop("input_proj.weight").chunk(2, dim=1)
    more["eh_proj.weight"] = torch.cat((of_embedding, of_feature), dim=1)
    more["embed_tokens.weight"] = state["model.embed_tokens.weight"]
    state |= {f"model.layers.{N_LAYER}.{name}": t for name, t in more.items()}
    file = tmp_path / "m.gguf"
    both = types.SimpleNamespace(config=model.config, state_dict=lambda: state)
    write_gguf(file, both, architecture="qwen2", extra={"qwen2.nextn_predict_layers": 1})
    checkpoint = open_checkpoint(file)
    assert checkpoint.config.n_layer == N_LAYER
    theirs, ours = (load_head(path, checkpoint.config)[0] for path in (file, mimo))
    expected = official_state(ours)
    assert official_state(theirs).keys() == expected.keys()
    assert all(torch.equal(t, expected[name]) for name, t in official_state(theirs).items())


def test_it_is_measured_and_trained_for_more_steps(mimo, tmp_path, no_compiler):
    """The result is a head of ours, which drafts with norms as before."""
    text, out = write_random_text(tmp_path / "text.jsonl", 30, 30), tmp_path / "head"
    quality = invoke("--model", mimo, "--data", text, "--limit", 2, main=head_quality.main)
    assert "| the model's own layer |" in quality.stdout, quality.stderr
    files = ("--model", mimo, "--init", mimo, "--data", text, "--out", out, "--held-out", 4)
    sizes = ("--draft-vocab-size", 128, "--loss-vocab-size", 64, "--batch-tokens", 200)
    steps = ("--self-fed-steps", 2, "--steps", 4, "--lr", 0.01, "--warmup", 1)
    done = invoke("train-head", *files, *sizes, *steps)
    assert done.exit_code == 0, done.stderr
    config = open_checkpoint(mimo).config
    (head, header), (first, _) = load_head(out, config), load_head(mimo, config)
    assert head.config.mtp and header["algorithm"] == "mtp" and len(head.target_ids()) == 128
    assert not torch.equal(head.feature_norm.weight, first.feature_norm.weight.bfloat16())
    chat = ("chat", "--model", mimo, "--precision", "fp32", "-p", "hi", "--max-new-tokens", 8)
    answers = [invoke(*chat, *more) for more in (("--head", out), ("--no-spec",))]
    assert answers[0].stdout == answers[1].stdout and "warning" not in answers[0].stderr


@torch.no_grad()
def test_transformers_runs_the_model_without_it(mimo):
    """As the benchmark's rows do; it has no class of this name."""
    checkpoint, tokens = open_checkpoint(mimo), torch.arange(12)
    theirs = hf_model(checkpoint, torch.float32, "cpu")(tokens[None]).logits[0]
    ours = load_model(checkpoint, dtype=torch.float32, device="cpu", max_seq_len=64)
    torch.testing.assert_close(logits_of(ours, tokens), theirs, rtol=1e-3, atol=1e-3)


def test_a_draft_head_may_name_the_model_in_its_config(mimo, tmp_path):
    """Its tensors say that it is a draft head, not a model with a layer."""
    target = load_model(open_checkpoint(mimo), dtype=torch.float32, device="cpu", max_seq_len=64)
    head = random_head(target, qk_norm=False, rope_base=1e4)
    save_head(tmp_path, head, {}, torch.float32)
    edit_json(tmp_path / "config.json", architectures=["MiMoForCausalLM"])
    loaded, _ = load_head(tmp_path, target.config)
    assert not loaded.config.mtp and torch.equal(loaded.fc.weight, head.fc.weight)
