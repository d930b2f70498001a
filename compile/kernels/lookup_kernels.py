"""Triton kernels that look up a chain of tokens in the text, and merge it into a draft tree.

References in torch: `Lookup.propose` without a corpus, `tree.fuse`. Programs search the text in
chunks, another one learns and copies, and one merges.

Shapes: N slots of the text, C chunks, R looked-up tokens, E candidates of a draft head, k of its
first level.
"""

# mypy: disallow-untyped-defs=False
# (what Triton compiles has no Python types)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fasteagle.drafting.lookup import CLASSES, LONGEST_MATCH, MEMORY, NOTHING, RAREST
from fasteagle.shapes import MAX_DEPTH
from fasteagle.tree import HEAD, LOOKUP

CHUNK = 2048  # slots of the text that a program compares
OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}
FEW = {"num_warps": 4, "enable_fp_fusion": False}


def look_up(
    text: Tensor, last: Tensor, table: Tensor, recent: Tensor, reach: int
) -> tuple[Tensor, Tensor]:
    """Return tokens [R] after the text's last one, at `last` (0-d), and their log-probabilities.

    `table` and `recent` are a lookup's `table` and `last`, which learn. See `Lookup.propose`.
    """
    tokens = torch.empty(reach, dtype=torch.int64, device=text.device)
    logp = torch.empty(reach, dtype=torch.float32, device=text.device)
    N, C = len(text), triton.cdiv(len(text), CHUNK)
    best = torch.empty(C, dtype=torch.int64, device=text.device)
    match_kernel[(C,)](
        text, last, best, N, LONGEST=LONGEST_MATCH, NOTHING=NOTHING, CHUNK=CHUNK, **OPTIONS
    )
    look_up_kernel[(1,)](
        text,
        last,
        table,
        recent,
        best,
        tokens,
        logp,
        N,
        reach,
        C,
        MOST=MAX_DEPTH,
        CLASSES=CLASSES,
        MEMORY=MEMORY,
        RAREST=RAREST,
        NOTHING=NOTHING,
        C_PAD=triton.next_power_of_2(C),
        **FEW,
    )
    return tokens, logp


def fuse(
    tokens: Tensor,
    scores: Tensor,
    parents: Tensor,
    looked_up: Tensor,
    logp: Tensor,
    k: int,
    n_levels: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return tokens, scores, parents and sources [E + R] of both; see `tree.fuse`."""
    E, R, device = len(tokens), len(looked_up), tokens.device
    ids, above, sources = (torch.empty(E + R, dtype=torch.int64, device=device) for _ in range(3))
    paths = torch.empty(E + R, dtype=torch.float32, device=device)
    fuse_kernel[(1,)](
        tokens,
        scores,
        parents,
        looked_up,
        logp,
        ids,
        paths,
        above,
        sources,
        E,
        R,
        n_levels,
        K=k,
        PAD=max(16, triton.next_power_of_2(k * k if n_levels > 1 else k)),
        HEAD=HEAD,
        LOOKUP=LOOKUP,
        **FEW,
    )
    return ids, paths, above, sources


@triton.jit
def _learn(
    text_ptr, last, table_ptr, recent_ptr, N, R, MOST: tl.constexpr, CLASSES: tl.constexpr, MEMORY
):
    """Count the tokens of the last proposal that were tried and that were right."""
    at = tl.load(recent_ptr)
    root = tl.load(recent_ptr + 1)
    size = tl.load(recent_ptr + 2)
    n = tl.load(recent_ptr + 3)
    depth = tl.arange(0, MOST + 1)
    tokens = tl.load(recent_ptr + 4 + depth, mask=depth < MOST, other=0)
    place = at + 1 + depth
    same_text = (tl.load(text_ptr + tl.minimum(at, N - 1)) == root) & (at <= last)
    known = (depth < n) & (place <= last) & same_text & (last <= at + R + 1)
    is_right = known & (tl.load(text_ptr + tl.minimum(place, N - 1)) == tokens)
    wrong = tl.min(tl.where(is_right, MOST + 1, depth), 0)  # the first one that is not right
    classes = tl.arange(0, CLASSES)
    of_class = tl.minimum(depth, CLASSES - 1)[:, None] == classes[None, :]
    tried = of_class & (known & (depth <= wrong))[:, None]
    hits = tried & is_right[:, None]
    cell = tl.minimum(tl.maximum(size - 1, 0), CLASSES - 1)
    tried_ptr = table_ptr + cell * CLASSES + classes
    hits_ptr = tried_ptr + CLASSES * CLASSES
    n_tried = tl.load(tried_ptr) + tl.sum(tried.to(tl.float32), 0)
    n_hits = tl.load(hits_ptr) + tl.sum(hits.to(tl.float32), 0)
    share = tl.minimum(tl.div_rn(MEMORY, n_tried), 1.0)
    tl.store(tried_ptr, n_tried * share)
    tl.store(hits_ptr, n_hits * share)


@triton.jit(do_not_specialize=["N"])
def match_kernel(
    text_ptr,
    last_ptr,
    best_ptr,
    N,
    LONGEST: tl.constexpr,
    NOTHING: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Find the latest of the longest matches that end in a chunk: size * N + end, 0 for none."""
    last = tl.load(last_ptr)
    start = tl.program_id(0) * CHUNK
    best = tl.full((), 0, tl.int64)
    if start < last:
        at = start + tl.arange(0, CHUNK)  # where an earlier match may end
        alive = at < last
        sizes = tl.zeros((CHUNK,), tl.int64)
        for back in tl.static_range(LONGEST):
            own = tl.load(text_ptr + tl.maximum(last - back, 0))
            inside = (at >= back) & (at < last)
            there = tl.load(text_ptr + at - back, mask=inside, other=NOTHING)
            alive = alive & (there == own)
            sizes += alive.to(tl.int64)
        best = tl.max(tl.where(sizes > 0, sizes * N + at, 0), 0)
    tl.store(best_ptr + tl.program_id(0), best)


@triton.jit(do_not_specialize=["N", "R", "C"])
def look_up_kernel(
    text_ptr,
    last_ptr,
    table_ptr,
    recent_ptr,
    best_ptr,
    tokens_ptr,
    logp_ptr,
    N,
    R,
    C,
    MOST: tl.constexpr,
    CLASSES: tl.constexpr,
    MEMORY: tl.constexpr,
    RAREST: tl.constexpr,
    NOTHING: tl.constexpr,
    C_PAD: tl.constexpr,
):
    """Learn from the last proposal; then copy what followed the best of the chunks' matches."""
    last = tl.load(last_ptr)
    _learn(text_ptr, last, table_ptr, recent_ptr, N, R, MOST, CLASSES, MEMORY)
    chunk = tl.arange(0, C_PAD)
    top = tl.max(tl.load(best_ptr + chunk, mask=chunk < C, other=0), 0)
    top = tl.maximum(top, 0)  # so that no index is out of bounds where the search did not run
    size = top // N
    end = top - size * N
    tl.debug_barrier()  # other threads of this program wrote some of the table, and read `recent`
    depth = tl.arange(0, MOST + 1)
    period = tl.where(size > 0, last - end, 1)  # a text in a loop is expected to stay in it
    place = tl.minimum(end + 1 + depth % period, N - 1)
    tokens = tl.where(size > 0, tl.load(text_ptr + place), NOTHING)
    cell = tl.minimum(tl.maximum(size - 1, 0), CLASSES - 1)
    row_ptr = table_ptr + cell * CLASSES + tl.minimum(depth, CLASSES - 1)
    rate = tl.div_rn(tl.load(row_ptr + CLASSES * CLASSES), tl.load(row_ptr))
    logp = tl.log(tl.minimum(tl.maximum(rate, RAREST), 1.0))
    tl.store(tokens_ptr + depth, tokens, mask=depth < R)
    tl.store(logp_ptr + depth, tl.where(size > 0, logp, float("-inf")), mask=depth < R)
    tl.store(recent_ptr + 4 + depth, tokens, mask=depth < R)
    tl.store(recent_ptr, last)
    tl.store(recent_ptr + 1, tl.load(text_ptr + last))
    tl.store(recent_ptr + 2, size)
    tl.store(recent_ptr + 3, tl.where(size > 0, R, 0).to(tl.int64))


@triton.jit(
    do_not_specialize=["E", "R", "L"],
    # Candidates of one of several texts may begin anywhere.
    do_not_specialize_on_alignment=["tokens_ptr", "scores_ptr", "parents_ptr"],
)
def fuse_kernel(
    tokens_ptr,
    scores_ptr,
    parents_ptr,
    looked_up_ptr,
    logp_ptr,
    out_tokens_ptr,
    out_scores_ptr,
    out_parents_ptr,
    out_sources_ptr,
    E,
    R,
    L,
    K: tl.constexpr,
    PAD: tl.constexpr,
    HEAD: tl.constexpr,
    LOOKUP: tl.constexpr,
):
    """Go down both by levels: a candidate of both takes the higher score, and what is below it.

    At most one candidate of a level is on the looked-up path: siblings carry distinct tokens.
    """
    n = tl.arange(0, PAD)
    first = 0  # of the level's candidates
    own_place = tl.full((), -1, tl.int64)  # the chain's last token in the pool, -1 the root
    partner = tl.full((), -1, tl.int64)  # the same, -2 where the head has no such token
    path = 0.0  # score of the chain's last token
    for depth in range(0, tl.maximum(L, R)):
        on_chain = depth < R
        token = tl.load(looked_up_ptr + depth, mask=on_chain, other=-1)
        logp = tl.load(logp_ptr + depth, mask=on_chain, other=float("-inf"))
        above = own_place
        path += logp
        has_partner = False
        place, partner_path = own_place, path
        if depth < L:
            size = tl.where(depth == 0, K, K * K)
            i, real = first + n, n < size
            ids = tl.load(tokens_ptr + i, mask=real, other=-1)
            parents = tl.load(parents_ptr + i, mask=real, other=-3)
            inner = real & (parents >= 0)
            base = tl.load(out_scores_ptr + parents, mask=inner, other=0.0)
            own = tl.load(scores_ptr + i, mask=real, other=0.0)
            own -= tl.load(scores_ptr + parents, mask=inner, other=0.0)
            own = tl.where(own == own, tl.minimum(own, 0.0), float("-inf"))
            same = real & (ids == token) & (parents == partner) & on_chain
            paths = base + tl.where(same, tl.maximum(own, logp), own)
            tl.store(out_tokens_ptr + i, ids, mask=real)
            tl.store(out_scores_ptr + i, paths, mask=real)
            tl.store(out_parents_ptr + i, parents, mask=real)
            tl.store(out_sources_ptr + i, (HEAD + LOOKUP * same).to(tl.int64), mask=real)
            has_partner = tl.max(same.to(tl.int32), 0) > 0
            place = tl.max(tl.where(same, i, 0), 0).to(tl.int64)
            partner_path = tl.sum(tl.where(same, paths, 0.0), 0)
            first += size
        if on_chain:
            tl.store(out_tokens_ptr + E + depth, token)
            tl.store(out_scores_ptr + E + depth, tl.where(has_partner, float("-inf"), path))
            tl.store(out_parents_ptr + E + depth, above)
            tl.store(out_sources_ptr + E + depth, tl.full((), LOOKUP, tl.int64))
        own_place = tl.where(has_partner, place, E + depth).to(tl.int64)
        partner = tl.where(has_partner, place, -2).to(tl.int64)
        path = tl.where(has_partner, partner_path, path)
        tl.debug_barrier()  # the next level reads scores that other threads wrote
