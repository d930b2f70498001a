"""Draft heads of every dialect: what they become, and what is said of those that cannot run."""

from __future__ import annotations

import pytest
import torch

from fasteagle.config import Eagle3Config
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.errors import FasteagleError
from fasteagle.loading.heads.read import open_head
from fasteagle.loading.heads.tables import official_state
from fasteagle.shapes import TreeShape
from head_files import load_head
from head_folders import AUX_LAYERS, DIALECTS, DRAFT_IDS, head_for, write_folder
from helpers import empty_state, pairs, propose, random_head, random_target, tiny_config

CONFIG = tiny_config(n_layer=8, rope_base=5e5)


@pytest.fixture(scope="module")
def target():
    return random_target(CONFIG)


CASES = [
    ("official EAGLE-1/2", {"fc_bias": True}, False),
    ("official EAGLE-1/2", {"fc_bias": False}, True),
    ("official EAGLE-1/2", {"qkv_bias": True}, True),
    ("official EAGLE-3", {}, True),
    ("official EAGLE-3", {}, False),
    ("SpecForge / SGLang EAGLE-3", {"aux_layers": (1, 4, 7)}, False),
    ("SpecForge / SGLang EAGLE-3", {"aux_norm": "each", "norm_output": True}, False),
    ("NVIDIA ModelOpt EAGLE-3", {"aux_layers": (2, 4, 8)}, False),
    ("speculators / vLLM EAGLE-3", {"own_embedding": True}, False),
    ("speculators / vLLM EAGLE-3", {"aux_norm": "all", "norm_before_residual": True}, False),
    ("speculators / vLLM EAGLE-3", {"aux_layers": (0, 3, 5, 7), "norm_output": True}, False),
]


@pytest.mark.parametrize(("dialect", "changes", "pickled"), CASES)
def test_every_dialect_loads_bit_for_bit_and_drafts(target, tmp_path, dialect, changes, pickled):
    head = head_for(target, dialect, **changes)
    source = open_head(write_folder(tmp_path, *DIALECTS[dialect](head), pickled))
    assert source.dialect == dialect and source.header is None
    loaded, _ = load_head(tmp_path, CONFIG)
    assert loaded.config.eagle3 == head.config.eagle3  # layers and norms
    says_base = dialect.split()[0] in ("SpecForge", "NVIDIA", "speculators")
    assert loaded.config.block.rope_base == (5e5 if says_base else 1e4)  # never the target's
    assert loaded.config.fc_bias == head.config.fc_bias
    expected, tensors = official_state(head), official_state(loaded)
    assert expected.keys() == tensors.keys()
    assert all(torch.equal(expected[name], tensors[name]) for name in expected)
    assert torch.equal(loaded.target_ids(), head.target_ids())
    loaded.borrow(target, 512)
    features = torch.randn(9, loaded.config.feature_dim)
    drafter = EagleDrafter(loaded, TreeShape(3, 2, 5))
    tree = propose(drafter, empty_state(target), pairs(range(9), features), 1)
    assert len(tree.tokens) == 6 and set(tree.tokens[1:].tolist()) <= set(
        head.target_ids().tolist()
    )


def test_folders_without_whole_weights(target, tmp_path):
    write_folder(tmp_path, *DIALECTS["official EAGLE-1/2"](random_head(target)))
    (tmp_path / "model.safetensors").write_bytes(b"12")
    with pytest.raises(FasteagleError, match="damaged or truncated"):
        load_head(tmp_path, CONFIG)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FasteagleError, match=r"no model\.safetensors and no pytorch_model\.bin"):
        load_head(tmp_path, CONFIG)


def test_a_method_that_does_not_run_is_named_before_weights_are_missed(tmp_path):
    """Medusa's lie in files of other names."""
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 4}')
    with pytest.raises(FasteagleError, match="Medusa heads, which fasteagle does not run"):
        open_head(tmp_path)


def test_biases_that_only_the_tensors_tell(target, tmp_path):
    raw, state = DIALECTS["official EAGLE-1/2"](random_head(target, qkv_bias=True))
    del raw["qkv_bias"]
    loaded, _ = load_head(write_folder(tmp_path, raw, state), CONFIG)
    assert torch.equal(official_state(loaded)[K_BIAS], state[K_BIAS])


K_BIAS = "layers.0.self_attn.k_proj.bias"


def test_frequent_list_is_a_draft_vocabulary(target, tmp_path):
    head = random_head(target)
    write_folder(tmp_path, *DIALECTS["official EAGLE-1/2"](head))
    torch.save([7, 3, 59, 0], tmp_path / "freq_4.pt")
    loaded, _ = load_head(tmp_path, CONFIG)
    assert loaded.target_ids().tolist() == [0, 3, 7, 59]
    torch.save([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], tmp_path / "freq_10.pt")
    assert load_head(tmp_path, CONFIG)[0].target_ids().tolist() == list(range(1, 11))
    write_folder(tmp_path / "own", *DIALECTS["official EAGLE-3"](head_for(target, "EAGLE-3")))
    torch.save([1], tmp_path / "own" / "freq_1.pt")
    assert torch.equal(load_head(tmp_path / "own", CONFIG)[0].target_ids(), DRAFT_IDS)
    (tmp_path / "freq_10.pt").unlink()
    shared = [[1] * 9]
    for _ in range(40):
        shared = [shared, shared]
    few = torch.zeros(1, dtype=torch.int64).expand(2**40)  # a few bytes in the file
    for wrong in (["a", "b"], {"a": 1}, [True, False], torch.rand(4), few, shared, [2**70]):
        torch.save(wrong, tmp_path / "freq_4.pt")
        with pytest.raises(FasteagleError, match="freq_4.pt: not a list of token ids"):
            load_head(tmp_path, CONFIG)


def test_rope_by_kind_of_layer_and_prefixed_names(target, tmp_path):
    head = head_for(target, "speculators / vLLM EAGLE-3")
    raw, state = DIALECTS["speculators / vLLM EAGLE-3"](head)
    rope = {"full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 3e4}}
    raw["transformer_layer_config"]["rope_parameters"] = rope
    del raw["norm_before_residual"]  # false then, as in the package that defines the format
    write_folder(tmp_path, raw, {f"model.{name}": t for name, t in state.items()})
    config = load_head(tmp_path, CONFIG)[0].config
    assert (config.block.rope_base, config.block.rope_linear_factor) == (3e4, 2.0)
    assert config.eagle3.norm_before_residual is False


def test_norms_of_auxiliary_layers_under_another_name(target, tmp_path):
    dialect = "SpecForge / SGLang EAGLE-3"
    head = head_for(target, dialect, aux_norm="each", norm_output=True)
    raw, state = DIALECTS[dialect](head)
    renamed = {name.replace("fc_norm.", "fcs."): tensor for name, tensor in state.items()}
    loaded, _ = load_head(write_folder(tmp_path, raw, renamed), CONFIG)
    assert renamed.keys() != state.keys()
    assert torch.equal(loaded.aux_norms[1].weight, head.aux_norms[1].weight)


def test_a_key_without_a_value_is_no_mark_of_a_dialect(target, tmp_path):
    dialect = "SpecForge / SGLang EAGLE-3"
    raw, state = DIALECTS[dialect](head_for(target, dialect, aux_layers=(1, 4, 7)))
    raw |= {"eagle_aux_hidden_state_layer_ids": None, "tap_layers": {}}
    assert open_head(write_folder(tmp_path, raw, state)).aux_layers == (1, 4, 7)


def test_the_target_of_a_head_of_another_width(target, tmp_path):
    raw, state = DIALECTS["official EAGLE-3"](head_for(target, "official EAGLE-3"))
    raw |= {"hidden_size": 64, "target_hidden_size": 32}
    assert open_head(write_folder(tmp_path, raw, state)).likely_target().dim == 32


def test_aux_layers_by_option(target, tmp_path):
    write_folder(tmp_path, *DIALECTS["official EAGLE-3"](head_for(target, "official EAGLE-3")))
    assert load_head(tmp_path, CONFIG, (1, 3, 6))[0].config.eagle3.aux_layers == (1, 3, 6)
    with pytest.raises(FasteagleError, match=r"fc reads 96 values, 3 layers of 32, .* are 1, 3"):
        load_head(tmp_path, CONFIG, (1, 3))


def test_a_copy_of_the_embedding_is_shared(target, tmp_path):
    """Equal after rounding to the target's dtype; another one is kept."""
    head = head_for(target, "speculators / vLLM EAGLE-3", own_embedding=True)
    dialect = DIALECTS["speculators / vLLM EAGLE-3"]
    bf16 = random_target(CONFIG).bfloat16()
    raw, state = dialect(head)
    state["embed_tokens.weight"] = target.embedding.weight.clone()
    write_folder(tmp_path, raw, state)
    loaded, _ = load_head(tmp_path, CONFIG)
    loaded.borrow(bf16, 512)
    assert loaded.own_embedding is None and not loaded.config.eagle3.own_embedding
    state["embed_tokens.weight"][5, 5] += 1
    write_folder(tmp_path, raw, state)
    loaded, _ = load_head(tmp_path, CONFIG)
    loaded.borrow(bf16, 512)
    assert loaded.own_embedding is not None and loaded.config.eagle3.own_embedding


# What cannot run


def dropped(key):
    return lambda raw, state: state.pop(key)


def put(key, value):
    return lambda raw, state: state.__setitem__(key, value)


def said(**more):
    return lambda raw, state: raw.update(more)


def changed(key, change):
    return lambda raw, state: state.__setitem__(key, change(state[key]))


def aux_ids(*ids):
    def change(raw, state):
        raw["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(ids)}

    return change


def wide(missing):
    def change(raw, state):
        raw |= {"hidden_size": 64, "target_hidden_size": 32}
        state |= dict.fromkeys(("embed_tokens.weight", "lm_head.weight"), torch.ones(60, 64))
        del state[missing]

    return change


def renamed(name, other):
    def change(raw, state):
        state[other] = state.pop(name)

    return change


E1, E3 = "official EAGLE-1/2", "official EAGLE-3"
SF, NV, SP = "SpecForge / SGLang EAGLE-3", "NVIDIA ModelOpt EAGLE-3", "speculators / vLLM EAGLE-3"
OTHERS = "which fasteagle does not run: use an EAGLE-1, EAGLE-2 or EAGLE-3 head, or --drafter ngram"
AGAIN = "fetch it again, or choose another with --head"
NAMES = [name for name in DIALECTS if name != E1]
YARN = {"rope_type": "yarn", "factor": 4.0}

UNSIGNED = torch.uint16, torch.uint32, torch.uint64

BAD = [
    # A key missing, a key too many, a wrong shape, a wrong type: in every dialect.
    *((name, dropped("fc.weight"), f"missing fc.weight: {AGAIN}") for name in DIALECTS),
    *((name, put("more.weight", torch.ones(2)), "unknown more.weight: fetch") for name in DIALECTS),
    *((name, changed("fc.weight", torch.t), r"fc.weight is .*, expected ") for name in DIALECTS),
    *((name, changed("fc.weight", torch.Tensor.char), "is int8, expected 16") for name in DIALECTS),
    (E1, changed("fc.weight", lambda w: w.to(torch.float8_e5m2)), "float8_e5m2, expected 16"),
    (E3, changed("fc.weight", torch.flatten), r"fc.weight is \(3072,\), expected \(32, 96\)"),
    *((name, dropped("norm.weight"), "missing norm.weight") for name in NAMES),
    *((name, dropped("d2t"), "missing d2t: fetch") for name in NAMES),
    (E1, dropped("fc.bias"), "missing fc.bias"),
    *((n, put("model.fc.weight", torch.ones(2)), "fc.weight twice: fetch") for n in DIALECTS),
    (E3, put("draft_id_to_target_id", torch.ones(2)), "d2t twice: fetch"),
    (E1, put("layers.0.input_layernorm.weight", torch.ones(32)), "unknown layers.0.input_lay"),
    (E1, lambda r, s: r.update(hidden_size=64, head_dim=8), "for a width of 64, the model has 32"),
    (E3, dropped("midlayer.hidden_norm.weight"), "missing midlayer.hidden_norm.weight"),
    (E3, dropped("lm_head.weight"), None),  # the target's rows are used
    (SP, dropped("layers.0.hidden_norm.weight"), "missing midlayer.hidden_norm.weight"),
    (SP, said(norm_before_fc=True), "missing input_norm.weight"),
    (SF, said(fc_norm=True), "missing fc_norm.0.weight"),
    # The vocabulary.
    (E3, changed("d2t", torch.Tensor.float), "d2t is float32, expected integers"),
    (E3, changed("d2t", lambda d2t: d2t.to(torch.float8_e5m2)), "d2t is float8_e5m2, expected int"),
    (E3, changed("d2t", lambda d2t: d2t + 40), "d2t and t2d do not agree: fetch"),
    (E3, changed("d2t", lambda d2t: d2t[:5]), "d2t and t2d do not agree"),
    (E3, lambda r, s: (s.pop("t2d"), put("d2t", s["d2t"][:5])(r, s)), r"d2t is \(5,\), expected"),
    (E3, lambda r, s: (s.pop("t2d"), s["d2t"].add_(40)), "ascending ids below 60, .*: fetch"),
    (E3, lambda r, s: (s.pop("t2d"), s["d2t"][-1:].fill_(61 - len(s["d2t"]))), "ids below 60"),
    (E3, lambda r, s: (s.pop("t2d"), s["d2t"].copy_(s["d2t"].flip(0))), "ascending ids below 60"),
    (E3, lambda r, s: (s.pop("t2d"), s["d2t"][:1].fill_(-1)), "ascending ids below 60"),
    (E1, said(vocab_size=61), "for a vocabulary of 61, the model has 60: .*no-spec"),
    (SP, said(target_hidden_size=64), "for a width of 64, the model has 32"),
    (SP, said(transformer_layer_config=None), "config.json"),
    (E3, wide("embed_tokens.weight"), "a head 64 wide for a model 32 wide needs an embedding"),
    (E3, wide("lm_head.weight"), "a head 64 wide for a model 32 wide needs an embedding"),
    *((E3, changed("d2t", lambda d2t, t=t: d2t.to(t)), None) for t in UNSIGNED),
    (E3, changed("t2d", lambda t2d: t2d.to(torch.uint16)), None),
    (E1, put("d2t", torch.tensor(3)), r"d2t is \(\), expected \(1,\): fetch"),
    (E1, put("d2t", torch.zeros(0, dtype=torch.int64)), "d2t does not list ascending ids"),
    (E1, put("draft_id_to_target_id", torch.zeros(0).long()), "d2t does not list ascending ids"),
    (E1, said(draft_vocab_size=30), "missing d2t"),
    (E1, said(draft_vocab_size=60), None),
    (E3, said(draft_vocab_size="30"), 'draft_vocab_size is "30": must be an integer from'),
    (E3, said(target_hidden_size=-32), "target_hidden_size is -32: must be an integer"),
    (E3, changed("d2t", lambda d2t: d2t[0]), "d2t and t2d do not agree"),
    (E3, renamed("d2t", "draft_id_to_target_id"), None),
    (SP, renamed("d2t", "draft_id_to_target_id"), None),
    (SP, said(architectures=["LlamaForCausalLM"], speculators_model_type=None), None),
    (E3, changed("d2t", lambda d2t: d2t[:0]), "d2t and t2d do not agree"),
    (E1, said(shifted=False), f"shifted is false\\), {OTHERS}"),
    (E1, changed("fc.weight", lambda w: w * torch.nan), "fc.weight holds NaN or inf: fetch"),
    # What training leaves, and tables that are computed.
    (E1, put("lm_head.weight", torch.ones(60, 32)), None),
    (SP, put("verifier_lm_head.weight", torch.ones(60, 32)), None),
    (E3, put("midlayer.self_attn.rotary_emb.inv_freq", torch.ones(4)), None),
    # Finite, although its sum is beyond what fp16 holds.
    (E3, changed("norm.weight", lambda w: torch.full_like(w, 3e3).half()), None),
    # Biases that are said and missing.
    (E1, said(qkv_bias=True), "missing layers.0.self_attn.k_proj.bias"),
    (E1, said(qkv_bias="yes"), 'qkv_bias is "yes": must be true or false'),
    # Auxiliary layers.
    (SP, said(eagle_aux_hidden_state_layer_ids=[]), None),
    (SF, lambda r, s: r["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[]), None),
    (SF, aux_ids(1, 3, 9), "layers 2, 4, 10 must ascend within 0 .. 8, .*: give --tap-layers"),
    (SF, aux_ids(1, 1, 3), "auxiliary layers 2, 2, 4 must ascend"),
    (SF, aux_ids(1, 3), "fc reads 96 values, 3 layers of 32, but the layers are 2, 4: give"),
    (SF, aux_ids("1", 2, 3), r"\['1', 2, 3\]: must be a list of block numbers: fetch"),
    # What is no EAGLE head of ours, by its name.
    *((name, said(rope_scaling=YARN), "RoPE scaling 'yarn' is not") for name in (E1, E3, SF, NV)),
    (SP, lambda r, s: r["transformer_layer_config"].update(rope_parameters=YARN), "'yarn' is not"),
    (SF, said(parallel_drafting=True), rf"\(P-EAGLE, .* in place of features\), {OTHERS}"),
    (SF, said(parallel_drafting=False), None),
    (SP, put("mask_hidden", torch.ones(1)), "P-EAGLE, which needs one pass of the draft head for"),
    (SP, said(architectures=["DFlashDraftModel"]), rf"\(DFlash, .* of every layer\), {OTHERS}"),
    (E3, said(dflash_config={}), "DFlash, which needs a block of mask tokens"),
    (E1, put("mtp.0.eh_proj.weight", torch.ones(2)), rf"MTP\), {OTHERS}"),
    (E1, said(medusa_num_heads=4), f"Medusa heads, {OTHERS}"),
    (SF, put("midlayer.self_attn.kv_a_proj_with_mqa.weight", torch.ones(2)), rf"MLA\), {OTHERS}"),
    (SP, put("layers.1.mlp.up_proj.weight", torch.ones(2)), "more than one decoder layer"),
    (E1, put("layers.0.mlp.experts.0.up_proj.weight", torch.ones(2)), "mixture of experts, which"),
    (E1, put("embed_layernorm.weight", torch.ones(2)), "norms of HASS variants, which"),
    (E1, put("fusion_fc.weight", torch.ones(2)), "EAGLE-1 form that speculators has given up, wh"),
    (E1, said(model_type="mlp_speculator"), "an MLP speculator, which"),
    (NV, lambda r, s: r["eagle_config"].update(use_aux_hidden_state=False), "no auxiliary feat"),
]


@pytest.mark.parametrize(("dialect", "spoil", "message"), BAD)
def test_bad_heads_get_one_line(target, tmp_path, dialect, spoil, message):
    raw, state = DIALECTS[dialect](head_for(target, dialect))
    spoil(raw, state)
    write_folder(tmp_path, raw, state)
    if message is None:
        load_head(tmp_path, CONFIG)
        assert open_head(tmp_path).aux_layers != ()  # of none it says nothing
        return
    with pytest.raises(FasteagleError, match=message) as caught:
        load_head(tmp_path, CONFIG)
    assert "\n" not in str(caught.value) and str(caught.value).startswith(str(tmp_path))


def test_full_vocabulary_with_a_map_of_zeros(target, tmp_path):
    """As an official head of Vicuna has it."""
    own = Eagle3Config(aux_layers=AUX_LAYERS, target_dim=CONFIG.dim)
    head = random_head(target, eagle3=own)
    raw, state = DIALECTS["official EAGLE-3"](head)
    zeros = {"d2t": torch.zeros(60, dtype=torch.int64), "t2d": torch.zeros(60, dtype=torch.bool)}
    for size in (60, None):
        write_folder(tmp_path, raw | {"draft_vocab_size": size}, state | zeros)
        assert load_head(tmp_path, CONFIG)[0].target_ids().tolist() == list(range(60))
