"""Groups of command-line options, made from the dataclasses of `fasteagle.options` by name.

Each group arrives at its command as one such object. Imports no torch.
"""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, TypeVar

import click

from fasteagle.errors import FasteagleError
from fasteagle.options import (
    DEFAULT_MODEL,
    UNSAID,
    AnswerOptions,
    DraftOptions,
    GrammarSpec,
    RuntimeOptions,
    SamplingParams,
    fresh_seed,
)
from fasteagle.quant.scheme import check_precision

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
    names = [field.name for field in fields(kind) if field.name in given]  # type: ignore[arg-type]
    values = {name: given.pop(name) for name in names}
    return kind(**{**values, **changed})


def group(kind: type[Any], parameter: str) -> Option:
    """A decorator: an option for every field of `kind`; arrive as one object under `parameter`."""

    def add(command: Command) -> Command:
        @functools.wraps(command)
        def wrapped(**given: Any) -> Any:
            return command(**{parameter: taken(kind, given)}, **given)

        return with_options(wrapped, options_of(kind))

    return add


# Flags that left, and how a precision says the same.
GONE = {
    "--dtype": lambda value: value,
    "--quant": lambda value: value,
    "--lm-head": lambda value: {"int4": "int4-lm4", "keep": "int4-lm16"}.get(value, "int4"),
    "--cpu-kernels": lambda value: "int4" if value == "auto" else f"int4-{value}",
    "--quant-backend": lambda value: "int4-torchao" if value == "torchao" else "int4",
}
PRECISION_FIELDS = ("dtype", "quant", "lm_head", "cpu_kernels", "backend")
BITS = (
    click.option("--int4", is_flag=True, help="The checkpoint's own 4 bits, or HQQ."),
    click.option("--int8", is_flag=True, help="8 bits, one scale a row."),
)


def model_options(command: Command, default: str | None = DEFAULT_MODEL) -> Command:
    """Options every command that loads a model takes; arrive with one `RuntimeOptions`."""

    @functools.wraps(command)
    def wrapped(precision: str, int4: bool, int8: bool, **given: Any) -> Any:
        names = [] if precision == "auto" else [precision]
        precision = _only_one([*names, *_bits(int4, int8)], "auto")
        check_precision(precision)
        runtime = taken(RuntimeOptions, given).at(precision)
        return command(runtime_options=runtime, **given)

    precisions = click.option(
        "--precision",
        default="auto",
        show_default=True,
        help="auto: as the model's files hold it; or int4, int8, bf16, fp16, fp32, a scheme.",
    )
    return with_options(wrapped, [*runtime_options(default), precisions, *BITS])


def runtime_options(default: str | None) -> list[Option]:
    """Options of where and how a model runs, and answers for those that `--precision` replaced."""
    kept = [f for f in fields(RuntimeOptions) if f.name not in PRECISION_FIELDS]
    hints = typing.get_type_hints(RuntimeOptions)
    return [_model(default), *(_option(f, hints[f.name]) for f in kept), *map(_gone, GONE)]


def _gone(flag: str) -> Option:
    def refuse(context: click.Context, option: click.Parameter, value: str | None) -> None:
        if value is not None:
            raise FasteagleError(f"{flag} is gone: use --precision {GONE[flag](value)}")

    return click.option(flag, hidden=True, expose_value=False, callback=refuse)


def _model(default: str | None) -> Option:
    return click.option(
        "--model",
        default=default,
        show_default=default is not None,
        help="Registry name, Hugging Face id, folder or .gguf file.",
    )


def _bits(int4: bool, int8: bool) -> list[str]:
    return [*(["int4"] if int4 else []), *(["int8"] if int8 else [])]


def _only_one(names: Sequence[str], otherwise: str) -> str:
    """The one of `names`, or `otherwise`. Raises `FasteagleError` for more than one."""
    if len(names) > 1:
        raise FasteagleError(f"{' and '.join(names)} contradict each other: give one")
    return names[0] if names else otherwise


def bench_model_options(command: Command) -> Command:
    """Options of a benchmark's model, whose precisions are a list and its parts are flags."""

    @functools.wraps(command)
    def wrapped(int4: bool, int8: bool, **given: Any) -> Any:
        quant = [given["quant"]] if given["quant"] else []
        named = _only_one([*_bits(int4, int8), *quant], "")
        return command(runtime_options=taken(RuntimeOptions, given, quant=named or None), **given)

    options = options_of(RuntimeOptions, before={"quant": BITS})
    return with_options(wrapped, [_model(DEFAULT_MODEL), *options])


def optional_model_options(command: Command) -> Command:
    """`model_options` of a command that can do without a model."""
    return model_options(command, None)


def quality_model_options(command: Command) -> Command:
    """Options of a model whose `--precision` is the command's own list."""

    @functools.wraps(command)
    def wrapped(**given: Any) -> Any:
        return command(runtime_options=taken(RuntimeOptions, given), **given)

    return with_options(wrapped, runtime_options(DEFAULT_MODEL))


def draft_options(command: Command) -> Command:
    """Options of guessing ahead; arrive as one `DraftOptions`."""

    @functools.wraps(command)
    def wrapped(no_spec: bool, **given: Any) -> Any:
        tree_file = None if given["tree_file"] == "auto" else given["tree_file"]
        drafter = "none" if no_spec else given["drafter"]
        draft = taken(DraftOptions, given, drafter=drafter, tree_file=tree_file)
        check_precision(draft.draft_precision)
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
