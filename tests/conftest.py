"""Tiny random models in every layout we read, and a home of its own for each test."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from fasteagle.loading import registry

SCRIPTS = Path(__file__).parent.parent / "scripts"
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIALS = ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
TINY_VOCAB = 260  # 256 bytes and the special tokens

TINY_SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": TINY_VOCAB,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,  # far from uniform logits, so that argmax is not a coin toss
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--golden", metavar="DIR", help="More recorded cases of draft heads to match.")


@pytest.fixture(autouse=True)
def own_home(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing a test does touches the caches of the person who runs it, nor reads them.

    Tests of the real model keep the user cache: the model in it is 94 MiB to download.
    """
    if "real_model" in request.keywords:
        return
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "state"))


@pytest.fixture(autouse=True)
def two_threads() -> None:
    torch.set_num_threads(2)


def hf_class(family: str):
    """(transformers config class, model class, settings beyond the tiny shape) of a family."""
    import transformers as t

    gqa = {"num_key_value_heads": 2}
    llama3_rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    families = {
        "llama2": (t.LlamaConfig, t.LlamaForCausalLM, {}),
        "llama3": (t.LlamaConfig, t.LlamaForCausalLM, gqa | {"rope_parameters": llama3_rope}),
        "vicuna": (
            t.LlamaConfig,
            t.LlamaForCausalLM,
            {
                "rms_norm_eps": 1e-6,
                "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
            },
        ),
        "mistral": (t.MistralConfig, t.MistralForCausalLM, gqa | {"sliding_window": 7}),
        "qwen2": (t.Qwen2Config, t.Qwen2ForCausalLM, gqa),
        "qwen3": (t.Qwen3Config, t.Qwen3ForCausalLM, gqa | {"head_dim": 32}),
        "smollm2": (t.LlamaConfig, t.LlamaForCausalLM, gqa | {"tie_word_embeddings": True}),
    }
    return families[family]


FAMILIES = ("llama2", "llama3", "vicuna", "mistral", "qwen2", "qwen3", "smollm2")


def make_hf_model(family: str, **overrides):
    """A random transformers model; biases and norms random too, so that none can be forgotten."""
    config_class, model_class, extra = hf_class(family)
    torch.manual_seed(7)
    config = config_class(**{**TINY_SHAPE, **extra, **overrides})
    config._attn_implementation = "eager"
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                mean = 1.0 if "norm" in name else 0.0
                parameter.copy_(mean + 0.2 * torch.randn_like(parameter))
    return model


def save_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer with a chat template, in Hugging Face files."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def save_tiny(folder: Path, family: str = "llama3", **overrides) -> Path:
    """A complete Hugging Face folder of a tiny random model."""
    model = make_hf_model(family, **overrides)
    model.generation_config.eos_token_id = TINY_VOCAB - 1
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hugging Face folder of a tiny Llama; do not write into it."""
    return save_tiny(tmp_path_factory.mktemp("tiny") / "model")


def edit_json(path: Path, **changes) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, **changes}))


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The embedded default model, downloaded if this machine does not have it yet."""
    return registry.resolve(registry.DEFAULT_MODEL).path


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """An empty hub cache, and a hub that must not be asked."""
    import huggingface_hub._snapshot_download
    import huggingface_hub.constants

    path = tmp_path / "hub"
    path.mkdir()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(path))
    monkeypatch.setattr(huggingface_hub._snapshot_download.constants, "HF_HUB_CACHE", str(path))

    def asked(*args, **kwargs):
        raise AssertionError("asked the network")

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", asked)
    return path


def write_questions(path: Path, *questions: list[str]) -> Path:
    path.write_text("".join(json.dumps({"turns": turns}) + "\n" for turns in questions))
    return path


@pytest.fixture
def questions(tmp_path):
    """Three questions for the benchmark, four turns."""
    return write_questions(tmp_path / "q.jsonl", ["one", "and then?"], ["two"], ["three"])


@pytest.fixture
def script(monkeypatch):
    """Runs scripts/tokens_per_sec.py in this process."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import tokens_per_sec

    return lambda *args: CliRunner().invoke(tokens_per_sec.main, [str(a) for a in args])


@pytest.fixture
def tiny_preset(monkeypatch):
    """The registry knows a tiny shape under the name it returns: int4 groups and all."""
    small = dataclasses.replace(
        registry.preset("llama2-7b"),
        dim=64,
        n_layer=2,
        n_head=4,
        n_kv_head=4,
        head_dim=16,
        ffn_dim=96,
        vocab_size=100,
    )
    monkeypatch.setitem(registry.REGISTRY, "llama2-70b", registry.Entry(small, "none"))
    return "llama2-70b"


def output_without_triton(code: str) -> str:
    """What `code` prints in a process of its own in which Triton cannot be imported."""
    code = "import sys; sys.modules['triton'] = None\n" + code
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def write_random_text(path: Path, n: int, length: int) -> Path:
    """`n` conversations of `length` random token ids each, as training text."""
    g = torch.Generator().manual_seed(0)
    with path.open("w") as file:
        for _ in range(n):
            ids = torch.randint(0, 256, (length,), generator=g).tolist()
            file.write(json.dumps({"ids": ids, "prompt_len": 8, "T": 0.0}) + "\n")
    return path
