"""Sizes of draft trees, and static trees as lists of paths. Needs no torch."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from fasteagle.config_fields import parse_json_file
from fasteagle.errors import FasteagleError, counted, reason_of

MOST_NODES = 4096  # of a tree that a person gives
MAX_DEPTH = 63  # longest path of a tree, and most tokens in a row that are looked up


class Shape:
    """Base class of shapes: a pass verifies `nodes` drafted tokens and the root."""

    @property
    def rows(self) -> int:
        """Largest number of rows of the verify pass, root included."""
        return self.nodes + 1  # type: ignore[attr-defined]

    @property
    def size(self) -> str:
        """Number of drafted tokens a pass, for messages."""
        return counted(self.nodes, "node")  # type: ignore[attr-defined]


class HeadShape(Shape):
    """Base class of shapes whose candidates are all the draft head's."""

    @property
    def levels(self) -> int:
        """Number of levels that the draft head expands."""
        return self.depth  # type: ignore[attr-defined]


def check_rows(rows: int, most: int | None) -> None:
    """Raise `FasteagleError` for more rows than the `most_rows` of a backend."""
    if most is not None and rows > most:
        raise FasteagleError(
            f"tree-nodes {rows - 1:,} is out of range: use at most {most - 1}, because passes of "
            f"more than {most} rows round differently from plain decoding here"
        )


def head_pool(topk: int, levels: int) -> int:
    """Return the candidates of a draft head: k, and k children of k nodes on every further level.

    Without levels there are none.
    """
    return topk + (levels - 1) * topk**2 if levels else 0


def _check_sizes(nodes: int, depth: int, pool: int, sizes: str) -> None:
    """Raise `FasteagleError` unless a tree of `depth` levels can have so many nodes."""
    if nodes > pool:
        raise FasteagleError(
            f"tree-nodes {nodes} is more than the {pool} candidates that {sizes}: use fewer"
        )
    if nodes < depth:
        raise FasteagleError(
            f"tree-nodes {nodes} cannot hold a path of --tree-depth {depth}: raise the former, or "
            "lower the latter"
        )


@dataclasses.dataclass(frozen=True)
class TreeShape(HeadShape):
    """Shape of a dynamic tree: `depth` levels expand `topk` nodes each, `nodes` are verified.

    A chain has `topk` 1. Raises `FasteagleError` for sizes that do not fit each other.
    """

    depth: int = 3
    topk: int = 3
    nodes: int = 8

    def __post_init__(self) -> None:
        for name in ("depth", "topk", "nodes"):
            if getattr(self, name) < 1:
                raise FasteagleError(f"tree-{name} {getattr(self, name)} is out of range: use >= 1")
        sizes = f"--tree-depth {self.depth} and --tree-topk {self.topk} yield"
        _check_sizes(self.nodes, self.depth, self.pool, sizes)

    @property
    def pool(self) -> int:
        """Number of candidates."""
        return head_pool(self.topk, self.depth)

    def __str__(self) -> str:
        return f"{self.depth}, {self.topk}, {self.nodes}"


@dataclasses.dataclass(frozen=True)
class GatedChain(HeadShape):
    """Confidence-gated chain: at most `depth` tokens, ended by low path probability.

    The limits are `drafting.thresholds.Thresholds`. The host must read each level's result, which
    costs nothing on a CPU.
    """

    depth: int

    @property
    def topk(self) -> int:
        return 1

    @property
    def nodes(self) -> int:
        return self.depth

    @property
    def size(self) -> str:
        return f"chains of {self}"

    def __str__(self) -> str:
        return f"1 to {self.depth}"


@dataclasses.dataclass(frozen=True)
class StaticShape(HeadShape):
    """Shape of a tree that is fixed beforehand: `nodes` on `depth` levels of varying widths."""

    depth: int
    topk: None
    nodes: int

    def __str__(self) -> str:
        return f"{self.depth}, -, {self.nodes}"


@dataclasses.dataclass(frozen=True)
class FusedShape(Shape):
    """Shape of a tree with candidates of a draft head and of the n-gram lookup.

    The draft head gives `levels` of `topk` nodes each, the lookup chains of `reach` tokens; the
    `nodes` best of both are verified. Without `levels` the draft head is not run. Raises
    `FasteagleError` for sizes that do not fit each other.
    """

    levels: int
    topk: int
    nodes: int
    reach: int

    def __post_init__(self) -> None:
        if self.levels:
            TreeShape(self.levels, self.topk, self.levels)  # checks them
        if self.nodes < 1:
            raise FasteagleError(f"tree-nodes {self.nodes} is out of range: use >= 1")
        if not 1 <= self.reach <= MAX_DEPTH:
            raise FasteagleError(f"lookup-depth {self.reach} is out of range: use 1 .. {MAX_DEPTH}")
        sizes = (
            f"--tree-depth {self.levels}, --tree-topk {self.topk} and --lookup-depth {self.reach} "
            "yield"
        )
        _check_sizes(self.nodes, self.levels, self.pool, sizes)

    @property
    def head_pool(self) -> int:
        """Number of candidates of the draft head."""
        return head_pool(self.topk, self.levels)

    @property
    def pool(self) -> int:
        """Smallest number of candidates of both sources."""
        return self.head_pool + self.reach

    @property
    def depth(self) -> int:
        """Depth of the longest path."""
        return min(self.nodes, max(self.levels, self.reach))

    def __str__(self) -> str:
        return f"{self.levels}, {self.topk}, {self.nodes} + {self.reach}"


AnyShape = TreeShape | GatedChain | StaticShape | FusedShape


def shape_of(
    *,
    topk: int | None = None,
    nodes: int | None = None,
    depth: int = 0,
    levels: int | None = None,
    reach: int | None = None,
) -> AnyShape:
    """Return a shape from its sizes, as files of records have them.

    `topk` is None for static trees; gated chains have only a depth.
    """
    if nodes is None:
        return GatedChain(depth)
    if topk is None:
        return StaticShape(depth, None, nodes)
    if levels is None or reach is None:
        return TreeShape(depth, topk, nodes)
    return FusedShape(levels, topk, nodes, reach)


Paths = tuple[tuple[int, ...], ...]  # a static tree: child ranks from the root, node by node


def read_tree(path: Path) -> Paths:
    """Read a static tree from JSON: a list of child-rank paths, `[[0], [1], [0, 0]]`."""
    try:
        raw = parse_json_file(path)
        if not all(type(rank) is int for node in raw for rank in node):
            raise ValueError("ranks must be integers")
        if len(raw) > MOST_NODES or any(len(node) > MAX_DEPTH for node in raw):
            raise ValueError(f"at most {MOST_NODES:,} paths of {MAX_DEPTH} ranks each")
        return tuple(tuple(node) for node in raw)
    except (OSError, TypeError, ValueError) as error:
        reason = reason_of(error)
        raise FasteagleError(f"tree file {path}: expected a list of paths ({reason})") from error


# The 25 nodes of EAGLE-1's static tree as child ranks from the root (paper, figure 7).
PAPER_TREE: Paths = (
    *((0,), (1,), (2,), (3,)),
    *((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)),
    *((0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0)),
    *((0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2)),
    *((0, 0, 0, 0, 0), (0, 0, 0, 0, 1)),
)
