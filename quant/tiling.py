"""How a product of a few rows with a quantized weight is cut into programs. Needs no Triton.

Shapes: M rows of x, N outputs, K inputs.
"""

from __future__ import annotations

import dataclasses

from fasteagle.quant.planes import BLOCK_N, Layout

ROW_BLOCKS = (16, 32)  # 16 is the least that a tensor core takes; 64 spills registers
SHARED_BYTES = 48 * 1024  # of a program: two fit into the 100 KB of a consumer multiprocessor


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a product is cut. Only the split can change a result, so it must not depend on rows."""

    block_m: int
    n_blocks: int  # of rows
    split: int  # parts along K
    n_stages: int  # of the loop's pipeline


def tiling(layout: Layout, N: int, K: int, rows: int, n_sm: int) -> Tiling:
    """The tiling for `rows` rows of x with a weight [N, K], on `n_sm` multiprocessors."""
    block_m = next((block for block in ROW_BLOCKS if rows <= block), ROW_BLOCKS[-1])
    groups = layout.tile // layout.group_size if layout.group_size else 0
    weight_bytes = BLOCK_N * (layout.tile * layout.bits // 8 + 4 * groups)
    stage_bytes = weight_bytes + 2 * block_m * layout.tile
    n_stages = 4 if 3 * stage_bytes <= SHARED_BYTES else 3  # one stage needs no buffer
    return Tiling(block_m, -(-rows // block_m), split_k(N, K, n_sm), n_stages)


def split_k(N: int, K: int, n_sm: int) -> int:
    """Into how many parts K is split, to keep `n_sm` multiprocessors evenly busy.

    Minimizes waves x (tiles per program, plus 3 for filling the pipeline, plus 2 for writing
    partial sums where K is split). An estimate, not a measurement.
    """
    columns, tiles = -(-N // BLOCK_N), -(-K // 128)

    def cost(split: int) -> int:
        waves = -(-columns * split // (2 * n_sm))
        return waves * (-(-tiles // split) + 3 + 2 * (split > 1))

    return min(range(1, max(1, tiles // 4) + 1), key=cost)
