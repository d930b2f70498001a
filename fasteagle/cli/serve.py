"""Run `fasteagle serve`: take the port, load a model, serve requests."""

from __future__ import annotations

from fasteagle.cli.command import leave, silent, uncollected
from fasteagle.cli.options import TalkOptions
from fasteagle.errors import FasteagleError, note
from fasteagle.llm import open_llm
from fasteagle.options import Defaults, DraftOptions, RuntimeOptions, ServeOptions

try:
    from fasteagle.server.app import Server
    from fasteagle.server.run import check_exposed, listen, run
except ImportError as error:
    raise FasteagleError(
        f"serve needs more packages ({error.name} is missing): pip install 'fasteagle[serve]'"
    ) from error


def run_serve(
    model: str,
    runtime_options: RuntimeOptions,
    draft: DraftOptions,
    defaults: Defaults,
    talk: TalkOptions,
    options: ServeOptions,
    api_key: str | None,
) -> None:
    """Serve a model until Ctrl-C."""
    check_exposed(options, api_key)
    say = silent if talk.quiet else note
    with listen(options) as listener:
        with uncollected():
            llm = open_llm(model, runtime_options, draft, say, defaults, options)
        if talk.compile_blocks is not False:
            preparation = llm.prepare(defaults.params, quiet=True)
            if talk.compile_blocks:
                preparation.wait_for_compiler(say)
        server = Server(llm, options, defaults, api_key)
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        line = f"serving {server.name} on http://{shown}:{port} (the page), /v1 (the API)"
        run(server, listener, say, lambda: note(line))
    leave()  # at once: the interpreter would take another second to free the model
