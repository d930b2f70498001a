"""Checks of a proof by themselves: what they compute, and when they fail."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from fasteagle.compile import proof
from fasteagle.compile.cpu_backend import CpuBackend
from fasteagle.decoding.cycle import EAGER
from fasteagle.loading.source import quantize_linear
from fasteagle.quant.scheme import Scheme
from helpers import tiny_config
from interleaved_models import KernelBackend, packed_target
from native_models import SHAPE, native_head, native_target

KERNELS = pytest.mark.usefixtures("cpu_kernels")


def test_no_rounding_makes_a_tolerance_of_wrong_kernels():
    """Here activations in 8 bits change half of the result in the core itself."""
    one = torch.ones(4)
    computed = iter([(0.3 * one, one), (one, 2 * one)])
    check = proof.Check("passes", 0.06, lambda: next(computed), torch.nn.Module())
    assert check.failure() == "off by 0.7, at most 0.5"


@KERNELS
def test_linears_of_one_size_in_other_bits_are_of_another_kind():
    dense = torch.nn.Linear(64, 64, bias=False).requires_grad_(False)
    linears = [quantize_linear(dense, Scheme(bits, 32), native=True) for bits in (4, 8, 8)]
    results, _ = proof._products(torch.nn.ModuleList(linears))
    assert len(results) == 2 * proof.ROWS * 64


def test_prompts_are_checked_where_other_kernels_compute_them():
    checks = [*proof.checks(KernelBackend(packed_target()[0]))]
    assert [check.part for check in checks] == ["products", "passes", "passes", "commits"]
    assert checks[2].tolerance == proof.PROMPT_TOLERANCE


@KERNELS
def test_a_chain_of_unlikely_tokens_fails():
    """Though its path probabilities are those of these tokens."""
    backend = CpuBackend(native_target(tiny_config(**SHAPE)))
    head = native_head(backend.target.model, "eagle1")
    drafter, state = proof._drafting(backend, head)
    first, _ = drafter.extend(state.committed(proof.PENDING), state.seq_len)
    ids = first.argmin().repeat(proof.LEVELS)
    tokens = drafter.target_ids[ids]
    probabilities = proof._chain_logits(drafter, state, tokens).softmax(-1)
    promised = probabilities[torch.arange(proof.LEVELS), ids].cumprod(0)
    drafted = SimpleNamespace(
        tree=SimpleNamespace(tokens=torch.cat((state.root, tokens))), promised=promised.tolist()
    )
    with (
        mock.patch.object(backend, "drafts", return_value=True),
        mock.patch.object(backend, "_pieces", EAGER._replace(draft=lambda *_: drafted)),
    ):
        assert proof.distance(*proof._chain(backend, head)) > proof.CHAIN_TOLERANCE
