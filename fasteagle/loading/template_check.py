"""Trial of a chat template, which is a program of whoever made the model's files.

It can loop for hours or fill the memory. So it renders three short conversations in a process that
can be ended, while the model is loaded, and each later one within the same time. Imports no torch.
"""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import FrameType
from typing import Any

from fasteagle.errors import FasteagleError
from fasteagle.trial import LONGEST_TRIAL, limit_process, run_trial

MOST_SECONDS = 5  # most time of a CPU for a conversation, or for those of a trial
MOST_CHARACTERS = 2**18  # most characters that a template makes of a short conversation
KNOWN_TRIALS = 256  # number of cached verdicts
_TRIALS = ThreadPoolExecutor(1)
_QUESTION = {"role": "user", "content": "Hi"}
_CONVERSATIONS = [
    [_QUESTION],
    [{"role": "system", "content": "Be brief."}, _QUESTION],
    [_QUESTION, {"role": "assistant", "content": "Hello."}, _QUESTION],
]


@functools.lru_cache(KNOWN_TRIALS)
def trial_of(template: str) -> Future[None]:
    """Begin `try_template` in the background; its result is None, or raises."""
    return _TRIALS.submit(try_template, template)


def try_template(template: str) -> None:
    """Raise `FasteagleError` for a template that takes too long or too much memory."""
    try:
        wrong = run_trial(__name__, [template, MOST_SECONDS], LONGEST_TRIAL)
    except subprocess.TimeoutExpired:
        wrong = f"takes more than {LONGEST_TRIAL} seconds"
    if wrong is None:
        wrong = "takes too much time or memory"
    if wrong:
        raise FasteagleError(
            f"the model's chat template {wrong} for a short conversation: use other files of it"
        )


@contextlib.contextmanager
def in_time() -> Iterator[None]:
    """Raise `TimeoutError` where a template that runs inside takes longer than a trial may."""
    end, before = time.thread_time() + MOST_SECONDS, sys.gettrace()

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename != "<template>":  # Jinja's name for what it has compiled
            return None
        if time.thread_time() > end:
            raise TimeoutError(f"it takes more than {MOST_SECONDS} seconds")
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def main() -> None:
    """Read a template from stdin, and print what it does too much of."""
    from jinja2 import TemplateError, nodes  # of transformers; takes 0.1 s
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Marks of an answer, which transformers knows."""

        tags = {"generation"}  # noqa: RUF012 - as Jinja annotates it

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    template, seconds = json.load(sys.stdin)
    limit_process(seconds)
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    names = {"raise_exception": refuse, "strftime_now": time.strftime}
    for messages in _CONVERSATIONS:
        try:
            text = environment.from_string(template, names).render(
                messages=messages, add_generation_prompt=True, bos_token="<s>", eos_token="</s>"
            )
        except MemoryError:
            raise
        except Exception:  # what it refuses, `render` reports for the conversation that it is
            continue
        if len(text) > MOST_CHARACTERS:
            print(f"writes {len(text):,} characters", end="")
            return
