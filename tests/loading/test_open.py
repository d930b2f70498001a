"""Opening a model: what a person is told meanwhile."""

from __future__ import annotations

import time

import pytest
import torch

from fasteagle import errors
from fasteagle.compile.blocks import missing_compiler
from fasteagle.errors import FasteagleError
from fasteagle.loading import open as opening
from fasteagle.loading.open import open_model
from fasteagle.options import RuntimeOptions
from fasteagle.quant import cpu_build
from helpers import generated


@pytest.mark.parametrize(("seconds", "lines"), [(0.0, []), (0.4, ["opening model ..."])])
def test_a_line_appears_where_opening_takes_long(tiny_dir, monkeypatch, seconds, lines):
    monkeypatch.setattr(errors, "PATIENCE", 0.2)
    monkeypatch.setattr(opening, "open_checkpoint", lambda path: None)
    monkeypatch.setattr(opening, "load_tokenizer", lambda *a: time.sleep(seconds))
    said = []
    opened = open_model(str(tiny_dir), notify=said.append)
    assert said == lines and opened.seconds >= seconds
    time.sleep(0.4)
    assert said == lines


def test_threads_are_set_before_anything_runs(tiny_dir):
    assert torch.get_num_threads() != 1
    open_model(str(tiny_dir), RuntimeOptions(device="cpu", threads=1))
    assert torch.get_num_threads() == 1


def test_fp16_runs_without_our_cpu_kernels(tiny_dir):
    """They have caches in bf16 and fp32."""
    quant = "int4-g32"
    opened = open_model(str(tiny_dir))
    options = RuntimeOptions(device="cpu", quant=quant, dtype="fp16", max_seq_len=64)
    engine = opened.prepared(options).engine()
    assert engine.dtype == torch.float16 and engine.backend.name == "eager"
    assert len(generated(engine, 4)) == 4
    native = RuntimeOptions(device="cpu", quant=quant, dtype="fp16", cpu_kernels="native")
    with pytest.raises(FasteagleError, match="no fp16: use bf16 or fp32 in the precision"):
        opened.prepared(native)


def test_a_compiler_that_hangs_does_not_hold_the_answer(tiny_dir, monkeypatch, tmp_path, capsys):
    """Neither our kernels nor Inductor wait for it; one line each says what is done instead."""
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\nsleep 60\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cpu_build, "_loaded", {})
    monkeypatch.setattr(cpu_build, "PROBE_LIMIT", 1.0)
    monkeypatch.setattr(cpu_build, "runnable", lambda: [cpu_build.ISAS[-2]])  # AVX2
    caches = (cpu_build.compiler, cpu_build.why_no_compiler)
    for cache in caches:
        cache.cache_clear()
    try:
        begin = time.monotonic()
        options = RuntimeOptions(device="cpu", quant="int4-g32", max_seq_len=64)
        engine = open_model(str(tiny_dir)).prepared(options).engine()
        assert missing_compiler() == "the compiler took more than 1 s"
        assert len(generated(engine, 4)) == 4 and time.monotonic() - begin < 30
    finally:
        monkeypatch.undo()
        for cache in caches:
            cache.cache_clear()
    lines = [line for line in capsys.readouterr().err.splitlines() if "CPU kernels" in line]
    begun, said = lines
    assert begun.startswith("compiling the CPU kernels")
    assert said.endswith("torch's own CPU kernels are used: the compiler took more than 1 s")
