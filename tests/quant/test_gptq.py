"""GPTQ against plain rounding, where inputs say which weights matter."""

from __future__ import annotations

import pytest
import torch

from fasteagle.errors import FasteagleError
from fasteagle.loading.checkpoint import load_model, open_checkpoint
from fasteagle.loading.gptq_pass import gptq_weights
from fasteagle.loading.tensors import is_block_linear
from fasteagle.options import RuntimeOptions
from fasteagle.quant.gptq import gptq_weight
from fasteagle.quant.params import quantize_weight
from fasteagle.quant.scheme import Scheme
from helpers import save_tiny


def inputs(n=600, k=128) -> torch.Tensor:
    """Mostly in a few directions, as activations are."""
    g = torch.Generator().manual_seed(0)
    main = torch.randn(n, k // 4, generator=g) @ torch.randn(k // 4, k, generator=g)
    return main + 0.3 * torch.randn(n, k, generator=g)


def test_outputs_are_closer_than_rounding_alone_brings_them():
    x = inputs()
    w = torch.randn(40, 128, generator=torch.Generator().manual_seed(1)) * 0.05
    for group in (32, 64, 128):
        ours = gptq_weight(w, x.T @ x, group)
        plain = quantize_weight(w, Scheme(4, group))
        assert ours.group_size == group and ours.scales.dtype == torch.bfloat16
        exact = x @ w.T
        errors = [(x @ q.dequantize().T - exact).norm() for q in (ours, plain)]
        assert errors[0] < 0.6 * errors[1], (group, errors)


def test_uncorrelated_inputs_leave_plain_rounding():
    """Without correlations no column can make up for another."""
    w = torch.randn(16, 64, generator=torch.Generator().manual_seed(2)) * 0.05
    ours = gptq_weight(w, torch.eye(64) * 7, 32)
    assert torch.equal(ours.dequantize(), quantize_weight(w, Scheme(4, 32)).dequantize())


def test_columns_never_used_do_no_harm():
    x = inputs(k=64)
    x[:, 5] = 0
    w = torch.randn(16, 64, generator=torch.Generator().manual_seed(3)) * 0.05
    found = gptq_weight(w, x.T @ x, 32).dequantize()
    assert torch.isfinite(found).all()
    assert (x @ (found - w).T).norm() < 0.1 * (x @ w.T).norm()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("g") / "model"
    return save_tiny(path, "qwen2", intermediate_size=128, initializer_range=0.08)


def test_a_whole_model(folder):
    """On its own kind of text the model's outputs stay closer than with rounding alone."""
    checkpoint = open_checkpoint(folder)
    g = torch.Generator().manual_seed(4)
    texts = [torch.randint(0, 256, (96,), generator=g).tolist() for _ in range(12)]
    found = gptq_weights(checkpoint, texts, Scheme(4, 32, "gptq"))
    assert set(found) == {n for n in checkpoint.names() if is_block_linear(n)}
    plain = {name: quantize_weight(checkpoint.load(name), Scheme(4, 32)) for name in found}
    error, plain_error = (_output_error(checkpoint, w, texts[0]) for w in (found, plain))
    assert error < 0.8 * plain_error


def _output_error(checkpoint, weights, ids) -> float:
    """How far the features of `ids` move when the model computes with these packed weights."""

    def load(name):
        return weights[name].dequantize() if name in weights else checkpoint.load(name)

    full = _features(checkpoint, ids)
    return (_features(_Changed(checkpoint, load), ids) - full).norm().item()


class _Changed:
    def __init__(self, checkpoint, load):
        self.config, self.names, self.shape = checkpoint.config, checkpoint.names, checkpoint.shape
        self.load = load


def _features(checkpoint, ids):
    from fasteagle.generate import Engine

    model = load_model(checkpoint, dtype=torch.float32, device="cpu", max_seq_len=128)
    return Engine(model, 128).features(ids)


def test_text_the_model_makes_up_is_enough(folder, monkeypatch):
    """Through the option: no data given, the model writes, and on such text the result is good."""
    from fasteagle.loading import open as door

    monkeypatch.setattr(door, "GPTQ_TOKENS", 700)
    monkeypatch.setattr(door, "compile_now", lambda engine: True)
    said: list[str] = []
    opened, options = door.open_model(str(folder)), RuntimeOptions(quant="int4-g32-gptq")
    first = opened.prepared(options, said.append).checkpoint
    assert "the model writes 700 tokens to calibrate on ..." in said
    assert first.scheme.method == "gptq"
    texts = opened.gptq_texts(said.append)  # as kept
    checkpoint = opened.checkpoint
    linears = [name for name in checkpoint.names() if is_block_linear(name)]
    found = {name: first.packed(name) for name in linears}
    expected = gptq_weights(checkpoint, texts, first.scheme)
    for name in linears:
        assert torch.equal(found[name].dequantize(), expected[name].dequantize()), name
    plain = {name: quantize_weight(checkpoint.load(name), Scheme(4, 32)) for name in linears}
    error, plain_error = (_output_error(checkpoint, w, texts[0]) for w in (found, plain))
    assert error < 0.9 * plain_error
    said.clear()
    opened.prepared(options, said.append)
    assert said == []  # kept, not made again


def test_too_little_text(folder):
    with pytest.raises(FasteagleError, match="40 tokens is too short for GPTQ: give 512"):
        gptq_weights(open_checkpoint(folder), [[1] * 40], Scheme(4, 32, "gptq"))
