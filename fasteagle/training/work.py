"""Folder of a calibration that may be cut off: finished steps are not done again."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fasteagle.errors import FasteagleError
from fasteagle.paths import write_atomic


class Work:
    """Folder of a run that may be cut off, with the results of its finished parts."""

    def __init__(self, folder: Path, key: dict[str, Any], resume: bool, begun: float) -> None:
        """Open the folder; `begun` is when this part of the run began, by `time.perf_counter`.

        Raises `FasteagleError` for a folder of another run, or without `resume`.
        """
        self.folder, self._path = folder, folder / "state.json"
        self._state: dict[str, Any] = {"key": key, "results": {}, "spent": 0.0}
        if self._path.exists():
            self._state = json.loads(self._path.read_text())
            if not resume:
                raise FasteagleError(
                    f"{folder} holds an unfinished calibration: continue it with --resume, or "
                    "remove it"
                )
            changed = [k for k in key if self._state["key"].get(k) != key[k]]
            if changed:
                raise FasteagleError(
                    f"{folder} was begun with other {', '.join(changed)}: give the same ones, "
                    "or remove it"
                )
        folder.mkdir(parents=True, exist_ok=True)
        self._begun = begun - self._state["spent"]
        self.save()

    @property
    def seconds(self) -> float:
        """Time spent so far, over all parts of the run."""
        return time.perf_counter() - self._begun

    def once(self, name: str, compute: Callable[[], Any]) -> Any:
        """Return the result `name` of this run, computed now if no part of it has done so."""
        results = self._state["results"]
        if name not in results:
            results[name] = compute()
            self.save()
        return results[name]

    def save(self) -> None:
        self._state["spent"] = self.seconds
        write_atomic(self._path, json.dumps(self._state, indent=1).encode())
