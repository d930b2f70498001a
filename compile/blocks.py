"""Compile spans of decoder blocks with `torch.compile`, optionally in the background.

A span of decoder blocks is compiled rather than the whole model: all spans share its code, so that
compilation takes seconds. A span is compiled rather than a single block, because each call costs
50 us on a CPU. Rows and cache slots are dynamic dimensions: one graph for one row, one for two or
more. The compiler's cache stays on disk.

Shapes: T rows, D model dim, E head dim, G KV heads, S cache slots.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fasteagle.compile.cycles import CycleCompiler, compile_part
from fasteagle.decoding.backend import Backend
from fasteagle.decoding.context import MAX_TREE_ROWS
from fasteagle.drafting.draft_head import HeadDrafter
from fasteagle.errors import first_line, note
from fasteagle.generate import Engine
from fasteagle.model import (
    CORE,
    KEY_BLOCK,
    Block,
    EagleHead,
    Layer,
    Ops,
    PromptView,
    Rows,
    Transformer,
    attend,
    run_blocks,
)
from fasteagle.options import SamplingParams
from fasteagle.paths import compiled_dir
from fasteagle.quant import cpu_build
from fasteagle.sampling import SamplingMode
from fasteagle.tree import TreeView

LONGEST_SPAN = 6  # blocks; longer ones take longer to compile and gained nothing more
# Above this many keys Inductor's softmax sums in another way, which is another graph.
LONG_REDUCTION = 4096


def configure() -> None:
    """Set the directory of compiled code to `compiled_dir`, and torch's recompile limit."""
    # Target and head blocks, one or several rows, short and long caches, by precision.
    torch._dynamo.config.recompile_limit = max(256, torch._dynamo.config.recompile_limit)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(compiled_dir())


def missing_compiler() -> str | None:
    """Return why the CPU backend cannot compile here, or None if it can."""
    if (reason := cpu_build.why_no_compiler()) is not None:
        return reason  # Inductor would wait for a compiler that hangs
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except (InvalidCxxCompiler, RuntimeError, OSError):
        return "no C++ compiler found (install g++)"
    return None


class BlockCompiler:
    """Compiler of a model's blocks, of its draft head's block and of the decode cycle's pieces.

    `start` compiles in a separate thread, `wait` blocks until it is done. The model runs eagerly
    until `apply` makes it use the result. If compilation fails, `error` says why and `apply`
    changes nothing.
    """

    def __init__(
        self,
        backend: Backend,
        max_slots: int,
        head: EagleHead | None = None,
        cycles: CycleCompiler | None = None,
        aux_layers: tuple[int, ...] = (),
    ) -> None:
        self.error: str | None = None
        self._backend, self._target = backend, backend.target
        self._model = self._target.model
        self._head = head if head is not None and backend.leaves_head(head) else None
        self._ops = _with_sums(self._target.ops._replace(run_blocks=None), self._model)
        self._head_ops = CORE if self._head is None else backend.head_ops(self._head)
        self._head_ops = _with_sums(self._head_ops, self._model)
        self._aux_layers = aux_layers
        self._max_slots = max_slots
        self._cycles = cycles
        self._forward = torch.compile(Block.forward, fullgraph=True)  # of the draft head's block
        self._compiled = torch.compile(run_blocks, fullgraph=True)
        self._done = threading.Event()
        self._applied = False

    @property
    def done(self) -> bool:
        """True once compilation has ended, successfully or not."""
        return self._done.is_set()

    @property
    def ready(self) -> bool:
        return self._done.is_set() and self.error is None

    @property
    def _leaves_nothing(self) -> bool:
        """Return whether kernels run all that would be compiled."""
        cycles = self._cycles is None or self._cycles.leaves_nothing
        return cycles and self._head is None and not self._backend.leaves_blocks

    def start(self) -> None:
        if self._leaves_nothing:
            self._done.set()
            return
        configure()
        threading.Thread(target=self._run, daemon=True).start()

    def wait(self, say: Callable[[str], None] = lambda line: None) -> None:
        """Wait until compilation has ended; print a line by `say` where that takes time."""
        if not self.done:
            say("compiling (kept for the next start) ...")
        self._done.wait()

    def apply(self) -> bool:
        """Switch the backend to compiled code if it is ready; return whether it now runs that."""
        if self.ready and not self._applied:
            leaves = self._backend.leaves_blocks
            self._backend.use_compiled_blocks(self._run_spans if leaves else None, self._heads)
            if self._cycles is not None:
                self._cycles.apply()
            self._applied = True
        return self._applied

    def _run_spans(
        self, blocks: Sequence[Block], layers: Sequence[Layer], x: Tensor, rows: Rows
    ) -> Tensor:
        if isinstance(rows.visible, PromptView):  # no code is compiled for it
            rows = rows._replace(visible=rows.visible.mask(layers[0][0].shape[1]))
        begin = 0
        for length in spans(len(blocks)):
            end = begin + length
            x = self._compiled(blocks[begin:end], layers[begin:end], x, rows, self._ops)
            begin = end
        return x

    def _run(self) -> None:
        try:
            configure()  # again: torch keeps these settings per thread
            if self._backend.leaves_blocks and self._model.config.moe is not None:
                raise RuntimeError("experts are chosen on the host, which no compiled code can")
            on_cpu = self._model.norm.weight.device.type == "cpu"
            if on_cpu and (reason := missing_compiler()):
                raise RuntimeError(reason)
            with torch.no_grad():
                self._warm_up()
        except Exception as error:  # on any error the eager path still answers
            self.error = first_line(error, 200)
            self._backend.drop_compiled(self._heads)
        self._done.set()

    @property
    def _heads(self) -> dict[EagleHead, Callable[..., Tensor]]:
        """Compiled block of the draft head; empty if our own kernels run that block."""
        if self._head is None:
            return {}
        block, ops = self._head.block, self._head_ops

        def run(*inputs: Any) -> Tensor:
            x: Tensor = self._forward(block, *inputs, ops)
            return x

        return {self._head: run}

    def _warm_up(self) -> None:
        slots = [2 * KEY_BLOCK]
        if self._max_slots > LONG_REDUCTION:
            slots.append(2 * LONG_REDUCTION)
        for S in slots:
            for T in (1, 5):
                for head, run in self._heads.items():
                    block = head.block
                    inputs = *self._inputs(block, T, S), self._layer(block, S)
                    compile_part(functools.partial(run, *inputs, self._entry(block, T)))
                if not self._backend.leaves_blocks:
                    continue
                for length in self._lengths:
                    self._warm_up_span(length, T, S)
        # The draft head's block first: compiled drafting is traced with it in place.
        self._backend.use_compiled_blocks(None, self._heads)
        if self._cycles is not None:
            self._cycles.compile(slots)

    @property
    def _lengths(self) -> set[int]:
        """Lengths of all spans, which end at the auxiliary layers that the draft head reads."""
        bounds = (0, *self._aux_layers, self._model.config.n_layer)
        return {n for a, b in itertools.pairwise(bounds) for n in spans(b - a)}

    def _warm_up_span(self, length: int, T: int, S: int) -> None:
        blocks = list(self._model.blocks)[:length]
        layers = [self._layer(block, S) for block in blocks]
        x, rows = self._inputs(blocks[0], T, S)
        seen = [rows.visible, self._view(T)] if self._ops.views else [rows.visible]
        for visible in seen:
            inputs = x, rows._replace(visible=visible), self._ops
            compile_part(functools.partial(self._compiled, blocks, layers, *inputs))

    def _view(self, T: int) -> TreeView:
        """Return the view of a chain of T rows, for attention that takes no mask."""
        length = torch.zeros((), dtype=torch.long, device=self._model.norm.weight.device)
        view = TreeView.of_chain(length, T, self._model.config.sliding_window)
        if T > 1:
            for tensor, dim in ((view.paths, 0), (view.paths, 1), (view.depths, 0)):
                torch._dynamo.mark_dynamic(tensor, dim)
        return view

    def _layer(self, block: Block, S: int) -> Layer:
        """Return empty keys and values of one block; a draft head's are in the weights' dtype."""
        weight, attention = self._model.norm.weight, block.attention
        is_target = self._head is None or block is not self._head.block
        dtype = self._target.cache_dtype if is_target else None
        width = attention.head_dim + (self._target.cache_spare if is_target else 0)
        keys, values = (
            weight.new_zeros(attention.n_kv_head, S, width, dtype=dtype) for _ in range(2)
        )
        for tensor in (keys, values):
            torch._dynamo.mark_dynamic(tensor, 1)
        return keys, values

    def _entry(self, block: Block, T: int) -> Tensor | None:
        """Return the attention input of an EAGLE-3 draft head, or None for other blocks."""
        weight, width = self._model.norm.weight, block.attention.qkv.in_features
        if width == self._model.config.dim:
            return None
        entry = weight.new_zeros(T, width)
        if T > 1:
            torch._dynamo.mark_dynamic(entry, 0)
        return entry

    def _inputs(self, block: Block, T: int, S: int) -> tuple[Tensor, Rows]:
        """Return x and the rows, under a mask, of a pass over T rows through `block`."""
        device, config = self._model.norm.weight.device, self._model.config
        rope = self._model.rope_cos[:T, :1].expand(T, block.attention.head_dim).unsqueeze(1)
        mask = torch.ones(T, S, dtype=torch.bool, device=device)
        x = rope.new_zeros(T, config.dim)
        rows = Rows(rope.clone(), rope.clone(), torch.arange(T, device=device), mask)
        torch._dynamo.mark_dynamic(mask, 1)
        if T > 1:
            for tensor in (x, *rows):
                torch._dynamo.mark_dynamic(tensor, 0)
        return x, rows


def spans(n_blocks: int) -> list[int]:
    """Return the lengths of the spans, at most `LONGEST_SPAN` blocks each.

    Lengths are equal where a large enough length divides `n_blocks`; else there are as few spans as
    possible, of two lengths that differ by one.
    """
    length = max(n for n in range(1, LONGEST_SPAN + 1) if n_blocks % n == 0)
    n_spans = n_blocks // length if 2 * length > LONGEST_SPAN else -(-n_blocks // LONGEST_SPAN)
    return [(n_blocks + i) // n_spans for i in range(n_spans)]


def attend_on_cpu(q: Tensor, k_cache: Tensor, v_cache: Tensor, mask: Tensor) -> Tensor:
    """Compute `model.attend`; compiled code computes a single row by sums instead of products.

    Inductor fuses the sums into a few loops; a product of one row costs 35 us at any size. In eager
    mode the sums would be slower.
    """
    if mask.shape[0] != 1 or not torch.compiler.is_compiling():
        return attend(q, k_cache, v_cache, mask)
    scores = (q.unsqueeze(2).float() * k_cache.unsqueeze(1).float()).sum(-1) / math.sqrt(q.shape[2])
    weights = torch.softmax(scores.masked_fill(~mask, float("-inf")), -1)  # [G, group, S]
    return (weights.unsqueeze(3) * v_cache.unsqueeze(1).float()).sum(2).to(v_cache.dtype)


def _with_sums(ops: Ops, model: Transformer) -> Ops:
    """Return `ops` with `attend_on_cpu` for a model on a CPU, else unchanged."""
    on_cpu = model.norm.weight.device.type == "cpu"
    return ops._replace(attend=attend_on_cpu) if on_cpu and ops.attend is attend else ops


def start_compiler(engine: Engine, params: SamplingParams | None = None) -> BlockCompiler:
    """Start compiling the engine's code in the background, for answers sampled by `params`."""
    drafter = engine.drafter
    head = drafter.head if isinstance(drafter, HeadDrafter) else None
    kind = SamplingMode.of(params or SamplingParams(), engine.model.config.vocab_size)
    cycles = CycleCompiler(engine, kind)
    max_slots = engine.max_seq_len + MAX_TREE_ROWS
    compiler = BlockCompiler(engine.backend, max_slots, head, cycles, engine.state.aux_layers)
    compiler.start()
    return compiler


def compile_now(
    engine: Engine,
    params: SamplingParams | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> bool:
    """Compile the engine's code and use it; return False, after a warning line, if that fails.

    `say` prints a line where there is something to compile.
    """
    compiler = start_compiler(engine, params)
    compiler.wait(say)
    if compiler.apply():
        return True
    note(f"warning: running without compilation: {compiler.error}")
    return False
