"""Groups of command-line options made from dataclasses; each arrives at its command as an object.

Imports no torch.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, TypeVar

import click

from fasteagle.cli.command import Numbers, ResultPath, UserPath, comma_list
from fasteagle.config_fields import text_of
from fasteagle.errors import FasteagleError
from fasteagle.option_fields import UNSAID, flag_of, option, require_unset, require_word
from fasteagle.options import (
    DEFAULT_MODEL,
    EXPORT_FORMATS,
    TAP_LAYERS_TEXT,
    AnswerOptions,
    Defaults,
    DraftOptions,
    GrammarSpec,
    RuntimeOptions,
    SamplingParams,
    fresh_seed,
)
from fasteagle.quant.scheme import check_precision

Command = Callable[..., Any]
Option = Callable[[Command], Command]
Values = dict[str, Any]  # values of options by parameter
Made = TypeVar("Made")

FILE = UserPath(dir_okay=False)
FOLDER = UserPath(file_okay=False)
RESULT = ResultPath()


class Words(click.Choice[str]):
    """Parameter type of a choice, refused in the words of `option_fields.check`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        assert param is not None, "it is of an option"
        require_word(param.opts[0].removeprefix("--"), value, self.choices)
        return value


class Text(click.ParamType):
    """Parameter type of texts in UTF-8, also where the locale made their bytes surrogates."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return utf8(os.fsencode(value), param.opts[-1] if param is not None else "the argument")


def utf8(raw: bytes, what: str) -> str:
    """Return text of UTF-8 bytes; raise `FasteagleError` for others."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FasteagleError(
            f"{what} is not UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start}; "
            "convert it first (iconv -t utf-8)"
        ) from None


_KINDS = {
    "text": Text(),
    "file": FILE,
    "result": RESULT,
    "folder": FOLDER,
    "numbers": Numbers(),
    "existing folder": UserPath(file_okay=False, exists=True),
}


def options_of(kind: type[Any], without: Iterable[str] = ()) -> tuple[Option, ...]:
    """Return an option for every field of the dataclass `kind` but those named in `without`."""
    hints = typing.get_type_hints(kind)
    return tuple(_option(f, hints[f.name]) for f in fields(kind) if f.name not in without)


def _option(field: Field[Any], hint: Any) -> Option:
    """Return the option of one field, of the type that the field is annotated with."""
    kind, unset = field.metadata.get("kind"), field.metadata.get("unset", UNSAID)
    default: Any = field.default if unset is UNSAID else unset
    names = (*flag_of(field).split(), field.name)
    settings: dict[str, Any] = {"help": field.metadata.get("text")}
    if hint is bool:
        is_on = default is True
        return click.option(*names, is_flag=True, default=is_on, show_default=is_on, **settings)
    if kind == "comma list":
        default = ",".join(default)
        settings["callback"] = lambda context, option, text: comma_list(text)
    elif isinstance(kind, tuple):
        settings["type"] = Words(kind)
    elif "/" not in names[0]:  # --this/--not-this
        settings["type"] = _KINDS[kind] if kind else _plain_type(hint)
    if default is MISSING:
        settings["required"] = True
    elif default == ():
        settings["multiple"] = True
    else:
        settings |= {"default": default, "show_default": default is not None}
    return click.option(*names, **settings)


def _plain_type(hint: Any) -> Any:
    """Return T of the annotations `T`, `T | None` and `tuple[T, ...]`."""
    is_made_of = isinstance(hint, types.UnionType) or typing.get_origin(hint) is tuple
    return typing.get_args(hint)[0] if is_made_of else hint


def taken(kind: type[Made], values: Values, **changed: Any) -> Made:
    """Make a `kind` from its fields in `values`, which are removed there, and from `changed`."""
    names = [field.name for field in fields(kind) if field.name in values]  # type: ignore[arg-type]
    return kind(**{**{name: values.pop(name) for name in names}, **changed})


@dataclasses.dataclass(frozen=True)
class Group:
    """Options that belong together, and the conversion of their values for a command.

    `take` removes the values of its options and returns the command's arguments.
    """

    options: tuple[Option, ...]
    take: Callable[[Values], Values]


def groups(*parts: Group) -> Option:
    """Make a decorator that gives a command the options of all `parts`, in this order."""

    def add(command: Command) -> Command:
        @functools.wraps(command)
        def wrapped(**values: Any) -> Any:
            made: Values = {}
            for part in parts:
                made |= part.take(values)
            return command(**made, **values)

        with_options: Command = wrapped
        for part in reversed(parts):
            for add_option in reversed(part.options):
                with_options = add_option(with_options)
        return with_options

    return add


def group(kind: type[Any], parameter: str) -> Option:
    """Make a decorator with an option for every field of `kind`, passed as `parameter`."""
    return groups(Group(options_of(kind), lambda values: {parameter: taken(kind, values)}))


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
    click.option("--int4", is_flag=True, help="4 bits: the checkpoint's own, or HQQ."),
    click.option("--int8", is_flag=True, help="8 bits, one scale per row."),
)
PRECISION = click.option(
    "--precision",
    default="auto",
    show_default=True,
    help="auto: as the model's files hold it; or int4, int8, bf16, fp16, fp32 or a scheme.",
)


def gone(flag: str, instead: Callable[[str], str]) -> Option:
    """Return a hidden option that is refused in favour of what `instead` returns."""

    def refuse(context: click.Context, option: click.Parameter, value: str | None) -> None:
        if value is not None:
            raise FasteagleError(f"{flag} is gone: {instead(value)}")

    return click.option(flag, hidden=True, expose_value=False, callback=refuse)


def _gone(flag: str) -> Option:
    return gone(flag, lambda value: f"use --precision {GONE[flag](value)}")


def _model(default: str | None) -> Option:
    return click.option(
        "--model",
        default=default,
        show_default=default is not None,
        help="Registry name, Hugging Face id, folder or .gguf file.",
    )


def _runtime_options(default: str | None, without: Iterable[str] = ()) -> tuple[Option, ...]:
    """Return the options of where and how a model runs, and hidden ones for removed flags."""
    return (
        _model(default),
        *options_of(RuntimeOptions, without=(*PRECISION_FIELDS, *without)),
        *map(_gone, GONE),
    )


def _only_bits(values: Values, *others: str | None) -> str | None:
    """Take the only one of --int4, --int8 and `others`. Raises `FasteagleError` for two or more."""
    names = [name for name in others if name]
    names += [bits for bits in ("int4", "int8") if values.pop(bits)]
    if len(names) > 1:
        raise FasteagleError(f"{' and '.join(names)} contradict each other: give one")
    return names[0] if names else None


def _take_model(values: Values) -> Values:
    precision = values.pop("precision")
    check_precision(precision)
    precision = _only_bits(values, precision if precision != "auto" else None) or "auto"
    return {"runtime_options": taken(RuntimeOptions, values).at(precision)}


def _take_bench_model(values: Values) -> Values:
    quant = _only_bits(values, values.pop("quant"))
    return {"runtime_options": taken(RuntimeOptions, values, quant=quant)}


MODEL = Group((*_runtime_options(DEFAULT_MODEL), PRECISION, *BITS), _take_model)
OPTIONAL_MODEL = Group((*_runtime_options(None), PRECISION, *BITS), _take_model)
# For writing weights, which run nowhere.
WEIGHTS = Group(
    (*_runtime_options(DEFAULT_MODEL, ("max_seq_len", "kv", "strict")), PRECISION, *BITS),
    _take_model,
)
# A command whose --precision is a list of its own.
QUALITY_MODEL = Group(
    _runtime_options(DEFAULT_MODEL),
    lambda values: {"runtime_options": taken(RuntimeOptions, values)},
)
# For the benchmark, where the parts of a precision are flags.
BENCH_MODEL = Group((_model(DEFAULT_MODEL), *options_of(RuntimeOptions), *BITS), _take_bench_model)
model_options = groups(MODEL)

TREE_SIZES = ("tree_depth", "tree_topk", "tree_nodes")
UNUSED = {  # by drafter: what it does not read
    "none": (*TREE_SIZES, "head", "tap_layers"),
    "ngram": (*TREE_SIZES, "head", "tap_layers"),
    "eagle-static": TREE_SIZES,
    "eagle-chain": ("tree_topk", "tree_nodes"),
}


def _take_draft(values: Values) -> Values:
    if values["tree_file"] == "auto":
        values["tree_file"] = None
    drafter = values["drafter"]
    if values.pop("no_spec"):
        if drafter not in ("auto", "none"):
            raise FasteagleError(
                f"--no-spec and --drafter {drafter} contradict each other: give one"
            )
        drafter = "none"
    if values["draft_precision"] != "auto" and values["draft_model"] is None:
        raise FasteagleError("--draft-precision needs --draft-model: give both, or drop it")
    draft = taken(DraftOptions, values, drafter=drafter)
    require_unset(draft, UNUSED.get(drafter, ()), f"with --drafter {drafter}")
    if draft.tree_file is not None:
        require_unset(draft, TREE_SIZES, "with --tree FILE")
    check_precision(draft.draft_precision)
    return {"draft": draft}


NO_SPEC = click.option("--no-spec", is_flag=True, help="The same as --drafter none.")
DRAFT = Group((NO_SPEC, *options_of(DraftOptions)), _take_draft)


def _take_answers(values: Values) -> Values:
    form = _taken_form(values)
    seed_is_fixed = values["seed"] is not None
    if not seed_is_fixed:
        values["seed"] = fresh_seed()
    params, answer = taken(SamplingParams, values), taken(AnswerOptions, values)
    made = {"params": params, "answer": answer, "seed_is_fixed": seed_is_fixed, "form": form}
    return {"defaults": taken(Defaults, values, **made)}


def _taken_form(values: Values) -> GrammarSpec | None:
    forms = {name: values.pop(name) for name in ("json_schema", "regex", "grammar")}
    texts = {
        kind: text_of(form) if isinstance(form, Path) else form
        for kind, form in forms.items()
        if form is not None
    }
    if len(texts) > 1:
        both = " and ".join(f"--{kind.replace('_', '-')}" for kind in texts)
        raise FasteagleError(f"{both} contradict each other: give one")
    return next((GrammarSpec(kind, text) for kind, text in texts.items()), None)


REST: tuple[Option, ...] = (
    click.option(
        "--json-schema", type=FILE, help="Answer in JSON that fits the schema in this file."
    ),
    click.option("--regex", type=Text(), help="Regular expression of the whole answer."),
    click.option("--grammar", type=FILE, help="Answer in this file's Lark grammar."),
    *options_of(Defaults, without=("params", "answer", "seed_is_fixed", "form")),
)
LONGEST, STOP = options_of(AnswerOptions)
# Clients of a server send a limit where they want one: agents write long files without.
LONGEST_SERVED = click.option(
    "--max-new-tokens",
    default=2**31 - 1,
    show_default="to the end of the context",
    help="Longest answer where a request names no limit, in tokens.",
)
ANSWERS = Group((*options_of(SamplingParams), LONGEST, STOP, *REST), _take_answers)
SERVED_ANSWERS = Group((*options_of(SamplingParams), LONGEST_SERVED, STOP, *REST), _take_answers)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TalkOptions:
    """Options of chat and server: what is compiled, and what is shown."""

    compile_blocks: bool | None = option(
        None,
        "Compile before answering, or never.  [default: in the background; not for one prompt]",
        flag="--compile/--no-compile",
    )
    quiet: bool = option(False, "Print only answers (a server: its address) and errors.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatOptions(TalkOptions):
    """Options of chat: one question or a conversation, and how it is shown."""

    # None: a conversation, if standard input is a terminal
    prompt: str | None = option(
        None,
        "Answer this once and exit; '-' reads standard input.",
        flag="-p --prompt",
        kind="text",
    )
    show_accepted: bool = option(False, "Colour drafted text that was accepted.")
    plain: bool = option(False, "Show answers as written, without rendering Markdown.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Options of exporting a draft head: the layout of its file, and the target it needs."""

    to: str = option(
        text="eagle: official; specforge: SGLang; speculators: vLLM; gguf: llama.cpp.",
        kind=EXPORT_FORMATS,
    )
    model: str | None = option(None, "Target model, where the layout needs its tensors or depth.")
    tokenizer_from: Path | None = option(
        None, "The target's GGUF file, for its tokenizer.  [default: --model]", kind="file"
    )
    tap_layers: tuple[int, ...] | None = option(None, TAP_LAYERS_TEXT, kind="numbers")
