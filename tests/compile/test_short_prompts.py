"""Short prompts and tails by captured passes, on a CPU that stands for a device with graphs."""

from __future__ import annotations

import pytest
import torch

from fasteagle.compile.cuda_backend import CudaBackend
from fasteagle.decoding.backend import Backend as EagerBackend
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.generate import Engine
from fasteagle.model import Target, Transformer
from fasteagle.options import SamplingParams
from fasteagle.shapes import TreeShape
from helpers import eagle3_of, generated, random_head, random_target, tiny_config
from interleaved_models import packed_target
from replaying import ReplayingBackend


class Backend(ReplayingBackend):
    """Backend whose rows do not depend on their number, like those of fused blocks."""

    few_rows = 256


def engine_of(target, eagle3=False, backend=Backend) -> Engine:
    engine = Engine(target, 400, backend=backend(Target(target)))
    engine.on_cpu = False  # caches have their full size, and few rows are a tree
    head = random_head(target, eagle3=eagle3_of("eagle3", target.config) if eagle3 else None)
    engine.use(EagleDrafter(head, TreeShape(3, 3, 7)))
    return engine


@pytest.fixture
def target():
    return random_target(tiny_config())


def counted(engine):
    """Note the ids of every pass over a prompt, and whether it was replayed."""
    passes, replay = [], engine.runner.replay_prompt

    def noting(ids, begin, aux_layers):
        result = replay(ids, begin, aux_layers)
        passes.append((len(ids), begin, result is not None))
        return result

    engine.runner.replay_prompt = noting
    return passes


@pytest.mark.parametrize("eagle3", [False, True])
def test_texts_are_those_of_passes_without_graphs(target, eagle3):
    engine, plain = engine_of(target, eagle3), engine_of(target, eagle3, ReplayingBackend)
    history = []
    for n in (1, 16, 17, 64, 65, 3):
        history += [(7 * i + n) % 50 for i in range(n)]
        passes, others = counted(engine), counted(plain)
        own = generated(engine, 12, history)
        assert own == generated(plain, 12, history)
        assert not any(replayed for *_, replayed in others)
        assert passes and all(replayed for *_, replayed in passes)
        history += own
    assert engine.stats.cached_tokens > 0 and not engine.runner.error


@pytest.mark.parametrize("n_cached", [0, 30])
def test_a_few_more_rows_are_several_replayed_passes(target, n_cached):
    """Up to 256 of them; longer ones are one pass. A draft head changes no border."""
    engine = engine_of(target)
    for drafter in (engine.drafter, None):
        for n, expected in (
            (65, [(64, 0, True), (1, 64, True)]),
            (200, [(64, 0, True), (64, 64, True), (64, 128, True), (8, 192, True)]),
            (257, [(257, 0, False)]),
        ):
            engine.use(drafter)
            engine.restart()
            prompt = [(7 * i) % 50 for i in range(n_cached + n)]
            if n_cached:
                engine.prefill(prompt[:n_cached])
            passes = counted(engine)
            engine.prefill(prompt)
            expected = [(rows, begin + n_cached, short) for rows, begin, short in expected]
            assert [each for each in passes if each[1] >= n_cached] == expected


def test_features_and_keys_of_a_part():
    """Whatever was there before, and slots before it are as they were."""
    target = random_target(tiny_config(sliding_window=30))
    engine, plain = engine_of(target, True), engine_of(target, True, ReplayingBackend)
    prompt = [(7 * i) % 50 for i in range(100)]
    for n in (23, 100, 40):
        for own in (engine, plain):
            own.restart()
        assert torch.allclose(engine.features(prompt[:n], (1,)), plain.features(prompt[:n], (1,)))
        keys, expected = (own.cache.rows[:, :, :n] for own in (engine, plain))
        assert torch.allclose(keys, expected, atol=1e-6)


def test_a_result_outlives_the_next_pass(target):
    replay = engine_of(target).runner.replay_prompt
    first = replay([1, 2, 3], 0, (0, 1))
    before = [each.clone() for each in first]
    replay([4, 5, 6], 0, (0, 1))
    assert all(map(torch.equal, first, before))


def test_what_is_captured_is_ready_with_the_cycles_and_once(target):
    engine = engine_of(target)
    engine.prepare(SamplingParams())
    n = engine.runner.graphs.captured
    passes = counted(engine)
    generated(engine, 12, list(range(20)))
    assert passes == [(20, 0, True)] and engine.runner.graphs.captured == n
    engine.runner.forget()
    engine.prepare(SamplingParams())
    assert engine.runner.graphs.captured == 2 * n


def test_a_pass_that_cannot_be_captured_runs(target):
    engine = engine_of(target)
    engine.runner.graphs.failing = True
    passes = counted(engine)
    for n in (20, 5, 30, 40, 50, 20):
        engine.restart()
        own = generated(engine, 12, list(range(n)))
        assert own == generated(engine_of(target, backend=ReplayingBackend), 12, list(range(n)))
    assert all(replayed for *_, replayed in passes)


def test_memory_for_a_short_prompt_may_do_where_one_for_64_rows_is_short(target, monkeypatch):
    encode = Transformer.encode

    def encoded(model, tokens, *rest):
        if len(tokens) >= 64:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return encode(model, tokens, *rest)

    expected = generated(engine_of(target, backend=ReplayingBackend), 12, [1, 2, 3])
    monkeypatch.setattr(Transformer, "encode", encoded)
    engine = engine_of(target)
    assert generated(engine, 12, [1, 2, 3]) == expected and "out of memory" in engine.runner.error


def test_the_last_slot_of_the_context(target):
    """Padding lies in the slots after it."""
    engine, plain = engine_of(target), engine_of(target, backend=ReplayingBackend)
    prompt = [(3 * i) % 50 for i in range(399)]
    for own in (engine, plain):
        generated(own, 1, prompt[:390])
    assert generated(engine, 1, prompt) == generated(plain, 1, prompt)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gqa", "window", "qwen3", "experts"])
def test_bits_of_replayed_parts(name):
    """Those of a pass without a graph: a row's bits do not depend on the rows beside it."""
    model, _ = packed_target(name)
    model.to("cuda").init_rope(512, "cuda")
    results = []
    for replays in (False, True):
        backend = CudaBackend(model, replays=replays)
        engine = Engine(model, 400, backend=backend)
        if not replays:  # it would take more rows at a time
            engine.runner.few_rows = backend.few_rows
        tensors = []
        for n, more in ((1, 5), (16, 17), (40, 64), (100, 33), (300, 33)):
            engine.restart()
            for ids in (range(n), range(n + more)):
                filled = engine.prefill([7 * i % 50 for i in ids])
                tensors += [filled.normed.clone(), engine.cache.rows[:, :, : len(ids)].clone()]
        results.append(tensors)
        assert (engine.runner.replay_prompt([1], 0, ()) is not None) == replays
    assert engine.runner.error is None
    assert all(map(torch.equal, *results))


@pytest.mark.gpu
@pytest.mark.parametrize("kv", ["auto", "int8"])
@pytest.mark.parametrize("name", ["gqa", "qwen2", "qwen3", "window", "shared expert"])
def test_long_prompts_against_the_core(name, kv, monkeypatch):
    """First and later parts, of more rows than decoding kernels take."""
    monkeypatch.setattr(CudaBackend, "few_rows", 0)  # or they would be parts of 64
    model, dense = packed_target(name)
    model.to("cuda").init_rope(512, "cuda")
    dense.to("cuda").init_rope(512, "cuda")
    prompt = [7 * i % 50 for i in range(400)]
    engines = [
        Engine(model, 512, backend=CudaBackend(model, kv)),
        Engine(dense, 512, backend=EagerBackend(Target(dense))),
    ]
    results = []
    for engine in engines:
        rows = []
        for n in (70, 150, 151, 400):
            rows.append(engine.prefill(prompt[:n]).normed.float())
        results.append(torch.cat(rows))
    own, expected = results
    error = (own - expected).norm(dim=-1) / expected.norm(dim=-1)
    # Of experts that score nearly the same a rounding chooses.
    limit = 3e-2 if kv == "int8" or name == "shared expert" else 6e-3
    assert error.max() < limit, error
