"""Triton kernels compiled before they are needed, several at a time.

A kernel that nobody has compiled yet is compiled when it is launched, one after the other: a cold
start of 7B int4 launches about a dozen variants of 1 to 4 seconds each. Here a pass is run whose
launches are only written down, and then all of them are compiled at once. Results go to Triton's
own caches, in memory and on disk.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasteagle.compile.cuda_ops import move_rows, relate
from fasteagle.decoding.runner import Backend
from fasteagle.drafting.base import Drafter
from fasteagle.drafting.draft_head import HeadDrafter, RankingDrafter
from fasteagle.errors import first_line, note
from fasteagle.model import KEY_BLOCK, KVCache, Target, causal_mask
from fasteagle.shapes import FusedShape, TreeShape
from fasteagle.state import CycleSpec, DecodeState
from fasteagle.tree import Pool, Relations, TreeView

MOST_WORKERS = 16
PATIENCE = 1.0  # seconds, after which a person is told
PROMPT_ROWS = 65  # more than the kernels of a few rows take
MANY_PAIRS = 64  # of the end of a prompt, that a draft head is shown at once
_ALONE = threading.Lock()


class Variant(NamedTuple):
    """A kernel, and the types, constants and options that it is to be compiled for."""

    function: Any
    specialization: str  # as Triton writes it down


@contextlib.contextmanager
def collecting() -> Iterator[dict[Any, Variant]]:
    """Kernels launched inside that are not compiled yet, by name and key: they do not run.

    What they would have written is left as it was. Only those of this thread: others launch, and
    compile, as ever.
    """
    from triton import knobs  # Triton exists where CUDA does

    found: dict[Any, Variant] = {}
    me = threading.get_ident()

    with _ALONE:  # two that overlap would leave the first one's hook behind
        before = knobs.runtime.jit_cache_hook

        def write_down(*, key: Any, fn: Any, compile: dict[str, Any], **rest: Any) -> Any:
            if threading.get_ident() != me:
                return before and before(key=key, fn=fn, compile=compile, **rest)
            found[fn.name, key] = Variant(fn.jit_function, compile["specialization_data"])
            return True  # neither compile nor launch

        knobs.runtime.jit_cache_hook = write_down
        try:
            yield found
        finally:
            knobs.runtime.jit_cache_hook = before


def workers_here() -> int:
    """How many kernels are compiled at a time."""
    return min(MOST_WORKERS, os.cpu_count() or 1)


def compile_all(variants: Sequence[Variant], device: torch.device, workers: int) -> None:
    """Compile `variants` for the current target; most of it runs outside of Python's lock."""

    def one(variant: Variant) -> None:
        # A thread has a current device of its own, and Triton compiles for that one.
        on_device = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
        with on_device:
            variant.function.preload(variant.specialization)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(one, variants))


def compile_ahead(
    backend: Backend, drafter: Drafter | None, specs: Sequence[CycleSpec], state: DecodeState
) -> int:
    """Compile what passes of `specs` and prompts launch; how many variants there were.

    Whatever fails here is compiled when it is launched, as it would have been, and a line says so.
    """
    device = backend.target.weight.device
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return 0
    try:
        with collecting() as found:
            run_passes(backend.target, sorted({1, *(spec.rows for spec in specs)}))
            run_head(drafter, {spec.width for spec in specs if spec.width})
            run_trees(drafter, specs, state, relate)
            run_commits(backend.target, specs, move_rows)
        torch.cuda.synchronize(device)
        workers = workers_here()
        line = f"compiling {len(found)} kernels, {workers} at a time ..."
        timer = threading.Timer(PATIENCE, note, [line])
        timer.start()
        try:
            compile_all(list(found.values()), device, workers)
        finally:
            timer.cancel()
    except Exception as error:
        reason = first_line(error, 200)
        note(f"warning: kernels are compiled one by one as they are needed: {reason}")
        return 0
    return len(found)


@torch.no_grad()
def run_passes(target: Target, rows: Sequence[int]) -> None:
    """Passes over `rows` rows, and one of a prompt, on a cache of their own.

    Only numbers are computed from what kernels write, no indices: it may be anything.
    """
    device = target.weight.device
    cache = target.new_cache(KEY_BLOCK)
    for T in rows:
        row = torch.arange(T, device=device)
        paths = row.to(torch.int32).expand(T, T).contiguous()
        seq_len = torch.ones((), dtype=torch.long, device=device)  # every RoPE table is longer
        view = TreeView(seq_len, paths, row, target.config.sliding_window)
        target(torch.zeros_like(row), seq_len + row, seq_len + row, view, cache)
    row = torch.arange(PROMPT_ROWS, device=device)
    mask = causal_mask(0, PROMPT_ROWS, cache.n_slots, target.config.sliding_window, device)
    target.encode(torch.zeros_like(row), row, row, mask, cache)


@torch.no_grad()
def run_head(drafter: Drafter | None, widths: Iterable[int]) -> None:
    """Steps of a draft head over the rows of a level, and of `widths` new pairs, or many."""
    if not isinstance(drafter, HeadDrafter):
        return
    topk = {shape.topk or 1 for shape in drafter.shapes()}
    for T in sorted({1, *topk, *widths, MANY_PAIRS}):
        logits = _run_head(drafter, T)
        for k in topk if T in (1, *topk) else ():
            # Ranked as they are, and with noise, which is added to them in fp32.
            for ranked in {logits.dtype: logits, torch.float32: logits.float()}.values():
                drafter.top_children(ranked, k)


@torch.no_grad()
def run_trees(
    drafter: Drafter | None,
    specs: Sequence[CycleSpec],
    state: DecodeState,
    relate: Callable[[Tensor, Tensor], Relations],
) -> None:
    """Choose trees of `specs` from candidates that are all alike, and relate their rows."""
    root = torch.zeros_like(state.root)
    for spec in specs:
        row = torch.arange(spec.rows, device=root.device)
        relate(torch.zeros_like(row), row >= 0)
        shape = spec.shape
        if isinstance(drafter, RankingDrafter) and isinstance(shape, TreeShape | FusedShape):
            n = shape.pool
            ids = torch.zeros(n, dtype=torch.long, device=root.device)
            drafter.rerank(Pool(ids, ids.float(), ids - 1), root, shape.nodes)


@torch.no_grad()
def run_commits(
    target: Target, specs: Sequence[CycleSpec], move_rows: Callable[[KVCache, Tensor, Tensor], None]
) -> None:
    """Move rows of a cache as cycles of `specs` do when they commit."""
    cache = target.new_cache(KEY_BLOCK)
    for depth in sorted({spec.depth for spec in specs if spec.depth and not spec.in_place}):
        levels = torch.arange(depth + 1, device=cache.rows.device)
        move_rows(cache, torch.zeros_like(levels[0]), levels)


def _run_head(drafter: HeadDrafter, T: int) -> Tensor:
    """Draft logits [T, V] of one step."""
    head, own = drafter.head, drafter.cache.rows
    cache = KVCache(head.config.block, KEY_BLOCK, own.dtype, own.device)
    row = torch.arange(T, device=own.device)
    features = own.new_zeros(T, head.config.feature_dim)
    paths = row.to(torch.int32).expand(T, T).contiguous()
    view = TreeView(torch.zeros_like(row[0]), paths, row)
    run = drafter.ops.head or head
    logits, _ = run(torch.zeros_like(row), head.read(features), row, row, view, cache)
    return logits
