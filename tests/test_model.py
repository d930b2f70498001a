"""Our model against transformers, in fp32, for every family."""

from __future__ import annotations

import copy

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from families import FAMILIES
from fasteagle.loading.checkpoint import load_model, open_checkpoint
from fasteagle.model import (
    KEPT_SLOTS,
    KEY_BLOCK,
    KVCache,
    LMHead,
    RMSNorm,
    Transformer,
    causal_mask,
)
from helpers import make_hf_model, tiny_config

TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    """(transformers model, ours loaded from the folder it saved)."""
    hf = make_hf_model(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    hf.save_pretrained(folder)
    ours = load_model(open_checkpoint(folder), dtype=torch.float32, device="cpu", max_seq_len=512)
    return hf, ours


def tokens_of(model, n: int) -> torch.Tensor:
    return torch.randint(
        0, model.config.vocab_size, (n,), generator=torch.Generator().manual_seed(3)
    )


def run(model, tokens, start, cache, aux_layers=()):
    rows = torch.arange(start, start + len(tokens))
    mask = causal_mask(start, len(tokens), cache.n_slots, model.config.sliding_window, "cpu")
    return model(tokens, rows, rows, mask, cache, aux_layers)


def fresh_cache(model) -> KVCache:
    return KVCache(model.config, KEY_BLOCK, torch.float32, "cpu")


@torch.no_grad()
def test_prefill_matches_transformers(pair):
    hf, ours = pair
    tokens = tokens_of(ours, 90)
    expected = hf(tokens[None], output_hidden_states=True)
    output = run(ours, tokens, 0, fresh_cache(ours))
    assert (output.logits - expected.logits[0]).abs().max() < TOLERANCE
    scaling = getattr(hf.config, "logits_scaling", 1.0)  # ours is in the final norm
    features = expected.hidden_states[-1][0] / scaling
    assert (output.features - features).abs().max() < TOLERANCE


def test_what_no_file_fills_is_as_the_config_says(pair):
    """Shapes, which a loaded tensor replaces, and the norms' epsilon."""
    _, ours = pair
    with torch.device("meta"):
        empty = Transformer(ours.config)
    shapes = [
        {name: t.shape for name, t in model.named_parameters(remove_duplicate=False)}
        for model in (empty, ours)
    ]
    assert shapes[0] == shapes[1]
    norms = [module for module in ours.modules() if isinstance(module, RMSNorm)]
    assert {norm.eps for norm in norms} == {ours.config.norm_eps}


@torch.no_grad()
def test_incremental_matches_prefill(pair):
    hf, ours = pair
    tokens = tokens_of(ours, 40)
    expected = hf(tokens[None]).logits[0]
    cache = fresh_cache(ours)
    parts = [
        run(ours, part, start, cache).logits
        for start, part in ((0, tokens[:17]), (17, tokens[17:20]))
    ]
    parts += [run(ours, tokens[i : i + 1], i, cache).logits for i in range(20, 40)]
    assert (torch.cat(parts) - expected).abs().max() < TOLERANCE


@torch.no_grad()
def test_aux_states_are_the_residual_entering_the_blocks(pair):
    hf, ours = pair
    tokens = tokens_of(ours, 12)
    hidden = hf(tokens[None], output_hidden_states=True).hidden_states
    states = run(ours, tokens, 0, fresh_cache(ours), aux_layers=(0, 2)).aux_states
    expected = torch.cat((hidden[0][0], hidden[2][0]), dim=-1)
    assert (states - expected).abs().max() < TOLERANCE


@torch.no_grad()
def test_tree_rows_match_transformers_on_each_path(pair):
    """Five tree rows after a prefix: each row's logits equal those of its own path, run alone."""
    hf, ours = pair
    if ours.config.sliding_window:
        pytest.skip("the window of a tree row is tested through Engine.verify")
    prefix, nodes = tokens_of(ours, 11), tokens_of(ours, 30)[25:]
    parents = [0, 0, 0, 1, 3]  # root; 1 and 2 below it; 3 below 1; 4 below 3
    tree_mask = torch.eye(5, dtype=torch.bool)
    depths = torch.zeros(5, dtype=torch.long)
    for j in range(1, 5):
        tree_mask[j] |= tree_mask[parents[j]]
        depths[j] = depths[parents[j]] + 1
    cache = fresh_cache(ours)
    run(ours, prefix, 0, cache)
    mask = (torch.arange(cache.n_slots) < 11).expand(5, -1).clone()
    mask[:, 11:16] = tree_mask
    logits = ours(nodes, 11 + depths, torch.arange(11, 16), mask, cache).logits
    for j in range(5):
        path = torch.cat((prefix, nodes[tree_mask[j]]))
        assert (logits[j] - hf(path[None]).logits[0, -1]).abs().max() < TOLERANCE


@torch.no_grad()
def test_commit_moves_rows_as_if_they_had_been_decoded_there(pair):
    _, ours = pair
    if ours.config.sliding_window:
        pytest.skip("commit does not look at the window")
    prefix, tail = tokens_of(ours, 9), tokens_of(ours, 12)[9:]
    straight, moved = fresh_cache(ours), fresh_cache(ours)
    run(ours, torch.cat((prefix, tail)), 0, straight)
    run(ours, prefix, 0, moved)
    # The tail's three rows written with gaps, as accepted rows of a larger tree would be.
    slots = torch.tensor([9, 12, 15])
    mask = (torch.arange(moved.n_slots) < 9).expand(3, -1).clone()
    mask[:, slots] = torch.ones(3, 3, dtype=torch.bool).tril()
    ours(tail, torch.arange(9, 12), slots, mask, moved)
    moved.commit(torch.tensor(9), slots - 9)
    for (k, v), (k2, v2) in zip(straight.layers, moved.layers, strict=True):
        assert torch.allclose(k[:, :12], k2[:, :12], atol=1e-3)
        assert torch.allclose(v[:, :12], v2[:, :12], atol=1e-3)


def test_resize_keeps_what_fits_also_after_an_interruption(monkeypatch):
    cache = KVCache(tiny_config(max_seq_len=2048), 10, torch.float32, "cpu")
    assert cache.n_slots == KEY_BLOCK
    for keys, values in cache.layers:
        keys[:, :5], values[:, :5] = 3.0, 4.0
    calls, view = [], torch.from_dlpack

    def interrupted(plane):
        calls.append(plane)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return view(plane)

    monkeypatch.setattr(torch, "from_dlpack", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.resize(KEY_BLOCK + 1)
    most = 10 * KEY_BLOCK
    for n_slots, exactly, expected in (
        (KEY_BLOCK + 1, False, 2 * KEY_BLOCK),
        (10, True, KEY_BLOCK),
        (most, False, most),
        (most - KEPT_SLOTS, False, most),
        (most - KEPT_SLOTS - KEY_BLOCK, False, most - KEPT_SLOTS - KEY_BLOCK),
    ):
        cache.resize(n_slots, exactly=exactly)
        assert {t.shape[1] for pair in cache.layers for t in pair} == {cache.n_slots} == {expected}
        for keys, values in cache.layers:
            assert (keys[:, :5] == 3).all() and (values[:, :5] == 4).all()
            assert (keys[:, 5:] == 0).all()


def test_layers_are_planes_of_one_tensor():
    """Written through either, seen through both, and committed by one copy for all blocks."""
    config = tiny_config(n_layer=2)
    cache = KVCache(config, 10, torch.bfloat16, "cpu")
    for layer, (keys, values) in enumerate(cache.layers):
        keys[:, 4] = 1 + layer
        values[:, 4] = 3 + layer
    assert cache.rows[:, 0, 4, 0].tolist() == [1, 3, 2, 4]
    cache.commit(torch.tensor(2), torch.tensor([2, 2]))
    for layer, (keys, values) in enumerate(cache.layers):
        assert (keys[:, 2:4] == 1 + layer).all() and (values[:, 2:4] == 3 + layer).all()


def test_a_cache_on_a_card_that_is_not_the_current_one(monkeypatch):
    """DLPack refuses such tensors, and `--device cuda:1` ended there. On fake tensors."""
    current = [0]

    def exchanged(device: int) -> int:
        before = current[0]
        current[0] = device if device >= 0 else before
        return before

    def handed_out(plane):
        assert plane.device.index == current[0]  # as `Tensor.__dlpack__` checks
        return plane

    for name in ("_exchange_device", "_maybe_exchange_device"):
        monkeypatch.setattr(torch.cuda, name, exchanged)
    monkeypatch.setattr(torch, "from_dlpack", handed_out)
    with FakeTensorMode():
        cache = KVCache(tiny_config(), 256, torch.float16, torch.device("cuda", 1))
    assert cache.layers[0][0].device == torch.device("cuda", 1) and current == [0]


def test_leads_that_bf16_rounds_away_still_decide():
    """Logits near 25 round in steps of 0.125: the best must be the best of the exact products."""
    head = LMHead(4, 100, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        head.weight.zero_()
        head.weight[7] = torch.tensor([16.0, 9.0, 0.0, 0.0])  # 25
        head.weight[60] = torch.tensor([16.0, 9.0, 1 / 32, 0.0])  # 25.03, rounded 25 as well
        x = torch.ones(3, 4, dtype=torch.bfloat16)
        plain = torch.nn.functional.linear(x, head.weight)
        logits = head(x)
    assert (plain[:, 7] == plain[:, 60]).all()
    assert logits.dtype == torch.float32 and (logits.argmax(-1) == 60).all()
    assert logits[0, 60] - logits[0, 7] == 1 / 32


@torch.no_grad()
def test_residual_stream_stays_fp32_in_bf16(pair):
    """bf16 weights, fp32 residual: closer to fp32 than an all-bf16 pass of transformers."""
    hf, ours = pair
    if ours.config.moe is not None:
        pytest.skip("a row whose experts change is far away in either")
    tokens = tokens_of(ours, 60)
    exact = run(ours, tokens, 0, fresh_cache(ours)).features
    half = load_half(ours)
    cache = KVCache(ours.config, KEY_BLOCK, torch.bfloat16, "cpu")
    output = run(half, tokens, 0, cache)
    assert output.features.dtype == torch.bfloat16
    hf_half = copy.deepcopy(hf).to(torch.bfloat16)
    theirs = hf_half(tokens[None], output_hidden_states=True).hidden_states[-1][0]
    assert (output.features - exact).norm() < (theirs.float() - exact).norm()


def load_half(model):
    half = copy.deepcopy(model).to(torch.bfloat16)
    half.init_rope(512, "cpu")
    return half
