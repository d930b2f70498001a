"""Run `fasteagle serve`: take the port, load a model, serve requests."""

from __future__ import annotations

from fasteagle.answering.grammar import check_grammar
from fasteagle.cli.command import leave, silent, uncollected
from fasteagle.cli.options import AnswerDefaults, TalkOptions
from fasteagle.errors import FasteagleError, note
from fasteagle.llm import open_llm
from fasteagle.options import DraftOptions, RuntimeOptions, ServeOptions

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
    defaults: AnswerDefaults,
    talk: TalkOptions,
    options: ServeOptions,
    api_key: str | None,
) -> None:
    """Serve a model until Ctrl-C."""
    check_exposed(options, api_key)
    if defaults.form is not None:
        check_grammar(defaults.form)
    say = silent if talk.quiet else note
    with listen(options) as listener:
        with uncollected():
            llm = open_llm(
                model,
                runtime_options,
                draft,
                say,
                options.prefix_cache,
                options.prefix_cache_on,
                talk.think,
            )
        params = defaults.params
        if talk.compile_blocks:
            say("compiling (kept for the next start) ...")
        if talk.compile_blocks is not False:
            llm.prepare(params, quiet=True, wait=bool(talk.compile_blocks))
        seed_is_set = not defaults.seed_is_drawn
        replies = Defaults(
            params, defaults.answer, seed_is_set, defaults.form, talk.system, talk.think
        )
        server = Server(llm, options, replies, api_key)
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        note(f"serving {server.name} on http://{shown}:{port} (the page), /v1 (the API)")
        run(server, listener, say)
    leave()  # at once: the interpreter would take another second to free the model
