"""Tokenizer and chat template of a model, as a thin layer over transformers' tokenizers."""

from __future__ import annotations

import contextlib
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from fasteagle.config_fields import Fields
from fasteagle.errors import FasteagleError, first_line
from fasteagle.loading.gguf_tokenizer import converted_gguf, in_one_line, transformers_library
from fasteagle.loading.template_check import in_time, trial_of
from fasteagle.loading.tensors import read_json

Message = Mapping[str, Any]  # {"role": "system" | "user" | "assistant", "content": text}

# Stands after the first character of what looks like a special token but is only text: Unicode
# reserves it for use inside a program.
LITERAL = "\ufdd0"
REFUSED = "the model's tokenizer refused the text"


class ChatTokenizer:
    """Tokenizer that encodes, decodes, and renders conversations with the model's template."""

    def __init__(
        self,
        backend: Any,
        eos_ids: frozenset[int],
        template: str | None = None,
        path: Path | None = None,
    ) -> None:
        """Wrap a tokenizer of transformers; errors in its template name `path`, where it lies."""
        self._backend, self._path = backend, path
        self._pieces: dict[int, str] = {}  # of the tokens that `piece` was asked for
        own = backend.chat_template
        self._with_tools: str | None = None  # template of its own, where files name several
        if isinstance(own, dict):
            self._with_tools = None if template else own.get("tool_use")
            own = own.get("default") or next(iter(own.values()), None)
        for text in (own, self._with_tools):
            if text is not None and not isinstance(text, str):
                raise FasteagleError(f"chat_template is {text!r}, not a text: fetch it again")
        self._template = template or own
        self.eos_ids = eos_ids

    def save(self, folder: Path) -> None:
        """Write everything `load_tokenizer` needs into a folder."""
        named = {"default": self._template, "tool_use": self._with_tools}
        self._backend.chat_template = named if self._with_tools else self._template
        self._backend.save_pretrained(folder)
        ends = {"eos_token_id": sorted(self.eos_ids)}
        (folder / "generation_config.json").write_text(json.dumps(ends) + "\n")

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`; special tokens in it are recognized, none are added.

        Those that `render` has marked as text are not recognized.
        """
        begin, *rest = text.split(LITERAL)
        ids = self._encoded(begin)
        return [*ids, *chain.from_iterable(self._continued(rest))] if rest else ids

    def encode_rest(self, text: str, start: int) -> list[int] | None:
        """Return the token ids of `text` from `start` on, or None if that is inside a mark."""
        marks = self._marks[1]
        if any(mark.start() < start < mark.end() for mark in marks.finditer(text)):
            return None
        return list(chain.from_iterable(self._continued(text[start:].split(LITERAL))))

    def _continued(self, texts: list[str]) -> Iterator[list[int]]:
        """Yield token ids of texts inside words, which SentencePiece would begin with a blank."""
        _, line = self._line
        with in_one_line(REFUSED):
            lines = self._backend([f"\n{text}" for text in texts], add_special_tokens=False)
        for text, ids in zip(texts, lines["input_ids"], strict=True):
            if ids[: len(line)] == line:
                yield ids[len(line) :]
            else:
                yield self._encoded(text)

    def encode_document(self, text: str) -> list[int]:
        """Return token ids of a text that is no conversation, with BOS if the tokenizer adds it."""
        return self._encoded(text, add_special_tokens=True)

    def _encoded(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return token ids of a text; raise `FasteagleError` where the tokenizer's rules give up.

        Its regular expressions are of the model's files, and some never match some texts in time.
        """
        with in_one_line(REFUSED):
            return self._backend.encode(text, add_special_tokens=add_special_tokens)

    def guidance(self, vocab_size: int) -> Any:
        """Return the vocabulary as llguidance reads it, for grammars. Raises `FasteagleError`."""
        import llguidance.hf  # of the extra [serve]

        try:
            eos_ids = sorted(self.eos_ids)
            return llguidance.hf.from_tokenizer(self._backend, vocab_size, eos_ids)
        except ValueError as error:
            raise FasteagleError(f"no structured output with this tokenizer: {error}") from error

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids` without special tokens."""
        return self._decoder.decode(ids, skip_special_tokens=True)

    def raw(self, ids: Sequence[int]) -> str:
        """Return the text of `ids` with special tokens written out."""
        return self._decoder.decode(ids, skip_special_tokens=False)

    @cached_property
    def _decoder(self) -> Any:
        """Decoder of token ids: what transformers calls, if it only passes the text on.

        A text is decoded twice for each pass, and transformers' own checks take longer than that.
        """
        backend = self._backend
        fast = getattr(backend, "backend_tokenizer", None)
        cleans_up = getattr(backend, "clean_up_tokenization_spaces", True)
        return backend if fast is None or cleans_up else fast

    def piece(self, token: int) -> str:
        """Return the text of a token within a text: at its beginning some drop a blank."""
        if token not in self._pieces:
            line, ids = self._line
            self._pieces[token] = self.raw([*ids, token])[len(line) :]
        return self._pieces[token]

    @cached_property
    def _line(self) -> tuple[str, list[int]]:
        """Text and ids of a line's end."""
        ids = self._backend.encode("\n", add_special_tokens=False)
        return self.raw(ids), ids

    def token_bytes(self, token: int) -> bytes | None:
        """Return the bytes of a token, which may be a part of a character; None if not known."""
        text = self.piece(token)
        if "\ufffd" not in text:
            return text.encode()
        name = self._backend.convert_ids_to_tokens(token)
        if name is None:
            return None
        if re.fullmatch("<0x[0-9A-F]{2}>", name):
            return bytes.fromhex(name[3:5])
        known = _bytes_of_letters()
        return bytes(known[c] for c in name) if all(c in known for c in name) else None

    def vocabulary(self) -> dict[int, str]:
        """Return the text of each token id, special tokens included."""
        return {token: text for text, token in self._backend.get_vocab().items()}

    def try_templates(self) -> None:
        """Begin the trials of the chat templates, to be over when the model is loaded."""
        for text in filter(None, (self._template, self._with_tools)):
            trial_of(text)

    @property
    def template(self) -> str:
        """Source of the chat template; empty where there is none."""
        return self._with_tools or self._template or ""

    def template_for(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> str:
        """Return the chat template that `render` takes: that for tools for earlier calls, too."""
        calls = any(m.get("tool_calls") or m["role"] == "tool" for m in messages)
        return (self._with_tools if tools or calls else None) or self._template or ""

    @property
    def has_thinking_switch(self) -> bool:
        """Return whether the chat template has a switch for thinking before an answer."""
        return "enable_thinking" in (self._template or "")

    @property
    def knows_thoughts(self) -> bool:
        """Return whether template or vocabulary know thoughts; else their mark is only text."""
        templates = f"{self._template}{self._with_tools}"
        known = "enable_thinking" in templates or "</think>" in templates
        return known or "<think>" in self._backend.get_added_vocab()

    def check_think(self, think: bool) -> None:
        """Raise `FasteagleError` where the chat template has no thinking switch."""
        if not self.has_thinking_switch:
            raise FasteagleError(
                f"think {'on' if think else 'off'}: this model's chat template has no thinking "
                "switch (enable_thinking): leave it out, or choose a model that has one (qwen3-4b)"
            )

    @cached_property
    def _bos(self) -> str:
        """BOS where the tokenizer adds it to a text; else an empty text."""
        ids = self._backend.encode("", add_special_tokens=True)
        return self._backend.bos_token if ids[:1] == [self._backend.bos_token_id] else ""

    def special_in(self, form: str) -> str | None:
        """Return a special token that a form demands as text, or None.

        In JSON and in regular expressions its characters may be escaped.
        """
        special, _ = self._marks
        texts = [form.replace("\\", "")]
        with contextlib.suppress(ValueError, RecursionError):
            texts.append(json.dumps(json.loads(form), ensure_ascii=False))
        matches = (special.search(text) for text in texts)
        return next((match.group() for match in matches if match), None)

    @cached_property
    def _marks(self) -> tuple[re.Pattern[str], re.Pattern[str]]:
        """Patterns of special tokens, and of these plus all that the template writes, `<think>`."""
        tokens = getattr(self._backend, "added_tokens_decoder", {}).values()
        special = {token.content for token in tokens if token.special}
        written = {token.content for token in tokens if token.content.strip()}
        written = {text for text in written if text in self.template}
        return _any_of(special), _any_of(special | written)

    def _only_text(self, message: Message) -> dict[str, Any]:
        """Mark text that looks like a special token in a message, except thought marks of answers.

        Other special tokens in an answer are marked.
        """
        special, written = self._marks
        pattern = special if message["role"] == "assistant" else written
        return {key: _marked(value, pattern) for key, value in message.items()}

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        think: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Return the conversation in the model's template, up to where its answer begins.

        `think` None leaves the choice to the template. A model without a template gets the
        messages' text alone, after BOS where the tokenizer adds it. Special tokens written inside a
        message or a tool are text, so that nobody can end a turn from within it. Raises
        `FasteagleError` where the template refuses the messages, for example an unsupported system
        prompt, or does too much.
        """
        messages = [self._only_text(m) for m in messages]
        if not self._template:
            return self._bos + "\n".join(m["content"] for m in messages)
        template = self.template_for(messages, tools)
        trial_of(template).result()
        more: dict[str, Any] = {"chat_template": template}
        if think is not None:
            more["enable_thinking"] = think
        if tools or template != self._template:  # that for tools may go through them unasked
            more["tools"] = [_marked(tool, self._marks[1]) for tool in tools or ()]
        try:
            with in_time():
                text = self._backend.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=add_generation_prompt, **more
                )
            text.encode()  # a template may write half a character
        except Exception as error:  # jinja2's errors, and whatever a template raises on purpose
            if type(error).__name__ == "TemplateSyntaxError":
                raise FasteagleError(
                    f"{self._path}: no usable chat template (line {getattr(error, 'lineno', 0)}: "
                    f"{first_line(error)}): use other files of it"
                ) from error
            raise FasteagleError(
                f"the model's chat template refused: {first_line(error)}"
            ) from error
        return text


def _marked(value: Any, pattern: re.Pattern[str]) -> Any:
    """Mark what `pattern` matches in all strings of a value of JSON, names of fields included."""
    if isinstance(value, str):
        value = value.replace(LITERAL, "\ufffd")
        return pattern.sub(lambda match: match[0][0] + LITERAL + match[0][1:], value)
    if isinstance(value, Mapping):
        return {_marked(key, pattern): _marked(inner, pattern) for key, inner in value.items()}
    return [_marked(inner, pattern) for inner in value] if isinstance(value, list) else value


class DummyBackend:
    """Stand-in for transformers' tokenizer, for random weights: one id per four bytes of text."""

    chat_template = bos_token_id = None

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def __call__(self, texts: Sequence[str], add_special_tokens: bool) -> dict[str, Any]:
        return {"input_ids": [self.encode(text, add_special_tokens) for text in texts]}

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        data = text.encode()
        pieces = (data[i : i + 4] for i in range(0, len(data), 4))
        return [zlib.crc32(piece) % self._vocab_size for piece in pieces]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return "tok " * len(ids)

    def get_vocab(self) -> dict[str, int]:
        return {"tok ": 0}  # the text of all ids

    def get_added_vocab(self) -> dict[str, int]:
        return {}


def dummy_tokenizer(vocab_size: int) -> ChatTokenizer:
    """Return a tokenizer for random weights, which has no end-of-text token."""
    return ChatTokenizer(DummyBackend(vocab_size), frozenset())


def _any_of(texts: set[str]) -> re.Pattern[str]:
    """Return a pattern that finds the longest of `texts` of two characters and more."""
    longest_first = sorted((text for text in texts if len(text) > 1), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


@cache
def _bytes_of_letters() -> dict[str, int]:
    """Return the byte of every character in which byte-level BPE writes bytes."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode  # takes a second

    return {letter: byte for byte, letter in bytes_to_unicode().items()}


def load_tokenizer(path: Path, template: str | None = None) -> ChatTokenizer:
    """Load the tokenizer of a Hugging Face folder or a GGUF file. Raises `FasteagleError`."""
    from huggingface_hub.errors import StrictDataclassError  # as slow as transformers

    is_gguf = path.is_file()
    folder = converted_gguf(path) if is_gguf else path
    with in_one_line(f"{path}: no usable tokenizer"):
        transformers = transformers_library()
        # What was converted is always of one class; to look for it takes over a second.
        kind = transformers.PreTrainedTokenizerFast if is_gguf else transformers.AutoTokenizer
        try:
            backend = kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            if not backend.encode("a"):  # some fields of wrong types are found only here
                raise ValueError("the vocabulary is empty")
        except StrictDataclassError as error:  # of a field that only transformers reads
            config = folder / "config.json"
            raise FasteagleError(f"{config}: {error.__cause__ or error}") from error
        except Exception:  # transformers' texts name no file
            for file in sorted(folder.glob("*token*.json")):
                read_json(file)
            raise
    return ChatTokenizer(backend, _eos_ids(folder, backend), template, path)


def _eos_ids(folder: Path, backend: Any) -> frozenset[int]:
    """Return every id that ends an answer: the tokenizer's, the model's, and chat end marks.

    The generation config takes precedence; the model config is read only without one.
    """
    ids = {backend.eos_token_id} if backend.eos_token_id is not None else set()
    for file in (folder / "generation_config.json", folder / "config.json"):
        if not file.exists():
            continue
        fields = Fields(read_json(file), str(file))
        if "eos_token_id" in fields:
            ids.update(fields.token_ids("eos_token_id"))
            break
    vocabulary = backend.get_added_vocab()
    ids.update(vocabulary[t] for t in ("<|im_end|>", "<|eot_id|>") if t in vocabulary)
    return frozenset(ids)
