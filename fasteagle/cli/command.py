"""Commands that report a user's mistakes in one line. Imports no torch."""

from __future__ import annotations

import atexit
import contextlib
import errno
import gc
import inspect
import math
import os
import re
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from fasteagle.errors import LONGEST_SHOWN, FasteagleError, cut, is_out_of_memory, require_linux
from fasteagle.paths import more_space, require_writable


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection inside, where imports and loading make many lasting objects.

    Scanning them again and again takes a tenth of the start.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)  # libraries look for what they have leaked when Python ends


def silent(line: str) -> None:
    """Print nothing, in place of `note`."""


def leave() -> None:
    """End the process while a thread still compiles or measures.

    The interpreter's own end stops such threads inside of torch's C++ code, which aborts.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class UserError(click.ClickException):
    """Error that prints one line on stderr and exits with code 2."""

    exit_code = 2


@contextlib.contextmanager
def _in_one_line() -> Iterator[None]:
    """Turn errors that a user can fix into `UserError`; others keep their traceback."""
    try:
        yield
    except click.exceptions.NoArgsIsHelpError:
        raise
    except click.UsageError as error:
        if isinstance(error, click.NoSuchOption) and error.possibilities and error.ctx:
            shown = {opt for each in error.ctx.command.params for opt in _shown(each)}
            near = [each for each in error.possibilities if each in shown]
            error = click.NoSuchOption(error.option_name, None, near, error.ctx)
        command = error.ctx.command_path if error.ctx is not None else "fasteagle"
        words = (cut(word, LONGEST_SHOWN) for word in error.format_message().split())
        problem = " ".join(words).rstrip(".?")
        raise UserError(f"{problem}: see `{command} --help`") from error
    except FasteagleError as error:
        raise UserError(str(error)) from error
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        # Where a model was known, its loader or engine has said what would fit.
        raise UserError("out of memory: lower --max-seq-len or choose a smaller model") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            where, fix = "", "free some space where the output goes"
            if error.filename:
                where, fix = f" at {error.filename}", more_space(Path(error.filename))
            raise UserError(f"disk full{where}: {fix}") from error
        if error.errno == errno.EFBIG:
            raise UserError(
                "a file has reached the limit of sizes here: raise it (ulimit -f)"
            ) from error
        if error.errno == errno.ENOENT and "No usable temporary directory" in str(error):
            raise UserError(
                f"{error.strerror}: set TMPDIR to a folder that can be written"
            ) from error
        if error.errno == errno.EPIPE:  # the reader of a pipe has left
            sys.stderr.close()
            sys.exit(1)
        if error.filename:  # what may not be read or written, or a failing disk
            raise UserError(f"{error.filename}: {error.strerror}") from error
        raise


def _require_working_folder() -> None:
    """Raise `FasteagleError` where the working folder was removed: MKL ends the process there."""
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise FasteagleError(
            "the folder in which this was started has been removed: change to another (cd)"
        ) from error


def _shown(parameter: click.Parameter) -> list[str]:
    """Return the flags of an option that help shows; none of a hidden one."""
    hidden = isinstance(parameter, click.Option) and parameter.hidden
    return [] if hidden else [*parameter.opts, *parameter.secondary_opts]


class Script(click.Command):
    """Command that reports errors a user can fix in one line; its help keeps indented lines."""

    def __init__(self, name: str | None, help: str | None = None, **settings: Any) -> None:
        # click fills the lines of a paragraph unless it begins with \b.
        help = help and re.sub(r"\n\n(?= {4})", "\n\n\b\n", inspect.cleandoc(help))
        super().__init__(name, help=help, **settings)

    def make_context(self, *args: Any, **keywords: Any) -> click.Context:
        with _in_one_line():
            return super().make_context(*args, **keywords)

    def invoke(self, ctx: click.Context) -> Any:
        with _in_one_line():
            require_linux()
            if sys.stderr is None:  # closed, as by 2>&-
                sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for the rest of the process
            if sys.stdout is None:
                raise FasteagleError("standard output is closed: give it a file, or /dev/null")
            _require_working_folder()
            return super().invoke(ctx)


class Cli(Script, click.Group):
    """Group of the `fasteagle` commands."""


def refuse_options(names: Collection[str], problem: str) -> None:
    """Raise `FasteagleError` with `problem` for an option in `names` that is given."""
    context = click.get_current_context()
    for option in context.command.params:
        name = option.name or ""
        if name in names and context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            flag = (*option.opts, *option.secondary_opts)[-1]
            raise FasteagleError(f"{flag} {problem}")


class UserPath(click.Path):
    """Path in which ~ is the home folder also where no shell has expanded it, as after `--out=`."""

    def __init__(self, **more: Any) -> None:
        super().__init__(path_type=Path, **more)

    def convert(self, value: Any, *context: Any) -> Any:
        if not value:  # as of a shell's variable that is not set
            self.fail("the path is empty", *context)
        return super().convert(os.path.expanduser(value), *context)


class ResultPath(UserPath):
    """Path of a file to write after a long run, which it refuses before where it cannot be."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False)

    def convert(self, value: Any, *context: Any) -> Any:
        path = super().convert(value, *context)
        require_writable(path)
        return path


def comma_list(text: str) -> tuple[str, ...]:
    """Return the parts of a text like `a, b,c` without blanks; empty ones are left out."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


class Names(click.ParamType):
    """Parameter type of one name or more with commas between them, all of `known` if given."""

    name = "names"

    def __init__(self, known: Collection[str] = ()) -> None:
        self._known = known

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        names = comma_list(value)
        if not names:  # as of a shell's variable that is not set
            self.fail(f"{value!r} is empty: give one, or several as A,B", param, ctx)
        unknown = [name for name in names if self._known and name not in self._known]
        if unknown:
            self.fail(f"{unknown[0]!r} is unknown: use {', '.join(self._known)}", param, ctx)
        return names


class Numbers(click.ParamType):
    """Parameter type of whole numbers with commas between them, as in `2,15,27`."""

    name = "numbers"

    def __init__(self, least: float = -math.inf, most: float = math.inf) -> None:
        self._limits = least, most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            numbers = tuple(int(part) for part in comma_list(value))
        except ValueError:
            numbers = ()
        if not numbers:
            self.fail(f"{value!r} is no list of numbers like 2,15,27", param, ctx)
        least, most = self._limits
        for number in (min(numbers), max(numbers)):
            if not least <= number <= most:
                limits = f">= {least}" if most == math.inf else f"{least} .. {most}"
                self.fail(f"{number} is out of range: use {limits}", param, ctx)
        return numbers
