"""One stage of the check, in a process of its own: `python -m fasteagle.bench.gpu_check.stage`.

A stage is a module with `run(context)`. It enters what it finds into the context, which writes it
down at once: where the process is ended, that much is known.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from fasteagle.bench.gpu_check.plan import STAGE_NAMES
from fasteagle.errors import FasteagleError, first_line
from fasteagle.paths import write_atomic


class Context:
    """What a stage is given, and where it puts what it finds."""

    def __init__(
        self,
        results: Path,
        out: Path,
        seconds: float,
        dry_run: bool = False,
        model: str | None = None,
    ) -> None:
        self.out, self.dry_run, self.model = out, dry_run, model
        self._results, self._end = results, time.monotonic() + seconds
        self.found: dict[str, Any] = {"lines": [], "tables": [], "problems": []}

    @property
    def device(self) -> torch.device:
        """On a dry run the CPU."""
        return torch.device("cpu" if self.dry_run else "cuda")

    @property
    def seconds_left(self) -> float:
        return self._end - time.monotonic()

    def save(self, **found: Any) -> None:
        """Enter values by name."""
        self.found.update(found)
        write_atomic(self._results, json.dumps(self.found).encode())

    def say(self, line: str) -> None:
        """A line for the person who reads the report."""
        print(line, flush=True)
        self.found["lines"].append(line)
        self.save()

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """A table of the report; one of the same title is replaced."""
        made = {"title": title, "columns": list(columns), "rows": [list(row) for row in rows]}
        others = [table for table in self.found["tables"] if table["title"] != title]
        self.save(tables=[*others, made])

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Something that may fail while the rest of the stage goes on."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            reason = first_line(error, 300)
            self.found["problems"].append(f"{name}: {reason}")
            self.save()


def require(ok: bool, problem: str) -> None:
    """Raise `FasteagleError` with `problem` unless all is well."""
    if not ok:
        raise FasteagleError(problem)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 if all went well, 1 if something failed, 2 for what a person can mend."""
    parser = argparse.ArgumentParser(description="One stage of scripts/gpu_check.py.")
    parser.add_argument("name", choices=STAGE_NAMES)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--model")
    given = parser.parse_args(arguments)
    context = Context(given.results, given.out, given.seconds, given.dry_run, given.model)
    context.save()
    try:
        importlib.import_module(f"fasteagle.bench.gpu_check.{given.name}").run(context)
    except FasteagleError as error:
        print(f"error: {error}", flush=True)
        return 2
    except Exception:
        traceback.print_exc()
        return 1
    if problems := context.found["problems"]:
        print(f"{len(problems)} parts failed: {'; '.join(problems)}"[:1000], flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
