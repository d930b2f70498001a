"""Make the drafter that the options name, with its draft head quantized like the target.

`plan_drafting` reads and checks what it can before the target's weights are read, the `Drafting`
that it returns makes the drafter for the loaded target.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from fasteagle.compile.cpu_backend import drafts_chains
from fasteagle.compile.cpu_draft import can_draft
from fasteagle.compile.proof import prove_drafting
from fasteagle.config import HeadConfig, mtp_layer
from fasteagle.device import short_of_memory, unless_short
from fasteagle.drafting.base import Drafter, Tuning
from fasteagle.drafting.draft_model import ModelDrafter
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.drafting.ladder import NGRAM_RANKS, Ranks, ranks_of
from fasteagle.drafting.lookup import Corpus, Lookup
from fasteagle.drafting.ngram import NGRAM_TOKENS, NgramDrafter
from fasteagle.drafting.policy import MAX_CHAIN, REACH
from fasteagle.drafting.static_tree import StaticTreeDrafter, check_no_gaps, check_paths
from fasteagle.drafting.thresholds import LONGEST
from fasteagle.errors import FasteagleError, counted, within
from fasteagle.generate import Engine
from fasteagle.loading.entries import REGISTRY
from fasteagle.loading.heads.find import (
    HeadFiles,
    LoadedHead,
    find_head,
    has_known_head,
    head_shape,
    may_find_head,
    named_head,
    own_layer,
)
from fasteagle.loading.lookup_files import read_documents
from fasteagle.loading.open import OpenedModel, PreparedModel, open_model
from fasteagle.loading.source import has_native, quantize_head_
from fasteagle.loading.tensors import Checkpoint, DummyCheckpoint
from fasteagle.model import EagleHead
from fasteagle.options import DraftOptions, RuntimeOptions
from fasteagle.paths import costs_path
from fasteagle.shapes import PAPER_TREE, FusedShape, GatedChain, Paths, TreeShape, read_tree


def plan_drafting(
    options: DraftOptions,
    opened: OpenedModel,
    runtime: RuntimeOptions,
    notify: Callable[[str], None],
) -> Drafting:
    """Read the parts of a drafter. Raises `FasteagleError` where they cannot run on the target."""
    name, draft_model = opened.name, _open_draft_model(options, opened, runtime, notify)
    head = check_draft(options, opened, runtime)
    shape, own = None, own_layer(opened.checkpoint, opened.path)
    if head is not None:
        shape = head.head.config
    elif options.may_have_head and own is not None and not has_known_head(name):
        shape = mtp_layer(opened.checkpoint.config)
    elif options.may_have_head and (options.drafter != "auto" or has_known_head(name)):
        shape = head_shape(name, opened.checkpoint.config)
    if options.tap_layers is not None and (shape is None or shape.eagle3 is None):
        raise FasteagleError("--tap-layers is for EAGLE-3 heads, and there is none: leave it out")
    needs_head = options.may_have_head and options.drafter != "auto" and not (head or own)
    if needs_head and not may_find_head(name, opened.checkpoint):
        raise _no_head(name)
    documents = read_documents(options.lookup, opened.tokenizer, notify)
    return Drafting(options, head, shape, documents, draft_model, runtime.strict, own)


def check_draft(
    options: DraftOptions, opened: OpenedModel, runtime: RuntimeOptions
) -> LoadedHead | None:
    """Raise `FasteagleError` for a draft head or a tree that cannot run; needs no loaded target.

    Returns the draft head if `options` name one.
    """
    if not options.may_have_head:
        return None
    config, head = opened.checkpoint.config, None
    if options.head is not None:
        head = named_head(options.head).loaded(config, options.tap_layers)
    vocab_size = config.vocab_size if head is None else head.head.config.draft_vocab_size
    tree_of(options, vocab_size, opened.quantized_on_cpu(runtime))
    return head


def _open_draft_model(
    draft: DraftOptions, target: OpenedModel, runtime: RuntimeOptions, notify: Callable[[str], None]
) -> PreparedModel | None:
    """Open the draft model that `draft` names, without its weights; None where it names none.

    Raises `FasteagleError` for a model with another tokenizer; `notify` warns of one that is
    larger than its target.
    """
    if draft.draft_model is None:
        return None
    others = {
        "--head": draft.head,
        "--tree FILE": draft.tree_file,
        "--lookup": draft.lookup or None,
        "--lookup-depth": draft.lookup_depth,
    }
    if useless := [flag for flag, value in others.items() if value is not None]:
        raise FasteagleError(f"--draft-model drafts by itself: drop {' and '.join(useless)}")
    opened = open_model(draft.draft_model, notify=notify)
    opened.check(RuntimeOptions().at(draft.draft_precision))  # not the target's -lm4
    _require_same_tokens(opened, target)
    ours, theirs = opened.checkpoint.config.params, target.checkpoint.config.params
    if ours >= theirs:
        notify(
            f"warning: draft model {opened.name} has {ours / 1e6:,.0f} million parameters, "
            f"{target.name} has {theirs / 1e6:,.0f}: guessing will cost more than it saves: use a "
            "smaller one"
        )
    max_seq_len = runtime.seq_len_for(target.checkpoint.config.max_seq_len, target.name)
    options = dataclasses.replace(runtime.at(draft.draft_precision), max_seq_len=max_seq_len)
    return opened.prepared(options, notify)


def _require_same_tokens(draft: OpenedModel, target: OpenedModel) -> None:
    """Raise `FasteagleError` with the first token id that differs between the tokenizers."""
    mine, other = draft.tokenizer.vocabulary(), target.tokenizer.vocabulary()
    for token in sorted(mine.keys() | other.keys()):
        texts = [
            "missing" if text is None else repr(text)
            for text in (mine.get(token), other.get(token))
        ]
        if texts[0] != texts[1]:
            raise FasteagleError(
                f"draft model {draft.name} has another tokenizer than {target.name}: token {token} "
                f"is {texts[0]} in it, {texts[1]} in {target.name}: use a model of the same family"
            )


@dataclasses.dataclass(frozen=True)
class Drafting:
    """Parts of a drafter that need no loaded target.

    `head` is the draft head that `options` name, `shape` that of the one that will be loaded, for
    which memory must be left, `documents` are token ids of texts that may be quoted, `own` is a
    layer for multi-token prediction in the target's files.
    """

    options: DraftOptions
    head: LoadedHead | None = None
    shape: HeadConfig | None = None
    documents: Sequence[Sequence[int]] = ()
    draft_model: PreparedModel | None = None
    strict: bool = False
    own: HeadFiles | None = None

    def drafter(
        self, name: str, engine: Engine, checkpoint: Checkpoint, notify: Callable[[str], None]
    ) -> Drafter | None:
        """Make the drafter for the target `engine`; `notify` gets one line that describes it.

        `name` is the target's, `checkpoint` the weights the engine runs. Raises `FasteagleError`
        where memory is short, with what fits.
        """
        if self.options.drafter == "none":
            return None
        if self.draft_model is not None:
            return self._draft_model(self.draft_model, engine, notify)

        def tell() -> FasteagleError:
            if self.options.drafter == "ngram":
                return short_of_memory(
                    "loading files", engine.device, lambda free: "give fewer to --lookup"
                )
            head = self.shape or head_shape(name, engine.model.config)
            fix = engine.backend.advised(head) or "choose a smaller model"
            fix += ", or guess from the context: --drafter ngram"
            return short_of_memory("loading the draft head", engine.device, lambda free: fix)

        return unless_short(lambda: self._drafter(name, engine, checkpoint, notify), tell)

    def _draft_model(
        self, prepared: PreparedModel, engine: Engine, notify: Callable[[str], None]
    ) -> Drafter:
        """Load the draft model beside its target."""
        with within(f"draft model {prepared.name}, beside its target"):
            target = prepared.engine(notify=notify).target
        target.model.requires_grad_(False)
        shape = self.options.tree_shape(quantized_on_cpu=False)
        assert isinstance(shape, TreeShape), "only a fused drafter has another shape"
        notify(f"draft model {prepared}, {counted(shape.nodes, 'node')}")
        vocab_size = engine.model.config.vocab_size
        return ModelDrafter(target, shape, vocab_size, noise=self.options.noise)

    def _drafter(
        self, name: str, engine: Engine, checkpoint: Checkpoint, notify: Callable[[str], None]
    ) -> Drafter:
        options, corpus = self.options, None
        if self.documents:
            corpus = Corpus(self.documents, engine.device, engine.model.config.vocab_size)
            notify(
                f"lookup: {counted(len(corpus), 'token')} of files, {corpus.n_bytes / 1e6:.1f} MB"
            )
        if options.drafter == "ngram":
            return self._ngram(engine, checkpoint, corpus)
        head = self.head
        try:
            files = None if head else find_head(name, checkpoint.fingerprint) or self.own
            if files is not None:
                head = files.loaded(engine.model.config, options.tap_layers)
        except FasteagleError as error:
            if options.drafter != "auto" or options.tap_layers:
                raise
            notify(f"warning: {error}")  # the answer does not depend on it
        if head is not None:
            _tell_mismatch(head, name, checkpoint, notify)
            return self._eagle(engine, checkpoint, head, notify, corpus)
        if options.drafter != "auto":
            raise _no_head(name)
        notify("no draft head for this model: guessing from the context (n-grams) instead")
        if not options.auto_chain:  # a size of the tree is set
            notify("warning: the --tree options do nothing without a draft head")
        return self._ngram(engine, checkpoint, corpus)

    def _eagle(
        self,
        engine: Engine,
        checkpoint: Checkpoint,
        loaded: LoadedHead,
        notify: Callable[[str], None],
        corpus: Corpus | None,
    ) -> Drafter:
        """Return the drafter of the draft head `loaded`, quantized where its target is."""
        options, scheme, head = self.options, checkpoint.scheme, loaded.head
        head.requires_grad_(False)
        head.borrow(engine.model, engine.max_seq_len)
        if scheme is not None:
            quantize_head_(head, scheme, has_native(engine.model))
        prove_drafting(engine.backend, head, self.strict)
        quantized_on_cpu = scheme is not None and engine.on_cpu
        native = drafts_chains(engine.backend)
        if engine.backend.merges_lookup and options.auto_tree and options.drafter == "auto":
            options = dataclasses.replace(options, drafter="fused")
        drafter = tree_drafter(head, options, quantized_on_cpu, corpus, native)
        is_chain = isinstance(drafter.shape, GatedChain)
        if (options.auto_tree or is_chain) and isinstance(drafter, EagleDrafter):
            ranks = ranks_of(loaded.header)
            drafter.tuning = _tuning(drafter, engine, checkpoint, ranks, loaded.digest)
        notify(f"draft head {loaded.origin}: {drafter.name}, {drafter.shape.size}")
        return drafter

    def _ngram(self, engine: Engine, checkpoint: Checkpoint, corpus: Corpus | None) -> NgramDrafter:
        native, reach = drafts_chains(engine.backend), self.options.lookup_depth
        lookup = Lookup(corpus=corpus, device=engine.device)
        drafter = NgramDrafter(NGRAM_TOKENS if reach is None else reach, lookup)
        if native:
            drafter.shape = _looked_up_chain(reach)
        # The fingerprint of random weights would generate all of them.
        if (self.options.auto_tree or native) and not isinstance(checkpoint, DummyCheckpoint):
            drafter.tuning = _tuning(drafter, engine, checkpoint, NGRAM_RANKS)
        return drafter


def _no_head(name: str) -> FasteagleError:
    return FasteagleError(
        f"no draft head for {name}: give one with --head, train one with `fasteagle train-head`, "
        "or use --drafter ngram"
    )


def _looked_up_chain(reach: int | None) -> GatedChain:
    return GatedChain(REACH if reach is None else min(reach, MAX_CHAIN))


def _tuning(
    drafter: Drafter, engine: Engine, checkpoint: Checkpoint, ranks: Ranks, digest: str = ""
) -> Tuning:
    """Return what the tuner needs; `digest` is that of the draft head's files."""
    precision = str(engine.dtype).removeprefix("torch.")
    if checkpoint.scheme is not None:
        precision = checkpoint.scheme.name + ("-native" if has_native(engine.model) else "")
    shape, depth = "tree", drafter.shape.depth
    if isinstance(drafter.shape, GatedChain):
        shape = "chain" if depth in (LONGEST, REACH) else f"chain{depth}"
    kind = drafter.name.removesuffix("-chain")
    searches = drafter.lookup is not None and drafter.lookup.corpus is not None
    parts = (kind, shape, "corpus" if searches else "", digest[:12])
    path = costs_path(checkpoint.fingerprint, precision, "-".join(part for part in parts if part))
    return Tuning(path, ranks, digest, searches)


def _tell_mismatch(
    head: LoadedHead, name: str, checkpoint: Checkpoint, notify: Callable[[str], None]
) -> None:
    """Notify where the draft head was not trained for these weights."""
    header, other = head.header, head.made_for
    if header is not None and header.get("target_fingerprint") != checkpoint.fingerprint:
        repair = f"train-head --model {name} --prompts FILE --out DIR"
        if checkpoint.scheme is not None:
            repair = f"calibrate-head --model {name} {checkpoint.scheme.option}"
        notify(
            "warning: the draft head was trained for other weights: answers stay exact, but fewer "
            f"guesses may be accepted; this makes one for these: fasteagle {repair}"
        )
    elif header is None and other is not None and not _same_model(other, name):
        notify(
            f"warning: the draft head says it was made for {other}: if that is another model, few "
            "guesses will be accepted; choose the head trained for this one with --head"
        )
    elif header is None and not head.head.config.mtp:
        notify("draft head: not calibrated to these weights (it has no header)")


def _same_model(other: str, name: str) -> bool:
    """Return whether two repository or folder names end alike; the publisher may differ."""
    repo = REGISTRY[name].repo if name in REGISTRY else None
    return Path(other).name.lower() in (Path(n).name.lower() for n in (name, repo or name))


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
    quantized_on_cpu: bool,
    corpus: Corpus | None = None,
    native: bool = False,
) -> Drafter:
    """Make the drafter that `options` name for a draft head that is ready.

    `native` says that our CPU kernels run passes and draft chains.
    """
    tree: Paths | TreeShape | FusedShape | GatedChain = tree_of(
        options, head.config.draft_vocab_size, quantized_on_cpu
    )
    fused = options.fuses
    if not isinstance(tree, tuple) and native and options.auto_chain and can_draft(head):
        fused = fused or options.drafter == "auto"  # a lookup costs chains next to nothing
        tree = _looked_up_chain(options.lookup_depth) if fused else GatedChain(LONGEST)
    if isinstance(tree, tuple):
        sampled = options.verify == "multi-round"
        return StaticTreeDrafter(head, tree, options.noise, sampled)
    lookup = Lookup(corpus=corpus, device=head.target_ids().device) if fused else None
    return EagleDrafter(head, tree, noise=options.noise, lookup=lookup)
