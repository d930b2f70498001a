"""Tokenizer of a GGUF file, converted once by transformers; why transformers cannot load one."""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fasteagle.errors import FasteagleError, first_line, shown
from fasteagle.loading.gguf_index import read_index
from fasteagle.paths import atomic_dir, cache_dir, remove_damaged

CONVERSION = 3  # version of converted GGUF tokenizers: a new number converts them again
SIZES = "sizes.json"  # of the files of a converted tokenizer
# GGUF names the splitting rule of a byte-level BPE instead of storing it.
_DIGITS = "digits"
_PRE_TOKENIZERS = {
    "default": None,
    "gpt-2": None,
    "smollm": _DIGITS,
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


def transformers_library() -> Any:
    """Return the module `transformers`, which prints errors only."""
    import transformers  # takes a second: only once a tokenizer is asked for

    transformers.logging.set_verbosity_error()
    return transformers


@contextlib.contextmanager
def in_one_line(problem: str) -> Iterator[None]:
    """Raise `FasteagleError` with `problem` and the reason for what transformers raises inside."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError, FasteagleError):
        raise
    except BaseException as error:  # a panic in tokenizers is no `Exception`
        raise FasteagleError(f"{problem} ({_reason(error)}): use other files of it") from error


def _reason(error: BaseException) -> str:
    """Return why transformers cannot load a tokenizer, for example code that we never run."""
    if "custom code" in str(error):
        return "its files want Python code of their own to be run (auto_map), which is never done"
    if str(error).startswith("Couldn't instantiate"):  # from one of several, it goes on
        return "no tokenizer.json and no tokenizer.model"
    return f"{error} is missing" if isinstance(error, KeyError) else first_line(error)


def converted_gguf(path: Path) -> Path:
    """Return the folder with a GGUF file's tokenizer, converted once (it takes seconds)."""
    folder = cache_dir() / "tokenizers" / _file_key(path)
    if _is_whole(folder):
        return folder
    if folder.exists():
        remove_damaged(folder)
    # Beside other files transformers would read their tokenizer instead of the file's own.
    with tempfile.TemporaryDirectory() as alone:
        Path(alone, path.name).symlink_to(path.resolve())
        with in_one_line(f"{path}: its tokenizer cannot be converted"):
            backend = transformers_library().AutoTokenizer.from_pretrained(
                alone, gguf_file=path.name, local_files_only=True, trust_remote_code=False
            )
    set_pre_tokenizer(backend, path)
    with atomic_dir(folder, shared=True) as temporary:
        backend.save_pretrained(temporary)
        sizes = {file.name: file.stat().st_size for file in temporary.iterdir()}
        (temporary / SIZES).write_text(json.dumps(sizes) + "\n")
    return folder


def _is_whole(folder: Path) -> bool:
    """Return whether a folder has all files of a converted tokenizer, each of its size."""
    try:
        sizes = json.loads((folder / SIZES).read_text())
        is_whole = all((folder / name).stat().st_size == size for name, size in sizes.items())
        return is_whole and "tokenizer.json" in sizes
    except (OSError, ValueError, AttributeError):
        return False


def _file_key(path: Path) -> str:
    """Return the cache key of a large local file, from its path, size and modification time."""
    stat = path.stat()
    text = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}|{CONVERSION}"
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def set_pre_tokenizer(backend: Any, path: Path) -> None:
    """Install the splitting rule that the file names.

    transformers (5.24) knows some of the names, and uses GPT-2's rule for all others.
    """
    # For GGUF files only.
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    fields = read_index(path).fields
    if fields.get("tokenizer.ggml.model") != "gpt2":
        return
    name = fields.get("tokenizer.ggml.pre", "default")
    if not isinstance(name, str) or name not in _PRE_TOKENIZERS:
        raise FasteagleError(
            f"{path}: GGUF pre-tokenizer {shown(name)} is not supported "
            f"({', '.join(_PRE_TOKENIZERS)} are): use the model's Hugging Face folder"
        )
    rule = _PRE_TOKENIZERS[name]
    if rule is None:
        return
    if rule is _DIGITS:
        steps = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    else:
        steps = [
            Split(Regex(rule), behavior="isolated"),
            ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    backend.backend_tokenizer.pre_tokenizer = Sequence(steps)
    if name == "llama-bpe":  # a word that is a token is that token, also where no merge makes it
        backend.backend_tokenizer.model.ignore_merges = True
