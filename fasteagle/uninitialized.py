"""Building of modules without initial values, which checkpoints fill.

Initial values cost time. On `meta`, where there are none, torch imports its compiler to skip them,
which takes 1.5 seconds of each start.
"""

from __future__ import annotations

from typing import Any

from torch.overrides import TorchFunctionMode


class Uninitialized(TorchFunctionMode):
    """Context in which `torch.nn.init` does nothing."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)
