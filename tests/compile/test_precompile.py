"""Kernels compiled ahead, on a stand-in for a driver: Triton compiles without a GPU."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import triton

from fasteagle.batch import Batch
from fasteagle.compile import cuda_ops, graphs, precompile
from fasteagle.compile.backend import choose_backend
from fasteagle.compile.kernels import block_kernels
from fasteagle.compile.precompile import (
    collecting,
    compile_ahead,
    compile_all,
    compile_launches,
    run_commits,
    run_draws,
    run_head,
    run_passes,
    run_trees,
)
from fasteagle.decoding.runner import Runner
from fasteagle.drafting.base import DraftOps
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.generate import Engine
from fasteagle.llm import open_llm
from fasteagle.model import Target
from fasteagle.options import DraftOptions, RuntimeOptions, SamplingParams
from fasteagle.quant import interleaved, kernels, packed
from fasteagle.sampling import SamplingMode
from fasteagle.shapes import FusedShape, TreeShape
from fasteagle.tree import fuse, relations, rerank
from helpers import captured_engine, fused_drafter, random_head, random_target, tiny_config
from tree_problems import by_kernels, problem

DEVICE = 99  # no other test's number: Triton keeps by device what it has compiled
PROMPT = [5, 6, 7, 8, 9]


def launch():
    """Some kernels as passes launch them."""
    values, zeros = torch.randint(0, 16, (33, 96)), torch.randint(0, 16, (33, 3))
    weight = interleaved.pack(packed.int4(values, torch.ones(33, 3).half(), zeros=zeros))
    kernels.linear(torch.randn(7, 96).half(), weight)
    problem(7, 20, group=3, G=2).run(by_kernels)


def test_launches_are_recorded_and_compiled_at_once(card, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    card.device = DEVICE
    with collecting() as variants:
        launch()
    names = {name for name, _ in variants}
    assert {"interleaved_kernel", "prefix_kernel", "finish_kernel"} <= names
    with collecting() as again:
        launch()
    assert again.keys() == variants.keys(), "nothing was compiled yet"
    compile_all(list(variants.values()), torch.device("cpu"), workers=2)
    assert len(list(tmp_path.rglob("*.cubin"))) == len(variants)
    hook = triton.knobs.runtime.jit_cache_hook
    missed = []
    triton.knobs.runtime.jit_cache_hook = lambda **launch: missed.append(launch["repr"]) or True
    try:
        launch()
    finally:
        triton.knobs.runtime.jit_cache_hook = hook
    assert not missed, "the launch looks for what was compiled"


def test_kernels_of_other_threads_run_and_the_hook_comes_back(monkeypatch):
    """A chat prepares in the background, and another thread may answer meanwhile."""
    function = SimpleNamespace(name="kernel", jit_function=None)
    arguments = {"key": 1, "fn": function, "compile": {"specialization_data": ""}}
    before = lambda **launch: launch["key"] == 1  # noqa: E731
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", before)
    skipped = []
    with pytest.raises(ZeroDivisionError), collecting() as variants:
        hook = triton.knobs.runtime.jit_cache_hook
        other = threading.Thread(target=lambda: skipped.append(hook(**arguments)))
        other.start()
        other.join()
        assert skipped == [True] and not variants, "the earlier hook decides"
        assert hook(**arguments) and len(variants) == 1
        raise ZeroDivisionError
    assert triton.knobs.runtime.jit_cache_hook is before


@pytest.mark.parametrize("max_seq_len", [16, 512])
def test_passes_leave_the_engine_alone_and_stay_within_the_shortest_tables(max_seq_len):
    """An index beyond a table ends a CUDA process."""
    target = random_target(tiny_config())
    target.init_rope(max_seq_len + 256, "cpu")
    engine = captured_engine(target, max_seq_len)
    engine.use(EagleDrafter(random_head(target), TreeShape(3, 3, 8)))
    expected = list(engine.generate(PROMPT, SamplingParams(), 8))
    before = engine.cache.rows.clone(), engine.drafter.cache.rows.clone()
    rows = []
    forward = target.forward
    target.forward = lambda tokens, *rest: rows.append(len(tokens)) or forward(tokens, *rest)
    run_passes(Target(target), [1, 9, 64])
    run_head(engine.drafter, [4])
    del target.forward
    assert rows == [1, 9, 64]
    assert torch.equal(engine.cache.rows, before[0])
    assert torch.equal(engine.drafter.cache.rows, before[1])
    assert list(engine.generate(PROMPT, SamplingParams(), 8)) == expected


def test_kernels_of_drafting_and_committing_are_among_them(kernels_on_cpu, monkeypatch):
    kernels_on_cpu.device = DEVICE
    target = random_target(tiny_config())
    engine = captured_engine(target, 256)
    shape = FusedShape(3, 3, 8, 3)
    engine.use(fused_drafter(random_head(target), shape))
    drafter, state = engine.drafter, engine.state
    ops = cuda_ops.top_children, cuda_ops.rerank, None, cuda_ops.look_up, cuda_ops.fuse
    drafter.run_by(DraftOps(*ops))
    specs = [engine.spec(shape, SamplingMode()) for shape in (None, shape)]
    moved = []

    def move_rows(cache, start, path):
        moved.append(len(path))
        block_kernels.commit(cache.rows, start, path)

    monkeypatch.setattr(precompile, "move_rows", move_rows)
    with collecting() as variants:
        run_head(drafter, {spec.width for spec in specs})
        run_trees(drafter, specs, state)
        run_draws(Target(target), specs, state)
        run_commits(Target(target), specs)
    names = ("chunk", "merge", "draw", "last", "commit")
    names += ("match", "look_up", "fuse", "rerank", "relations")
    assert {name for name, _ in variants} == {f"{name}_kernel" for name in names}
    assert moved == [4], "plain cycles move nothing"


def test_a_token_is_drawn_in_each_mode_of_sampling(monkeypatch):
    engine, kinds = captured_engine(random_target(tiny_config()), 64), []
    modes = SamplingMode(), SamplingMode(greedy=False)
    specs = [engine.spec(None, kind) for kind in (*modes, *modes)]
    monkeypatch.setattr(precompile, "draw", lambda *how: kinds.append(how[2]))
    run_draws(engine.backend.target, specs, engine.state)
    assert len(kinds) == 2 and {*kinds} == {*modes}


def test_the_rows_and_candidates_of_cycles_to_come(monkeypatch):
    """A level of a tree, new pairs and the end of a prompt; all that a lookup may add to a tree."""
    target = random_target(tiny_config())
    engine = captured_engine(target, 256)
    engine.use(fused_drafter(random_head(target), FusedShape(2, 3, 6, 5)))
    drafter, ranked, rows, pools = engine.drafter, set(), [], set()

    def noted(op):
        def run(pool, *rest):
            pools.add((op, len(pool.tokens), pool.sources is None))
            return op(pool, *rest)

        return run

    ops = DraftOps(rerank=noted(rerank), fuse=noted(fuse))
    drafter.run_by(ops._replace(top_children=lambda logits, k: ranked.add((logits.dtype, k))))
    zeros = lambda drafter, T: rows.append(T) or torch.zeros(T, 64).half()  # noqa: E731
    monkeypatch.setattr(precompile, "_run_head", zeros)
    specs = [engine.spec(shape, SamplingMode()) for shape in (None, *drafter.shapes())]
    run_head(drafter, {spec.width for spec in specs if spec.width})
    assert rows == sorted({1, 3, specs[-1].width, 64, 65})
    assert ranked == {(torch.half, 3), (torch.float, 3)}, "noise is added in fp32"
    engine.state.text[:4] = torch.tensor([1, 2, 1, 2])
    engine.state.seq_len.fill_(3)
    learned = [tensor.clone() for tensor in drafter.advanced]
    monkeypatch.setattr(precompile, "relate", relations)
    run_trees(drafter, specs, engine.state)
    assert all(map(torch.equal, drafter.advanced, learned))
    launched = pools.copy()
    drafter.run_by(ops)
    list(engine.generate(PROMPT, SamplingParams(), 4))
    assert pools == launched == {(fuse, 3 + 9, True), (rerank, 3 + 9 + 5, False)}


def test_a_failure_is_a_warning(monkeypatch, capsys):
    def failing(*args):
        raise RuntimeError("no such operator\nmore")

    monkeypatch.setattr(precompile, "run_passes", failing)
    weight = SimpleNamespace(device=torch.device("cuda"))
    backend = SimpleNamespace(target=SimpleNamespace(weight=weight))
    engine = Engine(random_target(tiny_config()), 64)
    assert compile_ahead(backend, None, [], engine.state) == 0
    assert "one by one as they are needed: no such operator\n" in capsys.readouterr().err
    assert compile_ahead(engine.backend, None, [], engine.state) == 0, "nothing on a CPU"
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    with mock.patch.object(precompile.threading, "Timer") as timer:
        assert compile_launches(lambda: None, weight.device) == 0
    line = timer.mock_calls[0].args[2]
    assert line == ["compiling 0 kernels, 2 at a time ..."]
    assert timer.mock_calls[1:] == [mock.call().start(), mock.call().cancel()]


def test_a_model_that_is_opened_compiles_before_its_first_answer(tiny_dir, monkeypatch):
    shapes = []
    monkeypatch.setattr(
        Runner, "compile_ahead", lambda runner, specs, drafter: shapes.append(specs[0].shape)
    )
    llm = open_llm(str(tiny_dir), RuntimeOptions(device="cpu"), DraftOptions(), lambda line: None)
    assert shapes == [None] and llm.engine.stats.passes == 0


def test_a_runner_compiles_ahead_once_for_each_tree_and_mode(monkeypatch):
    numbers = []
    monkeypatch.setattr(
        graphs, "compile_ahead", lambda backend, drafter, specs, state: numbers.append(len(specs))
    )
    target = random_target(tiny_config())
    engine = captured_engine(target, 256)
    head = random_head(target)
    for shape in (TreeShape(3, 3, 8), TreeShape(3, 3, 8), TreeShape(2, 2, 4)):
        engine.use(EagleDrafter(head, shape))
        list(engine.generate(PROMPT, SamplingParams(), 4))
    assert numbers == [2, 2], "the second tree is the first"
    list(engine.generate(PROMPT, SamplingParams(0.8), 4))
    assert numbers == [2, 2, 2], "noise has a kernel of its own"
    sibling = engine.sibling()
    sibling.use(engine.drafter.sibling())
    list(sibling.generate(PROMPT, SamplingParams(), 4))
    assert numbers == [2, 2, 2], "kernels are compiled for all"


def test_a_second_answer_compiles_what_both_share(monkeypatch):
    """Once, and nothing while answers are alone."""
    calls = []
    own = type(captured_engine(random_target(tiny_config()), 64).runner)
    monkeypatch.setattr(own, "compile_shared", lambda runner, *specs: calls.append(specs))
    batch = Batch(captured_engine(random_target(tiny_config()), 256), 2)

    def begin(key):
        batch.begin(key, PROMPT, 64, lambda engine: engine.generate(PROMPT, SamplingParams(), 4))

    for _ in range(2):
        begin(0)
        batch.end(0)
    assert not calls
    for _ in range(2):
        begin(0)
        begin(1)
        batch.close()
    assert len(calls) == 1


@pytest.mark.parametrize("times", [1, 2])
def test_what_fails_beside_others_is_compiled_alone(times):
    class Function:
        failures = times

        def preload(self, specialization):
            self.failures -= 1
            if self.failures >= 0:
                raise SystemError("AST constructor recursion depth mismatch")

    variants = [precompile.Variant(Function(), ""), precompile.Variant(Function(), "")]
    raises = pytest.raises(SystemError) if times == 2 else contextlib.nullcontext()
    with raises:
        compile_all(variants, torch.device("cpu"), 2)
    assert times == 2 or [variant.function.failures for variant in variants] == [-1, -1]


def test_one_worker_a_core_up_to_a_limit(monkeypatch):
    monkeypatch.setattr(precompile, "MOST_WORKERS", 16)
    for cores, workers in ((None, 1), (1, 1), (8, 8), (128, 16)):
        monkeypatch.setattr(precompile.os, "cpu_count", lambda cores=cores: cores)
        assert precompile.workers_here() == workers


@pytest.mark.gpu
def test_a_second_pass_compiles_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    target = random_target(tiny_config(dim=256, n_head=4, n_kv_head=2, head_dim=64)).cuda().half()
    backend = choose_backend(target)
    compile_ahead(backend, None, [], Engine(target, 256).state)
    with collecting() as variants:
        run_passes(backend.target, [1])
    assert not variants


def test_passes_over_prompts_are_among_them(monkeypatch):
    """Short ones, which are captured in three sizes, and long ones."""
    target = mock.MagicMock(weight=torch.zeros(1))
    target.config.sliding_window, target.new_cache.return_value.n_slots = None, 256
    names = ("run_head", "run_trees", "run_draws", "run_commits")
    monkeypatch.setattr(precompile, "compile_launches", lambda launch, device: launch())
    with mock.patch.multiple(precompile, **{name: mock.Mock() for name in names}):
        precompile.compile_ahead(mock.Mock(target=target), None, [mock.Mock(rows=5)], mock.Mock())
    assert [len(call.args[0]) for call in target.call_args_list] == [1, 5, 16, 32, 64]
    assert [len(call.args[0]) for call in target.encode.call_args_list] == [65]
