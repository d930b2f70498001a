"""Passes over several sequences on CUDA: which of them are one pass, and of which shape.

`test_interpreted_sequences.py` has results.
"""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from fasteagle.compile import cuda_pass
from fasteagle.compile.cuda_blocks import MAX_ROWS
from fasteagle.compile.cuda_pass import (
    ROWS,
    SEQUENCES,
    CudaPass,
    Member,
    Shape,
    SharedPass,
    cache_numbers,
)
from fasteagle.decoding.cycle import EAGER
from fasteagle.model import Output


class Passes(CudaPass):
    """Counts and describes passes, which yield the number of the run."""

    def __init__(self) -> None:
        super().__init__(SimpleNamespace())
        self.made: list[Shape] = []


@pytest.fixture
def passes(monkeypatch):
    made = Passes()

    class Shared:
        def __init__(self, target, shape, rows) -> None:
            made.made.append(shape)
            self.runs, self.shape, self.loaded = 0, shape, None

        def load(self, members) -> None:
            self.loaded = members

        def compute(self) -> Output:
            assert self.loaded
            self.runs += 1
            rows = torch.arange(self.shape.rows).unsqueeze(1) + 100 * self.runs
            return Output(rows, rows)

    monkeypatch.setattr("fasteagle.compile.cuda_pass.SharedPass", Shared)
    return made


def sequences(sizes):
    cache = SimpleNamespace(n_slots=256, rows=torch.zeros(1))
    ints = torch.zeros((), dtype=torch.long)
    states = [SimpleNamespace(seq_len=ints, cache=cache, aux_layers=()) for _ in sizes]
    rows = [torch.zeros(n, dtype=torch.long) for n in sizes]
    proposals = [
        SimpleNamespace(tree=SimpleNamespace(tokens=row), depths=row, paths=row) for row in rows
    ]
    return states, proposals


def test_a_pass_is_captured_once_for_rows_and_sequences_rounded_up(passes):
    variants = []

    def capture(step, variant):
        variants.append(variant)
        return step

    for sizes in ([1, 1], [2, 1, 1], [1, 1, 2], [5, 8], [16, 1, 1, 1], [3, 4, 5, 1]):
        outputs = passes(*sequences(sizes), capture)
        assert [len(output.logits) for output in outputs] == sizes
        first = int(outputs[0].logits[0])
        together = torch.cat([output.logits for output in outputs])
        assert together.flatten().tolist() == [*range(first, first + sum(sizes))]
    assert [shape[:2] for shape in passes.made] == [(2, 2), (4, 4), (16, 2), (32, 4), (16, 4)]
    assert len(variants) == 5 and passes.runs.is_captured
    assert {shape.rows for shape in passes.made} <= {*ROWS}
    assert {shape.sequences for shape in passes.made} <= {*SEQUENCES}


def test_more_than_a_pass_takes_are_several_passes(passes):
    """Of the same shape: the second one must not change what the first one has yielded."""
    outputs = passes(*sequences([20, 20, 20, 20]), lambda step, variant: step)
    assert [shape.rows for shape in passes.made] == [64, 32]
    outputs = passes(*sequences([30, 30, 30, 30]), lambda step, variant: step)
    firsts = [int(output.logits[0]) for output in outputs]
    assert len({*firsts}) == 4 and [len(output.logits) for output in outputs] == [30] * 4
    for n in (9, 16, 33):  # as when data for training is written, with a row of each
        outputs = passes(*sequences([1] * n), lambda step, variant: step)
        assert [len(output.logits) for output in outputs] == [1] * n
        assert {shape.sequences for shape in passes.made} <= {*SEQUENCES}


def test_a_pass_that_is_not_captured_runs_and_says_so(passes):
    for capture in (None, lambda step, variant: None):
        assert passes.runs.is_captured
        outputs = passes(*sequences([2, 3]), capture)
        assert [len(output.logits) for output in outputs] == [2, 3]
    assert not passes.runs.is_captured


def test_a_tree_of_more_rows_than_a_pass_takes_is_the_cores(passes, monkeypatch):
    rows = torch.full((MAX_ROWS + 1, 1), -1)
    eager = EAGER._replace(verify=lambda state, target, proposal: Output(rows, rows))
    monkeypatch.setattr(cuda_pass, "EAGER", eager)
    outputs = passes(*sequences([MAX_ROWS + 1, 3, MAX_ROWS]))
    assert [len(output.logits) for output in outputs] == [MAX_ROWS + 1, 3, MAX_ROWS]
    assert [bool((output.logits == -1).all()) for output in outputs] == [True, False, False]


def test_a_pass_has_room_for_the_largest_cache_and_what_the_head_reads(passes):
    states, proposals = sequences([1, 1])
    states[1].cache = SimpleNamespace(n_slots=512, rows=states[1].cache.rows)
    for state in states:
        state.aux_layers = (0, 2)
    passes(states, proposals)
    assert passes.made == [Shape(2, 2, 512, (0, 2))]


def test_tensors_that_kernels_find_by_addresses_are_in_one_piece():
    wide = torch.zeros(6, dtype=torch.long)[::2]
    state = SimpleNamespace(seq_len=wide[0], cache=SimpleNamespace(rows=torch.zeros(1)))
    proposal = SimpleNamespace(tree=SimpleNamespace(tokens=wide), depths=wide, paths=wide)
    member = Member.of(state, proposal)
    assert all(each.is_contiguous() for each in (member.tokens, member.depths, member.paths))
    for rows in (torch.zeros(2, 1, 3, 4).half(), torch.zeros(2, 1, 4, 16)[..., :8]):
        with pytest.raises(AssertionError):
            cache_numbers(rows)


def test_every_pass_is_launched_to_be_compiled(passes):
    """In all numbers of rows and of sequences that a pass may have."""
    [state], _ = sequences([1])
    state.aux_layers = (0, 2)
    with mock.patch.object(cuda_pass, "SharedPass") as made:
        passes.launch_all(state)
    shapes = [call.args[1] for call in made.call_args_list]
    expected = {(m, n, 256, (0, 2)) for m in ROWS for n in SEQUENCES if n <= m}
    assert len(shapes) == made.return_value.compute.call_count and {*shapes} == expected


def test_a_pass_reads_the_sequences_that_were_loaded_last(monkeypatch):
    """Also if as many were loaded before; and it has the window of the model."""
    config = SimpleNamespace(n_head=2, n_kv_head=1, sliding_window=7)
    target = mock.Mock(config=config)
    shared = SharedPass(target, Shape(4, 2, 64, ()), torch.zeros(2, 1, 64, 16).half())
    for _ in range(2):
        own = [torch.zeros(n, dtype=torch.long) for n in (1, 2)]
        members = [
            Member(row[0], row, row, row.int()[:, None], torch.zeros(2, 1, 64, 16).half())
            for row in own
        ]
        shared.load(members)
        assert shared._sequences.table.tolist() == [member.numbers() for member in members]
    monkeypatch.setattr("fasteagle.compile.kernels.sequence_kernels.gather", mock.Mock())
    shared.compute()
    assert target.call_args.args[3].window == 7
