"""Stages of `gpu_check.py`: what a machine with a GPU is given to do, and in which order."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fasteagle.loading.registry import REGISTRY, local_wheel_file
from fasteagle.options import DEFAULT_MODEL
from fasteagle.paths import write_atomic

ROOT = Path(__file__).resolve().parent.parent
TREES = ("3/1/3", "4/3/7", "5/4/15", "5/4/23", "6/5/31")
PACKAGES = "torchao", "gguf"
# Prompts of the stages `contexts` and `context_16000`, in tokens.
PROMPTS = {"contexts": (128, 1024, 3900), "context_16000": (16000,)}
DRY_PROMPT = 16
MOST_PROCESSES = 8  # of tests beside each other: each has a context of its own on the card
DRY = ("--model", "smollm2-135m", "--device", "cpu")
DRY_ROWS = (
    *(*DRY, "--cpu-kernels", "aten", "--no-compile", "--max-new-tokens", "4"),
    *("--load-format", "dummy", "--rows", "plain,eagle@2/2/3", "--simulate-tau", "2"),
    *("--max-seq-len", "256"),
)
DRY_KERNELS = (*DRY, "--linears", "out", "--kernels", "int4-g64,fp16", "--rows", "1,4")
DRY_PROFILE = (*DRY, "--no-compile", "--cycles", "1", "--passes", "1,2", "--tree", "2/2/3")
START = """
import shutil, subprocess, torch
from fasteagle.device import device_name, pick_device
device = pick_device({device!r})
print(device_name(device), "torch", torch.__version__, "CUDA", torch.version.cuda)
if device.type == "cuda":
    print(torch.cuda.get_device_properties(device))
if shutil.which("nvidia-smi"):
    subprocess.run(["nvidia-smi"], check=False)
"""
# Fused blocks run, and plain cycles are captured and replayed.
FUSED = """
from fasteagle.loading.open import open_dummy
from fasteagle.options import RuntimeOptions, SamplingParams
options = RuntimeOptions(device={device!r}, max_seq_len=256).at("int4")
engine = open_dummy("smollm2-135m").prepared(options).engine()
for prompt in (range(5, 40), range(5, 140)):
    print([token for new in engine.generate(list(prompt), SamplingParams(), 8) for token in new])
print(engine.backend.describe(), "| graphs:", getattr(engine.runner, "captured", None))
assert engine.on_cpu or not engine.backend.leaves_blocks, "no fused blocks"
"""
CAPTURED = "assert engine.on_cpu or engine.runner.captured, engine.runner.error\n"
# Each tensor has memory of its own, so that an access beyond it is seen. No graph can be captured
# then, which is no error here: cycles run without.
SANITIZED = """
import os, shutil, subprocess, sys
os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
tool = shutil.which("compute-sanitizer")
if tool is None:
    sys.exit({missing})
checked = [tool, "--report-api-errors", "no", "--error-exitcode", "3", sys.executable, "-c"]
sys.exit(subprocess.run([*checked, {code!r}]).returncode)
"""


@dataclasses.dataclass(frozen=True)
class Stage:
    """Command of one stage: words after `python`, with {out} and {json} for its results' places."""

    name: str
    what: str
    words: Sequence[str]
    dry_words: Sequence[str] = ()  # after the others on a dry run: the last of an option counts
    minutes: float = 4.0  # at most
    needed: bool = False  # the others have no meaning where this one fails
    caches: str = "caches"  # folder of what compilers keep


def rows_of(name: str, model: str, precision: str, rows: str, *more: str, **settings: Any) -> Stage:
    """Return a stage of `tokens_per_sec.py` on random weights; tau 3.6 is EAGLE's on MT-bench."""
    words = ["scripts/tokens_per_sec.py", "--model", model, "--load-format", "dummy"]
    words += ["--precision", precision, "--rows", rows, "--limit", "1", "--md", "--save-outputs"]
    words += ["--json", "{json}", *(("--simulate-tau", "3.6") if "eagle" in rows else ()), *more]
    what = settings.pop("what", f"tokens per second of {model}, {precision}: {rows}")
    return Stage(name, what, words, DRY_ROWS, **settings)


def kernels_of(name: str, accumulate: str) -> Stage:
    words = ["scripts/bench_kernels.py", "--model", "llama2-7b,vicuna-33b", "--md"]
    words += ["--accumulate", accumulate, "--json", "{json}"]
    return Stage(name, f"linears of 7B and 33B alone, sums in {accumulate}", words, DRY_KERNELS)


def profile_of(name: str, model: str) -> Stage:
    words = ["scripts/profile_cycle.py", "--model", model, "--json", "{json}"]
    return Stage(name, f"passes and kernels of {model} int4, idle time", words, DRY_PROFILE)


def context_of(name: str, model: str) -> Stage:
    """Return a stage with prompts of `PROMPTS`: time to the first token, and decoding after it."""
    longest = max(PROMPTS[name])
    more = ["--data", f"{{out}}/{name}.jsonl", "--limit", "3", "--max-new-tokens", "64"]
    what = f"prefill of {longest:,} tokens and decoding after them, {model} int4"
    more += ["--max-seq-len", str(longest + 192)]
    return rows_of(name, model, "int4", "plain,eagle@5/4/15", *more, what=what)


def test_stages() -> list[Stage]:
    """Return stages for the tests marked gpu: all but those that follow, and last the leak test.

    Files are chosen by their text: others may need packages that a borrowed machine lacks. The
    first stage runs in several processes, because its time goes into compilers; no other test
    beside captures takes memory.
    """
    pytest = ["-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", "-m", "gpu", "-v"]
    pytest += ["--tb=short"]
    files = [
        path
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if re.search(r"pytest\.mark\.gpu\b", path.read_text("utf-8"))
    ]
    alone = [path for path in files if path.stem == "test_on_a_card"]
    capturing = [path for path in files if path.stem in ("test_graphs", "test_cycles")]
    others = [str(path) for path in files if path not in [*alone, *capturing]]
    beside = []
    if importlib.util.find_spec("xdist") is not None:
        beside = ["-n", str(max(1, min(MOST_PROCESSES, (os.cpu_count() or 1) // 2)))]
    captures, alone = ([*pytest, "-s", *map(str, paths), "-k"] for paths in (capturing, alone))
    return [
        Stage("gpu_tests", "tests marked gpu but those of captures", [*pytest, *beside, *others]),
        Stage("captures", "tests of captures", [*captures, "not leak"]),
        Stage("several", "texts that share captured passes", [*alone, "together"]),
        Stage("chat", "answers while code is compiled", [*alone, "background"], minutes=5),
        Stage("leak", "memory after 150 captures", [*captures, "leak"]),
    ]


def all_stages(dry_run: bool, carried: Path) -> list[list[Stage]]:
    """Return the groups of stages in order: the most informative come first.

    A group takes about nine minutes on a card; time may run out.
    """
    device = "cpu" if dry_run else "cuda"
    place_model(list(carried.rglob("model.gguf.*")))
    trees = ",".join(f"eagle@{tree}" for tree in TREES)
    cold = ("--no-compile", "--max-new-tokens", "16")
    fused = FUSED.format(device=device)
    install = ["-m", "pip", "install", "--no-index", "--no-deps"]
    wheels = [str(path) for path in sorted(carried.rglob("*.whl"))]
    packages = [Stage("packages", ", ".join(PACKAGES), [*install, *wheels], minutes=2)]
    ours = ["scripts/tokens_per_sec.py", "--device", "cuda", "--precision", "auto", "--md"]
    ours += ["--rows", "plain,eagle,ngram,fused", "--json", "{json}"]
    turns = ["-m", "pytest", "-o", "addopts=", "-v", "-k", "second_turn"]
    missing = "0" if dry_run else "'compute-sanitizer is not installed'"
    sanitized = SANITIZED.format(missing=missing, code=fused)
    return [
        [
            Stage("start", "the device", ["-c", START.format(device=device)], (), 1, needed=True),
            Stage("first", "a fused pass, a captured cycle", ["-c", fused + CAPTURED], minutes=3),
            Stage("facts", "versions", ["-m", "torch.utils.collect_env"], minutes=1),
            *(packages if wheels else []),
            *test_stages(),
        ],
        [
            kernels_of("kernels", "fp16"),
            profile_of("profile_7b", "llama2-7b"),
            profile_of("profile_33b", "vicuna-33b"),
            rows_of("large_33b", "vicuna-33b", "int4", "plain,eagle@5/4/15,eagle@6/5/31"),
        ],
        [
            Stage("two_turns", "bits of a second turn", [*turns, "tests/test_row_invariance.py"]),
            rows_of("cold_start", "llama2-7b", "int4", "plain", *cold, caches="cold", minutes=3),
            rows_of("warm_start", "llama2-7b", "int4", "plain", *cold, caches="cold", minutes=3),
            rows_of("speed_int4", "llama2-7b", "int4", f"plain,{trees},fused@5/4/15/8", minutes=8),
        ],
        [
            context_of("contexts", "llama2-7b"),
            context_of("context_16000", "llama3.1-8b"),
            Stage("sanitizer", "compute-sanitizer over a fused pass", ["-c", sanitized]),
            Stage("default_model", "real text and tau", ours, DRY_ROWS, minutes=6),
            rows_of("large_70b", "llama2-70b", "int4", "plain,eagle@5/4/15,eagle@6/5/31"),
            rows_of("speed_int8", "llama2-7b", "int8", "plain,eagle@5/4/15"),
            rows_of("speed_bf16", "llama2-7b", "bf16", "hf,plain,eagle@5/4/15"),
            rows_of("speed_kv8", "llama2-7b", "int4", "plain,eagle@5/4/15", "--kv", "int8"),
            rows_of("gpt_fast", "llama2-7b", "int4", "plain,gpt-fast"),
            kernels_of("kernels_fp32", "fp32"),
        ],
    ]


def place_model(parts: Sequence[Path]) -> None:
    """Join `parts` to the default model's file in the cache, unless it is there.

    Their names end in 1of2 and the like; nothing is made of some of them.
    """
    wheel = REGISTRY[DEFAULT_MODEL].wheel
    assert wheel is not None, "it comes in a wheel"
    place = local_wheel_file(DEFAULT_MODEL, wheel)
    is_whole = bool(parts) and len(parts) == int(parts[0].name.rpartition("of")[2])
    if is_whole and not place.exists():
        data = [path.read_bytes() for path in sorted(parts, key=lambda path: path.name)]
        write_atomic(place, b"".join(data))
