"""GPTQ: 4-bit values chosen so that each linear's outputs, not its weights, stay close.

Columns are rounded one after the other; each error is compensated in the columns not yet rounded,
weighted by the inputs seen (Frantar et al., arXiv 2210.17323, algorithm 1). Inputs come from the
layers quantized so far, on text that the target wrote. One block is in memory at a time.

Shapes: N output rows, K input columns, g group size, L tokens of a text, D model dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fasteagle.quant import packed
from fasteagle.quant.packed import PackedWeight
from fasteagle.quant.params import min_max

DAMPING = 0.01  # of the mean of the Hessian's diagonal
LAZY = 128  # columns rounded before the others are updated; a multiple of every group size


def gptq_weight(weight: Tensor, hessian: Tensor, group_size: int) -> PackedWeight:
    """Quantize [N, K] under the inputs' second moments `hessian` [K, K].

    A group's scale and zero are computed from its columns as corrected for earlier errors.
    """
    N, K = weight.shape
    packed.check_group_size(K, group_size)
    w = weight.float().clone()
    upper = _inverse_root(hessian.clone(), w)
    q = torch.empty(N, K, dtype=torch.uint8, device=w.device)
    scales = torch.empty(N, K // group_size, dtype=torch.bfloat16, device=w.device)
    zeros = torch.empty(N, K // group_size, dtype=torch.int32, device=w.device)
    for begin in range(0, K, LAZY):
        end = min(begin + LAZY, K)
        errors = torch.zeros(N, end - begin, device=w.device)
        for k in range(begin, end):
            if k % group_size == 0:
                g = k // group_size  # a group never extends beyond the lazy block
                found = min_max(w[:, k : k + group_size], group_size)
                scales[:, g : g + 1], zeros[:, g : g + 1] = found
            s, z = scales[:, k // group_size].float(), zeros[:, k // group_size]
            q[:, k] = (w[:, k] / s + z).round().clamp(0, 15)
            error = (w[:, k] - (q[:, k].float() - z) * s) / upper[k, k]
            w[:, k + 1 : end] -= error.unsqueeze(1) * upper[k, k + 1 : end]
            errors[:, k - begin] = error
        w[:, end:] -= errors @ upper[begin:end, end:]
    return packed.int4(q, scales, zeros=zeros)


def _inverse_root(hessian: Tensor, w: Tensor) -> Tensor:
    """Upper Cholesky factor of the damped inverse Hessian [K, K]; zeroes unused columns."""
    diagonal = hessian.diagonal()
    unused = diagonal == 0
    diagonal[unused] = 1
    w[:, unused] = 0
    damping = DAMPING * diagonal.mean()
    while True:
        damped = hessian + damping * torch.eye(len(hessian), device=hessian.device)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            return torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True)
        damping = 10 * damping  # fewer inputs than columns leave it singular
