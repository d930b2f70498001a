"""Planning: make a request one that the engine can answer, or say why it cannot be honoured."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

from fasteagle.answering.answer_logits import AnswerRequest
from fasteagle.answering.stream import without_open_thought
from fasteagle.errors import FasteagleError, shown
from fasteagle.llm import LLM
from fasteagle.options import AnswerOptions, Defaults, GrammarSpec, SamplingParams, fresh_seed
from fasteagle.server.messages import BadParameterError, check_rendered, for_template
from fasteagle.server.protocol import (
    ChatMessage,
    ChatRequest,
    ChosenTool,
    CompletionRequest,
    Sampled,
    StructuredOutputs,
    TokenizeRequest,
)
from fasteagle.server.tools import ToolFormat, answer_grammar, takes_several_calls, tool_format

TOO_LONG = "context_length_exceeded"  # code by which agents know that they must shorten
MOST_STOPS = 16
MOST_PROMPTS = 64
MOST_STOP_CHARACTERS = 1000  # they are looked for at every token
MOST_SEEDS = 2**63
OFF, DRAWN = -1, -1  # of top_k and of seed, as vLLM and llama.cpp read them
MOST_CHARACTERS_A_TOKEN = 16  # on average; English has 4 to 5, code up to 8


@contextlib.contextmanager
def of_parameter(param: str | None, code: str | None = None) -> Iterator[None]:
    """Name the parameter in errors that are raised inside; None: it is not known."""
    try:
        yield
    except FasteagleError as error:
        if param is None:
            raise
        raise BadParameterError(param, str(error), code) from error


@dataclasses.dataclass(frozen=True)
class Plan:
    """Request that can run: it wants `n` answers to a prompt, or to each of several ones.

    `text` is the rendered conversation. Unless that begins a thought, the answer `may_think` first.
    Where there is a `form`, which the field `form_field` asks for if it is one alone, the answers
    have it only after `Planner.compiled`.
    """

    answers: list[AnswerRequest]
    n: int = 1
    form: GrammarSpec | None = None
    form_field: str | None = None
    text: str = ""
    may_think: bool = False
    tools: ToolFormat | None = None
    tool_names: frozenset[str] = frozenset()
    most_calls: int | None = None


class Planner:
    """Maker of plans for one model, whose methods raise `FasteagleError`, for any thread."""

    def __init__(self, llm: LLM, defaults: Defaults) -> None:
        self._llm, self._defaults = llm, defaults
        # More cannot fit, or is so unlike text that it is not worth the seconds of encoding it.
        self._most_characters = llm.engine.max_seq_len * MOST_CHARACTERS_A_TOKEN

    def _check_length(self, text: str, param: str = "prompt") -> None:
        """Refuse a text that cannot fit, before it is encoded: that takes a second for some MiB."""
        if len(text) > self._most_characters:
            raise BadParameterError(
                param,
                f"the prompt is too long: {len(text):,} characters, max-seq-len "
                f"{self._llm.engine.max_seq_len:,} leaves room for at most "
                f"{self._most_characters:,}: shorten it or raise --max-seq-len",
                TOO_LONG,
            )

    def chat(self, body: ChatRequest) -> Plan:
        """Return the plan of a chat request."""
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools or []]
        tools_form = None
        if tools and body.tool_choice != "none":
            tools_form = tool_format(self._llm.tokenizer.template)
        elif body.tool_choice not in (None, "none", "auto"):
            raise BadParameterError("tool_choice", "there are no tools")
        if body.max_completion_tokens is not None and body.max_tokens is not None:
            raise BadParameterError("max_tokens", "give it or max_completion_tokens, not both")
        given = body.max_completion_tokens
        limit = body.max_tokens if given is None else given
        if body.top_logprobs and not body.logprobs:
            raise BadParameterError("top_logprobs", "needs logprobs true")
        text = self.render(body.messages, tools if tools_form else [], self._think(body))
        self._check_length(text, "messages")
        n_top = (body.top_logprobs or 0) if body.logprobs else None
        # Where the template takes one call only, the client could not send more back.
        is_single = tools_form is not None and not takes_several_calls(self._llm.tokenizer)
        most_calls = 1 if body.parallel_tool_calls is False or is_single else None
        form, form_field, may_think = self._chat_form(body, tools_form, tools, most_calls)
        if not may_think:
            text = without_open_thought(text)
        answers = self._answers(body, [self._llm.texts.encode(text)], limit, n_top, form)
        names = frozenset(tool.function.name for tool in body.tools or [])
        return Plan(
            answers,
            len(answers),
            form,
            form_field,
            text,
            may_think and self._llm.tokenizer.knows_thoughts,
            tools_form,
            names,
            most_calls,
        )

    def completion(self, body: CompletionRequest) -> Plan:
        """Return the plan of a text completion."""
        prompts = self.prompts(body.prompt)
        form, form_field = _form(body, self._defaults.form)
        answers = self._answers(body, prompts, body.max_tokens, body.logprobs, form)
        return Plan(answers, len(answers) // len(prompts), form, form_field)

    def compiled(self, plan: Plan) -> Plan:
        """Return the plan with its form compiled; takes seconds at most, in any thread."""
        assert plan.form is not None, "nothing else is compiled"
        with of_parameter(plan.form_field):
            answers = [
                dataclasses.replace(answer, mask=self._llm.grammar(plan.form))
                for answer in plan.answers
            ]
        return dataclasses.replace(plan, answers=answers)

    def tokenize(self, body: TokenizeRequest) -> list[int]:
        """Return token ids of a text, or of a conversation as the template writes it."""
        if (body.prompt is None) == (body.messages is None):
            raise BadParameterError("prompt", "give either prompt or messages")
        tokenizer = self._llm.tokenizer
        if body.messages is not None:
            end = body.add_generation_prompt
            text = self.render(body.messages, (), self._defaults.think, end)
            self._check_length(text, "messages")
            return tokenizer.encode(text)
        encode = tokenizer.encode_document if body.add_special_tokens else tokenizer.encode
        self._check_length(body.prompt or "")
        return encode(body.prompt or "")

    def detokenize(self, tokens: list[int]) -> str:
        """Return the text of token ids, special tokens written out."""
        vocab_size = self._llm.engine.model.config.vocab_size
        most = self._llm.engine.max_seq_len
        if len(tokens) > most:
            raise BadParameterError("tokens", f"{len(tokens):,} are more than max-seq-len {most:,}")
        for token in tokens:
            if not 0 <= token < vocab_size:
                reason = f"{shown(token)} is out of range: use 0 .. {vocab_size - 1:,}"
                raise BadParameterError("tokens", reason)
        return self._llm.tokenizer.raw(tokens)

    def prompts(self, prompt: str | list[int] | list[str] | list[list[int]]) -> list[list[int]]:
        """Return the token ids of each prompt: of a text, ids, or a list of one kind of them."""
        is_one = isinstance(prompt, str) or not prompt or isinstance(prompt[0], int)
        several: Sequence[Any] = [prompt] if is_one else prompt
        if len(several) > MOST_PROMPTS:
            reason = f"{len(several):,} prompts: use at most {MOST_PROMPTS} in a request"
            raise BadParameterError("prompt", reason)
        for i, text in enumerate(several):
            if isinstance(text, str):
                self._check_length(text, _field("prompt", i, several))
        encode = self._llm.tokenizer.encode_document
        return [encode(item) if isinstance(item, str) else list(item) for item in several]

    def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[dict[str, Any]] = (),
        think: bool | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the conversation as the model's template writes it."""
        most = self._llm.engine.max_seq_len  # none takes less than a token
        if len(messages) > most:
            reason = f"{len(messages):,} are more than {most:,} tokens: shorten them"
            raise BadParameterError("messages", reason, TOO_LONG)
        dialogue = for_template(messages)
        template = self._llm.tokenizer.template_for(dialogue, tools)
        for i, message in enumerate(messages):
            check_rendered(i, message, template)
        if self._defaults.system is not None and dialogue[0]["role"] != "system":
            dialogue.insert(0, {"role": "system", "content": self._defaults.system})
        if think is not None:
            with of_parameter("chat_template_kwargs"):
                self._llm.tokenizer.check_think(think)
        more = {"tools": tools} if tools else {}
        return self._llm.tokenizer.render(dialogue, add_generation_prompt, think, **more)

    def _think(self, body: ChatRequest) -> bool | None:
        switch = body.chat_template_kwargs
        if switch is not None and switch.enable_thinking is not None:
            return switch.enable_thinking
        if body.reasoning_effort is not None and self._llm.tokenizer.has_thinking_switch:
            return body.reasoning_effort not in ("none", "minimal")
        return self._defaults.think

    def _answers(
        self,
        body: Sampled,
        prompts: Sequence[list[int]],
        max_tokens: int | None,
        n_top: int | None,
        form: GrammarSpec | None,
    ) -> list[AnswerRequest]:
        """Return the `n` answers to each prompt, which differ in their seeds."""
        n, most = 1 if body.n is None else body.n, self._llm.answers.size
        if not 1 <= n <= most:
            raise BadParameterError(
                "n", f"{shown(n)} is out of range: use 1 .. {most}, see --parallel"
            )
        engine = self._llm.engine
        field = "messages" if isinstance(body, ChatRequest) else "prompt"
        for i, prompt in enumerate(prompts):
            code = TOO_LONG if len(prompt) >= engine.max_seq_len else None
            with of_parameter(_field(field, i, prompts), code):
                engine.check_prompt(prompt)
        if body.stream_options is not None and not body.stream:
            raise BadParameterError("stream_options", "needs stream true")
        if body.show_accepted and not body.stream:
            raise BadParameterError("show_accepted", "needs stream true")
        stop = [body.stop] if isinstance(body.stop, str) else body.stop
        if stop is not None and len(stop) > MOST_STOPS:
            raise BadParameterError("stop", f"{len(stop)} strings: use at most {MOST_STOPS}")
        if stop is not None and "" in stop:
            raise BadParameterError("stop", "a stop string is empty")
        longest = max(map(len, stop or ()), default=0)
        if longest > MOST_STOP_CHARACTERS:
            limit = f"use at most {MOST_STOP_CHARACTERS:,}"
            raise BadParameterError("stop", f"{longest:,} characters in a string: {limit}")
        default = self._defaults.answer
        answer = AnswerOptions(
            default.max_new_tokens if max_tokens is None else max_tokens,
            default.stop if stop is None else tuple(stop),
        )
        bias = {int(key): value for key, value in (body.logit_bias or {}).items()}
        first = self._llm.made_request(
            prompts[0],
            self._params(body),
            answer,
            logit_bias=bias,
            top_logprobs=n_top,
            speculate=body.speculate,
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
        )
        if body.ignore_eos and form is not None:
            raise BadParameterError("ignore_eos", "an answer of a form ends with it")
        if body.ignore_eos:
            first = dataclasses.replace(first, eos_ids=frozenset())
        seeds = [(first.params.seed + i) % MOST_SEEDS for i in range(n)]
        params = [dataclasses.replace(first.params, seed=seed) for seed in seeds]
        return [
            dataclasses.replace(first, prompt=prompt, params=each)
            for prompt in prompts
            for each in params
        ]

    def _params(self, body: Sampled) -> SamplingParams:
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
        changes = {name: getattr(body, name) for name in names if getattr(body, name) is not None}
        if body.top_p == 0:
            changes["top_p"] = 1.0
        if body.top_k == OFF:
            changes["top_k"] = 0
        if body.seed is not None and -MOST_SEEDS <= body.seed < 0:
            changes["seed"] = fresh_seed() if body.seed == DRAWN else body.seed % MOST_SEEDS
        params = dataclasses.replace(self._defaults.params, **changes)
        if body.top_p == 0:  # a nucleus of one token; a wrong temperature is refused before
            params = dataclasses.replace(params, temperature=0.0)
        if "seed" in changes or self._defaults.seed_is_fixed or params.greedy:
            return params
        return dataclasses.replace(params, seed=fresh_seed())

    def _chat_form(
        self,
        body: ChatRequest,
        form: ToolFormat | None,
        tools: list[dict[str, Any]],
        most: int | None,
    ) -> tuple[GrammarSpec | None, str | None, bool]:
        """Return the form of an answer, its field, and whether the answer may begin with a thought.

        That of tool calls has a field only where there is no other form beside them.
        """
        wanted_form = body.response_format
        default = self._defaults.form if wanted_form is None else None
        if wanted_form is not None and wanted_form.type == "json_object":
            default = GrammarSpec("json_object")
        elif wanted_form is not None and wanted_form.type == "json_schema":
            if wanted_form.json_schema is None:
                raise BadParameterError("response_format", "json_schema is missing")
            with of_parameter("response_format"):
                default = GrammarSpec("json_schema", json.dumps(wanted_form.json_schema.schema_))
        spec, field = _form(body, default)
        if form is None:
            return spec, field, spec is None
        of_calls = None if wanted_form is not None else field or "tools"
        is_json = spec is not None and spec.kind in ("json_schema", "json_object")
        if body.tool_choice in (None, "auto"):
            if spec is not None and is_json:
                schema = json.loads(spec.text or '{"type": "object"}')
                return answer_grammar(form, tools, most_calls=most, schema=schema), of_calls, False
            if spec is None and any(tool["function"].get("strict") for tool in tools):
                return answer_grammar(form, tools, most_calls=most), of_calls, True
            return spec, field, spec is None
        if spec is not None and not is_json:  # JSON is the form of answers that are no call
            raise BadParameterError("tool_choice", "contradicts the form asked for")
        if isinstance(body.tool_choice, ChosenTool):
            name = body.tool_choice.function.name
            tools = [tool for tool in tools if tool["function"]["name"] == name]
            if not tools:
                raise BadParameterError(
                    "tool_choice", f"there is no tool {shown(name)} among tools"
                )
            most = 1
        return answer_grammar(form, tools, must_call=True, most_calls=most), of_calls, False


def _field(name: str, i: int, several: Sequence[Any]) -> str:
    """Return the name of entry `i` of `several`, or of the field where there is one entry."""
    return name if len(several) == 1 else f"{name}.{i}"


def _form(body: Sampled, default: GrammarSpec | None) -> tuple[GrammarSpec | None, str | None]:
    """Return the form that a field of vLLM asks for, else `default`, and the field's name."""
    newer = body.structured_outputs or StructuredOutputs(json=None)
    fields: dict[str, tuple[str, Any]] = {
        "guided_regex": ("regex", body.guided_regex),
        "guided_json": ("json_schema", body.guided_json),
        "guided_grammar": ("grammar", body.guided_grammar),
        "structured_outputs.regex": ("regex", newer.regex),
        "structured_outputs.json": ("json_schema", newer.json_),
        "structured_outputs.grammar": ("grammar", newer.grammar),
    }
    guided = {name: form for name, form in fields.items() if form[1] is not None}
    response_format = body.response_format if isinstance(body, ChatRequest) else None
    if not guided:
        return default, "response_format" if default and response_format else None
    name, (kind, value) = next(iter(guided.items()))
    if len(guided) > 1 or response_format:
        raise BadParameterError(name, "contradicts another form asked for")
    with of_parameter(name):
        text = json.dumps(value) if isinstance(value, dict) else value
        return GrammarSpec(kind, text), name
