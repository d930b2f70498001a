"""Messages of a conversation as chat templates read them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

from fasteagle.answering.stream import END_THINK
from fasteagle.config_fields import parse_shallow_json
from fasteagle.errors import FasteagleError, shown
from fasteagle.server.protocol import ChatMessage


class BadParameterError(FasteagleError):
    """Error of a parameter that cannot be honoured, by name."""

    def __init__(self, param: str, message: str, code: str | None = None) -> None:
        super().__init__(f"{param}: {message}")
        self.param, self.code = param, code


# Fields of a message that not every chat template renders, and marks of those that do something
# with them: some drop the thoughts of earlier answers. The id of a call is not among them: clients
# must send it, and which call a result belongs to follows from `for_template`.
RENDERED_BY_SOME = {
    "tool_calls": ("tool_calls",),
    "reasoning_content": ("reasoning_content", END_THINK),
}


def check_rendered(number: int, message: ChatMessage, template: str) -> None:
    """Refuse fields of a message that the template knows nothing of."""
    for field, marks in RENDERED_BY_SOME.items():
        if getattr(message, field) and not any(mark in template for mark in marks):
            reason = "this model's chat template does not render it: leave it out"
            raise BadParameterError(f"messages.{number}.{field}", reason)
    if message.tool_call_id is not None and message.role != "tool":
        raise BadParameterError(f"messages.{number}.tool_call_id", "is for the role tool")


def for_template(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return messages for templates, with results of tools in the order of their calls.

    Agents that run tools at the same time send results as they come, and not every template writes
    which call a result belongs to.
    """
    dialogue = [_template_message(i, message) for i, message in enumerate(messages)]
    runs = itertools.groupby(range(len(messages)), lambda i: messages[i].role == "tool")
    for is_result, numbers in runs:
        first, *rest = numbers
        if is_result and first:
            calls, end = messages[first - 1].tool_calls or (), first + len(rest) + 1
            places = {call.id: i for i, call in enumerate(calls) if call.id}
            dialogue[first:end] = _in_order(dialogue[first:end], places, first)
    return dialogue


def _in_order(
    results: list[dict[str, Any]], places: dict[str, int], first: int
) -> list[dict[str, Any]]:
    """Return results in the order of `places`; those without ids, or after no calls, as they are.

    They are the messages from number `first` on.
    """
    if not places:
        return results
    names = [result.get("tool_call_id") for result in results]
    for number, name in enumerate(names, first):
        if name is not None and name not in places:
            reason = f"{shown(name)} is no call of the message before"
            raise BadParameterError(f"messages.{number}.tool_call_id", reason)
    if None in names:
        return results
    return sorted(results, key=lambda result: places[result["tool_call_id"]])


def _template_message(number: int, message: ChatMessage) -> dict[str, Any]:
    """Return a message for templates: content is a string; of arguments see `_arguments`."""
    content = message.content
    if isinstance(content, list):
        content = "".join(part.text for part in content)
    if message.refusal is not None:
        content = (content or "") + message.refusal
    if content is None and message.role not in ("assistant", "tool"):
        raise BadParameterError(f"messages.{number}.content", "is missing")
    role = "system" if message.role == "developer" else message.role
    entry: dict[str, Any] = {"role": role, "content": content or ""}
    if message.reasoning_content is not None:
        entry["reasoning_content"] = message.reasoning_content
    if message.tool_call_id is not None:
        entry["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        entry["tool_calls"] = [
            {
                **({} if c.id is None else {"id": c.id}),
                "type": "function",
                "function": {
                    "name": c.function.name,
                    "arguments": _arguments(c.function.arguments),
                },
            }
            for c in message.tool_calls
        ]
    return entry


def _arguments(text: str) -> dict[str, Any] | str:
    """Return a call's arguments; what is no JSON object is a text, or no agent could go on.

    A model may have been cut off in a call. The agent then tells it so, and sends the call along.
    """
    try:
        arguments = parse_shallow_json(text or "{}")
        json.dumps(arguments, ensure_ascii=False).encode()  # no halves of characters
    except ValueError:
        return text
    return arguments if isinstance(arguments, dict) else text
