"""Keywords of the Python API: their types and their meaning. Needs no torch."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from fasteagle.errors import FasteagleError, shown, suggest
from fasteagle.option_fields import require
from fasteagle.options import AnswerOptions, GrammarSpec, SamplingParams, fresh_seed

if TYPE_CHECKING:
    from fasteagle.answering.answer_logits import AnswerRequest  # needs torch

MOST_PENALTY = 2  # for presence and frequency; OpenAI's range
MOST_BIAS = 1e30  # the sum with a logit stays finite in fp32 at any temperature
EXTRAS = ("logit_bias", "top_logprobs", "speculate", "presence_penalty", "frequency_penalty")
Each = TypeVar("Each")


class AnswerKeywords(TypedDict, total=False):
    """Keywords of `LLM.chat` and `LLM.generate` besides their first argument.

    The sampling options are those of the command line; greedy without a temperature. The penalties
    for presence and frequency are those of OpenAI's API. `json_schema` is a schema as a dictionary,
    or True for any JSON object; `grammar` is in llguidance's dialect of Lark. `logit_bias` is by
    token id, `top_logprobs` is the number of likeliest tokens to report besides the sampled one;
    `speculate` False decodes plainly.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    max_new_tokens: int
    stop: str | Sequence[str]
    json_schema: Mapping[str, Any] | bool
    regex: str
    grammar: str
    logit_bias: Mapping[int, float]
    top_logprobs: int
    speculate: bool


def read_keywords(method: str, keywords: AnswerKeywords, **flags: bool | None) -> dict[str, Any]:
    """Return the arguments of `LLM.made_request` after the prompt; check `flags`, too.

    Raises `FasteagleError`; for keywords that `method` does not know `TypeError`.
    """
    left: dict[str, Any] = {**keywords}
    if unknown := min(left.keys() - AnswerKeywords.__annotations__.keys(), default=None):
        near = suggest(unknown, [*AnswerKeywords.__annotations__, *flags])
        raise TypeError(f"{method}() got an unexpected keyword argument {unknown!r}{near}")
    for name, value in {**flags, "speculate": left.get("speculate", True)}.items():
        if value is not None or name != "think":  # None: as the template says
            _check_flag(name, value)
    spec = _grammar_spec(left)
    extras = {name: left.pop(name) for name in EXTRAS if name in left}
    if isinstance(extras.get("logit_bias"), Mapping):
        extras["logit_bias"] = dict(extras["logit_bias"])  # the caller may change it meanwhile
    ends = {name: left.pop(name) for name in ("max_new_tokens", "stop") if name in left}
    if isinstance(ends.get("stop"), str):
        ends["stop"] = (ends["stop"],)
    seed = left.pop("seed", None)
    params = SamplingParams(**left, seed=0 if seed is None else seed)
    if seed is None and not params.greedy:
        params = dataclasses.replace(params, seed=fresh_seed())
    return {"params": params, "options": AnswerOptions(**ends), "spec": spec, **extras}


def check_loading(
    precision: str, drafter: str, compile: bool, notify: Callable[[str], None]
) -> None:
    """Raise `FasteagleError` for arguments of `fasteagle.load` that no other check sees."""
    check_text("precision", precision)
    require(
        drafter != "model",
        "drafter 'model' is for the command line: its --draft-model is no argument here",
    )
    _check_flag("compile", compile)
    require(callable(notify), f"notify {shown(notify)} is no function")


def _check_flag(name: str, value: object) -> None:
    # The text "off" would count as True.
    require(isinstance(value, bool), f"{name} {shown(value)} is neither True nor False")


def check_extras(request: AnswerRequest, vocab_size: int) -> None:
    """Raise `FasteagleError` for a bias, a number of tokens or penalties that cannot be."""
    bias = {} if request.logit_bias is None else request.logit_bias
    require(isinstance(bias, Mapping), f"logit_bias {shown(bias)} is no dictionary")
    for token, amount in bias.items():
        require(_is_number(token, Integral), f"logit_bias: {shown(token)} is no token id")
        require(
            0 <= token < vocab_size,
            f"logit_bias: token id {shown(token)} is outside the vocabulary of {vocab_size:,}: "
            f"use 0 .. {vocab_size - 1:,}",
        )
        in_range = _is_number(amount, Real) and (-MOST_BIAS <= amount <= MOST_BIAS)
        require(
            in_range or amount == -math.inf,
            f"logit_bias {shown(amount)} of token id {token} is out of range: use a number up to "
            f"{MOST_BIAS:g}",
        )
    is_left = len(bias) < vocab_size or any(amount != -math.inf for amount in bias.values())
    require(is_left, "logit_bias forbids every token: leave one out")
    if (n_top := request.top_logprobs) is not None:
        require(_is_number(n_top, Integral), f"top_logprobs {shown(n_top)} is not a whole number")
        limits = f"use 0 .. {vocab_size}"
        require(0 <= n_top <= vocab_size, f"top_logprobs {shown(n_top)} is out of range: {limits}")
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(request, name)
        require(
            _is_number(value, Real) and -MOST_PENALTY <= value <= MOST_PENALTY,
            f"{name} {shown(value)} is out of range: use -{MOST_PENALTY} .. {MOST_PENALTY}",
        )


def checked_ids(prompt: Any) -> list[int]:
    """Return the token ids that `prompt` holds or yields; raise `FasteagleError` for others."""
    ids = list(prompt) if isinstance(prompt, Iterable) and not isinstance(prompt, bytes) else None
    if ids is None or not all(_is_number(token, Integral) for token in ids):
        raise FasteagleError(f"prompt {shown(prompt)} is no text and no list of token ids")
    return [int(token) for token in ids]


def _is_number(value: object, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def listed(name: str, value: Sequence[Each]) -> Sequence[Each]:
    """Return `value`; raise `FasteagleError` unless it is a list or a tuple."""
    if not isinstance(value, list | tuple):
        raise FasteagleError(f"{name} {shown(value)} is no list")
    return value


def check_text(name: str, text: object) -> None:
    """Raise `FasteagleError` unless `text` is a text that a tokenizer can read."""
    if not isinstance(text, str):
        raise FasteagleError(f"{name} {shown(text)} is no text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise FasteagleError(f"{name} holds {half!r}, half of a character: not UTF-8") from error


def checked_name(name: str, value: str | PathLike[str]) -> str:
    """Return a name or a path as text; raise `FasteagleError` if `value` is neither."""
    if not isinstance(value, str | PathLike):
        raise FasteagleError(f"{name} {shown(value)} is no name and no path")
    return fspath(value)


def _grammar_spec(keywords: dict[str, Any]) -> GrammarSpec | None:
    """Remove the form of an answer from `keywords` and return it, or None."""
    forms = {name: keywords.pop(name, None) for name in ("json_schema", "regex", "grammar")}
    specs = [(kind, value) for kind, value in forms.items() if value is not None]
    if len(specs) > 1:
        both = " and ".join(kind for kind, _ in specs)
        raise FasteagleError(f"{both} contradict each other: give one")
    if not specs or specs[0][1] is False:
        return None
    kind, value = specs[0]
    if kind != "json_schema":
        check_text(kind, value)
        return GrammarSpec(kind, value)
    if value is True:
        return GrammarSpec("json_object")
    try:
        return GrammarSpec(kind, json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise FasteagleError(f"json_schema is not JSON: {error}") from error
