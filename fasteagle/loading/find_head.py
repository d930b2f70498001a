"""Find the draft head of a model and make a drafter of it.

Looked for in this order: the one asked for, the user cache (heads calibrated here), the one that
ships with the package, the published one the registry names. Without a head: n-grams.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

from fasteagle.config import HeadConfig, ModelConfig, head_from_hf
from fasteagle.drafting.base import Drafter, Tuning
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.drafting.ngram import NgramDrafter
from fasteagle.drafting.plan import NGRAM_RANKS, ranks_of
from fasteagle.drafting.static_tree import StaticTreeDrafter, check_no_gaps, check_paths
from fasteagle.errors import FasteagleError
from fasteagle.generate import Engine
from fasteagle.loading import hub
from fasteagle.loading.head_file import load_head, read_header
from fasteagle.loading.registry import REGISTRY
from fasteagle.loading.source import has_native, quantize_head_
from fasteagle.loading.tensors import Checkpoint, DummyCheckpoint, fingerprint, read_json
from fasteagle.model import KEY_BLOCK, EagleHead
from fasteagle.options import DraftOptions
from fasteagle.paths import cache_dir, costs_path
from fasteagle.shapes import PAPER_TREE, read_tree


@dataclasses.dataclass(frozen=True)
class FoundHead:
    """A head directory or file, and its origin in words for the user."""

    path: Path
    origin: str


def find_head(asked: str | None, name: str, identity: str) -> FoundHead | None:
    """The head for model `name` with fingerprint `identity`, or None.

    Raises `FasteagleError` if the head that was asked for is not found.
    """
    if asked is not None:
        return asked_head(asked)
    cached = cache_dir() / "heads" / identity
    if (cached / "config.json").exists():
        return FoundHead(cached, "calibrated here")
    # A model given by its path may be one with a shipped head: compare fingerprints.
    for shipped in _shipped_heads():
        header = read_header(shipped) or {}
        if shipped.name == name or header.get("target_fingerprint") == identity:
            return FoundHead(shipped, "shipped with fasteagle")
    return _published_head(name)


def asked_head(asked: str) -> FoundHead:
    """A head by its folder, .gguf file or Hugging Face id. Raises `FasteagleError`."""
    path = Path(asked).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return FoundHead(path, str(path))
    if hub.is_repo_id(asked) and not path.exists():
        return FoundHead(hub.fetch_repo(asked, None), asked)
    raise FasteagleError(
        f"head {asked!r}: no such folder or .gguf file, and no Hugging Face id (owner/name)"
    )


def named_head(asked: str) -> FoundHead:
    """A head as `asked_head` takes it, or the one of a model by its registry name."""
    if asked not in REGISTRY or Path(asked).exists():
        return asked_head(asked)
    shipped = [path for path in _shipped_heads() if path.name == asked]
    found = FoundHead(shipped[0], "shipped with fasteagle") if shipped else _published_head(asked)
    if found is None:
        raise FasteagleError(
            f"no draft head ships for {asked} and none is published: give a folder, a .gguf file "
            "or a Hugging Face id"
        )
    return found


def _published_head(name: str) -> FoundHead | None:
    entry = REGISTRY.get(name)
    if entry is None or entry.head_repo is None:
        return None
    return FoundHead(hub.fetch_repo(entry.head_repo, None), entry.head_repo)


def _shipped_heads() -> list[Path]:
    """Head folders inside the package, named after the registry models they are for."""
    folder = Path(str(resources.files("fasteagle") / "data" / "heads"))
    return [path.parent for path in sorted(folder.glob("*/config.json"))]


def has_head(name: str) -> bool:
    """Whether `fasteagle chat --model name` finds an EAGLE head by itself."""
    shipped = any(path.name == name for path in _shipped_heads())
    return shipped or REGISTRY[name].head_repo is not None


def head_shape(name: str, config: ModelConfig) -> HeadConfig:
    """Shape of the draft head of model `name`: that of the shipped head, else the published one.

    Published EAGLE-1/2 heads have a block like the target's over `fc` [dim, 2 dim], and its whole
    vocabulary. Reads no weights.
    """
    for shipped in _shipped_heads():
        if shipped.name == name:
            raw = read_json(shipped / "config.json")
            if (raw["hidden_size"], raw["vocab_size"]) == (config.dim, config.vocab_size):
                return head_from_hf(raw, str(shipped))
    block = dataclasses.replace(
        config,
        n_layer=1,
        rope_base=10000.0,
        rope_scaling=None,
        rope_linear_factor=1.0,
        rope_freq_factors=None,
        qkv_bias=False,
        qk_norm=False,
        sliding_window=None,
    )
    return HeadConfig(block, config.vocab_size)


def make_drafter(
    name: str,
    engine: Engine,
    checkpoint: Checkpoint,
    options: DraftOptions,
    notify: Callable[[str], None],
) -> Drafter | None:
    """The drafter that `options` ask for; `notify` gets one line that names it.

    `name` is the model's, `checkpoint` the weights the engine runs.
    """
    if options.drafter == "none":
        return None
    if options.drafter == "ngram":
        return _ngram(engine, checkpoint)
    identity = fingerprint(checkpoint)
    try:
        found = find_head(options.head, name, identity)
    except FasteagleError as error:
        if options.drafter != "auto" or options.head is not None:
            raise
        notify(f"warning: {error}")  # the answer does not depend on it
        found = None
    if found is not None:
        return _eagle(name, engine, checkpoint, options, found, identity, notify)
    if options.drafter != "auto":
        raise FasteagleError(
            f"no draft head for {name}: give one with --head, train one with "
            "`fasteagle train-head`, or use --drafter ngram"
        )
    notify("no draft head for this model: guessing from the context (n-grams) instead")
    return _ngram(engine, checkpoint)


def _eagle(
    name: str,
    engine: Engine,
    checkpoint: Checkpoint,
    options: DraftOptions,
    found: FoundHead,
    identity: str,
    notify: Callable[[str], None],
) -> Drafter:
    """What drafts with the head found, quantized where its target is."""
    scheme = checkpoint.scheme
    if scheme is None:
        repair = f"fasteagle train-head --model {name} --prompts FILE --out DIR"
    else:
        repair = f"fasteagle calibrate-head --model {name} {scheme.option}"
    head, header = load_head(found.path, engine.model.config, options.tap_layers)
    _announce(header, identity, repair, notify)
    head.requires_grad_(False)
    head.borrow(engine.model, engine.max_seq_len + KEY_BLOCK)
    # A calibrated head's header says what was faster; others are quantized like their target.
    judged = (header or {}).get("head_scheme")
    if scheme is not None and judged != "bf16":
        # Calibration measures the head with min-max values, whatever method the target has.
        quantize_head_(
            head,
            dataclasses.replace(scheme, method="minmax") if judged else scheme,
            has_native(engine.model),
        )
    quantized_on_cpu = scheme is not None and engine.on_cpu
    drafter = tree_drafter(head, options, engine.max_seq_len, quantized_on_cpu)
    if options.auto_tree and isinstance(drafter, EagleDrafter):
        path = costs_path(identity, _precision(engine, checkpoint), "eagle")
        drafter.tuning = Tuning(path, ranks_of(header))
    notify(f"draft head {found.origin}: {drafter.name}, {drafter.shape.nodes} nodes")
    return drafter


def _ngram(engine: Engine, checkpoint: Checkpoint) -> NgramDrafter:
    drafter = NgramDrafter()
    if not isinstance(checkpoint, DummyCheckpoint):  # its fingerprint would generate all weights
        path = costs_path(fingerprint(checkpoint), _precision(engine, checkpoint), "ngram")
        drafter.tuning = Tuning(path, NGRAM_RANKS)
    return drafter


def _precision(engine: Engine, checkpoint: Checkpoint) -> str:
    scheme = checkpoint.scheme
    if scheme is None:
        return str(engine.dtype).removeprefix("torch.")
    return f"{scheme.name}-native" if has_native(engine.model) else scheme.name


def _announce(
    header: dict[str, Any] | None, identity: str, repair: str, notify: Callable[[str], None]
) -> None:
    """Tell of a head that was not made for exactly these weights."""
    if header is None:
        notify("draft head: not calibrated to these weights (it has no header)")
    elif header.get("target_fingerprint") != identity:
        notify(
            "warning: the draft head was trained for other weights: answers stay exact, but fewer "
            f"guesses may be accepted; this makes one for these: {repair}"
        )


def tree_drafter(
    head: EagleHead, options: DraftOptions, max_seq_len: int, quantized_on_cpu: bool
) -> Drafter:
    """The drafter that `options` ask for over a head that is ready."""
    sampled = options.verify == "multi-round"
    if options.drafter == "eagle-static" or options.tree_file:
        paths = PAPER_TREE if options.tree_file is None else read_tree(Path(options.tree_file))
        check_paths(paths, head.config.draft_vocab_size)
        if sampled:
            check_no_gaps(paths)
        return StaticTreeDrafter(head, max_seq_len, paths, options.noise, sampled)
    shape = options.tree_shape(quantized_on_cpu)
    if options.drafter == "eagle-chain" and sampled:
        paths = tuple((0,) * n for n in range(1, shape.depth + 1))
        return StaticTreeDrafter(head, max_seq_len, paths, options.noise, sampled)
    return EagleDrafter(head, shape, max_seq_len, noise=options.noise)
