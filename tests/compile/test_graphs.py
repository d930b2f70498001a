"""`CudaGraphs` on a stand-in for `torch.cuda`: memory pool, stream, captures that fail."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from fake_cuda import FakeCuda
from fasteagle.compile.cuda_graphs import CudaGraphs
from fasteagle.compile.cycles import compiling
from fasteagle.compile.graphs import COMPILING, CapturedRunner
from fasteagle.decoding.backend import Backend
from fasteagle.decoding.cycle import EAGER
from fasteagle.decoding.launch import Launch
from fasteagle.drafting.ngram import NgramDrafter
from fasteagle.generate import Engine
from fasteagle.model import Target
from fasteagle.options import SamplingParams
from fasteagle.sampling import SamplingMode
from fasteagle.shapes import TreeShape
from helpers import Even, captured_engine, generated, output_of, random_target, tiny_config
from replaying import FakePlace


@pytest.fixture
def cuda(monkeypatch):
    return FakeCuda(monkeypatch)


def nothing():
    pass


def test_captures_go_on_when_all_graphs_are_gone(cuda):
    graphs = CudaGraphs(torch.device("cuda"))
    for _ in range(3):
        replay = graphs.capture(nothing, nothing)
        del replay
    assert list(cuda.users.values()) == [1], "one pool, and a graph that keeps it"
    assert cuda.streams == 1


@pytest.mark.parametrize("place", ["begin", "step"])
def test_a_capture_that_fails_leaves_a_new_pool_behind(cuda, place):
    graphs = CudaGraphs(torch.device("cuda"))
    replay = graphs.capture(nothing, nothing)

    def reads_on_the_host():
        if cuda.allocating:
            raise RuntimeError("operation not permitted when stream is capturing")

    cuda.refusing = int(place == "begin")
    with pytest.raises(RuntimeError, match="not permitted"):
        graphs.capture(nothing if place == "begin" else reads_on_the_host, nothing)
    assert not cuda.allocating and replay is not None
    graphs.capture(nothing, nothing)
    assert len(cuda.users) == 2 and not cuda.allocating
    assert cuda.streams == 2, "the first may be left in capture mode"


def test_a_pool_that_cannot_be_opened_is_opened_the_next_time(cuda):
    graphs = CudaGraphs(torch.device("cuda"))
    cuda.refusing = 1
    with pytest.raises(RuntimeError, match="not permitted"):
        graphs.capture(nothing, nothing)
    graphs.capture(nothing, nothing)
    assert not cuda.allocating


def test_a_capture_is_between_what_runs_before_it_and_after_it(cuda):
    """It is on a stream of its own, and its warm-up changes what the step changes."""
    graphs, runs = CudaGraphs(torch.device("cuda")), []
    graphs.capture(lambda: runs.append("step"), lambda: runs.append("restore"))
    assert runs == ["step", "restore", "step"]
    pool, step = ["host waits", "capture"], ["host waits", "capture"]
    assert cuda.order == ["side waits", *pool, *step, "current waits"]


def test_results_and_times_are_read_when_the_device_has_made_them(cuda, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    graphs, result = CudaGraphs(torch.device("cuda")), torch.tensor([3, 4])
    place = graphs.place(result)
    place.fill(result)
    result.zero_()
    assert place.read() == [3, 4] and cuda.order == ["event", "host waits for event"]
    assert graphs.milliseconds(nothing) == 1


class Graphs(CudaGraphs):
    """Results are read on the CPU, where they are."""

    def place(self, result):
        return FakePlace()


class Replaying(Backend):
    def runner(self, state):
        return CapturedRunner(self, state, Graphs(torch.device("cuda")))


@pytest.fixture
def engine(cuda):
    target = random_target(tiny_config())
    return Engine(target, 64, backend=Replaying(Target(target)))


@pytest.mark.parametrize(  # one for lack of memory is not repeated at once
    ("reason", "tries"),
    [("operation not permitted", (2, 4, 4)), ("out of memory", (1, 2, 3, 4, 4))],
)
def test_a_cycle_is_tried_once_more_with_other_code_and_then_no_more(
    cuda, engine, reason, tries, monkeypatch
):
    """Each failure leaves a pool behind that nothing frees."""
    runner = engine.runner
    monkeypatch.setattr(engine.backend, "advised", lambda head: "use --int4")
    cuda.refusing, cuda.reason = 100, f"CUDA error: {reason}"
    line = cuda.reason + ": use --int4" * ("memory" in reason)
    for refused in tries:
        said = f"{line} (failed 4 times, not tried again)" if refused == 4 else line
        engine.prepare(SamplingParams())
        assert cuda.refused == refused and runner.captured == 0
        assert runner.error == said
        runner.forget()
    cuda.refusing = 0
    engine.prepare(SamplingParams())
    assert runner.captured == 0, "this one could be captured now, but may have failed for good"
    engine.prepare(SamplingParams(0.8))
    assert runner.captured == 1, "another cycle is not concerned"


def test_a_processor_runs_before_the_last_graph():
    """Replayed steps run in parts, and only by their own key."""
    engine = captured_engine(random_target(tiny_config()), 64)

    def answer(processor, seed=0):
        engine.restart()
        params = SamplingParams(0.9, top_p=0.95, seed=seed)
        return generated(engine, 8, params=params, processor=processor)

    free = answer(None)
    runner = engine.runner
    assert runner.captured == 1 and any(token % 2 for token in free)
    graphs = runner.graphs.captured
    for seed in (0, 1):
        before = runner.replays
        even = answer(Even(), seed)
        assert not any(token % 2 for token in even) and runner.replays == before + 7
        assert runner.graphs.captured == graphs + 3 and runner.captured == 2
        with mock.patch.object(runner, "_replay_of", lambda *_: None):
            assert answer(Even(), seed) == even, "without a graph"
    assert answer(None) == free
    assert answer(Counting()) == [*range(8)], "it has seen all tokens before"


class Counting:
    """A grammar that allows one token: one more than those that it was shown."""

    shown = 0

    def __call__(self, logits, tree):
        return torch.full_like(logits, float("-inf")).index_fill(1, torch.tensor(self.shown), 0.0)

    def accept(self, tokens):
        self.shown += len(tokens)


def test_a_part_that_cannot_be_captured_leaves_the_state(cuda, engine):
    engine.use(NgramDrafter(4))
    spec, drafter = engine.spec(engine.drafter.shape, SamplingMode()), engine.drafter
    engine.prefill([1, 2, 1, 2, 1])
    advanced = [*engine.state.advanced, *drafter.advanced]
    before = [tensor.clone() for tensor in advanced]

    def draft(*cycle):
        proposal = EAGER.draft(*cycle)
        assert not all(map(torch.equal, drafter.advanced, before[-len(drafter.advanced) :]))
        return proposal

    finish = mock.Mock(side_effect=RuntimeError("cannot be captured"))
    pieces = EAGER._replace(draft=draft, finish=finish)
    for processed in (True, False):
        engine.runner.forget()
        with mock.patch.object(engine.runner, "pieces", lambda *_: pieces):
            engine.runner.prepare([spec], drafter, processed)
        assert finish.called and engine.runner.error.startswith("cannot be captured")
        assert not engine.runner.captured and not engine.runner.needs([spec], drafter, processed)
        assert all(map(torch.equal, advanced, before))


def test_kernels_are_compiled_while_nothing_is_captured(engine, monkeypatch):
    """It waits for the whole device."""
    free = []

    def compiled(*_):
        other = threading.Thread(target=lambda: free.append(COMPILING.acquire(blocking=False)))
        other.start()
        other.join()

    monkeypatch.setattr("fasteagle.compile.graphs.compile_ahead", compiled)
    engine.compile_ahead()
    assert free == [False]


def test_compiled_code_is_captured_where_other_code_failed_for_good(cuda, engine):
    cuda.refusing = 100
    for _ in range(2):
        engine.prepare(SamplingParams())
        engine.runner.forget()
    cuda.refusing = 0
    engine.runner.use_compiled({})
    engine.prepare(SamplingParams())
    assert engine.runner.captured == 1


def test_a_capture_waits_for_code_that_is_being_compiled(cuda, engine):
    """Its timing waits for the whole device, which no capture survives."""
    with COMPILING:
        thread = threading.Thread(target=engine.prepare, args=(SamplingParams(),))
        thread.start()
        thread.join(0.5)
        assert engine.runner.captured == 0
    thread.join()
    assert engine.runner.captured == 1


def test_an_answer_waits_for_one_part_of_a_compilation_only(cuda, engine):
    begun = threading.Event()
    ended = []

    def compile_parts() -> None:
        for _ in range(5):
            with compiling():
                begun.set()
                time.sleep(0.2)
            ended.append(time.perf_counter())

    thread = threading.Thread(target=compile_parts)
    thread.start()
    begun.wait()
    engine.prepare(SamplingParams())
    prepared = time.perf_counter()
    thread.join()
    assert engine.runner.captured == 1 and prepared < ended[2]


def test_what_is_compiled_replaces_the_graphs_of_siblings(cuda, engine):
    sibling = engine.sibling()
    for own in (engine, sibling):
        own.prepare(SamplingParams())
    counted = mock.Mock(side_effect=EAGER.finish)
    pieces = EAGER._replace(finish=counted)
    engine.runner.use_compiled({(None, engine.spec(None, SamplingMode())): pieces})
    sibling.prepare(SamplingParams())
    assert counted.called and sibling.runner.captured == 1
    captures = sibling.runner.captures
    sibling.prepare(SamplingParams())
    assert sibling.runner.captures == captures, "they are replaced once"


def test_a_cache_of_another_size_or_at_another_address_is_another(cuda, engine):
    spec = engine.spec(None, SamplingMode())

    def drafter(n_slots, address):
        rows = SimpleNamespace(data_ptr=lambda: address)
        return SimpleNamespace(caches=[SimpleNamespace(rows=rows, n_slots=n_slots)])

    caches = (256, 4096), (512, 4096), (256, 8192)
    assert len({engine.runner._key(spec, drafter(*cache))[2] for cache in caches}) == 3


def test_the_second_attempt_at_a_capture_begins_where_the_first_did(cuda, engine):
    place, begun = torch.zeros(()), []

    def step():
        begun.append(float(place))
        place.add_(1)
        if len(begun) == 1:
            raise RuntimeError("spoiled")

    engine.runner._capture(step, lambda: place.zero_())
    assert begun == [0, 0, 0]


@pytest.mark.parametrize("kind", ["whole", "with a processor", "with others"])
def test_each_run_of_a_capture_begins_at_the_same_state(kind):
    """Near the end of a context, the second one would write past the last slot."""
    engine, begun = captured_engine(random_target(tiny_config()), 64), []
    engine.prefill([1, 2, 3])

    def finish(state, *rest):
        begun.append(state.seq_len.clone())
        EAGER.finish(state, *rest)

    spec = engine.spec(None, SamplingMode())
    with mock.patch.object(engine.runner, "pieces", lambda *_: EAGER._replace(finish=finish)):
        if kind == "with others":
            captured = engine.runner._split_of(Launch(spec, None, None))
        else:
            captured = engine.runner._replay_of(spec, None, kind != "whole")
    assert captured is not None and len(begun) > 1
    assert {*map(int, begun)} == {int(engine.state.seq_len)}


@pytest.mark.parametrize("refusing", [0, 100])
def test_no_drafter_that_was_replaced_is_kept(cuda, engine, refusing):
    """Neither by the graphs of its cycles, nor by their failures, nor by compiled code."""
    cuda.refusing = refusing
    drafters = [NgramDrafter(4), NgramDrafter(4)]
    engine.use(drafters[0])
    spec = engine.spec(drafters[0].shape, SamplingMode())
    engine.runner.use_compiled({(drafters[0], spec): EAGER})
    engine.prepare(SamplingParams())
    if refusing:
        engine.runner.forget()
    seen = weakref.ref(drafters[0])
    engine.use(drafters[1])
    del drafters[0]
    gc.collect()
    assert seen() is None


def test_captures_that_were_spoiled_now_and_then_go_on(cuda, engine):
    for spoiled in range(1, 6):  # more than may follow each other
        cuda.refusing = 1
        engine.prepare(SamplingParams())
        assert engine.runner.captured == 1 and cuda.refused == spoiled
        assert engine.runner.error is None
        engine.runner.forget()


def test_the_time_of_a_replay_is_the_median_of_runs_from_the_same_state(monkeypatch):
    runner = captured_engine(random_target(tiny_config()), 64).runner
    place, begun, times = torch.zeros(()), [], iter([5.0, 1.0, 9.0, 2.0, 3.0])

    def work():
        begun.append(place.clone())
        place.add_(1)

    monkeypatch.setattr(runner.graphs, "milliseconds", lambda replay: replay() or next(times))
    assert runner.timed(work, place.zero_) == 3
    assert len(begun) > 5 and not any(begun)


def test_nothing_that_was_dropped_is_under_way(cuda, engine):
    engine.prefill([1, 2, 3])
    engine.runner.launch(engine.spec(None, SamplingMode()), None)
    cuda.order.clear()
    engine.runner.drop()
    assert cuda.order == ["host waits"]


def test_dropped_cycles_say_whether_a_draft_head_may_have_read_pairs(engine):
    plain, drafted = (engine.spec(shape, SamplingMode()) for shape in (None, TreeShape()))
    for specs, has_read in (([], False), ([plain], False), ([plain, drafted], True)):
        assert engine.runner.drop(specs) == has_read


def test_the_time_of_a_cycle_that_waited_for_a_capture_is_not_its_own(cuda, engine):
    """Nor that of one which was launched before, and is read after the capture."""
    engine.prefill([1, 2, 3])
    greedy, drawn = (engine.spec(None, SamplingMode(greedy=greedy)) for greedy in (True, False))
    for specs, alone in (((greedy,), False), ((greedy, drawn), False), ((drawn, greedy), True)):
        for spec in specs:
            engine.runner.launch(spec, None)
        assert [engine.runner.read().alone for _ in specs] == [alone] * len(specs)


@pytest.mark.gpu
def test_after_a_failed_capture_the_process_can_capture_again():
    """In a process of its own: a broken stream or an open pool would spoil what follows."""
    output_of(
        """
        import torch
        from fasteagle.compile.cuda_graphs import CudaGraphs
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
