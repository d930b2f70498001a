"""Requests of OpenAI's API that the server understands, with vLLM's additions.

A parameter that is not here is refused by name, and so is a value that cannot be honoured: nothing
that would change an answer is ignored. Values are not converted: a number in quotes is a wrong
type.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    FailFast,
    Field,
    Tag,
    field_validator,
    model_validator,
)

from fasteagle.config_fields import check_nesting

MOST_LOGPROBS = 20
MOST_TOOLS = 1024
MOST_PARTS = 2**14  # messages, parts and calls of a request: to check them takes 20 us each

Item = TypeVar("Item")


class First(FailFast):
    """Mark of lists in which only the first mistake is looked for; hashable, for unions.

    A body of 8 MiB could hold millions, and to list them takes seconds and gigabytes.
    """

    __hash__ = object.__hash__


Many = Annotated[list[Item], First()]


class Strict(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )

    @model_validator(mode="before")
    @classmethod
    def _with_one_unknown(cls, data: Any) -> Any:
        """Drop unknown fields but the first, and those that are null and have a default.

        Clients send back whole messages with fields that they do not use.
        """
        if not isinstance(data, dict):
            return data
        fields = {field.alias or name: field for name, field in cls.model_fields.items()}
        filled = {key: value for key, value in data.items() if value is not None}
        unknown = [key for key in filled if key not in fields]
        missing = {key: None for key in data if key in fields and fields[key].is_required()}
        known = {key: value for key, value in filled.items() if key in fields or key in unknown[:1]}
        return missing | known


class Body(Strict):
    """Base of the bodies of requests."""

    @model_validator(mode="before")
    @classmethod
    def _whole_characters(cls, data: Any) -> Any:
        r"""Refuse halves of characters (`"\ud800"`), which JSON can write and no tokenizer takes.

        Nesting deeper than Python recurses is refused, too.
        """
        if isinstance(data, bytes | Body):  # no JSON, which is refused below, or checked before
            return data
        check_nesting(data)
        try:
            json.dumps(data, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start].encode("unicode_escape").decode()
            raise ValueError(f"{half} is half of a character: send whole ones") from None
        return data


# Left out of dumps, too: templates would write it.
Ignored = Field(None, exclude=True, description="Ignored: it changes nothing here.")


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: bool | None = None  # ignored: nothing here is padded
    continuous_usage_stats: bool | None = None  # ignored: the last event counts all tokens


class StructuredOutputs(Strict):
    """Fields of vLLM since 0.12; `guided_regex` and the others are those before it."""

    regex: str | None = None
    json_: dict[str, Any] | str | None = Field(None, alias="json")
    grammar: str | None = None


class TemplateOptions(Strict):
    """Values for the chat template."""

    enable_thinking: bool | None = None


class Sampled(Body):
    """Parameters that chat and text completions share; None: the server's default."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(None, le=2**31)
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: str | Many[str] | None = None
    ignore_eos: bool = Field(False, description="Go on past the end of the answer: to measure.")
    n: int | None = Field(1, description="Answers to the same prompt, with seeds in turn.")
    logit_bias: dict[str, Any] | None = None  # numbers
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    guided_regex: str | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    user: str | None = Ignored
    metadata: dict[str, Any] | None = Ignored
    store: bool | None = Ignored
    service_tier: str | None = Ignored
    safety_identifier: str | None = Ignored
    prompt_cache_key: str | None = Ignored
    prompt_cache_retention: str | None = Ignored
    prompt_cache_options: dict[str, Any] | None = Ignored
    verbosity: str | None = Ignored
    speculate: bool = Field(True, description="False: decode plainly, to compare.")
    show_accepted: bool = Field(False, description="Tell in each chunk what was guessed right.")

    @field_validator("logit_bias")
    @classmethod
    def _by_id(cls, bias: dict[str, Any] | None) -> dict[str, Any] | None:
        for key, value in (bias or {}).items():
            if not (key.isascii() and key.isdigit()) or len(key) > 9:
                raise ValueError(f"{key[:40]!r} is no token id")
            if type(value) not in (int, float) or not -100 <= value <= 100:
                raise ValueError(f"{str(value)[:40]} is out of range: use -100 .. 100")
        return bias


class TextPart(Strict):
    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = Ignored


class RefusalPart(Strict):
    """Part of an answer in which a model of OpenAI declines; templates get it as text."""

    type: Literal["refusal"]
    text: str = Field(alias="refusal")


def _kind_of_part(part: Any) -> str:
    """Return the class by which a part is judged: what is no refusal has to be text."""
    is_refusal = isinstance(part, dict) and part.get("type") == "refusal"
    return "RefusalPart" if is_refusal else "TextPart"


Part = Annotated[
    Annotated[TextPart, Tag("TextPart")] | Annotated[RefusalPart, Tag("RefusalPart")],
    Discriminator(_kind_of_part),
]


class FunctionCall(Strict):
    name: str
    arguments: str = "{}"
    parsed_arguments: Any = Ignored  # openai's `parse` adds it to answers, and `parsed`


class ToolCall(Strict):
    id: str | None = None
    index: int | None = Ignored  # of one that was put together from a stream
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Many[Part] | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: Many[ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = Ignored
    annotations: list[Any] | None = Ignored
    cache_control: dict[str, Any] | None = Ignored
    parsed: Any = Ignored


def _check_count(messages: Any) -> Any:
    """Refuse more messages, parts and calls than the event loop can check meanwhile."""
    count = len(messages) if isinstance(messages, list) else 0
    for message in messages if 0 < count <= MOST_PARTS else ():
        for part in ("content", "tool_calls"):
            several = message.get(part) if isinstance(message, dict) else None
            count += len(several) if isinstance(several, list) else 0
    if count > MOST_PARTS:
        raise ValueError(f"{count:,} with their parts and calls: use at most {MOST_PARTS:,}")
    return messages


Messages = Annotated[Many[ChatMessage], BeforeValidator(_check_count)]


class Function(Strict):
    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @field_validator("parameters")
    @classmethod
    def _finite(cls, schema: dict[str, Any] | None) -> dict[str, Any] | None:
        json.dumps(schema, allow_nan=False)  # grammars would take NaN for null
        return schema


class Tool(Strict):
    type: Literal["function"]
    function: Function
    cache_control: dict[str, Any] | None = Ignored


class ChosenName(Strict):
    name: str


class ChosenTool(Strict):
    type: Literal["function"]
    function: ChosenName


class JsonSchema(Strict):
    name: str = "answer"
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatRequest(Sampled):
    messages: Messages = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    modalities: Many[Literal["text"]] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    response_format: ResponseFormat | None = None
    tools: Many[Tool] | None = Field(None, max_length=MOST_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: TemplateOptions | None = None
    prediction: dict[str, Any] | None = Ignored
    reasoning_effort: str | None = Field(
        None, description="none and minimal: no thought, if the model has a switch; else a thought."
    )


class CompletionRequest(Sampled):
    prompt: str | Many[int] | Many[str] | Many[Many[int]]
    echo: Literal[False] | None = None
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    best_of: int | None = 1
    suffix: None = None

    @field_validator("best_of")
    @classmethod
    def _best(cls, value: int | None) -> int | None:
        if value not in (1, None):
            raise ValueError("only 1 is supported: no answers are chosen among, see n")
        return value


class TokenizeRequest(Body):
    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = Field(None, min_length=1)
    add_special_tokens: bool = True
    add_generation_prompt: bool = True


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: Many[int]
