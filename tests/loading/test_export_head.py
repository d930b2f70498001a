"""`fasteagle export-head`: what is written loads back bit for bit, and what is refused."""

from __future__ import annotations

import contextlib
import json

import pytest
import torch
from safetensors.torch import load_file

from fasteagle.config import Eagle3Config, Llama3RopeScaling
from fasteagle.errors import FasteagleError
from fasteagle.loading.checkpoint import load_model, open_checkpoint
from fasteagle.loading.heads.read import open_head
from fasteagle.loading.heads.tables import official_state
from fasteagle.loading.heads.write import HeadTarget, check_exportable, export_head, save_head
from fasteagle.model import KVCache, causal_mask
from head_files import load_head
from head_folders import AUX_LAYERS, head_for
from helpers import invoke, raising, random_head, random_target, save_tiny, tiny_config

E1, E3 = "official EAGLE-1/2", "official EAGLE-3"
LLAMA3 = Llama3RopeScaling(8.0, 1.0, 4.0, 64)
SHAPE = dict(num_hidden_layers=8, hidden_size=32, intermediate_size=48, vocab_size=60)


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory):
    """A target of 8 blocks, whose vocabulary is the heads'; the tokenizer does not fit it."""
    return save_tiny(tmp_path_factory.mktemp("target") / "model", **SHAPE)


@pytest.fixture(scope="module")
def target(target_dir):
    return HeadTarget("owner/model", open_checkpoint(target_dir))


def saved(folder, kind, dtype=torch.bfloat16, block=None, header=None, **changes):
    """A head of ours in `folder`, and what it holds."""
    model = random_target(tiny_config(n_layer=8, n_kv_head=2, **(block or {})))
    head = head_for(model, kind, **changes)
    save_head(folder, head, header or {}, dtype)
    return load_head(folder, model.config)[0]


def exported(folder, to, target, **changes):
    """Return a head written and loaded back, the head itself, and the lines for the person."""
    kind = changes.pop("kind", E3)
    head = saved(folder / "ours", kind, **changes)
    out = folder / "out"
    lines = export_head(open_head(folder / "ours"), to, out, target)
    return load_head(out, target.checkpoint.config)[0], head, lines


def assert_same(loaded, head, *more) -> None:
    """Tensors bit for bit, but for `more` that the target gave; RoPE and norms too."""
    tensors, expected = official_state(loaded), official_state(head)
    assert tensors.keys() == expected.keys() | set(more)
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    for field in ("rope_base", "rope_scaling", "rope_linear_factor", "norm_eps", "head_dim"):
        assert getattr(loaded.config.block, field) == getattr(head.config.block, field)
    assert loaded.config.block.sliding_window == head.config.block.sliding_window
    for field in ("aux_layers", "norm_before_residual", "aux_norm", "norm_output"):
        assert getattr(loaded.config.eagle3, field, 0) == getattr(head.config.eagle3, field, 0)


CASES = [
    ("eagle", {}),
    ("eagle", {"own_embedding": True, "block": {"rope_linear_factor": 2.0}}),
    ("specforge", {"aux_layers": (1, 3, 8), "own_lm_head": False}),
    ("specforge", {"aux_norm": "each", "norm_output": True, "block": {"rope_scaling": LLAMA3}}),
    ("specforge", {"aux_layers": (1, 2, 3, 4), "own_embedding": True}),
    ("speculators", {"norm_before_residual": True, "block": {"sliding_window": 64}}),
    ("speculators", {"aux_norm": "all", "own_embedding": True, "block": {"rope_base": 3e5}}),
    ("speculators", {"aux_norm": "each", "norm_output": True, "block": {"head_dim": 16}}),
    ("speculators", {"block": {"qk_norm": True, "rope_scaling": LLAMA3}}),
]


@pytest.mark.parametrize(("to", "changes"), CASES)
def test_eagle3_goes_out_and_comes_back(target, tmp_path, to, changes):
    dtype = torch.float16 if "aux_norm" in changes else torch.bfloat16
    loaded, head, lines = exported(tmp_path, to, target, dtype=dtype, **changes)
    embedding = () if "own_embedding" in changes else ("embed_tokens.weight",)
    rows = () if changes.get("own_lm_head", True) else ("lm_head.weight",)
    assert_same(loaded, head, *rows, *(embedding if to == "speculators" else ()))
    if rows:
        expected = target.checkpoint.load("lm_head.weight")[head.target_ids()].bfloat16().float()
        assert torch.equal(loaded.own_lm_head.weight, expected)
    assert lines == []
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    named = raw.get("eagle_config", raw).get("eagle_aux_hidden_state_layer_ids")
    shift = {"specforge": 1, "speculators": 0}  # an engine names the blocks' outputs
    assert to == "eagle" or tuple(i + shift[to] for i in named) == head.config.aux_layers
    state = load_file(tmp_path / "out" / "model.safetensors")
    assert state["fc.weight"].dtype == dtype and str(dtype) == f"torch.{raw['torch_dtype']}"
    assert ("layers.0.hidden_norm.weight" in state) == (to == "speculators")
    assert to != "eagle" or ("target_hidden_size" in raw) == ("own_embedding" in changes)
    assert head.config.block.rope_linear_factor == 1 or raw["rope_scaling"]["type"] == "linear"
    assert state["t2d"].nonzero().flatten().tolist() == head.target_ids().tolist()
    dialect = open_head(tmp_path / "out").dialect.lower()
    assert ("official" if to == "eagle" else to) in dialect


def test_a_tied_model_gives_its_embedding_twice(tmp_path):
    folder = save_tiny(tmp_path / "tied", "smollm2", **SHAPE)
    tied = HeadTarget("tied", open_checkpoint(folder))
    model = random_target(tiny_config(n_layer=8))
    own = Eagle3Config(AUX_LAYERS, target_dim=32, own_lm_head=False)
    head = random_head(model, eagle3=own, fc_bias=False)
    save_head(tmp_path / "ours", head, {}, tied.tensor("embed_tokens.weight").dtype)
    export_head(open_head(tmp_path / "ours"), "speculators", tmp_path / "out", tied)
    state = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(state["lm_head.weight"], tied.tensor("embed_tokens.weight"))
    assert torch.equal(state["lm_head.weight"], state["embed_tokens.weight"])
    assert "d2t" not in state
    loaded, _ = load_head(tmp_path / "out", tied.checkpoint.config)
    assert loaded.config.draft_vocab_size == 60


@pytest.mark.parametrize("trimmed", [False, True])
def test_eagle1_goes_out_and_comes_back(target, tmp_path, trimmed):
    more = {"draft_ids": torch.arange(0, 60, 4)} if trimmed else {"block": {"sliding_window": 64}}
    loaded, head, lines = exported(tmp_path, "eagle", target, kind=E1, **more)
    assert loaded.target_ids().tolist() == head.target_ids().tolist()
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert raw["bias"] is True and not {"draft_vocab_size", "sliding_window"} & raw.keys()
    state = load_file(tmp_path / "out" / "model.safetensors")
    assert "embed_tokens.weight" in state and "d2t" not in state
    remark = "its 15 draft tokens" if trimmed else "its window of 64 ke"
    assert [line[:19] for line in lines] == [remark]
    assert (tmp_path / "out" / "freq_15.pt").exists() == trimmed
    if trimmed:
        assert_same(loaded, head)


@pytest.mark.parametrize("has_head", [False, True])
def test_an_empty_folder_stays_where_nothing_is_exported(tmp_path, has_head):
    """There is no head, or it is one of EAGLE-1, which SpecForge does not train."""
    out = tmp_path / "out"
    out.mkdir()
    (tmp_path / "head").mkdir()
    if has_head:
        saved(tmp_path / "head", E1)
    result = invoke("export-head", tmp_path / "head", "--to", "specforge", "-o", out)
    assert result.exit_code == 2 and "Traceback" not in result.stderr, result.stderr
    assert out.is_dir()


def test_an_export_that_fails_leaves_nothing(target, tmp_path, monkeypatch):
    saved(tmp_path / "ours", E3)
    monkeypatch.setattr("fasteagle.loading.heads.write.write_json", raising(OSError(28, "full")))
    with pytest.raises(OSError, match="full"):
        export_head(open_head(tmp_path / "ours"), "specforge", tmp_path / "out", target)
    assert not (tmp_path / "out").exists()


def test_a_head_whose_weights_are_not_written_has_no_config(tmp_path, monkeypatch):
    """By which it would be found."""
    monkeypatch.setattr("fasteagle.loading.heads.write.save_tensors", raising(OSError(28, "full")))
    with pytest.raises(OSError, match="full"):
        saved(tmp_path, E1)
    assert list(tmp_path.iterdir()) == []


BAD = [
    (E1, "specforge", {}, "SpecForge trains EAGLE-3 heads only, .*: export it --to eagle"),
    (E1, "speculators", {}, "reads EAGLE-1/2 heads no longer, .*: export it --to eagle"),
    (E1, "gguf", {}, "llama.cpp runs EAGLE-3 heads only, .*: export it --to eagle"),
    (E3, "eagle", {"aux_layers": (1, 3, 6)}, "layers other than .*: export it --to specforge or"),
    (E3, "eagle", {"aux_norm": "all"}, "over all auxiliary layers: export it --to speculators or"),
    (E3, "specforge", {"norm_before_residual": True}, "begins normed: export it --to speculators"),
    (E3, "specforge", {"aux_layers": (0, 3, 6)}, "layer before all: export it --to specul"),
    (E3, "specforge", {"block": {"qk_norm": True}}, "norms of q and k: export it --to speculators"),
    (E3, "eagle", {"block": {"head_dim": 16}}, "a head_dim other than width / heads: export it"),
    (E3, "eagle", {"block": {"rope_scaling": LLAMA3}}, "llama3 RoPE scaling: export it --to specf"),
    (E3, "speculators", {"target_dim": 64}, "a width other than the target's: export it --to eagl"),
    (E3, "gguf", {"aux_layers": (1, 2, 4, 6)}, "than 3 auxiliary layers: export it --to specforge"),
    (E3, "gguf", {"block": {"sliding_window": 64}}, "a sliding window: export it --to speculators"),
    (E3, "gguf", {"aux_norm": "each", "norm_output": True}, "each auxiliary layer; a normed next"),
]


@pytest.mark.parametrize(("kind", "to", "changes", "message"), BAD)
def test_what_a_layout_cannot_say_costs_one_line(kind, to, changes, message):
    model = random_target(tiny_config(n_layer=8, **changes.get("block", {})))
    own = {name: value for name, value in changes.items() if name != "block"}
    with pytest.raises(FasteagleError, match=message) as caught:
        check_exportable(head_for(model, kind, **own).config, to, model.config)
    assert "\n" not in str(caught.value)


def test_without_a_model(tmp_path):
    """Enough where its tensors and the depth of it are not needed."""
    saved(tmp_path / "ours", E3)
    source = open_head(tmp_path / "ours")
    export_head(source, "specforge", tmp_path / "out")
    assert load_head(tmp_path / "out", tiny_config(n_layer=8))[0].config.eagle3
    said, exported = (
        json.loads((tmp_path / name / "config.json").read_text())["max_position_embeddings"]
        for name in ("ours", "out")
    )
    assert said == exported == tiny_config().max_seq_len
    deep = (2, 20, 37)  # of a model deeper than one that is guessed
    export_head(source, "specforge", tmp_path / "deep", aux_layers=deep)
    assert open_head(tmp_path / "deep").aux_layers == deep
    for to, message in (
        ("eagle", "its auxiliary layers fit the official layout at one depth .*: add --model"),
        ("speculators", "no embed_tokens.weight of its own: add --model"),
        ("gguf", "give a .gguf file of the model with --tokenizer-from"),
    ):
        with pytest.raises(FasteagleError, match=message):
            export_head(source, to, tmp_path / "more")
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    (tmp_path / "out" / "config.json").write_text(json.dumps({**raw, "eagle_config": {}}))
    unsaid = open_head(tmp_path / "out")
    assert unsaid.dialect == "SpecForge / SGLang EAGLE-3"  # by its architecture
    with pytest.raises(FasteagleError, match="do not say the auxiliary layers, .*: add --model"):
        export_head(unsaid, "specforge", tmp_path / "more")
    assert not (tmp_path / "more").exists()
    raw["max_position_embeddings"] = 2**22  # of which an engine would make a table
    (tmp_path / "out" / "config.json").write_text(json.dumps(raw))
    export_head(open_head(tmp_path / "out"), "specforge", tmp_path / "long")
    assert f'"max_position_embeddings": {2**20},' in (tmp_path / "long/config.json").read_text()
    del raw["max_position_embeddings"]
    (tmp_path / "out" / "config.json").write_text(json.dumps(raw))
    with pytest.raises(FasteagleError, match="do not say how long texts are: add --model"):
        export_head(open_head(tmp_path / "out"), "specforge", tmp_path / "more")


def test_the_official_layout_needs_no_length(tmp_path):
    saved(tmp_path / "ours", E1)
    raw = json.loads((tmp_path / "ours" / "config.json").read_text())
    del raw["max_position_embeddings"]
    (tmp_path / "ours" / "config.json").write_text(json.dumps(raw))
    export_head(open_head(tmp_path / "ours"), "eagle", tmp_path / "out")
    assert "max_position_embeddings" not in (tmp_path / "out" / "config.json").read_text()


# The command


def test_command(target_dir, tmp_path):
    saved(tmp_path / "ours", E3)
    arguments = (tmp_path / "ours", "--to", "speculators", "--model", target_dir)
    result = invoke("export-head", *arguments, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "" and "EAGLE-3 head (fasteagle) written to" in result.stderr
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    verifier = {"name_or_path": str(target_dir), "architectures": ["LlamaForCausalLM"]}
    assert raw["speculators_config"]["verifier"] == verifier
    (tmp_path / "empty").mkdir()
    with contextlib.chdir(tmp_path / "empty"):
        assert invoke("export-head", *arguments, "-o", ".").exit_code == 0
    assert (tmp_path / "empty" / "config.json").exists()
    result = invoke("export-head", *arguments, "-o", tmp_path / "out")
    assert (
        result.exit_code == 2
        and "is there already and not empty: choose another place" in result.stderr
    )
    result = invoke("export-head", tmp_path / "ours", "--to", "gguf", "-o", tmp_path / "folder")
    assert result.exit_code == 2 and "must be the name of a .gguf file" in result.stderr


# The speculators package


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"aux_norm": "all", "norm_before_residual": True},
        {"aux_norm": "each", "block": {"rope_scaling": LLAMA3, "rope_base": 3e5}},
        {"block": {"qk_norm": True, "head_dim": 16, "rope_linear_factor": 2.0}},
    ],
)
@torch.no_grad()
def test_the_speculators_package_computes_the_same(target, target_dir, tmp_path, changes):
    """Its own loader, its own forward pass with eager attention, in fp32."""
    pytest.importorskip("speculators", reason="the speculators package is not installed")
    from speculators import SpeculatorModelConfig
    from speculators.models.eagle3 import Eagle3DraftModel

    own = HeadTarget(str(target_dir), target.checkpoint)
    loaded, _, _ = exported(tmp_path, "speculators", own, dtype=torch.float32, **changes)
    model = load_model(target.checkpoint, dtype=torch.float32, device="cpu", max_seq_len=64)
    loaded.borrow(model, 64)
    config = SpeculatorModelConfig.from_pretrained(tmp_path / "out")
    config.transformer_layer_config._attn_implementation = "eager"
    theirs = Eagle3DraftModel.from_pretrained(tmp_path / "out", config=config).float().eval()
    seen = {}
    theirs.norm.register_forward_hook(lambda m, x, y: seen.update(hidden=x[0][0]))
    theirs.lm_head.register_forward_hook(lambda m, x, y: seen.update(logits=y[0]))
    n = 11
    tokens, states = torch.randint(0, 60, (n,)), torch.randn(n, 96)
    rows = torch.arange(n)
    theirs(
        hidden_states=states[None],
        input_ids=tokens[None],
        document_ids=torch.zeros(1, n, dtype=torch.long),
        position_ids=rows[None],
        ttt_steps=1,
    )
    cache = KVCache(loaded.config.block, 64, torch.float32, "cpu")
    mask = causal_mask(0, n, cache.n_slots, None, "cpu")
    logits, hidden = loaded(tokens, loaded.read(states), rows, rows, mask, cache)
    assert torch.equal(theirs.d2t, loaded.d2t)
    assert (hidden - seen["hidden"]).abs().max() < 1e-4
    assert (logits - seen["logits"]).abs().max() < 1e-4
