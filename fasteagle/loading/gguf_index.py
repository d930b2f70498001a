"""Index of a GGUF file: its metadata and the place of every tensor.

Reads forward once and allocates nothing that a count in the file asks for: all counts are checked
against the bytes that are left. Token lists are skipped. Format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import struct
from pathlib import Path
from typing import Any

from fasteagle.errors import FasteagleError
from fasteagle.paths import require_readable

VERSIONS = (2, 3)
SHOWN = 8  # values of an array that are kept: auxiliary layers of a head, and what errors show
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9
_MIN_FIELD, _MIN_TENSOR = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8  # bytes


@dataclasses.dataclass(frozen=True)
class GGUFTensor:
    """Place of one tensor in the file; `shape` is in torch's order (rows first)."""

    kind: str
    shape: tuple[int, ...]
    offset: int
    n_bytes: int


@dataclasses.dataclass(frozen=True)
class GGUFIndex:
    """Metadata by key, and tensors by llama.cpp's names."""

    fields: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def read_index(path: Path) -> GGUFIndex:
    """Read the index of `path`. Raises `FasteagleError` for damaged and truncated files."""
    require_readable(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise FasteagleError(
                f"{path}: not a GGUF file (it does not start with 'GGUF'): give a .gguf file, or "
                "the folder of other weights"
            )
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            index = _Reader(path, data).index()
    end = max((tensor.offset + tensor.n_bytes for tensor in index.tensors.values()), default=0)
    if end > size:
        raise FasteagleError(
            f"{path}: ends at byte {size:,}, its index needs {end:,}: fetch it again"
        )
    return index


class _Reader:
    """Reader of values one after the other, from the position `_at` on."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._size = path, data, len(data)
        self._at = 4

    def index(self) -> GGUFIndex:
        version = self._number("<I")
        if version not in VERSIONS:
            known = " and ".join(map(str, VERSIONS))
            raise FasteagleError(
                f"{self._path}: GGUF version {version}, this fasteagle reads {known} "
                "(little-endian): use a newer file"
            )
        n_tensors = self._count("tensors", _MIN_TENSOR)
        n_fields = self._count("metadata fields", _MIN_FIELD)
        fields = dict(self._field() for _ in range(n_fields))
        listed = dict(self._tensor() for _ in range(n_tensors))
        if len(fields) < n_fields or len(listed) < n_tensors:
            raise self._damaged("a name that is there twice")
        alignment = fields.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1:
            raise self._damaged(f"general.alignment {alignment}")
        start, place, tensors = _aligned(self._at, alignment), 0, {}
        for name, tensor in listed.items():
            if tensor.offset != place:  # llama.cpp writes them one after another
                raise self._damaged(f"{name} at {tensor.offset:,} instead of {place:,}")
            tensors[name] = dataclasses.replace(tensor, offset=start + place)
            place += _aligned(tensor.n_bytes, alignment)
        return GGUFIndex(fields, tensors)

    def _field(self) -> tuple[str, Any]:
        key = self._text()
        kind = self._number("<I")
        if kind == _ARRAY:
            return key, self._array(key)
        return key, self._value(key, kind)

    def _value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self._text(errors="replace")  # a vocabulary may hold parts of characters
        if kind not in _SCALARS:
            raise self._damaged(f"{key} of type {kind}")
        return self._number(_SCALARS[kind])

    def _array(self, key: str) -> list[Any]:
        """Return the first `SHOWN` values of an array and skip the others."""
        kind = self._number("<I")
        item = struct.calcsize(_SCALARS.get(kind, "<Q"))  # a text has a length first
        n = self._count(f"values of {key}", item)
        first = [self._value(key, kind) for _ in range(min(n, SHOWN))]
        if kind == _STRING:
            self._skip_texts(n - len(first))
        else:
            self._skip((n - len(first)) * item)
        return first

    def _skip_texts(self, n: int) -> None:
        """Skip `n` texts without a method call for each: a vocabulary has 100,000 and more."""
        data, at, length = self._data, self._at, struct.Struct("<Q").unpack_from
        try:
            for _ in range(n):
                at += 8 + length(data, at)[0]
        except (struct.error, OverflowError):
            raise self._ends() from None
        self._skip(at - self._at)

    def _tensor(self) -> tuple[str, GGUFTensor]:
        """Return a tensor's name and place, counted from the aligned end of the index."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType  # 0.2 s

        name = self._text()
        n_dims = self._number("<I")
        if not 1 <= n_dims <= 4:
            raise self._damaged(f"{name} with {n_dims:,} dimensions")
        shape = tuple(reversed([self._number("<Q") for _ in range(n_dims)]))
        type_id, offset = self._number("<I"), self._number("<Q")
        try:
            kind = GGMLQuantizationType(type_id)
        except ValueError:
            raise FasteagleError(
                f"{self._path}: tensor {name} has type {type_id}, which this fasteagle does "
                "not know: use another file"
            ) from None
        block, block_bytes = GGML_QUANT_SIZES[kind]
        n = math.prod(shape)
        if n == 0 or shape[-1] % block:
            raise self._damaged(f"{name} of shape {shape} in blocks of {block}")
        return name, GGUFTensor(kind.name, shape, offset, n // block * block_bytes)

    def _number(self, form: str) -> Any:
        at = self._at
        self._skip(struct.calcsize(form))
        return struct.unpack_from(form, self._data, at)[0]

    def _text(self, errors: str = "strict") -> str:
        length = self._number("<Q")
        at = self._at
        self._skip(length)
        try:
            return self._data[at : at + length].decode("utf-8", errors)
        except UnicodeDecodeError:
            raise self._damaged("a text that is not UTF-8") from None

    def _count(self, what: str, least_bytes: int) -> int:
        """Read a count of items that take at least `least_bytes` each. Raises `FasteagleError`."""
        n = self._number("<Q")
        if n * least_bytes > self._size - self._at:
            raise FasteagleError(
                f"{self._path}: ends at byte {self._size:,}, which is too short for {n:,} {what}: "
                "damaged or truncated, fetch it again"
            )
        return n

    def _skip(self, n_bytes: int) -> None:
        if n_bytes > self._size - self._at:
            raise self._ends()
        self._at += n_bytes

    def _ends(self) -> FasteagleError:
        return FasteagleError(
            f"{self._path}: ends at byte {self._size:,}, within its index: "
            "damaged or truncated, fetch it again"
        )

    def _damaged(self, what: str) -> FasteagleError:
        return FasteagleError(
            f"{self._path}: damaged: {what} in its index before byte {self._at:,}: fetch it again"
        )


def _aligned(n: int, alignment: int) -> int:
    return -(-n // alignment) * alignment
