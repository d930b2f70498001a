"""Predicted time of one captured cycle on a card, term by term, from the kernels' own tiling.

`roofline` gives limits: bytes and FLOPs. Here every product is cut as the kernels cut it, and
every node of the graph costs its launch, so that a first measurement says which term was wrong.
The numbers of nodes are those that `tests/compile/test_cycle_nodes.py` counts.
"""

from __future__ import annotations

import dataclasses

from fasteagle.bench.roofline import DEVICES
from fasteagle.config import HeadConfig, ModelConfig
from fasteagle.errors import FasteagleError
from fasteagle.quant.planes import Layout, layout_for
from fasteagle.quant.scheme import Scheme
from fasteagle.quant.tiling import BLOCK_N, BY_CAPABILITY, Card, microseconds, tiling, weight_bytes
from fasteagle.shapes import TreeShape

CARDS = {
    "3090": Card(82, 936.0),
    "3090ti": Card(84, 1008.0, ghz=1.86),
    "4090": Card(128, 1008.0, ghz=2.52, cache_gb_s=4000.0),
    # The same chip with faster memory; sums are in fp32, which is no slower there.
    **{
        name: dataclasses.replace(BY_CAPABILITY[9, 0], gb_s=float(DEVICES[name].gb_s))
        for name in ("h100", "h200")
    },
}
SMALL_US = 1.8  # of a node that does nearly nothing: its launch, a load, a store
BLOCK_SMALL = 2  # nodes of a block beside products and attention: two norms
VERIFY_SMALL = 4  # before and behind the blocks
FINISH_SMALL = 7  # accept and commit
DRAFT_SMALL, LEVEL_SMALL = 5, 2  # Inductor's and the tree's order: of a tree, of each of its levels
RANKING = 2  # launches over the logits of a level


@dataclasses.dataclass(frozen=True)
class Product:
    """One quantized linear in a pass of `rows` rows."""

    name: str
    N: int
    K: int
    rows: int
    split: int
    us: float
    share: float  # of the data sheet's bandwidth


@dataclasses.dataclass(frozen=True)
class Term:
    """A part of the cycle: its nodes in the graph, and how long they take."""

    name: str
    nodes: int
    ms: float


@dataclasses.dataclass(frozen=True)
class CycleModel:
    """One model on one card; `context` positions in the cache, sums in fp16 where it says so."""

    card: Card
    config: ModelConfig
    scheme: Scheme
    context: int = 1024
    fp16: bool = True

    def product(self, name: str, N: int, K: int, rows: int) -> Product:
        """A linear whose parts the next kernel adds up."""
        layout = self._layout(name, K)
        cut = tiling(layout, N, K, rows, self.card)
        fp16 = self.fp16 and "lm_head" not in name
        us = microseconds(cut, layout, N, K, rows, self.card, fp16)
        n_bytes = weight_bytes(layout) * -(-N // BLOCK_N) * -(-K // layout.tile)
        return Product(name, N, K, rows, cut.split, us, n_bytes / us / (1e3 * self.card.gb_s))

    def block(self, config: ModelConfig, rows: int) -> list[Product]:
        """The linears of one block."""
        D, F = config.dim, config.ffn_dim
        shapes = {
            "qkv": (config.qkv_dim, D),
            "out": (D, config.n_head * config.head_dim),
            "gate_up": (2 * F, D),
            "down": (D, F),
        }
        return [self.product(name, N, K, rows) for name, (N, K) in shapes.items()]

    def lm_head(self, vocab_size: int, rows: int) -> Product:
        return self.product("lm_head", vocab_size, self.config.dim, rows)

    def verify(self, rows: int) -> list[Term]:
        """A pass of the target over `rows` rows."""
        n, products = self.config.n_layer, self.block(self.config, rows)
        alone = sum(product.name == "gate_up" and product.split > 1 for product in products)
        attention = self._attention_us(self.config, rows, products[0].split)
        small = n * (BLOCK_SMALL + alone) + VERIFY_SMALL
        return [
            Term("linears of the blocks", 4 * n, n * sum(p.us for p in products) / 1e3),
            Term("LM head", 1, self.lm_head(self.config.vocab_size, rows).us / 1e3),
            Term("tree attention", 2 * n, n * attention / 1e3),
            Term("norms, rest of the pass", small, small * SMALL_US / 1e3),
        ]

    def draft(self, head: HeadConfig, tree: TreeShape) -> list[Term]:
        """`tree.depth` passes of the draft head: the first over what was committed."""
        D, dim, k = tree.depth, self.config.dim, tree.topk
        us, nodes = 0.0, 0
        for level in range(D):
            rows = tree.depth + 1 if level == 0 else k
            fc = self.product("fc", dim, 2 * dim, rows)
            us += fc.us
            products = self.block(head.block, rows)
            us += sum(p.us for p in products)
            us += self._attention_us(head.block, rows, products[0].split)
            nodes += 1 + 4 + 2
        ranks = D * self.lm_head(head.draft_vocab_size, k).us
        small = D * (BLOCK_SMALL + 1 + LEVEL_SMALL + RANKING) + DRAFT_SMALL
        return [
            Term("draft head", nodes, us / 1e3),
            Term("draft LM head", D, ranks / 1e3),
            Term("rest of drafting", small, small * SMALL_US / 1e3),
        ]

    def cycle(self, head: HeadConfig, tree: TreeShape) -> list[Term]:
        """All of a greedy cycle with a dynamic tree."""
        finish = Term("accept and commit", FINISH_SMALL, FINISH_SMALL * SMALL_US / 1e3)
        return [*self.verify(tree.rows), *self.draft(head, tree), finish]

    def _layout(self, name: str, K: int) -> Layout:
        if name == "lm_head":
            return layout_for(8, K, K)
        return layout_for(self.scheme.bits, self.scheme.group_size or K, K)

    def _attention_us(self, config: ModelConfig, rows: int, n_parts: int) -> float:
        """Two nodes; the cache is read once, its states through the L2 cache.

        So are the `n_parts` partial sums of the queries, by every split: they are rotated there.
        """
        read = config.kv_bytes(self.context, 2) / config.n_layer
        splits = -(-self.context // 256)
        states = (8.0 + 4.0 * n_parts) * rows * config.n_head * config.head_dim * splits
        memory = read / (self.card.gb_s * self.card.reach) + states / self.card.cache_gb_s
        return 2 * SMALL_US + self.card.latency_us + memory / 1e3


def card_named(name: str) -> Card:
    """Raises `FasteagleError` for cards whose multiprocessors are not in the table."""
    if name not in CARDS:
        raise FasteagleError(f"terms of a cycle are predicted for {', '.join(CARDS)}, not {name!r}")
    return CARDS[name]


def lines(model: CycleModel, head: HeadConfig, tree: TreeShape, tau: float) -> list[str]:
    """Two Markdown tables: products by rows, and the terms of a cycle."""
    counts = (1, 8, 16, 32, 64)
    found = ["| linear | N x K | split | " + " | ".join(f"T = {T}" for T in counts) + " |"]
    found.append("|---|---|---|" + "---|" * len(counts))
    by_rows = [
        [*model.block(model.config, T), model.lm_head(model.config.vocab_size, T)] for T in counts
    ]
    for products in zip(*by_rows, strict=True):
        one = products[0]
        cells = " | ".join(f"{p.us:.1f} us, {100 * p.share:.0f} %" for p in products)
        found.append(f"| {one.name} | {one.N} x {one.K} | {one.split} | {cells} |")
    terms = model.cycle(head, tree)
    total, nodes = sum(term.ms for term in terms), sum(term.nodes for term in terms)
    found += ["", "| term | nodes | ms |", "|---|---|---|"]
    found += [f"| {term.name} | {term.nodes} | {term.ms:.2f} |" for term in terms]
    found.append(f"| cycle, tree {tree} | {nodes} | {total:.2f} |")
    plain = sum(term.ms for term in model.verify(1)) + VERIFY_SMALL * SMALL_US / 1e3
    rates = f"{1e3 * tau / total:.0f} tok/s at tau {tau:g}, plain {1e3 / plain:.0f} tok/s"
    return [*found, "", f"predicted: {rates}, {model.context:,} positions in the cache"]
