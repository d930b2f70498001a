"""The tuner measures through the engine's own runner, keeps its table, and disturbs nobody."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import itertools
import json
import random
import re

import pytest
import torch

from fasteagle import __version__
from fasteagle.compile import cycles
from fasteagle.compile.costs import (
    TABLE,
    conditions,
    costs_of,
    follow_costs,
    load_costs,
    store_costs,
    tune_now,
)
from fasteagle.compile.cycles import CycleCompiler
from fasteagle.compile.measurement import BLOCK, WARM, Measurement, timed_rows
from fasteagle.decoding.cycle import EAGER, Pieces
from fasteagle.decoding.launch import variant_of
from fasteagle.drafting.base import Tuning
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.drafting.ladder import CHAIN_NODES, DEFAULT_RANKS, NGRAM_RANKS
from fasteagle.drafting.ngram import NgramDrafter
from fasteagle.generate import Engine
from fasteagle.options import SamplingParams
from fasteagle.sampling import SamplingMode
from fasteagle.shapes import FusedShape, GatedChain, TreeShape
from helpers import (
    GREEDY,
    PROMPT,
    assert_true_pairs,
    captured_engine,
    costs,
    fused_drafter,
    generated,
    random_head,
    tuned_engine,
)


@pytest.fixture
def engine(target, tmp_path):
    return tuned_engine(target, tmp_path)


def test_measuring_leaves_the_conversation_alone_and_is_kept(engine, target):
    expected = generated(Engine(target, 512), 60)
    lines = []
    first = generated(engine, 20)
    held = list(engine.cached)
    plan, seconds = tune_now(engine, lines.append)
    assert engine.cached == held and seconds > 0 and lines == []
    assert set(plan.costs.passes) >= {1, 2, 4, 8, 32}
    assert all(v > 0 for v in plan.costs.passes.values())
    again, none = tune_now(engine, lines.append)
    assert none == 0.0 and again.costs == plan.costs and lines == []
    assert first == expected[:20]
    assert generated(engine, 60) == expected  # whatever the policy does


def test_what_the_policy_chooses_later_is_what_was_compiled(target, tmp_path, monkeypatch):
    """Ahead of the host a cycle has room for the pairs of the deepest tree of the policy."""
    engine = tuned_engine(target, tmp_path, TreeShape(1, 1, 1), captured_engine)
    monkeypatch.setattr(CycleCompiler, "_compiled", lambda self, spec, slots: EAGER)
    tune_now(engine, pytest.fail, SamplingMode(greedy=False), compiled=True)
    shapes = engine.drafter.shapes()
    assert max(shape.depth for shape in shapes) > 1, "deeper than before it was tuned"
    specs = [engine.spec(shape, SamplingMode(greedy=False)) for shape in (None, *shapes)]
    assert {variant_of(engine.drafter, spec) for spec in specs} <= engine.runner.compiled.keys()


def test_compiling_teaches_the_lookup_nothing(target, monkeypatch):
    monkeypatch.setattr(cycles, "own_code", lambda piece, settings=None: piece)
    engine = Engine(target, 512, drafter=NgramDrafter())
    assert generated(engine)
    learned = [tensor.clone() for tensor in engine.drafter.advanced]
    CycleCompiler(engine).compile()
    assert all(map(torch.equal, engine.drafter.advanced, learned))


@pytest.mark.parametrize("ahead", [None, 0, 1])
def test_pausing_and_drafting_in_turn_changes_no_token(target, tmp_path, ahead):
    """Eagerly, and where cycles are replayed."""
    expected = generated(Engine(target, 512), 300)
    made = Engine if ahead is None else functools.partial(captured_engine, ahead=ahead)
    engine = tuned_engine(target, tmp_path, made=made)
    # Trees are dear here, and little is accepted: pauses and probes follow.
    policy = follow_costs(engine.drafter, costs())
    learn = policy.learn
    policy.learn = lambda shape, outcome: learn(
        shape, outcome._replace(ms=10.0 if shape is None else 40.0)
    )
    assert generated(engine, 300) == expected
    used = policy.used
    assert used[None] > 100 and len(used) > 1  # a pause fills the pending pairs more than once
    assert engine.stats.passes == sum(used.values())
    # Features of paused passes are kept at the end: a follow-up need not compute them again.
    assert engine.known == len(engine.cached) - 1
    follow_up = [*PROMPT, *expected, 9, 10]
    assert generated(engine, 30, follow_up) == generated(Engine(target, 512), 30, follow_up)
    assert engine.stats.cached_tokens > 290


def tuned_fused(target, path):
    drafter = fused_drafter(random_head(target), FusedShape(3, 3, 8, 8))
    drafter.tuning = Tuning(path, DEFAULT_RANKS)
    return drafter


def test_other_drafters_are_tuned_too(target, tmp_path):
    engine = Engine(target, 512)
    engine.use(NgramDrafter())
    engine.drafter.tuning = Tuning(tmp_path / "ngram.json", NGRAM_RANKS)
    expected = generated(Engine(target, 512), 80)
    plan, _ = tune_now(engine, print)
    assert plan.shapes == [TreeShape(n, 1, n) for n in CHAIN_NODES]
    assert generated(engine, 80) == expected
    engine.use(tuned_fused(target, tmp_path / "costs.json"))
    before = [tensor.clone() for tensor in engine.drafter.advanced]
    plan, _ = tune_now(engine, print)
    assert all(map(torch.equal, before, engine.drafter.advanced))  # nothing was learned of it
    assert plan.costs.lookup > 0 and all(isinstance(s, FusedShape) for s in plan.shapes)
    assert tune_now(engine, print)[0].costs == plan.costs
    assert generated(engine, 80) == expected


class Shuffled:
    """A policy that takes its shapes in random order."""

    def __init__(self, shapes):
        self._turn, self._random = shapes, random.Random(1)
        self.shapes = [shape for shape in shapes if shape is not None]
        self.next_shape, self.outcomes = shapes[0], []

    def learn(self, shape, outcome):
        self.outcomes.append((shape, outcome))
        self.next_shape = self._random.choice(self._turn)


@pytest.mark.parametrize(
    ("ahead", "params"),
    [(None, SamplingParams(0.9, seed=3)), (0, GREEDY), (1, SamplingParams(0.9, seed=3))],
    ids=str,
)
def test_any_order_of_fused_trees_gives_the_text_of_plain_decoding(target, tmp_path, ahead, params):
    """With the draft head, without it, and plain passes in turn: no pair is lost or left out."""
    engine = Engine(target, 512) if ahead is None else captured_engine(target, 512, ahead)
    engine.use(tuned_fused(target, tmp_path / "costs.json"))
    turn = [FusedShape(2, 2, 6, 6), FusedShape(0, 1, 40, 40), FusedShape(0, 1, 4, 4), None]
    policy = engine.drafter.policy = Shuffled(turn)
    prompt, n = [5, 6, 7, 8] * 6, 100
    expected = generated(Engine(target, 512), n, prompt, params)
    result = generated(engine, n, prompt, params)
    assert result == expected
    outcomes = policy.outcomes
    assert {shape for shape, _ in outcomes} == set(turn)
    assert all(o.by_lookup <= o.accepted for _, o in outcomes)
    assert any(o.by_lookup for _, o in outcomes)
    assert all(o.by_lookup == o.accepted for shape, o in outcomes if shape and not shape.levels)
    assert all(o.extended == bool(shape and shape.levels) for shape, o in outcomes)
    assert all(o.ms > 0 for _, o in outcomes)
    assert_true_pairs(engine, [*prompt, *result], missing=40)
    follow_up = [*prompt, *result, 9, 10]
    plain = generated(Engine(target, 512), 30, follow_up, params)
    assert generated(engine, 30, follow_up, params) == plain


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text.replace('"torch"', '"tensor"'),
        lambda text: text.replace(f'"{torch.__version__}"', '"1.0"'),
        lambda text: text.replace(f'"fasteagle": "{__version__}"', '"fasteagle": "0.0"'),
        lambda text: text.replace(f'"table": {TABLE}', '"table": 0'),
        lambda text: re.sub('"device": "[^"]*"', '"device": "i386"', text),
        lambda text: text[:40],
        lambda text: "[]",
        lambda text: text.replace('"other"', '"best"'),
        lambda text: json.dumps(json.loads(text) | {"costs": {"passes": 3}}),
        lambda text: text.replace('"other": 1.0', '"other": -1.0'),
        lambda text: text.replace('"other": 1.0', '"other": NaN'),
    ],
)
def test_a_table_that_does_not_fit_is_ignored_with_one_line(engine, damage):
    path = engine.drafter.tuning.path
    store_costs(engine, engine.drafter, costs(), 1.0)
    assert load_costs(engine, engine.drafter, print) == costs()
    path.write_text(damage(path.read_text()))
    lines = []
    assert load_costs(engine, engine.drafter, lines.append) is None
    assert len(lines) == 1 and "tuner" in lines[0] and "\n" not in lines[0]


def test_a_table_that_cannot_be_read_is_ignored_with_one_line(engine):
    engine.drafter.tuning.path.mkdir()
    lines = []
    assert load_costs(engine, engine.drafter, lines.append) is None
    assert len(lines) == 1 and "cannot be used" in lines[0]


def test_a_table_without_chains_is_measured_anew_where_chains_are_drafted(target, tmp_path):
    """Interpolation in an empty table is impossible."""
    engine = tuned_engine(target, tmp_path, GatedChain(8))
    drafter = engine.drafter
    store_costs(engine, drafter, costs(), 1.0)
    lines = []
    assert load_costs(engine, drafter, lines.append) is None
    assert len(lines) == 1 and "no times of drafting" in lines[0]
    chains = dataclasses.replace(costs(), first_level={}, level={}, chain={1: 0.5, 8: 3.0})
    store_costs(engine, drafter, chains, 1.0)
    assert load_costs(engine, drafter, lines.append) == chains
    assert follow_costs(drafter, chains).speed > 0


def test_a_full_disk_loses_no_measured_costs(engine, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("fasteagle.paths.write_atomic", full)
    monkeypatch.setattr(Measurement, "run", lambda self: costs())
    lines = []
    policy, _ = tune_now(engine, lines.append)
    assert policy.costs == costs() and len(lines) == 1
    assert "cannot be written (No space left on device): costs serve this start only" in lines[0]


def retuned(**changes):
    return lambda drafter, engine: setattr(
        drafter, "tuning", dataclasses.replace(drafter.tuning, **changes)
    )


@pytest.mark.parametrize(
    ("said", "change"),
    [
        ("head eagle1, now eagle3", retuned(head="eagle3")),
        ("corpus False, now True", retuned(corpus=True)),
        ("shape TreeShape, now GatedChain", lambda d, e: setattr(d, "shape", GatedChain(8))),
        ("kv float32, now float16", lambda d, e: setattr(e.cache, "rows", e.cache.rows.half())),
        ("threads 2, now 3", lambda d, e: torch.set_num_threads(3)),
        ("rows 32, now 24", lambda d, e: setattr(e, "max_seq_len", 62)),
    ],
)
def test_costs_under_other_conditions_are_not_used(engine, said, change):
    drafter, lines = engine.drafter, []
    known = conditions(engine, drafter)
    assert (known["dtype"], known["kv"]) == ("float32", "float32")
    drafter.tuning = dataclasses.replace(drafter.tuning, head="eagle1")
    chains = dataclasses.replace(costs(), chain={1: 0.5, 8: 3.0})
    store_costs(engine, drafter, chains, 1.0)
    change(drafter, engine)
    assert load_costs(engine, drafter, lines.append) is None and said in lines[0]


def test_compiled_code_is_put_in_place_at_the_gate(engine, monkeypatch):
    """It may be while an answer is written; compiling takes long, and needs no gate."""
    order = []

    @contextlib.contextmanager
    def gate():
        order.append("in")
        yield
        order.append("out")

    for name in ("compile", "apply"):
        monkeypatch.setattr(CycleCompiler, name, lambda self, name=name: order.append(name))
    store_costs(engine, engine.drafter, costs(), 1.0)
    costs_of(engine, engine.drafter, pytest.fail, gate=gate, compiled=True)
    assert order == ["compile", "in", "apply", "out"]


def test_a_fixed_tree_is_not_tuned(target):
    engine = Engine(target, 512)
    engine.use(EagleDrafter(random_head(target), TreeShape(3, 3, 8)))
    assert tune_now(engine, print) is None


def test_captured_cycles_are_what_is_timed(target, tmp_path):
    """On a device that replays, every figure is that of a replay, and the answers stay the same."""
    engine = tuned_engine(target, tmp_path, made=captured_engine)
    expected = generated(Engine(target, 512), 60)
    assert generated(engine, 20) == expected[:20]
    held = list(engine.cached)
    plan, _ = tune_now(engine, print)
    assert engine.cached == held
    # The fake device takes 1 ms for whatever it replays.
    assert set(plan.costs.passes.values()) == set(plan.costs.first_level.values()) == {1.0}
    assert plan.costs.other == plan.costs.plain_other == 0.0, "never less"
    assert generated(engine, 60) == expected


def test_rows_that_are_timed_are_different_tokens_of_the_text(target):
    """Equal rows would take the same experts."""
    engine = Engine(target, 512)
    measurement = Measurement(engine, None)
    assert len(set(measurement._tokens(32))) == 32
    engine.prefill([7, 3, 7, 59, 3, 11])
    assert measurement._tokens(6)[:4] == [7, 3, 59, 11]
    assert len(set(measurement._tokens(32))) == 32


def test_times_are_those_of_warm_runs_in_a_row(engine, target, tmp_path, monkeypatch):
    """A level is half of what two more take; noise may make it nothing, not less.

    Of the draft head they are those of compiled code, and a lookup is timed without it.
    """
    runs = itertools.count()

    def verify(self, T):
        return 100.0 if next(runs) % BLOCK < WARM else 10.0 + T

    monkeypatch.setattr(Measurement, "verify", verify)
    monkeypatch.setattr(Measurement, "_cycle", lambda self, shape: (9.0, 0.5 + (shape is None)))
    monkeypatch.setattr(Measurement, "_compiled_share", lambda self: 0.5)
    fused = tuned_fused(target, tmp_path / "fused.json")
    for drafter, three, level in ((engine.drafter, 8.0, 1.5), (fused, 1.5, 0.0)):
        engine.use(drafter)
        times = {type(drafter.shape): {0: 0.25, 1: 2.0, 3: three}}
        monkeypatch.setattr(
            Measurement, "draft", lambda self, shape, times=times: times[type(shape)][shape.levels]
        )
        costs = Measurement(engine, drafter).run(0.0)
        assert costs.passes == {T: 10.0 + T for T in timed_rows(512)}
        assert {*costs.first_level.values()} == {1.0} and {*costs.level.values()} == {level}
        assert costs.lookup == (0.25 if drafter is fused else 0.0)
        assert (costs.other, costs.plain_other) == (0.5, 1.5)


@pytest.mark.parametrize(("compiled", "share"), [(1.0, 0.5), (2.0, 1.0), (3.0, 1.0)])
def test_compiled_drafting_counts_as_no_slower(engine, monkeypatch, compiled, share):
    times = {True: 2.0, False: compiled}
    monkeypatch.setattr(Measurement, "draft", lambda self, shape, eager: times[eager])
    measurement, drafter = Measurement(engine, engine.drafter), engine.drafter
    assert measurement._compiled_share() == 1.0, "nothing is compiled"
    variant = variant_of(drafter, engine.spec(drafter.shape, SamplingMode()))
    engine.runner.compiled[variant] = EAGER
    assert measurement._compiled_share() == share


def test_a_full_context_makes_room_for_measuring(target):
    assert (timed_rows(64)[-1], timed_rows(62)[-1]) == (32, 24)
    engine = Engine(target, 64)
    engine.prefill([5] * 32)  # and a root
    assert Measurement(engine, None).verify(32) > 0 and engine.cached == []
    generated(engine, 60)
    measurement = Measurement(engine, None)
    assert measurement.verify(32) > 0 and engine.cached == []
    assert generated(engine, 40) == generated(Engine(target, 64), 40)


def test_the_rest_of_a_replayed_cycle_is_neither_its_pass_nor_its_draft(
    target, tmp_path, monkeypatch
):
    engine = tuned_engine(target, tmp_path, made=captured_engine)
    measurement, shape = Measurement(engine, engine.drafter), engine.drafter.shape
    monkeypatch.setattr(Measurement, "verify", lambda self, T: 0.25)
    monkeypatch.setattr(Measurement, "draft", lambda self, shape, eager: 0.5)
    assert measurement._cycle(shape) == (1.0, 0.25) and measurement._cycle(None) == (1.0, 0.75)


def test_the_rest_of_a_cycle_is_neither_its_pass_nor_its_draft(engine, monkeypatch):
    measurement, read = Measurement(engine, engine.drafter), engine.runner.read
    parts = dict(draft_seconds=1.0, verify_seconds=2.0)
    monkeypatch.setattr(engine.runner, "read", lambda: read()._replace(**parts))
    total, rest = measurement._cycle(engine.drafter.shape)
    assert total - rest == pytest.approx(3000.0)


def test_cycles_of_a_device_that_replays_are_timed_with_its_compiled_pieces(target):
    engine = captured_engine(target, 512)
    drafter = EagleDrafter(random_head(target), TreeShape(3, 3, 8))
    engine.use(drafter)
    ran = []

    def counted(shape, name, piece):
        return lambda *args: ran.append((shape, name)) or piece(*args)

    for shape in (None, drafter.shape):
        pieces = (counted(shape, *named) for named in EAGER._asdict().items())
        engine.runner.compiled[drafter, engine.spec(shape, SamplingMode())] = Pieces(*pieces)
    measurement = Measurement(engine, drafter)
    measurement.run()
    assert {(drafter.shape, name) for name in EAGER._fields} < {*ran} and (None, "finish") in ran
    ran.clear()
    measurement._cycle(drafter.shape)
    names = [name for _, name in ran]
    assert names.count("draft") == 2 * names.count("finish") > 0, "its part is timed compiled too"
