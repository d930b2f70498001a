"""Messages to the user: the one exception that user input may raise, and notes on stderr.

The command line prints the exception as one line and exits with 2. Imports no torch.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

TELL_SECONDS = 10.0
PATIENCE = 1.0  # seconds
LONGEST_SHOWN = 100  # characters of a value in an error
MOST_PROBLEMS = 6  # that an error lists
Item = TypeVar("Item")

# Only torch's allocator has an error class for it. The driver (through torch and Triton), cuBLAS
# and similar libraries, torch's allocator of main memory, and C++ in methods of torchbind classes
# have only error texts.
_MEMORY_IS_SHORT = re.compile(
    r"CUDA[^\n]*out of memory|CUDA_ERROR_OUT_OF_MEMORY|_STATUS_ALLOC_FAILED|can't allocate memory"
    r"|std::bad_alloc"
)


class FasteagleError(Exception):
    """Error that the user can correct: the message names the value, the limit and the fix.

    It is one line: line breaks and terminal codes in text that it quotes are escaped.
    """

    def __init__(self, message: str) -> None:
        shown = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in message)
        super().__init__("".join(shown))


@contextlib.contextmanager
def within(where: str) -> Iterator[None]:
    """Put `where` before the text of a `FasteagleError` that is raised inside."""
    try:
        yield
    except FasteagleError as error:
        raise FasteagleError(f"{where}: {error}") from error


class EngineError(FasteagleError):
    """Failure of the model or the machine during an answer; the request itself may be valid."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out, a device's or the machine's."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and bool(_MEMORY_IS_SHORT.search(str(error)))


def first_line(error: BaseException, most: int | None = None) -> str:
    """Return the first line of an error, at most `most` characters; its class if it is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:most]


def reason_of(error: Exception) -> str:
    """Return why a file could not be read, without its name."""
    if isinstance(error, OSError):
        return error.strerror or first_line(error)
    return "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)


def require_linux() -> None:
    """Raise `FasteagleError` unless the system is Linux, whose file locks and links we use."""
    if sys.platform != "linux":
        raise FasteagleError(
            f"fasteagle runs on Linux only, and this is {sys.platform}: use WSL 2 on Windows, a "
            "container elsewhere"
        )


def note(text: str) -> None:
    """Print a line for the user on stderr, apart from the answer, which goes on without it."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:  # who read it has left, as the terminal of a server in the background
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for the rest of the process


@contextlib.contextmanager
def telling(line: str, notify: Callable[[str], None] = note) -> Iterator[None]:
    """Notify with `line` if the block inside takes longer than `PATIENCE`."""
    timer = threading.Timer(PATIENCE, notify, [line])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def with_progress(
    items: Sequence[Item],
    done: str,
    unit: str,
    notify: Callable[[str], None],
    more: Callable[[], str] = lambda: "",
) -> Iterator[Item]:
    """Yield `items`; notify every `TELL_SECONDS` of how many units of all are `done`.

    `more` returns what the line says besides.
    """
    last = time.monotonic()
    for number, item in enumerate(items, 1):
        yield item
        if time.monotonic() - last >= TELL_SECONDS:
            last = time.monotonic()
            notify(f"{done} {number:,} of {len(items):,} {unit}{more()} ...")


def size_of(n_bytes: float) -> str:
    """Return a size with its unit: in MiB where it is less than a tenth of a GiB."""
    if n_bytes < 2**30 / 10:
        return f"{n_bytes / 2**20:.1f} MiB"
    return f"{n_bytes / 2**30:.1f} GiB"


def shown(value: object) -> str:
    """Return a value of a caller as an error shows it: cut, for it may be a list of a million."""
    try:
        text = repr(value)
    except ValueError:  # more digits than Python writes
        return "of thousands of digits"
    return cut(text, LONGEST_SHOWN)


def cut(text: str, most: int) -> str:
    """Return `text`, or its first `most` characters and that there are more."""
    return text if len(text) <= most else f"{text[:most]} ..."


def counted(count: float, noun: str) -> str:
    """Return a number with its noun, in the plural for all but 1."""
    number = f"{count:,}" if isinstance(count, int) else f"{count:g}"
    return f"{number} {noun}" if count == 1 else f"{number} {noun}s"


def shortened(problems: list[str]) -> str:
    """Return the first `MOST_PROBLEMS`, sorted, and the number of the others."""
    others = len(problems) - MOST_PROBLEMS
    more = f"; and {others} more" if others > 0 else ""
    return "; ".join(sorted(problems)[:MOST_PROBLEMS]) + more


def suggest(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'a' or 'b'?" for names in `known` like `name`, or an empty string."""
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return "; did you mean " + " or ".join(repr(n) for n in near) + "?" if near else ""
