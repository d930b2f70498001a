"""A mixture of experts by the kernels as compiled, in our interpreter of PTX, against the core."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import Tensor

from device_checks import close
from fasteagle.compile.cuda_blocks import Settings, run_experts
from fasteagle.compile.cuda_tensors import weights_of
from fasteagle.compile.kernels import expert_kernels
from fasteagle.config import MoEConfig
from fasteagle.model import Block, MoE
from fasteagle.quant.cuda_linear import InterleavedLinear
from fasteagle.quant.packed import PackedWeight
from fasteagle.quant.params import quantize_weight
from fasteagle.quant.scheme import Scheme
from helpers import random_target, rest_slow, tiny_config
from interleaved_models import SHAPE, dense_

pytestmark = pytest.mark.usefixtures("card")
slow = pytest.mark.slow
PLAIN = MoEConfig(n_expert=7, top_k=2, ffn_dim=64)
SHARED = MoEConfig(5, 3, 64, renormalize=True, scale=2.5, shared_ffn_dim=128, shared_gate=True)
UNGATED = dataclasses.replace(PLAIN, renormalize=True, shared_ffn_dim=64)
BIASED = dataclasses.replace(PLAIN, renormalize=True, choice_bias=True)


class Layer:
    """A layer of experts in one format, by the kernels and by the core."""

    def __init__(
        self, config: MoEConfig, scheme: Scheme, accumulate: str = "fp32", offsets: bool = False
    ) -> None:
        model = random_target(tiny_config(**SHAPE | dict(moe=config, n_layer=1)))
        self.block: Block = model.blocks[0]
        for module in self.block.modules():
            for part in ("qkv", "out", "gate_up", "down"):
                if hasattr(module, part):
                    weight = quantize_weight(getattr(module, part).weight, scheme)
                    weight = with_offsets(weight) if offsets else weight
                    setattr(module, part, InterleavedLinear(weight, None, accumulate))
        self.core = dense_(copy.deepcopy(self.mlp))
        self.settings = Settings(
            self.block.mlp_norm.eps, accumulate, config.top_k, config.renormalize, config.scale
        )

    @property
    def mlp(self) -> MoE:
        mlp = self.block.mlp
        assert isinstance(mlp, MoE)
        return mlp

    def run(self, x: Tensor) -> Tensor:
        """The layer's results for rows x [M, D], which two parts add up to."""
        parts = torch.stack((0.25 * x, 0.25 * x))
        weights = weights_of(self.block)
        total, results = run_experts(0.5 * x, parts, weights, self.settings)
        assert torch.equal(total, x)
        return results.sum(0)

    def expected(self, x: Tensor) -> Tensor:
        result: Tensor = self.core(self.block.mlp_norm(x))
        return result


def with_offsets(weight: PackedWeight) -> PackedWeight:
    scales, offsets = weight.affine()
    return dataclasses.replace(weight, scales=scales.half(), zeros=None, offsets=offsets.half())


def rows(M: int) -> Tensor:
    return torch.randn(M, SHAPE["dim"], generator=torch.Generator().manual_seed(4))


CASES = [
    (PLAIN, Scheme(4, 64), "fp32", False),
    (SHARED, Scheme(4, 32), "fp16", False),
    (UNGATED, Scheme(8), "fp32", False),
    (PLAIN, Scheme(4, 32), "fp16", True),
    (SHARED, Scheme(8), "fp16", False),
    (BIASED, Scheme(4, 64), "fp32", False),
]


@pytest.mark.parametrize(("config", "scheme", "accumulate", "offsets"), rest_slow(CASES))
def test_results_are_the_cores_and_a_row_s_its_own(config, scheme, accumulate, offsets):
    layer = Layer(config, scheme, accumulate, offsets)
    x = rows(8)
    whole = layer.run(x)
    close(whole, layer.expected(x), 4e-3 if accumulate == "fp16" else 1e-3)
    for M in (1, 3):
        assert torch.equal(layer.run(x[:M]), whole[:M])


ONE, EACH = [0] * 20, list(range(7))


@pytest.mark.parametrize(("first", "M"), [(ONE, 20), *rest_slow([(ONE, 1), (EACH, 7)], 0)])
def test_rows_on_one_expert_and_on_one_each(first, M):
    """Two blocks of rows and one, places that nothing takes, and all places taken."""
    layer = Layer(dataclasses.replace(PLAIN, top_k=1), Scheme(4, 64))
    x = rows(M)
    normed = layer.block.mlp_norm(x)
    wanted = torch.zeros(M, PLAIN.n_expert)
    wanted[torch.arange(M), first[:M]] = 1.0
    router = torch.linalg.lstsq(normed, wanted).solution.T  # the score of each row's first is 1
    for mlp in (layer.mlp, layer.core):
        mlp.router.weight.data = router.contiguous()
    assert layer.core.route(normed)[0].flatten().tolist() == first[:M]
    close(layer.run(x), layer.expected(x), 1e-3)


@slow
def test_an_expert_s_activation_beyond_fp16():
    """Its span of columns is scaled: neither inf, nor are other columns lost."""
    layer, x = Layer(dataclasses.replace(PLAIN, ffn_dim=128), Scheme(4, 64)), rows(5)
    layer.block.mlp_norm.weight.data *= 2000
    result = layer.run(x)
    normed = layer.block.mlp_norm(x)
    gate, up = layer.core.gate_up(normed).unflatten(1, (-1, 2, 128)).unbind(2)
    assert (torch.nn.functional.silu(gate) * up).abs().max() > 65504
    close(result, layer.expected(x), 1e-3)


def routed(scores: Tensor, n_expert: int, k: int, renormalizes=False, shares=False, bias=None):
    """Return the ids and weights of each row's experts in their order, and the routings."""
    routings = expert_kernels.route(scores, n_expert, k, renormalizes, 1.5, shares, bias)
    M, (experts, counts, slots, weights) = len(scores), routings[0]
    ids = torch.full((k * M,), -1)
    used = [int(expert) for expert in experts if expert >= 0]
    assert used == sorted(set(used)) and (experts[len(used) :] == -1).all()
    assert not counts[len(used) :].any()
    for expert, count in zip(used, counts, strict=False):
        own = slots[expert, :count].long()
        assert (own % M).diff().gt(0).all(), "in the order of rows"
        ids[own] = expert
    return ids.view(k, M).T, weights.view(k, M).T, routings


def test_scores_where_neither_columns_nor_experts_fill_a_program():
    """Of norms that are not rounded; the residual stream and what the experts read, too."""
    M, D, R = 3, 200, 5
    generator = torch.Generator().manual_seed(5)
    x, router = (torch.randn(n, D, generator=generator) for n in (M, R))
    parts, scale = torch.randn(2, M, D + 8, generator=generator), torch.rand(D, generator=generator)
    total, out, scores = expert_kernels.norm_scores(x, parts, scale, router, 0.5)
    torch.testing.assert_close(total, x + parts[0, :, :D] + parts[1, :, :D])
    expected = torch.nn.functional.rms_norm(total, (D,), scale, 0.5)
    torch.testing.assert_close(scores, expected @ router.T, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out, expected.half(), rtol=1e-3, atol=1e-4)


ROUTES = [(1, 128, 8, False, False), (3, 6, 1, True, True), (5, 7, 2, True, False)]
ROUTES += [(20, 40, 8, True, True), (33, 60, 4, False, False), (4, 6, 6, True, False)]
ROUTES += [(9, 64, 6, False, True)]


@pytest.mark.parametrize(("M", "n_expert", "k", "renormalizes", "biased"), rest_slow(ROUTES, 4))
def test_routes_are_the_cores(M, n_expert, k, renormalizes, biased):
    config = MoEConfig(n_expert, k, 8, renormalize=renormalizes, scale=1.5, choice_bias=biased)
    layer = MoE(n_expert, config).requires_grad_(False)
    layer.router.weight.data = torch.eye(n_expert)
    scores = torch.randn(M, n_expert, generator=torch.Generator().manual_seed(7))
    scores[0] = scores[0].round()  # many are equal
    scores[-1] += 100
    bias = None
    if biased:  # it lets experts in whose weights are next to nothing
        bias = 0.05 * torch.randn(n_expert, generator=torch.Generator().manual_seed(8)) - 0.2
        scores[:, 2] -= 120
        bias[2] = 1.0
        layer.choice_bias.data.copy_(bias)
    expected, expected_weights = layer.route(scores)
    order = expected.argsort(1)
    ids, weights, _ = routed(scores, n_expert, k, renormalizes, bias=bias)
    assert torch.equal(ids, expected.gather(1, order))
    torch.testing.assert_close(weights, expected_weights.gather(1, order))
    last, own, _ = routed(scores[-1:], n_expert, k, renormalizes, bias=bias)
    assert torch.equal(last, ids[-1:]) and torch.equal(own, weights[-1:]), "bits are the row's own"


def test_routes_of_zeros_and_of_numbers_that_are_none():
    """However the scores are, each row has k experts; of equal ones the lower ids."""
    scores = torch.zeros(4, 9)
    scores[0, ::2] = -0.0
    scores[1] = float("nan")
    scores[2, 3], scores[3] = float("inf"), float("-inf")
    ids, weights, _ = routed(scores, 9, 3)
    assert ids.tolist() == [[0, 1, 2], [0, 1, 2], [0, 1, 3], [0, 1, 2]]
    torch.testing.assert_close(weights[0], torch.full((3,), 1.5 / 9))


def test_the_route_of_a_shared_expert():
    scores = torch.randn(18, 8, generator=torch.Generator().manual_seed(7))
    _, _, (_, shared) = routed(scores, 7, 2, shares=True)
    assert shared.experts.tolist() == [0] and shared.counts.tolist() == [18]
    assert shared.slots.tolist() == [list(range(18))]
    torch.testing.assert_close(shared.weights, scores[:, 7].sigmoid())
    _, _, (_, shared) = routed(scores[:, :7].contiguous(), 7, 2, shares=True)
    assert shared.weights.tolist() == [1.0] * 18


@slow
@pytest.mark.parametrize("card", [90], indirect=True)
def test_on_hopper(card):
    """The bits of a consumer card."""
    layer, x = Layer(SHARED, Scheme(4, 64)), rows(5)
    result = layer.run(x)
    card.capability = 86
    assert torch.equal(layer.run(x), result)
