"""Python API: a loaded model that answers. Chat and the server use it, too."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from os import PathLike
from typing import Any, Literal, Unpack, overload

from fasteagle.answering.answer import Answer, Chunk
from fasteagle.answering.answer_logits import AnswerRequest
from fasteagle.answering.background import Preparation
from fasteagle.answering.grammar import GrammarCompiler, GrammarMask
from fasteagle.answering.keywords import (
    AnswerKeywords,
    check_extras,
    check_loading,
    check_text,
    checked_ids,
    checked_name,
    listed,
    read_keywords,
)
from fasteagle.answering.known_texts import KnownTexts, Prompt
from fasteagle.answering.prefix_cache import PrefixCache
from fasteagle.answering.several import Answers
from fasteagle.answering.stream import without_open_thought
from fasteagle.compile.blocks import compile_now
from fasteagle.compile.costs import begin_policy, tune_now
from fasteagle.decoding.stats import Stats
from fasteagle.device import give_back
from fasteagle.drafting.base import Drafter
from fasteagle.errors import FasteagleError, shown
from fasteagle.generate import Engine
from fasteagle.loading.make_drafter import plan_drafting
from fasteagle.loading.open import open_model
from fasteagle.loading.tokenizer import ChatTokenizer, Message
from fasteagle.options import (
    DEFAULT_MODEL,
    MOST_AT_ONCE,
    AnswerOptions,
    Defaults,
    DraftOptions,
    GrammarSpec,
    RuntimeOptions,
    SamplingParams,
    ServeOptions,
)
from fasteagle.quant.scheme import check_precision

ALONE = ServeOptions(prefix_cache=0.0, parallel=MOST_AT_ONCE)  # without a server


class LLM:
    """Loaded model, which answers; the next call reuses the KV cache of an earlier one.

    `texts` are the last conversations as they were generated, `prefix_cache` keeps their keys and
    values, `preparation` compiles and measures in the background.

    Up to `options.parallel` `answers` can be under way, in streams that are read in any order and
    by any threads. One more raises `FasteagleError` at once. It does not wait, because an abandoned
    stream would make it wait for ever; the server has a queue for that.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        tokenizer: ChatTokenizer,
        options: ServeOptions = ALONE,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self.name, self.engine, self.tokenizer = name, engine, tokenizer
        self.preparation: Preparation | None = None
        place = engine.device if options.prefix_cache_on == "device" else "cpu"
        self.prefix_cache = PrefixCache(int(options.prefix_cache * 2**30), place)
        self.texts = KnownTexts(tokenizer)
        self._grammars = grammars or GrammarCompiler(tokenizer, engine.model.config.vocab_size)
        self.answers = Answers(
            engine, tokenizer, options.parallel, self.prefix_cache, self.texts, self._answering
        )
        self._closed = False

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is not None and not self._closed:
            self.answers.end_all()  # what was raised counts, not the streams that it left
        self.close()

    def close(self) -> None:
        """Free the memory and refuse later calls; raise while an answer is under way."""
        if self._closed:
            return
        self._check_idle()
        self._closed = True
        if self.preparation is not None:
            self.preparation.join()
        names = "engine tokenizer preparation _grammars prefix_cache texts answers"
        for name in names.split():
            delattr(self, name)
        give_back()

    def _answering(self, params: SamplingParams) -> AbstractContextManager[None]:
        """Hold off what measures the model while answers are under way."""
        self._check_open()  # a stream may begin late
        return self.preparation.answering(params) if self.preparation else nullcontext()

    def prepare(self, params: SamplingParams, *, quiet: bool, tune: bool = True) -> Preparation:
        """Compile and measure in the background."""
        self.preparation = Preparation(self.engine, quiet, tune, params)
        return self.preparation

    def use(self, drafter: Drafter | None) -> None:
        """Draft by `drafter` from now on, None: decode plainly; raise as `close` does."""
        self._check_open()
        self._check_idle()
        (self.preparation or self.engine).use(drafter)

    @property
    def is_preparing(self) -> bool:
        """Return whether a thread of this model still compiles or measures."""
        return self.preparation is not None and self.preparation.busy

    @overload
    def chat(
        self,
        messages: str | Sequence[Message],
        *,
        stream: Literal[False] = False,
        think: bool | None = None,
        **keywords: Unpack[AnswerKeywords],
    ) -> Answer: ...

    @overload
    def chat(
        self,
        messages: str | Sequence[Message],
        *,
        stream: Literal[True],
        think: bool | None = None,
        **keywords: Unpack[AnswerKeywords],
    ) -> Iterator[Chunk]: ...

    def chat(
        self,
        messages: str | Sequence[Message],
        *,
        stream: bool = False,
        think: bool | None = None,
        **keywords: Unpack[AnswerKeywords],
    ) -> Answer | Iterator[Chunk]:
        """Answer a conversation, `[{"role": "user", "content": "..."}, ...]`, or one question.

        With `stream`, yields chunks as they come. Raises `FasteagleError` for invalid arguments.
        """
        arguments = read_keywords("chat", keywords, stream=stream, think=think)
        prompt = self._prompt_of(messages, think, arguments["spec"])
        return self._run(prompt.ids, stream, arguments, prompt.text)

    def _prompt_of(
        self, messages: str | Sequence[Message], think: bool | None, form: GrammarSpec | None
    ) -> Prompt:
        """Return the prompt of a conversation or a question; raise `FasteagleError`."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if not isinstance(messages, Iterable):
            raise FasteagleError(f"messages {shown(messages)} is no text and no list of messages")
        messages = list(messages)
        if not messages:
            raise FasteagleError("messages is empty: give at least one question")
        for message in messages:
            if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
                raise FasteagleError(
                    f"messages: {shown(message)} is no dictionary of role and content"
                )
            check_text("role", message["role"])
            check_text("content", message["content"])
        return self.prompt(messages, think, form)

    def prompt(
        self,
        messages: Sequence[Message],
        think: bool | None = None,
        form: GrammarSpec | None = None,
    ) -> Prompt:
        """Return the prompt of a conversation; answers of this model keep their tokens.

        A `form` ends an open thought. Raises `FasteagleError` for `think` without a switch for it.
        """
        self._check_open()
        if think is not None:
            self.tokenizer.check_think(think)
        text = self.tokenizer.render(messages, think=think)
        if form is not None:
            text = without_open_thought(text)
        return Prompt(text, self.texts.encode(text))

    @overload
    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        stream: Literal[False] = False,
        **keywords: Unpack[AnswerKeywords],
    ) -> Answer: ...

    @overload
    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        stream: Literal[True],
        **keywords: Unpack[AnswerKeywords],
    ) -> Iterator[Chunk]: ...

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        stream: bool = False,
        **keywords: Unpack[AnswerKeywords],
    ) -> Answer | Iterator[Chunk]:
        """Continue a text, or token ids, without the chat template."""
        arguments = read_keywords("generate", keywords, stream=stream)
        return self._run(self._ids(prompt), stream, arguments)

    def _ids(self, prompt: str | Sequence[int]) -> list[int]:
        """Return the token ids of a prompt; raise `FasteagleError` if it is none."""
        self._check_open()
        if isinstance(prompt, str):
            check_text("prompt", prompt)
            return self.tokenizer.encode_document(prompt)
        return checked_ids(prompt)

    def chat_batch(
        self,
        conversations: Sequence[str | Sequence[Message]],
        *,
        size: int = 8,
        think: bool | None = None,
        **keywords: Unpack[AnswerKeywords],
    ) -> list[Answer]:
        """Answer several conversations, up to `size` of them at once; see `generate_batch`."""
        self._check_open()
        several = listed("conversations", conversations)
        arguments = read_keywords("chat_batch", keywords, think=think)
        prompts = [self._prompt_of(one, think, arguments["spec"]).ids for one in several]
        return self._run_batch(prompts, size, arguments)

    def generate_batch(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        size: int = 8,
        **keywords: Unpack[AnswerKeywords],
    ) -> list[Answer]:
        """Continue several texts, up to `size` of them at once, with one pass for all.

        With quantized weights on a CPU each answer is the one that `generate` returns for its
        prompt, elsewhere but for rounding.
        """
        self._check_open()
        ids = [self._ids(one) for one in listed("prompts", prompts)]
        return self._run_batch(ids, size, read_keywords("generate_batch", keywords))

    def _run_batch(
        self, prompts: Sequence[list[int]], size: int, arguments: dict[str, Any]
    ) -> list[Answer]:
        if size not in range(1, self.answers.size + 1):
            raise FasteagleError(
                f"size {shown(size)} is out of range: use 1 .. {self.answers.size}"
            )
        requests = [self.made_request(ids, **arguments) for ids in prompts]
        for request in requests:
            self.engine.check_prompt(request.prompt)
        return self.answers.all(requests, size)

    def _run(
        self, prompt: list[int], stream: bool, arguments: dict[str, Any], text: str | None = None
    ) -> Answer | Iterator[Chunk]:
        request = self.made_request(prompt, **arguments)
        stats = Stats()
        answering = self.answers.stream(request, text, stats)
        if stream:
            return answering
        return Answer.of(list(answering), stats, request.params.seed)

    def made_request(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        options: AnswerOptions,
        spec: GrammarSpec | None = None,
        **extras: Any,
    ) -> AnswerRequest:
        """Make a request of checked options and compile its grammar; raise `FasteagleError`.

        `extras` are the other fields of a request, which are checked here.
        """
        mask = None if spec is None else self.grammar(spec)
        request = AnswerRequest(prompt, params, options, self.tokenizer.eos_ids, mask, **extras)
        check_extras(request, self.engine.model.config.vocab_size)
        return request

    def grammar(self, spec: GrammarSpec) -> GrammarMask:
        """Return the compiled grammar of an answer; other threads may call this."""
        return self._grammars.start(spec)

    def _check_open(self) -> None:
        if self._closed:
            raise FasteagleError("this model was closed: load it again")

    def _check_idle(self) -> None:
        if self.answers.running:
            raise FasteagleError("an answer is under way: read its stream to the end or close it")


def load(
    model: str | PathLike[str] = DEFAULT_MODEL,
    *,
    precision: str = "auto",
    head: str | PathLike[str] | None = None,
    drafter: str = "auto",
    tree: str | PathLike[str] = "auto",
    device: str = "auto",
    max_seq_len: int | None = None,
    threads: int | None = None,
    compile: bool = False,
    prefix_cache_gb: float = 0.0,
    notify: Callable[[str], None] = lambda line: None,
) -> LLM:
    """Load a model by registry name, Hugging Face id, folder or .gguf file.

    The options are those of `fasteagle chat`; `tree` is auto or a JSON file. `compile` waits until
    the model is compiled and its passes are timed, which pays for more than a few answers.
    `prefix_cache_gb` keeps the last conversations' keys and values in main memory. `notify`
    receives remarks for the user. Raises `FasteagleError` with the value, the limit and the fix.
    """
    check_loading(precision, drafter, compile, notify)
    check_precision(precision)
    runtime = RuntimeOptions(device=device, max_seq_len=max_seq_len, threads=threads)
    tree_file = None if tree == "auto" else checked_name("tree", tree)
    head = None if head is None else checked_name("head", head)
    draft = DraftOptions(drafter=drafter, head=head, tree_file=tree_file)
    if head is not None and not draft.may_have_head:
        raise FasteagleError(f"head has no meaning with drafter {shown(drafter)}: drop one")
    name = checked_name("model", model)
    options = dataclasses.replace(ALONE, prefix_cache=prefix_cache_gb)
    llm = open_llm(name, runtime.at(precision), draft, notify, options=options)
    if compile and compile_now(llm.engine):
        tune_now(llm.engine, notify, compiled=True)
    return llm


def open_llm(
    model: str,
    runtime_options: RuntimeOptions,
    draft: DraftOptions,
    notify: Callable[[str], None],
    defaults: Defaults | None = None,
    options: ServeOptions = ALONE,
) -> LLM:
    """Load the model with its drafter; refuse what cannot run before weights are read.

    So are `defaults` for answers that it cannot give.
    """
    defaults = defaults or Defaults()
    opened = open_model(model, runtime_options, notify)
    opened.check(runtime_options)
    opened.tokenizer.try_templates()
    if defaults.think is not None:
        opened.tokenizer.check_think(defaults.think)
    if not opened.tokenizer.template:
        notify("no chat template in the model's files: messages are joined as they are")
    grammars = GrammarCompiler(opened.tokenizer, opened.checkpoint.config.vocab_size)
    if defaults.form is not None:
        grammars.start(defaults.form)  # refuses what has no text in this vocabulary
    drafting = plan_drafting(draft, opened, runtime_options, notify)
    runtime = opened.loaded(runtime_options, notify, drafting.shape)
    engine = runtime.engine
    engine.use(drafting.drafter(runtime.name, engine, runtime.checkpoint, notify))
    engine.compile_ahead()
    begin_policy(engine)
    if model == DEFAULT_MODEL:
        notify(f"{model} is a small model for trying out, and often wrong: see `fasteagle models`")
    return LLM(runtime.name, engine, runtime.tokenizer, options, grammars)
