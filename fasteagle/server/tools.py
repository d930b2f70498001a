"""Tool calls: how a model's template writes them, and how they are read back from its answer."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from fasteagle.answering.json_form import json_form
from fasteagle.answering.stream import overlap
from fasteagle.config_fields import parse_shallow_json
from fasteagle.errors import FasteagleError
from fasteagle.loading.tokenizer import ChatTokenizer
from fasteagle.options import GrammarSpec

END_CALL = "</tool_call>"
LLAMA3_BEGIN = '{"name":'


class Call(NamedTuple):
    """Tool call; `arguments` is JSON."""

    name: str
    arguments: str


class ToolFormat(NamedTuple):
    """Format of tool calls: `opening` begins what may be one; `key` holds the arguments.

    In grammars a call is `begin`, or what follows a text that ends with `opened`, and then `rest`:
    name and arguments, until `end`. `between` parts two calls, `after` may follow the last one.
    """

    opening: str
    key: str
    begin: str
    opened: str
    rest: str
    end: str
    between: str
    after: str


# Single lexemes as in JSON: longer ones would exclude JSON that begins in the same way.
NAME = r'"{" "\"name\"" ":"'
HERMES = ToolFormat(  # Qwen2.5, Qwen3
    "<tool_call>",
    "arguments",
    begin=rf'"<tool_call>\n" {NAME}',
    opened=r"(?s:.*)<tool_call>",
    rest=rf'"\n" {NAME}',
    end=r'"\n</tool_call>"',
    between=r"/\n?/",
    after="TEXT?",
)
LLAMA3 = ToolFormat(  # Llama 3.1 to 3.3
    "{",
    "parameters",
    begin=NAME,
    opened=r'\s*\{\s*"name"\s*:',
    rest="",
    end="",
    between="/;? ?/",
    after="",
)


def tool_format(template: str) -> ToolFormat:
    """Return how a model with this chat template calls; raise `FasteagleError` where it cannot."""
    if "tools" in template:
        if "<tool_call>" in template:
            return HERMES
        if '"parameters"' in template and "name" in template:
            return LLAMA3
    raise FasteagleError(
        "tools: this model's chat template takes none that can be read back: use a model whose "
        "template does (qwen3-4b, llama3.1-8b)"
    )


def takes_several_calls(tokenizer: ChatTokenizer) -> bool:
    """Return whether the chat template renders a message with two calls; Llama 3.1's refuses it."""
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call, call]}
    try:
        tokenizer.render([{"role": "user", "content": ""}, answer])
    except FasteagleError:
        return False
    return True


def parse_calls(
    text: str, form: ToolFormat, names: Collection[str], is_cut: bool = False
) -> tuple[str, list[Call]]:
    """Return the remaining text, and the calls of tools `names` that were in it.

    Text that only looks like a call stays text, also beside calls. Where `is_cut`, the remaining
    text may be a call without its end.
    """
    if form is HERMES:
        return _hermes_calls(text, names)
    calls, rest = _llama3_calls(text.strip(), names)
    if not calls or (rest and not (is_cut and not before_cut_call(rest, LLAMA3))):
        return text, []
    return rest, calls


def before_cut_call(text: str, form: ToolFormat) -> str:
    """Return `text` without a call that is cut off at its end."""
    if form is HERMES:
        at = text.rfind(form.opening)
        if at >= 0 and END_CALL not in text[at:]:
            return text[:at].rstrip()
        return text[: len(text) - overlap(text, form.opening)]
    begin = "".join(text[:80].split())[: len(LLAMA3_BEGIN)]
    return "" if begin and LLAMA3_BEGIN.startswith(begin) else text


def _hermes_calls(text: str, names: Collection[str]) -> tuple[str, list[Call]]:
    """Return remaining text, and the calls between marks; takes time linear in the text."""
    calls, left, at = [], "", 0
    while (end := text.find(END_CALL, at)) >= 0:
        start = text.find(HERMES.opening, at, end)
        if start < 0:
            left, at = left + text[at : end + len(END_CALL)], end + len(END_CALL)
            continue
        call, close = _hermes_call(text, start, end, names)
        if call is None:  # the first mark may be one that the text only speaks of
            start = text.rfind(HERMES.opening, at, end)
            call, close = _hermes_call(text, start, end, names)
        if call is None:
            left, at = left + text[at : end + len(END_CALL)], end + len(END_CALL)
            continue
        calls.append(call)
        left, at = left + text[at:start], close + len(END_CALL)
    return ((left + text[at:]).strip(), calls) if calls else (text, [])


def _hermes_call(
    text: str, start: int, end: int, names: Collection[str]
) -> tuple[Call | None, int]:
    """Return the call whose opening mark is at `start`, and where its closing mark is.

    That is at `end`, or after the end of the JSON: a string in it may hold such a mark.
    """
    begin = start + len(HERMES.opening)
    with contextlib.suppress(ValueError, RecursionError):
        _, stop = json.JSONDecoder().raw_decode(text, _past_blanks(text, begin))
        stop = _past_blanks(text, stop)
        if text.startswith(END_CALL, stop):
            end = stop
    return _call(text[begin:end], HERMES, names), end


def _past_blanks(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _llama3_calls(text: str, names: Collection[str]) -> tuple[list[Call], str]:
    """Return the calls that begin a text, separated by semicolons or blanks, and what follows."""
    decoder, calls, at = json.JSONDecoder(), [], 0
    while at < len(text):
        try:
            _, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            break
        call = _call(text[at:end], LLAMA3, names)
        if call is None:
            break
        calls.append(call)
        at = end
        while at < len(text) and text[at] in "; \n":
            at += 1
    return calls, text[at:]


def _call(text: str, form: ToolFormat, names: Collection[str]) -> Call | None:
    """Return `text` as a call of a tool of `names`, if it is one.

    Without marks round it, JSON is a call only if it has arguments: it may be the answer itself.
    """
    try:
        value = parse_shallow_json(text)
    except ValueError:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    if value["name"] not in names:
        return None
    arguments = value.get(form.key, {} if form is HERMES else None)
    if not isinstance(arguments, dict):
        return None
    written = json.dumps(arguments, ensure_ascii=False)
    return Call(value["name"], written.encode("utf-8", "replace").decode())


def _parameters(function: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a tool's arguments, an object; without parameters it is empty."""
    schema = function.get("parameters") or {"type": "object"}
    known = {"type", "properties", "required", "description", "title", "$schema"}
    if schema.keys() <= known and not schema.get("properties"):
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **schema}


def answer_grammar(
    form: ToolFormat,
    tools: Sequence[dict[str, Any]],
    *,
    must_call: bool = False,
    most_calls: int | None = None,
    schema: Any = None,
) -> GrammarSpec:
    """Return the grammar of an answer that may call `tools`, whose arguments obey their schemas.

    Keywords that llguidance does not know are an error only in schemas of strict functions. With
    `must_call` the answer is calls. Else it may be JSON of `schema` or, without that, text;
    once a call begins, its rest has to follow.
    """

    def calls(begin: str) -> str:
        more = "" if most_calls == 1 else f"({form.between} {begin} call)*"
        return f"{begin} call {more}"

    if must_call:
        rules = [f"start: {calls('begin')}"]
    elif schema is not None:
        rules = [f"start: form | {calls('begin')}", f"form: %json {json.dumps(json_form(schema))}"]
    else:
        rules = [
            f"start: TEXT? | {calls(f'open {form.rest}')} {form.after}",
            f"open[lazy]: /{form.opened}/",
            f"TEXT: /(?s:.+)/ & ~/{form.opened}(?s:.*)/",
        ]
    names = " | ".join(f"tool{i}" for i in range(len(tools)))
    rules += [f"begin: {form.begin}", f'call: / ?/ ({names}) / ?/ "}}" {form.end}']
    for i, function in enumerate(tool["function"] for tool in tools):
        name, key = (json.dumps(f'"{word}"') for word in (function["name"], form.key))
        form_of_arguments = json_form(_parameters(function), is_lenient=not function.get("strict"))
        rules += [
            f'tool{i}: {name} / ?/ "," / ?/ {key} / ?/ ":" / ?/ arguments{i}',
            f"arguments{i}: %json {json.dumps(form_of_arguments)}",
        ]
    return GrammarSpec("grammar", "\n".join(rules))
