"""Fields of dataclasses that are options of the command line: their texts, and their checks.

The command line is generated from them (`cli.options`). Imports no torch.
"""

from __future__ import annotations

import dataclasses
import numbers
import operator
import re
from collections.abc import Sequence
from typing import Any

from fasteagle.errors import FasteagleError, shown

UNSAID = object()


def option(
    default: Any = dataclasses.MISSING,
    text: str | None = None,
    *,
    flag: str | None = None,
    unset: Any = UNSAID,
    kind: str | tuple[str, ...] | None = None,
    **limits: float,
) -> Any:
    """Return a dataclass field that is an option of the command line.

    `text` is its help. `unset` is the command line's default where it is not the field's; `kind` is
    "text", "file", "result" (a file to write), "folder", "existing folder", "comma list", "numbers"
    or the words to choose from. A number's `limits` are "least", "most" and, excluded themselves,
    "above" and "below".
    """
    metadata = {"text": text, "flag": flag, "unset": unset, "kind": kind, "limits": limits}
    return dataclasses.field(default=default, metadata=metadata)


def flag_of(field: dataclasses.Field[Any]) -> str:
    """Return the flag of a field on the command line."""
    return field.metadata.get("flag") or f"--{field.name.replace('_', '-')}"


_NUMBERS = {"int": (numbers.Integral, "a whole number"), "float": (numbers.Real, "a number")}
_COMPARISONS = {
    "least": (operator.ge, ">="),
    "above": (operator.gt, ">"),
    "most": (operator.le, "<="),
    "below": (operator.lt, "<"),
}


def check(options: Any) -> None:
    """Raise `FasteagleError` for a field that is no number, beyond its limits or not of its words.

    Fields that are None are left unset.
    """
    for field in dataclasses.fields(options):
        value, name = getattr(options, field.name), flag_of(field).removeprefix("--")
        type_name, _, unset = field.type.partition(" | ")
        if value is None and unset:
            continue
        if type_name in _NUMBERS:
            number, what = _NUMBERS[type_name]
            ok = isinstance(value, number) and not isinstance(value, bool)
            require(ok, f"{name} {shown(value)} is not {what}")
        if type_name == "str" and unset in ("", "None"):
            require(isinstance(value, str), f"{name} {shown(value)} is not a text")
        limits = field.metadata.get("limits", {})
        if not all(_COMPARISONS[bound][0](value, limits[bound]) for bound in limits):
            allowed = " and ".join(f"{_COMPARISONS[b][1]} {limit:,}" for b, limit in limits.items())
            raise FasteagleError(f"{name} {shown(value)} is out of range: use {allowed}")
        words = field.metadata.get("kind")
        if isinstance(words, tuple):
            require_word(name, value, words)


def require_unset(options: Any, names: Sequence[str], other: str) -> None:
    """Raise `FasteagleError` for fields in `names` that are set, and do nothing with `other`."""
    for field in dataclasses.fields(options):
        is_set = getattr(options, field.name) != field.default
        if field.name in names and is_set:
            raise FasteagleError(f"{flag_of(field)} has no meaning {other}: drop one")


def require_word(name: str, value: Any, words: Sequence[str]) -> None:
    """Raise `FasteagleError` unless the value of the option `name` is one of `words`."""
    known = f"{', '.join(words[:-1])} or {words[-1]}"
    require(value in words, f"{name} {shown(value)} is unknown: use {known}")


def check_host_names(name: str, hosts: Sequence[str]) -> None:
    """Raise `FasteagleError` unless the values of the option `name` are names or IP addresses."""
    for host in hosts:
        require(isinstance(host, str), f"{name} {shown(host)} is not a text")
        require(host != "", f"{name} '' is empty: give a name, as example.org")
        alone = host.count(":") != 1 and not set(host) & set("/[]")  # an IPv6 address has more
        require(alone, f"{name} {host!r}: use the name without a port, as example.org")
        require([host] == host.split(), f"{name} {host!r} has spaces: repeat it for each name")
        fix = "use letters, digits, dots and hyphens: no patterns, others as xn--..."
        require(bool(re.fullmatch(r"[\w.:-]+", host, re.ASCII)), f"{name} {shown(host)}: {fix}")


def require(ok: bool, message: str) -> None:
    """Raise `FasteagleError` with `message` unless `ok`."""
    if not ok:
        raise FasteagleError(message)
