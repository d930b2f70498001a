"""Mixtures of experts in our CPU kernels: the core's layer with activations in 8 bits."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from fasteagle.compile.cpu_blocks import expert_tensors
from fasteagle.config import MoEConfig
from fasteagle.model import MoE
from fasteagle.quant.cpu_linear import NativeLinear, pack
from fasteagle.quant.cpu_tensors import BlockTensors
from fasteagle.quant.packed import int8
from rounding import Rounded
from test_cpu_kernels import KINDS, packed_weight, rows_of

LAYERS = {
    "mixtral": MoEConfig(8, 2, 64, renormalize=True),
    "one wide expert": MoEConfig(1, 1, 8192),
    "all experts": MoEConfig(5, 5, 32, renormalize=True, scale=2.5),
    "shared": MoEConfig(33, 3, 32, scale=1.5, shared_ffn_dim=96),
    "shared and wide": MoEConfig(4, 1, 32, shared_ffn_dim=8192),
    "shared by a gate": MoEConfig(6, 4, 96, shared_ffn_dim=32, shared_gate=True),
    "biased": MoEConfig(12, 4, 32, renormalize=True, choice_bias=True),
    "biased, all weighed": MoEConfig(7, 3, 32, shared_ffn_dim=32, choice_bias=True),
}


def layers(config: MoEConfig, kind: str, D: int = 96) -> tuple[MoE, MoE]:
    """A layer by our kernels and its twin in plain torch."""
    torch.manual_seed(0)
    native, twin = MoE(D, config), MoE(D, config)
    twin.router = native.router
    twin.shared_gate, twin.choice_bias = native.shared_gate, native.choice_bias
    if config.choice_bias:
        native.choice_bias.data.normal_(0, 0.2)
    for name, linear in list(native.named_modules()):
        if name.endswith(("gate_up", "down")):
            weight = packed_weight(linear.out_features, linear.in_features, 32, kind)
            native.set_submodule(name, NativeLinear(weight, None))
            twin.set_submodule(name, Rounded(weight.dequantize()))
    return native.requires_grad_(False), twin.requires_grad_(False)


def run(ops, layer: MoE, x: Tensor, **changes: Tensor) -> Tensor:
    """x + layer(x), by a block whose attention adds nothing and whose norms are none."""
    T, D = x.shape
    nothing, none = torch.ones(1, 1), torch.empty(0)
    tensors = BlockTensors(
        attention_norm=none,
        qkv=pack(int8(torch.zeros(96, D), nothing.expand(96, 1))),
        qkv_bias=none,
        q_norm=none,
        k_norm=none,
        out=pack(int8(torch.zeros(D, 32), nothing.expand(D, 1))),
        mlp_norm=none,
        gate_up=layer.gate_up.packed,
        down=layer.down.packed,
        **(expert_tensors(layer) | changes),
    )
    caches = [torch.zeros(1, 64, 32) for _ in range(2)]
    mask = torch.ones(T, 64, dtype=torch.bool).tril()
    rope, slots = (torch.ones(T, 32), torch.zeros(T, 32)), torch.arange(T)
    return ops.blocks(x, *rope, slots, mask, None, None, None, 0, caches, tensors, 1, 1e-5)


# Each layer with two kinds of weights.
CASES = [(name, KINDS[(i + j) % len(KINDS)]) for i, name in enumerate(LAYERS) for j in (0, 3)]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_layer_is_that_of_the_core(ops, name, kind):
    layer, twin = layers(LAYERS[name], kind)
    x = rows_of(32, 96)
    x[::3, 32:64] *= 5  # blocks so large that what was rounded off is multiplied too
    y, expected = run(ops, layer, x), twin(x)
    # Rounding to 8 bits turns over where fp32 sums differ in their last bits.
    assert ((y - x - expected).norm(dim=1) < 0.01 * expected.norm(dim=1)).all()
    for T in range(1, 33):
        assert torch.equal(run(ops, layer, x[:T]), y[:T]), T
    assert torch.equal(run(ops, layer, x[20:23]), y[20:23])
    assert torch.equal(run(ops, layer, x.flip(0)).flip(0), y)


@pytest.mark.parametrize("name", ["shared", "shared by a gate", "biased"])
def test_any_number_of_threads_gives_the_same_bits(ops, name):
    layer, _ = layers(LAYERS[name], "q4_1")
    x, results = rows_of(19, 96), []
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        results.append(run(ops, layer, x))
    assert all(torch.equal(result, results[0]) for result in results)


def test_the_lower_of_equal_experts_is_chosen(ops):
    """All rows choose the same experts, also if the last is better, then each expert one row."""
    for config, last in product((LAYERS["mixtral"], LAYERS["shared"]), (-1.0, 1.01)):
        layer, twin = layers(config, "int8")
        layer.router.weight.zero_()
        layer.router.weight[config.n_expert - 1] = last
        layer.router.weight[1:5] = 1.0
        x = rows_of(32, 96).abs()
        chosen = [*range(1, config.top_k), config.top_k if last < 0 else config.n_expert - 1]
        assert twin.route(x)[0].unique().tolist() == chosen
        expected = twin(x)
        assert ((run(ops, layer, x) - x - expected).norm() < 0.01 * expected.norm()).all()
    layer, twin = layers(MoEConfig(32, 1, 32), "int8")
    layer.router.weight.copy_(torch.eye(32, 96))
    x = rows_of(32, 96)
    x[:, :32] += 100 * torch.eye(32)
    assert twin.route(x)[0].flatten().tolist() == list(range(32))
    expected = twin(x)
    assert ((run(ops, layer, x) - x - expected).norm(dim=1) < 0.01 * expected.norm(dim=1)).all()


@pytest.mark.parametrize("name", ["mixtral", "shared by a gate", "biased", "biased, all weighed"])
def test_logits_of_any_size_weigh_experts(ops, name):
    """Logits apart by hundreds, where the bias chooses others than the highest first."""
    layer, twin = layers(LAYERS[name], "int8")
    layer.router.weight *= 300
    if layer.shared_gate is not None:
        layer.shared_gate.weight *= 300
    if layer.choice_bias is not None:
        layer.choice_bias *= 10
    x = rows_of(32, 96)
    y, expected = run(ops, layer, x), twin(x)
    assert ((y - x - expected).norm(dim=1) <= 0.02 * expected.norm(dim=1)).all()


def test_what_is_not_finite_stays_visible(ops):
    layer, _ = layers(LAYERS["mixtral"], "q4_1")
    x = rows_of(9, 96)
    clean = run(ops, layer, x)
    x[8, 5] = float("nan")  # in the last row, whose key no other row sees
    y = run(ops, layer, x)
    assert y[8].isnan().all() and torch.equal(y[:8], clean[:8])


def test_routers_that_do_not_fit_are_refused(ops):
    layer, _ = layers(LAYERS["shared by a gate"], "int8")
    shared = ("shared_gate_up", "shared_down")
    odd = [pack(packed_weight(*size, "int8")) for size in ((80, 96, 32), (96, 40, 40))]
    for changes, message in (
        ({"router": torch.zeros(6, 64)}, "4 of 6 experts, router"),
        ({"router": torch.zeros(5, 96)}, "gate_up is"),
        ({"router": torch.zeros(6, 96, 2)}, "a router, and"),
        ({"router": torch.zeros(96, 6).T}, "a router, and"),
        ({"choice_bias": torch.zeros(5)}, "bias of 6 experts"),
        ({"choice_bias": torch.zeros(12)[::2]}, "bias of 6 experts"),
        ({"routing": torch.tensor([7.0, 0, 1]).double()}, "7 of 6 experts"),
        ({"routing": torch.tensor([0.0, 0, 1]).double()}, "0 of 6 experts"),
        ({"routing": torch.zeros(2).double()}, "how it weights"),
        ({"shared_gate": torch.zeros(5)}, "shared expert of width 32"),
        ({"shared_gate": torch.zeros(192)[::2]}, "shared expert of width 32"),
        ({"shared_gate_up": layer.gate_up.packed}, "shared expert of width 32"),
        ({"shared_gate_up": pack(packed_weight(64, 64, 32, "int8"))}, "shared expert of width 32"),
        ({"shared_down": pack(packed_weight(64, 32, 32, "int8"))}, "shared expert of width 32"),
        (dict(zip(shared, odd, strict=True)), "shared expert of width 40"),
    ):
        with pytest.raises(RuntimeError, match=message):
            run(ops, layer, torch.zeros(2, 96), **changes)
