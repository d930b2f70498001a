"""Query and key rows in pairs, read in halves."""

from __future__ import annotations

import pytest
import torch

from fasteagle.loading.changed import ChangedCheckpoint
from fasteagle.loading.tensors import DummyCheckpoint
from fasteagle.quant.params import quantize_weight
from fasteagle.quant.scheme import Scheme
from helpers import tiny_config

CONFIG = tiny_config(dim=64, n_head=4, n_kv_head=2, head_dim=16)
Q, K, V = (f"model.layers.1.self_attn.{n}_proj.weight" for n in "qkv")


class Packed(DummyCheckpoint):
    """Random weights, rounded to 4 bits and packed."""

    def packed(self, name):
        return quantize_weight(super().load(name), Scheme(4, 32))

    def load(self, name):
        return self.packed(name).dequantize()


@pytest.mark.parametrize(("name", "n_head"), [(Q, 4), (K, 2), (V, None)])
def test_all_ways_to_read_a_weight_agree(name, n_head):
    inner = Packed(CONFIG)
    halved = ChangedCheckpoint(inner, halved=True)
    expected = inner.load(name)
    if n_head is not None:
        heads = expected.view(n_head, 8, 2, 64)
        expected = torch.cat((heads[:, :, 0], heads[:, :, 1]), dim=1).reshape(expected.shape)
        assert not torch.equal(expected, inner.load(name))
    assert torch.equal(halved.load(name), expected)
    assert torch.equal(halved.packed(name).dequantize(), expected)
    start = halved.start(name, 70).flatten()
    assert len(start) >= 70 and torch.equal(start, expected.flatten()[: len(start)])
    assert halved.shape(name) == inner.shape(name) and halved.names() == inner.names()
