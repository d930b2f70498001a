"""Run `fasteagle chat`: load a model, then answer one prompt or hold a conversation."""

from __future__ import annotations

import dataclasses
import os
import sys

import click

from fasteagle.answering.grammar import check_grammar
from fasteagle.cli.command import leave, silent, uncollected
from fasteagle.cli.markdown import harmless
from fasteagle.cli.repl import Repl, tinted, utf8_streams
from fasteagle.cli.session import ChatSession, format_stats
from fasteagle.errors import FasteagleError, note
from fasteagle.llm import open_llm
from fasteagle.options import (
    DEFAULT_MODEL,
    AnswerOptions,
    ChatOptions,
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
    form: GrammarSpec | None,
    options: ChatOptions,
) -> None:
    """Answer a prompt (or piped standard input) once, or read questions until the user leaves."""
    utf8_streams()
    question = _question(options.prompt)
    system = None if options.system is None else _argument(options.system, "--system")
    answer = dataclasses.replace(answer, stop=tuple(_argument(s, "--stop") for s in answer.stop))
    if form is not None:
        check_grammar(form)
    say = silent if options.quiet else note
    with uncollected():
        llm = open_llm(model, runtime_options, draft, say, think=options.think)
    if model == DEFAULT_MODEL:
        say(f"{model} is a small model for trying out, and often wrong: see `fasteagle models`")
    if options.announce_seed:
        say(f"seed {params.seed}")
    notify = note if question is None else say
    session = ChatSession(llm, params, answer, system, notify, options.think, form)
    _dress(session, options, is_conversation=question is None)
    # One answer is over before compilation pays; a conversation compiles while the person types.
    if options.compile_blocks or (options.compile_blocks is None and question is None):
        if options.compile_blocks:
            say("compiling (kept for the next start) ...")
        llm.prepare(
            params, quiet=options.quiet, tune=question is None, wait=bool(options.compile_blocks)
        )
    if question is None:
        say(f"context {llm.engine.max_seq_len:,} tokens; /help lists commands")
        Repl(session, options.quiet, options.plain).run()
    else:
        for piece in session.ask(question):
            print(piece, end="", flush=True)
        print()
        if llm.engine.runner.error:
            note(f"warning: running without CUDA graphs: {llm.engine.runner.error}")
        say(format_stats(session.stats))
    if llm.is_preparing:
        leave()


def _dress(session: ChatSession, options: ChatOptions, is_conversation: bool) -> None:
    """Set the functions that the session applies to text before it is shown."""
    on_terminal = sys.stdout.isatty()
    if on_terminal:
        session.clean = harmless
    if options.show_accepted:
        session.mark_accepted = tinted
    if is_conversation and on_terminal:
        session.mark_thought = lambda text: click.style(text, dim=True)


def _question(prompt: str | None) -> str | None:
    """Return the prompt from the option or from standard input, None for a conversation."""
    if sys.stdin is None and prompt in (None, "-"):
        raise FasteagleError("standard input is closed: give the prompt after -p")
    if prompt is None and sys.stdin.isatty():
        return None
    if prompt is None or prompt == "-":
        text = _decode(sys.stdin.buffer.read(), "standard input")
    else:
        text = _argument(prompt, "--prompt")
    if not text.strip():
        raise FasteagleError("the prompt is empty: give text after -p, or pipe some in")
    return text


def _argument(text: str, name: str) -> str:
    """Return an argument decoded as UTF-8, also where the locale made its bytes surrogates."""
    return _decode(os.fsencode(text), name)


def _decode(raw: bytes, what: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FasteagleError(
            f"{what} is not UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start}; "
            "convert it first (iconv -t utf-8)"
        ) from None
