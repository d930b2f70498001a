"""Groups of command-line options, made from the dataclasses of `fasteagle.options` by name.

Each group arrives at its command as one such object. Imports no torch.
"""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, TypeVar

import click

from fasteagle.errors import FasteagleError
from fasteagle.options import (
    DEFAULT_MODEL,
    DTYPES,
    UNSAID,
    AnswerOptions,
    DraftOptions,
    GrammarSpec,
    RuntimeOptions,
    SamplingParams,
    fresh_seed,
)

Command = Callable[..., Any]
Option = Callable[[Command], Command]
Made = TypeVar("Made")

FILE = click.Path(path_type=Path, dir_okay=False)
FOLDER = click.Path(path_type=Path, file_okay=False)


class Numbers(click.ParamType):
    """Whole numbers, as in `2,15,27`."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            found = tuple(int(part) for part in comma_list(value))
        except ValueError:
            found = ()
        return found or self.fail(f"{value!r} is no list of numbers like 2,15,27", param, ctx)


_KINDS = {
    "file": FILE,
    "folder": FOLDER,
    "numbers": Numbers(),
    "existing folder": click.Path(path_type=Path, file_okay=False, exists=True),
}


def comma_list(text: str) -> tuple[str, ...]:
    """The parts of `a, b,c`; empty ones are left out."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def options_of(
    kind: type[Any], before: Mapping[str, Iterable[Option]] | None = None
) -> list[Option]:
    """An option for every field of the dataclass `kind`; others come `before` the named fields."""
    hints = typing.get_type_hints(kind)
    made: list[Option] = []
    for field in fields(kind):
        made += (before or {}).get(field.name, ())
        made.append(_option(field, hints[field.name]))
    return made


def _option(field: Field[Any], hint: Any) -> Option:
    """The option of one field, of the type that the field is annotated with."""
    kind, unset = field.metadata.get("kind"), field.metadata.get("unset", UNSAID)
    flag = field.metadata.get("flag") or f"--{field.name.replace('_', '-')}"
    default: Any = field.default if unset is UNSAID else unset
    settings: dict[str, Any] = {"help": field.metadata.get("text")}
    if hint is bool:
        return click.option(flag, field.name, is_flag=True, **settings)
    if kind == "comma list":
        default = ",".join(default)
        settings["callback"] = lambda context, option, text: comma_list(text)
    else:
        settings["type"] = click.Choice(kind) if isinstance(kind, tuple) else _type(kind, hint)
    if default is MISSING:
        settings["required"] = True
    elif default == ():
        settings["multiple"] = True
    elif default is not None:
        settings |= {"default": default, "show_default": True}
    return click.option(flag, field.name, **settings)


def _type(kind: str | None, hint: Any) -> Any:
    """That of `kind`, or of the annotation; `T | None` and `tuple[T, ...]` are made of T."""
    if kind is not None:
        return _KINDS[kind]
    is_made_of = isinstance(hint, types.UnionType) or typing.get_origin(hint) is tuple
    return typing.get_args(hint)[0] if is_made_of else hint


def with_options(command: Command, options: Iterable[Option]) -> Command:
    """`command` with options added, in this order in its help."""
    for option in reversed(list(options)):
        command = option(command)
    return command


def taken(kind: type[Made], given: dict[str, Any], **changed: Any) -> Made:
    """Make `kind` of the values in `given` for its fields, which leave it, and of `changed`."""
    values = {field.name: given.pop(field.name) for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{**values, **changed})


def group(kind: type[Any], parameter: str) -> Option:
    """A decorator: an option for every field of `kind`; arrive as one object under `parameter`."""

    def add(command: Command) -> Command:
        @functools.wraps(command)
        def wrapped(**given: Any) -> Any:
            return command(**{parameter: taken(kind, given)}, **given)

        return with_options(wrapped, options_of(kind))

    return add


def model_options(command: Command, default: str | None = DEFAULT_MODEL) -> Command:
    """Options every command that loads a model takes; arrive with one `RuntimeOptions`."""
    precision = click.option(
        "--precision",
        default="auto",
        show_default=True,
        help="auto: as the model's files hold it; or int4, int8, bf16, fp16, fp32, a scheme.",
    )
    return bench_model_options(command, [precision], default)


def bench_model_options(
    command: Command, more: Iterable[Option] = (), default: str | None = DEFAULT_MODEL
) -> Command:
    """`model_options` of a command whose `--precision` is its own; `more` come with the bits."""

    @functools.wraps(command)
    def wrapped(int4: bool, int8: bool, **given: Any) -> Any:
        precision = given.pop("precision") if more else "auto"
        named = [precision] if precision != "auto" else []
        quant = given["quant"]
        asked = [*named, *(["int4"] if int4 else []), *(["int8"] if int8 else [])]
        asked += filter(None, [quant])
        if len(asked) > 1 or (named and given["dtype"] != "auto"):
            both = " and ".join([*asked, *({given["dtype"]} - {"auto"})])
            raise FasteagleError(f"{both} contradict each other: give one")
        if named and precision in DTYPES:
            asked, given["dtype"] = [], precision
        runtime = taken(RuntimeOptions, given, quant=asked[0] if asked else None)
        return command(runtime_options=runtime, **given)

    model = click.option(
        "--model",
        default=default,
        show_default=default is not None,
        help="Registry name, Hugging Face id, folder or .gguf file.",
    )
    bits = (
        click.option("--int4", is_flag=True, help="The checkpoint's own 4 bits, or HQQ."),
        click.option("--int8", is_flag=True, help="8 bits, one scale a row."),
    )
    before = {"quant": (*more, *bits)}
    return with_options(wrapped, [model, *options_of(RuntimeOptions, before=before)])


def optional_model_options(command: Command) -> Command:
    """`model_options` of a command that can do without a model."""
    return model_options(command, None)


def draft_options(command: Command) -> Command:
    """Options of guessing ahead; arrive as one `DraftOptions`."""

    @functools.wraps(command)
    def wrapped(no_spec: bool, **given: Any) -> Any:
        tree_file = None if given["tree_file"] == "auto" else given["tree_file"]
        drafter = "none" if no_spec else given["drafter"]
        draft = taken(DraftOptions, given, drafter=drafter, tree_file=tree_file)
        return command(draft=draft, **given)

    no_spec = click.option("--no-spec", is_flag=True, help="The same as --drafter none.")
    return with_options(wrapped, options_of(DraftOptions, before={"head": [no_spec]}))


def sampling_options(command: Command) -> Command:
    """Options of drawing tokens and ending answers; arrive as two dataclasses."""

    @functools.wraps(command)
    def wrapped(**given: Any) -> Any:
        is_drawn = given["seed"] is None
        seed = fresh_seed() if is_drawn else given["seed"]
        params = taken(SamplingParams, given, seed=seed)
        answer = taken(AnswerOptions, given)
        announce = is_drawn and not params.greedy
        return command(params=params, answer=answer, announce_seed=announce, **given)

    return with_options(wrapped, [*options_of(SamplingParams), *options_of(AnswerOptions)])


def grammar_options(command: Command) -> Command:
    """Options of the form that answers must have; arrive as one `GrammarSpec` or None."""

    @functools.wraps(command)
    def wrapped(
        json_schema: Path | None, regex: str | None, grammar: Path | None, **given: Any
    ) -> Any:
        asked = {
            "json_schema": None if json_schema is None else _file_text(json_schema),
            "regex": regex,
            "grammar": None if grammar is None else _file_text(grammar),
        }
        specs = [GrammarSpec(kind, text) for kind, text in asked.items() if text is not None]
        if len(specs) > 1:
            both = " and ".join(spec.kind.replace("_", "-") for spec in specs)
            raise FasteagleError(f"--{both} contradict each other: give one")
        return command(form=specs[0] if specs else None, **given)

    options = (
        click.option("--json-schema", type=FILE, help="Answer in JSON of the schema in this file."),
        click.option("--regex", help="Answer with text that matches this as a whole."),
        click.option("--grammar", type=FILE, help="Answer in this file's Lark grammar."),
    )
    return with_options(wrapped, options)


def _file_text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FasteagleError(f"cannot read {path}: {error}") from error


def gone(flag: str, instead: str) -> Option:
    """A decorator: a flag that is no more, hidden; using it is an error that says what to do."""

    def refuse(context: click.Context, option: click.Parameter, value: Any) -> None:
        if value is not None:
            raise FasteagleError(f"{flag} is gone: {instead}")

    return click.option(flag, hidden=True, expose_value=False, callback=refuse)
