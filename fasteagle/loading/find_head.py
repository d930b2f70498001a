"""Find the draft head of a model and make a drafter of it.

Looked for in this order: the one asked for, the user cache (heads calibrated here), the one that
ships with the package, the published one the registry names. Without a head: n-grams.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from fasteagle.compile.cpu_blocks import is_native
from fasteagle.compile.cpu_draft import can_draft
from fasteagle.config import Eagle3Config, HeadConfig, ModelConfig, draft_block, head_from_hf
from fasteagle.drafting.base import Drafter, Tuning
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.drafting.fused import FusedDrafter
from fasteagle.drafting.lookup import Corpus, Lookup
from fasteagle.drafting.ngram import NGRAM_TOKENS, NgramDrafter
from fasteagle.drafting.plan import NGRAM_RANKS, ranks_of
from fasteagle.drafting.static_tree import StaticTreeDrafter, check_no_gaps, check_paths
from fasteagle.drafting.sure_chain import LONGEST, MAX_CHAIN, REACH
from fasteagle.errors import FasteagleError
from fasteagle.generate import Engine
from fasteagle.loading import hub
from fasteagle.loading.entries import EAGLE3, REGISTRY
from fasteagle.loading.head_dialects import default_taps
from fasteagle.loading.head_file import built_head, open_head, read_header
from fasteagle.loading.open import OpenedModel
from fasteagle.loading.registry import head_revision
from fasteagle.loading.source import has_native, quantize_head_
from fasteagle.loading.tensors import (
    Checkpoint,
    DummyCheckpoint,
    files_digest,
    fingerprint,
    read_json,
)
from fasteagle.model import EagleHead
from fasteagle.options import DraftOptions, RuntimeOptions
from fasteagle.paths import cache_dir, costs_path
from fasteagle.shapes import (
    PAPER_TREE,
    AnyShape,
    FusedShape,
    Paths,
    SureChain,
    TreeShape,
    read_tree,
)


@dataclasses.dataclass(frozen=True)
class LoadedHead:
    """A draft head whose width and vocabulary are its target's, and where it comes from."""

    origin: str
    head: EagleHead
    header: dict[str, Any] | None
    digest: str = ""  # of its files
    made_for: str | None = None  # the model that its files name


@dataclasses.dataclass(frozen=True)
class FoundHead:
    """A head directory or file, and its origin in words for the user."""

    path: Path
    origin: str

    def loaded(self, config: ModelConfig, tap_layers: tuple[int, ...] | None = None) -> LoadedHead:
        """The head, over a target of `config`. Raises `FasteagleError`, see `load_head`."""
        source = open_head(self.path, config)
        head = built_head(source, config, tap_layers)
        digest = files_digest(self.path)
        return LoadedHead(self.origin, head, source.header, digest, source.made_for)


def check_draft(
    options: DraftOptions, opened: OpenedModel, runtime: RuntimeOptions
) -> LoadedHead | None:
    """Raise `FasteagleError` for a head or a tree that cannot run, before the target is loaded.

    Returns the head if `options` name one.
    """
    if options.drafter in ("none", "ngram") or options.drafts_with_model:
        return None
    config, quantized_on_cpu = opened.checkpoint.config, opened.quantized_on_cpu(runtime)
    tree_of(options, config.vocab_size, quantized_on_cpu)
    if options.head is None:
        return None
    found = find_head(options.head, opened.name, identity="")
    assert found is not None, "a head that is asked for is found or refused"
    loaded = found.loaded(config, options.tap_layers)
    tree_of(options, loaded.head.config.draft_vocab_size, quantized_on_cpu)
    return loaded


def find_head(asked: str | None, name: str, identity: str) -> FoundHead | None:
    """The head for model `name` with fingerprint `identity`, or None.

    Raises `FasteagleError` if the head that was asked for is not found.
    """
    if asked is not None:
        return named_head(asked)
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
        return FoundHead(hub.fetch_repo(asked, head_revision(asked)), asked)
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
    heads = REGISTRY[name].heads if name in REGISTRY else ()
    if not heads:
        return None
    return FoundHead(hub.fetch_repo(heads[0].repo, heads[0].revision), heads[0].repo)


def _shipped_heads() -> list[Path]:
    """Head folders inside the package, named after the registry models they are for."""
    folder = Path(str(resources.files("fasteagle") / "data" / "heads"))
    return [path.parent for path in sorted(folder.glob("*/config.json"))]


def is_shipped(name: str) -> bool:
    """Whether a head for model `name` is inside the package."""
    return any(path.name == name for path in _shipped_heads())


def head_shape(name: str, config: ModelConfig) -> HeadConfig:
    """Shape of the draft head of model `name`: that of the shipped head, else the published one.

    Published heads have a block like the target's. A model without one gets the shape of EAGLE-1/2:
    `fc` [dim, 2 dim] and the whole vocabulary. Reads no weights.
    """
    for shipped in _shipped_heads():
        if shipped.name == name:
            raw = read_json(shipped / "config.json")
            if (raw["hidden_size"], raw["vocab_size"]) == (config.dim, config.vocab_size):
                return head_from_hf(raw, str(shipped / "config.json"))
    block = dataclasses.replace(draft_block(config), rope_base=10000.0)
    head = next(iter(REGISTRY[name].heads), None) if name in REGISTRY else None
    if head is None or head.algorithm != EAGLE3:
        return HeadConfig(block, config.vocab_size)
    own = Eagle3Config(default_taps(config.n_layer), target_dim=config.dim)
    size = min(head.draft_vocab_size, config.vocab_size)
    return HeadConfig(block, size, fc_bias=False, eagle3=own)


def make_drafter(
    name: str,
    engine: Engine,
    checkpoint: Checkpoint,
    options: DraftOptions,
    notify: Callable[[str], None],
    asked: LoadedHead | None = None,
    documents: Sequence[Sequence[int]] = (),
) -> Drafter | None:
    """The drafter that `options` ask for; `notify` gets one line that names it.

    `name` is the model's, `checkpoint` the weights the engine runs; `asked` is the head that
    `options` name, if `check_draft` has loaded it already. `documents` are token ids of texts that
    may be quoted.
    """
    if options.drafter == "none":
        return None
    corpus = None
    if documents:
        corpus = Corpus(documents, engine.device)
        notify(f"lookup: {len(corpus):,} tokens of files, {corpus.n_bytes / 1e6:.1f} MB")
    if options.drafter == "ngram":
        return _ngram(engine, checkpoint, options, corpus)
    identity = fingerprint(checkpoint)
    loaded = asked
    if loaded is None:
        loaded = _found_head(name, engine.model.config, options, identity, notify)
    if loaded is not None:
        return _eagle(name, engine, checkpoint, options, loaded, identity, notify, corpus)
    if options.drafter != "auto":
        raise FasteagleError(
            f"no draft head for {name}: give one with --head, train one with "
            "`fasteagle train-head`, or use --drafter ngram"
        )
    notify("no draft head for this model: guessing from the context (n-grams) instead")
    return _ngram(engine, checkpoint, options, corpus)


def _found_head(
    name: str,
    config: ModelConfig,
    options: DraftOptions,
    identity: str,
    notify: Callable[[str], None],
) -> LoadedHead | None:
    try:
        found = find_head(options.head, name, identity)
    except FasteagleError as error:
        if options.drafter != "auto" or options.head is not None:
            raise
        notify(f"warning: {error}")  # the answer does not depend on it
        return None
    return None if found is None else found.loaded(config, options.tap_layers)


def _eagle(
    name: str,
    engine: Engine,
    checkpoint: Checkpoint,
    options: DraftOptions,
    loaded: LoadedHead,
    identity: str,
    notify: Callable[[str], None],
    corpus: Corpus | None,
) -> Drafter:
    """What drafts with the head, quantized where its target is."""
    scheme = checkpoint.scheme
    if scheme is None:
        repair = f"fasteagle train-head --model {name} --prompts FILE --out DIR"
    else:
        repair = f"fasteagle calibrate-head --model {name} {scheme.option}"
    head, header = loaded.head, loaded.header
    _tell_mismatch(loaded, name, identity, repair, notify)
    head.requires_grad_(False)
    head.borrow(engine.model, engine.max_seq_len)
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
    native = is_native(engine.model)
    drafter = tree_drafter(head, options, engine.max_seq_len, quantized_on_cpu, corpus, native)
    auto = options.auto_tree or isinstance(drafter.shape, SureChain)
    if auto and isinstance(drafter, EagleDrafter):
        fuses = isinstance(drafter, FusedDrafter)
        searches = fuses and corpus is not None
        kind = _kind("fused" if fuses else "eagle", drafter, searches, loaded.digest)
        path = costs_path(identity, _precision(engine, checkpoint), kind)
        drafter.tuning = Tuning(path, ranks_of(header), loaded.digest, searches)
    notify(f"draft head {loaded.origin}: {drafter.name}, {_size(drafter.shape)}")
    return drafter


def _size(shape: AnyShape) -> str:
    return f"chains of {shape}" if isinstance(shape, SureChain) else f"{shape.nodes} nodes"


def _ngram(
    engine: Engine, checkpoint: Checkpoint, options: DraftOptions, corpus: Corpus | None
) -> NgramDrafter:
    native, reach = is_native(engine.model), options.lookup_depth
    # Of a match in a corpus it matters how long it is, and of one that is copied far.
    longest = 8 if native or corpus is not None else 3
    drafter = NgramDrafter(NGRAM_TOKENS if reach is None else reach, longest, corpus=corpus)
    if native:
        drafter.shape = _looked_up_chain(reach)
    # The fingerprint of random weights would generate all of them.
    if (options.auto_tree or native) and not isinstance(checkpoint, DummyCheckpoint):
        kind = _kind("ngram", drafter, corpus is not None)
        path = costs_path(fingerprint(checkpoint), _precision(engine, checkpoint), kind)
        drafter.tuning = Tuning(path, NGRAM_RANKS, corpus=corpus is not None)
    return drafter


def _looked_up_chain(reach: int | None) -> SureChain:
    if reach is not None and not 1 <= reach <= MAX_CHAIN:
        raise FasteagleError(
            f"lookup-depth {reach} is out of range for chains on CPUs: use 1 .. {MAX_CHAIN}"
        )
    return SureChain(REACH if reach is None else reach)


def _kind(name: str, drafter: Drafter, searches: bool, digest: str = "") -> str:
    """In the name of a file, what the costs of a drafter depend on: other ones stay kept."""
    depth = drafter.shape.depth
    chain = "chain" if depth in (LONGEST, REACH) else f"chain{depth}"
    shape = chain if isinstance(drafter.shape, SureChain) else "tree"
    parts = (name, shape, "corpus" if searches else "", digest[:12])
    return "-".join(part for part in parts if part)


def _precision(engine: Engine, checkpoint: Checkpoint) -> str:
    scheme = checkpoint.scheme
    if scheme is None:
        return str(engine.dtype).removeprefix("torch.")
    return f"{scheme.name}-native" if has_native(engine.model) else scheme.name


def _tell_mismatch(
    loaded: LoadedHead, name: str, identity: str, repair: str, notify: Callable[[str], None]
) -> None:
    """A line where the head was not trained for these weights."""
    header, other = loaded.header, loaded.made_for
    if header is None and other is not None and not _same_model(other, name):
        notify(
            f"warning: the draft head says it was made for {other}: if that is another model, few "
            "guesses will be accepted; choose the head trained for this one with --head"
        )
    elif header is None:
        notify("draft head: not calibrated to these weights (it has no header)")
    elif header.get("target_fingerprint") != identity:
        notify(
            "warning: the draft head was trained for other weights: answers stay exact, but fewer "
            f"guesses may be accepted; this makes one for these: {repair}"
        )


def _same_model(said: str, name: str) -> bool:
    """By the last part of a repository's or a folder's name: who has published it may differ."""
    known = REGISTRY.get(name)
    names = (name, known.repo if known is not None and known.repo else name)
    return Path(said).name.lower() in (Path(n).name.lower() for n in names)


def tree_of(
    options: DraftOptions, draft_vocab_size: int, quantized_on_cpu: bool
) -> Paths | TreeShape | FusedShape:
    """The tree that `options` ask for, static or dynamic. Raises `FasteagleError`."""
    sampled = options.verify == "multi-round"
    if options.drafter == "eagle-static" or options.tree_file:
        paths = PAPER_TREE if options.tree_file is None else read_tree(Path(options.tree_file))
        check_paths(paths, draft_vocab_size)
        if sampled:
            check_no_gaps(paths)
        return paths
    shape = options.tree_shape(quantized_on_cpu)
    if options.drafter == "eagle-chain" and sampled:
        return tuple((0,) * n for n in range(1, shape.depth + 1))
    return shape


def tree_drafter(
    head: EagleHead,
    options: DraftOptions,
    max_seq_len: int,
    quantized_on_cpu: bool,
    corpus: Corpus | None = None,
    native: bool = False,
) -> Drafter:
    """The drafter that `options` ask for over a head that is ready.

    `native`: the target's blocks run by our CPU kernels.
    """
    tree: Paths | AnyShape = tree_of(options, head.config.draft_vocab_size, quantized_on_cpu)
    fused = options.fuses
    if not isinstance(tree, tuple) and native and options.auto_chain and can_draft(head):
        fused = fused or options.drafter == "auto"  # a lookup costs chains next to nothing
        tree = _looked_up_chain(options.lookup_depth) if fused else SureChain(LONGEST)
    if fused and isinstance(tree, FusedShape | SureChain):
        return FusedDrafter(head, tree, max_seq_len, options.noise, Lookup(corpus=corpus))
    if isinstance(tree, TreeShape | SureChain):
        return EagleDrafter(head, tree, max_seq_len, noise=options.noise)
    assert isinstance(tree, tuple), "a static tree is left"
    sampled = options.verify == "multi-round"
    return StaticTreeDrafter(head, max_seq_len, tree, options.noise, sampled)
