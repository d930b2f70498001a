"""Predicted time of one captured cycle on a card, term by term, from the kernels' own tiling.

The parts are those of `roofline`. Here every product is cut as the kernels cut it, and every launch
costs, so that a first measurement shows which term was wrong.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from fasteagle.bench.roofline import DEVICES, FINISH_SMALL, Part, Storage, draft_parts, target_parts
from fasteagle.config import HeadConfig, ModelConfig
from fasteagle.errors import FasteagleError
from fasteagle.quant.interleaved import Layout, layout_for
from fasteagle.quant.scheme import Scheme
from fasteagle.quant.tiling import BLOCK_N, BY_CAPABILITY, Card, microseconds, tiling, weight_bytes
from fasteagle.shapes import TreeShape
from fasteagle.tables import markdown_table

CARDS = {
    "3090": Card(82, 936.0),
    "3090ti": Card(84, 1008.0, ghz=1.86),
    "4090": Card(128, 1008.0, ghz=2.52, cache_gb_s=4000.0),
    # The same chip with faster memory, and fp32 accumulation, which is no slower there.
    **{
        name: dataclasses.replace(BY_CAPABILITY[9, 0], gb_s=float(DEVICES[name].gb_s))
        for name in ("h100", "h200")
    },
}
SMALL_US = 3.0  # of a launch that does nearly nothing; 2.5 to 3.5 are seen in captured graphs
SPLIT_KEYS = 256  # keys of a split of attention
RESIDENT = 3  # programs of the kernel that adds up splits, on a multiprocessor
COUNTS = (1, 8, 16, 32, 64)  # rows of the table of products


@dataclasses.dataclass(frozen=True)
class CycleModel:
    """One model on one card with `context` cached positions; `fp16` means fp16 accumulation."""

    card: Card
    config: ModelConfig
    scheme: Scheme
    context: int = 1024
    fp16: bool = True

    @property
    def storage(self) -> Storage:
        return Storage.of(self.scheme)

    def us(self, part: Part) -> float:
        """Return the microseconds of all launches of a part."""
        if part.block is not None:
            return self._attention_us(part, part.block)
        return part.launches * (self.product_us(part) if part.N else SMALL_US)

    def product_us(self, part: Part) -> float:
        """Return the microseconds of one launch."""
        layout, is_head = self._layout(part), "LM head" in part.name
        cut = tiling(layout, part.N, part.K, part.rows, self.card)
        fp16 = self.fp16 and not is_head
        return microseconds(cut, layout, part.N, part.K, part.rows, self.card, fp16)

    def share(self, part: Part) -> float:
        """Return the share of the data sheet's bandwidth that a product reaches."""
        layout = self._layout(part)
        n_bytes = weight_bytes(layout) * -(-part.N // BLOCK_N) * -(-part.K // layout.tile)
        return n_bytes / self.product_us(part) / (1e3 * self.card.gb_s)

    def _layout(self, part: Part) -> Layout:
        if "LM head" in part.name:
            return layout_for(8, part.K, part.K)
        return layout_for(self.scheme.bits, self.scheme.group_size or part.K, part.K)

    def _attention_us(self, part: Part, config: ModelConfig) -> float:
        """Return the microseconds of attention: a block launches splits of keys, then their sum.

        The cache is read once, the splits' states through the L2 cache, as are the partial sums of
        the queries by every split. The second launch waits for one split after the other.
        """
        card, size = self.card, part.rows * config.n_head
        layout = layout_for(self.scheme.bits, self.scheme.group_size or config.dim, config.dim)
        n_parts = tiling(layout, config.qkv_dim, config.dim, part.rows, card).split
        splits = -(-self.context // SPLIT_KEYS) + 1  # the tree's own is the last
        states = (8.0 + 4.0 * n_parts) * size * config.head_dim * splits
        read = part.n_bytes / config.n_layer / (card.gb_s * card.reach) + states / card.cache_gb_s
        waves = max(1.0, size / (RESIDENT * card.n_sm))
        waiting = (1 + waves * splits) * card.latency_us
        return config.n_layer * (2 * card.launch_us + waiting + read / 1e3)

    def target(self, rows: int) -> list[Part]:
        return target_parts(self.config, self.storage, rows, self.context)

    def cycle(self, head: HeadConfig, tree: TreeShape) -> list[Part]:
        """Return the parts of a greedy cycle with a dynamic tree."""
        drafting = draft_parts(head, self.storage, tree, self.context)
        finish = Part("accept and commit", FINISH_SMALL)
        return [*self.target(tree.rows), *drafting, finish]

    def ms(self, parts: Sequence[Part]) -> float:
        return sum(map(self.us, parts)) / 1e3

    def plain_ms(self) -> float:
        """Return the milliseconds of a plain cycle."""
        return self.ms([*self.target(1), Part("commit", FINISH_SMALL)])


def card_named(name: str) -> Card:
    """Return the card called `name`; raise `FasteagleError` if it is not in the table."""
    if name not in CARDS:
        raise FasteagleError(f"terms of a cycle are predicted for {', '.join(CARDS)}, not {name!r}")
    return CARDS[name]


def report(model: CycleModel, head: HeadConfig, tree: TreeShape, tau: float) -> str:
    """Return two Markdown tables (products by rows, terms of a cycle) and the predicted speed."""
    columns = zip(*([p for p in model.target(T) if p.N] for T in COUNTS), strict=True)
    products = [
        (
            *(f"{same[0].N} x {same[0].K}", f"{same[0].launches}"),
            *(f"{model.product_us(p):.1f} us, {model.share(p):.0%}" for p in same),
        )
        for same in columns
    ]
    parts = model.cycle(head, tree)
    terms = []
    for name in dict.fromkeys(part.name for part in parts):
        same = [part for part in parts if part.name == name]
        launches = sum(part.launches for part in same)
        numbers = f"{sum(p.n_bytes for p in same) / 1e6:,.0f}", f"{model.ms(same):.2f}"
        terms.append((name, f"{launches}", *numbers))
    total, launches = model.ms(parts), sum(part.launches for part in parts)
    read = sum(part.n_bytes for part in parts)
    terms.append((f"cycle, tree {tree}", f"{launches}", f"{read / 1e6:,.0f}", f"{total:.2f}"))
    rates = (
        f"{1e3 * tau / total:.0f} tok/s at tau {tau:g}, plain {1e3 / model.plain_ms():.0f} tok/s"
    )
    tables = (
        markdown_table(("N x K", "launches", *(f"T = {T}" for T in COUNTS)), products),
        markdown_table(("term", "launches", "MB", "ms"), terms),
        f"predicted: {rates}, {model.context:,} positions in the cache",
    )
    return "\n\n".join(tables)
