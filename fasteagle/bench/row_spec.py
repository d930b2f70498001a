"""Rows of the benchmark by name: how each decodes, and which tree it drafts; needs no torch."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path

from fasteagle.errors import FasteagleError
from fasteagle.options import DEFAULT_TREE, DraftOptions
from fasteagle.shapes import PAPER_TREE, AnyShape, FusedShape, StaticShape, TreeShape, read_tree

LOOKUP_TOKENS = 10  # of hf-pld: the value transformers' documentation uses for prompt lookup
HEAD_ROWS = ("eagle", "fused", "eagle-static", "eagle-chain")
OTHER_ROWS = ("ngram", "model", "lookahead", "medusa")
ROW_NAMES = ("hf", "hf-pld", "gpt-fast", "plain", *HEAD_ROWS, *OTHER_ROWS)
SIZES: dict[
    str, tuple[str, TreeShape | FusedShape]
] = {  # how rows name trees of their own, with an example
    "eagle": ("DEPTH/TOPK/NODES", DEFAULT_TREE),
    "fused": ("DEPTH/TOPK/NODES/LOOKUP-DEPTH", FusedShape(3, 3, 8, 8)),
}


@dataclasses.dataclass(frozen=True)
class RowSpec:
    """One way to decode: one of `ROW_NAMES`, or one of these with its own tree or draft head."""

    kind: str
    shape: TreeShape | FusedShape | None = None  # of its own
    head: str | None = None  # of its own, instead of `--head`

    @staticmethod
    def parse(text: str) -> RowSpec:
        """Read a name, `eagle@DEPTH/TOPK/NODES`, or `fused@DEPTH/TOPK/NODES/LOOKUP_DEPTH`.

        `=HEAD` after it names a draft head. Raises `FasteagleError` for anything else.
        """
        name, names_head, head = text.partition("=")
        kind, has_sizes, sizes = name.partition("@")
        if kind not in ROW_NAMES or (has_sizes and kind not in SIZES):
            raise FasteagleError(f"unknown row {name!r}: use {', '.join(ROW_NAMES)}")
        if names_head and kind not in HEAD_ROWS:
            raise FasteagleError(f"row {text}: {kind} has no draft head: drop ={head}")
        if names_head and not head:
            raise FasteagleError(f"row {text}: name the draft head after the =")
        shape = None
        if has_sizes:
            form, example = SIZES[kind]
            if not re.fullmatch("/".join([r"[0-9]+"] * len(form.split("/"))), sizes):
                like = RowSpec(kind, example)
                raise FasteagleError(f"row {name!r}: use {kind}@{form}, like {like}")
            shape = type(example)(*map(int, sizes.split("/")))
        return RowSpec(kind, shape, head or None)

    def __str__(self) -> str:
        """Return the name that `parse` reads."""
        sizes = () if self.shape is None else dataclasses.astuple(self.shape)
        tree = "@" + "/".join(map(str, sizes)) if sizes else ""
        return f"{self.kind}{tree}" + ("" if self.head is None else f"={self.head}")

    @property
    def is_hf(self) -> bool:
        """Return whether transformers decodes this row, which runs dense weights only."""
        return self.kind in ("hf", "hf-pld")

    @property
    def has_own_weights(self) -> bool:
        """Return whether this row needs a second copy of the weights."""
        return self.is_hf or self.kind == "gpt-fast"

    @property
    def has_head(self) -> bool:
        """Return whether this row drafts with a draft head."""
        return self.kind in HEAD_ROWS

    @property
    def drafts(self) -> bool:
        """Return whether this row has a drafter that `DraftOptions` can name."""
        return self.has_head or self.kind in ("ngram", "model")

    def draft_options(self, draft: DraftOptions) -> DraftOptions:
        """Return the draft options of this row, made from `draft`."""
        if not self.drafts:
            return draft
        is_model, looks_up = self.kind == "model", self.kind in ("fused", "ngram")
        static = self.kind in ("eagle-static", "eagle-chain")
        row = dataclasses.replace(
            draft,
            drafter=self.kind,
            draft_model=draft.draft_model if is_model else None,
            head=None if is_model else self.head or draft.head,
            tap_layers=draft.tap_layers if self.has_head else None,
            tree_file=draft.tree_file if self.kind == "eagle-static" else None,
            lookup=draft.lookup if looks_up else (),
            lookup_depth=draft.lookup_depth if looks_up else None,
            verify=draft.verify if static else "match",
        )
        if self.shape is None:
            return row
        depth, topk, nodes, *reach = dataclasses.astuple(self.shape)
        sizes = {"tree_depth": depth, "tree_topk": topk, "tree_nodes": nodes}
        return dataclasses.replace(row, **sizes, lookup_depth=reach[0] if reach else None)

    def planned_tree(self, draft: DraftOptions, quantized_on_cpu: bool) -> AnyShape | None:
        """Return the tree that this row will draft, None for rows that do not draft."""
        if self.kind in ("hf", "gpt-fast", "plain"):
            return None
        if self.kind == "hf-pld":
            return TreeShape(LOOKUP_TOKENS, topk=1, nodes=LOOKUP_TOKENS)
        if self.kind == "ngram":
            from fasteagle.drafting.ngram import NGRAM_TOKENS, NgramDrafter  # needs torch

            return NgramDrafter(draft.lookup_depth or NGRAM_TOKENS).shape
        if self.kind == "lookahead":
            from fasteagle.bench.rivals.lookahead import LOOKAHEAD_SHAPE  # needs torch

            return LOOKAHEAD_SHAPE
        if self.kind == "medusa":
            from fasteagle.bench.rivals.medusa import MEDUSA_SHAPE  # needs torch

            return MEDUSA_SHAPE
        if self.kind == "eagle-static":
            paths = read_tree(Path(draft.tree_file)) if draft.tree_file else PAPER_TREE
            return StaticShape(max(map(len, paths)), None, len(paths))
        return self.draft_options(draft).tree_shape(quantized_on_cpu)


def parse_rows(names: Iterable[str], draft: DraftOptions) -> tuple[RowSpec, ...]:
    """Return the rows of a run; raise `FasteagleError` for unknown rows or an unfit `draft`."""
    rows = tuple(map(RowSpec.parse, names))
    for row in rows:
        row.draft_options(draft)
    return rows


def check_tau(tau: float, row: RowSpec, tree: AnyShape) -> None:
    """Raise `FasteagleError` unless the row's tree can give `tau` tokens a cycle."""
    if not 1 <= tau <= tree.depth + 1:
        raise FasteagleError(
            f"tau {tau:g} is out of range for {row}: a tree of depth {tree.depth} gives 1 .. "
            f"{tree.depth + 1} tokens a cycle: change it or --tree-depth"
        )
