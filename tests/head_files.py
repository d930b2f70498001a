"""Draft heads read from their files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fasteagle.config import ModelConfig
from fasteagle.loading.heads.read import open_head
from fasteagle.model import EagleHead


def load_head(
    path: Path, target: ModelConfig, aux_layers: tuple[int, ...] | None = None
) -> tuple[EagleHead, dict[str, Any] | None]:
    """A draft head for a target, and its header."""
    source = open_head(path)
    return source.head(target, aux_layers), source.header
