"""Whole blocks in our CPU kernels: the results of the model, the same bits in any pass."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from fasteagle.compile.backend import choose_backend
from fasteagle.compile.cpu_backend import CpuBackend, runs_on_cpu
from fasteagle.compile.cpu_blocks import block_tensors
from fasteagle.config import MoEConfig
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.generate import Engine
from fasteagle.loading.source import quantize_
from fasteagle.model import KVCache, Target, Transformer, causal_mask
from fasteagle.options import SamplingParams
from fasteagle.quant.cpu_linear import NativeLinear
from fasteagle.quant.scheme import Scheme
from fasteagle.shapes import TreeShape
from fasteagle.tree import TreeView, ancestor_mask, tree_paths
from helpers import generated, random_head, random_target, tiny_config
from native_models import CONFIGS, SHAPE, native_backend, native_head, native_target
from rounding import Rounded

pytestmark = pytest.mark.usefixtures("cpu_kernels")


def emulated(target: Target) -> Transformer:
    """The same weights in the model's own blocks, in fp32."""
    twin = random_target(target.config)
    target = target.model
    twin.load_state_dict(target.state_dict(), strict=False)  # norms and routers
    for name, linear in target.named_modules():
        if isinstance(linear, NativeLinear):
            weight = linear.rows(torch.arange(linear.out_features))
            twin.set_submodule(name.removesuffix(".linear"), Rounded(weight, linear.bias))
    return twin


def run_chain(
    target: Target | Transformer, tokens: Tensor, cache: KVCache, begin: int = 0
) -> Tensor:
    rows = torch.arange(begin, begin + len(tokens))
    mask = causal_mask(begin, len(tokens), cache.n_slots, target.config.sliding_window, "cpu")
    return target(tokens, rows, rows, mask, cache).logits


@pytest.mark.parametrize("name", CONFIGS)
def test_blocks_compute_what_the_model_says(name):
    bits = 8 if [*CONFIGS].index(name) % 2 else 4
    config = tiny_config(**CONFIGS[name])
    target = native_backend(config, bits).target
    tokens = torch.randint(0, config.vocab_size, (150,), generator=torch.Generator().manual_seed(1))
    caches = [KVCache(config, 256, torch.float32, "cpu") for _ in range(2)]
    result = run_chain(target, tokens, caches[0])
    expected = run_chain(emulated(target), tokens, caches[1])
    # Rounding to 8 bits turns over where fp32 sums differ in their last bits.
    assert (result - expected).norm() < 0.02 * expected.norm()
    assert (caches[0].rows - caches[1].rows).norm() < 0.02 * caches[1].rows.norm()


ROWS = [(name, torch.float32, (1, 60, 130)[i % 3]) for i, name in enumerate(CONFIGS)]
ROWS += [("long window", torch.float32, 130)]
ROWS += [("gqa", torch.bfloat16, n) for n in (130, 131)]  # an even and an odd number of keys
ROWS += [(name, torch.bfloat16, 61) for name in ("window", "wide heads")]


@pytest.mark.parametrize(("name", "dtype", "length"), ROWS, ids=str)
def test_a_row_has_the_same_bits_in_any_pass(name, dtype, length):
    """A tree's rows against their paths decoded token by token, and against one long chunk."""
    config = tiny_config(**CONFIGS[name])
    target = native_backend(config, dtype=dtype).target
    generator = torch.Generator().manual_seed(length)
    text = torch.randint(0, config.vocab_size, (length,), generator=generator)
    parents = torch.tensor([0, 0, 0, 1, 1, 2, 3, 3, 6])
    tokens = torch.randint(0, config.vocab_size, (len(parents),), generator=generator)
    tree_mask, depths = ancestor_mask(parents, torch.ones(len(parents)).bool())
    paths = tree_paths(tree_mask, depths, len(parents) - 1)

    cache, single = (KVCache(config, 256, dtype, "cpu") for _ in range(2))
    run_chain(target, text, cache)
    view = TreeView(torch.tensor(length), paths, depths, config.sliding_window)
    slots = length + torch.arange(len(parents))
    tree = target(tokens, length + depths, slots, view, cache).logits
    by_mask = target(tokens, length + depths, slots, view.mask(256), cache).logits
    assert torch.equal(tree, by_mask)
    for at, token in enumerate(text):
        run_chain(target, token[None], single, at)
    for row in (0, 2, 5, 8):
        path = tokens[paths[row, : depths[row] + 1].long()]
        for at, token in enumerate(path, start=length):
            logits = run_chain(target, token[None], single, at)
        assert torch.equal(logits[0], tree[row]), row
        chunk = run_chain(target, torch.cat((text, path)), KVCache(config, 256, dtype, "cpu"))
        assert torch.equal(chunk[-1], tree[row]), row


@pytest.mark.parametrize("name", ["gqa", "long window"])
def test_rows_of_several_texts_have_the_bits_they_have_alone(name):
    """Texts in regions of their own of one cache, the last token of each in one pass."""
    config = tiny_config(**CONFIGS[name])
    target = native_backend(config).target
    lengths, region = [5, 200, 64, 1, 130], 256
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(0, config.vocab_size, (n,), generator=generator) for n in lengths]
    together = KVCache(config, len(texts) * region, torch.float32, "cpu")
    mask = torch.zeros(len(texts), len(texts) * region, dtype=torch.bool)
    alone = []
    for i, text in enumerate(texts):
        cache = KVCache(config, region, torch.float32, "cpu")
        alone.append(run_chain(target, text, cache)[-1])
        own = slice(i * region, (i + 1) * region)
        together.rows[:, :, own] = cache.rows
        last = len(text) - 1
        mask[i, own] = causal_mask(last, 1, region, config.sliding_window, "cpu")[0]
    positions = torch.tensor(lengths) - 1
    slots = positions + region * torch.arange(len(texts))
    together.rows[:, :, slots] = float("nan")  # this pass writes them
    tokens = torch.stack([text[-1] for text in texts])
    assert torch.equal(target(tokens, positions, slots, mask, together).logits, torch.stack(alone))


@pytest.fixture
def target(native):
    """As its kernels run it."""
    return CpuBackend(native).target


def test_what_nobody_has_written_is_not_read(target):
    tokens = torch.arange(9)
    clean, dirty = (KVCache(target.config, 256, torch.float32, "cpu") for _ in range(2))
    dirty.rows.fill_(float("nan"))
    assert torch.equal(run_chain(target, tokens, clean), run_chain(target, tokens, dirty))


def test_one_thread_or_two_give_the_same_bits(target):
    tokens, results = torch.arange(40), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(run_chain(target, tokens, KVCache(target.config, 256, torch.float32, "cpu")))
    assert torch.equal(*results)


def test_wrong_slots_are_refused(target):
    cache = KVCache(target.config, 256, torch.float32, "cpu")
    rows, mask = torch.arange(2), torch.ones(2, 256).bool()
    with pytest.raises(RuntimeError, match="slot 256 of 256"):
        target(torch.arange(2), rows, rows + 255, mask, cache)


def test_what_does_not_fit_the_blocks_is_refused(target):
    tensors = [tensor for block in target.model.blocks for tensor in block_tensors(block)]
    caches = [torch.zeros(2, 64, 16) for _ in range(2 * len(target.model.blocks))]
    T = 2
    paths, depths = torch.zeros(T, 3, dtype=torch.int32), torch.arange(T)
    rows = dict(x=torch.zeros(T, 64), cos=torch.ones(T, 16), sin=torch.zeros(T, 16))
    rows |= dict(slots=torch.arange(T), mask=None, seq_len=torch.tensor(0))
    tree = dict(paths=paths, depths=depths, window=0)
    arguments = rows | tree | dict(caches=caches, tensors=tensors, n_head=4, eps=1e-5)

    def with_one(items, i, new):
        return [*items[:i], new, *items[i + 1 :]]

    torch.ops.fasteagle_cpu.blocks(*arguments.values())
    for changes, message in (
        ({"seq_len": None}, "a mask, or a tree"),
        ({"depths": None}, "a mask, or a tree"),
        ({"depths": depths + 2}, "depth 3 of 3"),
        ({"depths": depths - 1}, "depth -1 of 3"),
        ({"paths": paths.flatten()}, "one path for each row"),
        ({"seq_len": torch.tensor(-1)}, "more keys than slots"),
        ({"caches": with_one(caches, 1, caches[1].bfloat16())}, "one shape and type"),
        ({"caches": with_one(caches, 3, torch.zeros(2, 32, 16))}, "one shape and type"),
        ({"caches": [cache.half() for cache in caches]}, "caches in fp32, bf16 or 8 bits"),
        ({"x": torch.zeros(T, 96)}, "qkv is"),
        ({"n_head": 2}, "qkv is"),
        ({"n_head": 3}, "head dim"),
        ({"tensors": with_one(tensors, 5, tensors[8])}, "out is"),
        ({"tensors": with_one(tensors, 7, tensors[8])}, "gate_up is"),
        ({"tensors": with_one(tensors, 2, torch.zeros(7))}, "bias is"),
        ({"tensors": with_one(tensors, 0, torch.zeros(7))}, "norms are"),
    ):
        with pytest.raises(RuntimeError, match=message):
            torch.ops.fasteagle_cpu.blocks(*(arguments | changes).values())


def test_a_prompt_is_read_in_parts_that_go_through_together(monkeypatch):
    """Larger parts are no faster, and whoever leaves waits for the one that runs."""
    config = tiny_config(**SHAPE)
    backend = native_backend(config)
    engine = Engine(backend.target.model, 256, backend=backend)
    prompt = torch.arange(100).remainder(config.vocab_size).tolist()
    rows, run = [], engine._run
    monkeypatch.setattr(engine, "_run", lambda ids, *rest: rows.append(len(ids)) or run(ids, *rest))
    feature, *_ = engine.prefill(prompt)
    assert rows == [32, 32, 32, 4]
    backend.target = dataclasses.replace(backend.target, rows_at_once=100)
    engine.restart()
    assert torch.equal(engine.prefill(prompt)[0], feature)


def test_other_models_keep_their_blocks():
    for config in (
        tiny_config(**SHAPE | dict(head_dim=24)),
        tiny_config(**SHAPE | dict(head_dim=272)),
        tiny_config(**SHAPE | dict(ffn_dim=80)),
        tiny_config(**SHAPE | dict(moe=MoEConfig(4, 2, 48))),
        tiny_config(**SHAPE | dict(moe=MoEConfig(4, 2, 64, shared_ffn_dim=80))),
    ):
        target = random_target(config)
        quantize_(target.blocks, Scheme(8), native=True)
        backend = choose_backend(target)
        assert not runs_on_cpu(target) and backend.name == "eager"
        assert ("experts by torch" in backend.describe()) == (config.moe is not None)
        assert backend.leaves_blocks == (config.moe is None)
        run_chain(backend.target, torch.arange(5), KVCache(config, 256, torch.float32, "cpu"))
    assert not runs_on_cpu(random_target(tiny_config(**SHAPE)))
    target = native_target(tiny_config(**SHAPE))
    target.blocks[1].attention.out.bias = torch.zeros(64)
    assert not runs_on_cpu(target)


@pytest.mark.parametrize("algorithm", ["eagle1", "mtp", "eagle3"])
def test_drafting_in_bf16_changes_no_token(algorithm):
    """With a head in 4 bits over a part of the vocabulary; fp32 is in `test_backends`."""
    config = tiny_config(**SHAPE)
    target = native_target(config, dtype=torch.bfloat16)
    head = native_head(target, algorithm, 4, draft_ids=torch.arange(0, 60, 2))
    backend = choose_backend(target)
    assert backend.name == "cpu" and not backend.leaves_head(head)
    assert backend.leaves_head(random_head(target)), "its linears are dense: they are compiled"
    for params in (SamplingParams(), SamplingParams(0.8, seed=3)):
        texts = []
        for drafter in (None, EagleDrafter(head, TreeShape(3, 3, 8))):
            engine = Engine(target, 256, drafter=drafter, backend=backend)
            texts.append(generated(engine, 40, params=params))
        assert texts[0] == texts[1]
