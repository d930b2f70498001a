"""Typed values of registers, and what arithmetic makes of them.

Functions take and return arrays of the type's NumPy dtype; of bf16, arrays in fp32. A pair of
halves (f16x2, bf16x2) is one more axis of two.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from ptx.program import WIDTHS


@functools.cache
def unsigned(type: str) -> str:
    return "?" if type == "pred" else f"u{WIDTHS[type] // 8}"


def is_float(type: str) -> bool:
    return "f" in type


@functools.cache
def kind_of(type: str) -> str:
    return ("f" if is_float(type) else "i" if type[0] == "s" else "u") + unsigned(type)[1:]


PLAIN = {"f32", "f64"} | {f"{kind}{bits}" for kind in "bus" for bits in (8, 16, 32, 64)}


def decode(bits: np.ndarray, type: str) -> np.ndarray:
    """Return unsigned `bits` as values of a type."""
    if type.endswith("x2"):
        return decode(pieces(bits, 2), type[:-2])
    if type == "bf16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits if type == "pred" else bits.view(kind_of(type))


def encode(value: np.ndarray, type: str) -> np.ndarray:
    """Return the unsigned bits of values, rounded to the type."""
    if type.endswith("x2"):
        return joined(encode(value, type[:-2]))
    if type == "bf16":
        bits = value.astype(np.float32).view(np.uint32)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        return np.where(np.isnan(value), 0x7FFF, rounded).astype(np.uint16)
    if type == "pred":
        return value.astype(bool, copy=False)
    return value.astype(kind_of(type), copy=False).view(unsigned(type))


def pieces(words: np.ndarray, n: int) -> np.ndarray:
    """Return the n parts of each word, low ones first, on a new axis."""
    part = f"u{words.dtype.itemsize // n}"
    return np.ascontiguousarray(words).view(part).reshape(*words.shape, n)


def joined(parts: np.ndarray) -> np.ndarray:
    """Undo `pieces`."""
    word = f"u{parts.dtype.itemsize * parts.shape[-1]}"
    return np.ascontiguousarray(parts).view(word)[..., 0]


def _shift(x: np.ndarray, by: np.ndarray, left: bool) -> np.ndarray:
    """Shift by more than the width too, which leaves zeros or the sign."""
    width = 8 * x.dtype.itemsize
    far, by = by >= width, np.minimum(by, width - 1).astype(x.dtype)
    return np.where(far & (left or x.dtype.kind == "u"), 0, x << by if left else x >> by)


def _division(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Divide integers towards zero."""
    return np.where((x < 0) == (y < 0), x // y, -(-x // y)) if x.dtype.kind == "i" else x // y


def _choose_bytes(x: np.ndarray, y: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """Compute `prmt`: byte i of the result is the one of both words that nibble i names."""
    each = np.concatenate(np.broadcast_arrays(pieces(x, 4), pieces(y, 4)), -1)
    nibbles = selector[..., None] >> np.arange(0, 16, 4) & 15
    shape = np.broadcast_shapes(each.shape[:-1], nibbles.shape[:-1])
    nibbles = np.broadcast_to(nibbles, (*shape, 4))
    chosen = np.take_along_axis(np.broadcast_to(each, (*shape, 8)), nibbles & 7, -1)
    signs = np.where(chosen >> 7, 255, 0).astype(np.uint8)
    return joined(np.where(nibbles & 8, signs, chosen))


def _by_table(x: np.ndarray, y: np.ndarray, z: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Compute `lop3`: bit i of `table` is the result where the three bits spell i."""
    result = x & y & z & 0
    for i in range(8):
        if int(table.flat[0]) >> i & 1:
            result = result | (x if i & 4 else ~x) & (y if i & 2 else ~y) & (z if i & 1 else ~z)
    return result


def _bit_field(x: np.ndarray, position: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Compute `bfe`: `length` bits of x from `position` on, with their sign if x has one."""
    width = 8 * x.dtype.itemsize
    up = width - position.astype(np.int64) - length
    return _shift(_shift(x, up, True), width - length.astype(np.int64), False)


REALS: dict[str, Callable] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide,
    "min": np.fmin, "max": np.fmax, "min.NaN": np.minimum, "max.NaN": np.maximum,
    "fma": lambda x, y, z: x.astype(np.float64) * y + z,  # rounded once, to the type
    "neg": np.negative, "abs": np.abs, "sqrt": np.sqrt, "ex2": np.exp2,
    "rsqrt": lambda x: 1 / np.sqrt(x),
}  # fmt: skip
INTEGERS: dict[str, Callable] = {
    "add": np.add, "sub": np.subtract, "div": _division, "min": np.minimum, "max": np.maximum,
    "rem": lambda x, y: x - _division(x, y) * y, "neg": np.negative,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert,
    "shl": lambda x, by: _shift(x, by, True), "shr": lambda x, by: _shift(x, by, False),
    "popc": np.bitwise_count, "prmt": _choose_bytes, "lop3": _by_table, "bfe": _bit_field,
    "mov": lambda x: x, "max.relu": lambda x, y: np.maximum(np.maximum(x, y), 0),
}  # fmt: skip
_RELATIONS: dict[str, Callable] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal,
}  # fmt: skip
# Of arithmetic; subnormal numbers are kept, also where "ftz" would make them 0.
MODIFIERS = {*WIDTHS, *_RELATIONS, *(f"{relation}u" for relation in _RELATIONS), "nan", "num"}
MODIFIERS |= {"rn", "approx", "full", "ftz", "lo", "hi", "wide", "relu", "rz", "rzi", "NaN"}


def toward_zero(function: Callable) -> Callable:
    """Return `function` of fp32 numbers, rounded towards zero."""

    def rounded(*numbers: np.ndarray) -> np.ndarray:
        exact = function(*[x.astype(np.float64) for x in numbers])
        near = exact.astype(np.float32)
        return np.where(abs(near) > abs(exact), np.nextafter(near, np.float32(0)), near)

    return rounded


def compare(relation: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Compare; of floats those that end in u hold beside NaN, the others do not."""
    if x.dtype.kind != "f":
        return _RELATIONS[relation](x, y)
    unordered = np.isnan(x) | np.isnan(y)
    if relation in ("nan", "num"):
        return unordered == (relation == "nan")
    holds = _RELATIONS[relation.removesuffix("u")](x, y)
    return holds | unordered if relation.endswith("u") else holds & ~unordered


def convert(x: np.ndarray, to: str, modifiers: list[str]) -> np.ndarray:
    """Convert numbers; what is out of an integer's range becomes its limit, NaN becomes 0."""
    x = np.trunc(x) if "rzi" in modifiers else x
    if x.dtype.kind != "f" or is_float(to):
        return x
    limits, x = np.iinfo(kind_of(to)), x.astype(np.float64)
    inside = np.where((x > limits.min) & (x < limits.max), x, 0).astype(kind_of(to))
    return np.where(x >= limits.max, limits.max, np.where(x <= limits.min, limits.min, inside))
