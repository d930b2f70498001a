"""Choose how a quantized product of a few rows is cut into programs, by its predicted time.

The time is predicted from a few numbers of the GPU. It decides the split along K, always for 16
rows, because the split decides the order of sums, which must not depend on the rows of a product.
This module needs no Triton.

Shapes: M rows of x, N outputs, K inputs.
"""

from __future__ import annotations

import dataclasses
import functools

from fasteagle.quant.interleaved import BLOCK_N, Layout

ROW_BLOCKS = (16, 32)  # 16 is the least that a tensor core takes; 64 spills registers
SHARED_BYTES = 100 * 1024  # shared memory of a consumer GPU's multiprocessor
OWN_BYTES = 1024  # shared memory that each program uses in addition to its buffers
MOST_RESIDENT = 3  # programs of 128 threads with up to 170 registers
MOST_STAGES = 4
DESIGN_ROWS = 16  # rows of the pass that the split is best for


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Cut of a product; only the split can change a result, so it must not depend on rows."""

    block_m: int
    n_blocks: int  # blocks of rows
    split: int  # parts along K
    n_stages: int  # stages of the loop's pipeline
    resident: int  # programs that a multiprocessor holds at once


@dataclasses.dataclass(frozen=True)
class Card:
    """GPU data for the prediction of times; all but the first two have assumed defaults."""

    n_sm: int
    gb_s: float  # memory bandwidth by the data sheet, 1e9 bytes/s
    ghz: float = 1.695
    reach: float = 0.93  # share of the bandwidth that a kernel reaches that only reads
    latency_us: float = 0.8  # from the request of a tile to its arrival, under load
    launch_us: float = 1.1  # from the end of a graph's node to the first request of the next node
    cache_gb_s: float = 2000.0  # bandwidth of the L2 cache
    macs_fp32: int = 256  # per multiprocessor and clock: 16-bit products, fp32 accumulation
    macs_fp16: int = 512
    instructions_per_weight: float = 2.6  # per lane at 16 rows, counted in the machine code
    lanes: int = 128
    more_resident: int = 0  # programs of a multiprocessor, beyond those of a consumer GPU's

    @classmethod
    def of(cls, n_sm: int, capability: tuple[int, int]) -> Card:
        """Return a GPU of `n_sm` multiprocessors by the nearest architecture in `BY_CAPABILITY`.

        Nothing is measured or configured, so that the split of a weight, and with it the order of
        its sums, is the same in every process on a device.
        """
        known = max((c for c in BY_CAPABILITY if c <= capability), default=min(BY_CAPABILITY))
        like = BY_CAPABILITY[known]
        return dataclasses.replace(like, n_sm=n_sm, gb_s=like.gb_s / like.n_sm * n_sm)


# From data sheets. Only GeForce cards halve the rate for fp32 accumulation, and there only the LM
# head uses it, which is bound by memory: all predictions take the rate of fp16 accumulation.
BY_CAPABILITY = {
    (8, 0): Card(108, 1935.0, ghz=1.41, cache_gb_s=4000.0, macs_fp32=1024, macs_fp16=1024),  # A100
    (8, 6): Card(82, 936.0),  # RTX 3090
    (8, 9): Card(128, 1008.0, ghz=2.52, cache_gb_s=4000.0),  # RTX 4090
    # H100: `mma.sync`, which Triton's products of 16 rows are, runs at half the rate of `wgmma`.
    # Measured on an H200: a multiprocessor takes 690 clocks for a tile of 4 bits, as for 5.4
    # instructions a weight, because its shared memory is busy; the latency; programs that fit.
    (9, 0): Card(
        132,
        3350.0,
        ghz=1.755,
        latency_us=1.1,
        cache_gb_s=5500.0,
        macs_fp32=1024,
        macs_fp16=1024,
        instructions_per_weight=5.4,
        more_resident=2,
    ),
    (12, 0): Card(170, 1792.0, ghz=2.4, cache_gb_s=6000.0),  # RTX 5090
}


@functools.cache
def tiling(layout: Layout, N: int, K: int, rows: int, card: Card) -> Tiling:
    """Return the tiling for `rows` rows of x with a weight [N, K]; called at every launch.

    Rows are cut into narrow blocks or wide ones, whichever is predicted faster.
    """
    split = split_k(layout, N, K, card)
    cuts = [cut_rows(layout, rows, block_m, split) for block_m in ROW_BLOCKS]
    return min(cuts, key=lambda cut: microseconds(cut, layout, N, K, rows, card, fp16=True))


def cut_rows(layout: Layout, rows: int, block_m: int, split: int) -> Tiling:
    """Return the tiling with this block of rows and this split."""
    stage = weight_bytes(layout) + 2 * block_m * layout.tile
    resident = MOST_RESIDENT
    while resident > 2 and (SHARED_BYTES // resident - OWN_BYTES) < 2 * stage:
        resident -= 1
    # One stage needs no buffer; at least two have one, or loads would wait for products.
    buffers = max(2, (SHARED_BYTES // resident - OWN_BYTES) // stage)
    return Tiling(block_m, -(-rows // block_m), split, min(MOST_STAGES, buffers + 1), resident)


def weight_bytes(layout: Layout) -> int:
    """Return the bytes of a tile for one block of columns, group parameters included."""
    groups = layout.tile // layout.group_size if layout.group_size else 0
    each = 4 if layout.bits == 4 else 2
    return BLOCK_N * (layout.tile * layout.bits // 8 + each * groups)


@functools.cache
def split_k(layout: Layout, N: int, K: int, card: Card) -> int:
    """Return the number of parts of K with the shortest predicted time.

    Few programs count as somewhat slower, because the prediction assumes that they hide all
    latencies.
    """
    tiles = -(-K // layout.tile)

    def predicted(split: int) -> float:
        cut = cut_rows(layout, DESIGN_ROWS, DESIGN_ROWS, split)
        few = -(-N // BLOCK_N) * split < 1.5 * card.n_sm
        time = microseconds(cut, layout, N, K, DESIGN_ROWS, card, fp16=True)
        return time * (1.05 if few else 1.0)

    return min(range(1, max(1, tiles // 4) + 1), key=predicted)


def microseconds(
    cut: Tiling, layout: Layout, N: int, K: int, rows: int, card: Card, fp16: bool
) -> float:
    """Predict the time of one product: waves of programs, then the partial sums in the cache.

    A wave takes, for each tile of its programs, the longest of: the memory's and the cache's time
    for all tiles in flight, a request's latency shared by the pipeline's buffers, and the
    arithmetic of the busiest multiprocessor. Row blocks read the same weights, the first one from
    memory and the others from the L2 cache.
    """
    columns, tiles = -(-N // BLOCK_N), -(-K // layout.tile)
    per_program = -(-tiles // cut.split)
    programs = columns * cut.split * cut.n_blocks
    total = card.launch_us + card.latency_us
    while programs > 0:
        active = min(programs, card.n_sm * (cut.resident + card.more_resident))
        total += per_program * _tile_us(cut, layout, active, card, fp16)
        programs -= active
    partial_bytes = 4.0 * rows * N * (1 if cut.split == 1 else 2 * cut.split)
    return total + partial_bytes / (1e3 * card.cache_gb_s)


def _tile_us(cut: Tiling, layout: Layout, active: int, card: Card, fp16: bool) -> float:
    """Predict the time of one tile of each program, in a wave of `active` programs."""
    weights = layout.tile * BLOCK_N
    memory = weight_bytes(layout) * active / cut.n_blocks / (1e3 * card.gb_s * card.reach)
    tile_bytes = weight_bytes(layout) + 2 * cut.block_m * layout.tile
    cache = tile_bytes * active / (1e3 * card.cache_gb_s)
    latency = card.latency_us / (cut.n_stages - 1)
    macs = card.macs_fp16 if fp16 else card.macs_fp32
    products = cut.block_m * weights / macs
    issue = weights * card.instructions_per_weight / card.lanes
    arithmetic = -(-active // card.n_sm) * max(products, issue) / (1e3 * card.ghz)
    return max(memory, cache, latency, arithmetic)
