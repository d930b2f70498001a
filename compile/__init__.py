"""`torch.compile` settings and what runs compiled; the model itself knows nothing of it."""

from fasteagle.compile.blocks import BlockCompiler, configure

__all__ = ["BlockCompiler", "configure"]
