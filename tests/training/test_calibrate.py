"""Fitting a head to a quantized target: each stage by itself, the decision, and the command."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fasteagle.generate import Engine
from fasteagle.prompts import Conversation
from fasteagle.quant.params import quantize_weight
from fasteagle.quant.scheme import Scheme
from fasteagle.training import calibrate
from fasteagle.training.data import compute_features
from fasteagle.training.held_out import HeldOut
from fasteagle.training.loss import head_loss, make_batch
from fasteagle.training.train import new_head
from helpers import OPTIONS, eagle3_of, random_head, random_target, talk, tiny_config

SCHEME = Scheme(4, 32)


@pytest.fixture(scope="module")
def target():
    return random_target(tiny_config(dim=64, n_head=4, head_dim=16, ffn_dim=96))


def held(*counts) -> HeldOut:
    return HeldOut((0.5,), 1.5, sum(rows for rows, _ in counts), tuple(counts))


def test_a_gain_is_sure_only_beyond_its_interval():
    before = held(*[(50, 50)] * 20)
    better = calibrate.gain(before, held(*[(50, 60)] * 20))
    assert better.tau == pytest.approx(0.2) and better.low == better.high and better.is_sure
    g = torch.Generator().manual_seed(0)
    noise = (torch.randint(-20, 21, (20,), generator=g)).tolist()
    same = calibrate.gain(before, held(*[(50, 50 + n) for n in noise]))
    assert same.low < same.tau < same.high and not same.is_sure
    worse = calibrate.gain(before, held(*[(50, 40)] * 20))
    assert worse.tau == pytest.approx(-0.2) and not worse.is_sure


class Store:
    """Features in memory."""

    n_taps = 0

    def __init__(self, features):
        self._features = features
        self.lengths = [len(f) for f in features]
        self.prompt_lens = [1] * len(features)

    def __len__(self):
        return len(self._features)

    def conversation(self, i):
        return torch.zeros(self.lengths[i], dtype=torch.long), self._features[i]


@torch.no_grad()
def test_the_map_undoes_what_was_done_to_the_features(target):
    """Features bent by a known affine map: the folded head sees them as before."""
    head = random_head(target, rope_base=10000.0)
    g = torch.Generator().manual_seed(1)
    full = [torch.randn(200, 64, generator=g) for _ in range(6)]
    bend = torch.eye(64) + 0.2 * torch.randn(64, 64, generator=g) / 8
    bent = [f @ bend.T + 0.3 for f in full]
    fixed = calibrate.fold_feature_map(head, Store(full), Store(bent))
    embeds = torch.randn(5, 64, generator=g)
    wanted = head.fc(torch.cat((embeds, full[0][:5]), -1))
    unfixed = head.fc(torch.cat((embeds, bent[0][:5]), -1))
    found = fixed.fc(torch.cat((embeds, bent[0][:5]), -1))
    assert (found - wanted).norm() < 0.02 * (unfixed - wanted).norm()
    untouched = calibrate.fold_feature_map(head, Store(full), Store(full))
    assert torch.allclose(untouched.fc.weight, head.fc.weight, atol=1e-4)


def test_the_vocabulary_is_what_the_target_says(target):
    head = random_head(target, torch.arange(20, 40), rope_base=10000.0)
    said = [Conversation([1, 2, 50, 50, 51, 52, 50], 2)]
    ids = calibrate.rebuilt_vocabulary(head, said, target).target_ids().tolist()
    assert len(ids) == 20 and {50, 51, 52} <= set(ids)
    assert set(ids) - {50, 51, 52} <= set(range(20, 40))  # the rest is from before


@torch.no_grad()
def test_the_map_of_taps(target):
    """The same for an EAGLE-3 head, whose fc has no bias: the map has no constant."""
    head = random_head(target, eagle3=eagle3_of("eagle3", target.config))
    g = torch.Generator().manual_seed(1)
    wide = head.config.feature_dim
    full = [torch.randn(400, wide, generator=g) for _ in range(6)]
    bend = torch.eye(wide) + 0.2 * torch.randn(wide, wide, generator=g) / wide**0.5
    bent = [f @ bend.T for f in full]
    head.fc.bias = None
    fixed = calibrate.fold_feature_map(head, Store(full), Store(bent))
    wanted, unfixed = head.fc(full[0][:5]), head.fc(bent[0][:5])
    assert (fixed.fc(bent[0][:5]) - wanted).norm() < 0.02 * (unfixed - wanted).norm()


def test_a_new_vocabulary_keeps_the_rows_that_it_can(target):
    """An LM head of the head's own: known tokens keep their rows, new ones get the target's."""
    head = random_head(target, torch.arange(20, 40), eagle3=eagle3_of("eagle3", target.config))
    said = [Conversation([1, 2, 50, 50, 51, 52, 50], 2)]
    rebuilt = calibrate.rebuilt_vocabulary(head, said, target)
    for draft_id, token in enumerate(rebuilt.target_ids().tolist()):
        row = rebuilt.own_lm_head.weight[draft_id]
        if token >= 50:
            assert torch.equal(row, target.lm_head.weight[token])
        else:
            assert torch.equal(row, head.own_lm_head.weight[token - 20])


@torch.no_grad()
def test_what_is_judged_is_what_runs(target):
    """A head judged in fp32 with the values its quantized linears hold."""
    head = random_head(target, rope_base=10000.0)
    judged = calibrate.as_quantized(head, SCHEME)
    expected = quantize_weight(head.fc.weight, SCHEME).dequantize()
    assert torch.equal(judged.fc.weight, expected)
    assert judged.block.mlp.down.weight.shape == head.block.mlp.down.weight.shape
    assert not torch.equal(judged.block.attention.qkv.weight, head.block.attention.qkv.weight)


def test_training_quantized_leaves_less_to_lose(target, tmp_path):
    """After fake-quantized training the head loses less to quantization than after plain."""
    store = compute_features(Engine(target, 256), talk(target, 24), tmp_path / "features")
    options = dataclasses.replace(OPTIONS, steps=60, lr=3e-3, noise=0.0)

    def loss(head) -> float:
        head.borrow(target, 256)
        rows = target.head_rows(head.target_ids())
        batch = make_batch(store, list(range(3, len(store))), torch.device("cpu"))
        with torch.no_grad():
            return head_loss(head, rows, batch, options, 0).item()

    lost = {}
    for name, scheme in (("plain", None), ("fake", SCHEME)):
        seen: list[float] = []
        trained = calibrate.distilled(
            new_head(target, torch.arange(60), options),
            target,
            store,
            [0, 1, 2],
            options,
            tmp_path / name,
            "",
            scheme,
            lambda entry: None,
            lambda step, loss, seen=seen: seen.append(loss),
            100,
        )
        assert sum(seen[-10:]) < 0.9 * sum(seen[:10])
        lost[name] = loss(calibrate.as_quantized(trained, SCHEME)) - loss(trained)
        assert not [k for k in trained.state_dict() if "parametrizations" in k]
        saved = torch.load(tmp_path / name / "state.pt", weights_only=True)["head"]
        assert any("parametrizations" in k for k in saved) == (scheme is not None)
    assert lost["plain"] > 0.005 and lost["fake"] < 0.3 * lost["plain"], lost
