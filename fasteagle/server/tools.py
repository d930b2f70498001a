"""Tool calls: how a model's template writes them, and how they are read back from its answer."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from fasteagle.errors import FasteagleError
from fasteagle.options import GrammarSpec

HERMES_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


class Call(NamedTuple):
    """`arguments` is JSON."""

    name: str
    arguments: str


class ToolFormat(NamedTuple):
    """One way to write calls. `opening` begins what may be one; `key` holds the arguments."""

    name: str
    opening: str
    key: str


HERMES = ToolFormat("hermes", "<tool_call>", "arguments")  # Qwen2.5, Qwen3
LLAMA3 = ToolFormat("llama3", "{", "parameters")  # Llama 3.1 to 3.3


def tool_format(template: str) -> ToolFormat:
    """How a model with this chat template calls. Raises `FasteagleError` where it cannot."""
    if "tools" in template:
        if "<tool_call>" in template:
            return HERMES
        if '"parameters"' in template and "name" in template:
            return LLAMA3
    raise FasteagleError(
        "tools: this model's chat template takes none that can be read back: use a model whose "
        "template does (qwen3-4b, llama3.1-8b)"
    )


def parse_calls(text: str, form: ToolFormat) -> tuple[str, list[Call]]:
    """What is left as text, and the calls in it; text that only looks like a call stays text."""
    if form is HERMES:
        calls = [_call(found, form) for found in HERMES_CALL.findall(text)]
        if calls and all(calls):
            return HERMES_CALL.sub("", text).strip(), [call for call in calls if call]
        return text, []
    calls = _llama3_calls(text.strip())
    return ("", [call for call in calls if call]) if calls and all(calls) else (text, [])


def _llama3_calls(text: str) -> list[Call | None]:
    """JSON objects, with semicolons or blanks between them, and nothing else."""
    decoder, calls, at = json.JSONDecoder(), [], 0
    while at < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
        except ValueError:
            return []
        calls.append(_call(json.dumps(value, ensure_ascii=False), LLAMA3))
        while at < len(text) and text[at] in "; \n":
            at += 1
    return calls


def _call(text: str, form: ToolFormat) -> Call | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get(form.key, {})
    if not isinstance(arguments, dict):
        return None
    return Call(found["name"], json.dumps(arguments, ensure_ascii=False))


def call_grammar(
    form: ToolFormat, tools: Sequence[dict[str, Any]], name: str | None
) -> GrammarSpec:
    """The form of one call of the tool `name`, or of any where it is None."""
    chosen = [tool["function"] for tool in tools if name in (None, tool["function"]["name"])]
    if not chosen:
        raise FasteagleError(f"tool_choice: there is no tool {name!r} among tools")
    schemas = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function["name"]},
                form.key: function.get("parameters") or {"type": "object"},
            },
            "required": ["name", form.key],
            "additionalProperties": False,
        }
        for function in chosen
    ]
    schema = json.dumps(schemas[0] if len(schemas) == 1 else {"anyOf": schemas})
    if form is LLAMA3:
        return GrammarSpec("json_schema", schema)
    marks = ('"<tool_call>\\n"', f"%json {schema}", '"\\n</tool_call>"')
    return GrammarSpec("grammar", f"start: {marks[0]} call {marks[2]}\ncall: {marks[1]}")
