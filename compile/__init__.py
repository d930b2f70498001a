"""`torch.compile` settings and what runs compiled; the model itself knows nothing of it."""

from fasteagle.compile.inductor import BlockCompiler, configure

__all__ = ["BlockCompiler", "configure"]
