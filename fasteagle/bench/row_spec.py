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
RIVALS = ("lookahead", "medusa")  # which only the benchmark has
ROW_NAMES = (
    *("hf", "hf-pld", "gpt-fast", "plain", "eagle", "fused", "eagle-static", "eagle-chain"),
    *("ngram", "model"),
    *RIVALS,
)
_SIZED = re.compile(r"(eagle|fused)@([0-9]+)/([0-9]+)/([0-9]+)(?:/([0-9]+))?")


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
        text, equals, head = text.partition("=")
        if equals:
            spec = RowSpec.parse(text)
            if not spec.has_head:
                raise FasteagleError(f"row {text}={head}: {text} has no draft head: drop ={head}")
            if not head:
                raise FasteagleError(f"row {text}=: name the draft head behind the =")
            return dataclasses.replace(spec, head=head)
        if text in ROW_NAMES:
            return RowSpec(text)
        kind = text.split("@")[0]
        if kind == text or kind not in ("eagle", "fused"):
            raise FasteagleError(f"unknown row {text!r}: use {', '.join(ROW_NAMES)}")
        match = _SIZED.fullmatch(text)
        sizes = [] if match is None else [int(size) for size in match.groups()[1:] if size]
        if kind == "eagle" and len(sizes) == 3:
            return RowSpec(kind, TreeShape(*sizes))
        if kind == "fused" and len(sizes) == 4:
            return RowSpec(kind, FusedShape(*sizes))
        if kind == "eagle":
            example = RowSpec(kind, DEFAULT_TREE).label
            raise FasteagleError(f"row {text!r}: use eagle@DEPTH/TOPK/NODES, like {example}")
        raise FasteagleError(
            f"row {text!r}: use fused@DEPTH/TOPK/NODES/LOOKUP-DEPTH, like fused@3/3/8/8"
        )

    @property
    def label(self) -> str:
        """Name that `parse` reads."""
        sizes = () if self.shape is None else dataclasses.astuple(self.shape)
        tree = "@" + "/".join(map(str, sizes)) if sizes else ""
        return f"{self.kind}{tree}" + ("" if self.head is None else f"={self.head}")

    def __str__(self) -> str:
        return self.label

    @property
    def is_hf(self) -> bool:
        """Return whether transformers decodes this row, which runs dense weights only."""
        return self.kind in ("hf", "hf-pld")

    @property
    def is_gpt_fast(self) -> bool:
        """Return whether torchao's int4 kernels decode this row, in another process."""
        return self.kind == "gpt-fast"

    @property
    def has_own_weights(self) -> bool:
        """Return whether this row needs a second copy of the weights."""
        return self.is_hf or self.is_gpt_fast

    @property
    def looks_up(self) -> bool:
        """Return whether transformers drafts by prompt lookup."""
        return self.kind == "hf-pld"

    @property
    def looks_up_files(self) -> bool:
        """Return whether the files of `--lookup` are searched."""
        return self.kind in ("fused", "ngram")

    @property
    def is_plain(self) -> bool:
        return self.kind == "plain"

    @property
    def is_rival(self) -> bool:
        """Return whether only the benchmark has this row's drafter."""
        return self.kind in RIVALS

    @property
    def has_head(self) -> bool:
        """Return whether this row drafts with a draft head."""
        return self.kind in ("eagle", "fused", "eagle-static", "eagle-chain")

    def draft_options(self, draft: DraftOptions) -> DraftOptions:
        """Return the draft options of this row, made from `draft`."""
        if self.has_own_weights or self.is_plain or self.is_rival:
            return draft
        if self.kind == "model":
            usual = dataclasses.replace(draft, head=None, tree_file=None, lookup=())
            return dataclasses.replace(usual, drafter="model", lookup_depth=None, verify="match")
        draft = dataclasses.replace(draft, draft_model=None, head=self.head or draft.head)
        if self.shape is not None:
            depth, topk, nodes, *reach = dataclasses.astuple(self.shape)
            return dataclasses.replace(
                draft,
                drafter=self.kind,
                tree_depth=depth,
                tree_topk=topk,
                tree_nodes=nodes,
                lookup=draft.lookup if self.looks_up_files else (),
                lookup_depth=reach[0] if reach else None,
                tree_file=None,
                verify="match",
            )
        return dataclasses.replace(
            draft,
            drafter=self.kind,
            tree_file=draft.tree_file if self.kind == "eagle-static" else None,
            lookup=draft.lookup if self.looks_up_files else (),
            lookup_depth=draft.lookup_depth if self.looks_up_files else None,
            verify=draft.verify if self.kind in ("eagle-static", "eagle-chain") else "match",
        )

    def planned_tree(self, draft: DraftOptions, quantized_on_cpu: bool) -> AnyShape | None:
        """Return the tree that this row will draft, None for rows that do not draft."""
        if self.kind in ("hf", "gpt-fast", "plain"):
            return None
        if self.looks_up:
            return chain_shape(LOOKUP_TOKENS)
        if self.kind == "ngram":
            from fasteagle.drafting.ngram import NGRAM_TOKENS, NgramDrafter  # needs torch

            return NgramDrafter(draft.lookup_depth or NGRAM_TOKENS).shape
        if self.is_rival:
            from fasteagle.bench.rivals import SHAPES  # needs torch

            return SHAPES[self.kind]
        if self.kind == "eagle-static":
            paths = read_tree(Path(draft.tree_file)) if draft.tree_file else PAPER_TREE
            return StaticShape(max(map(len, paths)), None, len(paths))
        return self.draft_options(draft).tree_shape(quantized_on_cpu)


def chain_shape(depth: int) -> TreeShape:
    return TreeShape(depth, topk=1, nodes=depth)


def parse_rows(names: Iterable[str], draft: DraftOptions) -> tuple[RowSpec, ...]:
    """Return the rows of a run; raise `FasteagleError` for unknown rows or an unfit `draft`."""
    rows = tuple(map(RowSpec.parse, names))
    for row in rows:
        row.draft_options(draft)
    return rows
