"""Python on a CPU without bf16: `pytest --no-bf16` puts this folder on the path of processes."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from types import ModuleType


def without_bf16(module: ModuleType) -> None:
    """Make `torch.cpu.get_capabilities` report none of the bf16 instruction sets."""
    original = module.get_capabilities
    module.get_capabilities = lambda: {k: v for k, v in original().items() if "bf16" not in k}


class _Finder(importlib.abc.MetaPathFinder):
    """Changes `torch.cpu` once somebody imports it; torch itself is not imported here."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch.cpu":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            without_bf16(module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder())
