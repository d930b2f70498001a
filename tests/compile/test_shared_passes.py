"""Replayed cycles of several sequences that share their passes, with a fake of CUDA's graphs."""

from __future__ import annotations

import functools
import itertools
import operator
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import fasteagle.batch
from fake_cuda import FakeCuda
from fasteagle.batch import Batch
from fasteagle.compile import split_cycles
from fasteagle.compile.cuda_graphs import CudaGraphs
from fasteagle.compile.cycles import CycleCompiler
from fasteagle.compile.graphs import MOST_KINDS, CapturedRunner
from fasteagle.decoding.backend import Backend
from fasteagle.decoding.cycle import EAGER
from fasteagle.decoding.launch import Launch
from fasteagle.decoding.together import verify_together as together_of
from fasteagle.drafting.company import Company
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.drafting.ngram import NgramDrafter
from fasteagle.generate import Engine
from fasteagle.model import Target
from fasteagle.options import SamplingParams
from fasteagle.sampling import SamplingMode
from fasteagle.shapes import TreeShape
from fasteagle.tree import Pool
from helpers import Even, finished, generated, random_head, random_target, tiny_config
from replaying import FakeGraphs, FakePlace, PooledGraphs, ReplayingBackend

GREEDY, DRAWN = SamplingParams(), SamplingParams(0.8, seed=3)
PROMPTS = [[5, 6, 7, 8] * 4, [5, 6, 7] * 3, [9, 9, 9]]


class Sharing(ReplayingBackend):
    """Replays cycles; passes are shared, and run by the core."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.sizes: list[int] = []

    shares_passes = True

    def verify_together(self, states, proposals, capture=None):
        self.sizes.append(len(states))
        return super().verify_together(states, proposals)


@pytest.fixture
def engine():
    target = random_target(tiny_config())
    return Engine(target, 128, backend=Sharing(Target(target)))


def drafters(target):
    yield None
    yield NgramDrafter(4)
    yield EagleDrafter(random_head(target), TreeShape(2, 2, 4))


def ask(engine: Engine, i: int):
    processor = Even() if i == 2 else None
    params = (GREEDY, DRAWN, GREEDY)[i]
    return engine.generate(PROMPTS[i], params, 12 + 4 * i, processor=processor)


def together(engine: Engine, keys=(0, 1, 2)) -> tuple[dict[int, list[int]], Batch]:
    several = Batch(engine, 3)
    for i in keys:
        several.begin(i, PROMPTS[i], 64, lambda own, i=i: ask(own, i))
    # A prompt waits its share of the time, and a slow one would miss the others.
    clock = SimpleNamespace(perf_counter=itertools.count().__next__)
    with mock.patch.object(fasteagle.batch, "time", clock):
        return finished(several), several


@pytest.mark.parametrize("kind", range(3))
def test_texts_are_those_written_alone(engine, kind):
    """Greedy, drawn, and with a processor between the pass and the end of a cycle."""
    engine.use(list(drafters(engine.model))[kind])
    expected = {i: [t for new in ask(engine, i) for t in new] for i in range(3)}
    assert not engine.backend.sizes
    texts, several = together(engine)
    assert texts == expected and max(engine.backend.sizes) == 3
    for own in several.engines:
        assert any(own.runner._split.values()) and own.runner.error is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", range(3))
def test_compiled_cycles_of_several_are_captured_in_parts(engine, kind, monkeypatch):
    """What a compiled end was traced with lay in one memory: a root and the tree under it."""

    def traced(function, options, **more):
        return compiled(function, backend="aot_eager", **more)

    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", traced)
    engine.use(list(drafters(engine.model))[kind])
    expected, _ = together(engine, (0, 2))
    processed = [*ask(engine, 2)]
    engine.on_cpu = False  # pieces are those for graphs
    compiler = CycleCompiler(engine)
    compiler.compile()
    compiler.apply()
    engine.on_cpu = True
    alone, several = together(engine, (0, 2))
    assert alone == expected and [*ask(engine, 2)] == processed, "alone, in parts too"
    for own in several.engines[:2]:
        roots = [split.draft().tree.tokens for split in own.runner._split.values()]
        same = roots[0].data_ptr() == own.state.root.data_ptr()
        assert same == (kind == 0), "the root alone is its own tree, as in a whole cycle"
        pieces = own.runner.pieces(own.spec(None, SamplingMode()), own.drafter)
        assert pieces.finish is not EAGER.finish
        assert any(own.runner._split.values()) and own.runner.error is None


class Pooled(Backend):
    """Replays cycles and passes, by graphs that overwrite each other's memory."""

    shares_passes = True

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.passes = {}

    def runner(self, state):
        return CapturedRunner(self, state, PooledGraphs())

    def verify_together(self, states, proposals, capture=None):
        """Replay a pass for each set of sequences and of sizes."""
        key = tuple((id(s), id(p.tree.tokens)) for s, p in zip(states, proposals, strict=True))
        if key not in self.passes:
            step, outputs = split_cycles.lasting(
                lambda: together_of(states, self.target, proposals)
            )
            self.passes[key] = capture(step, (None, key)), outputs
        replay, outputs = self.passes[key]
        replay()
        return outputs


def test_no_replay_reads_what_another_may_have_overwritten():
    """Greedy answers, then drawn ones: parts are captured before the passes and after them."""
    model = random_target(tiny_config())
    engine = Engine(model, 128, backend=Pooled(Target(model)))
    engine.use(EagleDrafter(random_head(model), TreeShape(2, 2, 4)))
    several = Batch(engine, 2)
    for params in (GREEDY, DRAWN, GREEDY):
        expected = [generated(engine.sibling(), 12, PROMPTS[i], params) for i in range(2)]
        for i in range(2):
            ask_for = functools.partial(Engine.generate, prompt=PROMPTS[i], params=params)
            several.begin(i, PROMPTS[i], 64, functools.partial(ask_for, max_new_tokens=12))
        assert [*finished(several).values()] == expected
    assert all(own.runner.error is None for own in several.engines)
    assert not any(own.runner._graphs.overwritten for own in several.engines)


def test_one_alone_is_replayed_as_a_whole_and_ahead(engine):
    """Until others come, and when they have left."""
    launched = []
    run = type(engine.runner).run

    def counted(runner, launch):
        launched.append(runner)
        run(runner, launch)

    with mock.patch.object(type(engine.runner), "run", counted):
        together(engine, [0])
        assert not engine.backend.sizes and len(launched) == 11, "none that it cannot need"
        assert not engine.runner._split
        before = len(launched)
        _, several = together(engine)
        runner = several.engines[-1].runner
    assert engine.backend.sizes and len(launched) > before, "the last one of three is alone"
    whole = {own.runner for own in several.engines[1:] if own.runner.captured}
    assert whole == {*launched[before:]} - {engine.runner}, "and only then captured as a whole"
    assert {own.runner for own in several.engines} > {*launched[before:]}
    assert not runner.waits and not runner.accompanied


def test_the_next_pass_is_under_way_while_one_is_read(engine):
    """Of a text whose processor must see the last tokens first, it cannot be."""
    under_way: dict[CapturedRunner, list[int]] = {}
    read = CapturedRunner.read

    def counted(runner):
        under_way.setdefault(runner, []).append(len(runner._launched))
        assert not runner.queued, "all that was launched is under way"
        return read(runner)

    with mock.patch.object(CapturedRunner, "read", counted):
        together(engine)
    free, drawn, processed = under_way.values()
    assert free == [2] * 10 + [1], "none that it cannot need"
    assert drawn == [2] * 14 + [1]
    assert set(processed) == {1}


def test_the_time_of_a_shared_pass_is_none_of_a_cycle_alone(engine):
    """Nor where the cycle after it, alone again, is launched before it is read."""
    shared: dict[CapturedRunner, list[bool]] = {}
    alone: dict[CapturedRunner, list[bool]] = {}
    run, finish, read = (getattr(CapturedRunner, name) for name in ("run", "finish", "read"))

    def noted(is_shared, work):
        def noting(runner, *rest):
            shared.setdefault(runner, []).append(is_shared)
            work(runner, *rest)

        return noting

    def reading(runner):
        done = read(runner)
        alone.setdefault(runner, []).append(done.alone)
        return done

    together(engine, (1, 0))  # which captures
    made = {"run": noted(False, run), "finish": noted(True, finish), "read": reading}
    with mock.patch.multiple(CapturedRunner, **made):
        together(engine, (1, 0))
    for runner, flags in alone.items():
        assert not any(map(operator.and_, flags, shared[runner]))
    assert any(alone[engine.runner]) and any(shared[engine.runner]), "the longer text ends alone"


def test_passes_in_which_something_is_captured_are_not_timed(engine):
    """A size of trees that is tried for the first time would seem slow."""
    captured, steps, capture = [], [], FakeGraphs.capture

    def counted(graphs, *work):
        captured.append(graphs)
        return capture(graphs, *work)

    def end_passes(company, passes, ms):
        steps.append((passes, len(captured)))
        captured.clear()

    with (
        mock.patch.object(FakeGraphs, "capture", counted),
        mock.patch.object(Company, "end_passes", end_passes),
    ):
        together(engine)
    assert any(n for _, n in steps) and not any(passes for passes, n in steps if n)
    assert sum(passes for passes, _ in steps) > len(steps) // 2


def test_parts_that_cannot_be_captured_run_without_a_graph(engine):
    expected, _ = together(engine)
    graphs = [engine.runner.graphs]
    engine.runner.forget()
    with mock.patch("replaying.FakeGraphs.capture", side_effect=RuntimeError("not permitted")):
        texts, several = together(engine)
    assert texts == expected and graphs
    assert several.engines[0].runner.error.startswith("not permitted")
    assert not any(several.engines[0].runner._split.values())
    several.engines[1].runner.error = "no memory"
    assert several.engines[0].runner.error == "no memory", "a chat tells of any"


@pytest.mark.parametrize(("n", "table"), [(1, "_replays"), (2, "_split")], ids=str)
def test_graphs_of_sampling_modes_that_are_not_stored_any_more_are_dropped(engine, n, table):
    for params in (GREEDY, DRAWN, SamplingParams(0.8, top_p=0.9)):
        several = Batch(engine, 2)
        for i in range(n):
            ask_for = functools.partial(Engine.generate, prompt=PROMPTS[i], params=params)
            several.begin(i, PROMPTS[i], 64, functools.partial(ask_for, max_new_tokens=8))
        finished(several)
    graphs = getattr(engine.runner, table)
    assert len({spec.kind for _, spec, *_ in graphs}) == MOST_KINDS


def test_a_cycle_from_candidates_is_captured_apart(engine):
    drafter = EagleDrafter(random_head(engine.model), TreeShape(2, 2, 4))
    engine.use(drafter)
    [*engine.generate(PROMPTS[0], GREEDY, 3)]
    launch = Launch(engine.spec(drafter.shape, SamplingMode()), drafter, None)
    n = drafter.shape.pool
    pool = Pool(torch.zeros(n).long(), torch.zeros(n), torch.full((n,), -1))
    alone, together = (engine.runner._split_of(launch, each) for each in (None, pool))
    assert engine.runner.error is None
    assert alone.pool is None and torch.equal(together.pool.parents, pool.parents)
    places = [each.data_ptr() for each in (*together.pool[:3], *pool[:3])]
    assert len({*places}) == 6, "the next run may have other candidates there"


@pytest.mark.parametrize("aux_layers", [(), (0, 1)])
@pytest.mark.parametrize("width", [0, 3])
def test_the_end_of_a_cycle_reads_features_only_where_they_are_stored(aux_layers, width):
    """Auxiliary states in fp32, features in the model's own type, or nothing."""
    target = Target(random_target(tiny_config()).bfloat16())
    state, spec = SimpleNamespace(aux_layers=aux_layers), SimpleNamespace(width=width)
    output = split_cycles._zeros(state, target, spec, 5)
    dim = target.config.dim if width else 0
    assert output.logits.shape == (5, target.config.vocab_size)
    if aux_layers:
        assert output.features.numel() == 0
        assert output.aux_states.shape == (5, 2 * dim) and output.aux_states.dtype == torch.float32
    else:
        assert output.features.shape == (5, dim) and output.features.dtype == torch.bfloat16


def test_beside_others_a_cycle_of_a_mode_that_was_prepared_needs_nothing(engine):
    engine.prepare(GREEDY)
    engine.runner.accompanied = True
    specs = [engine.spec(None, SamplingMode(greedy)) for greedy in (True, False)]
    assert [engine.runner.needs([spec], None) for spec in specs] == [False, True]
    engine.runner.forget()
    assert all(engine.runner.needs([spec], None) for spec in specs)


def test_a_part_that_fails_leaves_the_state(engine):
    """The end is captured before the pass has run: nothing of it may remain."""
    runner = engine.runner
    [*engine.generate(PROMPTS[0], GREEDY, 3)]
    spec = engine.spec(None, next(iter(runner._kinds)))
    before = [tensor.clone() for tensor in engine.state.advanced]
    launch = Launch(spec, None, None)
    assert runner._split_of(launch) is not None
    assert all(map(torch.equal, engine.state.advanced, before))
    runner.forget()

    def finish(*cycle):
        EAGER.finish(*cycle)
        assert not all(map(torch.equal, engine.state.advanced, before))
        raise RuntimeError("cannot be captured")

    with mock.patch.object(runner, "pieces", lambda *_: EAGER._replace(finish=finish)):
        assert runner._split_of(launch) is None
    assert runner.error == "cannot be captured"
    assert all(map(torch.equal, engine.state.advanced, before))


def test_texts_that_do_not_share_passes_any_more_decide_by_themselves(engine, monkeypatch):
    """As where a pass cannot be captured: until one of them ended they would all decode plainly."""
    engine.use(EagleDrafter(random_head(engine.model), TreeShape(2, 2, 4)))
    engine.drafter.tuning = mock.Mock()
    several = Batch(engine, 2)
    for i in range(2):
        several.begin(i, PROMPTS[i], 64, lambda own, i=i: ask(own, i))
    together = [own.drafter.company for own in several.engines]
    assert None not in together and len(several.running) == 2

    def last_one(backend, *rest):
        monkeypatch.setattr(Sharing, "shares_passes", False)
        return Backend.verify_together(backend, *rest)

    monkeypatch.setattr(Sharing, "verify_together", last_one)
    while engine.backend.shares_passes:
        several.step()
    assert len(several.running) == 2
    assert [own.drafter.company for own in several.engines] == [None, None]
    assert finished(several)


def test_a_pass_that_fails_ends_the_answers_by_its_reason(engine):
    error = RuntimeError("no such kernel")
    several = Batch(engine, 3)
    for i in range(2):
        several.begin(i, PROMPTS[i], 64, lambda own, i=i: ask(own, i))
    with mock.patch.object(Sharing, "verify_together", side_effect=error):
        items = [item for _ in range(8) for item in several.step()]
    assert [item for _, item in items if isinstance(item, Exception)] == [error, error]
    assert not several.running
    texts, _ = together(engine)
    assert texts[0] == [t for new in ask(engine, 0) for t in new]


def test_captures_of_passes_are_counted_like_those_of_cycles(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    target = random_target(tiny_config())
    graphs = CudaGraphs(torch.device("cuda"))
    graphs.place = lambda result: FakePlace()
    state = Engine(target, 64).state
    runner = CapturedRunner(Sharing(Target(target)), state, graphs)
    cuda.refusing = 100
    for refused in (2, 4, 4):
        assert runner.capture_pass(lambda: None, (None, "shape")) is None
        assert cuda.refused == refused and runner.error.startswith(cuda.reason)
    cuda.refusing = 0
    assert runner.capture_pass(lambda: None, (None, "another")) is not None
