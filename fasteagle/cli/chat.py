"""Run `fasteagle chat`: load a model, then answer one prompt or hold a conversation."""

from __future__ import annotations

import sys

from fasteagle.cli.command import leave, silent, uncollected
from fasteagle.cli.markdown import AnswerScreen, Style
from fasteagle.cli.options import ChatOptions, utf8
from fasteagle.cli.repl import Repl
from fasteagle.cli.session import ChatSession, format_stats
from fasteagle.errors import FasteagleError, note
from fasteagle.llm import open_llm
from fasteagle.options import Defaults, DraftOptions, RuntimeOptions


def run_chat(
    model: str,
    runtime_options: RuntimeOptions,
    draft: DraftOptions,
    defaults: Defaults,
    options: ChatOptions,
) -> None:
    """Answer a prompt (or piped standard input) once, or read questions until the user leaves."""
    question = _question(options.prompt)
    say = silent if options.quiet else note
    with uncollected():
        llm = open_llm(model, runtime_options, draft, say, defaults)
    if not defaults.seed_is_fixed and not defaults.params.greedy:
        say(f"seed {defaults.params.seed}")
    is_conversation = question is None
    # One answer is over before compilation pays; a conversation compiles while the person types.
    if options.compile_blocks or (options.compile_blocks is None and is_conversation):
        preparation = llm.prepare(defaults.params, quiet=options.quiet, tune=is_conversation)
        if options.compile_blocks:
            preparation.wait_for_compiler(say)
    session = ChatSession(llm, defaults, note if is_conversation else say)
    on_terminal = sys.stdout.isatty()
    style = Style(on_terminal, options.show_accepted, dims_thoughts=on_terminal and is_conversation)
    if question is None:
        say(f"context {llm.engine.max_seq_len:,} tokens; /help lists commands")
        Repl(session, style, options.quiet, options.plain).run()
    else:
        answer = AnswerScreen(plain=True)
        for piece in session.ask(question):
            answer.write(style.text_of(piece))
        answer.finish()
        if llm.engine.runner.error:
            note(f"warning: running without CUDA graphs: {llm.engine.runner.error}")
        say(format_stats(session.stats))
    if llm.is_preparing:
        leave()


def _question(prompt: str | None) -> str | None:
    """Return the prompt from the option or from standard input, None for a conversation.

    The standard streams become UTF-8 in any locale; invalid bytes of the input are an error.
    """
    for stream, errors in ((sys.stdin, "strict"), (sys.stdout, "replace"), (sys.stderr, "replace")):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors=errors)
    if prompt is None or prompt == "-":
        if sys.stdin is None:
            raise FasteagleError("standard input is closed: give the prompt after -p")
        if prompt is None and sys.stdin.isatty():
            return None
        prompt = utf8(sys.stdin.buffer.read(), "standard input")
    if not prompt.strip():
        raise FasteagleError("the prompt is empty: give text after -p, or pipe some in")
    return prompt
