"""Modules built without initial values, for checkpoints to fill.

Initial values cost time, and on `meta`, where there are none, torch imports its compiler to leave
them out: 1.5 seconds of each start.
"""

from __future__ import annotations

from typing import Any

from torch.overrides import TorchFunctionMode


class Uninitialized(TorchFunctionMode):
    """Inside, `torch.nn.init` does nothing."""

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
