"""Bytes, FLOPs and launches of a cycle, and the speed that follows from them.

A pass is a list of parts. `limit` takes for each part the longer of reading its weights or cached
keys and values once, and of computing: measured times lie above. `CapturedCycle` predicts the same
parts on a card whose multiprocessors are known: every product is cut as the kernels cut it, every
wave of programs and every step that waits for another one takes its time, and every launch costs.
What no data sheet has is assumed, at three levels. Data-sheet values are here and in
`quant.tiling.BY_CAPABILITY`.

Shapes: N outputs, K inputs.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

from fasteagle.compile.cuda_blocks import rotates
from fasteagle.config import HeadConfig, ModelConfig, MoEConfig
from fasteagle.errors import FasteagleError
from fasteagle.options import RuntimeOptions
from fasteagle.quant.interleaved import BLOCK_N, Layout, layout_for
from fasteagle.quant.scheme import Scheme, parse_scheme
from fasteagle.quant.tiling import BY_CAPABILITY, Card, cut_rows, microseconds, tiling, weight_bytes
from fasteagle.shapes import AnyShape

# Launches of a captured cycle beside products and attention.
BLOCK_SMALL = 2  # norms of a block; before experts the norm is part of the router
ROUTER = 2  # of a layer of experts: norm and scores, then the choice
EXPERT_ROWS = 16  # rows of an expert that one program multiplies
CHOICE_US = 0.16  # of each expert that a row chooses: a maximum over a warp, which the next awaits
HEAD_NORM_US = 0.4  # of attention that norms heads: a step for each halving of their columns
PASS_SMALL = 4  # before and after the blocks
GATHER_SMALL = 1  # of a pass that several sequences share: lays out their rows
COPY_SMALL = 2  # of each of them: logits and features, for its own end
LEVEL_SMALL = 7  # of a drafted level: norms, the tree's order, ranking
DRAFT_SMALL = 5  # of a tree
FINISH_SMALL = 7  # accept and commit
SPLIT_KEYS, STEP_KEYS = 256, 64  # keys of a split of attention, and of one of its steps
RESIDENT = 4  # programs of the kernel that merges splits, on a multiprocessor
MERGED = 16  # splits times query heads of a KV head that a step of it merges


@dataclasses.dataclass(frozen=True)
class Device:
    """Speeds of a device: dense tensor-core rates, without the sparsity data sheets advertise."""

    name: str
    tflops: float  # 16-bit products, fp32 accumulation
    tflops_fp16: float  # the same with fp16 accumulation
    tflops_fp32: float
    card: Card
    gib: int  # memory


def _hopper(gb_s: float) -> Card:
    """Return the one chip of H100 and H200, whose fp32 accumulation is no slower."""
    return dataclasses.replace(BY_CAPABILITY[9, 0], gb_s=gb_s)


DEVICES = {
    "3090": Device("RTX 3090", 71, 142, 35.6, BY_CAPABILITY[8, 6], 24),
    "3090ti": Device("RTX 3090 Ti", 80, 160, 40, Card(84, 1008.0, ghz=1.86), 24),
    "4090": Device("RTX 4090", 165, 330, 82.6, BY_CAPABILITY[8, 9], 24),
    "h100": Device("H100", 989, 989, 67, _hopper(3350.0), 80),
    "h200": Device("H200", 989, 989, 67, _hopper(4800.0), 141),
}

# Devices with similar names but different memory: not in the table.
_OTHER_VARIANTS = re.compile(r"Laptop|Max-Q|PCIe|NVL|MIG|\bD\b")


def device_named(name: str) -> Device:
    """Return the device called `name`, in any case; raise `FasteagleError` with known names."""
    key = name.lower().replace(" ", "").removeprefix("rtx")
    if key not in DEVICES:
        raise FasteagleError(f"device {name!r} is unknown: use {', '.join(DEVICES)}")
    return DEVICES[key]


def device_reported_as(full_name: str) -> Device | None:
    """Return the data sheet for a driver's device name such as `NVIDIA GeForce RTX 3090`."""
    if _OTHER_VARIANTS.search(full_name):
        return None
    longest_first = sorted(DEVICES.values(), key=lambda d: -len(d.name))
    return next((d for d in longest_first if re.search(rf"\b{d.name}\b", full_name)), None)


@dataclasses.dataclass(frozen=True)
class Storage:
    """Format of the weights, None where they are dense, and bytes of a dense or cached value."""

    scheme: Scheme | None = None
    element_bytes: int = 2

    @property
    def linear_bytes(self) -> float:
        return self.element_bytes if self.scheme is None else self.scheme.linear_bytes

    @property
    def head_bytes(self) -> float:
        return self.element_bytes if self.scheme is None else self.scheme.head_bytes

    def pass_bytes(self, config: ModelConfig) -> int:
        """Weight bytes that every pass reads; the embedding's one row per token is not counted.

        Experts are those of one row: more rows read more of them.
        """
        table = config.vocab_size * config.dim
        linears = config.active_linear_params * self.linear_bytes + 4 * config.router_params
        return int(linears + table * self.head_bytes)

    def layout(self, K: int, is_lm_head: bool = False) -> Layout:
        """Return the layout that kernels read a quantized weight in; LM heads are int8."""
        assert self.scheme is not None, "kernels of ours multiply quantized weights"
        if is_lm_head:
            return layout_for(8, K, K)
        return layout_for(self.scheme.bits, self.scheme.group_size or K, K)


def storage_named(name: str, config: ModelConfig) -> Storage:
    """Return the storage of a precision by name, as in `RuntimeOptions.at`; auto has 16 bits.

    "int4" takes the widest groups that fit the model. Raises `FasteagleError` for unknown names.
    """
    options = RuntimeOptions().at(name)
    n_bytes = 4 if options.dtype == "fp32" else 2
    if options.quant is None:
        return Storage(None, n_bytes)
    return Storage(parse_scheme(options.quant, config, options.head_bits), n_bytes)


@dataclasses.dataclass(frozen=True)
class Part:
    """Work of one kind in a cycle; N, K and rows of a product are those of each launch."""

    name: str
    launches: int
    n_bytes: float = 0.0
    flops: float = 0.0
    N: int = 0
    K: int = 0
    rows: int = 0
    block: ModelConfig | None = None  # whose attention it is

    @property
    def is_lm_head(self) -> bool:
        return "LM head" in self.name

    @property
    def is_experts(self) -> bool:
        return "experts" in self.name


@dataclasses.dataclass(frozen=True)
class Workload:
    """Model at one precision with `context` cached positions, whose parts are counted.

    The rows of all sequences share every pass; each reads its own cache.
    """

    config: ModelConfig
    storage: Storage
    context: int
    sequences: int = 1

    def verifying(self, rows: int) -> list[Part]:
        """Return the parts of a target pass over `rows` rows of each sequence."""
        config, rows = self.config, rows * self.sequences
        gather = GATHER_SMALL if self.sequences > 1 else 0
        return [
            *self._linears("linears of the blocks", config, rows),
            self._product("LM head", config.vocab_size, config.dim, rows),
            self._attention("tree attention", config, rows),
            Part("norms, rest of the pass", self._small_launches + PASS_SMALL + gather),
        ]

    @property
    def finishing(self) -> Part:
        """Accept and commit: each of several sequences has its own, and a copy of its output."""
        n = self.sequences
        return Part("accept and commit", n * FINISH_SMALL + (n * COPY_SMALL if n > 1 else 0))

    @property
    def _small_launches(self) -> int:
        """Launches of the blocks that neither multiply nor attend: norms, RoPE where it is one."""
        config = self.config
        each = BLOCK_SMALL + (not _rotates(config))
        with_experts = sum(map(config.has_experts, range(config.n_layer)))
        return config.n_layer * each - with_experts

    def drafting(self, head: HeadConfig, tree: AnyShape) -> list[Part]:
        """Return the parts of drafting for all: a pass of the draft head for every level.

        The first extends by the committed positions, padded to D + 1 rows, with logits for the
        last.
        """
        frontier = tree.topk or -(-tree.nodes // tree.depth)  # static trees: about evenly
        levels = tree.levels
        block, is_eagle3 = head.block, head.eagle3 is not None
        name, parts = "draft head", []
        for level in range(levels):
            each = (frontier, frontier) if level else (tree.depth + 1, 1)
            rows, logits = (n * self.sequences for n in each)
            if level == 0 or not is_eagle3:  # EAGLE-3's later levels read the head's own output
                width = head.feature_dim if is_eagle3 else 2 * block.dim
                parts.append(self._product(name, block.dim, width, rows))
            parts += self._linears(name, block, rows, wide=is_eagle3)
            parts.append(self._attention(name, block, rows))
            parts.append(self._product("draft LM head", head.draft_vocab_size, block.dim, logits))
        return [*parts, Part("rest of drafting", levels * LEVEL_SMALL + DRAFT_SMALL)]

    def _linears(self, name: str, config: ModelConfig, rows: int, wide: bool = False) -> list[Part]:
        """Return the linears of all blocks: q/k/v and gate/up are one product each."""
        D = config.dim
        shapes = (config.qkv_dim, 2 * D if wide else D), (D, config.n_head * config.head_dim)
        parts = [self._product(name, N, K, rows, config.n_layer) for N, K in shapes]
        if config.moe is None:
            return parts + self._mlp(name, D, config.ffn_dim, rows, config.n_layer)
        dense = len(config.dense_blocks)
        parts += self._mlp(name, D, config.ffn_dim, rows, dense) if dense else []
        return parts + self._experts(config, config.moe, rows, config.n_layer - dense)

    def _mlp(self, name: str, D: int, F: int, rows: int, launches: int) -> list[Part]:
        return [self._product(name, N, K, rows, launches) for N, K in ((2 * F, D), (D, F))]

    def _experts(self, config: ModelConfig, moe: MoEConfig, rows: int, launches: int) -> list[Part]:
        """Return routers and experts: each expert that any row takes is read once for all rows.

        One launch has the outputs of all these experts, over the rows that an expert has.
        """
        D, distinct, n_router = config.dim, moe.distinct_experts(rows), config.router_params
        each = -(-rows * moe.top_k // round(distinct))
        parts = [
            Part("routers", ROUTER * launches, 4.0 * n_router, 2.0 * n_router * rows),
            self._product("experts", round(distinct * 2 * moe.ffn_dim), D, each, launches),
            self._product("experts", round(distinct * D), moe.ffn_dim, each, launches),
        ]
        if moe.shared_ffn_dim:
            parts += self._mlp("shared experts", D, moe.shared_ffn_dim, rows, launches)
        return parts

    def _product(self, name: str, N: int, K: int, rows: int, launches: int = 1) -> Part:
        part = Part(name, launches, N=N, K=K, rows=rows)
        each = self.storage.head_bytes if part.is_lm_head else self.storage.linear_bytes
        weights = launches * N * K
        return dataclasses.replace(part, n_bytes=weights * each, flops=2.0 * weights * rows)

    def _attention(self, name: str, config: ModelConfig, rows: int) -> Part:
        """Return attention of all blocks, two launches each: splits of the keys, and their sum."""
        flops = 4.0 * config.n_layer * config.n_head * config.head_dim * self.context * rows
        n_bytes = config.kv_bytes(self.sequences * self.context, self.storage.element_bytes)
        return Part(name, 2 * config.n_layer, n_bytes, flops, rows=rows, block=config)


def limit(
    parts: Iterable[Part], device: Device, element_bytes: int = 2, fp16: bool = False
) -> tuple[float, str]:
    """Return milliseconds of `parts` at a device's speeds, and what bounds most of them.

    16-bit products accumulate in fp16 where `fp16` says so.
    """
    rate = device.tflops_fp16 if fp16 else device.tflops
    if element_bytes > 2:
        rate = device.tflops_fp32
    times = [(part.n_bytes / device.card.gb_s / 1e6, part.flops / rate / 1e9) for part in parts]
    memory, compute = (sum(column) for column in zip(*times, strict=True))
    return sum(map(max, times)), "memory" if memory >= compute else "compute"


@dataclasses.dataclass(frozen=True)
class Outlook:
    """Assumed speed of what no data sheet has, in microseconds but for shares."""

    reach: float  # share of the memory bandwidth that a kernel reaches that only reads
    latency: float  # from the request of a tile to its arrival, under load
    launch: float  # from the end of a graph's node to the first request of the next node
    small: float  # node of a captured graph that does nearly nothing
    cache: float = 1.0  # share of the L2 cache's bandwidth

    def of(self, card: Card) -> Card:
        """Return `card` at these speeds."""
        return dataclasses.replace(
            card,
            reach=self.reach,
            latency_us=self.latency,
            launch_us=self.launch,
            cache_gb_s=card.cache_gb_s * self.cache,
        )


LOW = Outlook(0.80, 1.1, 1.6, 3.5, 0.75)
MID = Outlook(0.87, 0.9, 1.3, 3.0, 0.9)
HIGH = Outlook(0.93, 0.8, 1.1, 2.5)
OUTLOOKS = LOW, MID, HIGH


@dataclasses.dataclass(frozen=True)
class Speeds:
    """Predicted tokens per second of all sequences, and milliseconds of their passes."""

    plain: float
    drafted: float
    cycle_ms: float
    ratio: float  # of a pass over the tree and one over a row


@dataclasses.dataclass(frozen=True)
class CapturedCycle:
    """Predicted times of a captured cycle's parts; `fp16` means fp16 accumulation."""

    card: Card
    work: Workload
    fp16: bool = True
    outlook: Outlook = MID

    def speeds(self, head: HeadConfig, tree: AnyShape, tau: float) -> Speeds:
        """Return the speeds of greedy decoding without drafts, and with `tau` tokens per cycle."""
        work, n = self.work, self.work.sequences
        one, rows = (self.ms(work.verifying(T)) for T in (1, tree.rows))
        rest = self.ms([work.finishing])
        total = rows + self.ms(work.drafting(head, tree)) + rest
        return Speeds(1e3 * n / (one + rest), 1e3 * n * tau / total, total, rows / one)

    def ms(self, parts: Iterable[Part]) -> float:
        return sum(map(self._us, parts)) / 1e3

    def _us(self, part: Part) -> float:
        """Return the microseconds of all launches of a part."""
        if part.block is not None:
            return self._attention_us(part, part.block)
        if part.N:
            return part.launches * self.product_us(part)
        read = part.n_bytes / (1e3 * self.card.gb_s * self.outlook.reach)
        moe, chosen = self.work.config.moe, 0.0
        if part.name == "routers" and moe is not None:
            chosen = CHOICE_US * moe.top_k * part.launches / ROUTER
        return part.launches * self.outlook.small + read + chosen

    def product_us(self, part: Part) -> float:
        """Return the microseconds of one launch, cut as the kernels cut it.

        Products of experts are not split along K, and first read which expert is theirs. Dense
        products, which a library cuts, take the longer of memory and tensor cores.
        """
        card, fp16 = self.outlook.of(self.card), self.fp16 and not part.is_lm_head
        if self.work.storage.scheme is None:
            weights, macs = part.N * part.K, card.macs_fp16 if fp16 else card.macs_fp32
            memory = self.work.storage.element_bytes * weights / (card.gb_s * card.reach)
            products = weights * part.rows / (card.n_sm * macs * card.ghz)
            return card.launch_us + card.latency_us + max(memory, products) / 1e3
        layout, size = self._layout(part), (part.N, part.K, part.rows)
        if part.is_experts:
            cut = cut_rows(layout, part.rows, EXPERT_ROWS, split=1)
            return card.latency_us + microseconds(cut, layout, *size, card, fp16)
        cut = tiling(layout, *size, self.card)
        return microseconds(cut, layout, *size, card, fp16)

    def share(self, part: Part) -> float:
        """Return the share of the data sheet's bandwidth that a product reaches."""
        layout = self._layout(part)
        n_bytes = weight_bytes(layout) * -(-part.N // BLOCK_N) * -(-part.K // layout.tile)
        return n_bytes / self.product_us(part) / (1e3 * self.card.gb_s)

    def _layout(self, part: Part) -> Layout:
        return self.work.storage.layout(part.K, part.is_lm_head)

    def _attention_us(self, part: Part, config: ModelConfig) -> float:
        """Return the microseconds of attention: a block launches splits of keys, then their sum.

        The cache is read once, the splits' states through the L2 cache, as are the partial sums of
        the queries by every split. The first launch waits for the length of the text, for queries
        and for one step of keys after the other; the second for a row's place in the tree, for
        states, a number of splits at a time, and for the tree's own keys.
        """
        card, size = self.outlook.of(self.card), part.rows * config.n_head
        n_parts = 1
        if self.work.storage.scheme is not None:
            layout = self.work.storage.layout(config.dim)
            n_parts = tiling(layout, config.qkv_dim, config.dim, part.rows, self.card).split
        splits = -(-self.work.context // SPLIT_KEYS) + 1  # the tree's own is the last
        states = (8.0 + 4.0 * n_parts) * size * config.head_dim * splits
        read = part.n_bytes / config.n_layer / (card.gb_s * card.reach) + states / card.cache_gb_s
        group = config.n_head // config.n_kv_head
        heads = min(MERGED, 1 << (group - 1).bit_length())
        steps = 1 + -(-splits * heads // MERGED)
        programs = part.rows * config.n_kv_head * -(-group // MERGED)
        waves = max(1.0, programs / (RESIDENT * card.n_sm))
        keys = -(-min(self.work.context, SPLIT_KEYS) // STEP_KEYS)
        waiting = (3 + keys + waves * steps) * card.latency_us
        norms = HEAD_NORM_US if config.qk_norm and _rotates(config) else 0.0
        return config.n_layer * (2 * card.launch_us + waiting + norms + read / 1e3)


def _rotates(config: ModelConfig) -> bool:
    """Return whether attention norms and rotates its heads itself."""
    return not config.qk_norm_whole and rotates(config.head_dim, config.qk_norm)
