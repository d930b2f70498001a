"""Runners: eager, compiled and captured cycles give the same tokens in the same passes."""

from __future__ import annotations

import pytest
import torch

from fasteagle.compile.backend import choose_backend
from fasteagle.compile.blocks import missing_compiler
from fasteagle.decoding.backend import Backend
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.drafting.lookup import Lookup
from fasteagle.drafting.ngram import NgramDrafter
from fasteagle.drafting.static_tree import StaticTreeDrafter
from fasteagle.errors import FasteagleError
from fasteagle.generate import Engine
from fasteagle.model import Target
from fasteagle.options import SamplingParams
from fasteagle.shapes import FusedShape, TreeShape
from helpers import (
    GREEDY,
    PROMPT,
    captured_engine,
    eagle3_of,
    fused_drafter,
    generated,
    random_head,
    random_target,
    tiny_config,
)

needs_compiler = pytest.mark.skipif(missing_compiler() is not None, reason="no C++ compiler")
DRAWN = [
    GREEDY,
    SamplingParams(0.8, top_p=0.9, seed=7),
    SamplingParams(1.0, top_k=5, seed=3),
    SamplingParams(0.9, repetition_penalty=1.2, seed=6),
]


@pytest.fixture(scope="module")
def head(target):
    return random_head(target, eagle3=eagle3_of("eagle3", target.config))


def drafters(head):
    return [
        None,
        EagleDrafter(head, TreeShape(3, 3, 8)),
        EagleDrafter(head, TreeShape(2, 1, 2)),
        EagleDrafter(head, TreeShape(4, 2, 10)),
        StaticTreeDrafter(head),
        NgramDrafter(4, Lookup(device=head.fc.weight.device)),
        fused_drafter(head, FusedShape(3, 3, 9, 8)),
        fused_drafter(head, FusedShape(0, 1, 8, 8)),
    ]


def eagle_engine(target, head, ahead=1, max_seq_len=256, advice=None):
    engine = captured_engine(target, max_seq_len, ahead, advice)
    engine.use(EagleDrafter(head, TreeShape(3, 3, 8)))
    return engine


@pytest.mark.parametrize(  # half of the drafters each
    ("algorithm", "ahead", "params", "first"),
    [
        ("eagle1", 0, DRAWN[0], 0),
        ("eagle1", 1, DRAWN[1], 1),
        ("eagle3", 0, DRAWN[2], 1),
        ("eagle3", 1, DRAWN[3], 0),
    ],
    ids=str,
)
def test_the_tokens_and_passes_of_eager_cycles(target, algorithm, ahead, params, first):
    head = random_head(target, eagle3=eagle3_of(algorithm, target.config))
    expected = generated(Engine(target, 256), params=params, n=26)
    for ours, theirs in zip(drafters(head)[first::2], drafters(head)[first::2], strict=True):
        engine = captured_engine(target, 256, ahead)
        engine.use(ours)
        assert generated(engine, params=params, n=26) == expected
        assert engine.runner.error is None and engine.runner.replays > engine.stats.passes - 1
        shapes = [] if ours is None else ours.shapes()
        assert engine.runner.captured == 1 + len(shapes), "plain, and each tree"
        eager = Engine(target, 256, drafter=theirs)
        assert generated(eager, params=params, n=26) == expected
        # Not just right: the same proposals, accepted in the same passes.
        assert engine.stats.path_lengths == eager.stats.path_lengths
        assert engine.stats.passes == eager.stats.passes
        assert engine.stats.drafted == eager.stats.drafted


def test_a_new_seed_or_temperature_captures_nothing(target, head):
    engine = eagle_engine(target, head)
    for values in ({}, {"seed": 5}, {"temperature": 0.4}, {"seed": 9, "top_p": 0.7}):
        params = SamplingParams(**{"temperature": 0.8, "top_p": 0.9, "seed": 1, **values})
        expected = generated(Engine(target, 256), params=params, n=20)
        assert generated(engine, params=params, n=20) == expected
        assert engine.runner.graphs.captured == 2  # plain, and the tree
    for other, captured in ((SamplingParams(0.8), 4), (GREEDY, 6), (params, 8)):
        generated(engine, params=other, n=5)  # with the third kind the oldest graphs are gone
        assert engine.runner.graphs.captured == captured


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_stop_rewinds_and_the_next_turn_goes_on(target, head, ahead):
    engine = eagle_engine(target, head, ahead)
    plain = Engine(target, 256)
    prompt = list(PROMPT)
    for n in (1, 2, 7, 20):
        expected = generated(plain, n, prompt)
        assert generated(engine, n, prompt) == expected
        assert len(engine.cached) == len(prompt) + n - 1
        prompt += [*expected, 11, 12]
        if n > 7:
            assert engine.stats.cached_tokens > 10
    stop = frozenset([expected[5]])
    assert generated(engine, eos_ids=stop) == generated(plain, eos_ids=stop)


@pytest.mark.parametrize("ahead", [0, 1])
def test_up_to_the_last_slot(target, head, ahead):
    expected = generated(Engine(target, 48), n=100)
    engine = eagle_engine(target, head, ahead, max_seq_len=48)
    assert generated(engine, n=100) == expected and engine.stats.finish == "context"


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_large_tree_stays_within_caches_of_fixed_size(target, head, ahead):
    """Where the context ends there is no room for its rows: the last tokens are plain."""
    expected = generated(Engine(target, 128), n=250)
    engine = captured_engine(target, 128, ahead)
    engine.use(EagleDrafter(head, TreeShape(5, 8, 100)))
    assert generated(engine, n=250) == expected and engine.stats.finish == "context"
    assert 50 < len(engine.stats.path_lengths) < engine.stats.passes - 30
    engine.prepare(SamplingParams(0.8))  # captured past the text
    error = r"tree-nodes 191 is out of range: max-seq-len 128 leaves room for 190"
    with pytest.raises(FasteagleError, match=error):
        engine.use(EagleDrafter(head, TreeShape(6, 8, 191)))
    engine.use(EagleDrafter(head, TreeShape(6, 8, 190)))
    assert generated(engine, n=9) == expected[:9]


def test_times_of_cycles_that_are_launched_ahead_do_not_overlap(target, head):
    engine, times = eagle_engine(target, head), []
    generated(engine, 9)
    engine.drafter.learn = lambda shape, outcome: times.append(outcome.ms)
    generated(engine)
    assert len(times) == engine.stats.passes
    assert sum(times) < 1.1e3 * engine.stats.decode_seconds


def test_cycles_are_captured_anew_where_features_have_another_place(target, head):
    """Those of the same drafter would write to the old tensors."""
    engine, drafter = captured_engine(target, 256), EagleDrafter(head, TreeShape(2, 1, 2))
    captured = []
    for own in (drafter, drafter, None, drafter):
        engine.use(own)
        engine.prepare(GREEDY)
        captured.append(engine.runner.graphs.captured)
    assert captured == [2, 2, 3, 5]


def test_an_answer_cut_short_or_another_drafter_leaves_the_engine_ready(target, head):
    engine = eagle_engine(target, head)
    begun = engine.generate(PROMPT, GREEDY, 50)
    first = [t for ids in (next(begun), next(begun)) for t in ids]
    begun.close()
    expected = generated(Engine(target, 256))
    assert first == expected[: len(first)] and len(first) >= 2
    assert engine.cached == (PROMPT + first)[:-1]
    assert generated(engine) == expected
    drafter = engine.drafter
    engine.use(None)
    assert generated(engine) == expected and engine.stats.path_lengths == []
    engine.use(drafter)
    assert generated(engine) == expected and engine.stats.path_lengths


@pytest.mark.parametrize("ahead", [0, 1])
def test_bad_logits_are_reported(head, ahead):
    target = random_target(tiny_config())
    engine = eagle_engine(target, head, ahead)
    begun = engine.generate(PROMPT, GREEDY, 50)
    next(begun)
    with torch.no_grad():
        target.norm.weight.fill_(float("nan"))
    with pytest.raises(FasteagleError, match="not finite"):
        for _ in begun:
            pass


def test_what_cannot_be_captured_runs_as_it_is_and_says_why(target, head):
    engine = eagle_engine(target, head)
    engine.runner.graphs.failing = True
    expected = generated(Engine(target, 256))
    assert generated(engine) == expected
    assert engine.runner.error == "operation not permitted" and engine.runner.replays == 0
    # The next capture is not harmed by it.
    engine.runner.graphs.failing = False
    engine.runner.forget()
    assert generated(engine) == expected and engine.runner.replays > 0


def test_a_capture_that_another_thread_spoils_is_made_again(target, head):
    engine = eagle_engine(target, head)
    graphs, refused = engine.runner.graphs, []
    capture = graphs.capture

    def spoiled(step, restore):
        if len(refused) < 1:
            step()
            refused.append(step)
            raise RuntimeError("operation failed due to a previous error during capture")
        return capture(step, restore)

    graphs.capture = spoiled
    assert generated(engine) == generated(Engine(target, 256))
    assert refused and engine.runner.error is None and engine.runner.replays > 0
    refused.clear()  # the tuner's captures too
    steps = []
    assert engine.runner.timed(lambda: steps.append(1), lambda: None) > 0
    assert refused and len(steps) > 1


def without_advice(head):
    raise FasteagleError("int4 needs groups of 32")


@pytest.mark.parametrize(
    ("error", "advice", "suffix"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB"),
            lambda head: f"{head.block.dim} fits",
            ": 32 fits",
        ),
        (RuntimeError("Triton Error [CUDA]: out of memory"), without_advice, ""),
    ],
    ids=["torch", "Triton"],
)
def test_a_capture_without_memory_says_what_would_fit(target, head, error, advice, suffix):
    """Cycles run eagerly all the same, whether there is advice or not."""
    engine = eagle_engine(target, head, advice=advice)
    tried = []

    def without_memory(step, restore):
        tried.append(step)
        raise error

    engine.runner.graphs.capture = without_memory
    assert generated(engine) == generated(Engine(target, 256))
    assert engine.runner.error == f"{error}{suffix}"
    assert len(tried) == 2, "once for each variant: memory is not there a moment later"


def test_a_prompt_without_memory_says_what_would_fit(target, head, monkeypatch):
    def without_memory(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Engine, "_run", without_memory)
    engine = Engine(target, 256, backend=Backend(Target(target), lambda head: f"{head} fits"))
    with pytest.raises(FasteagleError, match="of a prompt of 8: None fits$"):
        generated(engine)
    engine.use(EagleDrafter(head, TreeShape(3, 3, 8)))
    with pytest.raises(FasteagleError, match=r"of a prompt of 8: HeadConfig\(.*\) fits$"):
        generated(engine)


def test_multi_round_sampling_walks_on_the_host_and_is_not_captured(target, head):
    engine = captured_engine(target, 256)
    drafter = StaticTreeDrafter(head, sampled=True)
    engine.use(drafter)
    params = SamplingParams(0.9, seed=2)
    eager = Engine(target, 256, drafter=StaticTreeDrafter(head, sampled=True))
    assert generated(engine, params=params) == generated(eager, params=params)
    assert engine.runner.error is None and engine.runner.replays == 0


# On a device with graphs, and on one that stands for it


@pytest.fixture(params=["fake", pytest.param("cuda", marks=pytest.mark.gpu)])
def made(request):
    """Makes a target and an engine that replays cycles, without a drafter."""

    def make(max_seq_len=512):
        target = random_target(tiny_config())
        if request.param == "fake":
            return target, captured_engine(target, max_seq_len)
        target = target.cuda()
        return target, Engine(target, max_seq_len, backend=choose_backend(target))

    return make


def used_bytes(engine):
    """Memory of this process alone: other tests run on the same card."""
    return 0 if engine.on_cpu else torch.cuda.memory_reserved(engine.device)


def eagle(engine, shape=TreeShape(3, 3, 8)):  # noqa: B008
    engine.use(EagleDrafter(random_head(engine.model), shape))


class TestReplays:
    @pytest.mark.gpu  # else see test_the_tokens_and_passes_of_eager_cycles
    @pytest.mark.parametrize("params", DRAWN, ids=str)
    def test_cycles_of_every_drafter_are_the_eager_ones(self, made, params):
        target, engine = made()
        expected = generated(Engine(target, 512), params=params)
        for drafter in drafters(random_head(target)):
            engine.use(drafter)
            assert generated(engine, params=params) == expected
            assert engine.runner.error is None
            shapes = [] if drafter is None else drafter.shapes()
            assert engine.runner.captured == 1 + len(shapes), "plain, and each tree"
            engine.runner.forget()

    def test_a_longer_context_and_another_tree_are_captured_anew(self, made):
        for shape, length in ((TreeShape(2, 2, 4), 256), (TreeShape(4, 3, 12), 512)):
            target, engine = made(length)
            eagle(engine, shape)
            assert generated(engine) == generated(Engine(target, length))
            assert engine.runner.error is None and engine.runner.captured == 2

    def test_two_engines_in_one_process_take_turns(self, made):
        pairs = [made(), made()]
        for _, engine in pairs:
            eagle(engine)
        expected = generated(Engine(pairs[0][0], 512))
        begun = [engine.generate(PROMPT, GREEDY, 60) for _, engine in pairs]
        answers = [[], []]
        for _ in range(60):  # a cycle of one, then a cycle of the other
            for tokens, cycles in zip(answers, begun, strict=True):
                tokens.extend(next(cycles, []))
        assert answers == [expected, expected]
        assert all(engine.runner.captured == 2 for _, engine in pairs)

    def test_many_captures_of_real_cycles_leak_nothing(self, made):
        target, engine = made()
        eagle(engine)
        expected = generated(engine)
        for round_ in range(11 if engine.on_cpu else 150):
            if round_ == 10:
                before = used_bytes(engine)
            engine.runner.forget()
            engine.prepare(GREEDY)
            assert engine.runner.error is None and engine.runner.captured == 2
        assert used_bytes(engine) - before < 32 * 2**20
        assert generated(engine) == expected == generated(Engine(target, 512))

    def test_a_capture_works_after_one_that_failed(self, made):
        target, engine = made()
        eagle(engine)
        expected = generated(Engine(target, 512))

        def reads_on_the_host():
            engine.state.seq_len.item()
            if engine.on_cpu:  # a capture on CUDA forbids it
                raise RuntimeError("operation not permitted")

        with pytest.raises(RuntimeError):
            engine.runner.timed(reads_on_the_host, lambda: None)
        assert generated(engine) == expected
        assert engine.runner.error is None and engine.runner.captured == 2


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_engines_on_two_devices_in_one_process():
    targets = [random_target(tiny_config()).to(f"cuda:{i}") for i in range(2)]
    engines = [Engine(one, 512, backend=choose_backend(one)) for one in targets]
    for engine in engines:
        eagle(engine)
    expected = generated(Engine(targets[0], 512))
    for engine in (*engines, *reversed(engines)):
        assert generated(engine) == expected
        assert engine.runner.error is None and engine.runner.captured == 2
    assert torch.cuda.current_device() == 0
