"""Trial of an untrusted grammar, in a process that can be ended.

A few kB can keep llguidance busy for minutes, or crash its process, because nested rules recurse.
There `main` reads one grammar and prints what is wrong with it. Imports no torch.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from typing import Any

from fasteagle.answering.json_form import json_form
from fasteagle.errors import FasteagleError
from fasteagle.trial import LONGEST_TRIAL, limit_process, run_trial

TRIAL_SECONDS = 5
MOST_CHARACTERS = 2**18  # most characters of a schema, a regular expression or a grammar
KNOWN_TRIALS = 256  # number of cached verdicts


def library() -> Any:
    """Return llguidance; raise `FasteagleError` where it is not installed."""
    try:
        import llguidance  # of the optional extra [serve]
    except ImportError as error:
        raise FasteagleError(
            "structured output needs llguidance: pip install 'fasteagle[serve]'"
        ) from error
    return llguidance


def grammar_text(kind: str, text: str) -> str:
    """Return a form in llguidance's notation; raise ValueError for invalid ones."""
    import llguidance  # of the extra [serve]

    matcher = llguidance.LLMatcher
    if kind == "json_object":
        return matcher.grammar_from_json_schema(json_form({"type": "object"}))
    if kind == "json_schema":
        return matcher.grammar_from_json_schema(json_form(json.loads(text)))
    if kind == "regex":
        return matcher.grammar_from_regex(text)
    return matcher.grammar_from_lark(text)


def first_reason(error: object) -> str:
    """Return a line of llguidance's error, which may quote the whole grammar between its lines."""
    lines = str(error).strip().splitlines() or ["not accepted"]
    if lines[0].startswith("NoExtensionBias"):
        return "no text has this form"
    reasons = [line.strip() for line in lines if line.strip().startswith("error:")]
    if lines[0].endswith(":") and reasons:  # it quotes a regular expression before the reason
        return f"{lines[0]} {reasons[-1]}"[:300]
    return lines[0][:300]


def try_grammar(kind: str, text: str) -> None:
    """Raise `FasteagleError` where a grammar is too large, too slow, or invalid."""
    library()
    if len(text) > MOST_CHARACTERS:
        raise FasteagleError(
            f"{kind}: {len(text):,} characters are too many: use at most {MOST_CHARACTERS:,}"
        )
    reason = _tried(kind, text)
    if reason:
        raise FasteagleError(f"{kind}: {reason}")


@functools.lru_cache(KNOWN_TRIALS)
def _tried(kind: str, text: str) -> str:
    """Return the reason why a grammar is refused, or an empty string.

    Raises `FasteagleError` where time ran out: that is no verdict, for a machine can be busy.
    """
    try:
        reason = run_trial(__name__, [kind, text], TRIAL_SECONDS)
    except subprocess.TimeoutExpired:
        reason = f"not compiled within {TRIAL_SECONDS} seconds: use a simpler one"
        raise FasteagleError(f"{kind}: {reason}") from None
    return "too complex to compile: use a simpler one" if reason is None else reason


def main() -> None:
    """Read a grammar from stdin, and print what is wrong with it."""
    import llguidance  # of the extra [serve]

    kind, text = json.load(sys.stdin)
    limit_process(LONGEST_TRIAL)
    try:
        # Not `validate_grammar`: some grammars take long only where masks are made. A token for
        # each byte will do: what takes long is in the lexer, which goes by bytes.
        tokens = llguidance.LLTokenizer("byte")
        matcher = llguidance.LLMatcher(tokens, grammar_text(kind, text), log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()
        wrong = matcher.get_error()
    except ValueError as error:
        wrong = str(error) or "not accepted"
    if wrong:
        print(first_reason(wrong), end="")
