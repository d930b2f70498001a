"""Find the draft head of a model.

In this order: the one that is named, the user cache (heads calibrated here), the one that ships
with the package, the published one of the registry, a layer for multi-token prediction in the
model's own files.
"""

from __future__ import annotations

import dataclasses
import os
from importlib import resources
from pathlib import Path
from typing import Any

from fasteagle.config import Eagle3Config, HeadConfig, ModelConfig, default_aux_layers, draft_block
from fasteagle.config_hf import head_from_hf
from fasteagle.errors import FasteagleError
from fasteagle.loading import hub
from fasteagle.loading.entries import EAGLE3, EAGLE3_TOKENS, REGISTRY, PublishedHead
from fasteagle.loading.heads.mtp import holds_layer
from fasteagle.loading.heads.read import open_head, read_header
from fasteagle.loading.registry import head_revision
from fasteagle.loading.tensors import Checkpoint, files_digest, read_json
from fasteagle.model import EagleHead
from fasteagle.paths import cache_dir

SHIPPED = "shipped with fasteagle"


@dataclasses.dataclass(frozen=True)
class LoadedHead:
    """Draft head that fits its target in width and vocabulary, and its origin."""

    origin: str
    head: EagleHead
    header: dict[str, Any] | None
    digest: str = ""  # of its files
    made_for: str | None = None  # the model that its files name


@dataclasses.dataclass(frozen=True)
class HeadFiles:
    """Draft head folder or file, and its origin in words for the user."""

    path: Path
    origin: str

    def loaded(self, config: ModelConfig, aux_layers: tuple[int, ...] | None = None) -> LoadedHead:
        """Load the draft head for a target of `config`. Raises `FasteagleError` as `fitted`."""
        source = open_head(self.path)
        head, digest = source.head(config, aux_layers), files_digest(self.path)
        return LoadedHead(self.origin, head, source.header, digest, source.made_for)


def own_layer(checkpoint: Checkpoint, path: Path | None) -> HeadFiles | None:
    """Return the layer for multi-token prediction in a model's files at `path`, if there is one."""
    if path is None or not holds_layer(checkpoint):
        return None
    return HeadFiles(path, "the model's own layer")


def find_head(name: str, identity: str) -> HeadFiles | None:
    """Find the draft head for model `name` with fingerprint `identity`, None if there is none."""
    cached = cache_dir() / "heads" / identity
    if (cached / "config.json").exists():
        return HeadFiles(cached, "calibrated here")
    # A model given by its path may be one with a shipped head: compare fingerprints.
    for folder in _shipped_heads().values():
        if (read_header(folder) or {}).get("target_fingerprint") == identity:
            return HeadFiles(folder, SHIPPED)
    return _known_head(name)


def may_find_head(name: str, checkpoint: Checkpoint) -> bool:
    """Return whether there may be a draft head for a model, before its weights are loaded."""
    if has_known_head(name):
        return True
    if any((cache_dir() / "heads").glob("*/config.json")):  # perhaps of the quantized weights
        return True
    return find_head(name, checkpoint.fingerprint) is not None


def named_head(head: str) -> HeadFiles:
    """Find a draft head by its folder, .gguf file, Hugging Face id or model's registry name.

    Raises `FasteagleError` for anything else.
    """
    if not head:
        raise FasteagleError("head '' is empty: give a folder, a .gguf file or an id")
    # `os.path` functions return False for names that no system accepts; those of `Path` raise.
    path = Path(os.path.expanduser(head))
    if head in REGISTRY and not os.path.exists(path):
        files = _known_head(head)
        if files is None:
            raise FasteagleError(
                f"no draft head ships for {head} and none is published: give a folder, a .gguf "
                "file or a Hugging Face id"
            )
        return files
    if os.path.isdir(path) or (os.path.isfile(path) and path.suffix == ".gguf"):
        return HeadFiles(path, str(path))
    if hub.is_repo_id(head) and not os.path.exists(path):
        return HeadFiles(hub.fetch_repo(head, head_revision(head)), head)
    raise FasteagleError(
        f"head {head[:100]!r}: no such folder or .gguf file, and no Hugging Face id (owner/name)"
    )


def _known_head(name: str) -> HeadFiles | None:
    """Return the draft head that ships for a model, else fetch the published one, if any."""
    shipped, published = _shipped_heads().get(name), _published(name)
    if shipped is not None:
        return HeadFiles(shipped, SHIPPED)
    if published is None:
        return None
    return HeadFiles(hub.fetch_repo(published.repo, published.revision), published.repo)


def _published(name: str) -> PublishedHead | None:
    """Return the first draft head that the registry names for a model."""
    return next(iter(REGISTRY[name].heads), None) if name in REGISTRY else None


def _shipped_heads() -> dict[str, Path]:
    """Return the draft head folders inside the package by the registry models' names."""
    folder = Path(str(resources.files("fasteagle") / "data" / "heads"))
    return {path.parent.name: path.parent for path in sorted(folder.glob("*/config.json"))}


def has_known_head(name: str) -> bool:
    """Return whether a draft head for model `name` is shipped or published."""
    return is_shipped(name) or _published(name) is not None


def is_shipped(name: str) -> bool:
    """Return whether a draft head for model `name` is inside the package."""
    return name in _shipped_heads()


def head_shape(name: str, config: ModelConfig) -> HeadConfig:
    """Return the shape of the shipped draft head of model `name`, else of the published one.

    Published heads have a block like the target's. A model without one gets the shape of EAGLE-1/2:
    `fc` [dim, 2 dim] and the whole vocabulary. Reads no weights.
    """
    shipped, published = _shipped_heads().get(name), _published(name)
    if shipped is not None:
        path = shipped / "config.json"
        return head_from_hf(read_json(path), str(path))
    block = dataclasses.replace(draft_block(config), rope_base=10000.0)
    if published is None or published.algorithm != EAGLE3:
        return HeadConfig(block, config.vocab_size)
    own = Eagle3Config(default_aux_layers(config.n_layer), target_dim=config.dim)
    return HeadConfig(block, EAGLE3_TOKENS, fc_bias=False, eagle3=own)
