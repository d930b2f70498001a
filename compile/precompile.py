"""Compile Triton kernels before they are needed, several at a time.

Triton compiles a kernel at its first launch, one kernel after the other: a cold start of 7B int4
launches about a dozen variants of 1 to 4 seconds each. Here a pass runs whose launches are only
recorded, and then all of their kernels are compiled at once. Results go to Triton's own caches, in
memory and on disk.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasteagle.compile.cuda_ops import draw, move_rows, relate
from fasteagle.compile.short_prompts import ROWS
from fasteagle.decoding.backend import Backend
from fasteagle.drafting.base import Drafter
from fasteagle.drafting.draft_head import HeadDrafter, RankingDrafter
from fasteagle.errors import first_line, note, telling
from fasteagle.model import KEY_BLOCK, KVCache, Target, causal_mask
from fasteagle.shapes import FusedShape, TreeShape
from fasteagle.state import CycleSpec, DecodeState
from fasteagle.tree import Pool, TreeView

MOST_WORKERS = 16
PROMPT_ROWS = 65  # above the limit of the kernels for a few rows
MANY_PAIRS = 64  # pairs that a draft head reads at once at the end of a prompt
TREES = TreeShape | FusedShape
_ALONE = threading.Lock()


class Variant(NamedTuple):
    """Kernel with the types, constants and options that it is compiled for."""

    function: Any
    specialization: str  # as Triton serializes it


@contextlib.contextmanager
def collecting() -> Iterator[dict[Any, Variant]]:
    """Collect the uncompiled kernels launched inside, by name and key, instead of running them.

    Their outputs keep their old contents. Only this thread is affected: other threads launch and
    compile as usual.
    """
    from triton import knobs  # Triton exists where CUDA does

    variants: dict[Any, Variant] = {}
    me = threading.get_ident()

    with _ALONE:  # two overlapping calls would leave the hook of the first in place
        before = knobs.runtime.jit_cache_hook

        def record(*, key: Any, fn: Any, compile: dict[str, Any], **rest: Any) -> Any:
            if threading.get_ident() != me:
                return before and before(key=key, fn=fn, compile=compile, **rest)
            variants[fn.name, key] = Variant(fn.jit_function, compile["specialization_data"])
            return True  # neither compile nor launch

        knobs.runtime.jit_cache_hook = record
        try:
            yield variants
        finally:
            knobs.runtime.jit_cache_hook = before


def workers_here() -> int:
    """Return the number of kernels compiled at a time."""
    return min(MOST_WORKERS, os.cpu_count() or 1)


def compile_all(variants: Sequence[Variant], device: torch.device, workers: int) -> None:
    """Compile `variants` for the current device; most of the work runs without the GIL.

    What fails beside others is tried again alone: Python below 3.11.5 fails now and then where
    threads parse code at the same time (python/cpython#106905).
    """

    def compile_one(variant: Variant) -> None:
        # A thread has a current device of its own, and Triton compiles for that one.
        on_device = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
        with on_device:
            variant.function.preload(variant.specialization)

    with ThreadPoolExecutor(workers) as pool:
        done = [pool.submit(compile_one, variant) for variant in variants]
    for variant, future in zip(variants, done, strict=True):
        if future.exception() is not None:
            compile_one(variant)


def compile_ahead(
    backend: Backend, drafter: Drafter | None, specs: Sequence[CycleSpec], state: DecodeState
) -> int:
    """Compile the kernels that cycles of `specs` and prompts launch; see `compile_launches`."""

    def launch() -> None:
        run_passes(backend.target, sorted({1, *ROWS, *(spec.rows for spec in specs)}))
        run_head(drafter, {spec.width for spec in specs if spec.width})
        run_trees(drafter, specs, state)
        run_draws(backend.target, specs, state)
        run_commits(backend.target, specs)

    return compile_launches(launch, backend.target.weight.device)


def compile_launches(launch: Callable[[], None], device: torch.device) -> int:
    """Compile the kernels that `launch` launches, which do not run; return how many there are.

    After a failure the kernels are compiled at their first launch, and a warning line says so.
    """
    if device.type != "cuda":
        return 0
    try:
        with collecting() as variants:
            launch()
        torch.cuda.synchronize(device)
        workers = workers_here()
        with telling(f"compiling {len(variants)} kernels, {workers} at a time ..."):
            compile_all(list(variants.values()), device, workers)
    except Exception as error:
        reason = first_line(error, 200)
        note(f"warning: kernels are compiled one by one as they are needed: {reason}")
        return 0
    return len(variants)


@torch.no_grad()
def run_passes(target: Target, rows: Sequence[int]) -> None:
    """Run a target pass for each number of rows, and one over a prompt, on a separate cache.

    Kernels that do not run leave arbitrary outputs: no indices are computed from them.
    """
    device = target.weight.device
    cache = target.new_cache(KEY_BLOCK)
    for T in rows:
        seq_len = torch.ones((), dtype=torch.long, device=device)  # every RoPE table is longer
        view = TreeView.of_chain(seq_len, T, target.config.sliding_window)
        row = view.depths
        target(torch.zeros_like(row), seq_len + row, seq_len + row, view, cache)
    row = torch.arange(PROMPT_ROWS, device=device)
    mask = causal_mask(0, PROMPT_ROWS, cache.n_slots, target.config.sliding_window, device)
    target.encode(torch.zeros_like(row), row, row, mask, cache)


@torch.no_grad()
def run_head(drafter: Drafter | None, widths: Iterable[int]) -> None:
    """Run draft head steps over a tree level, `widths` pending pairs and the end of a prompt."""
    if not isinstance(drafter, HeadDrafter):
        return
    topk = {shape.topk or 1 for shape in drafter.shapes()}
    for T in sorted({1, *topk, *widths, MANY_PAIRS, PROMPT_ROWS}):
        logits = _run_head(drafter, T)
        for k in topk if T in (1, *topk) else ():
            # Rank the logits in their own dtype, and in fp32, in which noise is added to them.
            for ranked in {logits.dtype: logits, torch.float32: logits.float()}.values():
                drafter.ops.top_children(ranked, k)


@torch.no_grad()
def run_trees(drafter: Drafter | None, specs: Sequence[CycleSpec], state: DecodeState) -> None:
    """Select the trees of `specs` from identical candidates and compute how their rows relate."""
    for spec in specs:
        row = torch.arange(spec.rows, device=state.root.device)
        relate(torch.zeros_like(row), row >= 0)
        shape = spec.shape
        if drafter is not None and drafter.lookup is not None and isinstance(shape, TREES):
            lookup = drafter.lookup.apart()  # it learns
            tokens, logp = drafter.ops.look_up(lookup, state.text, state.seq_len, spec.depth)
            if isinstance(shape, FusedShape):
                own = _candidates(shape.head_pool, row.device)
                drafter.ops.fuse(own, shape.topk, shape.levels, tokens, logp)
        if isinstance(drafter, RankingDrafter) and isinstance(shape, TREES):
            # Not what was merged: a kernel that is not compiled yet has left anything there.
            pool = _candidates(shape.pool, row.device)
            pool = pool._replace(sources=pool.tokens if isinstance(shape, FusedShape) else None)
            drafter.ops.rerank(pool, state.root, shape.nodes)


def _candidates(n: int, device: torch.device) -> Pool:
    ids = torch.zeros(n, dtype=torch.long, device=device)
    return Pool(ids, ids.float(), ids - 1)


@torch.no_grad()
def run_draws(target: Target, specs: Sequence[CycleSpec], state: DecodeState) -> None:
    """Draw a token from the logits of one row in each sampling mode of `specs`."""
    logits = target.model.lm_head(target.weight.new_zeros(1, target.config.dim))
    for kind in {spec.kind for spec in specs}:
        draw(logits, state.seq_len.view(1), kind, state.sampling)


@torch.no_grad()
def run_commits(target: Target, specs: Sequence[CycleSpec]) -> None:
    """Move rows of a cache as the cycles of `specs` do at their commit."""
    cache = target.new_cache(KEY_BLOCK)
    for depth in sorted({spec.depth for spec in specs if spec.depth and not spec.in_place}):
        levels = torch.arange(depth + 1, device=cache.rows.device)
        move_rows(cache, torch.zeros_like(levels[0]), levels)


def _run_head(drafter: HeadDrafter, T: int) -> Tensor:
    """Return the draft logits [T, V] of one step over T rows."""
    head, own = drafter.head, drafter.cache.rows
    cache = KVCache(head.config.block, KEY_BLOCK, own.dtype, own.device)
    row = torch.arange(T, device=own.device)
    features = own.new_zeros(T, head.config.feature_dim)
    view = TreeView.of_chain(torch.zeros_like(row[0]), T)
    run = drafter.ops.head or head
    logits, _ = run(torch.zeros_like(row), head.read(features), row, row, view, cache)
    return logits
