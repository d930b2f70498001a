"""Compile the pieces of the decode cycle: one call drafts, another accepts and commits.

In eager mode the two are hundreds of small operations. On a CPU verification runs the compiled
spans of `blocks`. On CUDA verification is a third piece, around the blocks' kernels, and `graphs`
captures the pieces: operations that Inductor fuses are fewer nodes in a replayed graph.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor

from fasteagle.compile.graphs import COMPILING
from fasteagle.decoding.cycle import EAGER, Pieces
from fasteagle.decoding.launch import may_be_shorter, variant_of
from fasteagle.drafting.base import Drafter
from fasteagle.drafting.draft_head import HeadDrafter
from fasteagle.drafting.draft_model import ModelDrafter
from fasteagle.errors import is_out_of_memory
from fasteagle.generate import Engine
from fasteagle.model import KEY_BLOCK, KVCache, Output
from fasteagle.multi_round import accept_sampled
from fasteagle.sampling import SamplingMode
from fasteagle.shapes import AnyShape
from fasteagle.state import CycleSpec, DecodeState
from fasteagle.tree import Proposal

# Small kernels that do not wait for each other become one launch, also if their sizes differ.
FOR_GRAPHS = {
    "combo_kernels": True,
    "combo_kernel_allow_mixed_sizes": 2,
    # Choosing by time waits for the device, which spoils captures in another thread.
    "triton.autotune_pointwise": False,
    "assert_indirect_indexing": False,
}


Compiled = TypeVar("Compiled")
GAP = 0.005  # seconds; a thread that takes a lock again at once leaves it to no other one
TRACED_SLOTS = 2 * KEY_BLOCK  # of caches that only shapes are read from: at 33B they take 0.8 GB


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Hold `COMPILING` for a part of a compilation, after the captures that wait for it."""
    time.sleep(GAP)
    with COMPILING:
        yield


def compile_part(work: Callable[[], Compiled]) -> Compiled:
    """Return what a part of a compilation returns, which is tried again if it fails.

    Ctrl-C in a terminal ends the C++ compilers that run beside a prompt there.
    """
    try:
        with compiling():
            return work()
    except Exception as error:
        if is_out_of_memory(error):
            raise
    with compiling():
        return work()


class CycleCompiler:
    """Compiler of the cycle pieces of an engine with its drafter; `apply` puts them into use.

    Compiling runs the pieces once, on a separate state and caches: no conversation is touched.
    """

    def __init__(
        self, engine: Engine, kind: SamplingMode | None = None, shapes: Sequence[AnyShape] = ()
    ) -> None:
        drafter = engine.drafter
        self._engine, self._drafter = engine, drafter
        # Not those of the state: another drafter may be in use by then.
        self._aux_layers = () if drafter is None else drafter.aux_layers
        if drafter is not None and not shapes:
            shapes = drafter.shapes()
        every, kind = (None, *shapes), kind or SamplingMode()
        self._specs = [engine.spec(shape, kind, shapes) for shape in every]
        self._compiled_pieces: dict[tuple[Drafter | None, CycleSpec], Pieces] = {}

    def compile(self, slots: Sequence[int] = (TRACED_SLOTS,)) -> None:
        """Compile for caches of any number of slots; `slots` are sizes that need different code."""
        for spec in self.missing:
            compiled = compile_part(functools.partial(self._compiled, spec, slots))
            self._compiled_pieces[variant_of(self._drafter, spec)] = compiled

    @property
    def leaves_nothing(self) -> bool:
        """Return whether kernels run all of the cycles, so that there is nothing to compile."""
        engine, drafter = self._engine, self._drafter
        if not engine.on_cpu or engine.runner.usual.finish is EAGER.finish:
            return False
        trees = [spec for spec in self._specs if spec.shape is not None]
        own_model = isinstance(drafter, ModelDrafter)
        return own_model or all(engine.backend.drafts(drafter, spec) for spec in trees)

    @property
    def missing(self) -> list[CycleSpec]:
        """Variants that nobody has compiled for the engine."""
        known = self._engine.runner.compiled
        return [spec for spec in self._specs if variant_of(self._drafter, spec) not in known]

    def apply(self) -> None:
        """Use what was compiled, beside what another drafter has that is in use by now."""
        engine = self._engine
        if self._drafter is not None and engine.drafter in (None, self._drafter):
            engine.runner.adopt(self._drafter)  # its draft head may be compiled in the meantime
        engine.runner.use_compiled(self._compiled_pieces)

    @torch.no_grad()
    def _compiled(self, spec: CycleSpec, slots: Sequence[int]) -> Pieces:
        if not self._engine.on_cpu:
            return self._for_graphs(spec)
        usual = self._engine.runner.usual
        draft, finish = usual.draft, usual.finish
        if self._engine.backend.drafts(self._drafter, spec):
            return usual
        if spec.shape is not None and not isinstance(self._drafter, ModelDrafter):
            draft = own_code(EAGER.draft)  # a whole model's passes would take minutes
        for n_slots in slots:
            state, drafter = self._state(n_slots), self._scratch(n_slots)
            proposal = draft(state, drafter, spec)
            if spec.kind.filtered or spec.kind.penalty or spec.accept is accept_sampled:
                continue
            if finish is EAGER.finish:
                finish = own_code(finish)
            if finish is not usual.finish:
                self._compile_finish(finish, state, spec, proposal)
        return Pieces(draft, usual.verify, finish)

    def _compile_finish(
        self, finish: Callable[..., Any], state: DecodeState, spec: CycleSpec, proposal: Proposal
    ) -> None:
        """Run `finish` on each number of rows that can occur; padding rows may be dropped."""
        if self._drafter is None or spec.shape is None or not may_be_shorter(self._drafter, spec):
            finish(state, spec, proposal, self._output(spec.rows))
            return
        for rows in (spec.rows, 1):  # two and more rows share one code
            part, output = proposal.first_rows(rows), self._output(rows)
            if rows > 1:
                for tensor in (*part.tree, *part[1:], *output):
                    if isinstance(tensor, Tensor):
                        torch._dynamo.mark_dynamic(tensor, 0)
                torch._dynamo.mark_dynamic(part.tree_mask, 1)
            finish(state, spec, part, output)

    @torch.no_grad()
    def _for_graphs(self, spec: CycleSpec) -> Pieces:
        """Compile every piece that a graph can hold, with small caches to save memory."""
        if spec.accept is accept_sampled:  # it reads values on the host
            return self._engine.runner.usual
        state, drafter = self._state(TRACED_SLOTS), self._scratch(TRACED_SLOTS)
        for plane in _planes(state.cache):
            torch._dynamo.maybe_mark_dynamic(plane, 1)
        draft, verify, finish = self._engine.runner.usual
        if not isinstance(self._drafter, ModelDrafter):
            draft = own_code(draft, FOR_GRAPHS)
        if not self._engine.backend.leaves_blocks:
            verify = own_code(verify, FOR_GRAPHS)
        finish = own_code(finish, FOR_GRAPHS)
        proposal = draft(state, drafter, spec)
        finish(state, spec, proposal, verify(state, self._engine.target, proposal))
        return Pieces(draft, verify, finish)

    def _output(self, T: int) -> Output:
        """Return an output of zeros with the shapes of a pass over T rows."""
        target, aux_layers = self._engine.model, self._aux_layers
        features = target.norm.weight.new_zeros(T, target.config.dim)
        aux_states = features.new_zeros(T, len(aux_layers) * target.config.dim, dtype=torch.float32)
        return Output(target.lm_head(features), features, aux_states if aux_layers else None)

    def _state(self, n_slots: int) -> DecodeState:
        engine = self._engine
        cache = engine.target.new_cache(n_slots)
        torch._dynamo.mark_dynamic(cache.rows, 2)
        state = DecodeState(engine.model, cache, engine.max_seq_len)
        state.read_aux_layers(self._aux_layers, engine.model.config.dim)
        state.count.fill_(1)
        state.seq_len.fill_(2)
        state.sampling.temperature.fill_(1.0)
        return state

    def _scratch(self, n_slots: int) -> Drafter | None:
        """Return a copy of the drafter, which may learn, with caches of `n_slots` slots."""
        if self._drafter is None:
            return None
        scratch = self._drafter.apart()
        for cache in scratch.caches:
            cache.resize(n_slots)
        if isinstance(scratch, HeadDrafter):
            self._engine.backend.adopt(scratch)
            for plane in _planes(scratch.cache):
                torch._dynamo.mark_dynamic(plane, 1)
        return scratch


def own_code(piece: Any, settings: dict[str, Any] | None = None) -> Callable[..., Any]:
    """Return `piece` compiled for one variant of the cycle and one engine.

    Dynamo stores compiled code by function code, and before each call checks hundreds of Python
    values of the variant, the drafter and the state, which takes a tenth of a millisecond. These
    values cannot change here, because `Runner.compiled` stores a piece by its variant, and siblings
    differ in their tensors only. So the piece gets a separate code object, and only the shapes of
    tensors are checked. Only dimensions that were marked are dynamic: by itself Dynamo would take a
    number that another variant had otherwise for dynamic too, and Inductor cannot put reductions
    of such a size beside others.
    """
    code = piece.__code__.replace()
    own = FunctionType(code, piece.__globals__, piece.__name__, piece.__defaults__)
    options = {"guard_filter_fn": torch.compiler.keep_tensor_guards_unsafe, **(settings or {})}
    return torch.compile(own, fullgraph=True, dynamic=False, options=options)


def _planes(cache: KVCache) -> list[Tensor]:
    return [plane for pair in cache.layers for plane in pair]
