"""Make the drafter that the options name, with its draft head quantized like the target."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from fasteagle.compile.cpu_draft import can_draft
from fasteagle.config import HeadConfig, ModelConfig
from fasteagle.device import short_of_memory, unless_short
from fasteagle.drafting.base import Drafter, Tuning
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.drafting.fused import FusedDrafter
from fasteagle.drafting.ladder import NGRAM_RANKS, ranks_of
from fasteagle.drafting.lookup import Corpus, Lookup
from fasteagle.drafting.ngram import NGRAM_TOKENS, NgramDrafter
from fasteagle.drafting.policy import LONGEST, MAX_CHAIN, REACH
from fasteagle.drafting.static_tree import StaticTreeDrafter, check_no_gaps, check_paths
from fasteagle.errors import FasteagleError
from fasteagle.generate import Engine
from fasteagle.loading.draft_model import model_drafter, open_draft_model
from fasteagle.loading.entries import REGISTRY
from fasteagle.loading.heads.find import (
    LoadedHead,
    find_head,
    has_known_head,
    head_shape,
    may_find_head,
    named_head,
)
from fasteagle.loading.lookup_files import read_documents
from fasteagle.loading.open import OpenedModel, PreparedModel
from fasteagle.loading.source import has_native, quantize_head_
from fasteagle.loading.tensors import Checkpoint, DummyCheckpoint, fingerprint
from fasteagle.model import EagleHead
from fasteagle.options import DraftOptions, RuntimeOptions
from fasteagle.paths import costs_path
from fasteagle.shapes import (
    PAPER_TREE,
    AnyShape,
    FusedShape,
    GatedChain,
    Paths,
    TreeShape,
    read_tree,
)


@dataclasses.dataclass(frozen=True)
class Drafting:
    """Parts of a drafter that are read and checked before the weights of its target.

    `loaded` is the draft head that `options` name, `head` the shape of the one that will be loaded,
    for which memory must be left.
    """

    options: DraftOptions
    loaded: LoadedHead | None
    head: HeadConfig | None
    documents: list[list[int]]
    draft_model: PreparedModel | None

    def drafter(
        self, name: str, engine: Engine, checkpoint: Checkpoint, notify: Callable[[str], None]
    ) -> Drafter | None:
        """Make the drafter for the target `engine`; see `make_drafter`."""
        if self.draft_model is not None:
            return model_drafter(self.draft_model, engine, self.options, notify)
        return make_drafter(
            name, engine, checkpoint, self.options, notify, self.loaded, self.documents
        )


def plan_drafting(
    options: DraftOptions,
    opened: OpenedModel,
    runtime: RuntimeOptions,
    notify: Callable[[str], None],
) -> Drafting:
    """Read the parts of a drafter. Raises `FasteagleError` where they cannot run on the target."""
    draft_model = open_draft_model(options, opened, runtime, notify)
    loaded = check_draft(options, opened, runtime)
    head = expected_head(options, opened, loaded)
    if options.tap_layers is not None and (head is None or head.eagle3 is None):
        raise FasteagleError("--tap-layers is for EAGLE-3 heads, and there is none: leave it out")
    needs_head = options.may_have_head and options.drafter != "auto" and loaded is None
    if needs_head and not may_find_head(opened.name, opened.checkpoint):
        raise no_head(opened.name)
    documents = read_documents(options.lookup, opened.tokenizer, notify)
    return Drafting(options, loaded, head, documents, draft_model)


def check_draft(
    options: DraftOptions, opened: OpenedModel, runtime: RuntimeOptions
) -> LoadedHead | None:
    """Raise `FasteagleError` for a draft head or a tree that cannot run; needs no loaded target.

    Returns the draft head if `options` name one.
    """
    if not options.may_have_head:
        return None
    config, loaded = opened.checkpoint.config, None
    if options.head is not None:
        loaded = named_head(options.head).loaded(config, options.tap_layers)
    vocab_size = config.vocab_size if loaded is None else loaded.head.config.draft_vocab_size
    tree_of(options, vocab_size, opened.quantized_on_cpu(runtime))
    return loaded


def expected_head(
    options: DraftOptions, opened: OpenedModel, loaded: LoadedHead | None
) -> HeadConfig | None:
    """Return the shape of the draft head that `make_drafter` will load, None if none is known.

    `loaded` is what `check_draft` returns.
    """
    if not options.may_have_head:
        return None
    if loaded is not None:
        return loaded.head.config
    name = opened.name
    if options.drafter == "auto" and not has_known_head(name):
        return None
    return head_shape(name, opened.checkpoint.config)


def make_drafter(
    name: str,
    engine: Engine,
    checkpoint: Checkpoint,
    options: DraftOptions,
    notify: Callable[[str], None],
    asked: LoadedHead | None = None,
    documents: Sequence[Sequence[int]] = (),
) -> Drafter | None:
    """Make the drafter that `options` name; `notify` gets one line that describes it.

    `name` is the model's, `checkpoint` the weights the engine runs; `asked` is the draft head that
    `options` name, if `check_draft` has loaded it already. `documents` are token ids of texts that
    may be quoted. Raises `FasteagleError` where memory is short, with what fits.
    """
    if options.drafter == "none":
        return None

    def tell() -> FasteagleError:
        head = head_shape(name, engine.model.config) if asked is None else asked.head.config
        if options.drafter == "ngram":
            fix = "give fewer to --lookup"
            return short_of_memory("loading files", engine.device, lambda free: fix)
        smaller = engine.backend.advised(head) or "choose a smaller model"
        fix = f"{smaller}, or guess from the context: --drafter ngram"
        return short_of_memory("loading the draft head", engine.device, lambda free: fix)

    return unless_short(
        lambda: _drafter(name, engine, checkpoint, options, notify, asked, documents), tell
    )


def _drafter(
    name: str,
    engine: Engine,
    checkpoint: Checkpoint,
    options: DraftOptions,
    notify: Callable[[str], None],
    asked: LoadedHead | None,
    documents: Sequence[Sequence[int]],
) -> Drafter | None:
    """Make the drafter of `make_drafter` without its report on short memory."""
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
        raise no_head(name)
    notify("no draft head for this model: guessing from the context (n-grams) instead")
    return _ngram(engine, checkpoint, options, corpus)


def no_head(name: str) -> FasteagleError:
    """Return the error that says what to do for a model without a draft head."""
    return FasteagleError(
        f"no draft head for {name}: give one with --head, train one with `fasteagle train-head`, "
        "or use --drafter ngram"
    )


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
    """Return the drafter of the draft head `loaded`, quantized where its target is."""
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
    native = _drafts_chains(engine)
    drafter = tree_drafter(head, options, engine.max_seq_len, quantized_on_cpu, corpus, native)
    auto = options.auto_tree or isinstance(drafter.shape, GatedChain)
    if auto and isinstance(drafter, EagleDrafter):
        fuses = isinstance(drafter, FusedDrafter)
        searches = fuses and corpus is not None
        kind = _kind("fused" if fuses else "eagle", drafter, searches, loaded.digest)
        path = costs_path(identity, _precision(engine, checkpoint), kind)
        drafter.tuning = Tuning(path, ranks_of(header), loaded.digest, searches)
    notify(f"draft head {loaded.origin}: {drafter.name}, {_size(drafter.shape)}")
    return drafter


def _size(shape: AnyShape) -> str:
    return f"chains of {shape}" if isinstance(shape, GatedChain) else f"{shape.nodes} nodes"


def _ngram(
    engine: Engine, checkpoint: Checkpoint, options: DraftOptions, corpus: Corpus | None
) -> NgramDrafter:
    native, reach = _drafts_chains(engine), options.lookup_depth
    lookup = Lookup(corpus=corpus, device=engine.device)
    drafter = NgramDrafter(NGRAM_TOKENS if reach is None else reach, lookup)
    if native:
        drafter.shape = _looked_up_chain(reach)
    # The fingerprint of random weights would generate all of them.
    if (options.auto_tree or native) and not isinstance(checkpoint, DummyCheckpoint):
        kind = _kind("ngram", drafter, corpus is not None)
        path = costs_path(fingerprint(checkpoint), _precision(engine, checkpoint), kind)
        drafter.tuning = Tuning(path, NGRAM_RANKS, corpus=corpus is not None)
    return drafter


def _drafts_chains(engine: Engine) -> bool:
    """Return whether our CPU kernels draft gated chains; the core drafts none of lookups."""
    return engine.backend.name == "cpu" and "passes" not in engine.backend.left


def _looked_up_chain(reach: int | None) -> GatedChain:
    if reach is not None and not 1 <= reach <= MAX_CHAIN:
        raise FasteagleError(
            f"lookup-depth {reach} is out of range for chains on CPUs: use 1 .. {MAX_CHAIN}"
        )
    return GatedChain(REACH if reach is None else reach)


def _kind(name: str, drafter: Drafter, searches: bool, digest: str = "") -> str:
    """Return the part of a file name that separates costs of different kinds of drafters."""
    depth = drafter.shape.depth
    chain = "chain" if depth in (LONGEST, REACH) else f"chain{depth}"
    shape = chain if isinstance(drafter.shape, GatedChain) else "tree"
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
    """Notify where the draft head was not trained for these weights."""
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
    """Return whether two repository or folder names end alike; the publisher may differ."""
    known = REGISTRY.get(name)
    names = (name, known.repo if known is not None and known.repo else name)
    return Path(said).name.lower() in (Path(n).name.lower() for n in names)


def tree_of(
    options: DraftOptions, draft_vocab_size: int, quantized_on_cpu: bool
) -> Paths | TreeShape | FusedShape:
    """Return the tree that `options` name, static or dynamic. Raises `FasteagleError`."""
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
    """Make the drafter that `options` name for a draft head that is ready.

    `native` says that the target's blocks run by our CPU kernels.
    """
    tree: Paths | AnyShape = tree_of(options, head.config.draft_vocab_size, quantized_on_cpu)
    fused = options.fuses
    if not isinstance(tree, tuple) and native and options.auto_chain and can_draft(head):
        fused = fused or options.drafter == "auto"  # a lookup costs chains next to nothing
        tree = _looked_up_chain(options.lookup_depth) if fused else GatedChain(LONGEST)
    if fused and isinstance(tree, FusedShape | GatedChain):
        lookup = Lookup(corpus=corpus, device=head.target_ids().device)
        return FusedDrafter(head, tree, max_seq_len, options.noise, lookup)
    if isinstance(tree, TreeShape | GatedChain):
        return EagleDrafter(head, tree, max_seq_len, noise=options.noise)
    assert isinstance(tree, tuple), "a static tree is left"
    sampled = options.verify == "multi-round"
    return StaticTreeDrafter(head, max_seq_len, tree, options.noise, sampled)
