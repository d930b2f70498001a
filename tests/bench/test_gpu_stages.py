"""Stages of the GPU check on the CPU, what they compute, and what they import."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from fasteagle.bench.gpu_check import gpu_tests, kernels, models, profile, stage
from fasteagle.bench.gpu_check.profile import Event
from fasteagle.decoding.cycle import EAGER
from fasteagle.errors import FasteagleError
from fasteagle.sampling import DrawKind
from helpers import captured_engine, random_target, tiny_config

ROOT = Path(__file__).parents[2]
ALLOWED = ("torch", "triton", "numpy", "safetensors", "transformers", "gguf", "torchao")


@pytest.mark.parametrize("name", ["captures", "invariance", "large"])
def test_a_stage_on_the_cpu(dry, name):
    code, found = dry(name)
    assert (code, found["problems"]) == (0, []) and found["lines"]


def test_captures_are_counted(dry):
    assert dry("captures")[1]["captured"] == 20


def short_of_time(monkeypatch, looks):
    """The time of a stage is over after so many looks at what is left of it."""
    left = iter([600.0] * looks)
    monkeypatch.setattr(stage.Context, "seconds_left", property(lambda self: next(left, 0.0)))


@pytest.mark.parametrize(
    ("looks", "lines"),
    [
        (5, ["there was time for 10 captures of 20", "10 captures, the last 6 took 0.0 MiB"]),
        (1, ["there was time for 2 captures of 20", "2 captures are too few to say whether"]),
    ],
)
def test_fewer_captures_than_asked_are_a_line(dry, monkeypatch, looks, lines):
    short_of_time(monkeypatch, looks)
    code, found = dry("captures")
    assert (code, found["problems"]) == (0, [])
    assert all(said.startswith(line) for said, line in zip(found["lines"], lines, strict=False))
    assert found["captured"] == 2 * looks
    assert "failed the next one works" in found["lines"][2]


def test_what_is_not_captured_or_leaks_is_a_problem(dry, monkeypatch):
    from fasteagle.bench.gpu_check import captures

    short_of_time(monkeypatch, 0)
    assert dry("captures")[1]["problems"] == ["captures: there was no time for a capture"]
    short_of_time(monkeypatch, 20)
    used = iter([0, 100 * 2**20])
    monkeypatch.setattr(captures, "used_bytes", lambda device: next(used))
    code, found = dry("captures")
    assert (code, found["problems"]) == (1, ["captures: captures leak: 100 MiB"])
    monkeypatch.setattr(captures.CapturedRunner, "captured", 1)
    code, found = dry("captures")
    assert found["problems"] == ["captures: 1 of 2 cycles were captured"]


def test_other_tokens_of_replayed_cycles_are_a_problem(dry, monkeypatch):
    from fasteagle.bench.gpu_check import captures

    answers = iter([[1], [2], [1]])
    monkeypatch.setattr(captures, "answer", lambda engine: next(answers))
    code, found = dry("captures")
    assert code == 1
    assert found["problems"] == [
        "replayed tokens: replayed cycles give other tokens than eager ones"
    ]


def test_a_stage_that_raises_leaves_what_it_knew(dry, monkeypatch, capsys):
    from fasteagle.bench.gpu_check import large

    def fails(context):
        context.say("so far")
        raise FasteagleError("this card is too small")

    monkeypatch.setattr(large, "run", fails)
    code, found = dry("large")
    assert (code, found["lines"]) == (2, ["so far"])
    assert capsys.readouterr().out.splitlines()[-1] == "error: this card is too small"


def test_a_card_without_memory_gets_a_line(dry, monkeypatch):

    monkeypatch.setattr(models, "available_bytes", lambda device: 1000)
    code, found = dry("large")
    assert code == 0 and len(found["lines"]) == 3
    assert all("is left out: int4 needs" in line for line in found["lines"][1:])
    code, found = dry("profile")
    assert code == 0 and len(found["lines"]) == 2


def test_a_card_that_is_just_too_small_gets_a_smaller_cache(dry, monkeypatch):
    from fasteagle.bench.gpu_check import large

    asked = []
    monkeypatch.setattr(
        models, "needed_bytes", lambda config, kind, head: 900 + 200 * (kind.kv == "auto")
    )
    monkeypatch.setattr(models, "available_bytes", lambda device: 1000)
    monkeypatch.setattr(large, "measure_rows", lambda *arguments: asked.append(arguments[-2:]))
    monkeypatch.setattr(large, "captured_passes", lambda *arguments: asked.append(arguments[-1]))
    monkeypatch.setattr(large, "show_passes", lambda *arguments: None)
    assert dry("large")[0] == 0
    names = ("vicuna-33b int4, kv int8", "llama2-70b int4, kv int8")
    assert asked == ["int8", (names[0], "int8"), "int8", (names[1], "int8")]


def test_kernels_are_measured_beside_their_limit(dry):
    code, found = dry("kernels")
    assert (code, found["problems"]) == (0, [])
    names = {(t["kernel"], t["accumulate"]) for t in found["timings"]}
    assert {("int4-g128", "fp16"), ("int4-g128-offsets", "fp32"), ("fp16", "-")} <= names
    assert {t["rows"] for t in found["timings"]} == set(kernels.ROWS)
    assert {t["model"] for t in found["timings"]} == set(kernels.MODELS)


def test_our_kernels_are_predicted_and_others_are_not():
    card = kernels.card_of(torch.device("cpu"), 900.0, None)
    at_3090 = kernels.predicted_us("int4-g128", 22016, 4096, 16, "fp16", card)
    assert 50 < at_3090 < 80, "47.9 MB at 936 GB/s are 51 us"
    assert kernels.predicted_us("int8", 22016, 4096, 16, "fp16", card) > 1.5 * at_3090
    faster = dataclasses.replace(card, gb_s=4 * card.gb_s)
    assert kernels.predicted_us("int4-g128", 22016, 4096, 16, "fp16", faster) < at_3090
    assert kernels.predicted_us("fp16", 4096, 4096, 1, "fp32", card) is None


def test_a_product_takes_the_longer_of_reading_and_multiplying():
    # 1 MB at 100 GB/s are 10 us; 2 * 4096^2 * 16 operations at 100 TFLOP/s are 5.4 us.
    assert kernels.limit_us(4096, 4096, 1, 1000.0, 100.0, 100.0) == pytest.approx(10)
    assert kernels.limit_us(4096, 4096, 64, 1000.0, 100.0, 100.0) == pytest.approx(21.47, rel=1e-3)
    assert kernels.limit_us(4096, 4096, 64, 1000.0, 100.0, None) == pytest.approx(10)


def test_nodes_idle_share_and_kernels_of_a_cycle():
    events = [
        Event("void gemm<int, 4>(float*)", 0, 10),
        Event("void gemm<int, 8>(float*)", 5, 20),  # beside the first one
        Event("norm", 30, 40),
    ]
    found = profile.described(events, 2)
    assert found["nodes"] == 1.5
    assert found["busy_ms"] == pytest.approx(30 / 2 / 1000)
    assert found["idle"] == pytest.approx(0.25)
    assert found["kernels"] == [
        {"name": "gemm", "calls": 1.0, "us": 12.5, "us_each": 12.5},
        {"name": "norm", "calls": 0.5, "us": 5.0, "us_each": 10},
    ]
    assert profile.described([], 2)["idle"] is None


def test_rivals_are_measured_before_the_trees_that_take_long(dry, monkeypatch):
    from fasteagle.bench.gpu_check import speed

    measured = []
    monkeypatch.setattr(
        speed, "measure_rows", lambda *args: measured.append((args[2], args[3], args[5]))
    )
    assert dry("speed")[0] == 0
    firsts = [rows[0] for _, rows, _ in measured[:2]]
    assert firsts == ["hf", "plain"] and measured[1][1][-1] == "gpt-fast"
    assert len(set(measured)) == len({(p, kv, rows[-1]) for p, rows, kv in measured}) == 10
    trees = {(p, row) for p, rows, kv in measured for row in rows if kv == "auto"}
    assert trees >= {(p, row) for p in speed.PRECISIONS for row in speed.EAGLE}


@pytest.mark.parametrize("name", ["profile", "captures", "invariance"])
def test_stages_replay_compiled_pieces(dry, monkeypatch, name):
    """Compilation is left out of dry runs: here its place, before anything is replayed."""
    module = importlib.import_module(f"fasteagle.bench.gpu_check.{name}")
    compiled = []

    def compile_pieces(context, engine):
        assert engine.runner.captured == 0 or compiled, "captured before it was compiled"
        compiled.append(engine.drafter and str(engine.drafter.shape))
        return 2

    monkeypatch.setattr(module, "compile_pieces", compile_pieces)
    code, found = dry(name)
    assert (code, found["problems"]) == (0, [])
    used = {"profile": 2 * [None, "5/4/15"], "captures": ["3/3/8"]}
    trees = [str(tree) for tree in getattr(module, "TREES", ())]
    assert len(compiled) == len(used.get(name, 2 * [None, *trees]))
    assert "compiled_pieces" in json.dumps(found)


def test_a_stage_says_which_pieces_are_not_compiled(monkeypatch):
    engine = captured_engine(random_target(tiny_config()), 64)
    context = stage.Context(Path("unused"), Path("unused"), 60)
    whole = EAGER._replace(draft=lambda *given: None, finish=lambda *given: None)
    monkeypatch.setattr(models, "compile_now", lambda engine: False)
    with pytest.raises(FasteagleError, match="0 pieces of 0 variants are compiled, of 1 var"):
        models.compile_pieces(context, engine)
    engine.runner.compiled[None, engine.spec(None, DrawKind())] = EAGER
    with pytest.raises(FasteagleError, match="0 pieces of 1 variants"):
        models.compile_pieces(context, engine)
    engine.runner.compiled[None, engine.spec(None, DrawKind())] = whole
    assert models.compile_pieces(context, engine) == 2


BLOCKED = """
import builtins, sys
real = builtins.__import__
def without(name, globals=None, locals=None, fromlist=(), level=0):
    if level == 0 and name.split(".")[0] in {blocked!r}:
        raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
    return real(name, globals, locals, fromlist, level)
builtins.__import__ = without
"""


def absent_packages() -> set[str]:
    """Modules of what is installed here and not on a borrowed machine."""
    present = {"pytest"}
    waiting = [*ALLOWED, "pytest"]
    while waiting:
        name = waiting.pop()
        try:
            needs = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        for need in needs:
            other = re.split(r"[^\w.-]", need, maxsplit=1)[0].lower().replace("_", "-")
            if "extra ==" not in need and other not in present:
                present.add(other)
                waiting.append(other)
    present |= set(ALLOWED)
    found = metadata.packages_distributions()
    return {
        module
        for module, owners in found.items()
        if not module.startswith("_")
        and module not in ("fasteagle", "compile", "quant", "setuptools", "pkg_resources")
        and not {owner.lower().replace("_", "-") for owner in owners} & present
    }


def test_the_check_needs_no_package_that_a_borrowed_machine_lacks():
    """Every stage's module, the scripts they run, and the test files marked gpu can be imported."""
    blocked = absent_packages()
    assert {"fastapi", "hypothesis", "openai", "llguidance", "sentencepiece"} <= blocked
    stages = [f"fasteagle.bench.gpu_check.{name}" for name in stage.STAGE_NAMES]
    stages += ["fasteagle.bench.gpu_check.first_token", "fasteagle.cli.main"]
    stages += ["fasteagle.training.generate_data", "fasteagle.training.train_head"]
    tests = [path.stem for path in gpu_tests.marked_files(ROOT / "tests")]
    assert {"test_kernels", "test_tree_attention", "test_cycles"} <= set(tests)
    folders = {str(p.parent) for p in gpu_tests.marked_files(ROOT / "tests")}
    folders |= {str(ROOT / "tests"), str(ROOT / "scripts")}
    code = BLOCKED.format(blocked=blocked) + f"sys.path[:0] = {sorted(folders)!r}\n"
    code += "import importlib\n"
    code += f"for name in {[*stages, *tests, 'conftest', 'bench_kernels', 'gpu_check']!r}:\n"
    code += "    importlib.import_module(name)\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]


def test_stages_do_not_import_what_they_measure_before_they_run():
    """The interpreter's switch must be set before the kernels are imported."""
    code = (
        "import sys, fasteagle.bench.gpu_check.start; "
        "print('fasteagle.quant.kernels' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


def test_the_docs_name_what_the_check_needs():
    text = (ROOT / "docs" / "measuring.md").read_text("utf-8")
    needs = re.search(r"^It needs .*?\.$", text, re.MULTILINE | re.DOTALL)
    assert needs is not None
    assert [name for name in (*ALLOWED, "pytest") if name not in needs[0].lower()] == []
