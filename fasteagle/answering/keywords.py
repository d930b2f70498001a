"""Keywords of the Python API: their types and their meaning. Needs no torch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, TypedDict, TypeVar

from fasteagle.errors import FasteagleError
from fasteagle.options import AnswerOptions, GrammarSpec, SamplingParams, fresh_seed

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


def read_keywords(
    keywords: AnswerKeywords,
) -> tuple[SamplingParams, AnswerOptions, GrammarSpec | None, dict[str, Any]]:
    """Return sampling, end, form, and further arguments of `LLM.made_request`.

    Raises `FasteagleError`; for unknown keywords `TypeError`.
    """
    left: dict[str, Any] = {**keywords}
    spec = _grammar_spec(left)
    names = {"logit_bias": "bias", "top_logprobs": "n_top", "speculate": "speculate"}
    names |= {name: name for name in ("presence_penalty", "frequency_penalty")}
    more = {ours: left.pop(theirs) for theirs, ours in names.items() if theirs in left}
    ends = {name: left.pop(name) for name in ("max_new_tokens", "stop") if name in left}
    if isinstance(ends.get("stop"), str):
        ends["stop"] = (ends["stop"],)
    seed = left.pop("seed", None)
    params = SamplingParams(**left, seed=0 if seed is None else seed)
    if seed is None and not params.greedy:
        params = dataclasses.replace(params, seed=fresh_seed())
    return params, AnswerOptions(**ends), spec, more


def are_ids(prompt: Any) -> bool:
    """Return whether a prompt is a list of token ids."""
    return isinstance(prompt, Iterable) and all(isinstance(token, Integral) for token in prompt)


def listed(name: str, value: Sequence[Each]) -> Sequence[Each]:
    """Return `value`; raise `FasteagleError` unless it is a list or a tuple."""
    if not isinstance(value, list | tuple):
        raise FasteagleError(f"{name} {value!r} is no list")
    return value


def check_text(name: str, text: object) -> None:
    """Raise `FasteagleError` unless `text` is a text that a tokenizer can read."""
    if not isinstance(text, str):
        raise FasteagleError(f"{name} {text!r} is no text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise FasteagleError(f"{name} holds {half!r}, half of a character: not UTF-8") from error


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
        return GrammarSpec(kind, value)
    return GrammarSpec("json_object") if value is True else GrammarSpec(kind, json.dumps(value))
