"""What a chat prepares in the background, and that one thread at a time runs the engine."""

from __future__ import annotations

import dataclasses
import threading

import pytest
import torch

from fasteagle.answering import background
from fasteagle.answering.background import Preparation
from fasteagle.compile import costs as tuner
from fasteagle.compile.blocks import configure
from fasteagle.drafting.base import Tuning
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.drafting.ladder import DEFAULT_RANKS
from fasteagle.generate import Engine
from fasteagle.options import SamplingParams
from fasteagle.shapes import TreeShape
from helpers import GREEDY, captured_engine, costs, generated, raising, random_head, tuned_engine


class NoCompiler:
    """Stands for a compiler that is ready at once."""

    error = None
    ready = done = True

    def __init__(self) -> None:
        self.applied = 0

    def wait(self) -> None:
        pass

    def apply(self) -> bool:
        self.applied += 1
        return True


@pytest.fixture
def compiler(monkeypatch):
    made = NoCompiler()

    def start(engine, params):
        made.params = params
        return made

    monkeypatch.setattr(background, "start_compiler", start)
    return made


@pytest.fixture
def eager_pieces(monkeypatch):
    """Compiling the pieces is tested elsewhere."""
    monkeypatch.setattr(tuner.CycleCompiler, "compile", lambda self: None)


def test_the_thread_measures_and_the_next_answer_follows_the_plan(
    target, tmp_path, compiler, eager_pieces, capsys
):
    engine = tuned_engine(target, tmp_path)
    expected = generated(Engine(target, 512))
    preparation = Preparation(engine, quiet=False)
    with preparation.answering(GREEDY):
        assert generated(engine) == expected
    preparation.join()
    assert engine.drafter.policy is not None and compiler.applied
    with preparation.answering(GREEDY):
        assert generated(engine) == expected
    assert "[tuned in " in capsys.readouterr().err
    with preparation.answering(GREEDY):
        pass
    assert capsys.readouterr().err == ""  # nothing is told twice
    assert engine.drafter.tuning.path.exists()


def test_its_threads_have_the_settings_of_those_that_answer(target, compiler, monkeypatch):
    """Else compiled code and costs would be those of other settings."""
    before, seen = torch.get_num_threads(), []

    def wait():
        seen.append((torch.get_num_threads(), torch._dynamo.config.recompile_limit))

    monkeypatch.setattr(compiler, "wait", wait)
    configure()
    try:
        for n in (1, 3):
            torch.set_num_threads(n)
            Preparation(Engine(target, 64), quiet=True, tune=False).join()
    finally:
        torch.set_num_threads(before)
    assert seen == [(n, torch._dynamo.config.recompile_limit) for n in (1, 3)]


def test_nothing_is_measured_while_an_answer_is_written(
    target, tmp_path, compiler, eager_pieces, monkeypatch
):
    """The measuring thread waits for the answer, and the answer for at most one measurement."""
    engine, answering, broken = tuned_engine(target, tmp_path), threading.Event(), []
    begin = tuner.Measurement._begin

    def begun(self, shape):
        broken.extend(["measured"] * answering.is_set())
        begin(self, shape)

    monkeypatch.setattr(tuner.Measurement, "_begin", begun)
    preparation = Preparation(engine, quiet=True)
    expected = generated(Engine(target, 512))
    for _ in range(5):
        with preparation.answering(GREEDY):
            answering.set()
            assert generated(engine) == expected
            answering.clear()
    preparation.join()
    assert broken == [] and engine.drafter.policy is not None


def test_on_a_device_that_replays_the_plan_is_captured_between_two_answers(
    target, tmp_path, compiler, eager_pieces
):
    engine = tuned_engine(target, tmp_path, made=captured_engine)
    tuner.store_costs(engine, engine.drafter, costs(), 1.0)
    preparation = Preparation(engine, quiet=True)
    preparation.join()
    shapes = engine.drafter.policy.shapes
    assert engine.runner.graphs.captured == 1 + len(shapes) and engine.runner.replays == 0
    with preparation.answering(GREEDY):
        assert generated(engine) == generated(Engine(target, 512))
    assert engine.runner.graphs.captured == 1 + len(shapes)
    assert engine.runner.replays >= engine.stats.passes


def test_a_measurement_that_fails_leaves_the_chat_as_it_was(
    target, tmp_path, compiler, monkeypatch, capsys
):
    engine = tuned_engine(target, tmp_path)
    error = RuntimeError("no clock\nat all")
    monkeypatch.setattr(tuner.Measurement, "run", raising(error))
    compiler.error = "no compiler"
    Preparation(engine, quiet=True).join()
    assert not compiler.applied  # costs are of compiled code
    compiler.error = None
    preparation = Preparation(engine, quiet=False)
    preparation.join()
    with preparation.answering(GREEDY):
        assert generated(engine) == generated(Engine(target, 512))
    assert "warning: not tuned: no clock\n" in capsys.readouterr().err
    assert engine.drafter.policy is None


class Compiling:
    """Stands for a compiler of cycles; `all` says for which ones there was something to do."""

    all: list[tuple]
    missing = False

    def __init__(self, engine, kind, shapes=()) -> None:
        if shapes or self.missing:
            self.all.append((engine.drafter, kind.greedy, shapes))

    def compile(self) -> None:
        pass

    def apply(self) -> None:
        pass


@pytest.fixture
def compiled_for(monkeypatch):
    monkeypatch.setattr(Compiling, "all", made := [], raising=False)
    for module in (tuner, background):
        monkeypatch.setattr(module, "CycleCompiler", Compiling)
    return made


def test_what_the_policy_may_choose_is_compiled_as_answers_are_drawn(
    target, tmp_path, compiler, compiled_for, capsys
):
    """Of costs that were stored nothing is said."""
    engine = tuned_engine(target, tmp_path)
    tuner.store_costs(engine, engine.drafter, costs(), 1.0)
    sizes = tuner.sizes_of(engine.drafter, costs())
    params = SamplingParams(0.8)
    preparation = Preparation(engine, quiet=False, params=params)
    preparation.join()
    assert compiled_for == [(engine.drafter, False, sizes)] and compiler.params == params
    with preparation.answering(params):
        pass
    assert capsys.readouterr().err == ""


def test_costs_of_another_setting_are_told_once(target, tmp_path, compiler, monkeypatch, capsys):
    """They are read again where the drafter was switched off while they were measured anew."""
    engine = tuned_engine(target, tmp_path)
    drafter = engine.drafter
    tuner.store_costs(engine, drafter, costs(), 1.0)
    drafter.tuning = dataclasses.replace(drafter.tuning, head="eagle3")
    switched = iter([None, drafter])
    monkeypatch.setattr(compiler, "wait", lambda: engine.use(next(switched)))
    monkeypatch.setattr(tuner.CycleCompiler, "compile", lambda self: None)
    preparation = Preparation(engine, quiet=False)
    preparation.join()
    assert drafter.policy is None
    preparation.use(drafter)
    preparation.join()
    assert drafter.policy is not None
    with preparation.answering(GREEDY):
        pass
    assert capsys.readouterr().err.count("tuner: costs kept for another setting") == 1


def test_a_chat_that_is_not_tuned_measures_nothing(
    target, tmp_path, compiler, compiled_for, monkeypatch
):
    engine, compiled = tuned_engine(target, tmp_path), threading.Event()
    monkeypatch.setattr(compiler, "wait", compiled.wait)
    preparation = Preparation(engine, quiet=True, tune=False)
    assert preparation.busy
    compiled.set()
    preparation.join()
    assert engine.drafter.policy is None and not compiled_for
    assert not preparation.busy
    with preparation.answering(SamplingParams(0.8)):
        pass
    assert len(preparation._threads) == 1  # this code is there already
    compiler.done = False
    assert preparation.busy
    waited = []
    monkeypatch.setattr(compiler, "wait", waited.append)
    preparation.wait_for_compiler(print)
    assert waited == [print]  # it says so


def test_nothing_is_captured_for_a_drafter_that_was_switched_off(
    target, tmp_path, compiler, monkeypatch
):
    engine = tuned_engine(target, tmp_path, made=captured_engine)

    def measured(engine, *rest, **options):
        assert compiler.applied, "costs are of compiled code"
        engine.use(None)
        return costs(), 1.0

    monkeypatch.setattr(background, "costs_of", measured)
    Preparation(engine, quiet=True).join()
    assert engine.drafter is None and engine.runner.graphs.captured == 0


def test_an_answer_before_the_compiler_has_ended_begins_no_other_and_its_error_is_told_once(
    target, compiler, compiled_for, monkeypatch, capsys
):
    monkeypatch.setattr(Compiling, "missing", True)
    compiler.ready = False
    preparation = Preparation(Engine(target, 64), quiet=True, tune=False)
    preparation.join()
    compiler.error = "no compiler"
    monkeypatch.setattr(compiler, "apply", lambda: False)
    for _ in range(2):
        with preparation.answering(SamplingParams(0.8)):
            pass
    assert capsys.readouterr().err == "warning: running without compilation: no compiler\n"
    assert not compiled_for


def test_why_no_code_was_compiled_for_other_options_is_told(
    target, compiler, compiled_for, monkeypatch, capsys
):
    monkeypatch.setattr(Compiling, "missing", True)
    monkeypatch.setattr(Compiling, "compile", raising(RuntimeError("no disk\nat all")))
    preparation = Preparation(Engine(target, 64), quiet=False, tune=False)
    for _ in range(2):
        with preparation.answering(SamplingParams(0.8)):
            pass
        preparation.join()
    assert capsys.readouterr().err == "warning: not compiled for these options: no disk\n"


def test_another_way_to_draw_is_compiled_in_the_background(
    target, compiler, compiled_for, monkeypatch, tmp_path
):
    """And another drafter, or the one before it: the code of each drops that of the other."""
    drafter = EagleDrafter(random_head(target), TreeShape())
    engine = Engine(target, 512, drafter=drafter)
    monkeypatch.setattr(Compiling, "missing", True)
    preparation = Preparation(engine, quiet=True, tune=False)
    preparation.join()
    for params in (GREEDY, SamplingParams(0.8), SamplingParams(0.5, seed=3)):
        with preparation.answering(params):
            pass
    preparation.join()
    assert compiled_for == [(drafter, False, ())]
    compiled_for.clear()
    for other in (drafter.resized(2), None, drafter):
        preparation.use(other)
        for params in (GREEDY, GREEDY, SamplingParams(0.8)):
            with preparation.answering(params):
                pass
        preparation.join()
        assert compiled_for == [(other, True, ()), (other, False, ())]
        compiled_for.clear()
    drafter.tuning = Tuning(tmp_path / "costs.json", DEFAULT_RANKS)
    tuner.follow_costs(drafter, costs())  # it may choose other trees from now on
    with preparation.answering(GREEDY):
        pass
    assert compiled_for == [(drafter, True, ())]


def test_each_reason_why_nothing_is_captured_is_told_once(target, compiler, capsys):
    engine = Engine(target, 64)
    preparation = Preparation(engine, quiet=False)
    preparation.join()
    sibling = engine.sibling()
    for runner, error in (
        (engine.runner, None),
        (engine.runner, "no memory"),
        (engine.runner, None),
        (sibling.runner, "no memory (not tried again)"),  # of several answers at once
        (sibling.runner, None),
    ):
        if error is not None:
            runner.error = error
        with preparation.answering(GREEDY):
            pass
    said = capsys.readouterr().err.splitlines()
    assert [line.removeprefix("warning: running without CUDA graphs: ") for line in said] == [
        "no memory",
        "no memory (not tried again)",
    ]


def test_an_answer_that_is_broken_off_lets_the_thread_go_on(
    target, tmp_path, compiler, eager_pieces, capsys
):
    engine = tuned_engine(target, tmp_path)
    preparation = Preparation(engine, quiet=True)
    with pytest.raises(KeyboardInterrupt), preparation.answering(GREEDY):
        raise KeyboardInterrupt
    preparation.join()
    assert engine.drafter.policy is not None
    with preparation.answering(GREEDY):
        pass
    assert capsys.readouterr().err == ""  # it is quiet


def test_a_drafter_that_is_switched_off_while_it_is_measured_is_measured_later(
    target, tmp_path, compiler, eager_pieces, monkeypatch, capsys
):
    engine, at = tuned_engine(target, tmp_path), threading.Event()
    drafter, begin = engine.drafter, tuner.Measurement._begin

    def begun(self, shape):
        at.set()
        begin(self, shape)

    monkeypatch.setattr(tuner.Measurement, "_begin", begun)
    preparation = Preparation(engine, quiet=False)
    at.wait()
    preparation.use(None)
    preparation.join()
    assert drafter.policy is None and not drafter.tuning.path.exists()
    preparation.use(drafter)
    preparation.join()
    assert drafter.policy is not None and drafter.tuning.path.exists()
    n_threads = len(preparation._threads)
    preparation.use(None)
    preparation.use(drafter)
    assert len(preparation._threads) == n_threads  # it was measured once
    with preparation.answering(GREEDY):
        pass
    assert "warning" not in capsys.readouterr().err
