"""Rows of the benchmark by name: how each decodes, and which tree it drafts. Needs no torch."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path

from fasteagle.errors import FasteagleError
from fasteagle.options import DEFAULT_TREE, DraftOptions
from fasteagle.shapes import PAPER_TREE, AnyShape, StaticShape, TreeShape, read_tree

LOOKUP_TOKENS = 10  # of hf-pld: the value transformers' documentation uses for prompt lookup
ROW_NAMES = ("hf", "hf-pld", "plain", "eagle", "eagle-static", "eagle-chain", "ngram")
_SIZED = re.compile(r"eagle@([0-9]+)/([0-9]+)/([0-9]+)")


@dataclasses.dataclass(frozen=True)
class RowSpec:
    """One way to decode: one of `ROW_NAMES`, or an eagle row with a tree of its own."""

    kind: str
    shape: TreeShape | None = None  # of its own

    @staticmethod
    def parse(text: str) -> RowSpec:
        """From a name, or `eagle@DEPTH/TOPK/NODES`. Raises `FasteagleError` for anything else."""
        if text in ROW_NAMES:
            return RowSpec(text)
        if not text.startswith("eagle@"):
            raise FasteagleError(f"unknown row {text!r}: use {', '.join(ROW_NAMES)}")
        match = _SIZED.fullmatch(text)
        if match is None:
            example = RowSpec("eagle", DEFAULT_TREE).label
            raise FasteagleError(f"row {text!r}: use eagle@DEPTH/TOPK/NODES, like {example}")
        depth, topk, nodes = map(int, match.groups())
        return RowSpec("eagle", TreeShape(depth, topk, nodes))

    @property
    def label(self) -> str:
        """What `parse` reads."""
        if self.shape is None:
            return self.kind
        return f"{self.kind}@{self.shape.depth}/{self.shape.topk}/{self.shape.nodes}"

    def __str__(self) -> str:
        return self.label

    @property
    def is_hf(self) -> bool:
        """Whether transformers decodes it, which runs dense weights only."""
        return self.kind in ("hf", "hf-pld")

    @property
    def looks_up(self) -> bool:
        """Whether transformers drafts by prompt lookup."""
        return self.kind == "hf-pld"

    @property
    def is_plain(self) -> bool:
        return self.kind == "plain"

    @property
    def has_head(self) -> bool:
        """Whether it drafts with a draft head."""
        return self.kind in ("eagle", "eagle-static", "eagle-chain")

    def draft_options(self, draft: DraftOptions) -> DraftOptions:
        """`draft` as this row takes it."""
        if self.is_hf or self.is_plain:
            return draft
        if self.shape is not None:
            return dataclasses.replace(
                draft,
                drafter="eagle",
                tree_depth=self.shape.depth,
                tree_topk=self.shape.topk,
                tree_nodes=self.shape.nodes,
                tree_file=None,
                verify="match",
            )
        tree_file = draft.tree_file if self.kind == "eagle-static" else None
        verify = draft.verify if self.kind in ("eagle-static", "eagle-chain") else "match"
        return dataclasses.replace(draft, drafter=self.kind, tree_file=tree_file, verify=verify)

    def planned_tree(self, draft: DraftOptions, quantized_on_cpu: bool) -> AnyShape | None:
        """The tree that this row will draft, None for rows that do not draft."""
        if self.kind in ("hf", "plain"):
            return None
        if self.looks_up:
            return chain_shape(LOOKUP_TOKENS)
        if self.kind == "ngram":
            from fasteagle.drafting.ngram import NgramDrafter  # needs torch

            return NgramDrafter().shape
        if self.kind == "eagle-static":
            paths = read_tree(Path(draft.tree_file)) if draft.tree_file else PAPER_TREE
            return StaticShape(max(map(len, paths)), None, len(paths))
        return self.draft_options(draft).tree_shape(quantized_on_cpu)


def chain_shape(depth: int) -> TreeShape:
    return TreeShape(depth, topk=1, nodes=depth)


def parse_rows(names: Iterable[str], draft: DraftOptions) -> tuple[RowSpec, ...]:
    """The rows of a run. Raises `FasteagleError` for unknown ones, and where `draft` fits none."""
    rows = tuple(map(RowSpec.parse, names))
    for row in rows:
        row.draft_options(draft)
    return rows
