"""Run `fasteagle serve`: take the port, load a model, serve requests."""

from __future__ import annotations

from fasteagle.answering.grammar import check_grammar
from fasteagle.cli.command import leave, silent, uncollected
from fasteagle.errors import FasteagleError, note
from fasteagle.llm import open_llm
from fasteagle.options import (
    AnswerOptions,
    DraftOptions,
    GrammarSpec,
    RuntimeOptions,
    SamplingParams,
    ServeOptions,
)

try:
    from fasteagle.server.app import Server
    from fasteagle.server.prepare import Defaults
    from fasteagle.server.run import check_exposed, listen, run
except ImportError as error:
    raise FasteagleError(
        f"serve needs more packages ({error.name} is missing): pip install 'fasteagle[serve]'"
    ) from error


def run_serve(
    model: str,
    runtime_options: RuntimeOptions,
    draft: DraftOptions,
    params: SamplingParams,
    answer: AnswerOptions,
    options: ServeOptions,
    *,
    api_key: str | None,
    seed_given: bool,
    form: GrammarSpec | None,
    think: bool | None,
    system: str | None,
    compile_blocks: bool | None,
    quiet: bool,
) -> None:
    """Serve a model until Ctrl-C."""
    check_exposed(options, api_key)
    if form is not None:
        check_grammar(form)
    say = silent if quiet else note
    with listen(options) as listener:
        with uncollected():
            llm = open_llm(
                model,
                runtime_options,
                draft,
                say,
                options.prefix_cache,
                options.prefix_cache_on,
                think,
            )
        if compile_blocks:
            say("compiling (kept for the next start) ...")
        if compile_blocks is not False:
            llm.prepare(params, quiet=True, wait=bool(compile_blocks))
        defaults = Defaults(params, answer, seed_given, form, system, think)
        server = Server(llm, options, defaults, api_key)
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        note(f"serving {server.name} on http://{shown}:{port} (the page), /v1 (the API)")
        run(server, listener, say)
    leave()  # at once: the interpreter would take another second to free the model
