"""The folder of a run that may be cut off: what is done already is not done again."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from fasteagle.errors import FasteagleError
from fasteagle.paths import write_atomic


class Work:
    """The work folder: records finished parts, so that they are not repeated."""

    def __init__(
        self, folder: Path, key: dict[str, Any], resume: bool, begun: float | None = None
    ) -> None:
        """`begun`: when this part of the run began, by `time.perf_counter`; now if not given."""
        self.folder = folder
        self._path = folder / "state.json"
        if self._path.exists():
            self.state = json.loads(self._path.read_text())
            if not resume:
                raise FasteagleError(
                    f"{folder} holds an unfinished calibration: continue it with --resume, or "
                    "remove it"
                )
            changed = [k for k in key if self.state["key"].get(k) != key[k]]
            if changed:
                raise FasteagleError(
                    f"{folder} was begun with other {', '.join(changed)}: give the same ones, "
                    "or remove it"
                )
        else:
            folder.mkdir(parents=True, exist_ok=True)
            self.state = {"key": key, "results": {}, "spent": 0.0}
        begun = time.perf_counter() if begun is None else begun
        self._begun = begun - self.state["spent"]
        self._save()

    @property
    def seconds(self) -> float:
        """Time spent so far, over all parts of the run."""
        return time.perf_counter() - self._begun

    def left(self, minutes: float, reserve: float = 0.0) -> float:
        """Seconds of `minutes` that are not spent yet, `reserve` kept back."""
        return 60 * minutes - self.seconds - reserve

    def result(self, name: str) -> Any:
        return self.state["results"].get(name)

    def record(self, name: str, value: Any) -> None:
        self.state["results"][name] = value
        self._save()

    def _save(self) -> None:
        self.state["spent"] = self.seconds
        write_atomic(self._path, json.dumps(self.state, indent=1).encode())
