"""Compiled and native backends of the model, which does not depend on them."""

from fasteagle.compile.blocks import BlockCompiler, configure

__all__ = ["BlockCompiler", "configure"]
