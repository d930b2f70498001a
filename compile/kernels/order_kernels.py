"""Triton kernels that select the candidates of a dynamic tree and relate its rows.

Each runs as one program. References in torch: `tree.rerank`, `tree.relations`.

Shapes: P candidates, N selected ones, T tree rows (T = N + 1).
"""

# mypy: disallow-untyped-defs=False
# (what Triton compiles has no Python types)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PAIRS = 8192  # pairs of candidates compared at a time: 32 per thread
OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}


def rerank(
    tokens: Tensor,
    scores: Tensor,
    parents: Tensor,
    sources: Tensor | None,
    root: Tensor,
    n_nodes: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return tokens, parents, validity and sources [T] of the tree of the best of P candidates.

    Without `sources` there are none: [0]. See `tree.rerank`; NaN counts as -inf.
    """
    P, device = len(tokens), tokens.device
    T = min(n_nodes, P) + 1
    # Three tensors, not three rows of one: the results of an operator must not share memory.
    sizes = T, T, 0 if sources is None else T
    ids, above, chosen = (torch.empty(n, dtype=torch.int64, device=device) for n in sizes)
    valid = torch.empty(T, dtype=torch.bool, device=device)
    rows = torch.empty(P, dtype=torch.int32, device=device)
    P_PAD = max(16, triton.next_power_of_2(P))
    rerank_kernel[(1,)](
        tokens,
        scores,
        parents,
        sources,
        root,
        ids,
        above,
        valid,
        chosen,
        rows,
        P,
        T,
        SOURCED=sources is not None,
        P_PAD=P_PAD,
        CHUNK=min(P_PAD, PAIRS // P_PAD),
        **OPTIONS,
    )
    return ids, above, valid, chosen


def relations(parents: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return tree_mask [T, T], depths [T] and paths [T, T] of `tree.relations`."""
    T, device = len(parents), parents.device
    mask = torch.empty(T, T, dtype=torch.bool, device=device)
    depths = torch.empty(T, dtype=torch.int64, device=device)
    paths = torch.empty(T, T, dtype=torch.int32, device=device)
    relations_kernel[(1,)](
        parents,
        valid,
        mask,
        depths,
        paths,
        T,
        T_PAD=max(16, triton.next_power_of_2(T)),
        ROUNDS=max(1, (T - 1).bit_length()),
        **OPTIONS,
    )
    return mask, depths, paths


@triton.jit
def _scores(scores_ptr, i, P):
    """Load the scores of candidates `i`; NaN and indices past the last candidate give -inf."""
    scores = tl.load(scores_ptr + i, mask=i < P, other=float("-inf"))
    return tl.where(scores == scores, scores, float("-inf"))


@triton.jit(
    do_not_specialize=["P", "T"],
    # Candidates of one of several texts may begin anywhere.
    do_not_specialize_on_alignment=["tokens_ptr", "scores_ptr", "parents_ptr"],
)
def rerank_kernel(
    tokens_ptr,
    scores_ptr,
    parents_ptr,
    sources_ptr,
    root_ptr,
    out_tokens_ptr,
    out_parents_ptr,
    out_valid_ptr,
    out_sources_ptr,
    rows_ptr,
    P,
    T,
    SOURCED: tl.constexpr,
    P_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Select each candidate that fewer than N others beat; earlier ones beat equal later ones."""
    i = tl.arange(0, P_PAD)
    scores = _scores(scores_ptr, i, P)
    n_better = tl.zeros((P_PAD,), tl.int32)
    for start in range(0, P, CHUNK):
        j = start + tl.arange(0, CHUNK)
        others = _scores(scores_ptr, j, P)[None, :]
        better = (others > scores[:, None]) | (
            (others == scores[:, None]) & (j[None, :] < i[:, None])
        )
        n_better += tl.sum(better.to(tl.int32), 1)
    selected = n_better < T - 1  # all candidates beat what is past them
    row = tl.cumsum(selected.to(tl.int32), 0)  # tree row of each selected candidate; 0 is the root
    tl.store(rows_ptr + i, row, mask=i < P)
    tl.debug_barrier()  # other threads of this program wrote some of the rows
    valid = scores > float("-inf")
    parent = tl.load(parents_ptr + i, mask=i < P, other=-1)
    above = tl.load(rows_ptr + tl.maximum(parent, 0), mask=i < P, other=0).to(tl.int64)
    above = tl.where(valid & (parent >= 0), above, 0)
    token = tl.where(valid, tl.load(tokens_ptr + i, mask=i < P, other=0), 0)
    tl.store(out_tokens_ptr + row, token, mask=selected)
    tl.store(out_parents_ptr + row, above, mask=selected)
    tl.store(out_valid_ptr + row, valid, mask=selected)
    tl.store(out_tokens_ptr, tl.load(root_ptr))
    tl.store(out_parents_ptr, 0)
    tl.store(out_valid_ptr, True)
    if SOURCED:
        sources = tl.load(sources_ptr + i, mask=i < P, other=0)
        tl.store(out_sources_ptr + row, sources, mask=selected)
        tl.store(out_sources_ptr, 0)


@triton.jit(do_not_specialize=["T"])
def relations_kernel(
    parents_ptr,
    valid_ptr,
    mask_ptr,
    depths_ptr,
    paths_ptr,
    T,
    T_PAD: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """Compute the ancestors within 2^n steps by n squarings of the matrix of single steps.

    Products of the matrix count at most T steps, and those of the path table have one term: both
    are exact.
    """
    i = tl.arange(0, T_PAD)
    parents = tl.load(parents_ptr + i, mask=i < T, other=0)
    valid = tl.load(valid_ptr + i, mask=i < T, other=0) != 0
    own = i[:, None] == i[None, :]
    reached = (own | (parents[:, None] == i[None, :])).to(tl.float16)
    for _ in tl.static_range(ROUNDS):
        reached = (tl.dot(reached, reached) > 0).to(tl.float16)
    seen = ((reached > 0) & valid[:, None] & valid[None, :]) | own
    depths = tl.sum(seen.to(tl.int32), 1) - 1
    at_depth = (depths[:, None] == i[None, :]).to(tl.float16)
    paths = tl.dot(tl.where(seen, i[None, :], 0).to(tl.float16), at_depth)
    at = i[:, None] * T + i[None, :]
    real = (i < T)[:, None] & (i < T)[None, :]
    tl.store(mask_ptr + at, seen, mask=real)
    tl.store(depths_ptr + i, depths.to(tl.int64), mask=i < T)
    tl.store(paths_ptr + at, paths.to(tl.int32), mask=real)
