"""Files in the cache of the Hugging Face hub, and a hub that fails."""

from __future__ import annotations

import shutil
from pathlib import Path

from helpers import raising

REPO, REVISION = "someone/tiny-model", "0123456789abcdef0123456789abcdef01234567"


def forbid(monkeypatch, error):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", raising(error))


def put_in_cache(
    hub_cache: Path, folder: Path, repo=REPO, revision=REVISION, is_newest: bool = True
) -> Path:
    """Lay a folder into the cache as a finished download of a commit.

    Unless it is the newest one, `main` names another commit, whose files are there too.
    """
    base = hub_cache / f"models--{repo.replace('/', '--')}"
    snapshot = base / "snapshots" / revision
    snapshot.parent.mkdir(parents=True)
    shutil.copytree(folder, snapshot)
    (base / "refs").mkdir()
    newest = revision if is_newest else "0" * 40
    (base / "refs" / "main").write_text(newest)
    if not is_newest:
        shutil.copytree(folder, base / "snapshots" / newest)
    return snapshot
