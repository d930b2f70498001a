"""Groups of command-line options made from the dataclasses of `fasteagle.options`.

Each group arrives at its command as one such object. Imports no torch.
"""

from __future__ import annotations

import dataclasses
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
    """Parameter type of whole numbers with commas between them, as in `2,15,27`."""

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
    """Return the parts of a text like `a, b,c` without blanks; empty ones are left out."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def options_of(
    kind: type[Any], before: Mapping[str, Iterable[Option]] | None = None
) -> list[Option]:
    """Return an option for every field of the dataclass `kind`.

    `before` maps names of fields to further options, which come before the field's own.
    """
    hints = typing.get_type_hints(kind)
    made: list[Option] = []
    for field in fields(kind):
        made += (before or {}).get(field.name, ())
        made.append(_option(field, hints[field.name]))
    return made


def _option(field: Field[Any], hint: Any) -> Option:
    """Return the option of one field, of the type that the field is annotated with."""
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
    """Return the click type of `kind`, or of the annotation `hint` where `kind` is None.

    `T | None` and `tuple[T, ...]` give T.
    """
    if kind is not None:
        return _KINDS[kind]
    is_made_of = isinstance(hint, types.UnionType) or typing.get_origin(hint) is tuple
    return typing.get_args(hint)[0] if is_made_of else hint


def with_options(command: Command, options: Iterable[Option]) -> Command:
    """Return `command` with `options` added, in this order in its help."""
    for option in reversed(list(options)):
        command = option(command)
    return command


def taken(kind: type[Made], given: dict[str, Any], **changed: Any) -> Made:
    """Make a `kind` from its fields in `given`, which are removed there, and from `changed`."""
    names = [field.name for field in fields(kind) if field.name in given]  # type: ignore[arg-type]
    values = {name: given.pop(name) for name in names}
    return kind(**{**values, **changed})


@dataclasses.dataclass(frozen=True)
class Group:
    """Options that belong together, and the conversion of their values for a command.

    `take` removes the values of its options and returns the command's arguments.
    """

    options: tuple[Option, ...]
    take: Callable[[dict[str, Any]], dict[str, Any]]


def groups(*parts: Group) -> Option:
    """Make a decorator that gives a command the options of all `parts`, in this order."""

    def add(command: Command) -> Command:
        @functools.wraps(command)
        def wrapped(**given: Any) -> Any:
            made: dict[str, Any] = {}
            for part in parts:
                made |= part.take(given)
            return command(**made, **given)

        return with_options(wrapped, [option for part in parts for option in part.options])

    return add


def group(kind: type[Any], parameter: str) -> Option:
    """Make a decorator with an option for every field of `kind`, passed as `parameter`."""
    return groups(Group(tuple(options_of(kind)), lambda given: {parameter: taken(kind, given)}))


# Removed flags, and the precision that replaces each.
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
PRECISION = click.option(
    "--precision",
    default="auto",
    show_default=True,
    help="auto: as the model's files hold it; or int4, int8, bf16, fp16, fp32, a scheme.",
)


def _model(default: str | None) -> Option:
    return click.option(
        "--model",
        default=default,
        show_default=default is not None,
        help="Registry name, Hugging Face id, folder or .gguf file.",
    )


def _runtime_options(default: str | None) -> tuple[Option, ...]:
    """Return the options of where and how a model runs, and hidden ones for removed flags."""
    kept = [f for f in fields(RuntimeOptions) if f.name not in PRECISION_FIELDS]
    hints = typing.get_type_hints(RuntimeOptions)
    return (_model(default), *(_option(f, hints[f.name]) for f in kept), *map(_gone, GONE))


def gone(flag: str, instead: Callable[[str], str]) -> Option:
    """Return a hidden option that is refused in favour of what `instead` returns."""

    def refuse(context: click.Context, option: click.Parameter, value: str | None) -> None:
        if value is not None:
            raise FasteagleError(f"{flag} is gone: {instead(value)}")

    return click.option(flag, hidden=True, expose_value=False, callback=refuse)


def _gone(flag: str) -> Option:
    return gone(flag, lambda value: f"use --precision {GONE[flag](value)}")


def _only_bits(given: dict[str, Any], *others: str | None) -> str | None:
    """Take the only one of --int4, --int8 and `others`. Raises `FasteagleError` for two or more."""
    names = [name for name in others if name]
    names += [bits for bits in ("int4", "int8") if given.pop(bits)]
    if len(names) > 1:
        raise FasteagleError(f"{' and '.join(names)} contradict each other: give one")
    return names[0] if names else None


def _take_model(given: dict[str, Any]) -> dict[str, Any]:
    precision = given.pop("precision")
    check_precision(precision)
    precision = _only_bits(given, precision if precision != "auto" else None) or "auto"
    return {"runtime_options": taken(RuntimeOptions, given).at(precision)}


def _take_bench_model(given: dict[str, Any]) -> dict[str, Any]:
    quant = _only_bits(given, given.pop("quant"))
    return {"runtime_options": taken(RuntimeOptions, given, quant=quant)}


def _take_draft(given: dict[str, Any]) -> dict[str, Any]:
    tree_file = None if given["tree_file"] == "auto" else given["tree_file"]
    drafter = given["drafter"]
    if given.pop("no_spec"):
        if drafter not in ("auto", "none"):
            raise FasteagleError(
                f"--no-spec and --drafter {drafter} contradict each other: give one"
            )
        drafter = "none"
    for name in UNUSED.get(drafter, ()):
        if given[name] is not None:
            flag = name.replace("_", "-")
            raise FasteagleError(f"--{flag} has no meaning with --drafter {drafter}: drop one")
    draft = taken(DraftOptions, given, drafter=drafter, tree_file=tree_file)
    check_precision(draft.draft_precision)
    return {"draft": draft}


TREE_SIZES = ("tree_depth", "tree_topk", "tree_nodes")
UNUSED = {  # by drafter: what it does not read
    "none": (*TREE_SIZES, "head", "tap_layers", "lookup_depth"),
    "ngram": (*TREE_SIZES, "tap_layers"),
    "eagle-static": TREE_SIZES,
}


def _take_sampling(given: dict[str, Any]) -> dict[str, Any]:
    is_drawn = given["seed"] is None
    params = taken(SamplingParams, given, seed=fresh_seed() if is_drawn else given["seed"])
    announce = is_drawn and not params.greedy
    return {"params": params, "answer": taken(AnswerOptions, given), "announce_seed": announce}


def _take_grammar(given: dict[str, Any]) -> dict[str, Any]:
    forms = {name: given.pop(name) for name in ("json_schema", "regex", "grammar")}
    texts = {
        kind: _file_text(form) if isinstance(form, Path) else form
        for kind, form in forms.items()
        if form is not None
    }
    if len(texts) > 1:
        both = " and ".join(kind.replace("_", "-") for kind in texts)
        raise FasteagleError(f"--{both} contradict each other: give one")
    specs = [GrammarSpec(kind, text) for kind, text in texts.items()]
    return {"form": specs[0] if specs else None}


def _file_text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FasteagleError(f"cannot read {path}: {error}") from error


NO_SPEC = click.option("--no-spec", is_flag=True, help="The same as --drafter none.")
MODEL = Group((*_runtime_options(DEFAULT_MODEL), PRECISION, *BITS), _take_model)
OPTIONAL_MODEL = Group((*_runtime_options(None), PRECISION, *BITS), _take_model)
# A command whose --precision is a list of its own.
QUALITY_MODEL = Group(
    _runtime_options(DEFAULT_MODEL), lambda given: {"runtime_options": taken(RuntimeOptions, given)}
)
# For the benchmark, where the parts of a precision are flags.
BENCH_MODEL = Group(
    (_model(DEFAULT_MODEL), *options_of(RuntimeOptions, before={"quant": BITS})), _take_bench_model
)
DRAFT = Group(tuple(options_of(DraftOptions, before={"head": [NO_SPEC]})), _take_draft)
SAMPLING = Group((*options_of(SamplingParams), *options_of(AnswerOptions)), _take_sampling)
GRAMMAR = Group(
    (
        click.option("--json-schema", type=FILE, help="Answer in JSON of the schema in this file."),
        click.option("--regex", help="Answer with text that matches this as a whole."),
        click.option("--grammar", type=FILE, help="Answer in this file's Lark grammar."),
    ),
    _take_grammar,
)
model_options = groups(MODEL)
