"""Compiled blocks against eager ones, no recompilation afterwards, and no compiler at all."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch

from fasteagle.compile import blocks
from fasteagle.compile.blocks import BlockCompiler, start_compiler
from fasteagle.compile.cycles import compile_part
from fasteagle.decoding.backend import Backend
from fasteagle.generate import Engine
from fasteagle.loading.checkpoint import load_model, open_checkpoint
from fasteagle.model import PromptView, Rows, Target, causal_mask
from helpers import PROMPT, generated, invoke, random_head, save_tiny


@pytest.mark.slow
def test_compiled_equals_eager_and_nothing_recompiles(target, no_recompiles):
    eager, fast = Engine(target, 512), Engine(target, 512)
    compiler = start_compiler(fast)
    compiler.wait()
    assert compiler.error is None and compiler.ready
    assert compiler.apply()
    torch.compiler.set_stance("fail_on_recompile")
    # 1, 2, 5, 9, 100 and 256 rows; 256, 512 and 768 cache slots; every block of the model
    for n in (2, 5, 9, 100):
        assert generated(fast, 1, PROMPT * 40) == generated(eager, 1, PROMPT * 40)
        assert generated(fast, 40, [7] * n) == generated(eager, 40, [7] * n)


@pytest.mark.parametrize(
    ("error", "fails", "tries"),
    [(OSError("Bad address: g++"), 1, 2), (OSError("no g++"), 9, 2), (MemoryError(), 9, 1)],
)
def test_what_ctrl_c_has_ended_is_compiled_again(error, fails, tries):
    """In a terminal it reaches the compilers, too."""
    calls = []

    def work():
        calls.append(1)
        if len(calls) <= fails:
            raise error
        return "code"

    if fails < 2:
        assert compile_part(work) == "code"
    else:
        with pytest.raises(type(error)):
            compile_part(work)
    assert len(calls) == tries


def test_the_compiling_thread_has_our_settings(model, monkeypatch):
    """torch's settings are those of a thread: several models in one process need more than 8."""
    seen = []
    monkeypatch.setattr(
        BlockCompiler, "_warm_up", lambda self: seen.append(torch._dynamo.config.recompile_limit)
    )
    compiler = start_compiler(Engine(model, 512))
    compiler.wait()
    assert compiler.error is None and seen[0] >= 64


@pytest.mark.slow
def test_long_caches_are_warmed_up_too(no_recompiles, tmp_path):
    folder = save_tiny(tmp_path / "long", max_position_embeddings=8192, num_hidden_layers=1)
    model = load_model(open_checkpoint(folder), dtype=torch.float32, device="cpu", max_seq_len=6000)
    engine = Engine(model, 6000)
    compiler = start_compiler(engine)
    compiler.wait()
    assert compiler.apply(), compiler.error
    torch.compiler.set_stance("fail_on_recompile")
    engine.prefill(PROMPT * 600)  # 4,800 slots
    assert len(generated(engine, 4, PROMPT * 600)) == 4
    assert len(generated(engine, 4, PROMPT)) == 4


def test_compiled_blocks_take_a_prompt_under_its_mask(model, monkeypatch):
    compiler, seen = BlockCompiler(Backend(Target(model)), 512), []
    run = lambda blocks, layers, x, rows, ops: seen.append(rows.visible) or x  # noqa: E731
    monkeypatch.setattr(compiler, "_compiled", run)
    layers, rows = Target(model).new_cache(512).layers, torch.arange(70)
    mask = causal_mask(0, 70, 256, None, "cpu")
    for visible in (PromptView(70, rows), mask):
        compiler._run_spans(list(model.blocks), layers, rows, Rows(rows, rows, rows, visible))
    assert seen and all(torch.equal(each, mask) for each in seen)


def test_without_a_compiler_the_model_stays_eager(model, monkeypatch):
    monkeypatch.setattr(blocks, "missing_compiler", lambda: "no C++ compiler found (install g++)")
    engine = Engine(copy.deepcopy(model), 512)
    compiler = start_compiler(engine)
    compiler.wait()
    assert not compiler.ready and compiler.error == "no C++ compiler found (install g++)"
    assert not compiler.apply()
    assert generated(engine, 40, PROMPT) == generated(Engine(model, 512), 40, PROMPT)


def test_missing_compiler_is_noticed():
    import torch._inductor.config as config

    assert blocks.missing_compiler() is None
    with config.patch({"cpp.cxx": ("no-such-compiler",)}):
        assert "install g++" in blocks.missing_compiler()


def test_a_failing_compilation_is_reported_not_raised(model, monkeypatch):
    """No code of it is used, of the draft head neither."""
    backend, cycles = Backend(Target(model)), mock.Mock(leaves_nothing=False)
    cycles.compile.side_effect = ValueError("bad\nx")
    monkeypatch.setattr(blocks, "compile_part", lambda work: None)
    compiler = BlockCompiler(backend, 512, random_head(model), cycles)
    compiler.start()
    compiler.wait()
    assert compiler.error == "bad" and not compiler.apply()
    assert cycles.compile.called and not cycles.apply.called and not backend._blocks


def test_spans_of_blocks():
    lengths = {0: [], 6: [6], 7: [3, 4], 9: [4, 5], 12: [6, 6], 32: [4] * 8}
    assert {n: blocks.spans(n) for n in lengths} == lengths


def test_compiled_code_goes_to_the_user_cache(monkeypatch, tmp_path):
    import os

    from torch._inductor.runtime.runtime_utils import default_cache_dir

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())
    blocks.configure()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "fasteagle" / "inductor")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/chosen/by/hand")
    blocks.configure()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/chosen/by/hand"


def test_chat_says_once_that_it_runs_without(tiny_dir, monkeypatch):
    monkeypatch.setattr(blocks, "missing_compiler", lambda: "no C++ compiler found (install g++)")
    result = invoke("chat", "--model", tiny_dir, "-p", "x", "--compile", "--max-new-tokens", 3)
    assert result.exit_code == 0
    assert result.stderr.count("warning: running without compilation: no C++ compiler") == 1
