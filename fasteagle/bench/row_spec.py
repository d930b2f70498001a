"""Which tree a benchmark row drafts: planned from its options, or read off its drafter.

Needs no torch until a static tree is asked for.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from fasteagle.errors import FasteagleError
from fasteagle.options import DraftOptions

if TYPE_CHECKING:
    from fasteagle.drafting.base import Drafter


@dataclasses.dataclass(frozen=True)
class TreeSize:
    """A draft tree in three numbers; `nodes` leave the root out, `topk` is None where it varies."""

    depth: int
    topk: int | None
    nodes: int

    @property
    def rows(self) -> int:
        """Rows of the verify pass, root included."""
        return self.nodes + 1

    def __str__(self) -> str:
        return f"{self.depth}, {self.topk or '-'}, {self.nodes}"


ROW_NAMES = ("hf", "hf-pld", "plain", "eagle", "eagle-static", "eagle-chain", "ngram")
SIZED = "eagle@"  # a row with a tree of its own: eagle@DEPTH/TOPK/NODES


def is_sized(row: str) -> bool:
    return row.startswith(SIZED)


def draft_of(row: str, draft: DraftOptions) -> DraftOptions:
    """`draft` as row `row` takes it. Raises `FasteagleError` for sizes that are not three."""
    if row in ("hf", "hf-pld", "plain"):
        return draft
    if is_sized(row):
        sizes = row.removeprefix(SIZED).split("/")
        if len(sizes) != 3 or not all(size.isascii() and size.isdigit() for size in sizes):
            raise FasteagleError(f"row {row!r}: use {SIZED}DEPTH/TOPK/NODES, like eagle@3/3/8")
        depth, topk, nodes = map(int, sizes)
        return dataclasses.replace(
            draft,
            drafter="eagle",
            tree_depth=depth,
            tree_topk=topk,
            tree_nodes=nodes,
            tree_file=None,
            verify="match",
        )
    tree_file = draft.tree_file if row == "eagle-static" else None
    verify = draft.verify if row in ("eagle-static", "eagle-chain") else "match"
    return dataclasses.replace(draft, drafter=row, tree_file=tree_file, verify=verify)


def planned_tree(row: str, draft: DraftOptions, quantized_on_cpu: bool) -> TreeSize | None:
    """The tree that row `row` will draft, None for rows that do not draft."""
    if row in ("hf", "plain"):
        return None
    if row == "hf-pld":
        from fasteagle.bench.hf import LOOKUP_TOKENS

        return TreeSize(LOOKUP_TOKENS, 1, LOOKUP_TOKENS)
    if row == "ngram":
        from fasteagle.drafting.ngram import NgramDrafter

        return used_tree(NgramDrafter())
    depth, topk, nodes = draft_of(row, draft).sizes(quantized_on_cpu)
    if row == "eagle-chain":
        return TreeSize(depth, 1, depth)
    if row == "eagle-static":
        from fasteagle.loading.find_head import read_tree
        from fasteagle.tree import PAPER_TREE

        paths = read_tree(Path(draft.tree_file)) if draft.tree_file else PAPER_TREE
        return TreeSize(max(map(len, paths)), None, len(paths))
    return TreeSize(depth, topk, nodes)


def used_tree(drafter: Drafter | None) -> TreeSize | None:
    """The tree that `drafter` proposes."""
    if drafter is None:
        return None
    nodes = drafter.rows - 1
    shape = getattr(drafter, "shape", None)
    topk = 1 if nodes == drafter.depth else getattr(shape, "topk", None)
    return TreeSize(drafter.depth, topk, nodes)
