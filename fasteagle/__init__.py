"""Lossless speculative decoding of Llama-family models, for one text or a few at once.

    import fasteagle

    with fasteagle.load("smollm2-135m") as llm:
        print(llm.chat("Why is the sky blue?").text)

Importing this package is cheap: only `load` imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fasteagle.errors import FasteagleError as FasteagleError
from fasteagle.errors import require_linux

if TYPE_CHECKING:
    from fasteagle.answering.answer import Chunk as Chunk
    from fasteagle.llm import LLM as LLM
    from fasteagle.llm import Answer as Answer
    from fasteagle.llm import load as load

__version__ = "0.1.0"
__all__ = ["LLM", "Answer", "Chunk", "FasteagleError", "load"]


def __getattr__(name: str) -> Any:
    """Import a name of the API when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module 'fasteagle' has no attribute {name!r}")
    require_linux()
    import fasteagle.llm  # torch comes with it

    return getattr(fasteagle.llm, name)
