"""Runners: eager, compiled and captured cycles give the same tokens in the same passes."""

from __future__ import annotations

import pytest
import torch

from fasteagle.compile import tree_attention
from fasteagle.compile.backend import choose_backend
from fasteagle.compile.blocks import compile_now, missing_compiler
from fasteagle.compile.costs import follow_costs
from fasteagle.compile.cycles import CycleCompiler
from fasteagle.compile.graphs import CapturedRunner
from fasteagle.decoding.cycle import EAGER
from fasteagle.decoding.runner import Backend
from fasteagle.drafting.base import Tuning
from fasteagle.drafting.draft_model import ModelDrafter
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.drafting.fused import FusedDrafter
from fasteagle.drafting.ladder import DEFAULT_RANKS
from fasteagle.drafting.ngram import NgramDrafter
from fasteagle.drafting.static_tree import StaticTreeDrafter
from fasteagle.errors import FasteagleError
from fasteagle.generate import Engine
from fasteagle.model import Target
from fasteagle.options import SamplingParams
from fasteagle.sampling import SamplingMode
from fasteagle.shapes import FusedShape, TreeShape
from helpers import (
    captured_engine,
    costs,
    eager_engine,
    eagle3_of,
    random_head,
    random_target,
    tiny_config,
)
from replaying import FakeGraphs

needs_compiler = pytest.mark.skipif(missing_compiler() is not None, reason="no C++ compiler")
CUDA = torch.cuda.is_available()
PROMPT = [5, 6, 7, 8, 9]
GREEDY = SamplingParams()
DRAWN = [
    GREEDY,
    SamplingParams(0.8, top_p=0.9, seed=7),
    SamplingParams(1.0, top_k=5, seed=3),
    SamplingParams(0.9, repetition_penalty=1.2, seed=6),
]


@pytest.fixture(scope="module")
def target():
    return random_target(tiny_config())


@pytest.fixture(scope="module", params=["eagle1", "eagle3"])
def head(request, target):
    return random_head(target, eagle3=eagle3_of(request.param, target.config))


def drafters(head, max_seq_len=256):
    return [
        None,
        EagleDrafter(head, TreeShape(3, 3, 8), max_seq_len),
        EagleDrafter(head, TreeShape(2, 1, 2), max_seq_len),
        EagleDrafter(head, TreeShape(4, 2, 10), max_seq_len),
        StaticTreeDrafter(head, max_seq_len),
        NgramDrafter(4),
        FusedDrafter(head, FusedShape(3, 3, 9, 8), max_seq_len),
        FusedDrafter(head, FusedShape(0, 1, 8, 8), max_seq_len),
    ]


def answer(engine, prompt=PROMPT, params=GREEDY, n=60, eos=frozenset()):
    return [t for ids in engine.generate(prompt, params, n, eos) for t in ids]


def eagle_engine(target, head, ahead=1, max_seq_len=256, advice=None):
    engine = captured_engine(target, max_seq_len, ahead, advice)
    engine.use(EagleDrafter(head, TreeShape(3, 3, 8), max_seq_len))
    return engine


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("params", DRAWN, ids=str)
def test_the_tokens_and_passes_of_eager_cycles(target, head, ahead, params):
    expected = answer(Engine(target, 256), params=params)
    for ours, theirs in zip(drafters(head), drafters(head), strict=True):
        engine = captured_engine(target, 256, ahead)
        engine.use(ours)
        assert answer(engine, params=params) == expected
        assert engine.runner.error is None and engine.runner.replays > engine.stats.passes - 1
        eager = Engine(target, 256, drafter=theirs)
        assert answer(eager, params=params) == expected
        # Not just right: the same proposals, accepted in the same passes.
        assert engine.stats.path_lengths == eager.stats.path_lengths
        assert engine.stats.passes == eager.stats.passes
        assert engine.stats.drafted == eager.stats.drafted


def test_a_new_seed_or_temperature_captures_nothing(target, head):
    engine = eagle_engine(target, head)
    for values in ({}, {"seed": 5}, {"temperature": 0.4}, {"seed": 9, "top_p": 0.7}):
        params = SamplingParams(**{"temperature": 0.8, "top_p": 0.9, "seed": 1, **values})
        assert answer(engine, params=params) == answer(Engine(target, 256), params=params)
        assert engine.runner.graphs.captured == 2  # plain, and the tree
    answer(engine, params=SamplingParams(0.8))
    assert engine.runner.graphs.captured == 4
    answer(engine)
    assert engine.runner.graphs.captured == 6  # and the oldest are gone
    answer(engine, params=params)
    assert engine.runner.graphs.captured == 8


def test_everything_is_captured_before_the_first_token(target, head):
    engine = eagle_engine(target, head)
    cycles = engine.generate(PROMPT, GREEDY, 20)
    next(cycles)
    assert engine.runner.graphs.captured == 2 and engine.runner.replays == 0
    cycles.close()


def test_other_code_in_the_model_is_captured_anew(target, head):
    engine = eagle_engine(target, head)
    expected = answer(engine)
    engine.runner.forget()
    assert answer(engine) == expected and engine.runner.graphs.captured == 4


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_stop_rewinds_and_the_next_turn_goes_on(target, head, ahead):
    engine = eagle_engine(target, head, ahead)
    plain = Engine(target, 256)
    prompt = list(PROMPT)
    for n in (1, 2, 7, 20):
        found, expected = answer(engine, prompt, n=n), answer(plain, prompt, n=n)
        assert found == expected and len(engine.cached) == len(prompt) + n - 1
        prompt += [*found, 11, 12]
        if n > 7:
            assert engine.stats.cached_tokens > 10
    stop = expected[5]
    assert answer(engine, eos=frozenset([stop])) == answer(plain, eos=frozenset([stop]))


@pytest.mark.parametrize("ahead", [0, 1])
def test_up_to_the_last_slot(target, head, ahead):
    expected = answer(Engine(target, 48), n=100)
    engine = eagle_engine(target, head, ahead, max_seq_len=48)
    assert answer(engine, n=100) == expected and engine.stats.finish == "context"


def test_an_answer_cut_short_leaves_the_engine_ready(target, head):
    engine = eagle_engine(target, head)
    begun = engine.generate(PROMPT, GREEDY, 50)
    first = [t for ids in (next(begun), next(begun)) for t in ids]
    begun.close()
    expected = answer(Engine(target, 256))
    assert first == expected[: len(first)] and len(first) >= 2
    assert engine.cached == (PROMPT + first)[:-1]
    assert answer(engine) == expected


@pytest.mark.parametrize("ahead", [0, 1])
def test_the_policy_steers_captured_cycles_too(target, head, tmp_path, ahead):
    engine = captured_engine(target, 512, ahead)
    drafter = EagleDrafter(head, TreeShape(3, 3, 8), 512)
    drafter.tuning = Tuning(tmp_path / "costs.json", DEFAULT_RANKS)
    engine.use(drafter)
    policy = follow_costs(engine, drafter, costs())
    learn = policy.learn
    policy.learn = lambda shape, outcome: learn(  # trees are dear here
        shape, outcome._replace(ms=10.0 if shape is None else 40.0)
    )
    assert answer(engine, n=400) == answer(Engine(target, 512), n=400)
    used = policy.used
    assert used[None] > 130 and len(used) > 1  # a pause fills the pending pairs more than once
    # Pairs of paused passes are shown to the head all the same: a follow-up finds them.
    assert len(engine.cached) - engine.shown <= 8


def test_another_drafter_and_back(target, head):
    engine = eagle_engine(target, head)
    kept = engine.drafter
    engine.use(None)
    expected = answer(engine)
    assert engine.stats.path_lengths == []
    engine.use(kept)
    assert answer(engine) == expected and engine.stats.path_lengths


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
    expected = answer(Engine(target, 256))
    assert answer(engine) == expected
    assert engine.runner.error == "operation not permitted" and engine.runner.replays == 0
    # The next capture is not harmed by it.
    engine.runner.graphs.failing = False
    engine.runner.forget()
    assert answer(engine) == expected and engine.runner.replays > 0


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
    assert answer(engine) == answer(Engine(target, 256))
    assert refused and engine.runner.error is None and engine.runner.replays > 0
    refused.clear()  # the tuner's captures too
    steps = []
    assert engine.runner.timed(lambda: steps.append(1), lambda: None) > 0
    assert refused and len(steps) > 1


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
    ids=["torch", "Triton"],
)
def test_a_capture_without_memory_says_what_would_fit(target, head, error):
    engine = eagle_engine(
        target, head, advice=lambda given: given is head.config and "use --precision int8"
    )
    tried = []

    def without_memory(step, restore):
        tried.append(step)
        raise error

    engine.runner.graphs.capture = without_memory
    assert answer(engine) == answer(Engine(target, 256))
    assert engine.runner.error == f"{error}: use --precision int8"
    assert len(tried) == 2, "once for each variant: memory is not there a moment later"


def test_advice_that_fails_does_not_stop_an_answer(target, head, monkeypatch):
    """Cycles run eagerly all the same, and a prompt's error stays what it is."""

    def without_memory(*given):
        raise torch.OutOfMemoryError("CUDA out of memory")

    def without_advice(head):
        raise FasteagleError("int4 needs groups of 32")

    engine = eagle_engine(target, head, advice=without_advice)
    engine.runner.graphs.capture = without_memory
    assert answer(engine) == answer(Engine(target, 256))
    assert engine.runner.error == "CUDA out of memory"
    engine.restart()
    monkeypatch.setattr(engine, "_run", without_memory)
    with pytest.raises(FasteagleError, match="at token 0 of a prompt of 5: lower --max-seq-len"):
        answer(engine)


def test_a_prompt_without_memory_says_what_would_fit(target, head, monkeypatch):
    def without_memory(*given):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Engine, "_run", without_memory)
    with pytest.raises(FasteagleError, match="at token 0 of a prompt of 5: lower --max-seq-len"):
        answer(Engine(target, 256))
    backend = Backend(Target(target), lambda head: f"{head} fits")
    engine = Engine(target, 256, backend=backend)
    with pytest.raises(FasteagleError, match="of a prompt of 5: None fits$"):
        answer(engine)
    with pytest.raises(FasteagleError, match=r"of a prompt of 5: HeadConfig\(.*\) fits$"):
        engine.use(EagleDrafter(head, TreeShape(3, 3, 8), 256))
        answer(engine)


def test_multi_round_sampling_walks_on_the_host_and_is_not_captured(target, head):
    engine = captured_engine(target, 256)
    drafter = StaticTreeDrafter(head, 256, sampled=True)
    engine.use(drafter)
    params = SamplingParams(0.9, seed=2)
    found = answer(engine, params=params)
    assert engine.runner.error is None and engine.runner.replays == 0
    eager = Engine(target, 256, drafter=StaticTreeDrafter(head, 256, sampled=True))
    assert found == answer(eager, params=params)


def test_the_runner_of_a_cpu_captures_nothing(target):
    engine = Engine(target, 64, backend=choose_backend(target))
    assert not isinstance(engine.runner, CapturedRunner)


# Tree attention and compiled pieces


def attending(config) -> Target:
    """The op's reference on the CPU; its kernel has tests of its own."""
    return Target(random_target(config), tree_attention.OPS)


def test_tree_attention_in_the_whole_model():
    target, other = random_target(tiny_config()), attending(tiny_config())
    head = random_head(target)
    for params in DRAWN:
        expected = answer(Engine(target, 256), params=params)
        assert answer(eager_engine(other, 256), params=params) == expected
        drafter = EagleDrafter(head, TreeShape(3, 3, 8), 256)
        assert answer(eager_engine(other, 256, drafter), params=params) == expected
        assert answer(eagle_engine(other, head), params=params) == expected


def test_a_sliding_window_in_the_whole_model():
    config = tiny_config(sliding_window=6)
    target, other = random_target(config), attending(config)
    head = random_head(target, sliding_window=None)
    expected = answer(Engine(target, 256))
    assert answer(eagle_engine(other, head)) == expected


@pytest.mark.slow
@needs_compiler
def test_compiled_blocks_take_a_tree_view(target):
    other = attending(tiny_config())
    drafter = EagleDrafter(random_head(other.model), TreeShape(2, 2, 4), 256)
    engine = eager_engine(other, 256, drafter)
    assert compile_now(engine)
    expected = answer(Engine(target, 256))
    answer(engine, n=12)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert answer(engine) == expected


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
    ("algorithm", "params"), [("eagle3", GREEDY), ("eagle1", SamplingParams(0.8, seed=3))], ids=str
)
def test_compiled_pieces_are_the_eager_ones(target, algorithm, params):
    """Drafting is one call, accept and commit another; no value makes another variant of them."""
    head = random_head(target, eagle3=eagle3_of(algorithm, target.config))
    engine, eager = (
        Engine(target, 512, drafter=EagleDrafter(head, TreeShape(2, 2, 4), 512)) for _ in range(2)
    )
    assert compile_now(engine, params)
    assert len(engine.runner.compiled) == 2  # plain, and the tree
    with torch.compiler.set_stance("fail_on_recompile"):
        for seed in (3, 4):
            params = SamplingParams(params.temperature, seed=seed)
            assert answer(engine, PROMPT * 45, params) == answer(eager, PROMPT * 45, params)
            assert engine.stats.path_lengths == eager.stats.path_lengths


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("params", [GREEDY, DRAWN[3]], ids=str)
def test_graphs_hold_compiled_pieces(target, head, params):
    """As on CUDA, where every way to draw is compiled and then captured."""
    engine, expected = eagle_engine(target, head), answer(Engine(target, 256), params=params)
    engine.on_cpu = False
    compiler = CycleCompiler(engine, SamplingMode.of(params, target.config.vocab_size))
    compiler.compile()
    compiler.apply()
    assert answer(engine, params=params) == expected
    assert engine.runner.error is None and engine.runner.replays > 0
    kinds = [spec for _, spec in engine.runner.compiled]
    assert len(kinds) == 2 and kinds[0].shape is None
    for pieces in engine.runner.compiled.values():
        assert pieces.draft is not EAGER.draft and pieces.finish is not EAGER.finish


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(  # each compiles for a minute
    ("make", "params"),
    [
        ("fused", GREEDY),
        ("fused", SamplingParams(0.8, seed=3)),
        ("lookup alone", GREEDY),
        ("model", SamplingParams(0.8, seed=3)),
    ],
    ids=str,
)
def test_compiled_pieces_of_other_drafters(target, make, params):
    """What they learn is the same too, and compiling teaches them nothing."""

    def drafter():
        if make == "model":
            small = random_target(tiny_config(n_layer=1), seed=5)
            return ModelDrafter(Target(small), TreeShape(2, 2, 4), 512, 60)
        shape = FusedShape(2, 2, 8, 6) if make == "fused" else FusedShape(0, 1, 6, 6)
        return FusedDrafter(random_head(target), shape, 512)

    engine, eager = (Engine(target, 512, drafter=drafter()) for _ in range(2))
    before = [tensor.clone() for tensor in engine.drafter.advanced]
    assert compile_now(engine, params)
    assert all(map(torch.equal, before, engine.drafter.advanced))
    # Compiled code rounds the noisy scores of two sources differently: a tie may fall elsewhere.
    exact = make != "fused" or params.temperature == 0
    with torch.compiler.set_stance("fail_on_recompile"):
        for seed in (3, 4):
            params = SamplingParams(params.temperature, seed=seed)
            assert answer(engine, PROMPT * 45, params) == answer(eager, PROMPT * 45, params)
            found, wanted = engine.stats.path_lengths, eager.stats.path_lengths
            assert found == wanted if exact else abs(sum(found) - sum(wanted)) <= 0.1 * sum(wanted)
    if exact:
        assert all(map(torch.equal, engine.drafter.advanced, eager.drafter.advanced))


@pytest.mark.slow
@needs_compiler
def test_an_empty_proposal_costs_one_row_on_a_cpu(target):
    engine = Engine(target, 256, drafter=NgramDrafter(4))
    assert compile_now(engine)
    rows = []
    target_forward = target.forward
    target.forward = lambda tokens, *rest: rows.append(len(tokens)) or target_forward(tokens, *rest)
    try:
        with torch.compiler.set_stance("fail_on_recompile"):
            assert answer(engine) == answer(Engine(target, 256))
    finally:
        del target.forward
    assert set(rows[: engine.stats.passes]) == {1, 5}


# On a device with graphs, and on one that stands for it


ON_CUDA = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs CUDA")]


@pytest.fixture(params=["fake", pytest.param("cuda", marks=ON_CUDA)])
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
    if engine.on_cpu:
        return 0
    torch.cuda.synchronize(engine.device)
    free, total = torch.cuda.mem_get_info(engine.device)
    return total - free


def eagle(engine, shape=TreeShape(3, 3, 8)):  # noqa: B008
    engine.use(EagleDrafter(random_head(engine.model), shape, engine.max_seq_len))


class TestReplays:
    @pytest.mark.parametrize("params", DRAWN, ids=str)
    def test_cycles_of_every_drafter_are_the_eager_ones(self, made, params):
        target, engine = made()
        expected = answer(Engine(target, 512), params=params)
        for drafter in drafters(random_head(target), 512):
            engine.use(drafter)
            assert answer(engine, params=params) == expected
            assert engine.runner.error is None
            shapes = [] if drafter is None else drafter.shapes()
            assert engine.runner.captured == 1 + len(shapes), "plain, and each tree"
            engine.runner.forget()

    def test_a_longer_context_and_another_tree_are_captured_anew(self, made):
        for shape, length in ((TreeShape(2, 2, 4), 256), (TreeShape(4, 3, 12), 512)):
            target, engine = made(length)
            eagle(engine, shape)
            assert answer(engine) == answer(Engine(target, length))
            assert engine.runner.error is None and engine.runner.captured == 2

    def test_two_engines_in_one_process_take_turns(self, made):
        pairs = [made(), made()]
        for _, engine in pairs:
            eagle(engine)
        expected = answer(Engine(pairs[0][0], 512))
        begun = [engine.generate(PROMPT, GREEDY, 60) for _, engine in pairs]
        found = [[], []]
        for _ in range(60):  # a cycle of one, then a cycle of the other
            for tokens, cycles in zip(found, begun, strict=True):
                tokens.extend(next(cycles, []))
        assert found == [expected, expected]
        assert all(engine.runner.captured == 2 for _, engine in pairs)

    def test_many_captures_of_real_cycles_leak_nothing(self, made):
        target, engine = made()
        eagle(engine)
        expected = answer(engine)
        for round_ in range(20 if engine.on_cpu else 150):
            if round_ == 10:
                before = used_bytes(engine)
            engine.runner.forget()
            engine.prepare(GREEDY)
            assert engine.runner.error is None and engine.runner.captured == 2
        assert used_bytes(engine) - before < 32 * 2**20
        assert answer(engine) == expected == answer(Engine(target, 512))

    def test_a_capture_works_after_one_that_failed(self, made):
        target, engine = made()
        eagle(engine)
        expected = answer(Engine(target, 512))

        def reads_on_the_host():
            engine.state.seq_len.item()
            if engine.on_cpu:  # a capture on CUDA forbids it
                raise RuntimeError("operation not permitted")

        with pytest.raises(RuntimeError):
            engine.runner.timed(reads_on_the_host, lambda: None)
        assert answer(engine) == expected
        assert engine.runner.error is None and engine.runner.captured == 2


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_engines_on_two_devices_in_one_process():
    targets = [random_target(tiny_config()).to(f"cuda:{i}") for i in range(2)]
    engines = [Engine(one, 512, backend=choose_backend(one)) for one in targets]
    for engine in engines:
        eagle(engine)
    expected = answer(Engine(targets[0], 512))
    for engine in (*engines, *reversed(engines)):
        assert answer(engine) == expected
        assert engine.runner.error is None and engine.runner.captured == 2
    assert torch.cuda.current_device() == 0


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs CUDA")
def test_after_a_failed_capture_the_process_can_capture_again(gpu_subprocess):
    """In a process of its own: a broken stream or an open pool would spoil what follows."""
    gpu_subprocess(
        """
        import torch
        from fasteagle.compile.graphs import CudaGraphs
        x = torch.zeros(1, device="cuda")
        graphs = CudaGraphs(x.device)
        before = torch.cuda.current_stream()
        step = lambda: x.add_(1).item() if torch.cuda.is_current_stream_capturing() else x.add_(1)
        try:
            graphs.capture(step, lambda: None)
        except RuntimeError:
            pass
        else:
            raise AssertionError("a read on the host was captured")
        assert torch.cuda.current_stream() == before
        x.zero_()
        replay = graphs.capture(lambda: x.add_(1), x.zero_)
        replay(); replay()
        assert x.item() == 2, x
        """
    )


def test_the_fake_device_records_and_replays():
    """What the tests above rest on."""
    count = torch.zeros(1)
    graphs = FakeGraphs()
    replay = graphs.capture(lambda: count.add_(1), count.zero_)
    assert count == 0 and graphs.captured == 1
    replay()
    assert count == 1
