"""Files that an answer may quote, as token ids for the lookup, within bounded memory."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

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
        text, used, size = _read(path, left)
        left -= used
        if used < size:
            notify(
                f"warning: lookup file {path}: only the first {used / MiB:.1f} of "
                f"{size / MiB:.1f} MiB are used ({MAX_BYTES // MiB} MiB of all files): "
                "give the parts that will be quoted"
            )
        documents.append([token for piece in _pieces(text) for token in tokenizer.encode(piece)])
    return documents


def _read(path: Path, limit: int) -> tuple[str, int, int]:
    """Return the text of at most `limit` bytes, their number, and the size of the file."""
    try:
        if path.is_dir():
            raise FasteagleError(f"lookup file {path} is a folder: name its files")
        size = path.stat().st_size
        with path.open("rb") as file:
            raw = file.read(limit)
    except OSError as error:
        raise FasteagleError(
            f"lookup file {path}: {(error.strerror or 'cannot be read').lower()}"
        ) from error
    size = max(size, len(raw))  # a pipe has none
    text = _decoded(raw, path, whole=len(raw) == size)
    if not text.strip() and limit:
        raise FasteagleError(f"lookup file {path} is empty: leave it out")
    return text, len(raw), size


def _decoded(raw: bytes, path: Path, whole: bool) -> str:
    """Decode UTF-8; leave out a character that is cut off at the end of a part of a file."""
    bad = raw.find(b"\0")
    try:
        if bad < 0:
            return codecs.getincrementaldecoder("utf-8-sig")().decode(raw, whole)
    except UnicodeDecodeError as error:
        bad = error.start
    raise FasteagleError(
        f"lookup file {path} is no UTF-8 text (byte 0x{raw[bad]:02x} at offset {bad}): "
        "give text or code"
    )


def _pieces(text: str) -> Iterator[str]:
    """Yield pieces of whole lines, about `PIECE` characters each; a longer line is cut."""
    begin = 0
    while begin < len(text):
        end = begin + PIECE
        if end < len(text):
            end = text.rfind("\n", begin, end) + 1 or end
        yield text[begin:end]
        begin = end
