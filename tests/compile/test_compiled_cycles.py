"""Compiled pieces of a cycle, and tree attention in whole cycles, against eager ones."""

from __future__ import annotations

import functools

import pytest
import torch

from fasteagle.batch import Batch
from fasteagle.compile import tree_attention
from fasteagle.compile.blocks import BlockCompiler, compile_now, missing_compiler
from fasteagle.compile.cycles import CycleCompiler, own_code
from fasteagle.decoding.cycle import EAGER
from fasteagle.drafting.draft_model import ModelDrafter
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.drafting.ngram import NgramDrafter
from fasteagle.generate import Engine
from fasteagle.model import Target
from fasteagle.options import SamplingParams
from fasteagle.sampling import SamplingMode
from fasteagle.shapes import FusedShape, TreeShape
from helpers import (
    GREEDY,
    PROMPT,
    Even,
    captured_engine,
    compile_cycles,
    eager_engine,
    eagle3_of,
    finished,
    fused_drafter,
    generated,
    random_head,
    random_target,
    tiny_config,
)
from test_cycles import DRAWN, eagle_engine

needs_compiler = pytest.mark.skipif(missing_compiler() is not None, reason="no C++ compiler")


TREE = TreeShape(2, 2, 4)  # as in other tests of compiled code, which the compiler then knows


def attending(config) -> Target:
    """The op's reference on the CPU; its kernel has tests of its own."""
    return Target(random_target(config), tree_attention.OPS)


def test_tree_attention_in_the_whole_model():
    target, other = random_target(tiny_config()), attending(tiny_config())
    head = random_head(target)
    for params in DRAWN[:2]:
        expected = generated(Engine(target, 256), params=params, n=30)
        assert generated(eager_engine(other, 256), params=params, n=30) == expected
        assert generated(eagle_engine(other, head), params=params, n=30) == expected


def test_a_sliding_window_in_the_whole_model():
    config = tiny_config(sliding_window=6)
    target, other = random_target(config), attending(config)
    head = random_head(target, sliding_window=None)
    expected = generated(Engine(target, 256))
    assert generated(eagle_engine(other, head)) == expected


@pytest.mark.slow
@needs_compiler
def test_compiled_blocks_take_a_tree_view(target):
    other = attending(tiny_config())
    drafter = EagleDrafter(random_head(other.model), TREE)
    engine = eager_engine(other, 512, drafter)
    compiler = BlockCompiler(engine.backend, 512, drafter.head)  # cycles are compiled below
    compiler.start()
    compiler.wait()
    assert compiler.apply(), compiler.error
    expected = generated(Engine(target, 512))
    generated(engine, n=12)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert generated(engine) == expected


@pytest.fixture(scope="module")
def engine(target):
    """An engine of a tree of EAGLE-3, compiled to draw."""
    head = random_head(target, eagle3=eagle3_of("eagle3", target.config))
    made = Engine(target, 512, drafter=EagleDrafter(head, TREE))
    assert compile_now(made, SamplingParams(0.8))
    assert len(made.runner.compiled) == 2  # plain, and the tree
    return made


@pytest.mark.slow
@needs_compiler
def test_compiled_pieces_are_the_eager_ones(target, engine):
    """A chat through every cache size: the same drafts, and no value makes another variant."""
    eager = Engine(target, 512, drafter=EagleDrafter(engine.drafter.head, TREE))
    text = list(PROMPT)
    with torch.compiler.set_stance("fail_on_recompile"):
        for turn in range(7):
            params = SamplingParams(0.8, seed=turn)
            expected = generated(eager, 40, text, params)
            assert generated(engine, 40, text, params) == expected
            assert engine.stats.path_lengths == eager.stats.path_lengths
            text += [*expected, *PROMPT * (turn + 1)]
    assert len(engine.cached) > 380
    texts = [[*each.generate(PROMPT, params, 6, processor=Even())] for each in (eager, engine)]
    assert texts[0] == texts[1]


@pytest.mark.slow
@needs_compiler
def test_answers_beside_each_other_share_compiled_pieces(target, engine):
    """No value of a sibling's state or drafter was compiled in."""
    jobs = [(PROMPT, 30), (PROMPT[:5], 20), ([7, 8, 9] * 20, 25)]
    params = [SamplingParams(0.8, seed=seed) for seed in range(3)]
    expected = [
        generated(Engine(target, 512), n, prompt, params[i]) for i, (prompt, n) in enumerate(jobs)
    ]
    several = Batch(engine, 3)
    for i, (prompt, n) in enumerate(jobs):
        start = functools.partial(
            Engine.generate, prompt=prompt, params=params[i], max_new_tokens=n
        )
        several.begin(i, prompt, len(prompt) + n, start)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert [*finished(several).values()] == expected
    spec = engine.spec(TREE, SamplingMode(greedy=False))
    used = {own.runner.pieces(spec, own.drafter).draft for own in several.engines}
    assert len(several.engines) == 3 and len(used) == 1 and EAGER.draft not in used


def test_a_number_of_another_variant_is_a_constant(monkeypatch):
    """A third variant of the cycle must not get code for a tree of any size."""
    graphs, compiled = [], torch.compile

    def record(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def compile_recorded(function, options, **more):
        return compiled(function, backend=record, **more)

    monkeypatch.setattr(torch, "compile", compile_recorded)

    def piece(shape: TreeShape) -> torch.Tensor:
        return torch.arange(shape.nodes).sum()

    for nodes in (4, 5, 6):
        assert own_code(piece)(TreeShape(2, 2, nodes)) == sum(range(nodes))
    inputs = [node for graph in graphs for node in graph.graph.nodes if node.op == "placeholder"]
    assert len(graphs) == 3 and not inputs


@pytest.fixture
def traced_only(monkeypatch):
    compiled = torch.compile

    def trace(function, options, **more):
        return compiled(function, backend="eager", **more)

    monkeypatch.setattr(torch, "compile", trace)


def test_another_drafter_may_be_in_use_while_a_first_one_is_compiled(target, traced_only):
    """Without one, the state has other features than its head reads."""
    eagle3 = eagle3_of("eagle3", target.config)
    engine = captured_engine(target, 512)
    engine.on_cpu = False
    first = EagleDrafter(random_head(target, eagle3=eagle3), TREE)
    engine.use(first)
    compiler = CycleCompiler(engine)
    engine.use(None)
    compiler.compile()
    second = EagleDrafter(random_head(target), TREE)
    engine.use(second)
    other = CycleCompiler(engine)
    other.compile()
    other.apply()
    compiler.apply()
    drafters = {drafter for drafter, _ in engine.runner.compiled}
    assert drafters == {first, second}
    engine.use(first)
    assert {drafter for drafter, _ in engine.runner.compiled} == {first}


def test_siblings_with_other_drafters_keep_what_is_compiled_for_each(target, traced_only):
    """As the rows of a benchmark, which share one copy of the weights."""
    base = captured_engine(target, 512)
    engines = [base.sibling(base.cache) for _ in range(2)]
    for engine in engines:
        engine.on_cpu = False
        engine.use(EagleDrafter(random_head(target), TREE))
        compile_cycles(engine)
    drafters = [engine.drafter for engine in engines]
    assert {drafter for drafter, _ in base.runner.compiled} == set(drafters)
    engines[0].use(EagleDrafter(random_head(target), TREE))
    assert {drafter for drafter, _ in base.runner.compiled} == {drafters[1]}


@pytest.mark.slow
@needs_compiler
def test_graphs_hold_compiled_pieces(target):
    """As on CUDA, where every way to draw is compiled and then captured."""
    params = DRAWN[3]
    engine = captured_engine(target, 512)
    engine.use(NgramDrafter(4))
    expected = generated(Engine(target, 512), params=params)
    engine.on_cpu = False
    compile_cycles(engine, SamplingMode.of(params, target.config.vocab_size))
    assert generated(engine, params=params) == expected
    assert engine.runner.error is None and engine.runner.replays > 0
    kinds = [spec for _, spec in engine.runner.compiled]
    assert len(kinds) == 2 and kinds[0].shape is None
    for pieces in engine.runner.compiled.values():
        assert pieces.draft is not EAGER.draft and pieces.finish is not EAGER.finish


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(  # each compiles for a minute
    ("make", "params"),
    [("fused", GREEDY), ("lookup alone", GREEDY), ("model", SamplingParams(0.8, seed=3))],
    ids=str,
)
def test_compiled_pieces_of_other_drafters(target, make, params):
    """What they learn is the same too, and compiling teaches them nothing."""

    def drafter():
        if make == "model":
            small = random_target(tiny_config(n_layer=1), seed=5)
            return ModelDrafter(Target(small), TREE, 60)
        shape = FusedShape(2, 2, 8, 6) if make == "fused" else FusedShape(0, 1, 6, 6)
        return fused_drafter(random_head(target), shape)

    engine, eager = (Engine(target, 512, drafter=drafter()) for _ in range(2))
    before = [tensor.clone() for tensor in engine.drafter.advanced]
    assert compile_now(engine, params)
    assert all(map(torch.equal, before, engine.drafter.advanced))
    with torch.compiler.set_stance("fail_on_recompile"):
        for seed in (3, 4):
            params = SamplingParams(params.temperature, seed=seed)
            assert generated(engine, 60, PROMPT * 28, params) == generated(
                eager, 60, PROMPT * 28, params
            )
            assert engine.stats.path_lengths == eager.stats.path_lengths
    assert all(map(torch.equal, engine.drafter.advanced, eager.drafter.advanced))


@pytest.mark.slow
@needs_compiler
def test_an_empty_proposal_costs_one_row_on_a_cpu(target):
    engine = Engine(target, 512, drafter=NgramDrafter(4))
    assert compile_now(engine)
    rows = []
    target_forward = target.forward
    target.forward = lambda tokens, *rest: rows.append(len(tokens)) or target_forward(tokens, *rest)
    try:
        with torch.compiler.set_stance("fail_on_recompile"):
            assert generated(engine) == generated(Engine(target, 512))
    finally:
        del target.forward
    assert set(rows[: engine.stats.passes]) == {1, 5}
