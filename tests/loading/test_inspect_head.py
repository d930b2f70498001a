"""`fasteagle inspect-head`: the report of every dialect, the exit code, and the probe of layers."""

from __future__ import annotations

import pytest
import torch

from fasteagle.config import Eagle3Config, Llama3RopeScaling
from fasteagle.generate import Engine
from fasteagle.loading.heads import inspect as module
from fasteagle.loading.heads.find import HeadFiles
from fasteagle.loading.heads.write import save_head
from fasteagle.loading.tokenizer import load_tokenizer
from fasteagle.options import DraftOptions
from head_folders import DIALECTS, DRAFT_IDS, head_for, write_folder
from helpers import drafting_of, edit_json, invoke, random_head, random_target, tiny_config

TARGET = tiny_config(n_layer=8, rope_base=5e5)


def run(*args, code=0):
    result = invoke("inspect-head", *args)
    assert result.exit_code == code, result.output
    lines = result.stdout.splitlines()
    facts = dict(line.strip().split("  ", 1) for line in lines[1:] if "  " in line.strip())
    return lines[0] if lines else "", {k: v.strip() for k, v in facts.items()}, result


def test_options_of_a_model_need_one_and_some_need_the_probe():
    _, _, refused = run("smollm2-135m", "--int4", code=2)
    assert refused.stderr == "Error: --int4 needs a model: add --model, or drop it\n"
    _, _, refused = run("smollm2-135m", "--model", "smollm2-135m", "--kv", "int8", code=2)
    assert refused.stderr == "Error: --kv needs a model that runs: add --probe, or drop it\n"


@pytest.fixture
def own_head(model, checkpoint, tmp_path):
    """An EAGLE-3 head of ours for the tiny model, and its folder."""
    eagle3 = Eagle3Config(aux_layers=(0, 1, 3), target_dim=64)
    head = random_head(model, eagle3=eagle3, rope_scaling=None, rope_base=1e4, qk_norm=False)
    header = {"target": "tiny", "scheme": "int4-g64", "tau": 2.5}
    header["target_fingerprint"] = checkpoint.fingerprint
    save_head(tmp_path / "own", head, header, torch.bfloat16)
    return tmp_path / "own"


OUTPUTS = "the inputs of blocks 2, 4, 5; listed as outputs of the ones before"
AUX_LAYERS = {
    "official EAGLE-3": "not said: the inputs of blocks 2, L // 2 and L - 3, as the public code",
    "SpecForge / SGLang EAGLE-3": OUTPUTS,
    "NVIDIA ModelOpt EAGLE-3": OUTPUTS,
    "speculators / vLLM EAGLE-3": "the inputs of blocks 2, 4, 5; listed as such",
}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_dialect_without_a_model(tmp_path, dialect):
    head = head_for(random_target(TARGET), dialect)
    write_folder(tmp_path, *DIALECTS[dialect](head))
    verdict, facts, _ = run(tmp_path)
    assert dialect in verdict and verdict.endswith("give --model to check it")
    assert facts["dialect"] == dialect and facts["header"] == "none: a published head"
    assert facts.get("auxiliary layers") == AUX_LAYERS.get(dialect)
    assert facts.get("made for") == ("owner/Some-Model" if "speculators" in dialect else None)
    says_base = dialect.split()[0] in ("SpecForge", "NVIDIA", "speculators")
    assert facts["RoPE"] == f"base {'500,000' if says_base else '10,000 (not said)'}, no scaling"
    trimmed = "EAGLE-3" in dialect
    is_normed = head.config.eagle3 is not None and head.config.eagle3.norm_before_residual
    assert ("residual stream begins normed" in facts.get("norms", "")) == is_normed
    assert facts["draft vocabulary"] == ("30 of 60" if trimmed else "60 of 60")
    assert facts["LM head"] == ("its own" if trimmed else "the target's")
    assert facts["embedding"] == "the target's"
    assert "float32" in facts["size"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_scaling": Llama3RopeScaling(8.0, 1.0, 4.0, 64)}, "llama3 scaling x 8"),
        ({"rope_linear_factor": 2.5}, "linear scaling x 2.5"),
        ({"rope_freq_factors": (1.0, 2.0, 3.0, 4.0)}, "a factor by frequency"),
        ({"sliding_window": 2048, "ffn_dim": 30_000}, "no scaling"),
    ],
    ids=str,
)
def test_facts_of_rope_and_window(tmp_path, changes, expected):
    head = random_head(random_target(TARGET), DRAFT_IDS, **changes)
    save_head(tmp_path, head, {"tau": "high"}, torch.float16)
    verdict, facts, _ = run(tmp_path)
    assert verdict.startswith("EAGLE-1/2 head (fasteagle), give")
    assert facts["RoPE"] == f"base 500,000, {expected}"
    window = "2,048 keys" if "sliding_window" in changes else None
    assert facts.get("sliding window") == window
    n = int(facts["size"].split()[0].replace(",", ""))
    assert facts["size"] == f"{n:,} parameters, {2 * n / 1e6:.1f} MB in float16", "no map in it"
    assert facts["header"] == "made for an unnamed model, at full precision"


def test_layers_beyond_the_blocks_are_not_measured(own_head, tiny_dir, monkeypatch):
    """Blocks are counted by their input: the last number is that of the final features."""
    edit_json(own_head / "config.json", tap_layers=[0, 1, 2])
    layers = []
    monkeypatch.setattr(module, "_accepted", lambda *arguments: layers.append(arguments[-1]) or 0.0)
    run(own_head, "--model", tiny_dir, "--probe", "--precision", "fp32")
    assert layers == [None, (1, 2, 3)]
    edit_json(own_head / "config.json", tap_layers=[1, 2, 3])
    run(own_head, "--model", tiny_dir, "--probe", "--precision", "fp32")
    assert layers[2:] == [None, (0, 1, 2)]


def test_a_head_that_reads_no_blocks_has_nothing_to_compare(head_dirs, tiny_dir, monkeypatch):
    monkeypatch.setattr(module, "_accepted", lambda *arguments: 1.5)
    options = ("--model", tiny_dir, "--probe", "--precision", "fp32")
    assert run(head_dirs / "eagle1", *options)[2].stdout.endswith(
        "1.50 drafted tokens accepted a pass\n"
    )


def test_a_head_of_ours_with_its_model(own_head, tiny_dir, tmp_path):
    verdict, facts, _ = run(own_head, "--model", tiny_dir)
    assert verdict == f"EAGLE-3 head (fasteagle), fits {tiny_dir}"
    assert facts["header"] == "made for tiny, at int4-g64, tau 2.50"
    assert facts["calibration"] == "made for exactly these weights"
    assert facts["auxiliary layers"] == "the inputs of blocks 0, 1, 3; listed as such"
    _, facts, _ = run(own_head, "--model", tiny_dir, "--int4")
    assert facts["calibration"].startswith("made for other weights")  # than those that would run
    _, facts, _ = run(own_head, "--tap-layers", "2,20,37")  # of a model deeper than one is guessed
    assert facts["fit"] == "give --model to check it"
    _, facts, _ = run(own_head, "--model", tiny_dir, "--tap-layers", "0,2,3")
    assert facts["auxiliary layers"] == "the inputs of blocks 0, 2, 3, as asked"


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"vocab_size": 999, "draft_vocab_size": 999}, (), "of 999, the model has 260"),
        ({"tap_layers": [0, 1, 4]}, (), "auxiliary layers 0, 1, 4 must ascend within 0 .. 3"),
        ({"intermediate_size": 7}, (), "mlp.down_proj.weight is (64, 96), expected (64, 7)"),
        ({}, ("--tap-layers", "0,1"), "fc reads 192 values, 3 layers of 64, but the layers are 0"),
    ],
)
def test_what_is_wrong_is_in_the_verdict(own_head, tiny_dir, changes, options, message):
    edit_json(own_head / "config.json", **changes)
    verdict, facts, _ = run(own_head, "--model", tiny_dir, *options, code=2)
    assert f"{own_head}: " not in verdict, "the head has just been named"
    assert "that does not run" in verdict and message in verdict and message in facts["fit"]


def test_what_is_no_head_costs_one_line(own_head, tmp_path):
    for path, message in (
        (tmp_path / "nowhere", "no such folder or .gguf file, and no Hugging Face id"),
        ("llama2-70b", "no draft head ships for llama2-70b and none is published: give"),
    ):
        _, _, result = run(path, code=2)
        assert message in result.stderr and len(result.stderr.strip().splitlines()) == 1
    edit_json(own_head / "config.json", parallel_drafting=True)
    _, _, result = run(own_head, code=2)
    assert "P-EAGLE" in result.stderr
    _, _, result = run(own_head, "--probe", code=2)
    assert "--probe measures on a model: add --model" in result.stderr


def test_probe_runs_and_says_which_layers_are_best(own_head, tiny_dir, monkeypatch):
    options = ("--model", tiny_dir, "--probe", "--precision", "fp32")
    monkeypatch.setattr(module, "PROBE_TOKENS", 8)
    _, _, result = run(own_head, *options)
    assert "with layers 0, 1, 3: " in result.stdout and "1, 2, 4" not in result.stdout
    edit_json(own_head / "config.json", tap_layers=[0, 1, 2])
    known = {None: 0.2, (1, 2, 3): 1.5}
    monkeypatch.setattr(module, "_accepted", lambda files, engine, tokenizer, layers: known[layers])
    _, _, result = run(own_head, *options)
    assert "with layers 1, 2, 3: 1.50 drafted tokens accepted a pass" in result.stdout
    assert result.stdout.endswith("better: --tap-layers 1,2,3\n")
    known[(1, 2, 3)] = 0.1
    assert run(own_head, *options)[2].stdout.endswith("best as read\n")


def test_a_probe_leaves_no_head_in_memory(own_head, tiny_dir, model, monkeypatch):
    monkeypatch.setattr(module, "PROBE_TOKENS", 8)
    engine, files = Engine(model, 512), HeadFiles(own_head, "here")
    (measured,) = module.measure_aux_layers(files, engine, load_tokenizer(tiny_dir))
    assert measured[0] == (0, 1, 3) and engine.drafter is None


def test_aux_layers_by_option_reach_the_engine(own_head, model, checkpoint):
    draft = DraftOptions(head=str(own_head), tap_layers=(0, 1, 2))
    drafter = drafting_of(draft, model.config).drafter(
        "tiny", Engine(model, 512), checkpoint, lambda line: None
    )
    assert drafter.aux_layers == (0, 1, 2)
