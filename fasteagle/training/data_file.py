"""File that `generate-data` writes: training text that grows by whole conversations.

A line is an answer: `ids` and `prompt_len` as `prompts.read_conversations` reads them, `T` its
temperature, `id` the conversation's number, `turn` and `turns` its place in it. Beside it lies
`NAME.settings.json`: what must stay the same for a later run to go on in the file.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fasteagle.config_fields import parse_json
from fasteagle.errors import FasteagleError, note, shown
from fasteagle.paths import lock_alone, require_writable, write_json
from fasteagle.training.dialogues import Dialogue


class DataFile:
    """Data file, opened or begun; `next_number` is the first conversation that is not done yet.

    Raises `FasteagleError` for a file of other settings, or of another kind.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self._path = path
        if path.exists() and not path.is_file():  # a pipe or a device has no end
            raise FasteagleError(f"{path} is no file that can be continued: give another --out")
        require_writable(path)
        self.next_number = 0
        self.conversations = 0  # with an answer in the file
        self.tokens = 0  # of answers
        self._prompts: set[tuple[int, ...]] = set()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")
        try:
            lock_alone(self._file.fileno(), path)
            self._begin(settings)
            self._load()
        except BaseException:
            self.close()
            raise

    def _begin(self, settings: dict[str, Any]) -> None:
        """Write the settings of a new file, or compare those of one that is continued."""
        path = self._path
        beside = path.with_name(f"{path.name}.settings.json")
        if not path.stat().st_size:
            write_json(beside, settings)
            return
        try:
            begun = parse_json(beside.read_text("utf-8"))
            if not isinstance(begun, dict):
                raise ValueError("no settings")
        except (OSError, ValueError) as error:
            raise FasteagleError(
                f"{path} is there, but not begun by generate-data ({beside.name} is missing "
                "or damaged): give another --out"
            ) from error
        require_same(path, begun, settings)

    def close(self) -> None:
        with self._writing():
            self._file.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Raise `FasteagleError` where the disk takes no more."""
        try:
            yield
        except OSError as error:
            raise FasteagleError(
                f"cannot write {self._path} ({error.strerror}): free some space, and give the same "
                "command again"
            ) from error

    def has_prompt(self, prompt: list[int]) -> bool:
        """Return whether a conversation begins with these tokens already."""
        return tuple(prompt) in self._prompts

    def append(self, number: int, dialogue: Dialogue) -> None:
        """Write the answers of conversation `number`, all or none."""
        lines = [
            {
                "id": number,
                "turn": turn,
                "turns": len(dialogue.answers),
                "T": params.temperature,
                "prompt_len": len(reply.prompt),
                "ids": reply.prompt + reply.ids,
            }
            for turn, (reply, params) in enumerate(dialogue.answers, 1)
        ]
        with self._writing():
            self._file.write("".join(json.dumps(line) + "\n" for line in lines))
            self._file.flush()
        for line in lines:
            self._count(line)
        self.next_number = number + 1

    def _load(self) -> None:
        """Count the conversations in the file, and cut off one that was not written to its end."""
        data = self._path.read_bytes()
        lines = data[: data.rfind(b"\n") + 1].splitlines(keepends=True)
        parsed = [_parsed(line, f"{self._path}, line {n}") for n, line in enumerate(lines, 1)]
        while parsed and parsed[-1]["turn"] < parsed[-1]["turns"]:
            parsed.pop()
            lines.pop()
        if lines:
            self.next_number = parsed[-1]["id"] + 1
        os.truncate(self._path, sum(map(len, lines)))
        for line in parsed:
            self._count(line)

    def _count(self, line: dict[str, Any]) -> None:
        prompt_len = line["prompt_len"]
        self.tokens += len(line["ids"]) - prompt_len
        if line["turn"] == 1:
            self.conversations += 1
            self._prompts.add(tuple(line["ids"][:prompt_len]))


def note_other_writer(path: Path, model: str, identity: str) -> None:
    """Say where another model has written a data file: a draft head learns what its target says.

    The same model at another precision has the same name.
    """
    try:
        settings = parse_json(path.with_name(f"{path.name}.settings.json").read_text("utf-8"))
        writer, wrote = settings["model"], settings["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError):
        return  # not by generate-data
    if wrote != identity[: len(str(wrote))] and Path(str(writer)).name != Path(model).name:
        note(f"warning: {path} was written by {shown(writer)}, not by {model}")


def _parsed(line: bytes, where: str) -> dict[str, Any]:
    try:
        raw = parse_json(line.decode())
        numbers = [raw[key] for key in ("id", "turn", "turns", "prompt_len")]
        ids = raw["ids"]
        if not isinstance(ids, list) or not all(type(n) is int for n in (*numbers, *ids)):
            raise ValueError("whole numbers and a list of them")
        if not 1 <= raw["prompt_len"] <= len(ids):
            raise ValueError(f"prompt_len {raw['prompt_len']} of {len(ids)} ids")
        return raw
    except (ValueError, TypeError, KeyError) as error:
        raise FasteagleError(
            f"{where}: not a line that generate-data wrote ({error!r}): give another --out"
        ) from error


def require_same(path: Path, begun: dict[str, Any], settings: dict[str, Any]) -> None:
    """Raise `FasteagleError` where a run in `path` was `begun` with other settings."""
    changed = [
        f"{key} {begun.get(key)} -> {settings.get(key)}"
        for key in {**settings, **begun}
        if begun.get(key) != settings.get(key)
    ]
    if changed:
        raise FasteagleError(
            f"{path} was begun with other settings ({', '.join(changed)}): give the same ones, "
            "or another --out"
        )
