"""Captured parts of a cycle, before a pass that several sequences share and after its logits.

Shapes: T tree rows, V vocabulary, D model dim, R auxiliary layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from fasteagle.decoding.cycle import Pieces
from fasteagle.decoding.launch import Capture
from fasteagle.drafting.base import Drafter
from fasteagle.model import Output, Target
from fasteagle.state import CycleSpec, DecodeState
from fasteagle.tree import Pool, Proposal

Variant = TypeVar("Variant")
Result = TypeVar("Result")
Inputs = TypeVar("Inputs")
Read = TypeVar("Read", contravariant=True)
Made = TypeVar("Made", covariant=True)


def lasting(
    make: Callable[[], Result], shared: Sequence[Tensor] = ()
) -> tuple[Callable[[], None], Result]:
    """Return a step that runs `make`, and a copy of its result, which each run of it renews.

    `make` runs once before. Graphs of one pool use the same memory: what a graph has allocated may
    be overwritten by the next replay of any other one, so a result that is read later must not lie
    there. What lies in the memory of `shared`, which no graph has allocated, is no copy: compiled
    code that changes these tensors expects to find a view of them again.
    """
    places = {id_of(tensor) for tensor in shared}

    def copied(tensor: Tensor) -> Tensor:
        return tensor if id_of(tensor) in places else tensor.clone()

    own = tree_map_only(Tensor, copied, make())

    def step() -> None:
        for place, tensor in zip(tree_leaves(own), tree_leaves(make()), strict=True):
            if isinstance(place, Tensor) and id_of(place) not in places:
                place.copy_(tensor)

    return step, own


def id_of(tensor: Tensor) -> int:
    """Return the address of the memory that a tensor is a view of."""
    return tensor.untyped_storage().data_ptr()


class Shared(Protocol[Read, Made]):
    """Work over tensors of several sequences, which `load` says."""

    def load(self, inputs: Read, /) -> None: ...

    def compute(self) -> Made: ...


class SharedRuns(Generic[Variant, Inputs, Result]):
    """Work that several sequences share, captured once for each variant that was needed."""

    def __init__(self, make: Callable[[Variant, Inputs], Shared[Inputs, Result]]) -> None:
        self._make = make
        self._runs: dict[Variant, tuple[Shared[Inputs, Result], Callable[[], None], Result]] = {}
        self.is_captured = True  # False: a capture failed

    def __call__(self, variant: Variant, inputs: Inputs, capture: Capture | None = None) -> Result:
        """Return the result over `inputs`; where it is replayed, the next call overwrites it."""
        if variant not in self._runs:
            shared = self._make(variant, inputs)
            shared.load(inputs)
            if capture is None:
                return shared.compute()
            step, result = lasting(shared.compute)
            replay = capture(step, (None, variant))
            self.is_captured = replay is not None
            if replay is None:
                return result
            self._runs[variant] = shared, replay, result
        shared, replay, result = self._runs[variant]
        shared.load(inputs)
        replay()
        return result


class SplitCycle(NamedTuple):
    """Draft and end of one variant of the cycle; a graph reads and writes the same memory always.

    `output` is what `end` reads, beside the last proposal. `pool` is what `draft` reads where the
    draft head was run for several texts.
    """

    output: Output
    draft: Callable[[], Proposal]
    end: Callable[[], None]
    pool: Pool | None = None

    def read_pool(self, pool: Pool) -> None:
        """Copy the candidates of the draft head."""
        assert self.pool is not None, "captured for candidates"
        for own, new in zip(self.pool[:3], pool[:3], strict=True):
            own.copy_(new)

    def read(self, output: Output) -> None:
        """Copy the output of the pass, as far as the end of the cycle reads it."""
        for own, new in zip(self.output, output, strict=True):
            if own is not None and new is not None and own.numel():
                own.copy_(new)


def capture_split(
    state: DecodeState,
    target: Target,
    drafter: Drafter | None,
    spec: CycleSpec,
    pieces: Pieces,
    capture: Callable[[Callable[[], None]], Callable[[], None]],
    pool: Pool | None = None,
) -> SplitCycle:
    """Capture both parts of a cycle of `spec`; `pool` is the memory of its candidates, if given.

    `capture` captures a step and returns the function that replays it.
    Rows past the text change, in the cache too: the cycle has not begun yet.
    """
    draft, proposal = lasting(lambda: pieces.draft(state, drafter, spec), state.advanced)
    begin = capture(draft)

    def drafted() -> Proposal:
        begin()
        return proposal

    output = _zeros(state, target, spec, len(proposal.depths))
    end = capture(lambda: pieces.finish(state, spec, proposal, output))
    return SplitCycle(output, drafted, end, pool)


def _zeros(state: DecodeState, target: Target, spec: CycleSpec, T: int) -> Output:
    """Return memory for what the end of a cycle reads; features only where they are stored."""
    weight, config = target.weight, target.config
    logits = torch.zeros(T, config.vocab_size, device=weight.device)
    width, n_aux = config.dim if spec.width else 0, len(state.aux_layers)
    if not n_aux:
        return Output(logits, weight.new_zeros(T, width))
    aux_states = logits.new_zeros(T, n_aux * width)
    return Output(logits, weight.new_zeros(T, 0), aux_states)
