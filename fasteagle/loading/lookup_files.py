"""Files that an answer may quote, as token ids for the lookup, within bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from fasteagle.config_fields import text_of
from fasteagle.errors import FasteagleError
from fasteagle.loading.tokenizer import ChatTokenizer

MAX_BYTES = 4 << 20  # of all files together: about a million tokens, which take 24 MB
PIECE = 1 << 16  # characters encoded at once: a tokenizer needs many bytes for each
MiB = 1 << 20


def read_documents(
    paths: Sequence[Path], tokenizer: ChatTokenizer, notify: Callable[[str], None]
) -> list[list[int]]:
    """Return the token ids of text or code files. Raises `FasteagleError` for other files.

    Files beyond `MAX_BYTES` are used in part or not at all, and `notify` says so.
    """
    documents: list[list[int]] = []
    left = MAX_BYTES
    for path in paths:
        text = text_of(path).removeprefix("\ufeff")
        if not text.strip():
            raise FasteagleError(f"lookup file {path} is empty: leave it out")
        if "\0" in text:
            raise FasteagleError(f"lookup file {path} is no text (byte 0x00): give text or code")
        data = text.encode()
        if len(data) > left:
            notify(
                f"warning: lookup file {path}: only the first {left / MiB:.1f} of "
                f"{len(data) / MiB:.1f} MiB are used ({MAX_BYTES // MiB} MiB of all files): "
                "give the parts that will be quoted"
            )
            text = data[:left].decode(errors="ignore")  # without half a character at the end
        left = max(0, left - len(data))
        documents.append([token for piece in _pieces(text) for token in tokenizer.encode(piece)])
    return documents


def _pieces(text: str) -> Iterator[str]:
    """Yield pieces of whole lines, about `PIECE` characters each; a longer line is cut."""
    begin = 0
    while begin < len(text):
        end = begin + PIECE
        if end < len(text):
            end = text.rfind("\n", begin, end) + 1 or end
        yield text[begin:end]
        begin = end
