"""The one exception that user input may raise. The command line prints it as one line, exit 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FasteagleError(Exception):
    """A mistake the user can mend: the message names the value, the limit and the fix."""


def shortened(problems: list[str], limit: int = 6) -> str:
    """The first problems, sorted, and how many more there are."""
    more = f"; and {len(problems) - limit} more" if len(problems) > limit else ""
    return "; ".join(sorted(problems)[:limit]) + more


def suggest(name: str, known: Iterable[str]) -> str:
    """`"; did you mean 'a' or 'b'?"` for near misses of `name` in `known`, else an empty string."""
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return "; did you mean " + " or ".join(repr(n) for n in near) + "?" if near else ""
