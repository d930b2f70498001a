"""Which reader a folder with quantized weights gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fasteagle.loading.checkpoint import Checkpoint
from fasteagle.loading.stored import METHOD, StoredFolder


def open_quantized(path: Path, raw: dict[str, Any]) -> Checkpoint:
    """Open a folder whose config.json has a `quantization_config`, or a GPTQ tool's file beside it.

    Raises `FasteagleError`.
    """
    settings = raw.get("quantization_config")
    if isinstance(settings, dict) and settings.get("quant_method") == METHOD:
        return StoredFolder(path, raw)
    from fasteagle.loading import imported as importers

    return importers.open_quantized(path, raw)
