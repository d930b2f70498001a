"""Find the draft head of a model.

Looked for in this order: the one asked for, the user cache (heads calibrated here), the one that
ships with the package, the published one the registry names.
"""

from __future__ import annotations

import dataclasses
from importlib import resources
from pathlib import Path
from typing import Any

from fasteagle.config import Eagle3Config, HeadConfig, ModelConfig, draft_block, head_from_hf
from fasteagle.errors import FasteagleError
from fasteagle.loading import hub
from fasteagle.loading.entries import EAGLE3, REGISTRY
from fasteagle.loading.head_dialects import default_taps
from fasteagle.loading.head_file import built_head, open_head, read_header
from fasteagle.loading.registry import head_revision
from fasteagle.loading.tensors import files_digest, read_json
from fasteagle.model import EagleHead
from fasteagle.paths import cache_dir


@dataclasses.dataclass(frozen=True)
class LoadedHead:
    """A draft head whose width and vocabulary are its target's, and where it comes from."""

    origin: str
    head: EagleHead
    header: dict[str, Any] | None
    digest: str = ""  # of its files
    made_for: str | None = None  # the model that its files name


@dataclasses.dataclass(frozen=True)
class FoundHead:
    """A head directory or file, and its origin in words for the user."""

    path: Path
    origin: str

    def loaded(self, config: ModelConfig, tap_layers: tuple[int, ...] | None = None) -> LoadedHead:
        """The head, over a target of `config`. Raises `FasteagleError`, see `load_head`."""
        source = open_head(self.path, config)
        head = built_head(source, config, tap_layers)
        digest = files_digest(self.path)
        return LoadedHead(self.origin, head, source.header, digest, source.made_for)


def find_head(asked: str | None, name: str, identity: str) -> FoundHead | None:
    """The head for model `name` with fingerprint `identity`, or None.

    Raises `FasteagleError` if the head that was asked for is not found.
    """
    if asked is not None:
        return named_head(asked)
    cached = cache_dir() / "heads" / identity
    if (cached / "config.json").exists():
        return FoundHead(cached, "calibrated here")
    # A model given by its path may be one with a shipped head: compare fingerprints.
    for shipped in _shipped_heads():
        header = read_header(shipped) or {}
        if shipped.name == name or header.get("target_fingerprint") == identity:
            return FoundHead(shipped, "shipped with fasteagle")
    return _published_head(name)


def asked_head(asked: str) -> FoundHead:
    """A head by its folder, .gguf file or Hugging Face id. Raises `FasteagleError`."""
    path = Path(asked).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return FoundHead(path, str(path))
    if hub.is_repo_id(asked) and not path.exists():
        return FoundHead(hub.fetch_repo(asked, head_revision(asked)), asked)
    raise FasteagleError(
        f"head {asked!r}: no such folder or .gguf file, and no Hugging Face id (owner/name)"
    )


def named_head(asked: str) -> FoundHead:
    """A head as `asked_head` takes it, or the one of a model by its registry name."""
    if asked not in REGISTRY or Path(asked).exists():
        return asked_head(asked)
    shipped = [path for path in _shipped_heads() if path.name == asked]
    found = FoundHead(shipped[0], "shipped with fasteagle") if shipped else _published_head(asked)
    if found is None:
        raise FasteagleError(
            f"no draft head ships for {asked} and none is published: give a folder, a .gguf file "
            "or a Hugging Face id"
        )
    return found


def _published_head(name: str) -> FoundHead | None:
    heads = REGISTRY[name].heads if name in REGISTRY else ()
    if not heads:
        return None
    return FoundHead(hub.fetch_repo(heads[0].repo, heads[0].revision), heads[0].repo)


def _shipped_heads() -> list[Path]:
    """Head folders inside the package, named after the registry models they are for."""
    folder = Path(str(resources.files("fasteagle") / "data" / "heads"))
    return [path.parent for path in sorted(folder.glob("*/config.json"))]


def is_shipped(name: str) -> bool:
    """Whether a head for model `name` is inside the package."""
    return any(path.name == name for path in _shipped_heads())


def head_shape(name: str, config: ModelConfig) -> HeadConfig:
    """Shape of the draft head of model `name`: that of the shipped head, else the published one.

    Published heads have a block like the target's. A model without one gets the shape of EAGLE-1/2:
    `fc` [dim, 2 dim] and the whole vocabulary. Reads no weights.
    """
    for shipped in _shipped_heads():
        if shipped.name == name:
            raw = read_json(shipped / "config.json")
            if (raw["hidden_size"], raw["vocab_size"]) == (config.dim, config.vocab_size):
                return head_from_hf(raw, str(shipped / "config.json"))
    block = dataclasses.replace(draft_block(config), rope_base=10000.0)
    head = next(iter(REGISTRY[name].heads), None) if name in REGISTRY else None
    if head is None or head.algorithm != EAGLE3:
        return HeadConfig(block, config.vocab_size)
    own = Eagle3Config(default_taps(config.n_layer), target_dim=config.dim)
    size = min(head.draft_vocab_size, config.vocab_size)
    return HeadConfig(block, size, fc_bias=False, eagle3=own)
