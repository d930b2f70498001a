"""What `fasteagle chat` does: load, then answer one prompt or hold a conversation."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys

import click

from fasteagle.answering.background import Preparation
from fasteagle.cli.command import leave, silent, uncollected
from fasteagle.cli.markdown import harmless
from fasteagle.cli.repl import Repl, tinted, utf8_streams
from fasteagle.cli.session import ChatSession, format_stats
from fasteagle.errors import FasteagleError, note
from fasteagle.llm import open_llm
from fasteagle.options import (
    AnswerOptions,
    DraftOptions,
    GrammarSpec,
    RuntimeOptions,
    SamplingParams,
)


def run_chat(
    model: str,
    runtime_options: RuntimeOptions,
    draft: DraftOptions,
    params: SamplingParams,
    answer: AnswerOptions,
    *,
    announce_seed: bool,
    show_accepted: bool,
    form: GrammarSpec | None,
    think: bool | None,
    prompt: str | None,
    system: str | None,
    compile_blocks: bool | None,
    plain: bool,
    quiet: bool,
) -> None:
    """Answer `prompt` (or piped standard input) once, or read questions until the person leaves."""
    utf8_streams()
    one_shot = prompt is not None or not sys.stdin.isatty()
    text = _prompt_text(prompt) if one_shot else ""
    system = None if system is None else _argument(system, "--system")
    answer = dataclasses.replace(answer, stop=tuple(_argument(s, "--stop") for s in answer.stop))

    say = silent if quiet else note
    with uncollected():
        llm = open_llm(model, runtime_options, draft, say)
    engine = llm.engine
    if announce_seed:
        say(f"seed {params.seed}")
    notify = say if one_shot else note
    session = ChatSession(engine, llm.tokenizer, params, answer, system, notify, think)
    session.grammar = form
    if sys.stdout.isatty():
        session.clean = harmless
    if show_accepted:
        session.mark_accepted = tinted
    if not one_shot and sys.stdout.isatty():
        session.mark_thought = lambda text: click.style(text, dim=True)
    # One answer is over before compilation pays; a conversation compiles while the person types.
    wanted = not one_shot if compile_blocks is None else compile_blocks
    preparation = Preparation(engine, quiet, not one_shot, params) if wanted else None
    if preparation and compile_blocks:
        say("compiling (kept for the next start) ...")
        preparation.wait_for_compiler()
    if one_shot:
        _answer_once(session, text, preparation)
        if engine.runner.error:
            note(f"warning: running without CUDA graphs: {engine.runner.error}")
        say(format_stats(session.stats))
    else:
        say(f"context {engine.max_seq_len:,} tokens; /help lists commands")
        Repl(session, quiet, preparation, plain).run()
    if preparation and preparation.busy:
        leave()


def _answer_once(session: ChatSession, text: str, preparation: Preparation | None) -> None:
    with preparation.answering(session.params) if preparation else contextlib.nullcontext():
        for piece in session.ask(text):
            print(piece, end="", flush=True)
        print()


def _prompt_text(prompt: str | None) -> str:
    """The one question: from the option, or from standard input, which must be UTF-8."""
    if prompt is None or prompt == "-":
        text = _decode(sys.stdin.buffer.read(), "standard input")
    else:
        text = _argument(prompt, "--prompt")
    if not text.strip():
        raise FasteagleError("the prompt is empty: give text after -p, or pipe some in")
    return text


def _argument(text: str, name: str) -> str:
    """An argument as UTF-8, also where the locale made Python hide its bytes in surrogates."""
    return _decode(os.fsencode(text), name)


def _decode(raw: bytes, what: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FasteagleError(
            f"{what} is not UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start}; "
            "convert it first (iconv -t utf-8)"
        ) from None
