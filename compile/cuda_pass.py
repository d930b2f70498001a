"""Run one pass of the target on CUDA over the rows of several sequences.

The kernels find the tensors of a sequence by their addresses, in a table on the device, and every
number that changes from pass to pass is read there too. So one captured pass serves any sequences:
there is one for each number of rows and of sequences, both rounded up. A row has the bits that it
has in a pass of its own sequence.

Shapes: B sequences, M rows of a pass, G KV heads, group query heads of each, E head dim.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fasteagle.compile.cuda_blocks import MAX_ROWS
from fasteagle.compile.split_cycles import SharedRuns
from fasteagle.decoding.cycle import EAGER
from fasteagle.decoding.launch import Capture
from fasteagle.decoding.together import Caches, groups, split
from fasteagle.model import Output, Target
from fasteagle.state import DecodeState
from fasteagle.tree import Proposal, TreeView

if TYPE_CHECKING:  # at run time only where Triton is: on CUDA
    from fasteagle.compile.kernels.sequence_kernels import Sequences

ROWS = (2, 4, 8, 16, 32, MAX_ROWS)  # of a pass, padding included
SEQUENCES = (2, 4, 8)
ALIGNMENT = 16  # bytes; the kernels load whole pieces of a key


class Member(NamedTuple):
    """Tensors of one sequence that a pass reads, and the cache that it writes."""

    seq_len: Tensor  # 0-d
    tokens: Tensor  # [T]
    depths: Tensor  # [T]
    paths: Tensor  # [T, P] int32
    rows: Tensor  # [2 L, G, S, E], see `KVCache`

    @classmethod
    def of(cls, state: DecodeState, proposal: Proposal) -> Member:
        own = proposal.tree.tokens, proposal.depths, proposal.paths
        tokens, depths, paths = (each.contiguous() for each in own)
        return cls(state.seq_len, tokens, depths, paths, state.cache.rows)

    def numbers(self) -> list[int]:
        """Return the fields of `sequence_kernels`, in their order."""
        T, P = self.paths.shape
        whole = self.seq_len, self.tokens, self.depths
        assert {each.dtype for each in whole} == {torch.int64}, "as the kernels read them"
        assert self.paths.dtype == torch.int32 and len(self.depths) == len(self.tokens) == T
        addresses = [each.data_ptr() for each in (*whole, self.paths)]
        return [T, *addresses, P, *cache_numbers(self.rows)]


def cache_numbers(rows: Tensor) -> list[int]:
    """Return the last fields of `sequence_kernels` for a cache's `rows` [2 L, G, S, E]."""
    assert rows.stride(2) == rows.shape[3] and rows.stride(3) == 1, "rows one after the other"
    numbers = [rows.data_ptr(), *(rows.stride(i) * rows.element_size() for i in (0, 1))]
    assert not any(number % ALIGNMENT for number in numbers), "whole pieces"
    return numbers


def send(numbers: Sequence[Sequence[int]], into: Tensor, missing: int = 0) -> None:
    """Copy rows of numbers into the first rows of a tensor, and `missing` into the others."""
    width = into.shape[1]
    assert all(len(row) == width for row in numbers)
    rows = [*numbers, *[[missing] * width] * (len(into) - len(numbers))]
    host = torch.tensor(rows, dtype=into.dtype)
    # From page-locked memory the host does not wait for what was launched before.
    into.copy_(host.pin_memory() if into.is_cuda else host, non_blocking=True)


def shared_caches(rows: Tensor, n_slots: int, sequences: Sequences, row_block: int) -> Caches:
    """Return caches of several sequences like `rows` [2 L, G, S, E], of up to `n_slots` slots."""
    from fasteagle.compile.kernels.tree_kernels import SharedPlane

    n_planes, G, _, E = rows.shape
    size = G, n_slots, E
    planes = [SharedPlane(sequences, i, size, rows.dtype, row_block) for i in range(n_planes)]
    return Caches(list(zip(planes[::2], planes[1::2], strict=True)))


class Shape(NamedTuple):
    """Constants of a pass; all else is read on the device."""

    rows: int
    sequences: int
    n_slots: int  # most slots of a cache
    aux_layers: tuple[int, ...]


class SharedPass:
    """Pass of one shape, with its tables."""

    def __init__(self, target: Target, shape: Shape, rows: Tensor) -> None:
        """Make the tables for caches like `rows`."""
        from fasteagle.compile.kernels import sequence_kernels, tree_kernels

        config = target.config
        self._target, self._aux_layers = target, shape.aux_layers
        self._group = config.n_head // config.n_kv_head
        # Most blocks hold the rows of one sequence, which has its share of them.
        self._block = tree_kernels.row_block(-(-shape.rows // shape.sequences) * self._group)
        n_blocks = sequence_kernels.n_blocks(shape.rows, shape.sequences, self._group, self._block)
        fields = int(sequence_kernels.FIELDS)
        table = torch.zeros(shape.sequences, fields, dtype=torch.int64, device=rows.device)
        self._sequences = sequence_kernels.empty(table, shape.rows, MAX_ROWS, n_blocks)
        self._cache = shared_caches(rows, shape.n_slots, self._sequences, self._block)
        self._numbers: list[list[int]] = []

    def load(self, members: Sequence[Member]) -> None:
        """Let the next run have these sequences; their tensors must live until it has ended."""
        numbers = [member.numbers() for member in members]
        if numbers == self._numbers:
            return
        self._numbers = numbers
        send(numbers, self._sequences.table)

    def compute(self) -> Output:
        """Run the pass over the sequences that are loaded; return its output [M, ...]."""
        from fasteagle.compile.kernels import sequence_kernels

        own = self._sequences
        with torch.cuda.device_of(own.table):
            sequence_kernels.gather(own, self._group, self._block)
        view = TreeView(own.seq_lens, own.paths, own.depths, self._target.config.sliding_window)
        rows = own.tokens, own.positions, own.slots, view
        return self._target(*rows, self._cache, self._aux_layers)  # type: ignore[arg-type]


class CudaPass:
    """Passes over the rows of several sequences, one for each shape that was needed.

    They are run by fused blocks: `target` must have them.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self.runs: SharedRuns[Shape, Sequence[Member], Output] = SharedRuns(
            lambda shape, members: SharedPass(target, shape, members[0].rows)
        )

    def __call__(
        self,
        states: Sequence[DecodeState],
        proposals: Sequence[Proposal],
        capture: Capture | None = None,
    ) -> list[Output]:
        """Return the output of each proposal, as many in a pass as its tables have room for.

        Passes are replayed where `capture` is given and captures them. Outputs are views of memory
        that the next call overwrites.
        """
        outputs: list[Output] = []
        sizes = [len(proposal.depths) for proposal in proposals]
        ranges = list(groups(sizes, MAX_ROWS, SEQUENCES[-1]))
        for begin, end in ranges:
            own, trees = states[begin:end], proposals[begin:end]
            if len(trees[0].depths) > MAX_ROWS:
                outputs.append(EAGER.verify(own[0], self._target, trees[0]))
                continue
            output = self._run(own, trees, capture)
            if len(ranges) > 1:  # another one may have the same memory
                output = Output(*(each if each is None else each.clone() for each in output))
            outputs += split(output, [len(proposal.depths) for proposal in trees])
        return outputs

    @torch.no_grad()
    def launch_all(self, state: DecodeState) -> None:
        """Run a pass of each shape over no sequences; only its launches matter."""
        rest = state.cache.n_slots, state.aux_layers
        for rows, n in itertools.product(ROWS, SEQUENCES):
            if n <= rows:
                SharedPass(self._target, Shape(rows, n, *rest), state.cache.rows).compute()

    def _run(
        self, states: Sequence[DecodeState], proposals: Sequence[Proposal], capture: Capture | None
    ) -> Output:
        """Return the output of the rows of all proposals, one after the other."""
        sizes = [len(proposal.depths) for proposal in proposals]
        shape = Shape(
            rows=at_least(sum(sizes), ROWS),
            sequences=at_least(len(sizes), SEQUENCES),
            n_slots=max(state.cache.n_slots for state in states),
            aux_layers=states[0].aux_layers,
        )
        members = [Member.of(*pair) for pair in zip(states, proposals, strict=True)]
        output = self.runs(shape, members, capture)
        return Output(*(each if each is None else each[: sum(sizes)] for each in output))


def at_least(n: int, steps: Sequence[int]) -> int:
    """Return the smallest of `steps` that is no less than `n`."""
    return next(step for step in steps if step >= n)
