"""Static cycles against the engine's own: the same tokens, whatever is launched ahead."""

from __future__ import annotations

import pytest
import torch

from fasteagle.compile.blocks import missing_compiler
from fasteagle.compile.costs import follow_costs
from fasteagle.compile.cycles import StaticCycles
from fasteagle.compile.graphs import GraphRunner
from fasteagle.compile.tree_attention import use_tree_attention
from fasteagle.drafters import EagleDrafter, Tuning
from fasteagle.drafting.plan import DEFAULT_RANKS
from fasteagle.errors import FasteagleError
from fasteagle.generate import Engine
from fasteagle.loading.open import compile_now
from fasteagle.options import SamplingParams
from fasteagle.tree import TreeShape
from helpers import costs, random_head, random_target, tiny_config

needs_compiler = pytest.mark.skipif(missing_compiler() is not None, reason="no C++ compiler")
CUDA = torch.cuda.is_available()
PROMPT = [5, 6, 7, 8, 9]
GREEDY = SamplingParams()
DRAWN = [GREEDY, SamplingParams(0.8, top_p=0.9, seed=7), SamplingParams(1.0, top_k=5, seed=3)]


@pytest.fixture(scope="module")
def target():
    return random_target(tiny_config())


@pytest.fixture(scope="module")
def head(target):
    return random_head(target)


def static_engine(target, head, shape=TreeShape(3, 3, 8), ahead=True, max_seq_len=256):  # noqa: B008
    engine = Engine(target, max_seq_len)
    drafter = EagleDrafter(head, shape, max_seq_len)
    engine.use(drafter)
    engine.captured = StaticCycles(engine, drafter, [shape], ahead)
    return engine


def answer(engine, prompt=PROMPT, params=GREEDY, n=60, eos=frozenset()):
    return [t for ids in engine.generate(prompt, params, n, eos) for t in ids]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("shape", [TreeShape(3, 3, 8), TreeShape(2, 1, 2), TreeShape(4, 2, 10)])
@pytest.mark.parametrize("params", DRAWN, ids=str)
def test_the_tokens_of_plain_decoding(target, head, shape, ahead, params):
    expected = answer(Engine(target, 256), params=params)
    engine = static_engine(target, head, shape, ahead)
    assert answer(engine, params=params) == expected
    own = Engine(target, 256, drafter=EagleDrafter(head, shape, 256))
    assert answer(own, params=params) == expected
    # Not just right: the same guesses, accepted in the same passes.
    assert engine.stats.path_lengths == own.stats.path_lengths
    assert engine.stats.passes == own.stats.passes and engine.stats.drafted == own.stats.drafted


@pytest.mark.parametrize("ahead", [False, True])
def test_a_stop_rewinds_and_the_next_turn_goes_on(target, head, ahead):
    engine = static_engine(target, head, ahead=ahead)
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


@pytest.mark.parametrize("ahead", [False, True])
def test_up_to_the_last_slot(target, head, ahead):
    expected = answer(Engine(target, 48), n=100)
    engine = static_engine(target, head, ahead=ahead, max_seq_len=48)
    assert answer(engine, n=100) == expected and engine.stats.finish == "context"


def test_an_answer_cut_short_leaves_the_engine_ready(target, head):
    engine = static_engine(target, head)
    begun = engine.generate(PROMPT, GREEDY, 50)
    first = [t for ids in (next(begun), next(begun)) for t in ids]
    begun.close()
    expected = answer(Engine(target, 256))
    assert first == expected[: len(first)] and len(first) >= 2
    assert engine.cached == (PROMPT + first)[:-1]
    assert answer(engine) == expected


def test_the_pilot_steers_static_cycles_too(target, head, tmp_path):
    engine = Engine(target, 512)
    drafter = EagleDrafter(head, TreeShape(3, 3, 8), 512)
    drafter.tuning = Tuning(tmp_path / "costs.json", DEFAULT_RANKS)
    engine.use(drafter)
    plan = follow_costs(engine, drafter, costs())
    engine.captured = StaticCycles(engine, drafter, plan.shapes, ahead=True)
    assert answer(engine, n=200) == answer(Engine(target, 512), n=200)
    used = drafter.pilot.used
    assert used[None] > 20 and len(used) > 1


def test_a_repetition_penalty_is_left_to_the_engine(target, head):
    params = SamplingParams(repetition_penalty=1.3)
    engine = static_engine(target, head)
    assert answer(engine, params=params) == answer(Engine(target, 256), params=params)


def test_another_drafter_does_without_them(target, head):
    engine = static_engine(target, head)
    kept = engine.drafter
    engine.use(None)
    expected = answer(engine)
    assert engine.stats.path_lengths == []
    engine.use(kept)
    assert answer(engine) == expected and engine.stats.path_lengths


def test_bad_logits_are_reported(head):
    target = random_target(tiny_config())
    engine = static_engine(target, head)
    begun = engine.generate(PROMPT, GREEDY, 50)
    next(begun)
    with torch.no_grad():
        target.norm.weight.fill_(float("nan"))
    with pytest.raises(FasteagleError, match="not finite"):
        for _ in begun:
            pass


def test_tree_attention_in_the_whole_model(head):
    """The op's reference on the CPU; its kernel has tests of its own."""
    target, other = random_target(tiny_config()), random_target(tiny_config())
    use_tree_attention(other)
    assert other.takes_tree_view and not target.takes_tree_view
    head = random_head(target)
    for params in DRAWN:
        expected = answer(Engine(target, 256), params=params)
        assert answer(Engine(other, 256), params=params) == expected
        drafter = EagleDrafter(head, TreeShape(3, 3, 8), 256)
        assert answer(Engine(other, 256, drafter=drafter), params=params) == expected
        assert answer(static_engine(other, head), params=params) == expected


@pytest.mark.slow
@needs_compiler
def test_compiled_blocks_take_a_tree_view(target):
    other = random_target(tiny_config())
    use_tree_attention(other)
    engine = static_engine(other, random_head(other))
    assert compile_now(engine)
    expected = answer(Engine(target, 256))
    answer(engine, n=12)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert answer(engine) == expected


def test_a_sliding_window_in_the_whole_model():
    config = tiny_config(sliding_window=6)
    target, other = random_target(config), random_target(config)
    use_tree_attention(other)
    head = random_head(target, sliding_window=None)
    expected = answer(Engine(target, 256))
    assert answer(static_engine(other, head)) == expected


def test_on_a_cpu_a_runner_runs_the_step():
    count = torch.zeros(1)
    runner = GraphRunner(lambda: count.add_(1), torch.device("cpu"), advanced=[count])
    runner.replay()
    runner.replay()
    assert count == 2 and not runner.captured and runner.error is None


def test_steps_compile_without_a_break(target, head):
    engine = static_engine(target, head)
    answer(engine, n=2)
    step = engine.captured._step(TreeShape(3, 3, 8), GREEDY)
    before = [t.clone() for t in engine.captured.buffers.advanced]
    engine.drafter.state.shared_seq_len = engine.captured.buffers.seq_len
    step()
    after = [t.clone() for t in engine.captured.buffers.advanced]
    for tensor, old in zip(engine.captured.buffers.advanced, before, strict=True):
        tensor.copy_(old)
    torch.compile(step, fullgraph=True, backend="aot_eager")()
    assert all(map(torch.equal, engine.captured.buffers.advanced, after))


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs CUDA")
class TestGraphs:
    def made(self, shape=TreeShape(3, 3, 8), max_seq_len=512):  # noqa: B008
        target = random_target(tiny_config()).cuda()
        head = random_head(target)
        return target, static_engine(target, head, shape, max_seq_len=max_seq_len)

    @pytest.mark.parametrize("params", DRAWN, ids=str)
    def test_replayed_cycles_are_the_eager_ones(self, params):
        target, engine = self.made()
        assert answer(engine, params=params) == answer(Engine(target, 512), params=params)
        assert engine.captured.error is None
        assert all(r.captured for r in engine.captured._for(params).values() if r is not None)

    def test_a_longer_context_and_another_tree_are_captured_anew(self):
        for shape, length in ((TreeShape(2, 2, 4), 256), (TreeShape(4, 3, 12), 512)):
            target, engine = self.made(shape, length)
            assert answer(engine) == answer(Engine(target, length))

    def test_two_engines_in_one_process(self):
        pairs = [self.made(), self.made()]
        for target, engine in (*pairs, *reversed(pairs)):
            assert answer(engine) == answer(Engine(target, 512))

    def test_what_cannot_be_captured_runs_eagerly_and_says_why(self):
        count = torch.zeros(1, device="cuda")

        def step():
            count.add_(1)
            count.item()  # a read of the host

        runner = GraphRunner(step, count.device, advanced=[count])
        runner.replay()
        runner.replay()
        assert count == 2 and not runner.captured and runner.error

    def test_a_thousand_captures_and_replays_leak_nothing(self):
        buffer = torch.zeros(1024, device="cuda")
        pool = torch.cuda.graph_pool_handle()

        def once():
            runner = GraphRunner(lambda: buffer.add_(1), buffer.device, pool, [buffer])
            for _ in range(2):
                runner.replay()
            torch.cuda.synchronize()

        for _ in range(50):
            once()
        before = torch.cuda.mem_get_info()[0]
        for _ in range(1000):
            once()
        assert before - torch.cuda.mem_get_info()[0] < 16 * 2**20
        assert buffer[0] == 2 * 1050
