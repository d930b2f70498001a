"""Rows of queries and keys whose RoPE turns adjacent values, in the order of halves.

Models here turn value i of a head with value i + E/2. Where files have the two side by side, their
rows are put into that order when they are read: scores of attention stay what they are.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rope_order(n_rows: int, n_head: int) -> Tensor:
    """Return the order [n_rows] in which rows in pairs are rows in halves."""
    paired = torch.arange(n_rows).view(n_head, n_rows // n_head // 2, 2)
    return paired.transpose(1, 2).reshape(n_rows)
