"""What is wrong in a file, and what a person is told: one line, exit code 2, before loading."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from fasteagle.config_hf import ERNIE_MOE, MIMO, SUPPORTED_ARCHITECTURES, from_hf
from fasteagle.errors import FasteagleError
from fasteagle.loading.checkpoint import load_model, open_checkpoint
from fasteagle.loading.heads.read import HEADER_KEY, open_head
from fasteagle.loading.heads.write import save_head
from helpers import edit_json, invoke, random_head

CONFIG, HEAD = "model/config.json", "head/config.json"
HEADER = "head/model.safetensors"
GENERATION, INDEX = "model/generation_config.json", "model/model.safetensors.index.json"
LLAMA3 = {"rope_type": "llama3", "factor": 8}
EQUAL = {**LLAMA3, "low_freq_factor": 4, "high_freq_factor": 4}
EVEN = "num_attention_heads (4) times an even number, or head_dim given"
NAN, INF = float("nan"), float("inf")

# The file, the fields changed in it or its whole text, and what the line says after its name.
BAD = [
    # A model of hidden_size 64 with 4 attention heads and 2 KV heads
    (CONFIG, {"hidden_size": "64"}, 'hidden_size is "64": must be an integer from 1 to 1,048,576'),
    (CONFIG, {"hidden_size": None}, "hidden_size is null: must be an integer from 1 to 1,048,576"),
    (CONFIG, {"hidden_size": 0}, "hidden_size is 0: must be an integer"),
    (CONFIG, {"hidden_size": 2**40}, "hidden_size is 1099511627776: must be an integer"),
    (CONFIG, {"hidden_size": 2, "head_dim": None}, f"hidden_size is 2: must be {EVEN}"),
    (CONFIG, {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000: must be an integer"),
    (CONFIG, {"num_key_value_heads": 3}, "num_key_value_heads is 3: must be a divisor of"),
    (CONFIG, {"head_dim": 15}, "head_dim is 15: must be even"),
    (CONFIG, {"vocab_size": -1}, "vocab_size is -1: must be an integer"),
    (CONFIG, {"rms_norm_eps": NAN}, "rms_norm_eps is NaN: must be a number"),
    (CONFIG, {"max_position_embeddings": 0}, "max_position_embeddings is 0: must be"),
    (CONFIG, {"rope_theta": INF}, "rope_theta is Infinity: must be a number"),
    (CONFIG, {"rope_parameters": "x"}, 'rope_parameters is "x": must be a JSON object'),
    (CONFIG, {"rope_parameters": {"rope_type": 1}}, "rope_parameters.rope_type is 1: must be"),
    (CONFIG, {"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor is missing"),
    (CONFIG, {"rope_parameters": LLAMA3}, "rope_parameters.low_freq_factor is missing"),
    (CONFIG, {"rope_parameters": EQUAL}, "rope_parameters.high_freq_factor is 4: must be above"),
    (CONFIG, {"rope_parameters": {"rope_type": "yarn"}}, "RoPE scaling 'yarn'"),
    (CONFIG, {"architectures": 5}, "architectures is 5: must be a list of texts"),
    (CONFIG, {"architectures": None}, "architecture '(none)' is not supported; supported: Llama"),
    (CONFIG, {"architectures": ["PhimoeForCausalLM"]}, "architecture 'Phimoe"),
    (CONFIG, {"hidden_act": "gelu"}, 'hidden_act is "gelu": must be "silu"'),
    (CONFIG, {"dtype": "float77"}, 'dtype is "float77": must be "auto" or "bfloat16" or "float16"'),
    (CONFIG, {"torch_dtype": []}, "torch_dtype is []: must be a text"),
    (CONFIG, {"attention_bias": True}, "attention_bias is true: must be false"),
    (CONFIG, {"attention_bias": "no"}, 'attention_bias is "no": must be true or false'),
    (CONFIG, {"tie_word_embeddings": 1}, "tie_word_embeddings is 1: must be true or false"),
    (CONFIG, {"initializer_range": "x"}, "Field 'initializer_range' expected float"),
    # A draft head
    (HEAD, {"hidden_size": "576"}, 'hidden_size is "576": must be an integer'),
    (HEAD, {"num_attention_heads": 0}, "num_attention_heads is 0: must be an integer"),
    (HEAD, {"draft_vocab_size": 261}, "draft_vocab_size is 261: must be an integer from 1 to 260"),
    (HEAD, {"rope_theta": [1]}, "rope_theta is [1]: must be a number"),
    (HEAD, {"rope_freq_factors": [1.5]}, "rope_freq_factors is [1.5]: must be 8 numbers, half of"),
    (HEAD, {"bias": "yes"}, 'bias is "yes": must be true or false'),
    (HEAD, {"quantization_config": {"bits": 4}}, 'quantization_config is {"bits": 4}: must be'),
    (HEADER, {"ranks": "x"}, 'its header: ranks is "x": must be lists of numbers from 0 to 1'),
    (HEADER, {"ranks": [[0.5], [2]]}, "its header: ranks is [[0.5], [2]]: must be lists of"),
    (HEADER, {"ranks": [[0.5], []]}, "its header: ranks is [[0.5], []]: must be lists of"),
    (HEADER, {"target_fingerprint": 4}, "its header: target_fingerprint is 4: must be a text"),
    (HEADER, {"scheme": 4}, "its header: scheme is 4: must be a text"),
    (HEADER, "[1]", "its header must be a JSON object"),
    # Whole files
    (CONFIG, "{", "cannot be read as JSON"),
    (CONFIG, "[1]", "expected a JSON object, found list: fetch"),
    (CONFIG, "[" * 100_000, "cannot be read as JSON (nested too deeply): correct"),
    (CONFIG, '{"architectures": ["LlamaForCausalLM"]}', "hidden_size is missing: must"),
    (INDEX, '{"weight_map": 5}', "weight_map is 5: must be a JSON object"),
    (INDEX, "{}", "its weight_map names no tensor"),
    (INDEX, '{"weight_map": {"a": 1}}', "weight_map.a is 1: must be a text"),
    (INDEX, '{"weight_map": {"a": "/etc/a"}}', 'weight_map.a is "/etc/a": must be the name of a f'),
    (INDEX, f'{{"weight_map": {{"a": "{"x" * 300}"}}}}', "weight_map.a is "),
    (GENERATION, '{"eos_token_id": "x"}', 'eos_token_id is "x": must be a token id or a list of'),
    (GENERATION, '{"eos_token_id": [1, null]}', "eos_token_id is [1, null]: must"),
]


@pytest.fixture(scope="module")
def good(tiny_dir, tmp_path_factory):
    """A model and a draft head for it that nothing is wrong with."""
    folder = tmp_path_factory.mktemp("good")
    shutil.copytree(tiny_dir, folder / "model")
    checkpoint = open_checkpoint(tiny_dir)
    target = load_model(checkpoint, dtype=torch.float32, device="cpu", max_seq_len=64)
    head = random_head(target, rope_scaling=None, rope_base=10000.0)
    save_head(folder / "head", head, {}, torch.float32)
    return folder


@pytest.mark.parametrize(("file", "written", "message"), BAD)
def test_bad_files_cost_one_line(good, tmp_path, monkeypatch, file, written, message):
    monkeypatch.setattr(
        "fasteagle.loading.open.load_model", lambda *a, **k: pytest.fail("the target was loaded")
    )
    folder = shutil.copytree(good, tmp_path / "files")
    if file == INDEX:  # beside a single file it would not be read
        (folder / "model/model.safetensors").rename(folder / "model/model-1.safetensors")
    if file == HEADER:
        header = written if isinstance(written, str) else json.dumps(written)
        tensors = load_file(folder / file)
        save_file(tensors, folder / file, metadata={HEADER_KEY: header})
    elif isinstance(written, str):
        (folder / file).write_text(written)
    else:
        edit_json(folder / file, **written)
    arguments = ["chat", "--model", folder / "model", "--head", folder / "head", "-p", "x"]
    done = invoke(*arguments)
    assert done.exit_code == 2 and done.stdout == "", done.stderr
    assert done.stderr.startswith(f"Error: {folder / file}: {message}")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("architecture", SUPPORTED_ARCHITECTURES)
def test_an_absent_key_has_the_value_of_the_class_of_transformers(architecture):
    if architecture == MIMO:
        pytest.skip("transformers has no class for it")
    kind = getattr(transformers, architecture).config_class
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 4, "intermediate_size": 32, "vocab_size": 99}
    experts = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
    experts |= {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    raw = {"architectures": [architecture], **sizes, **(experts if "Mo" in architecture else {})}
    raw |= experts if "Mixtral" in architecture or "Olmoe" in architecture else {}
    raw |= {"moe_num_experts": 4, "moe_k": 2} if architecture == ERNIE_MOE else {}
    config, ours = kind(**raw), from_hf(raw, "config.json")
    rope = config.rope_parameters
    assert ours.head_dim == (getattr(config, "head_dim", None) or 16)
    assert ours.tie_embeddings == config.tie_word_embeddings
    assert ours.rope_base == rope["rope_theta"] and ours.norm_eps == config.rms_norm_eps
    if architecture in ("MistralForCausalLM", "MixtralForCausalLM"):
        assert ours.sliding_window == config.sliding_window
        assert from_hf(raw | {"sliding_window": None}, "config.json").sliding_window is None


def test_null_is_the_same_as_absent(good, tmp_path):
    """Published configs write null for what they leave to the default."""
    folder = shutil.copytree(good / "model", tmp_path / "model")
    path = folder / "config.json"
    edit_json(path, head_dim=None, sliding_window=None, mlp_bias=None, quantization_config=None)
    config = open_checkpoint(folder).config
    content = json.loads(path.read_text())
    path.write_text(json.dumps({key: v for key, v in content.items() if v is not None}))
    assert open_checkpoint(folder).config == config


def test_what_a_file_says_cannot_break_the_line(good, tmp_path):
    folder = shutil.copytree(good / "model", tmp_path / "model")
    edit_json(folder / "config.json", architectures=["x\nError: \x1b[2J"])
    with pytest.raises(FasteagleError) as caught:
        open_checkpoint(folder)
    assert str(caught.value).isprintable()
    assert str(FasteagleError("a\nb \x1b[2J \u2028 é 東")) == "a\\nb \\x1b[2J \\u2028 é 東"


@pytest.mark.parametrize("name", ["m.gguf", "model.safetensors"])
def test_a_file_that_cannot_be_read_says_so(tiny_dir, tmp_path, monkeypatch, name):
    """One of another user: a traceback, or advice to fetch it again."""
    folder = shutil.copytree(tiny_dir, tmp_path / "m")
    (folder / "m.gguf").write_bytes(b"GGUF")

    def refuse(self, *args, original=Path.open, **keywords):
        if self.name == name:
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return original(self, *args, **keywords)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(FasteagleError, match=rf"{name}: cannot be read \(Permission denied\)"):
        open_checkpoint(folder / name if name == "m.gguf" else folder)


@pytest.mark.parametrize("name", ["m.gguf", "config.json", "tokenizer.json", "model.safetensors"])
def test_a_pipe_is_no_file_of_a_model(tiny_dir, tmp_path, name):
    """Opening one waits for a writer."""
    folder = shutil.copytree(tiny_dir, tmp_path / "m")
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    for read in (open_checkpoint, open_head):
        with pytest.raises(FasteagleError, match=rf"{name} is a pipe or a device: give a file"):
            read(folder / name if name == "m.gguf" else folder)
