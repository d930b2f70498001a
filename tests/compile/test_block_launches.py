"""What the fused blocks of CUDA launch: of which blocks, of how many rows, within which range."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from fasteagle.compile import cuda_blocks
from fasteagle.compile.cuda_blocks import MAX_ROWS
from fasteagle.compile.kernels import block_kernels, gate_kernels, tree_kernels
from fasteagle.model import Rows
from fasteagle.quant import kernels
from fasteagle.quant.scheme import Scheme
from fasteagle.tree import TreeView
from helpers import random_head
from interleaved_models import fused_target, pack_, packed_target

ROW = Rows(torch.zeros(1, 1, 32), torch.zeros(1, 1, 32), torch.arange(1), torch.ones(1, 8))


def test_a_part_of_the_blocks_begins_where_it_is_told_to():
    """Between two auxiliary layers of a draft head."""
    model, _ = packed_target()
    blocks, run = list(model.blocks), fused_target(model).ops.run_blocks
    for first in (0, 1):
        with (
            mock.patch.object(cuda_blocks, "_attention") as attention,
            mock.patch.object(cuda_blocks, "_mlp"),
            mock.patch.object(block_kernels, "add"),
            mock.patch.object(block_kernels, "add_norm", return_value=(None, None)),
        ):
            run(blocks[first:], [(None, None)] * (2 - first), torch.zeros(1, 128), ROW)
        qkv = [call.args[1].qkv.words for call in attention.call_args_list]
        wanted = [block.attention.qkv.words for block in blocks[first:]]
        assert len(qkv) == len(wanted) and all(map(torch.equal, qkv, wanted))


def test_features_that_no_norm_bounds_stay_finite_in_half_precision(monkeypatch):
    """An infinite one would become NaN in the block, or in the head's next step."""
    head = random_head(packed_target()[0])
    pack_(head.half(), Scheme(4, 64))
    blocks, read = cuda_blocks.FusedBlocks([head.block]), []
    monkeypatch.setattr(cuda_blocks, "launch_blocks", lambda x, *rest: read.append(x) or 2 * x)
    x = torch.tensor([[float("inf"), -float("inf"), 40_000.0, 3.0]])
    result = blocks.run_alone(x, ROW, (None, None)).half()
    assert read[0].isfinite().all() and result.isfinite().all()
    assert read[0][0, 2:].tolist() == [40_000.0, 3.0] and result[0, 3] == 6


@pytest.mark.parametrize("rows", [MAX_ROWS, MAX_ROWS + 1])
def test_as_many_rows_at_once_as_the_kernels_take(rows):
    """A gate of more rows reads a product that is not split; experts run over parts of them."""
    x, parts, taken = torch.zeros(rows, 4), torch.zeros(1, rows, 4), []

    def run_experts(x, parts, weights, settings):
        taken.append(len(x))
        return x, parts[0]

    with (
        mock.patch.object(kernels, "gated", return_value=None),
        mock.patch.object(kernels, "partial_sums"),
        mock.patch.object(gate_kernels, "gate", return_value=(None, None)) as gate,
        mock.patch.object(gate_kernels, "gate_rows", return_value=(None, None)) as gate_rows,
        mock.patch.object(block_kernels, "add", torch.add),
        mock.patch.object(cuda_blocks, "run_experts", run_experts),
    ):
        cuda_blocks._mlp(x, mock.Mock(), "fp32")
        cuda_blocks._experts(x, parts, mock.Mock(), mock.Mock())
    is_more = rows > MAX_ROWS
    assert gate_rows.called is is_more and gate.called is not is_more
    assert taken == ([MAX_ROWS, 1] if is_more else [MAX_ROWS])


@pytest.mark.parametrize(
    ("E", "normed", "fused"),
    [
        (32, False, True),
        (128, False, True),
        (80, False, True),
        (160, False, False),
        (64, True, True),
        (128, True, True),
        (80, True, False),
        (256, True, False),
    ],
)
def test_the_first_kernel_of_attention_rotates_heads_that_fit_it(E, normed, fused):
    rows = torch.zeros(2, 1, E), torch.zeros(2, 1, E), torch.arange(2)
    view = TreeView(torch.tensor(9), torch.zeros(2, 1, dtype=torch.int32), torch.zeros(2), None)
    norms = dict.fromkeys(("q_norm", "k_norm"), torch.ones(E) if normed else None)
    weights = mock.Mock(**norms, out=mock.Mock(K=4 * E))
    weights.mlp_norm.dtype = torch.bfloat16
    with (
        mock.patch.object(kernels, "partial_sums"),
        mock.patch.object(block_kernels, "rope") as rope,
        mock.patch.object(tree_kernels, "tree_attention") as attention,
        mock.patch.object(tree_kernels, "rope_attention") as rope_attention,
    ):
        own = Rows(*rows, view)
        cuda_blocks._attention(None, weights, own, None, None, mock.Mock())
    assert rope_attention.called is fused
    assert rope.called is attention.called is not fused
    rotates = rope_attention if fused else rope
    assert rotates.call_args.args[0].dtype == torch.bfloat16, "as the cache has its keys"
