"""Values of a file, each checked for its type and range as it is read.

`Fields` is one JSON object, or the metadata of a GGUF file. Every error is one line,
`FILE: FIELD is VALUE: must be ...`. Needs no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fasteagle.errors import FasteagleError, cut, reason_of

MOST = 2**31 - 1  # largest count: fits into the index types of every kernel
MOST_REAL = 1e30  # largest number: fits into fp32
MOST_WIDTH = 2**20  # largest model dimension: far above any model, far below all memory
MOST_LAYERS = 1000  # limited, since the tensors of each layer are listed in memory
MOST_EXPERTS = 1024  # of a block; likewise
MOST_IN_ALL = 2**17  # experts of a model, each of which has three names
LONGEST_SHOWN = 60  # most characters of a value in an error
MOST_TEXT = 2**26  # bytes of a file: those of the largest models have a tenth of that
MOST_NESTED = 100  # most levels of JSON from clients, whose readers may recurse


def parse_json(text: str) -> Any:
    """Parse JSON; raise ValueError where it cannot be read, deep nesting included."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def parse_json_file(path: Path) -> Any:
    """Parse the JSON in a file; raise ValueError or OSError where it cannot be read."""
    return parse_json(read_text(path))


def read_text(path: Path) -> str:
    """Return the text of a file; raise ValueError or OSError where it cannot be read."""
    with path.open("rb") as file:
        data = file.read(MOST_TEXT + 1)  # a device may have no end
    if len(data) > MOST_TEXT:
        raise ValueError(f"it has more than {MOST_TEXT >> 20} MiB")
    return data.decode("utf-8").replace("\r\n", "\n")


def text_of(path: Path) -> str:
    """Return the text of a file that a person names; raise `FasteagleError`."""
    try:
        return read_text(path)
    except (OSError, ValueError) as error:
        raise FasteagleError(f"cannot read {path}: {reason_of(error)}") from error


def parse_shallow_json(text: str) -> Any:
    """Parse JSON of a client; raise ValueError for more than `MOST_NESTED` levels, and for NaN."""
    value = parse_json(text)
    check_nesting(value)
    json.dumps(value, allow_nan=False)  # Python reads NaN and 1e999, which no other reader takes
    return value


def check_nesting(value: Any) -> None:
    """Raise ValueError where `value` has more than `MOST_NESTED` levels."""
    level = [value]
    for _ in range(MOST_NESTED + 1):
        inner = [list(v.values()) if isinstance(v, dict) else v for v in level if v]
        level = [v for part in inner if isinstance(part, list) for v in part]
        if not level:
            return
    raise ValueError(f"nested deeper than {MOST_NESTED} levels")


def most_experts(n_layer: int) -> int:
    """Return the largest number of experts of a block in a model of so many blocks."""
    return min(MOST_EXPERTS, MOST_IN_ALL // n_layer)


class Fields:
    """Reader of the values of `raw`; errors call it `source`, and null counts as absent.

    A key without a default must be present. The methods raise `FasteagleError`.
    """

    def __init__(self, raw: Mapping[str, Any], source: str, prefix: str = "") -> None:
        self.raw, self.source, self._prefix = raw, source, prefix

    def integer(
        self, key: str, default: int | None = None, *, least: int = 1, most: int = MOST
    ) -> int:
        """Return an integer in `least` .. `most`."""
        must = f"an integer from {least:,} to {most:,}"
        return self._checked(key, default, must, lambda v: type(v) is int and least <= v <= most)

    def width(self, key: str, default: int | None = None) -> int:
        """Return a dimension of the model."""
        return self.integer(key, default, most=MOST_WIDTH)

    def one_of(self, key: str, known: tuple[int, ...]) -> int:
        must = " or ".join(map(str, known))
        return self._checked(key, None, must, lambda v: type(v) is int and v in known)

    def number(self, key: str, default: float | None = None, *, most: float = MOST_REAL) -> float:
        """Return a number above 0, at most `most`."""
        must = f"a number above 0, at most {most:g}"
        return float(self._checked(key, default, must, lambda v: _is_real(v) and 0 < v <= most))

    def flag(self, key: str, default: bool = False) -> bool:
        return self._checked(key, default, "true or false", lambda v: type(v) is bool)

    def text(self, key: str, default: str | None = None) -> str:
        return self._checked(key, default, "a text", lambda v: type(v) is str)

    def texts(self, key: str) -> list[str]:
        """Return a list of texts, empty where the key is absent."""
        return self._checked(key, [], "a list of texts", _list_of(lambda v: type(v) is str))

    def integers(self, key: str, *, most: int = MOST) -> list[int]:
        """Return a list of integers from 0 to `most`, empty where the key is absent."""
        must = f"a list of integers from 0 to {most:,}"
        fits = _list_of(lambda v: type(v) is int and 0 <= v <= most)
        return self._checked(key, [], must, fits)

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return a list of numbers above 0, empty where the key is absent."""
        must = f"a list of numbers above 0, at most {MOST_REAL:g}"
        fits = _list_of(lambda v: _is_real(v) and 0 < v <= MOST_REAL)
        return tuple(map(float, self._checked(key, [], must, fits)))

    def shares(self, key: str) -> list[list[float]]:
        """Return lists of numbers in 0 .. 1, none of them empty; [] where the key is absent."""
        are_shares = _list_of(lambda v: _is_real(v) and 0 <= v <= 1)
        must = "lists of numbers from 0 to 1, none empty"
        return self._checked(key, [], must, _list_of(lambda v: are_shares(v) and len(v) > 0))

    def token_ids(self, key: str) -> list[int]:
        """Return a list of token ids; the file may have a single id."""
        are_ids = _list_of(lambda v: type(v) is int and 0 <= v <= MOST)
        must = "a token id or a list of token ids"
        value = self._checked(key, None, must, lambda v: are_ids(v) or are_ids([v]))
        return value if type(value) is list else [value]

    def part(self, key: str) -> Fields:
        """Return the JSON object under `key`, empty where the key is absent."""
        value = self._checked(key, {}, "a JSON object", lambda v: isinstance(v, Mapping))
        return Fields(value, self.source, f"{self._prefix}{key}.")

    @property
    def empty(self) -> bool:
        return not self.raw

    def __iter__(self) -> Iterator[str]:
        return iter(self.raw)

    def __contains__(self, key: str) -> bool:
        return self.raw.get(key) is not None

    def error(self, key: str, must: str) -> FasteagleError:
        """Return an error for the value of `key`, for checks that need several values."""
        shown = f"is {_shown(self.raw[key])}" if key in self.raw else "is missing"
        return FasteagleError(f"{self.source}: {self._prefix}{key} {shown}: must be {must}")

    def _checked(self, key: str, default: Any, must: str, fits: Callable[[Any], bool]) -> Any:
        value = self.raw.get(key)
        value = default if value is None else value
        if value is None or not fits(value):
            raise self.error(key, must)
        return value


def _is_real(value: Any) -> bool:
    return type(value) in (int, float)  # NaN too, which is in no range


def _list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: type(value) is list and all(map(fits, value))


def _shown(value: Any) -> str:
    """Return a value as JSON, cut at `LONGEST_SHOWN` characters."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except RecursionError:  # here the stack is deeper than in the parser
        return "nested too deeply"
    return cut(text, LONGEST_SHOWN)
