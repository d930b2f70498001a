"""Files of questions, and files of conversations with a target's answers.

Both are JSON lines. A question has `turns`, a list of texts. A conversation has `ids` (its token
ids) and `prompt_len` (where the answer begins). Needs no torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from pathlib import Path

from fasteagle.config_fields import MOST_TEXT, parse_json
from fasteagle.errors import FasteagleError, reason_of, shown
from fasteagle.paths import write_atomic

Question = tuple[str, ...]  # one or more turns of a user


def read_questions(path: Path | None = None) -> list[Question]:
    """Read questions from a JSONL file with `turns`; without `path` the package's own ten."""
    shipped = Path(str(resources.files("fasteagle"))) / "data/prompts.jsonl"
    questions = [_question(line, where) for line, where in json_lines(path or shipped)]
    if not questions:
        raise FasteagleError(f"{path}: no questions in it: give another file")
    return questions


def write_questions(path: Path, questions: Iterable[Sequence[str]]) -> None:
    """Write questions as `read_questions` reads them."""
    lines = (json.dumps({"turns": turns}) + "\n" for turns in questions)
    write_atomic(path, "".join(lines).encode())


def json_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the lines that are not blank, each with file and number; raise `FasteagleError`.

    `splitlines` would also split at Unicode line separators within texts.
    """
    try:
        with path.open(encoding="utf-8-sig") as file:
            lines = iter(lambda: file.readline(MOST_TEXT), "")
            for number, line in enumerate(lines, 1):
                if len(line) == MOST_TEXT:  # a device may have no end
                    raise ValueError(f"line {number} has more than {MOST_TEXT >> 20} MiB")
                if line.strip():
                    yield line, f"{path}, line {number}"
    except (OSError, ValueError) as error:
        raise FasteagleError(f"cannot read {path}: {reason_of(error)}") from error


def _question(line: str, where: str) -> Question:
    with expecting('{"turns": ["text", ...]}', where):
        turns = parse_json(line)["turns"]
        if type(turns) is not list or not turns:
            raise ValueError("turns must be a list of texts")
        if not all(type(turn) is str and turn.strip() for turn in turns):
            raise ValueError("each turn must be a text that is not empty")
        "".join(turns).encode()  # JSON may hold halves of characters
    return tuple(turns)


@contextlib.contextmanager
def expecting(form: str, where: str) -> Iterator[None]:
    """Raise `FasteagleError` that names the expected `form` for what is wrong with a line."""
    try:
        yield
    except (ValueError, TypeError, KeyError) as error:
        reason = str(error)
        if isinstance(error, KeyError):
            reason = f"{error} is missing"
        elif isinstance(error, TypeError):
            reason = "it is no JSON object"
        raise FasteagleError(f"{where}: expected {form}: {reason}") from error


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Token ids of a conversation, length of its prompt, and whether its answer is greedy."""

    ids: list[int]
    prompt_len: int
    greedy: bool = False


def read_conversations(
    path: Path, vocab_size: int, max_len: int, limit: int | None = None
) -> list[Conversation]:
    """Read conversations from a JSONL file, cut at `max_len` tokens.

    Raises `FasteagleError` that names the line for ids outside the vocabulary and wrong fields.
    """
    lines = itertools.islice(json_lines(path), limit)
    conversations = [_conversation(line, where, vocab_size, max_len) for line, where in lines]
    conversations = [c for c in conversations if len(c.ids) >= c.prompt_len + 3]
    if not conversations:
        raise FasteagleError(f"{path}: no conversation with an answer of three tokens or more")
    return conversations


def _conversation(line: str, where: str, vocab_size: int, max_len: int) -> Conversation:
    with expecting('{"ids": [...], "prompt_len": n}', where):
        raw = parse_json(line)
        ids, prompt_len = raw["ids"], raw["prompt_len"]
        if type(ids) is not list or not all(type(i) is int for i in ids):
            raise ValueError("ids must be a list of integers")
        if type(prompt_len) is not int or prompt_len < 1:
            raise ValueError("prompt_len must be an integer >= 1")
    bad = next((i for i in ids if not 0 <= i < vocab_size), None)
    if bad is not None:
        raise FasteagleError(
            f"{where}: token id {shown(bad)} is outside the vocabulary of {vocab_size:,}: use ids "
            "of this model's tokenizer"
        )
    return Conversation(ids[:max_len], prompt_len, raw.get("T") == 0)
